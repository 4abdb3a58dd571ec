"""A model in the caller's process: its engine core, tokenizer and default sampling parameters."""

from __future__ import annotations

import itertools
import random
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack

import msgspec

from baton_engine.core.engine_core import EngineCore
from baton_engine.executor.base import executor_name, load_executor_class
from baton_engine.fetch.cached_model import find_cached_model
from baton_engine.llm.collectors import (
    BeamsCollector,
    Prompt,
    SamplesCollector,
    VectorCollector,
)
from baton_engine.llm.engine_args import EngineArgs, engine_config
from baton_engine.llm.model_fetch import fetch_model
from baton_engine.llm.outputs import Metric
from baton_engine.llm.params import SamplingParams
from baton_engine.llm.prompt_inputs import Message, as_conversations, render_conversation
from baton_engine.metrics.prometheus import engine_registry
from baton_protocol.engine_messages import EngineCoreRequest
from baton_protocol.pooling_params import NO_SAMPLING, PairFormat, PoolingParams
from baton_protocol.sampling_params import SamplingParams as WireSamplingParams
from baton_text.chat_template import ChatTemplate
from baton_text.generation_defaults import GenerationDefaults
from baton_text.score_prompts import encode_pair
from baton_text.tokenizer import Tokenizer

_Params = TypeVar("_Params", SamplingParams, PoolingParams)


