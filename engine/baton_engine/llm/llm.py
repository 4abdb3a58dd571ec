"""The class `LLM`: offline inference in the caller's process."""

from __future__ import annotations

import itertools
import random
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Unpack

import msgspec

from baton_engine.core.engine_core import EngineCore
from baton_engine.executor.base import executor_name, load_executor_class
from baton_engine.llm.collectors import BeamsCollector, Prompt, SamplesCollector
from baton_engine.llm.engine_args import EngineArgs, engine_config
from baton_engine.llm.outputs import BeamSearchOutput, Metric, RequestOutput
from baton_engine.llm.params import BeamSearchParams, SamplingParams
from baton_engine.llm.prompts import (
    Message,
    PromptType,
    as_conversations,
    prompt_list,
    render_conversation,
    tokenize,
)
from baton_engine.llm.step_loop import ProgressBar, StepLoop
from baton_engine.metrics.prometheus import engine_registry
from baton_protocol.messages import EngineCoreRequest
from baton_text.chat_template import ChatTemplate
from baton_text.generation_defaults import GenerationDefaults
from baton_text.tokenizer import Tokenizer


class LLM:
    """A model for offline inference in this process.

    Calls from several threads run one after another.

    Args:
        model: folder of the checkpoint.
        seed: seed of the random generator that draws a seed for each prompt without a seed. With
            the same seed, the same calls return the same texts.
        generation_config: "auto" takes default sampling parameters from the checkpoint's
            generation_config.json. "none" does not.
        args: options of the engine, named like the flags of `baton-engine`; see `EngineArgs`.

    Raises:
        ConfigurationError: the model or the configuration cannot be served.
        TypeError: an argument does not exist.
        ValueError: a value has the wrong type or is out of bounds.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        seed: int = 0,
        generation_config: Literal["auto", "none"] = "auto",
        **args: Unpack[EngineArgs],
    ) -> None:
        if not isinstance(model, str | Path) or not str(model):
            raise ValueError(f"model must be the folder of a checkpoint, got {model!r}")
        if generation_config not in ("auto", "none"):
            raise ValueError(
                f'generation_config must be "auto" or "none", got {generation_config!r}'
            )
        self.config = engine_config(model, args)
        wakeup = threading.Event()
        executor_class = load_executor_class(executor_name(self.config))
        executor = executor_class(self.config, uuid.uuid4().hex, wakeup.set)
        # Worker processes and threads end with this object, even without close().
        self._finalizer = weakref.finalize(self, executor.shutdown)
        try:
            self._core = EngineCore(self.config, executor)
            self._tokenizer = Tokenizer.from_folder(Path(model))
            self._defaults = (
                GenerationDefaults.from_folder(Path(model))
                if generation_config == "auto"
                else GenerationDefaults()
            )
        except BaseException:
            self._finalizer()
            raise
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, self._core.shutdown)
        self._loop = StepLoop(self._core, wakeup)
        self._lock = threading.Lock()
        #: The last `chat_template` of `chat`. Its process is used again for the same source.
        self._given_template: ChatTemplate | None = None
        self._seeds = random.Random(seed)
        self._ids = itertools.count()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that `generate` uses if the caller passes none.

        Values from the checkpoint's generation_config.json replace the defaults, unless
        `generation_config="none"` was passed to `LLM`.
        """
        params = SamplingParams(**self._defaults.sampling_fields())
        if self._defaults.max_tokens is not None:
            params.max_tokens = self._defaults.max_tokens
        return params

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ProgressBar = True,
    ) -> list[RequestOutput]:
        """Generate text that continues one or several prompts.

        Args:
            prompts: one prompt or a list of prompts. A prompt is a text, a list of token ids,
                `{"prompt": ...}` or `{"prompt_token_ids": ...}`.
            sampling_params: parameters of all prompts, or a list with one entry per prompt. None:
                the result of `get_default_sampling_params`.
            use_tqdm: True shows a progress bar. A function is called with tqdm's arguments and
                returns the bar.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: a prompt or its parameters cannot be served. All prompts of the call are
                aborted.
            RuntimeError: the engine failed, or this LLM is asleep or closed.
        """
        with self._lock:
            tokenized = [
                tokenize(self._tokenizer, prompt, index)
                for index, prompt in enumerate(prompt_list(prompts))
            ]
            return self._generate(tokenized, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ProgressBar = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Generate the assistant's next message in one or several conversations.

        Args:
            messages: one conversation or a list of conversations.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            chat_template: Jinja source to use instead of the checkpoint's template.
            add_generation_prompt: end each prompt with the start of an assistant message.
            chat_template_kwargs: additional variables of the template, such as enable_thinking.
            tools: tools in OpenAI's form, which the template describes to the model.
                `baton_text.replies` finds calls in the outputs' texts.

        Returns:
            One output per conversation, in the order of the conversations.

        Raises:
            TypeError, RuntimeError: as `generate`.
            ValueError: as `generate`; also if the template is missing or rejects the messages.
        """
        if chat_template is None:
            template = self._tokenizer.chat_template
        else:
            template = self._given_template
            if template is None or template.source != chat_template:
                template = ChatTemplate(chat_template, self._tokenizer.special_tokens)
                self._given_template = template
        variables = chat_template_kwargs or {}
        for name in ("messages", "add_generation_prompt", "tools"):
            if name in variables:
                raise ValueError(
                    f"chat_template_kwargs must not set {name}: it is an argument of chat()"
                )
        if template is None:
            raise ValueError(
                "this model has no chat template: pass chat_template=..., or use generate()"
            )
        conversations = as_conversations(messages)
        variables = {**variables, "add_generation_prompt": add_generation_prompt, "tools": tools}
        with self._lock:
            prompts = [
                render_conversation(self._tokenizer, template, conversation, variables)
                for conversation in conversations
            ]
            return self._generate(prompts, sampling_params, use_tqdm)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        use_tqdm: ProgressBar = False,
    ) -> list[BeamSearchOutput]:
        """Search for the most likely continuations of one or several prompts.

        Args:
            prompts: as in `generate`.
            params: parameters of all prompts.
            use_tqdm: as in `generate`, but False by default, as in vLLM.

        Returns:
            One output per prompt, in the order of the prompts. The beams in an output are sorted,
            best first.

        Raises:
            TypeError, ValueError, RuntimeError: as `generate`.
        """
        _check_params(params, BeamSearchParams, "params")
        wire = params.to_wire()
        with self._lock:
            collectors = []
            for index, prompt in enumerate(prompt_list(prompts)):
                tokenized = tokenize(self._tokenizer, prompt, index)
                request = EngineCoreRequest(
                    str(next(self._ids)), tokenized.token_ids, wire, arrival_time=time.time()
                )
                collectors.append(BeamsCollector(tokenized, request, self._tokenizer))
            self._run(collectors, use_tqdm)
            return [collector.result() for collector in collectors]

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def sleep(self, level: Literal[0, 1, 2] = 1) -> None:
        """Pause this LLM and free memory, until `wake_up` is called.

        Level 0 frees nothing. Level 1 moves the weights of a GPU to host memory and drops the KV
        cache. Level 2 drops the weights and the KV cache.
        """
        with self._lock:
            self._check_open()
            self._core.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore what `sleep` has freed.

        Args:
            tags: some of `weights`, `kv_cache` and `scheduling`. None: all.
        """
        with self._lock:
            self._check_open()
            self._core.wake_up(tags)

    def reset_prefix_cache(self) -> None:
        """Drop the KV of earlier prompts. Unlike in vLLM, the method returns nothing."""
        with self._lock:
            self._check_open()
            self._core.reset_prefix_cache()

    def start_profile(self) -> None:
        """Start torch's profiler in every worker. Needs the argument `profiler_dir` of `LLM`."""
        with self._lock:
            self._check_open()
            self._core.start_profile()

    def stop_profile(self) -> None:
        """Stop the profiler and write the traces to `profiler_dir`."""
        with self._lock:
            self._check_open()
            self._core.stop_profile()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics, with the names that the engine's /metrics uses."""
        with self._lock:
            self._check_open()
            name = Path(self.config.model.path).name
            registry = engine_registry(self._core.get_stats, self._core.request_metrics, name)
            return [
                Metric(sample.name, dict(sample.labels), sample.value)
                for family in registry.collect()
                for sample in family.samples
            ]

    def close(self) -> None:
        """End the workers and free the model's memory. Idempotent."""
        with self._lock:
            self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _generate(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: ProgressBar,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        elif not isinstance(sampling_params, list | tuple):
            raise TypeError(
                "sampling_params must be SamplingParams or a list of them, "
                f"got {type(sampling_params).__name__}"
            )
        for index, params in enumerate(sampling_params):
            _check_params(params, SamplingParams, f"sampling_params[{index}]")
        if len(sampling_params) != len(prompts):
            raise ValueError(
                "sampling_params must be one for all or one per prompt: "
                f"got {len(sampling_params)} for {len(prompts)}"
            )
        ids = [str(next(self._ids)) for _ in prompts]
        collectors = [
            SamplesCollector(
                prompt, self._requests(request_id, prompt, params), params, self._tokenizer
            )
            for request_id, prompt, params in zip(ids, prompts, sampling_params, strict=True)
        ]
        self._run(collectors, use_tqdm)
        return [
            collector.result(request_id)
            for request_id, collector in zip(ids, collectors, strict=True)
        ]

    def _requests(
        self, request_id: str, prompt: Prompt, params: SamplingParams
    ) -> list[EngineCoreRequest]:
        """Return one request per sample of a prompt.

        The requests form one group, so the engine computes the prompt once.
        """
        wire = params.to_wire(self._tokenizer, seed=self._seeds.getrandbits(63))
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
                group_id="" if num == 1 else request_id,
            )
            for index in range(num)
        ]

    def _run(
        self, collectors: Sequence[SamplesCollector | BeamsCollector], use_tqdm: ProgressBar
    ) -> None:
        self._check_open()
        if self._core.is_paused():
            raise RuntimeError("this LLM is asleep; call wake_up() first")
        self._loop.run(collectors, use_tqdm)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("this LLM is closed; create a new LLM")


def _check_params(params: object, kind: type, name: str) -> None:
    if not isinstance(params, kind):
        raise TypeError(f"{name} must be {kind.__name__}, got {type(params).__name__}")
