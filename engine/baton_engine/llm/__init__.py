"""The offline API: an engine core in the caller's process, prompts in, texts out. See `baton_engine.LLM`."""
