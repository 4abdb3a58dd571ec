"""Computes how well times separate two sets of prompts."""

from __future__ import annotations


def auc(hits: list[float], misses: list[float]) -> float:
    """Return the probability that a random time of `hits` is below a random time of `misses`.

    Equal times count as half. This is the area under the ROC curve of a guess by the time.
    """
    wins = sum((hit < miss) + (hit == miss) / 2 for hit in hits for miss in misses)
    return wins / (len(hits) * len(misses))