class LocalModel:
    """The engine core, tokenizer and default parameters of an `LLM` or `AsyncLLM`.

    Args:
        model, seed, generation_config, revision, download_dir, args: as in `LLM`.

    Raises:
        ConfigurationError: the model or the configuration cannot be served.
        OSError: the cache of models is not writable.
        TypeError: an argument does not exist.
        ValueError: a value has the wrong type or is out of bounds.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        seed: int,
        generation_config: Literal["auto", "none"],
        revision: str | None,
        download_dir: str | Path | None,
        **args: Unpack[EngineArgs],
    ) -> None:
        if not isinstance(model, str | Path) or not str(model):
            raise ValueError(
                f"model must be the folder of a checkpoint, or the name of a model, got {model!r}"
            )
        if generation_config not in ("auto", "none"):
            raise ValueError(
                f'generation_config must be "auto" or "none", got {generation_config!r}'
            )
        cached = find_cached_model(model, revision, download_dir)
        folder = Path(model) if cached is None else cached.folder
        self._name = Path(model).name if cached is None else cached.name
        self.config = engine_config(folder, args)
        if cached is not None:
            fetch_model(cached)
        #: Set when the core may have new work.
        self.wakeup = threading.Event()
        executor_class = load_executor_class(executor_name(self.config))
        executor = executor_class(self.config, uuid.uuid4().hex, self.wakeup.set)
        # Worker processes and threads end with this object, even without close().
        self._finalizer = weakref.finalize(self, executor.shutdown)
        try:
            self.core = EngineCore(self.config, executor)
            self.tokenizer = Tokenizer.from_folder(folder)
            self._defaults = (
                GenerationDefaults.from_folder(folder)
                if generation_config == "auto"
                else GenerationDefaults()
            )
        except BaseException:
            self._finalizer()
            raise
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, self.core.shutdown)
        #: The last template that a caller passed. Calls with the same source reuse it.
        self._given_template: ChatTemplate | None = None
        self._seeds = random.Random(seed)
        self._ids = itertools.count()

    @property
    def is_open(self) -> bool:
        return self._finalizer.alive

    def close(self) -> None:
        """End the workers and free the model's memory. Idempotent."""
        self._finalizer()

    def next_id(self) -> str:
        return str(next(self._ids))

    def default_sampling_params(self) -> SamplingParams:
        params = SamplingParams(**self._defaults.sampling_fields())
        if self._defaults.max_tokens is not None:
            params.max_tokens = self._defaults.max_tokens
        return params

    def chat_prompts(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        chat_template_kwargs: dict[str, Any] | None,
        tools: list[dict[str, Any]] | None,
    ) -> list[Prompt]:
        """Return the prompt of each conversation. The arguments are those of `LLM.chat`.

        Raises:
            TypeError: `messages` is neither a conversation nor a list of conversations.
            ValueError: a conversation is empty or invalid, there is no valid chat template, or the
                template rejects the messages. Also if `chat_template_kwargs` contains `messages`,
                `add_generation_prompt` or `tools`.
        """
        variables = chat_template_kwargs or {}
        template = self._chat_template(chat_template, variables)
        variables = {**variables, "add_generation_prompt": add_generation_prompt, "tools": tools}
        return [
            render_conversation(self.tokenizer, template, conversation, variables)
            for conversation in as_conversations(messages)
        ]

    def _chat_template(self, source: str | None, variables: dict[str, Any]) -> ChatTemplate:
        """Return the chat template to use: from `source` or from the checkpoint.

        Args:
            source: Jinja source. None: the checkpoint's template.
            variables: the caller's `chat_template_kwargs`.

        Raises:
            ValueError: there is no valid template, or `variables` contains `messages`,
                `add_generation_prompt` or `tools`.
        """
        for name in ("messages", "add_generation_prompt", "tools"):
            if name in variables:
                raise ValueError(
                    f"chat_template_kwargs must not set {name}: it is an argument of chat()"
                )
        template = self.tokenizer.chat_template
        if source is not None:
            template = self._given_template
            if template is None or template.source != source:
                template = ChatTemplate(source, self.tokenizer.special_tokens)
                self._given_template = template
        if template is None:
            raise ValueError(
                "this model has no chat template: pass chat_template=..., or use generate()"
            )
        return template

    def collector(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int
    ) -> SamplesCollector:
        """Return a collector that holds the requests of a prompt and joins their outputs."""
        requests = self._requests(request_id, prompt, params, priority)
        return SamplesCollector(prompt, requests, params, self.tokenizer)

    def beams_collector(self, prompt: Prompt, params: WireSamplingParams) -> BeamsCollector:
        """Return a collector that holds the request of a beam search and receives its beams."""
        request = EngineCoreRequest(
            self.next_id(), prompt.token_ids, params, arrival_time=time.time()
        )
        return BeamsCollector(prompt, request, self.tokenizer)

    def vector_collector(self, prompt: Prompt, params: PoolingParams) -> VectorCollector:
        """Return a collector that holds the request of a prompt and receives its vector."""
        request = EngineCoreRequest(
            self.next_id(),
            prompt.token_ids,
            NO_SAMPLING,
            arrival_time=time.time(),
            pooling_params=params,
        )
        return VectorCollector(prompt, request)

    def pair_collector(
        self, pair_format: PairFormat, first: str, second: str, index: int
    ) -> VectorCollector:
        """Return a collector that holds the request of two texts and receives their score.

        Raises:
            ValueError: a text cannot be encoded. The message names the pair by its index.
        """
        try:
            token_ids, second_text_start = encode_pair(self.tokenizer, pair_format, first, second)
        except ValueError as error:
            raise ValueError(f"pair {index}: {error}") from error
        params = PoolingParams(second_text_start=second_text_start)
        return self.vector_collector(Prompt(token_ids, None), params)

    def check_priority(self) -> None:
        """Raise ValueError if the engine ignores priorities."""
        if self.config.scheduler.policy != "priority":
            raise ValueError('priority has no effect with scheduling_policy="fcfs"')

    def metrics(self) -> list[Metric]:
        registry = engine_registry(self.core.get_stats, self.core.request_metrics, self._name)
        return [
            Metric(sample.name, dict(sample.labels), sample.value)
            for family in registry.collect()
            for sample in family.samples
        ]

    def _requests(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int
    ) -> list[EngineCoreRequest]:
        """Return one request for each sequence to generate for a prompt.

        The requests form one group, so the engine computes the prompt once.
        """
        wire = params.to_wire(self.tokenizer, seed=self._seeds.getrandbits(63))
        num = params.num_candidates
        arrival = time.time()
        # Only the first sample returns the prompt's logprobs, which are the same for all samples.
        silent = msgspec.structs.replace(wire, prompt_logprobs=None)
        return [
            EngineCoreRequest(
                request_id if num == 1 else f"{index}_{request_id}",
                prompt.token_ids,
                wire if index == 0 else silent,
                sample_index=index,
                arrival_time=arrival,
                priority=priority,
                group_id="" if num == 1 else request_id,
            )
            for index in range(num)
        ]


def check_params(params: object, kind: type, name: str) -> None:
    if not isinstance(params, kind):
        raise TypeError(f"{name} must be {kind.__name__}, got {type(params).__name__}")


def params_list(given: _Params | Sequence[_Params], kind: type[_Params], num: int) -> list[_Params]:
    """Return the parameters of each of `num` prompts.

    Args:
        given: parameters of all prompts, or a list with one entry per prompt.

    Raises:
        TypeError: `given` is neither parameters nor a list of parameters.
        ValueError: the list does not have `num` entries.
    """
    name = "pooling_params" if kind is PoolingParams else "sampling_params"
    if isinstance(given, kind):
        return [given] * num
    if not isinstance(given, list | tuple):
        raise TypeError(
            f"{name} must be {kind.__name__} or a list of them, got {type(given).__name__}"
        )
    for index, params in enumerate(given):
        check_params(params, kind, f"{name}[{index}]")
    if len(given) != num:
        raise ValueError(
            f"{name} must be one for all or one per prompt: got {len(given)} for {num}"
        )
    return list(given)
