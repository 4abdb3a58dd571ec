"""Requests: from an OpenAI request to sequences on engines, and from their tokens to text.

Modules:
    job: one HTTP request as data: prompts, runs and choices.
    job_builder: OpenAI requests to jobs, with all length and option checks.
    prompts: messages and texts to token ids, within length bounds.
    generation: runs a job's sequences and yields their text.
"""
