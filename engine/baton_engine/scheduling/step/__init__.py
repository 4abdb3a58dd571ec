"""One step: what it runs, what the worker lacks, and what follows from its results.

builder         a step under construction
in_flight       counts tokens in flight, and decides whether a request may run ahead
worker_mirror   what the worker has of each request, so that a step carries only changes
results         appends a step's tokens, and decides which requests end
"""
