"""Text: tokenizer, chat template, incremental detokenizer, stop strings, OpenAI schemas.

Torch-free and without `transformers`. The gateway comes in from HTTP, the offline API from Python.
"""
