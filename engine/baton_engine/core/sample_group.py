"""Samples of one prompt: the first one admitted computes the prompt, the others wait for it and then share its blocks."""

from __future__ import annotations

from collections.abc import Iterator

from baton_engine.core.request import Request, RequestStatus
from baton_engine.core.step_builder import StepBuilder


class SampleGroup:
    """The unfinished members of a group, wherever they are."""

    def __init__(self, group_id: str, first: Request) -> None:
        self.group_id = group_id
        self.members: dict[str, Request] = {}
        self.leader: Request | None = None
        """Was admitted to compute the prompt."""
        self.waiting: list[Request] = []
        """For the leader."""
        self._order = first.order
        self._prompt = first.token_ids[: first.num_prompt_tokens]
        self._cache_key = (first.cache_salt, first.lora_name)

    def add(self, request: Request) -> None:
        """Takes a member in.

        Raises:
            ValueError: its prompt's KV is not that of the group.
        """
        if request.token_ids != self._prompt:
            raise ValueError("members of a group must have equal prompts and no generated tokens")
        if (request.cache_salt, request.lora_name) != self._cache_key:
            raise ValueError("members of a group must have the same cache_salt and lora_name: they share KV blocks")
        priority, arrival, number, _ = self._order
        request.order = (priority, arrival, number, request.order[3])
        request.group = self
        self.members[request.request_id] = request

    def source(self, request: Request, step: StepBuilder) -> Request | None:
        """A running member whose prompt was computed by an earlier step: `request` can share its blocks."""
        for member in self.members.values():
            if (
                member is not request
                and member.status is RequestStatus.RUNNING
                and member.num_uncomputed_tokens <= 1
                and member.num_computed_tokens - step.num_scheduled(member) >= member.num_prompt_tokens
            ):
                return member
        return None

    def is_computing_prompt(self, step: StepBuilder | None = None) -> bool:
        """Whether the leader is at it. The members that wait for it go on when it is not: its prompt is done, or it has gone.

        Args:
            step: under construction; what it computes is not there yet.
        """
        leader = self.leader
        if leader is None or leader.status is not RequestStatus.RUNNING:
            return False
        num_scheduled = step.num_scheduled(leader) if step is not None else 0
        return leader.num_computed_tokens - num_scheduled < leader.num_prompt_tokens


class SampleGroups:
    """All groups with unfinished members."""

    def __init__(self) -> None:
        self._groups: dict[str, SampleGroup] = {}
        self._with_waiting: dict[int, SampleGroup] = {}

    def join(self, group_id: str, request: Request) -> None:
        """Makes `request` a member. Raises ValueError if its prompt's KV is not the group's."""
        group = self._groups.get(group_id) or SampleGroup(group_id, request)
        group.add(request)
        self._groups[group_id] = group

    def leave(self, request: Request) -> None:
        """`request` has ended."""
        group = request.group
        assert group is not None
        del group.members[request.request_id]
        if request in group.waiting:
            group.waiting.remove(request)
        if not group.members:
            del self._groups[group.group_id]

    def wait(self, request: Request) -> None:
        """`request` goes on when its group's leader has computed the prompt, or has gone."""
        assert request.group is not None
        request.status = RequestStatus.WAITING_FOR_PROMPT
        request.group.waiting.append(request)
        self._with_waiting[id(request.group)] = request.group

    def take_ready(self) -> Iterator[Request]:
        """Members that need not wait any more."""
        for key, group in list(self._with_waiting.items()):
            if not group.is_computing_prompt():
                del self._with_waiting[key]
                ready, group.waiting = group.waiting, []
                yield from ready
