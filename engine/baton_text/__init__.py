"""Text: tokenizer, chat template, incremental detokenizer, stop strings and OpenAI schemas.

The gateway and the offline API use it. It imports neither torch nor `transformers`.
"""
