"""Joins the engine's outputs for one prompt into one result. Does not import torch."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field

from baton_engine.llm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from baton_engine.llm.params import SamplingParams
from baton_protocol.engine_messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    RoutedExperts,
    TokenLogprobs,
)
from baton_protocol.pooling_params import dot, unpack_vector
from baton_text.output import (
    OutputProcessor,
    prompt_token_logprobs,
    ranked_logprobs,
)
from baton_text.tokenizer import Tokenizer


@dataclass
class Prompt:
    """A tokenized prompt."""

    token_ids: list[int]
    #: None if the caller passed token ids.
    text: str | None


class Collector(abc.ABC):
    """Collects the engine's outputs for one prompt.

    Attributes:
        requests: requests to send to the engine.
        num_generated: number of tokens received so far from all requests.
    """

    def __init__(self, prompt: Prompt, requests: list[EngineCoreRequest]) -> None:
        self.prompt = prompt
        self.requests = requests
        self.num_generated = 0

    @abc.abstractmethod
    def push(self, output: EngineCoreOutput) -> bool:
        """Add an output of one of `requests`.

        Returns:
            Whether that request has ended. The engine may still run the request, because only the
            collector checks stop strings.
        """


class SamplesCollector(Collector):
    """Collects the samples (generated sequences) of one prompt. Each request has one sample."""

    def __init__(
        self,
        prompt: Prompt,
        requests: list[EngineCoreRequest],
        params: SamplingParams,
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(prompt, requests)
        self._params = params
        self._tokenizer = tokenizer
        self._samples = {request.request_id: _Sample(params, tokenizer) for request in requests}

    def push(self, output: EngineCoreOutput) -> bool:
        self.num_generated += len(output.new_token_ids)
        return self._samples[output.request_id].push(output)

    def result(self, request_id: str, *, finished: bool = True) -> RequestOutput:
        """Return the result so far.

        Args:
            request_id: id of the result.
            finished: whether all requests have ended.
        """
        samples = list(self._samples.values())
        # The first sample computes the prompt. Later samples always find the prompt in the prefix
        # cache.
        output = RequestOutput(
            request_id,
            self.prompt.text,
            self.prompt.token_ids,
            num_cached_tokens=samples[0].num_cached_tokens,
        )
        prompt_logprobs = next(
            (s.prompt_logprobs for s in samples if s.prompt_logprobs is not None), None
        )
        if prompt_logprobs is not None:
            output.prompt_logprobs = prompt_token_logprobs(self._tokenizer, prompt_logprobs)
        if len(samples) > self._params.n:
            samples.sort(key=lambda sample: sample.processor.mean_logprob, reverse=True)
        output.outputs = [
            sample.result(index) for index, sample in enumerate(samples[: self._params.n])
        ]
        output.finished = finished
        return output


class BeamsCollector(Collector):
    """Collects the beams of one prompt. One request returns all beams."""

    def __init__(self, prompt: Prompt, request: EngineCoreRequest, tokenizer: Tokenizer) -> None:
        super().__init__(prompt, [request])
        self._tokenizer = tokenizer
        self._output: EngineCoreOutput | None = None

    def push(self, output: EngineCoreOutput) -> bool:
        self.num_generated += sum(len(beam.token_ids) for beam in output.beams or [])
        self._output = output
        return output.finished

    def result(self) -> BeamSearchOutput:
        """Return the beams of the prompt. The request must have ended."""
        assert self._output is not None
        sequences = []
        for beam in self._output.beams or []:
            tokens = [*self.prompt.token_ids, *beam.token_ids]
            sequences.append(
                BeamSearchSequence(
                    tokens=tokens,
                    text=self._tokenizer.decode(tokens),
                    cum_logprob=beam.cumulative_logprob,
                    score=beam.score,
                    finish_reason=str(beam.finish_reason),
                    stop_reason=beam.stop_token_id,
                )
            )
        return BeamSearchOutput(sequences)


class VectorCollector(Collector):
    """Collects the vector of one prompt of a pooling model."""

    def __init__(self, prompt: Prompt, request: EngineCoreRequest) -> None:
        super().__init__(prompt, [request])
        self._output: EngineCoreOutput | None = None

    def push(self, output: EngineCoreOutput) -> bool:
        self._output = output
        return output.finished

    @property
    def vector(self) -> bytes:
        """The vector of the prompt, as the bytes of float32 values. The request must have ended."""
        assert self._output is not None
        assert self._output.pooler_output is not None
        return self._output.pooler_output

    @property
    def num_cached_tokens(self) -> int:
        return 0 if self._output is None else self._output.num_cached_tokens

    def embedding(self) -> EmbeddingRequestOutput:
        return EmbeddingRequestOutput(
            self.requests[0].request_id,
            EmbeddingOutput(list(unpack_vector(self.vector))),
            self.prompt.token_ids,
            self.num_cached_tokens,
        )

    def score(self) -> ScoringRequestOutput:
        """Return the classifier's score of a pair of texts. The prompt must contain both texts."""
        [score] = unpack_vector(self.vector)
        return ScoringRequestOutput(
            self.requests[0].request_id,
            ScoringOutput(score),
            self.prompt.token_ids,
            self.num_cached_tokens,
        )

    def similarity(self, other: VectorCollector) -> ScoringRequestOutput:
        """Return the cosine similarity of this prompt's embedding and that of `other`.

        The model must normalize its embeddings.
        """
        return ScoringRequestOutput(
            self.requests[0].request_id,
            ScoringOutput(dot(self.vector, other.vector)),
            self.prompt.token_ids + other.prompt.token_ids,
            self.num_cached_tokens + other.num_cached_tokens,
        )


@dataclass
class _Sample:
    """One generated sequence."""

    params: SamplingParams
    tokenizer: Tokenizer
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_nans_in_logits: int = 0

    def __post_init__(self) -> None:
        self.processor = OutputProcessor(
            self.tokenizer,
            stops=self.params.stops,
            include_stop=self.params.include_stop_str_in_output,
            skip_special_tokens=self.params.skip_special_tokens,
            min_tokens=self.params.min_tokens,
            stop_token_ids=self.params.stop_token_ids,
        )

    def push(self, output: EngineCoreOutput) -> bool:
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.routed_experts is not None:
            self.routed_experts.append(output.routed_experts)
        piece = self.processor.push(output)
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.num_nans_in_logits += piece.num_nans_in_logits
        self.logprobs += (output.new_logprobs or [])[: len(piece.token_ids)]
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        return self.finish_reason is not None

    def result(self, index: int) -> CompletionOutput:
        wants_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.processor.cumulative_logprob if wants_logprobs else None,
            logprobs=[ranked_logprobs(self.tokenizer, item) for item in self.logprobs]
            if wants_logprobs
            else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            routed_experts=RoutedExperts.join(self.routed_experts),
            num_nans_in_logits=self.num_nans_in_logits,
        )


def check_output(output: EngineCoreOutput, where: str) -> None:
    """Raise an exception if an output reports a refusal or a failure.

    Args:
        where: start of the error message, which names the prompt, such as `prompt 3`.

    Raises:
        ValueError: the prompt or its parameters cannot be served.
        RuntimeError: the engine failed.
    """
    if not output.error:
        return
    message = f"{where}: {output.error}"
    if output.error_code in (ErrorCode.INVALID, ErrorCode.LENGTH):
        raise ValueError(message)
    raise RuntimeError(message)
