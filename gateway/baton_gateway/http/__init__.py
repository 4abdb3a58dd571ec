"""HTTP: the requests of clients and the responses to them.

Modules:
    routes: the URL table and the middleware.
    generation_endpoint: the base class of both generation endpoints.
    chat_endpoint: `/v1/chat/completions`.
    completion_endpoint: `/v1/completions`.
    tokenize_endpoints: `/tokenize` and `/detokenize`.
    status_endpoints: models, health, readiness, metrics, version.
    body_budget: reading of request bodies, within limits on time and bytes.
    request_body: parsing of request bodies.
    cors: access for browser pages of other origins.
    event_stream: the server-sent events of one response.
    slow_clients: responses to clients that do not read.
    request_id: the id of a request, in its response and in log lines.
    connections: limits on connections and on idle time, and the response to invalid HTTP.
    listener: the listening sockets.
    tls: the server's certificate, which is read again when its files change.
"""
