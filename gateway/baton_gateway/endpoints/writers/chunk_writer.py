"""The base class of the writers whose streams consist of OpenAI's chunks."""

from __future__ import annotations

from typing import TypeVar

from msgspec import UNSET, UnsetType

from baton_gateway.endpoints.writers.generation_api import GenerationWriter
from baton_text.output import TextOutput
from baton_text.requests.generation_request import GenerationRequest
from baton_text.responses.openai import Usage

ChunkBody = TypeVar("ChunkBody", bound=GenerationRequest)


class ChunkWriter(GenerationWriter[ChunkBody]):
    """Decides which chunks of a stream have `usage`, and which choices have token ids."""

    def _chunk_usage(self) -> Usage | UnsetType | None:
        """Return the usage of a chunk with choices; UNSET if the chunk has no field `usage`."""
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return UNSET
        return self.job.streamed_usage() if options.continuous_usage_stats else None

    def _final_usage(self) -> Usage | None:
        """Return the usage of a last chunk without choices; None if there is no such chunk."""
        return self.job.usage() if self.body.include_usage else None

    def _token_ids(self, output: TextOutput) -> list[int] | UnsetType:
        """Return the token ids of a choice; UNSET if the request does not ask for them."""
        return output.token_ids if self.body.return_token_ids else UNSET
