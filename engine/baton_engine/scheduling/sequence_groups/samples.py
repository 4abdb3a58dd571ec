"""Samples of one prompt, which share the blocks of the prompt's KV.

The first request of a group computes the KV, or loads it from a peer. The other requests of the
group then share its blocks.
"""

from __future__ import annotations

from baton_engine.scheduling.decisions import LazyDecisions, Queued
from baton_engine.scheduling.request import Request, RequestStatus, SampleGroup
from baton_engine.scheduling.step.builder import StepBuilder


class SampleGroups:
    """The groups of unfinished requests that sample from one prompt."""

    def __init__(self) -> None:
        self._groups: dict[str, SampleGroup] = {}
        self._with_waiting: dict[int, SampleGroup] = {}

    def join(self, group_id: str, request: Request) -> None:
        """Add `request` to the group `group_id`. The first request creates the group.

        The first request that loads the prompt's KV from a peer does so for the whole group.

        Raises:
            ValueError: the prompt or cache_salt of `request` differs from the group's, or
                `request` has generated tokens.
        """
        prompt = request.token_ids[: request.num_prompt_tokens]
        group = self._groups.get(group_id) or SampleGroup(
            group_id, request.order, prompt, request.cache_salt
        )
        if request.token_ids != group.prompt_token_ids:
            raise ValueError(
                "requests with one group_id must have equal prompts and no generated_token_ids"
            )
        if request.cache_salt != group.cache_salt:
            raise ValueError(
                "requests with one group_id must have the same cache_salt: they share KV blocks"
            )
        request.order = (*group.order[:3], request.order[3])
        request.group = group
        group.members[request.request_id] = request
        if request.consumes and group.leader is None:
            group.leader = request
        self._groups[group_id] = group

    def lead(self, request: Request) -> None:
        """Make `request` the member of its group that computes the prompt.

        Do nothing if `request` has no group.
        """
        if request.group is not None:
            request.group.leader = request

    def leave(self, request: Request) -> None:
        """Remove an ended request from its group."""
        group = request.group
        assert group is not None
        del group.members[request.request_id]
        if group.leader is request:
            group.leader = None
        if request in group.waiting:
            group.waiting.remove(request)
        if not group.members:
            del self._groups[group.group_id]

    def source(self, request: Request, step: StepBuilder) -> Request | None:
        """Return a request whose prompt blocks `request` can share, or None.

        The returned request is running or has loaded its KV. The shared tokens are computed by
        steps before `step`.
        """
        for member in request.group.members.values() if request.group is not None else ():
            if (
                member is not request
                and (member.status is RequestStatus.RUNNING or member.has_loaded_kv)
                and member.num_uncomputed_tokens <= 1
                and member.num_computed_tokens - step.num_scheduled(member)
                >= request.num_shared_tokens
                and not step.copies_to_block_at(member, request.num_shared_tokens)
            ):
                return member
        return None

    def is_computing_prompt(self, group: SampleGroup, step: StepBuilder | None = None) -> bool:
        """Return whether a member of `group` computes the prompt's KV, or loads or will load it.

        If so, the other members wait.

        Args:
            step: step under construction. Tokens scheduled in this step count as not yet computed.
                None: no step is under construction.
        """
        leader = group.leader
        if leader is None:
            return False
        if leader.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            return True
        if leader.status is not RequestStatus.RUNNING and not leader.has_loaded_kv:
            return False
        num_scheduled = step.num_scheduled(leader) if step is not None else 0
        return leader.num_computed_tokens - num_scheduled < leader.num_shared_tokens

    def wait(self, request: Request) -> None:
        """Hold `request` while another request of its group computes or loads the prompt."""
        assert request.group is not None
        request.group.waiting.append(request)
        self._with_waiting[id(request.group)] = request.group

    def take_ready(self) -> LazyDecisions[Queued]:
        """Release the waiting requests of each group whose prompt is not being computed or loaded.

        Yield the decision that queues each request.
        """
        for key, group in list(self._with_waiting.items()):
            if not self.is_computing_prompt(group):
                del self._with_waiting[key]
                ready, group.waiting = group.waiting, []
                yield from map(Queued, ready)
