"""The endpoints that clients call.

Modules:
    routes: the URL table and the middleware.
    generation_endpoint: the endpoints that generate text.
    response_writer: the base class of the writers of responses.
    chat_writer: the JSON of `/v1/chat/completions`.
    completion_writer: the JSON of `/v1/completions`.
    responses_writer: the JSON of `/v1/responses`.
    stored_responses: GET and DELETE of `/v1/responses/{id}`.
    messages_writer: the JSON of Anthropic's `/v1/messages`.
    pooling_endpoints: `/v1/embeddings`, `/v1/score` and `/v1/rerank`.
    request_reader: reads the bodies of both kinds of endpoints.
    request_deadline: the time in which a request must end.
    tokenize_endpoints: `/tokenize`, `/detokenize` and `/v1/messages/count_tokens`.
    status_endpoints: models, health, readiness, metrics, version.
    operations: the operations of all paths, and their errors.
    openapi: `/openapi.json`.
    schemas: the JSON schemas of bodies, for `/openapi.json`.
"""
