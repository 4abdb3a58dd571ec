"""The APIs that generate text: their requests, and the writers of their responses.

Modules:
    generation_api: the base classes of the APIs and of the writers.
    chunk_writer: the base class of the writers whose streams consist of OpenAI's chunks.
    chat_writer: OpenAI's `/v1/chat/completions`.
    completion_writer: OpenAI's `/v1/completions`.
    responses_writer: OpenAI's `/v1/responses`.
    messages_writer: Anthropic's `/v1/messages`.
"""
