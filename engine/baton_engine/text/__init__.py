"""Text: tokenizer, chat template, incremental detokenizer, stop strings, OpenAI schemas.

Torch-free and without `transformers`. The gateway comes in from HTTP; an offline API may come in from Python.
"""
