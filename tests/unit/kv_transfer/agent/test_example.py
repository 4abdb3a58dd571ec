"""The example in the docstring of the package `agent`."""

from __future__ import annotations

import doctest

import numpy as np

import baton_kv_transfer.agent
from support.waiting import eventually


def test_the_example_reads_the_peers_memory_and_notifies_the_peer() -> None:
    example = doctest.DocTestParser().get_doctest(
        baton_kv_transfer.agent.__doc__ or "", {}, "agent", None, None
    )
    assert len(example.examples) <= 12
    result = doctest.DocTestRunner().run(example, clear_globs=False)
    agent, peer, ours, theirs = (example.globs[n] for n in ("agent", "peer", "ours", "theirs"))
    try:
        assert result.failed == 0
        np.testing.assert_array_equal(ours, theirs)
        eventually(
            lambda: peer.get_new_notifs() == {"agent": [b"a notification"]}, "the notification"
        )
    finally:
        agent.close()
        peer.close()
