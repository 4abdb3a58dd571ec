"""The loop over random cases for one port of a server, and the checks of the server's process.

For all fuzz tests.

Each case is derived from the seed and the case's number only. A failure prints how to repeat it.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator

import psutil

from support.pods import Pod
from support.waiting import eventually

#: Cases at each port. `make fuzz` sets 100,000.
NUM_CASES = int(os.environ.get("BATON_FUZZ_CASES", "300"))
#: Number of the first case, to repeat a failure.
FIRST = int(os.environ.get("BATON_FUZZ_FIRST", "0"))
#: 0: a random seed, as in `make fuzz`. `make test` sends the same cases each time.
SEED = int(os.environ.get("BATON_FUZZ_SEED", "1")) or random.SystemRandom().randrange(1, 10**6)
#: Cases after which memory is measured for the first time. Runs with fewer cases do not measure it.
WARM_UP = 5000
#: Allowed growth of the resident memory of each process after the warm-up. Allocators keep freed
#: pages of the largest messages, so one lost byte per case is not seen before some tens of millions
#: of cases, but 1 KiB per case is. A process that started after the warm-up counts from 0, because
#: servers replace children whose input takes too long.
MAX_GROWTH_BYTES = 64 * 2**20
#: Processes that may have joined since the warm-up.
MAX_NEW_PROCESSES = 2
TIMEOUT_S = 600.0 + NUM_CASES * 0.05


def case_rng(target: str, number: int) -> random.Random:
    return random.Random(f"{SEED}/{target}/{number}")


class FuzzTarget:
    """Counts the cases at one port of a process, and checks the process.

    Args:
        pod: the process.
        name: name of the port. The name and the seed determine the cases.
        behind: other processes that must survive the cases.
    """

    def __init__(self, pod: Pod, name: str, *behind: Pod) -> None:
        self.pod = pod
        self.name = name
        self._pods = (pod, *behind)
        self._done = 0
        #: Resident memory after the warm-up, by pid.
        self._warm: dict[int, int] = {}
        self._log_starts = [each.log.stat().st_size for each in self._pods]

    def numbers(self) -> Iterator[int]:
        """Yield the numbers of all cases. Measure the memory after the warm-up."""
        for number in range(FIRST, FIRST + NUM_CASES):
            if (number - FIRST) % WARM_UP == 0 and number > FIRST:
                resident = self._resident_bytes()
                self._warm = self._warm or resident
                total = sum(resident.values())
                print(f"{self.name}: {number} cases, {total >> 20} MiB", flush=True)
            if number % 64 == 0:
                self.check_alive(number)
            yield number
            self._done += 1

    def rng(self, number: int) -> random.Random:
        return case_rng(self.name, number)

    @contextlib.contextmanager
    def checking(self, honest: Callable[[], object]) -> Iterator[None]:
        """Run the cases in the block, then check the process and send an honest request.

        Args:
            honest: sends a valid request, and raises AssertionError if the answer is wrong.
        """
        started = time.monotonic()
        honest()
        try:
            yield
        except BaseException:
            print(
                f"{self.name}: case {FIRST + self._done} or one before it fails; repeat with "
                f"BATON_FUZZ_SEED={SEED} BATON_FUZZ_CASES={NUM_CASES} BATON_FUZZ_FIRST={FIRST}",
                flush=True,
            )
            raise
        finally:
            took_s = time.monotonic() - started
            print(
                f"{self.name}: BATON_FUZZ_SEED={SEED}, {self._done} cases, {took_s:.0f} s",
                flush=True,
            )
        self.check_alive(FIRST + self._done)
        honest()
        self._check_memory()
        for pod, start in zip(self._pods, self._log_starts, strict=True):
            log = pod.log.read_bytes()[start:].decode(errors="replace")
            assert "Traceback" not in log, f"{pod.name}: {log[log.index('Traceback') :][:4000]}"

    def _resident_bytes(self) -> dict[int, int]:
        """Return the resident memory of the processes and of their children, by pid."""
        resident = {}
        for pod in self._pods:
            root = psutil.Process(pod.process.pid)
            for each in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):  # a child that has just ended
                    resident[each.pid] = each.memory_info().rss
        return resident

    def check_alive(self, number: int) -> None:
        for pod in self._pods:
            code = pod.process.poll()
            assert code is None, (
                f"{self.name}: {pod.name} ended with {code} before case {number} of seed {SEED}\n"
                f"{pod.tail()}"
            )

    def _check_memory(self) -> None:
        """Check that no process has grown since the warm-up, and that few have joined."""
        if not self._warm:
            return

        def is_flat() -> bool:
            resident = self._resident_bytes()
            growth = max(nbytes - self._warm.get(pid, 0) for pid, nbytes in resident.items())
            print(f"{self.name}: at most {growth / 2**20:+.0f} MiB since the warm-up", flush=True)
            assert growth <= MAX_GROWTH_BYTES, f"a process has grown by {growth} bytes"
            assert len(resident) <= len(self._warm) + MAX_NEW_PROCESSES, f"new: {resident}"
            return True

        eventually(is_flat, what=f"{self.name}: flat memory", timeout_s=30.0, every_s=2.0)
