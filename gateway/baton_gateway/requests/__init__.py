"""Requests: converts requests to sequences, and generated tokens to text.

Modules:
    job: the data of one HTTP request: prompts, sequences to run, choices of the response.
    job_builder: converts OpenAI requests to jobs, with all length and option checks.
    cache_salts: keeps the cached prompts of clients apart.
    response_store: keeps the conversations of `/v1/responses`.
    prompts: converts messages and texts to token ids, within length bounds.
    generator: runs a job's sequences and yields their text.
    output_queue: the outputs of a job that wait for its endpoint.
    pooling_jobs: jobs for pooling models, and their vectors.
"""
