"""The endpoints that clients call.

Modules:
    routes: the URL table and the middleware.
    generation_endpoint: the endpoints that generate text.
    writers: the JSON of the responses of each API.
    stored_responses: GET and DELETE of `/v1/responses/{id}`.
    pooling_endpoints: `/v1/embeddings`, `/v1/score` and `/v1/rerank`.
    request_reader: reads the bodies of both kinds of endpoints.
    request_deadline: the time in which a request must end.
    tokenize_endpoints: `/tokenize`, `/detokenize` and `/v1/messages/count_tokens`.
    status_endpoints: models, health, readiness, metrics, version.
    openapi: `/openapi.json`.
"""
