"""Requests: converts OpenAI requests to sequences, and generated tokens to text.

Modules:
    job: the data of one HTTP request: prompts, runs and choices.
    job_builder: converts OpenAI requests to jobs, with all length and option checks.
    prompts: converts messages and texts to token ids, within length bounds.
    generation: runs a job's sequences and yields their text.
"""
