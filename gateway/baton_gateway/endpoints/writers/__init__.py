"""The APIs that generate text: their requests, and the writers of their responses.

Modules:
    response_writer: the base classes of the APIs and of the writers.
    chat_writer: OpenAI's `/v1/chat/completions`.
    completion_writer: OpenAI's `/v1/completions`.
    responses_writer: OpenAI's `/v1/responses`.
    messages_writer: Anthropic's `/v1/messages`.
"""
