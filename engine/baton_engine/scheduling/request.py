"""A request inside the engine, its beams and its sample group: plain data.

Each part has one writer: block fields the KV cache manager (`KVSequence`), `worker` the `WorkerMirror`, `report` the
`RequestOutputs`. The scheduler and its collaborators write the rest.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton_engine.kv_cache.sequence import KVSequence
from baton_engine.protocol.messages import (
    BeamOutput,
    EngineCoreEvent,
    EngineCoreRequest,
    KVSide,
    PrefillResult,
    RoutedExperts,
    TokenLogprobs,
)
from baton_engine.scheduling.groups.beam_search import BeamConfig, FinishedBeams

if TYPE_CHECKING:
    from baton_engine.grammar.structured_output import Grammar

#: (priority, arrival, number of the group, number of the request).
Order = tuple[int, float, int, int]

_sequence = itertools.count()


class RequestStatus(enum.Enum):
    #: Nothing but memory, a slot and budget is missing.
    WAITING = enum.auto()
    #: Its structured output is being compiled.
    WAITING_FOR_GRAMMAR = enum.auto()
    #: Another member of its group computes their prompt.
    WAITING_FOR_PROMPT = enum.auto()
    #: Its prompt's KV is computed elsewhere: waits for memory, then for the blocks, then for the
    #: first token.
    WAITING_FOR_REMOTE_KV = enum.auto()
    #: Preempted while steps of it were in flight: they come back first.
    WAITING_FOR_STEPS = enum.auto()
    #: Preempted; its KV is in host memory.
    SWAPPED = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True)
class WorkerState:
    """What the worker has of a sequence."""

    #: The worker has its tokens and block table.
    is_known: bool = False
    #: Tokens the worker was given when it took the sequence in.
    num_tokens: int = 0
    #: Leading blocks whose ids the worker has.
    num_blocks: int = 0


@dataclass(slots=True)
class Report:
    """What the next output for the client carries besides its tokens."""

    #: An output has been sent.
    has_output: bool = False
    events: list[EngineCoreEvent] = field(default_factory=list)
    #: None: not requested, or sent.
    prompt_logprobs: list[TokenLogprobs] | None = None
    routed_experts: list[RoutedExperts] = field(default_factory=list)


class Request(KVSequence):
    """One sequence, or the root of a beam search whose beams are sequences of their own."""

    def __init__(self, core_request: EngineCoreRequest, *, root: Request | None = None) -> None:
        """
        Args:
            root: of the beam search that this sequence is a beam of.
        """
        super().__init__(
            core_request.request_id,
            [*core_request.prompt_token_ids, *core_request.generated_token_ids],
            core_request.cache_salt,
            core_request.lora_name,
        )
        self.sampling_params = core_request.sampling_params
        self.sample_index = core_request.sample_index
        self.kv_transfer = core_request.kv_transfer
        self.root = root
        self.num_prompt_tokens = len(core_request.prompt_token_ids)
        #: Known when the request came; what a KV transfer covers.
        self.num_arrival_tokens = len(self.token_ids)
        number = next(_sequence)
        #: Smaller runs first and is preempted last. Members of a group stand together.
        self.order: Order = (core_request.priority, core_request.arrival_time, number, number)
        self.group: SampleGroup | None = None
        #: Set for the root of a beam search: it runs nothing itself.
        self.beams: BeamGroup | None = None

        self.status = RequestStatus.WAITING
        #: Tokens that steps in flight sample: they follow token_ids, and only the worker knows
        #: them.
        self.num_placeholders = 0
        #: Steps in flight that run tokens of it.
        self.num_in_flight = 0
        #: Tells a step that comes back whether the KV it wrote is still in `blocks`.
        self.num_preemptions = 0
        self.prefill_result: PrefillResult | None = None
        self.grammar: Grammar | None = None
        #: Generated tokens the grammar has accepted.
        self.num_grammar_tokens = 0

        #: Has had blocks; its prompt is in the counters.
        self.started = False
        #: Prompt tokens found in the prefix cache, or shared with another sample, when it first
        #: started.
        self.num_cached_tokens = 0
        #: Prompt tokens whose KV came from the peer.
        self.num_remote_tokens = 0

        self.worker = WorkerState()
        self.report = Report(prompt_logprobs=[] if self.sampling_params.prompt_logprobs is not None else None)

    @property
    def num_tokens(self) -> int:
        """Known ones."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Placeholders included: a request that is sampling always has one."""
        return len(self.token_ids) + self.num_placeholders - self.num_computed_tokens

    @property
    def max_seqs(self) -> int:
        """Places in the worker's batch that it may take."""
        return self.sampling_params.beam_width or 1

    @property
    def produces(self) -> bool:
        return self.kv_transfer is not None and self.kv_transfer.side is KVSide.PRODUCE

    @property
    def consumes(self) -> bool:
        return self.kv_transfer is not None and self.kv_transfer.side is KVSide.CONSUME

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def sequences(self) -> Sequence[Request]:
        """What holds its KV: itself, or its beams."""
        return [self] if self.beams is None else self.beams.live

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} tokens)"


class Beam(Request):
    """One sequence of a beam search; its id is `<request id>#<number>`."""

    def __init__(self, core_request: EngineCoreRequest, *, root: Request) -> None:
        super().__init__(core_request, root=root)
        self.cumulative_logprob = 0.0
        #: Of the tokens generated here.
        self.chosen: list[TokenLogprobs] = []
        #: (token id, log-probability), best first, once it has run; it waits until all beams have
        #: theirs.
        self.candidates: list[tuple[int, float]] | None = None


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The beams of one search: they share blocks, run side by side and wait for each other after every token."""

    config: BeamConfig
    finished: FinishedBeams[BeamOutput]
    live: list[Beam] = field(default_factory=list)
    #: Beams so far; the next one's number.
    num_started: int = 0
    #: After a preemption: free blocks required before the search is resumed.
    num_blocks_wanted: int = 0

    @property
    def complete(self) -> bool:
        """Whether all live beams have their candidates."""
        return all(beam.candidates is not None for beam in self.live)


@dataclass(slots=True, eq=False)
class SampleGroup:
    """The unfinished requests for samples of one prompt."""

    group_id: str
    #: Of its first request.
    order: Order
    prompt_token_ids: list[int]
    #: (cache_salt, lora_name).
    cache_key: tuple[str, str]
    members: dict[str, Request] = field(default_factory=dict)
    #: Was admitted to compute the prompt.
    leader: Request | None = None
    #: For the leader.
    waiting: list[Request] = field(default_factory=list)
