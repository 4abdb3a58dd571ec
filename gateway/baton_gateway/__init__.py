"""The gateway: serves the OpenAI API over HTTP and runs requests on prefill and decode engines.

This package imports no torch.

Subpackages:
    http: routes, request bodies, responses and streams, TLS.
    requests: parse a request into sequences, run the sequences, convert tokens to text.
    access: API keys, admission, the scale-from-zero queue, graceful shutdown.
    routing: discovery, the pool of engines, the choice of an engine, retries.

Modules:
    cli: flags and configuration, the process's entry point.
    server: one gateway from start to shutdown.
    errors: failures as HTTP responses.
    metrics: the Prometheus metrics.
    thread_pool: a thread pool that keeps long work off the event loop.
"""
