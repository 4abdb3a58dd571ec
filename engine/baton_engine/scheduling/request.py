"""Plain data of a request inside the engine, of its beams and of its sample group.

Each field has one writer after the request was created:

status, num_preemptions, started, num_cached_tokens        RequestLifecycle
blocks, swapped_blocks, block_hashes, num_cached_blocks    KVCacheManager
num_placeholders, num_in_flight                            step.in_flight
worker                                                     WorkerMirror
report                                                     RequestOutputs
grammar, num_grammar_tokens                                grammar_queue
prefill_result, kv_transfer                                RemotePrefill
group, order                                               SampleGroups
beams, and the status of a beam                            BeamSearches

Two fields have several writers. `token_ids` grows when a token arrives: in `StepResults`,
`BeamSearches` and, with the first token of a peer, in `RemotePrefill`. `num_computed_tokens` grows
in `step.in_flight`. `RequestLifecycle`, `RemotePrefill` and `BeamSearches` set it when a request
gets or loses KV blocks.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton_engine.grammar.structured_output import Grammar
from baton_engine.kv_cache.kv_sequence import KVSequence
from baton_engine.scheduling.sequence_groups.beam_search import BeamConfig, FinishedBeams
from baton_protocol.engine_messages import (
    BeamOutput,
    EngineCoreEvent,
    EngineCoreRequest,
    KVSide,
    PrefillResult,
    RoutedExperts,
    TokenLogprobs,
)

#: (priority, arrival time, number of the group's first request, number of the request). Requests
#: are numbered in the order in which they were created. Without a group, both numbers are equal.
Order = tuple[int, float, int, int]

_sequence = itertools.count()


class RequestStatus(enum.Enum):
    """Status of a request: running, finished, or what the request waits for."""

    #: Waits for memory, a place in the batch and token budget.
    WAITING = enum.auto()
    #: Waits until the grammar of its structured output is compiled.
    WAITING_FOR_GRAMMAR = enum.auto()
    #: Waits while another request of its group computes or loads the group's prompt.
    WAITING_FOR_PROMPT = enum.auto()
    #: Waits for memory, then for a peer to send the KV blocks of the prompt and the first token.
    WAITING_FOR_REMOTE_KV = enum.auto()
    #: Preempted. Waits for its steps in flight to return.
    WAITING_FOR_STEPS = enum.auto()
    #: Preempted, with its KV in host memory.
    SWAPPED = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True)
class WorkerState:
    """Records which data of a sequence the worker already has."""

    #: Whether the worker has the sequence's tokens and block table.
    is_known: bool = False
    #: Number of tokens that the worker had when the sequence was last sent as a new request,
    #: including tokens that steps in flight sample.
    num_tokens: int = 0
    #: Leading blocks whose ids the worker has.
    num_blocks: int = 0


@dataclass(slots=True)
class Report:
    """Data, besides tokens, that the next output of a request carries."""

    #: Whether the request has had an output before.
    has_output: bool = False
    events: list[EngineCoreEvent] = field(default_factory=list)
    #: Logprobs for the next output with tokens. None: not requested, or already in an output.
    prompt_logprobs: list[TokenLogprobs] | None = None
    routed_experts: list[RoutedExperts] = field(default_factory=list)


class Request(KVSequence):
    """A request inside the engine: one sequence, or the root of a beam search.

    Each beam of a search is a sequence of its own. A parameter `sequence` is a request or beam that
    runs tokens and holds KV blocks. A parameter `request` is never a beam.
    """

    def __init__(
        self,
        core_request: EngineCoreRequest,
        *,
        ignore_priority: bool = False,
        root: Request | None = None,
    ) -> None:
        """Create a waiting request from the client's message.

        Args:
            ignore_priority: order requests by arrival only, not by priority (policy `fcfs`).
            root: request of the beam search if this sequence is a beam, else None.
        """
        super().__init__(
            core_request.request_id,
            [*core_request.prompt_token_ids, *core_request.generated_token_ids],
            core_request.cache_salt,
        )
        self.sampling_params = core_request.sampling_params
        self.pooling_params = core_request.pooling_params
        self.sample_index = core_request.sample_index
        self.kv_transfer = core_request.kv_transfer
        self.root = root
        self.num_prompt_tokens = len(core_request.prompt_token_ids)
        #: Number of tokens in the client's message. A KV transfer covers these tokens.
        self.num_arrival_tokens = len(self.token_ids)
        number = next(_sequence)
        #: The request with the smallest order runs first and is preempted last. Samples of one
        #: group are adjacent.
        priority = 0 if ignore_priority else core_request.priority
        self.order: Order = (priority, core_request.arrival_time, number, number)
        self.group: SampleGroup | None = None
        #: Set for the root of a beam search, which runs no tokens itself.
        self.beams: BeamGroup | None = None

        self.status = RequestStatus.WAITING
        #: Number of tokens that steps in flight sample, see `step.in_flight`.
        self.num_placeholders = 0
        #: Number of steps in flight that run tokens of this request.
        self.num_in_flight = 0
        #: Number of preemptions so far. If the number increases while a step is in flight, `blocks`
        #: no longer has the KV of that step.
        self.num_preemptions = 0
        self.prefill_result: PrefillResult | None = None
        self.grammar: Grammar | None = None
        #: Number of generated tokens that were passed to the grammar.
        self.num_grammar_tokens = 0

        #: Whether the request has ever joined the batch or started its KV load. If so, the
        #: statistics already count its prompt.
        self.started = False
        #: Number of prompt tokens that were cached, or shared with another request of the group,
        #: when the request first started.
        self.num_cached_tokens = 0

        self.worker = WorkerState()
        self.report = Report(
            prompt_logprobs=[] if self.sampling_params.prompt_logprobs is not None else None
        )

    @property
    def num_tokens(self) -> int:
        """Number of prompt and generated tokens, without those that steps in flight will sample."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_expected_tokens(self) -> int:
        """Number of prompt and generated tokens, plus tokens that steps in flight will sample."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens still to run, including tokens that steps in flight will sample."""
        return len(self.token_ids) + self.num_placeholders - self.num_computed_tokens

    @property
    def max_seqs(self) -> int:
        """Number of places that the request takes in the worker's batch: one, or one per beam."""
        return self.sampling_params.beam_width or 1

    @property
    def may_reuse_kv(self) -> bool:
        """Whether the request may start with cached KV, or with the KV of another sample.

        `prompt_logprobs` needs the logits of every position, so the whole prompt must run.
        """
        return self.report.prompt_logprobs is None

    @property
    def num_reusable_tokens(self) -> int:
        """Number of leading tokens whose KV may come from the prefix cache or from a peer.

        The last token always runs, because its logits are needed.
        """
        return len(self.token_ids) - 1

    @property
    def num_shared_tokens(self) -> int:
        """Number of prompt tokens whose KV the requests of a `SampleGroup` share.

        Each request runs the last prompt token itself, because the token's logits are needed.
        """
        return self.num_prompt_tokens - 1

    @property
    def produces(self) -> bool:
        """Whether the request computes KV blocks for a peer, as the prefill stage."""
        return self.kv_transfer is not None and self.kv_transfer.side is KVSide.PRODUCE

    @property
    def consumes(self) -> bool:
        """Whether the request loads KV blocks from a peer. False after the hand-off has ended."""
        return self.kv_transfer is not None and self.kv_transfer.side is KVSide.CONSUME

    @property
    def has_loaded_kv(self) -> bool:
        """Whether the request has KV from a peer in its blocks, and the hand-off has ended."""
        return self.prefill_result is not None and self.kv_transfer is None and bool(self.blocks)

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def sequences(self) -> Sequence[Request]:
        """The sequences that hold the request's KV: the request itself, or its live beams."""
        return [self] if self.beams is None else self.beams.live

    def __repr__(self) -> str:
        tokens = f"{self.num_computed_tokens}/{self.num_tokens} tokens"
        return f"Request({self.request_id}, {self.status.name}, {tokens})"


