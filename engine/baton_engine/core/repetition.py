"""Whether an output has begun to repeat itself. Pure; the scheduler asks after every token of a request that wants to know."""

from __future__ import annotations

from collections.abc import Sequence

from baton_engine.protocol.sampling import RepetitionDetection


def repeats(token_ids: Sequence[int], detection: RepetitionDetection) -> bool:
    """Whether `token_ids` (generated ones) end in `min_count` repetitions of one pattern of an allowed size.

    Looks at the last max_pattern_size * min_count tokens at most, whatever the length. Meanings are those of vLLM's
    RepetitionDetectionParams.
    """
    length, count = len(token_ids), detection.min_count
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        span = size * count
        if span > length:
            return False
        # The tail is periodic iff it equals itself shifted by one period. Most outputs differ in the very first pair.
        if all(token_ids[-i] == token_ids[-i - size] for i in range(1, span - size + 1)):
            return True
    return False
