"""Text: tokenizer, chat template, incremental detokenizer, stop strings, bodies of OpenAI requests.

The gateway and the offline API use it. It imports neither torch nor `transformers`.

chat_request        the body of POST /v1/chat/completions
completion_request  the body of POST /v1/completions
generation_request  the fields that both have, and their checks
tokenize_requests   the bodies of /tokenize and /detokenize
parsing             JSON bodies to checked requests
messages            chat messages to the form that chat templates take
chat_template       messages to a prompt text
structured_outputs  the fields of structured outputs, and bad words
tokenizer           text to token ids
detokenizer         token ids to pieces of text
stop                stop strings
output              the tokens of one sequence to text, with logprobs
responses           OpenAI responses, whole or as chunks of a stream
errors              the error of an invalid request
"""
