"""Random requests to small engines, with the responses of an idle engine as the reference.

A few seeds always run. More run with
`BATON_SOAK_SECONDS=600 pytest tests/integration/test_engine_soak.py -k long -s`.
See support/integration/engine_soak.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from support.integration.engine_soak import ReferenceEngine, Soak

NUM_REQUESTS = 40
SOAK_SECONDS = float(os.environ.get("BATON_SOAK_SECONDS", "0"))


@pytest.fixture(scope="module")
def reference(checkpoint) -> Iterator[ReferenceEngine]:
    engine = ReferenceEngine(checkpoint)
    yield engine
    engine.close()


@pytest.mark.parametrize("seed", [1, 3, 9, 11, 13, 15, 16, 17])
def test_soak(checkpoint, reference, seed) -> None:
    soak = Soak(checkpoint, reference, seed, NUM_REQUESTS)
    soak.run()
    assert soak.num_compared > 0


@pytest.mark.skipif(not SOAK_SECONDS, reason="set BATON_SOAK_SECONDS to run it")
@pytest.mark.timeout(SOAK_SECONDS + 600)
def test_long_soak(checkpoint, reference) -> None:
    end = time.monotonic() + SOAK_SECONDS
    seed = first = int(os.environ.get("BATON_SOAK_SEED", "1000"))
    while time.monotonic() < end:
        soak = Soak(checkpoint, reference, seed, NUM_REQUESTS)
        try:
            soak.run()
        except BaseException:
            print(f"seed {seed} fails; repeat it with BATON_SOAK_SECONDS=1 BATON_SOAK_SEED={seed}")
            raise
        print(f"seed {seed}: {soak.stats()}", flush=True)
        seed += 1
    print(f"{seed - first} seeds")