#: Separator in the id of a beam: the id of the search, this separator, and a number.
BEAM_SEPARATOR = "#"


def root_id(request_id: str) -> str:
    """Return the id of the beam search whose beam has the id `request_id`.

    The result is empty if `request_id` does not have the form of a beam's id.
    """
    root, separator, number = request_id.rpartition(BEAM_SEPARATOR)
    return root if separator and number.isdecimal() else ""


class Beam(Request):
    """One sequence of a beam search."""

    def __init__(self, core_request: EngineCoreRequest, *, root: Request) -> None:
        super().__init__(core_request, root=root)
        self.cumulative_logprob = 0.0
        #: Logprobs of the beam's generated tokens. Empty unless `logprobs` is requested.
        self.chosen: list[TokenLogprobs] = []
        #: Possible next tokens as (token id, log-probability), best first. None until the beam has
        #: run.
        self.candidates: list[tuple[int, float]] | None = None


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The beams of one search.

    The beams share KV blocks. After each token, every beam waits until all beams have run.
    """

    config: BeamConfig
    finished: FinishedBeams[BeamOutput]
    live: list[Beam] = field(default_factory=list)
    #: Number of beams created so far. The next beam gets this number.
    num_started: int = 0
    #: After a preemption: free blocks required before the search is resumed.
    num_blocks_wanted: int = 0

    def to_run(self) -> list[Beam]:
        """Return the beams that have not run since the search last advanced."""
        return [
            beam for beam in self.live if beam.num_uncomputed_tokens > 0 and not beam.num_in_flight
        ]

    @property
    def complete(self) -> bool:
        """Whether all live beams have run and have candidates for their next token."""
        return all(beam.candidates is not None for beam in self.live)


@dataclass(slots=True, eq=False)
class SampleGroup:
    """The unfinished requests that sample from one prompt."""

    group_id: str
    #: Order of the group's first request.
    order: Order
    prompt_token_ids: list[int]
    cache_salt: str
    members: dict[str, Request] = field(default_factory=dict)
    #: The member that computes the prompt, or loads its KV. None: no member does so yet.
    leader: Request | None = None
    #: Members that wait until the leader has the KV of the prompt.
    waiting: list[Request] = field(default_factory=list)
