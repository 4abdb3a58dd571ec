"""Conversion between text and tokens, and the bodies of requests and responses.

The gateway and the offline API use this package. It imports neither torch nor `transformers`.

requests             the bodies of requests, their fields and their checks
generation_defaults  default sampling parameters, from the checkpoint
chat_messages        converts chat messages to the form that chat templates take
chat_template        renders messages to a prompt text, in a process with limits
template_worker      the process that compiles and renders a chat template
tokenizer            converts text to token ids and back
detokenizer          converts token ids to pieces of text as they arrive
json_values          counts the values of a JSON text
stop_strings         ends a text at a stop string
score_prompts        joins two texts to the prompt of a classifier
reply_parsing        divides texts into reasoning, content and tool calls
output               converts the tokens of one sequence to text, with logprobs
responses            the JSON of responses, complete or as events of a stream
request_error        the error of an invalid request
"""
