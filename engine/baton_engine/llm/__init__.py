"""The offline API: an engine in the caller's process.

llm           `LLM`: generate, chat, beam_search
params        sampling and beam-search parameters, checked at once
outputs       results
engine_args   keyword arguments of `LLM` and the configuration they make
collectors    from tokens to the result of one prompt
step_loop     runs the engine until all prompts are done
"""
