"""The class `AsyncLLM`: offline inference in the caller's process, for asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Unpack

from baton_engine.llm.async_step_loop import AsyncStepLoop, OutputStream
from baton_engine.llm.collectors import Prompt, check_output
from baton_engine.llm.engine_args import EngineArgs
from baton_engine.llm.local_model import LocalModel, check_params
from baton_engine.llm.outputs import Metric, RequestOutput
from baton_engine.llm.params import SamplingParams
from baton_engine.llm.prompt_inputs import Message, PromptType, tokenize
from baton_text.tokenizer import Tokenizer


class AsyncLLM:
    """A model for offline inference with asyncio in this process. Outputs are streamed.

    The engine runs in a thread. Requests of different asyncio tasks run concurrently. `close`, or
    the end of an `async with` block, ends the engine.

    Args:
        model, seed, generation_config, revision, download_dir, args: as in `LLM`.

    Raises:
        ConfigurationError, OSError, TypeError, ValueError: as `LLM`.
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
        self._loop = AsyncStepLoop(self._model.core, self._model.wakeup)
        # Also without close(), the thread must end before the core shuts down.
        weakref.finalize(self, self._loop.close)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that `generate` uses if the caller passes none."""
        return self._model.default_sampling_params()

    def get_tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate text that continues a prompt. Yield the whole text each time it has grown.

        When the iteration ends or is cancelled, requests that still run are aborted. Use
        `contextlib.aclosing` around a loop that may end early.

        Args:
            prompt: a text, a list of token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`.
            sampling_params: None: the result of `get_default_sampling_params`. With `best_of` above
                `n`, only the last output is yielded.
            priority: requests with lower numbers run first.

        Yields:
            The text, tokens and logprobs so far. `finished` is true in the last output.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: the prompt or its parameters cannot be served.
            RuntimeError: the engine failed, or this AsyncLLM is closed.
        """
        tokenized = await asyncio.to_thread(tokenize, self._model.tokenizer, prompt, 0)
        async with aclosing(self._generate(tokenized, sampling_params, priority)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate the assistant's next message in a conversation.

        Args:
            messages: the conversation.
            sampling_params, priority: as in `generate`.
            chat_template, add_generation_prompt, chat_template_kwargs, tools: as in `LLM.chat`.

        Yields:
            The text, tokens and logprobs so far, as in `generate`.

        Raises:
            TypeError, RuntimeError: as `generate`.
            ValueError: as `generate`; also if the template is missing or rejects the messages.
        """
        [prompt] = await asyncio.to_thread(
            self._model.chat_prompts,
            [messages],
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
        )
        async with aclosing(self._generate(prompt, sampling_params, priority)) as outputs:
            async for output in outputs:
                yield output

    async def sleep(self, level: Literal[0, 1, 2] = 1) -> None:
        """Abort all requests, pause this AsyncLLM and free memory.

        New requests wait until `wake_up` is called. The levels are those of `LLM.sleep`.
        """
        await self._loop.call(lambda: self._model.core.sleep(level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore what `sleep` has freed, like `LLM.wake_up`."""
        await self._loop.call(lambda: self._model.core.wake_up(tags))

    async def reset_prefix_cache(self) -> None:
        """Drop the KV of earlier prompts from the prefix cache."""
        await self._loop.call(self._model.core.reset_prefix_cache)

    async def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics, named as in the engine server's /metrics endpoint."""
        return await self._loop.call(self._model.metrics)

    def close(self) -> None:
        """Abort all requests, end the workers and free the model's memory. Idempotent."""
        self._loop.close()
        self._model.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    async def _generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None, priority: int
    ) -> AsyncGenerator[RequestOutput, None]:
        params = sampling_params
        if params is None:
            params = self.get_default_sampling_params()
        check_params(params, SamplingParams, "sampling_params")
        if priority:
            self._model.check_priority()
        request_id = self._model.next_id()
        collector = self._model.collector(request_id, prompt, params, priority)
        running = {request.request_id for request in collector.requests}
        stream = OutputStream()
        self._loop.add(collector.requests, stream)
        try:
            while running:
                for output in await stream.get():
                    if output.request_id not in running:
                        continue  # the request has ended already, at a stop string
                    if output.error:
                        running.discard(output.request_id)
                    check_output(output, "the prompt")
                    if collector.push(output):
                        running.remove(output.request_id)
                        if not output.finished:
                            self._loop.abort([output.request_id])
                if not running or params.num_candidates == params.n:
                    yield collector.result(request_id, finished=not running)
        finally:
            if running:
                self._loop.abort(running)
