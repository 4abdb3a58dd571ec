"""The JSON of responses, complete or as events of a stream.

openai         /v1/chat/completions, /v1/completions, /tokenize, models, errors
responses_api  OpenAI's /v1/responses
anthropic      Anthropic's /v1/messages
pooling        /v1/embeddings, /v1/score and /v1/rerank
"""
