"""The gateway: OpenAI HTTP in, tokens through prefill and decode engines, text out. Never torch."""
