"""Text: tokenizer, chat template, incremental detokenizer, stop strings, bodies of OpenAI requests.

The gateway and the offline API use it. It imports neither torch nor `transformers`.
"""
