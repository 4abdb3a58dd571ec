"""The offline API: an engine in the caller's process.

llm              `LLM`: generate, chat, beam_search, embed, score
async_llm        `AsyncLLM`: generate and chat for asyncio, with streams
local_model      what `LLM` and `AsyncLLM` share: the engine core, the tokenizer, defaults
model_fetch      downloads a model that is not a local folder
params           sampling and beam-search parameters, and their checks
prompt_inputs    forms of prompts and conversations, and their checks
outputs          results
engine_args      converts keyword arguments of `LLM` to an EngineConfig
collectors       join the engine's outputs for a prompt into one result
step_loop        runs the engine until all prompts are done
async_step_loop  runs the engine in a thread, and hands its outputs to event loops
"""
