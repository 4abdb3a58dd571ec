"""HTTP: connections, request bodies, streams, TLS.

Modules:
    body_budget: reading of request bodies, within limits on time and bytes.
    request_body: parsing of request bodies.
    cors: access for browser pages of other origins.
    event_stream: the server-sent events of one response.
    slow_clients: responses to clients that do not read.
    request_id: the id of a request, in its response and in log lines.
    middlewares: request counts, error responses, authentication.
    connections: limits on connections and on idle time, and the response to invalid HTTP.
    listener: the listening sockets.
    tls: the server's certificate, which is read again when its files change.
"""
