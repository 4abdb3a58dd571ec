"""Writers of responses: they turn the outputs of a job into the JSON of one API.

Modules:
    response_writer: the base class of the writers.
    chat_writer: the JSON of `/v1/chat/completions`.
    completion_writer: the JSON of `/v1/completions`.
    responses_writer: the JSON of `/v1/responses`.
    messages_writer: the JSON of Anthropic's `/v1/messages`.
"""
