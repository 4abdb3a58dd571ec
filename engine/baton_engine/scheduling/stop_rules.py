"""Rules that end a request: stop tokens, length limits, complete structured output, repetition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton_engine.scheduling.grammar_queue import accept_tokens
from baton_engine.scheduling.request import Request
from baton_protocol.engine_messages import ErrorCode, FinishReason
from baton_protocol.sampling_params import RepetitionDetection


class StopRules:
    """Checks whether a request ends after its last token. Stateless."""

    def __init__(self, eos_token_ids: Iterable[int], max_model_len: int) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len

    def is_stop_token(self, request: Request, token_id: int) -> bool:
        """Return whether `token_id` is a stop token of the request, regardless of `min_tokens`."""
        params = request.sampling_params
        return token_id in params.stop_token_ids or (
            token_id in self.eos_token_ids and not params.ignore_eos
        )

    def reason(self, request: Request) -> FinishReason | None:
        """Return why the request ends after its last token, or None if the request continues.

        Only stop tokens and length limits are checked.
        """
        params = request.sampling_params
        num_tokens = len(request.token_ids)
        num_generated = num_tokens - request.num_prompt_tokens
        if num_generated >= params.min_tokens and self.is_stop_token(
            request, request.token_ids[-1]
        ):
            return FinishReason.STOP
        if params.max_tokens is not None and num_generated >= params.max_tokens:
            return FinishReason.LENGTH
        if num_tokens >= self._max_model_len:
            return FinishReason.LENGTH
        return None

    def take_token(self, request: Request) -> tuple[FinishReason | None, str, ErrorCode | None]:
        """Apply all rules to the last sampled token, and advance the grammar.

        Returns:
            (finish reason, error message, error code). The reason is None if the request continues.
            Without an error, the message is empty and the code is None.
        """
        reason = self.reason(request)
        grammar, detection = request.grammar, request.sampling_params.repetition_detection
        if grammar is not None:
            stuck = grammar.error  # set before this token: no token was allowed
            if stuck or not accept_tokens(request):
                return FinishReason.ERROR, *self._grammar_failure(
                    request, bool(stuck), stuck or grammar.error
                )
            if reason in (None, FinishReason.LENGTH) and grammar.is_terminated:
                return FinishReason.STOP, "", None
        if reason is None and detection is not None:
            # Slice the relevant tail only, so that the cost does not grow with the output.
            length = min(
                request.num_generated_tokens, detection.max_pattern_size * detection.min_count
            )
            if length > 0 and repeats(request.token_ids[-length:], detection):
                return FinishReason.REPETITION, "", None
        return reason, "", None

    def _grammar_failure(self, request: Request, stuck: bool, why: str) -> tuple[str, ErrorCode]:
        """Return the error message and code for a sampled token that the grammar does not accept.

        Args:
            stuck: whether the grammar allowed no token at all at this position.
            why: the grammar's error; empty if it has none.
        """
        token_id = request.token_ids[-1]
        if not stuck and token_id in self.eos_token_ids:  # the sampler found no possible token
            return (
                "structured_output and the parameters that mask tokens leave no token to sample",
                ErrorCode.INVALID,
            )
        if why:  # nearly always a resource limit of the parser
            return f"structured_output cannot continue: {why}", ErrorCode.INVALID
        return (
            f"token {token_id} was sampled, but structured_output does not allow it",
            ErrorCode.INTERNAL,
        )


def repeats(token_ids: Sequence[int], detection: RepetitionDetection) -> bool:
    """Return whether `token_ids` end with `min_count` consecutive copies of one pattern.

    The pattern has min_pattern_size to max_pattern_size tokens. Only the last max_pattern_size *
    min_count tokens are examined. The fields of `detection` mean the same as in vLLM's
    RepetitionDetectionParams.
    """
    length, count = len(token_ids), detection.min_count
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        span = size * count
        if span > length:
            return False
        # The tail is periodic iff it equals itself shifted by one period. Most outputs differ in
        # the very first pair.
        if all(token_ids[-i] == token_ids[-i - size] for i in range(1, span - size + 1)):
            return True
    return False
