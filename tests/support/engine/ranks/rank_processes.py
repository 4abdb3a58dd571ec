"""Ranks as processes with a fake model, and a coordinator that tests script.

For the tests of the expert-parallel engine core process.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import zmq

from baton_engine.worker.experts.preparation import Preparation, PreparationState
from baton_protocol.topology import Directive, ExpertLoads, Generation, RankPhase, Status
from support.engine.engine_fakes import SparseFakeExecutor
from support.waiting import eventually

DEADLINE_S = 60.0


class IndependentExpertExecutor(SparseFakeExecutor):
    """Prepares generations at once and runs steps without the other ranks."""

    _prepared = ""

    def interrupt(self, nonce: str = "") -> None:
        pass

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None
    ) -> list[Any]:
        match method:
            case "prepare_generation":
                self._prepared = args[0].nonce
            case "preparation":
                return [Preparation(self._prepared, PreparationState.PREPARED)]
            case "commit_generation" | "drop_generation" | "leave_generation":
                pass
            case "expert_loads":
                return [ExpertLoads(((1, 2, 3, 4), (4, 3, 2, 1)))]
            case _:
                return super().collective_rpc(method, args, timeout_s=timeout_s)
        return [None]


class ScriptedCoordinator:
    """Records the statuses of all ranks. Replies to each rank with the rank's latest directive."""

    def __init__(self) -> None:
        #: Name of the rank -> latest status.
        self.statuses: dict[str, Status] = {}
        self.history: list[Status] = []
        #: Name of the rank -> latest directive.
        self.directives: dict[str, Directive] = {}

        self._router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped:
            if not self._router.poll(50):
                continue
            route, payload = self._router.recv_multipart()
            status = msgspec.msgpack.decode(payload, type=Status)
            self.statuses[status.member.name] = status
            self.history.append(status)
            directive = self.directives.get(status.member.name, Directive())
            self._router.send_multipart([route, msgspec.msgpack.encode(directive)])
        self._router.close()

    def until(self, names: list[str], what: str, **fields: Any) -> None:
        """Wait until the statuses of all ranks in `names` have the values `fields`."""

        def reached() -> bool:
            found = {name: self.statuses.get(name) for name in names}
            assert all(
                status is not None
                and all(getattr(status, field) == value for field, value in fields.items())
                for status in found.values()
            ), found
            return True

        eventually(reached, timeout_s=DEADLINE_S, what=what, every_s=0.02)

    def target(self, number: int, names: list[str], *, urgent: bool = False) -> Generation:
        members = tuple(self.statuses[name].member for name in names)
        placement = (tuple((index,) for index in range(len(names))),) * 2
        first = members[0]
        return Generation(
            number,
            f"nonce-{number}",
            members,
            placement,
            first.host,
            first.store_port,
            f"op-{number}",
            urgent,
        )

    def direct(
        self,
        names: list[str],
        target: Generation | None,
        *,
        commit: bool = False,
        dismissed: bool = False,
    ) -> None:
        for name in names:
            self.directives[name] = Directive(target, commit, dismissed)

    def commit(
        self,
        number: int,
        names: list[str],
        *,
        directed: list[str] | None = None,
        urgent: bool = False,
    ) -> Generation:
        """Commit a generation of the ranks `names`, and return it.

        Args:
            directed: ranks that receive the directives; by default `names`.
        """
        target = self.target(number, names, urgent=urgent)
        self.direct(directed or names, target)
        self.until(names, f"{target.nonce} prepared", prepared=target.nonce)
        self.direct(directed or names, target, commit=True)
        self.until(names, f"{target.nonce} committed", phase=RankPhase.SERVING, generation=target)
        return target

    def close(self) -> None:
        self._stopped = True
        self._thread.join()
