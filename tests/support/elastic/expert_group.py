"""An expert-parallel group as processes on this host: coordinator, ranks and gateway.

For the integration, chaos and end-to-end tests of expert-parallel groups.
"""

from __future__ import annotations

import itertools
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from baton_protocol.options.config import CacheConfig, ParallelConfig, SchedulerConfig
from baton_protocol.service_key import ServiceKey
from baton_protocol.topology import (
    COORDINATOR_HTTP_PORT,
    COORDINATOR_PORT,
    RankPhase,
    TopologyRequest,
    TopologyStatus,
)
from support.load import Stream
from support.parity import assert_right_tokens
from support.pods import Pod, Pods
from support.waiting import eventually

VOCAB_SIZE = 512
#: Options of `create_checkpoint` for the small model that groups serve.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_experts": 8,
    "moe_intermediate_size": 32,
    "vocab_size": VOCAB_SIZE,
    "seed": 11,
}


class ExpertGroup:
    """The processes of an expert-parallel group.

    Ranks are named rank-0, rank-1 and so on. No name is used twice.
    """

    def __init__(
        self,
        pods: Pods,
        checkpoint: Path,
        *,
        num_redundant_experts: int = 0,
        tensor_parallel_size: int = 1,
        service_key_file: str = "",
        coordinator_flags: Sequence[str] = (),
    ) -> None:
        """Start the coordinator with further flags.

        All processes and topology requests use `service_key_file`.
        """
        self._pods = pods
        self._checkpoint = checkpoint
        self._parallel = ParallelConfig(
            enable_expert_parallel=True,
            num_redundant_experts=num_redundant_experts,
            tensor_parallel_size=tensor_parallel_size,
        )
        self._names = (f"rank-{number}" for number in itertools.count())
        self._operations = itertools.count(1)
        self._request = TopologyRequest(operation_id="", members=[])
        self._key_file = service_key_file
        self._key = ServiceKey.load(service_key_file)
        self.coordinator = pods.coordinator(
            service_key_file=service_key_file, flags=coordinator_flags
        )
        #: The running ranks by name.
        self.ranks: dict[str, Pod] = {}
        self.gateway: Pod | None = None

    def start(self, size: int, *, timeout_s: float = 120.0) -> None:
        """Start ranks and a gateway, and wait until the gateway is ready."""
        names = [self.add_rank() for _ in range(size)]
        self.gateway = self._pods.gateway(
            "gateway", self._checkpoint, self._roles(), service_key_file=self._key_file
        )
        self.put(names)
        self.wait_for(names, timeout_s=90.0)
        self.gateway.wait_ready(8080, timeout_s=timeout_s)

    def add_rank(self, service_key_file: str | None = None) -> str:
        """Start the process of a new rank, and return the rank's name.

        The rank serves once a topology contains its name.

        Args:
            service_key_file: key file of the rank; None for that of the group.
        """
        name = next(self._names)
        self.ranks[name] = self._pods.engine(
            name,
            self._checkpoint,
            cache=CacheConfig(memory_bytes=32 * 2**20),
            scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256),
            parallel=msgspec.structs.replace(
                self._parallel,
                coordinator=f"{self.coordinator.address}:{COORDINATOR_PORT}",
                rank_name=name,
            ),
            service_key_file=self._key_file if service_key_file is None else service_key_file,
        )
        self._discover()
        return name

    def scale(self, names: list[str]) -> TopologyStatus:
        """Request a topology of the ranks `names`, wait until they serve, and kill all others."""
        self.put(names)
        status = self.wait_for(names, timeout_s=90.0)
        for name in self.ranks.keys() - set(names):
            self.remove(name)
        return status

    def remove(self, name: str) -> None:
        """Kill a rank that is no longer a member."""
        pod = self.ranks.pop(name)
        self._discover()
        pod.kill()

    def put(self, names: list[str]) -> None:
        """Request a topology of these ranks as a new operation."""
        self._request = TopologyRequest(
            operation_id=f"operation-{next(self._operations)}", members=names
        )
        eventually(self._send, timeout_s=30.0, what="the coordinator accepts the topology")

    def _send(self) -> bool:
        body = msgspec.json.encode(self._request)
        url = f"http://{self.coordinator.address}:{COORDINATOR_HTTP_PORT}/topology"
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = self._key.bearer
        request = urllib.request.Request(url, data=body, method="PUT", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{error.code} {error.read().decode()}") from error
        except OSError as error:
            raise AssertionError(f"{error}\n{self.coordinator.tail()}") from error

    def topology(self) -> TopologyStatus:
        """Return the coordinator's status.

        Raises:
            AssertionError: the coordinator does not answer.
        """
        status, body = self.coordinator.get(COORDINATOR_HTTP_PORT, "/topology")
        assert status == 200, f"GET /topology: {status} {body}"
        return msgspec.json.decode(body, type=TopologyStatus)

    def instances(self, names: Collection[str]) -> set[str]:
        """Return the instance ids of the registered ranks among `names`."""
        return {each.instance_id for each in self.topology().members if each.name in names}

    def wait_for(
        self, names: list[str], *, timeout_s: float, dead: Collection[str] = ()
    ) -> TopologyStatus:
        """Wait until exactly the ranks `names` serve in one generation. Return the status.

        If the coordinator was restarted, send the last request again, as the operator does.

        Args:
            dead: ids of instances that have ended. The status still has them until the coordinator
                notices.
        """

        def reached() -> TopologyStatus:
            status = self.topology()
            if set(status.desired) != set(self._request.members):
                self._send()
            members = {member.name: member for member in status.members if member.rank is not None}
            assert set(members) == set(names), (
                f"{msgspec.json.encode(status).decode()}\n{self.tails()}"
            )
            assert all(member.phase is RankPhase.SERVING for member in members.values()), status
            assert not {member.instance_id for member in members.values()} & set(dead), status
            return status

        return eventually(
            reached,
            timeout_s=timeout_s,
            what=f"a topology of {', '.join(sorted(names))}",
            every_s=0.05,
        )

    def assert_all_right(
        self, streams: Sequence[Stream], model: torch.nn.Module, what: str
    ) -> None:
        """Check that all streams are complete and have the model's tokens."""
        for stream in streams:
            assert not stream.error, f"{what}: {stream.error}\n{self.tails()}"
            assert len(stream.token_ids) == stream.max_tokens, f"{what}: {stream}"
        assert_right_tokens(model, streams, what)

    def tails(self) -> str:
        pods = [self.coordinator, *self.ranks.values()]
        return "\n".join(f"--- {pod.name}\n{pod.tail(12)}" for pod in pods)

    def _roles(self) -> dict[Pod, str]:
        return dict.fromkeys(self.ranks.values(), "decode")

    def _discover(self) -> None:
        self._pods.discover("gateway", self._roles())
