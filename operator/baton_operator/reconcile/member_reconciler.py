"""Reconcile the members of a service, which are its prefill and decode pods.

`plan` decides the next step of each group. The step requests a topology from the coordinator, marks
members as draining, and deletes and creates members.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from baton_kube.client import KubeError, Object
from baton_operator import logs, names
from baton_operator.builders.resolved_service import controlled_by
from baton_operator.kube.events import Event, emit
from baton_operator.kube.objects import Kube
from baton_operator.observe.freshness import StaleReadError
from baton_operator.observe.pod_clients import CoordinatorClient
from baton_operator.plan.plan_group import Delete, GroupPlan
from baton_operator.plan.plan_members import plan_members
from baton_operator.plan.refused_pods import PodRefusal, RefusedPods, refusal_of
from baton_operator.plan.topology_view import TopologyView, filter_by_service_key, recorded_topology
from baton_operator.reconcile.apply import apply_object
from baton_operator.reconcile.desired import Desired
from baton_operator.reconcile.reconcile_state import ReconcileState
from baton_operator.reconcile_errors import NameConflict
from baton_operator.revision_history import PreviousRevision, find_previous_revisions
from baton_protocol.topology import TopologyRequest


class MemberReconciler:
    """Changes the groups of prefill and decode pods, by one step per call of `reconcile`."""

    def __init__(self, kube: Kube, coordinators: CoordinatorClient) -> None:
        self._kube = kube
        self._coordinators = coordinators
        #: Pods that the API server refuses. The status reports the reasons.
        self.refused_pods = RefusedPods()

    async def reconcile(self, state: ReconcileState, desired: Desired) -> bool:
        """Take the next step of each group, and add the results to `state`.

        A pod that the API server refuses does not count as a failure. The condition of its group
        reports the refusal.

        Returns:
            True if no step failed.

        Raises:
            StaleReadError: a step changes members, but they may have been read from a cache.
            KubeError: the ControllerRevisions cannot be read.
            OSError: the API server did not respond.
        """
        previous = await find_previous_revisions(
            self._kube,
            desired.resolved,
            state.observed.service,
            state.spec_revision,
            desired.members,
        )
        has_failed = False
        for role in desired.members:
            try:
                await self._take_step(state, desired, role, previous.get(role))
            except (OSError, StaleReadError):
                raise
            except Exception as error:  # a defect in one group does not stop the other
                state.add_problem(error)
                has_failed = True
        return not has_failed

    async def _take_step(
        self,
        state: ReconcileState,
        desired: Desired,
        role: names.MemberRole,
        previous: PreviousRevision | None,
    ) -> None:
        """Plan the next step of one group, and take it."""
        resolved, template = desired.resolved, desired.members[role]
        observed, now = state.observed, state.now
        view = None
        if observed.coordinator is not None and observed.topology is not None:
            recorded = recorded_topology(observed.service, observed.coordinator)
            recorded = filter_by_service_key(recorded, observed.pods, resolved.key_name)
            view = TopologyView(observed.topology, recorded)
        plan = plan_members(
            resolved,
            role,
            template,
            observed.members[role],
            now,
            view=view,
            has_coordinator=observed.coordinator is not None,
            has_previous_revision=previous is not None,
        )
        plan = self.refused_pods.delay_creation(observed.key, role, template.revision, plan, now)
        if plan.revisit_s is not None:
            state.revisits.append(plan.revisit_s)
        if plan.acts:
            observed.freshness.require_consistent()
        if plan.request is not None:
            await self._request_topology(state, plan.request)
        refusal = await self._change_members(state, desired, role, previous, plan)
        if plan.create or plan.restore:
            delay_s = self.refused_pods.record(observed.key, role, template.revision, refusal, now)
            if delay_s is not None:
                state.revisits.append(delay_s)

    async def _request_topology(self, state: ReconcileState, request: TopologyRequest) -> None:
        """Send the topology request to the coordinator, and store the reply for the status."""
        observed = state.observed
        assert observed.coordinator is not None, "the plan has a request"
        logs.operation.set(request.operation_id)
        topology = await self._coordinators.request_topology(
            observed.coordinator, request, observed.service_key
        )
        state.observed = msgspec.structs.replace(observed, topology=topology)
        if topology is not None:
            members = ", ".join(request.members)
            message = f"operation {request.operation_id}: requested a topology of {members}"
            await emit(self._kube, observed.service, Event("TopologyRequested", message))

    async def _change_members(
        self,
        state: ReconcileState,
        desired: Desired,
        role: names.MemberRole,
        previous: PreviousRevision | None,
        plan: GroupPlan,
    ) -> PodRefusal | None:
        """Mark members of the group as draining, delete members and create members.

        If marking a pod fails, the step continues, and the error is raised at the end. After the
        first pod that the API server refuses, no further pod is created.

        Returns:
            Why the API server refused a pod; None if no pod was refused.

        Raises:
            NameConflict: an object of another owner has the name of a pod or ConfigMap to create.
            KubeError: the API server refused a request.
        """
        service = state.observed.service
        uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in state.observed.pods}
        mark_errors = await self._mark_draining(service, plan.drain, uids, state.now)
        await self._delete_pods(service, plan.delete, uids)
        pods = [desired.members[role].pod(ordinal) for ordinal in plan.create]
        if plan.restore:
            assert previous is not None, "a plan restores only from a previous revision"
            await apply_object(self._kube, desired.resolved, previous.config_map, None)
            state.restored_config_maps.add(previous.config_map["metadata"]["name"])
            pods += [previous.template.pod(ordinal) for ordinal in plan.restore]
        refusal, create_errors = await self._create_pods(service, pods)
        if errors := [*mark_errors, *create_errors]:
            raise errors[0]
        return refusal

    async def _mark_draining(
        self, service: Object, pods: list[str], uids: dict[str, str], now: datetime
    ) -> list[KubeError]:
        """Mark the pods as draining since `now`. Return the errors of pods that were not marked."""
        marks = {
            names.ANNOTATION_DRAINING: "true",
            names.ANNOTATION_DRAIN_STARTED: now.isoformat(timespec="seconds"),
        }
        errors: list[KubeError] = []
        for name in pods:
            # The uid is a precondition, so that a new pod with the same name is not marked.
            patch = {"metadata": {"uid": uids[name], "annotations": marks}}
            try:
                await self._kube.merge("Pod", service["metadata"]["namespace"], name, patch)
            except KubeError as error:
                # 404, 409: the pod was deleted or replaced after it was observed.
                if error.status not in (404, 409):
                    errors.append(error)
            else:
                message = f"pod {name} gets no new requests and finishes running ones"
                await emit(self._kube, service, Event("Draining", message))
        return errors

    async def _delete_pods(
        self, service: Object, deletions: list[Delete], uids: dict[str, str]
    ) -> None:
        """Delete the pods in `deletions` that still exist."""
        namespace = service["metadata"]["namespace"]
        for deletion in deletions:
            if await self._kube.delete("Pod", namespace, deletion.name, uids[deletion.name]):
                message = f"pod {deletion.name}: {deletion.why}"
                await emit(self._kube, service, Event("Deleted", message))

    async def _create_pods(
        self, service: Object, pods: list[Object]
    ) -> tuple[PodRefusal | None, list[NameConflict | KubeError]]:
        """Create the pods in order, and stop at the first one that the API server refuses.

        Returns:
            (refusal, errors). `refusal` is why the API server refused a pod; None if no pod was
                refused. `errors` has an entry for each other pod that could not be created,
                or whose labels could not be restored.
        """
        errors: list[NameConflict | KubeError] = []
        for pod in pods:
            name = pod["metadata"]["name"]
            try:
                await self._kube.create(pod)
            except KubeError as error:
                if error.reason == "AlreadyExists":
                    try:
                        await self._restore_labels(service, pod)
                    except (NameConflict, KubeError) as conflict:
                        errors.append(conflict)
                    continue
                failed = Event("CreateFailed", f"pod {name}: {error}", warning=True)
                await emit(self._kube, service, failed)
                if refusal := refusal_of(error, name):
                    return refusal, errors
                errors.append(error)
            else:
                await emit(self._kube, service, Event("Created", f"pod {name}"))
        return None, errors

    async def _restore_labels(self, service: Object, pod: Object) -> None:
        """Restore the operator's labels on the existing pod that has the same name as `pod`.

        Such a pod was not observed, because a client removed its labels or the response to its
        creation was lost.

        Raises:
            NameConflict: the pod has another owner.
            KubeError: the API server refused a request.
        """
        name, namespace = pod["metadata"]["name"], service["metadata"]["namespace"]
        present = await self._kube.read("Pod", namespace, name)
        if present is None:
            return
        if not controlled_by(present, service["metadata"]["uid"]):
            raise NameConflict("Pod", name)
        # The revision label is not changed, because the existing pod may have another revision.
        ours = {
            label: value
            for label, value in pod["metadata"]["labels"].items()
            if label != names.LABEL_REVISION
        }
        if not ours.items() <= (present["metadata"].get("labels") or {}).items():
            await self._kube.merge(
                "Pod",
                namespace,
                name,
                {"metadata": {"uid": present["metadata"]["uid"], "labels": ours}},
            )
