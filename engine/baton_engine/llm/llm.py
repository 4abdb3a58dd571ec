"""The class `LLM`: offline inference in the caller's process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Unpack

from baton_engine.llm.collectors import Collector, Prompt
from baton_engine.llm.engine_args import EngineArgs
from baton_engine.llm.local_model import LocalModel, check_params, params_list
from baton_engine.llm.outputs import (
    BeamSearchOutput,
    EmbeddingRequestOutput,
    Metric,
    RequestOutput,
    ScoringRequestOutput,
)
from baton_engine.llm.params import BeamSearchParams, SamplingParams
from baton_engine.llm.prompt_inputs import (
    Message,
    PromptType,
    pair_list,
    prompt_list,
    tokenize,
)
from baton_engine.llm.step_loop import ProgressBar, StepLoop
from baton_protocol.pooling_params import PoolingParams
from baton_text.tokenizer import Tokenizer


class LLM:
    """A model for offline inference in this process.

    Calls from several threads run one after another.

    Args:
        model: folder of the checkpoint, `ORG/NAME` of a model on a Hugging Face hub, or a URI such
            as `s3://BUCKET/PREFIX`. An existing local folder ORG/NAME takes precedence over the
            hub. A model that is not in the cache is downloaded.
        seed: seed of the random generator that draws a seed for each prompt without a seed. With
            the same seed, the same calls return the same texts.
        generation_config: "auto" takes default sampling parameters from the checkpoint's
            generation_config.json. "none" takes Baton's defaults.
        revision: branch, tag or commit of a hub's model. None: main.
        download_dir: the cache of downloaded models. None: $XDG_CACHE_HOME/baton/models, or
            ~/.cache/baton/models.
        args: options of the engine, named like the flags of `baton-engine`; see `EngineArgs`.

    Raises:
        ConfigurationError: the model cannot be downloaded, or the model or the configuration cannot
            be served.
        OSError: the cache of models is not writable.
        TypeError: an argument does not exist.
        ValueError: a value has the wrong type or is out of bounds.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        seed: int = 0,
        generation_config: Literal["auto", "none"] = "auto",
        revision: str | None = None,
        download_dir: str | Path | None = None,
        **args: Unpack[EngineArgs],
    ) -> None:
        self._model = LocalModel(
            model,
            seed=seed,
            generation_config=generation_config,
            revision=revision,
            download_dir=download_dir,
            **args,
        )
        self.config = self._model.config
        self._loop = StepLoop(self._model.core, self._model.wakeup)
        self._lock = threading.Lock()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that `generate` uses if the caller passes none.

        Values from the checkpoint's generation_config.json replace the defaults, unless
        `generation_config="none"` was passed to `LLM`.
        """
        return self._model.default_sampling_params()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ProgressBar = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate text that continues one or several prompts.

        Args:
            prompts: one prompt or a list of prompts. A prompt is a text, a list of token ids,
                `{"prompt": ...}` or `{"prompt_token_ids": ...}`.
            sampling_params: parameters of all prompts, or a list with one entry per prompt. None:
                the result of `get_default_sampling_params`.
            use_tqdm: True shows a progress bar, False none. A function is called with tqdm's
                arguments and returns the bar.
            priority: one number per prompt. Prompts with lower numbers run first. None: 0 for all.

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
                tokenize(self._model.tokenizer, prompt, index)
                for index, prompt in enumerate(prompt_list(prompts))
            ]
            return self._generate(tokenized, sampling_params, use_tqdm, priority)

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
                `baton_text.reply_parsing` finds calls in the outputs' texts.

        Returns:
            One output per conversation, in the order of the conversations.

        Raises:
            TypeError, RuntimeError: as `generate`.
            ValueError: as `generate`; also if the template is missing or rejects the messages.
        """
        with self._lock:
            prompts = self._model.chat_prompts(
                messages,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=chat_template_kwargs,
                tools=tools,
            )
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
        check_params(params, BeamSearchParams, "params")
        wire = params.to_wire()
        with self._lock:
            collectors = []
            for index, prompt in enumerate(prompt_list(prompts)):
                tokenized = tokenize(self._model.tokenizer, prompt, index)
                collectors.append(self._model.beams_collector(tokenized, wire))
            self._run(collectors, use_tqdm)
            return [collector.result() for collector in collectors]

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        use_tqdm: ProgressBar = True,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of one or several prompts. The model must be a pooling model.

        Args:
            prompts: as in `generate`.
            use_tqdm: as in `generate`.
            pooling_params: parameters of all prompts, or a list with one entry per prompt. None:
                the checkpoint's pooling.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            TypeError, ValueError, RuntimeError: as `generate`.
        """
        with self._lock:
            given = prompt_list(prompts)
            params = params_list(pooling_params or PoolingParams(), PoolingParams, len(given))
            collectors = []
            for index, (prompt, own) in enumerate(zip(given, params, strict=True)):
                tokenized = tokenize(self._model.tokenizer, prompt, index)
                collectors.append(self._model.vector_collector(tokenized, own))
            self._run(collectors, use_tqdm)
            return [collector.embedding() for collector in collectors]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: ProgressBar = True,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts.

        With a reranker, the score is the relevance of the second text to the first text, from 0 to
        1. With another pooling model, the score is the cosine of the two texts' embeddings.

        Args:
            data_1: the first texts, or one text for all pairs.
            data_2: the second texts.
            use_tqdm: as in `generate`.

        Returns:
            One output per pair, in the order of the pairs.

        Raises:
            TypeError, ValueError, RuntimeError: as `generate`.
        """
        pairs = pair_list(data_1, data_2)
        with self._lock:
            if (pair_format := self._model.core.ready.pair_format) is not None:
                scored = [
                    self._model.pair_collector(pair_format, *pair, index)
                    for index, pair in enumerate(pairs)
                ]
                self._run(scored, use_tqdm)
                return [collector.score() for collector in scored]
            unit = PoolingParams(normalize=True)
            embedded = {
                text: self._model.vector_collector(
                    tokenize(self._model.tokenizer, text, index), unit
                )
                for index, pair in enumerate(pairs)
                for text in pair
            }
            self._run(list(embedded.values()), use_tqdm)
            return [embedded[first].similarity(embedded[second]) for first, second in pairs]

    def get_tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    def sleep(self, level: Literal[0, 1, 2] = 1) -> None:
        """Pause this LLM and free memory, until `wake_up` is called.

        Level 0 frees nothing. Level 1 moves the weights from the GPU to host memory and drops the
        KV cache. Level 2 drops the weights and the KV cache.
        """
        with self._lock:
            self._check_open()
            self._model.core.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore what `sleep` has freed.

        Args:
            tags: some of `weights`, `kv_cache` and `scheduling`. None: all.
        """
        with self._lock:
            self._check_open()
            self._model.core.wake_up(tags)

    def reset_prefix_cache(self) -> None:
        """Drop the KV of earlier prompts from the prefix cache.

        Unlike in vLLM, the method returns nothing.
        """
        with self._lock:
            self._check_open()
            self._model.core.reset_prefix_cache()

    def start_profile(self) -> None:
        """Start torch's profiler in every worker. Needs the argument `profiler_dir` of `LLM`."""
        with self._lock:
            self._check_open()
            self._model.core.start_profile()

    def stop_profile(self) -> None:
        """Stop the profiler and write the traces to `profiler_dir`."""
        with self._lock:
            self._check_open()
            self._model.core.stop_profile()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics, named as in the engine server's /metrics endpoint."""
        with self._lock:
            self._check_open()
            return self._model.metrics()

    def close(self) -> None:
        """End the workers and free the model's memory. Idempotent."""
        with self._lock:
            self._model.close()

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
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        all_params = params_list(sampling_params, SamplingParams, len(prompts))
        if priority is None:
            priority = [0] * len(prompts)
        else:
            self._model.check_priority()
        if len(priority) != len(prompts):
            raise ValueError(
                f"priority must have one number per prompt: got {len(priority)} for {len(prompts)}"
            )
        ids = [self._model.next_id() for _ in prompts]
        collectors = [
            self._model.collector(*each)
            for each in zip(ids, prompts, all_params, priority, strict=True)
        ]
        self._run(collectors, use_tqdm)
        return [
            collector.result(request_id)
            for request_id, collector in zip(ids, collectors, strict=True)
        ]

    def _run(self, collectors: Sequence[Collector], use_tqdm: ProgressBar) -> None:
        self._check_open()
        if self._model.core.is_paused():
            raise RuntimeError("this LLM is asleep; call wake_up() first")
        self._loop.run(collectors, use_tqdm)

    def _check_open(self) -> None:
        if not self._model.is_open:
            raise RuntimeError("this LLM is closed; create a new LLM")
