"""The gateway: serves OpenAI's and Anthropic's APIs over HTTP and runs requests on engines.

This package imports no torch.

Subpackages:
    endpoints: the routes, and the responses of each API.
    http: connections, middlewares, request bodies, streams, TLS.
    requests: parse a request into sequences, run the sequences, convert tokens to text.
    access: API keys, admission, the scale-from-zero queue, graceful shutdown.
    routing: discovery, the pool of engines, the choice of an engine, retries.

Modules:
    cli: flags and configuration, the process's entry point.
    server: one gateway from start to shutdown.
    components: builds the HTTP applications, and the components between them and the engines.
    errors: failures as HTTP responses.
    metrics: the Prometheus metrics.
    thread_pool: a thread pool that keeps long work off the event loop.
"""
