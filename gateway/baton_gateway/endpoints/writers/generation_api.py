"""The base classes of the APIs that generate text, and of the writers of their responses."""

from __future__ import annotations

import abc
import secrets
from typing import ClassVar, Generic, TypeVar

import msgspec

from baton_gateway.requests.job import Choice, Job
from baton_text.output import TextOutput
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.requests.completion_request import CompletionRequest
from baton_text.requests.parsing import LongRunning
from baton_text.tokenizer import Tokenizer

Body = TypeVar("Body", bound=LongRunning)
#: The requests that a job can run. Each API converts its bodies to one of these types.
GenerationBody = ChatCompletionRequest | CompletionRequest

#: Limit on the tokens and log-probabilities of a response or chunk that is encoded on the event
#: loop. A larger one is encoded in a thread.
INLINE_ENTRIES = 1024
#: Responses with more tokens and log-probabilities are encoded one after the other, because the
#: encoding of one response takes up to 400 MB.
LARGE_ENTRIES = 2**15


class GenerationAPI(abc.ABC, Generic[Body]):
    """One API that generates text: its path, the type of its request bodies, and its writers.

    Args:
        served_name: name of the served model.
        tokenizer: the model's tokenizer.
    """

    path: ClassVar[str]
    #: Type of the JSON body.
    body: type[Body]

    def __init__(self, served_name: str, tokenizer: Tokenizer) -> None:
        self._served_name = served_name
        self._tokenizer = tokenizer

    def earlier(self, body: Body, client: str | None) -> bytes:
        """Return, as JSON, the stored messages and responses to which a request of `client` refers.

        The result is empty if the request refers to none, or if the API stores no responses.

        Raises:
            APIError, RequestError: a response is not stored, or belongs to another client.
        """
        return b""

    @abc.abstractmethod
    def request(self, body: Body, earlier: bytes) -> GenerationBody:
        """Convert `body` to a request that a job can run.

        Args:
            body: the parsed body.
            earlier: the result of the method `earlier`.

        Raises:
            RequestError: a field cannot be converted.
        """

    @abc.abstractmethod
    def writer(self, body: Body, job: Job, client: str | None) -> GenerationWriter[Body]:
        """Return the writer that converts the outputs of `job` to a response for `client`."""


class GenerationWriter(abc.ABC, Generic[Body]):
    """Converts the outputs of one job to a complete response, or to the events of a stream.

    Args:
        body: the parsed body.
        job: the request's job.
        served_name: name of the served model.
        tokenizer: the model's tokenizer.
    """

    #: Data of the last event of a stream. If it is empty, the events of `closing` are the last.
    LAST_EVENT: ClassVar[bytes] = b"[DONE]"

    def __init__(self, body: Body, job: Job, served_name: str, tokenizer: Tokenizer) -> None:
        self.body = body
        self.job = job
        self.served_name = served_name
        self.tokenizer = tokenizer

    @abc.abstractmethod
    def response(self, outputs: list[tuple[Choice, TextOutput]]) -> msgspec.Struct:
        """Return the body of a response that is not streamed.

        Args:
            outputs: the choices of the response, each with its complete output.
        """

    @abc.abstractmethod
    def opening(self) -> list[msgspec.Struct]:
        """Return the events that a stream sends before the first token."""

    @abc.abstractmethod
    def events(self, choice: Choice, output: TextOutput, offset: int) -> list[msgspec.Struct]:
        """Return the events that a stream sends for `output`.

        Args:
            choice: the choice to which the output belongs.
            output: new text and tokens of the choice.
            offset: number of characters of all tokens whose logprobs were sent before, including
                tokens of an echoed prompt.
        """

    @abc.abstractmethod
    def closing(self) -> list[msgspec.Struct]:
        """Return the events that a stream sends after the last token."""

    def name(self, event: msgspec.Struct) -> str:
        """Return the name of an event in the stream, or an empty string if it has no name."""
        return str(getattr(event, "type", ""))


def new_call_id() -> str:
    """Return an id for a tool call."""
    # Templates of Mistral accept ids of nine letters and digits only.
    return secrets.token_hex(5)[:9]
