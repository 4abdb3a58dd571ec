"""The engines that the placer chooses, how long it waits for them, and the errors it raises."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from baton_gateway.errors import APIError
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.routing.engine_pool import EnginePool
from baton_gateway.routing.placer import OVERLOAD_RETRY_S, Placer, Requirements
from baton_gateway.routing.pool_member import PoolMember
from baton_gateway.routing.retry_state import MAX_FAILURES, AttemptError, RetryState
from baton_gateway.routing.sequence import Placement, SampleGroup, Sequence
from baton_protocol.engine_client.engine_client import EngineClient
from baton_protocol.engine_messages import PROTOCOL_VERSION, ErrorCode, Init, Pong, Ready
from baton_protocol.options.config import EngineEndpoint
from baton_protocol.sampling_params import SamplingParams

QUEUE_WAIT_S, RESUME_WAIT_S = 7.0, 11.0
THRESHOLD_TOKENS = 4

ready_epochs = itertools.count(1)


@dataclass
class StubClient:
    """What the placer reads from an `EngineClient`."""

    init: Init
    ready: Ready
    ready_epoch: int
    num_requests: int
    status: Pong | None = None
    accepts_requests: bool = True


def connecting(name: str, role: str = "decode") -> PoolMember:
    """Return an engine that discovery lists, and to which the gateway has no connection."""
    return PoolMember(EngineEndpoint(name=name, role=role, host="127.0.0.1"))


def connected(
    name: str,
    role: str = "decode",
    *,
    num_requests: int = 0,
    compatibility_hash: str = "h",
    kv_transport: str = "ucx",
    rank: int = 0,
) -> PoolMember:
    """Return an engine that accepts requests."""
    member = connecting(name, role)
    client = StubClient(
        Init(PROTOCOL_VERSION, name, compatibility_hash, kv_transport=kv_transport),
        Ready(256, rank),
        next(ready_epochs),
        num_requests,
    )
    member.client = cast(EngineClient, client)
    return member


class ScriptedPool:
    """The engines of a test. It records waits, and does not sleep."""

    def __init__(self, *members: PoolMember) -> None:
        self.members = list(members)
        #: Engines that become available during the next wait.
        self.arrivals: list[PoolMember] = []
        #: Timeouts of the waits, in seconds.
        self.waits_s: list[float] = []

    def available(self, role: str) -> list[PoolMember]:
        return [
            member
            for member in self.members
            if member.endpoint.role == role and member.is_available
        ]

    def is_expecting(self, role: str) -> bool:
        return any(
            member.endpoint.role == role and not member.is_available for member in self.members
        )

    async def wait_for(self, pick: Callable[[], Any], timeout_s: float) -> Any:
        self.waits_s.append(timeout_s)
        await asyncio.sleep(0)
        self.members += self.arrivals
        self.arrivals = []
        return pick()


@pytest.fixture
def metrics() -> GatewayMetrics:
    return GatewayMetrics()


@pytest.fixture
def pool() -> ScriptedPool:
    return ScriptedPool()


@pytest.fixture
def placer(pool: ScriptedPool, metrics: GatewayMetrics) -> Placer:
    return Placer(
        cast(EnginePool, pool),
        metrics,
        prefill_threshold_tokens=THRESHOLD_TOKENS,
        queue_wait_s=QUEUE_WAIT_S,
        resume_wait_s=RESUME_WAIT_S,
    )


def new_sequence(num_prompt_tokens: int = THRESHOLD_TOKENS, **fields: Any) -> Sequence:
    fields.setdefault("sampling_params", SamplingParams())
    return Sequence("r", [5] * num_prompt_tokens, **fields)


def begun_sequence() -> Sequence:
    """Return a sequence with two generated tokens."""
    return new_sequence(generated_token_ids=[6, 7])


def new_state(sequence: Sequence | None = None, rank: int | None = None) -> RetryState:
    return RetryState(sequence or new_sequence(), rank)


def failed_on(
    engine: PoolMember, code: ErrorCode | None, sequence: Sequence | None = None
) -> RetryState:
    """Return the state of a sequence whose only attempt failed on `engine`."""
    state = new_state(sequence)
    state.on_sent(Placement(engine))
    state.on_failed(AttemptError("it failed", code), has_progressed=state.sequence.has_begun)
    return state


def count_fallbacks(metrics: GatewayMetrics) -> dict[str, float]:
    """Return the number of prefill fallbacks by their reason."""
    [family] = metrics.prefill_fallbacks.collect()
    return {
        sample.labels["reason"]: sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
    }


@pytest.mark.parametrize(
    ("conditions", "is_accepted"),
    [
        pytest.param({}, True, id="no condition"),
        pytest.param({"excluded": {4}}, True, id="another engine is excluded"),
        pytest.param({"excluded": {4, 3}}, False, id="the engine is excluded"),
        pytest.param({"compatibility_hash": "h"}, True, id="its hash"),
        pytest.param({"compatibility_hash": "other"}, False, id="another hash"),
        pytest.param({"kv_transport": "ucx"}, True, id="its transport"),
        pytest.param({"kv_transport": "tcp"}, False, id="another transport"),
        pytest.param({"data_parallel_rank": 1}, True, id="its rank"),
        pytest.param({"data_parallel_rank": 0}, False, id="rank 0, which is another rank"),
    ],
)
def test_an_engine_is_accepted_if_it_satisfies_each_condition(
    conditions: dict[str, Any], is_accepted: bool
) -> None:
    engine = connected("d", compatibility_hash="h", kv_transport="ucx", rank=1)
    engine.ready_client.ready_epoch = 3
    assert Requirements(**conditions).accept(engine) is is_accepted


async def test_the_engine_with_the_fewest_requests_is_chosen(
    placer: Placer, pool: ScriptedPool
) -> None:
    pool.members = [connected(f"d{number}", num_requests=number) for number in (3, 1, 2)]
    placement, prefill = await placer.place(new_state())
    assert (placement.member.endpoint.name, prefill) == ("d1", None)
    assert pool.waits_s == []


async def test_an_engine_that_failed_is_chosen_again_only_after_it_was_ready_again(
    placer: Placer, pool: ScriptedPool
) -> None:
    failed, busy = connected("d0"), connected("d1", num_requests=9)
    pool.members = [failed, busy]
    state = failed_on(failed, ErrorCode.INTERNAL)
    assert (await placer.place(state))[0].member is busy
    failed.ready_client.ready_epoch = next(ready_epochs)
    assert (await placer.place(state))[0].member is failed


@pytest.mark.parametrize(
    ("sequence", "name"),
    [
        pytest.param(new_sequence(), "d1", id="no tokens"),
        pytest.param(begun_sequence(), "d2", id="tokens"),
    ],
)
async def test_only_a_sequence_with_tokens_needs_an_engine_with_the_same_hash(
    placer: Placer, pool: ScriptedPool, sequence: Sequence, name: str
) -> None:
    lost = connected("d0")
    pool.members = [connected("d1", compatibility_hash="other"), connected("d2", num_requests=9)]
    placement, _ = await placer.place(failed_on(lost, None, sequence))
    assert placement.member.endpoint.name == name


async def test_a_sequence_is_sent_to_the_rank_that_its_client_named(
    placer: Placer, pool: ScriptedPool
) -> None:
    pool.members = [connected("d0", rank=0), connected("d1", rank=1, num_requests=9)]
    placement, _ = await placer.place(new_state(rank=1))
    assert placement.member.endpoint.name == "d1"


@pytest.mark.parametrize(
    ("engines", "name", "fallbacks"),
    [
        pytest.param([connected("p0", "prefill")], "p0", {}, id="compatible"),
        pytest.param(
            [connected("p0", "prefill", compatibility_hash="other")],
            None,
            {"no_compatible_engine": 1.0},
            id="another hash",
        ),
        pytest.param(
            [connected("p0", "prefill", kv_transport="tcp")],
            None,
            {"no_compatible_engine": 1.0},
            id="another transport",
        ),
        pytest.param(
            [connecting("p0", "prefill")], None, {"no_ready_engine": 1.0}, id="not ready yet"
        ),
        pytest.param([], None, {}, id="a service without prefill engines"),
    ],
)
async def test_the_prefill_engine_can_exchange_kv_blocks_with_the_decode_engine(
    placer: Placer,
    pool: ScriptedPool,
    metrics: GatewayMetrics,
    engines: list[PoolMember],
    name: str | None,
    fallbacks: dict[str, float],
) -> None:
    pool.members = [connected("d0"), *engines]
    _, prefill = await placer.place(new_state())
    assert (prefill and prefill.endpoint.name) == name
    assert count_fallbacks(metrics) == fallbacks


@pytest.mark.parametrize(
    ("sequence", "has_prefill"),
    [
        pytest.param(new_sequence(THRESHOLD_TOKENS), True, id="a long prompt"),
        pytest.param(new_sequence(THRESHOLD_TOKENS - 1), False, id="a short prompt"),
        pytest.param(begun_sequence(), False, id="a resumed sequence"),
        pytest.param(
            new_sequence(sampling_params=SamplingParams(beam_width=2)), False, id="a beam search"
        ),
        pytest.param(
            new_sequence(sampling_params=SamplingParams(prompt_logprobs=0)),
            False,
            id="logprobs of the prompt",
        ),
    ],
)
async def test_only_long_prompts_whose_first_token_a_prefill_engine_may_sample_have_a_prefill_stage(
    placer: Placer,
    pool: ScriptedPool,
    metrics: GatewayMetrics,
    sequence: Sequence,
    has_prefill: bool,
) -> None:
    pool.members = [connected("d0"), connected("p0", "prefill")]
    _, prefill = await placer.place(new_state(sequence))
    assert (prefill is not None) == has_prefill
    assert count_fallbacks(metrics) == {}


async def test_a_prefill_engine_that_arrives_with_the_decode_engine_is_used(
    placer: Placer, pool: ScriptedPool
) -> None:
    decode, prefill = connected("d0"), connected("p0", "prefill")
    pool.arrivals = [decode, prefill]
    placement, chosen = await placer.place(new_state())
    assert (placement.member, chosen) == (decode, prefill)
    assert pool.waits_s == [QUEUE_WAIT_S]


async def test_samples_of_one_prompt_share_an_engine_and_one_prefill_stage(
    placer: Placer, pool: ScriptedPool
) -> None:
    first_choice = connected("d0")
    pool.members = [first_choice, connected("d1", num_requests=1), connected("p0", "prefill")]
    group = SampleGroup("g")
    first, prefill = await placer.place(new_state(new_sequence(group=group)))
    assert prefill is not None
    first.has_sample = True
    first_choice.ready_client.num_requests = 9
    assert await placer.place(new_state(new_sequence(group=group))) == (first, None)


async def test_samples_that_wait_for_an_engine_get_the_same_one(
    placer: Placer, pool: ScriptedPool
) -> None:
    pool.arrivals = [connected("d0"), connected("d1")]
    group = SampleGroup("g")
    samples = [new_state(new_sequence(group=group)) for _ in range(3)]
    chosen = await asyncio.gather(*(placer.place(sample) for sample in samples))
    assert len({placement for placement, _ in chosen}) == 1
    assert pool.waits_s == [QUEUE_WAIT_S], "each sample waited"


async def test_samples_of_a_lost_engine_move_to_one_other_engine(
    placer: Placer, pool: ScriptedPool
) -> None:
    lost, near, idle = connected("d0"), connected("d1", num_requests=1), connected("d2")
    pool.members = [lost]
    group = SampleGroup("g")
    samples = [new_state(new_sequence(group=group)) for _ in range(2)]
    for sample in samples:
        placement, _ = await placer.place(sample)
        sample.on_sent(placement)
        sample.on_failed(AttemptError("it was lost", None), has_progressed=False)
    lost.client = None
    pool.members = [lost, near]
    first, _ = await placer.place(samples[0])
    pool.members = [lost, near, idle]
    second, _ = await placer.place(samples[1])
    assert first.member is near
    assert second is first


async def test_samples_that_fail_alone_are_placed_alone(placer: Placer, pool: ScriptedPool) -> None:
    shared, other = connected("d0"), connected("d1", num_requests=9)
    pool.members = [shared, other]
    group = SampleGroup("g")
    placement, _ = await placer.place(new_state(new_sequence(group=group)))
    samples = [failed_on(shared, ErrorCode.INTERNAL, new_sequence(group=group)) for _ in range(2)]
    alone = [(await placer.place(sample))[0] for sample in samples]
    assert [each.member for each in alone] == [other, other]
    assert alone[0] is not alone[1], "they share a placement"
    assert (await placer.place(new_state(new_sequence(group=group))))[0] is placement


async def test_an_engine_that_was_lost_before_a_sample_was_sent_is_replaced(
    placer: Placer, pool: ScriptedPool
) -> None:
    lost, other = connected("d0"), connected("d1", num_requests=9)
    pool.members = [lost, other]
    group = SampleGroup("g")
    await placer.place(new_state(new_sequence(group=group)))
    lost.client = None
    assert (await placer.place(new_state(new_sequence(group=group))))[0].member is other


@pytest.mark.parametrize(
    ("code", "sequence", "is_starting", "wait_s"),
    [
        pytest.param(None, new_sequence(), False, RESUME_WAIT_S, id="lost, no tokens"),
        pytest.param(None, begun_sequence(), False, RESUME_WAIT_S, id="lost, tokens"),
        pytest.param(ErrorCode.DRAINING, new_sequence(), False, QUEUE_WAIT_S, id="draining"),
        pytest.param(
            ErrorCode.DRAINING, begun_sequence(), False, RESUME_WAIT_S, id="draining, tokens"
        ),
        pytest.param(ErrorCode.OVERLOADED, new_sequence(), True, 0.0, id="full"),
        pytest.param(ErrorCode.INTERNAL, new_sequence(), False, 0.0, id="failed, none starts"),
        pytest.param(ErrorCode.INTERNAL, new_sequence(), True, QUEUE_WAIT_S, id="failed"),
        pytest.param(
            ErrorCode.INTERNAL, begun_sequence(), False, 0.0, id="failed, tokens, none starts"
        ),
        pytest.param(
            ErrorCode.INTERNAL, begun_sequence(), True, RESUME_WAIT_S, id="failed, tokens"
        ),
    ],
)
async def test_the_wait_for_an_engine_that_has_not_failed_the_sequence(
    placer: Placer,
    pool: ScriptedPool,
    code: ErrorCode | None,
    sequence: Sequence,
    is_starting: bool,
    wait_s: float,
) -> None:
    failed = connected("d0")
    pool.members = [failed, connecting("d1")] if is_starting else [failed]
    with pytest.raises(APIError):
        await placer.place(failed_on(failed, code, sequence))
    assert pool.waits_s == [wait_s]


async def test_a_sequence_with_tokens_returns_to_a_full_engine_if_no_other_appears(
    placer: Placer, pool: ScriptedPool
) -> None:
    full = connected("d0")
    pool.members = [full]
    placement, _ = await placer.place(failed_on(full, ErrorCode.OVERLOADED, begun_sequence()))
    assert placement.member is full
    assert pool.waits_s == [OVERLOAD_RETRY_S, RESUME_WAIT_S]


async def test_a_sequence_with_tokens_fails_if_engines_were_full_for_resume_wait_s(
    placer: Placer, pool: ScriptedPool
) -> None:
    full = connected("d0")
    pool.members = [full]
    state = failed_on(full, ErrorCode.OVERLOADED, begun_sequence())
    state.stalled_since = time.monotonic() - RESUME_WAIT_S - 1.0
    with pytest.raises(APIError) as error:
        await placer.place(state)
    assert error.value.status == 429
    assert pool.waits_s == []


async def test_a_sequence_that_failed_too_often_gets_no_engine(
    placer: Placer, pool: ScriptedPool
) -> None:
    engine = connected("d0")
    pool.members = [engine, connected("d1")]
    state = failed_on(engine, ErrorCode.INTERNAL)
    state.num_failures = MAX_FAILURES - 1
    await placer.place(state)
    state.num_failures = MAX_FAILURES
    with pytest.raises(APIError) as error:
        await placer.place(state)
    assert error.value.status == 500


@pytest.mark.parametrize(
    ("code", "status", "error_code"),
    [
        (None, 503, "service_unavailable"),
        (ErrorCode.DRAINING, 503, "service_unavailable"),
        (ErrorCode.OVERLOADED, 429, "rate_limit_exceeded"),
        (ErrorCode.INTERNAL, 500, "internal_error"),
    ],
)
async def test_without_another_engine_the_last_failure_decides_the_error(
    placer: Placer, code: ErrorCode | None, status: int, error_code: str
) -> None:
    with pytest.raises(APIError) as error:
        await placer.place(failed_on(connected("d0"), code))
    assert (error.value.status, error.value.code) == (status, error_code)


@pytest.mark.parametrize(("rank", "text"), [(None, "No decode engine"), (3, "rank 3 is not ready")])
async def test_the_error_of_a_sequence_that_found_no_engine_names_the_rank(
    placer: Placer, rank: int | None, text: str
) -> None:
    with pytest.raises(APIError, match=text) as error:
        await placer.place(new_state(rank=rank))
    assert (error.value.status, error.value.code) == (503, "no_ready_engine")
