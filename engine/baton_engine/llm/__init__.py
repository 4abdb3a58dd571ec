"""The offline API: an engine in the caller's process.

llm           `LLM`: generate, chat, beam_search
params        sampling and beam-search parameters, and their checks
prompts       forms of prompts and conversations, and their checks
outputs       results
engine_args   converts keyword arguments of `LLM` to an EngineConfig
collectors    join the engine's outputs for a prompt into one result
step_loop     runs the engine until all prompts are done
"""
