"""The base class of the writers whose streams consist of OpenAI's chunks."""

from __future__ import annotations

import abc
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from baton_gateway.endpoints.writers.generation_api import GenerationWriter
from baton_text.output import TextOutput
from baton_text.requests.generation_request import GenerationRequest
from baton_text.responses.openai import Usage

ChunkBody = TypeVar("ChunkBody", bound=GenerationRequest)


class ChunkWriter(GenerationWriter[ChunkBody]):
    """Base of the writers whose streams consist of OpenAI's chunks.

    A chunk has `usage` only if the request asks for usage. A choice has token ids only if the
    request asks for token ids.
    """

    def closing(self) -> list[msgspec.Struct]:
        return [self._chunk([], self.job.usage())] if self.body.include_usage else []

    @abc.abstractmethod
    def _chunk(self, choices: list[Any], usage: Usage | UnsetType | None) -> msgspec.Struct:
        """Return a chunk with `choices` and `usage`. UNSET: the chunk has no field `usage`."""

    def _choice_chunk(self, choice: msgspec.Struct) -> msgspec.Struct:
        """Return a chunk with one choice.

        The chunk has `usage` only if the request sets `include_usage`. Its value is null unless the
        request also sets `continuous_usage_stats`.
        """
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return self._chunk([choice], UNSET)
        usage = self.job.streamed_usage() if options.continuous_usage_stats else None
        return self._chunk([choice], usage)

    def _token_ids(self, output: TextOutput) -> list[int] | UnsetType:
        """Return the token ids of a choice; UNSET if the request does not ask for them."""
        return output.token_ids if self.body.return_token_ids else UNSET
