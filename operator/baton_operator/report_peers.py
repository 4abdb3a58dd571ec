"""Whether prefill pods have decode pods to hand their KV blocks to. Pure.

Requests succeed without: decode pods prefill for themselves. So it is the prefill group that is not as it should be, for its pods
do nothing. While a rollout gets on, pods of two revisions need not fit; what is left when it stands still must.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_engine.protocol.kv_compatibility import KVCompatibility, differences
from baton_operator.diagnose import PROGRESS_REASONS
from baton_operator.report_topology import Verdict

Object = dict[str, Any]

INCOMPATIBLE = "IncompatiblePeers"


def prefill_verdict(
    verdict: Verdict,
    updating: Verdict,
    prefill: list[str],
    decode: list[str],
    kv: Mapping[str, KVCompatibility],
) -> Verdict:
    """`PrefillReady`, once hand-over is looked at: `verdict` if that is possible, or if something else has failed.

    Args:
        updating: the condition Updating.
        prefill, decode: names of pods that serve and stay.
        kv: what engines said, by pod name; of others nothing is known.
    """
    has_failed = verdict[0] != "True" and verdict[1] not in PROGRESS_REASONS
    if has_failed or updating[0] == "True":
        return verdict
    problem = incompatible(prefill, decode, kv)
    return ("False", INCOMPATIBLE, f"{problem}; {verdict[2]}") if problem else verdict


def incompatible(prefill: list[str], decode: list[str], kv: Mapping[str, KVCompatibility]) -> str:
    """Which pods have nobody on the other side; empty if all have, or not enough is known."""
    givers = sorted(name for name in prefill if name in kv)
    takers = sorted(name for name in decode if name in kv)
    if not givers or not takers:
        return ""
    for ours, theirs, can_not in (
        (givers, takers, "prefill pods can hand KV blocks to no decode pod"),
        (takers, givers, "decode pods can take KV blocks from no prefill pod"),
    ):
        alone = [name for name in ours if all(differences(kv[name], kv[other], "", "") for other in theirs)]
        if alone:
            why = differences(kv[alone[0]], kv[theirs[0]], alone[0], theirs[0])
            return f"{len(alone)} of {len(ours)} {can_not}, so decode pods prefill for themselves: {why}"
    return ""
