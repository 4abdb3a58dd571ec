"""A step's plan decides once what all its layers share. It can be made without a device."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import cpu
from baton_kernels.attention import (
    AttentionPlan,
    Implementation,
    paged_attention,
    split_kv,
    triton_plan,
)
from baton_kernels.launch_configurations import Configuration, overriding
from support.kernels.paged_cases import LONG, PagedCase, assert_attends, layer_views, paged_case

NUM_LAYERS = 3


def plan_of(case: PagedCase, implementation: Implementation | None = None) -> AttentionPlan:
    return case.arguments(max_seqlen_q=1, implementation=implementation)[3]


def run_layers(case: PagedCase, plan: AttentionPlan) -> None:
    """Run all layers of a step, each with its own query and cache, and check their results."""
    kv_cache = case.key_cache._base
    kv_cache.copy_(torch.randn(kv_cache.shape))
    for layer in range(NUM_LAYERS):
        case.query = torch.randn_like(case.query)
        case.key_cache, case.value_cache = layer_views(kv_cache, layer)
        out = paged_attention(case.query, case.key_cache, case.value_cache, plan, case.scale)
        assert_attends(out, case)


@pytest.mark.parametrize(
    ("is_compiled", "fp8", "soft_cap", "implementation"),
    [
        (True, False, None, "cpp"),
        (True, False, 2.0, "cpp"),
        (True, True, None, "reference"),
        (False, False, None, "torch"),
        (False, False, 2.0, "reference"),
        (False, True, None, "reference"),
    ],
)
def test_the_plan_chooses_the_implementation_on_a_cpu(
    is_compiled: bool,
    fp8: bool,
    soft_cap: float | None,
    implementation: Implementation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "OPS", object() if is_compiled else None)
    plan = plan_of(paged_case([(1, 40)], 4, 2, 16, fp8=fp8, soft_cap=soft_cap))
    assert plan.implementation == implementation
    assert plan.launch is None
    assert (plan.gather is None) == (implementation != "torch")


def test_a_triton_step_is_planned_once_for_all_layers(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration, the split of long sequences and the workspace are the plan's."""
    made: list[str] = []

    def count(module: object, name: str) -> None:
        original = getattr(module, name)

        def counted(*arguments: object) -> object:
            made.append(name)
            return original(*arguments)

        monkeypatch.setattr(module, name, counted)

    def lookup(operation: str, shape_class: str, default: Configuration) -> Configuration:
        made.append("configuration")
        return {**default, "KV_TILE": 16, "PROGRAMS_PER_SM": 8}

    count(split_kv, "target_segments")
    count(triton_plan, "_empty_partials")
    case = paged_case([(1, 300), (1, 40)], 4, 2, 16).to(triton_device)
    with overriding(lookup):
        plan = plan_of(case, "triton")
        assert made == ["configuration", "target_segments", "_empty_partials"]
        run_layers(case, plan)
    assert made == ["configuration", "target_segments", "_empty_partials"]


def test_a_torch_step_gathers_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "OPS", None)
    case = paged_case(LONG, 4, 2, 16)
    plan = case.arguments()[3]
    # Making a second one would fail.
    monkeypatch.setattr("baton_kernels.attention.GatherPlan", None)
    run_layers(case, plan)


def test_layers_share_the_workspace_of_a_plan_without_a_device() -> None:
    case = paged_case([(1, 2000), (1, 90)], 8, 2, 64).to("meta")
    launch = plan_of(case, "triton").launch
    assert launch is not None
    assert launch.partials is not None
    assert launch.partials.out_ptr.shape == (launch.items, 2, launch.shared["BLOCK_M"], 64)
    assert launch.partials.segments_ptr.shape == (2, 2)
