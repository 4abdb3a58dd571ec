"""Topologies that a coordinator reports, and the status that the operator makes of them.

For the tests of the topology.
"""

from __future__ import annotations

from baton_operator.api import llmservice

ADDRESS = "10.96.0.9"


def status(
    *names: str, generation: int = 3, last: llmservice.OperationStatus | None = None
) -> llmservice.TopologyStatus:
    ranks = [
        llmservice.RankStatus(name=name, rank=rank, phase="serving")
        for rank, name in enumerate(names)
    ]
    return llmservice.TopologyStatus(
        coordinator=ADDRESS, generation=generation, ranks=ranks, operation=last
    )
