"""Default sampling parameters, read from a checkpoint's generation_config.json.

They replace fields that a request leaves out. vLLM applies the same fields.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from baton_protocol.checkpoint_files import read_file
from baton_protocol.sampling_params import SamplingParams
from baton_text.requests.generation_request import GenerationRequest

FILE = "generation_config.json"
#: Limit on integers. Messages to engines cannot hold every integer that JSON can.
MAX_INTEGER = 2**31 - 1


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Default parameters from a checkpoint. Baton's default applies to a field that is None."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    #: Maximum number of generated tokens.
    max_tokens: int | None = msgspec.field(default=None, name="max_new_tokens")

    @classmethod
    def from_folder(cls, folder: Path) -> GenerationDefaults:
        """Read generation_config.json in a checkpoint's folder.

        If the file does not exist, all fields of the result are None.

        Raises:
            ValueError: the file is malformed, or a value is out of bounds.
        """
        file = folder / FILE
        try:
            defaults = msgspec.json.decode(read_file(folder, FILE), type=cls)
            for name in ("top_k", "max_tokens"):
                if (getattr(defaults, name) or 0) > MAX_INTEGER:
                    raise ValueError(f"{name} must be at most {MAX_INTEGER}")
            SamplingParams(**defaults.sampling_fields(), max_tokens=defaults.max_tokens).validate()
        except FileNotFoundError:
            return cls()
        # msgspec's errors are ValueErrors. Deeply nested values raise RecursionError.
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} cannot be used: {error}") from error
        return defaults

    def sampling_fields(self) -> dict[str, Any]:
        """Return the values that are set, by their names in SamplingParams. Leave out max_tokens.

        The gateway applies `max_tokens` itself, because that limit depends on the prompt's length.
        """
        return {
            name: value
            for name in self.__struct_fields__
            if name != "max_tokens" and (value := getattr(self, name)) is not None
        }

    def fill(self, request: GenerationRequest) -> None:
        """Set the sampling fields that the request leaves out.

        A beam search is not changed, because it does not sample.
        """
        if request.use_beam_search:
            return
        for name, value in self.sampling_fields().items():
            if getattr(request, name) is None:
                setattr(request, name, value)
