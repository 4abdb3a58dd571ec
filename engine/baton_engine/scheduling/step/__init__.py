"""One step: what it runs, what the worker lacks, and what follows from its results.

builder         a step under construction
worker_mirror   what the worker has of each request, so that a step carries only changes
results         appends a step's tokens, and decides which requests end
"""
