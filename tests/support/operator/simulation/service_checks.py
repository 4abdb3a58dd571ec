"""Invariants of every step of the operator.

For the tests of the Reconciler.

The operator's observation may be outdated. Each step is therefore checked against the observation,
the operator's earlier actions and the current cluster.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from baton_kube.client import Object
from baton_operator import names
from baton_operator.api.llmservice import Spec, decode_spec
from baton_operator.api.spec_groups import surge_and_unavailable
from baton_operator.builders.resolved_service import controlled_by
from baton_operator.observe.observation import member
from baton_operator.plan.plan_group import STUCK_TERMINATING, Member
from support.operator.simulation.api_server import ApiServer, SimulatedClient
from support.operator.simulation.nodes import MEMBER_NAME

#: Members by name.
Pods = dict[str, Object]


class StepChecks:
    """Checks the invariants of one service after each step of the operator."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        #: uids of pods that the operator has marked as draining, or deleted.
        self._spent: set[str] = set()
        #: Actions that were confirmed to the operator: (action, uid of the pod).
        self._stored_status: set[tuple[str, str]] = set()
        #: (uid, generation)
        self._spec_seen: tuple[str, int] | None = None

    def after(
        self,
        client: SimulatedClient,
        before: Pods,
        after: Pods,
        ranks: dict[str, str],
        went_well: bool,
    ) -> None:
        """Check one step of the operator.

        Args:
            before, after: the member pods before and after the step.
            ranks: name -> uid of the ranks before the step.
            went_well: whether the step succeeded without any disturbance.
        """
        service = client.seen_service
        self._nothing_is_done_twice(client, {**before, **after})
        if service is None or service["metadata"].get("deletionTimestamp"):
            assert not client.writes, "a service that is gone"
            return
        uid, generation = service["metadata"]["uid"], service["metadata"]["generation"]
        named = {
            pod["metadata"]["name"]: pod for pod in client.seen_pods if controlled_by(pod, uid)
        }
        seen = {name: pod for name, pod in named.items() if MEMBER_NAME.search(name)}
        if self._spec_seen != (uid, generation):
            self._spec_seen = (uid, generation)
            self._at_first, self._departed, self._newest = seen, list[Object](), dict[str, str]()
        touched = {
            path.split("/")[-1]
            for method, path in client.writes
            if "/pods/" in path and method != "POST"
        }
        deleted = {
            path.split("/")[-1]
            for method, path in client.writes
            if "/pods/" in path and method == "DELETE"
        }
        spec = decode_spec(service["spec"])
        self._no_rank_is_deleted(deleted, seen, before, ranks)
        for role in names.MEMBER_ROLES:
            desired = _size(role, spec, service)
            self._group(
                role, spec, desired, _of(role, seen), _of(role, before), _of(role, after), touched
            )
        self._spent |= {seen[name]["metadata"]["uid"] for name in touched if name in seen}
        if went_well:
            self._no_member_leaves_without_need()

    def _nothing_is_done_twice(self, client: SimulatedClient, pods: Pods) -> None:
        """Check that no confirmed action is repeated, even if the watches are late."""
        uids = set(map(_uid, pods.values()))
        for what, uid in client.confirmed:
            if what == "exists":
                assert uid not in uids or ("made", uid) not in self._stored_status, (
                    "a pod was to be made a second time"
                )
                continue
            assert (what, uid) not in self._stored_status, f"a pod was {what} twice"
            self._stored_status.add((what, uid))

    def _group(
        self,
        role: names.MemberRole,
        spec: Spec,
        desired: int,
        seen: Pods,
        before: Pods,
        after: Pods,
        touched: set[str],
    ) -> None:
        strategy = spec.update_strategy.decode if role == "decode" else spec.update_strategy.prefill
        surge, unavailable = surge_and_unavailable(strategy, desired)
        all_pods = {**seen, **before}
        is_group = role == "decode" and (
            spec.decode.parallelism.expert or any(map(is_rank, all_pods.values()))
        )
        made = [
            name
            for name, pod in after.items()
            if name not in before or _uid(pod) != _uid(before[name])
        ]
        now, alive = self._alive(after), self._alive(before)
        if spec.paused:
            # A topology needs members: when all ranks leave or are deleted, one is created at once.
            begins = (
                is_group and len(made) == 1 and not any(stays(member(pod)) for pod in seen.values())
            )
            assert not made or begins or len(now) <= desired + surge, f"{role}: more in a pause"
        elif made:
            assert len(now) <= max(
                desired + max(surge, 1 if is_group else 0), len(alive) + is_group
            ), f"{role}: more than {desired} and a surge of {surge}: {[m.name for m in now]}"
        if is_group:
            return  # ranks serve, not pods
        members = {name: member(pod) for name, pod in seen.items() if _uid(pod) not in self._spent}
        taken = [m for m in members.values() if healthy(m) and m.name in touched]
        if taken and not spec.paused:
            waits = self._waits_for_room(
                list(members.values()), timedelta(seconds=strategy.surge_timeout_seconds)
            )
            wanted = desired - max(unavailable, 1 if waits else 0)
            left = sum(healthy(m) for m in members.values()) - len(taken)
            assert left >= wanted, (
                f"{role}: {left} of {desired} serve, {[m.name for m in taken]} were taken"
            )
        if spec.paused:
            assert len(taken) <= max(0, sum(map(stays, members.values())) - desired), (
                f"{role}: taken away in a pause"
            )
        self._departed += [seen[m.name] for m in taken]

    def _no_member_leaves_without_need(self) -> None:
        """Check that serving members of the newest revision leave only if the size shrinks."""
        services = self._server.list(f"{names.PLURAL}.{names.GROUP}")
        for role in names.MEMBER_ROLES:
            reported = (services[0].get("status") or {}).get(role) or {} if services else {}
            newest, desired = reported.get("revision"), reported.get("desired", 0)
            if newest is None or self._newest.setdefault(role, newest) != newest:
                continue
            at_first = map(member, _of(role, self._at_first).values())
            surplus = sum(m.revision == newest and stays(m) for m in at_first) - desired
            gone = [
                pod
                for pod in self._departed
                if _role(pod) == role and member(pod).revision == newest
            ]
            assert len(gone) <= max(0, surplus), (
                f"{role}: {[pod['metadata']['name'] for pod in gone]} had no reason to go"
            )

    def _no_rank_is_deleted(
        self, deleted: set[str], seen: Pods, before: Pods, ranks: dict[str, str]
    ) -> None:
        for name in deleted & set(ranks) & set(before):
            if name not in seen or _uid(seen[name]) != _uid(before[name]):
                continue  # its successor was not touched: the uid is a precondition
            if _uid(before[name]) != ranks[name]:
                continue  # the rank's pod is gone, and another pod has its name
            m = member(seen[name])
            assert m.failed or (m.draining and set(ranks) == {name}), f"{name} is a rank"

    def _alive(self, pods: Pods) -> list[Member]:
        members = map(member, pods.values())
        return [
            m
            for m in members
            if m.deletion is None or self._server.now < m.deletion + STUCK_TERMINATING
        ]

    def _waits_for_room(self, members: list[Member], patience: timedelta) -> bool:
        now: datetime = self._server.now
        return any(m.no_room_since and now >= m.no_room_since + patience for m in members)


def _size(role: names.MemberRole, spec: Spec, service: Object) -> int:
    """Return the desired size of a group.

    If an edit during a pause removes the group, the size is the desired size in the status.
    """
    group = spec.prefill if role == "prefill" else spec.decode
    if group is None and spec.paused:
        return int(((service.get("status") or {}).get(role) or {}).get("desired", 0))
    return group.replicas if group else 0


def _of(role: str, pods: Pods) -> Pods:
    return {name: pod for name, pod in pods.items() if _role(pod) == role}


def _role(pod: Object) -> str:
    return str(pod["metadata"]["labels"][names.LABEL_ROLE])


def _uid(pod: Object) -> str:
    return str(pod["metadata"]["uid"])


def is_rank(pod: Object) -> bool:
    return names.ANNOTATION_EXPERT_GROUP in (pod["metadata"].get("annotations") or {})


def stays(m: Member) -> bool:
    return m.deletion is None and not m.failed and not m.draining


def healthy(m: Member) -> bool:
    return stays(m) and m.ready
