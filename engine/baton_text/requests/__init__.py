"""The bodies of requests, their fields and their checks.

messages_request    the bodies of Anthropic's POST /v1/messages and its count_tokens
responses_request   the body of POST /v1/responses
chat_request        the body of POST /v1/chat/completions
completion_request  the body of POST /v1/completions
generation_request  the fields that chat completions and completions share, and their checks
pooling_requests    the bodies of requests to pooling models
prompt_forms        texts and token ids as prompts
tokenize_requests   the bodies of /tokenize and /detokenize
parsing             parses JSON bodies and checks the requests
structured_outputs  the fields of structured outputs, and bad words
"""
