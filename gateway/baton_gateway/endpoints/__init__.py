"""The endpoints that clients call.

Modules:
    generation_endpoint: the endpoints that generate text.
    stream_sender: sends the outputs of a job as the events of a stream.
    writers: the APIs that generate text: their requests and the JSON of their responses.
    stored_responses: GET and DELETE of `/v1/responses/{id}`.
    pooling_endpoints: `/v1/embeddings`, `/v1/score` and `/v1/rerank`.
    request_services: the parts that all endpoints use; reads bodies and sends responses.
    request_deadline: the time in which a request must end.
    tokenize_endpoints: `/tokenize`, `/detokenize` and `/v1/messages/count_tokens`.
    status_endpoints: models, health, readiness, metrics, version.
    openapi: `/openapi.json`.
"""
