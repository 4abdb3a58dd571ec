"""Dispatch of steps to CUDA graphs: the smallest captured graph that fits the step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton_engine.compilation.cudagraph_dispatcher import (
    BatchDescriptor,
    CudagraphDispatcher,
    CudagraphMode,
    GraphKind,
)

MODES = st.sampled_from(CudagraphMode)
SIZES = st.lists(st.integers(1, 40), max_size=6)


@st.composite
def steps(draw: st.DrawFn) -> tuple[CudagraphDispatcher, int, int]:
    """(dispatcher, tokens, sequences) of a step that the dispatcher's engine may run."""
    max_num_seqs = draw(st.integers(1, 20))
    num_seqs = draw(st.integers(1, max_num_seqs))
    num_tokens = draw(st.one_of(st.just(num_seqs), st.integers(num_seqs, 50)))
    return CudagraphDispatcher(draw(MODES), draw(SIZES), max_num_seqs), num_tokens, num_seqs


@given(steps())
def test_a_step_fits_into_its_graph_and_the_graph_is_captured(
    step: tuple[CudagraphDispatcher, int, int],
) -> None:
    dispatcher, num_tokens, num_seqs = step
    answer = dispatcher.dispatch(num_tokens, num_seqs)
    assert (answer.descriptor is None) == (answer.kind is GraphKind.NONE)
    if answer.descriptor is None:
        return
    assert answer in dispatcher.graphs()
    assert answer.descriptor.num_tokens >= num_tokens
    assert (answer.descriptor.num_seqs is None) == (answer.kind is GraphKind.PIECEWISE)
    if answer.descriptor.num_seqs is not None:
        assert num_seqs <= answer.descriptor.num_seqs <= dispatcher.max_padded_seqs
    if answer.descriptor.uniform_decode:
        assert num_tokens == num_seqs, "attention would take a chunk for a decode"


@given(steps())
def test_a_step_gets_the_smallest_graph_that_fits_and_none_if_it_is_too_large(
    step: tuple[CudagraphDispatcher, int, int],
) -> None:
    dispatcher, num_tokens, num_seqs = step
    uniform = num_tokens == num_seqs
    kind = dispatcher.mode.decode if uniform else dispatcher.mode.mixed
    answer = dispatcher.dispatch(num_tokens, num_seqs)
    fitting = [size for size in dispatcher.sizes if size >= num_tokens]
    if kind is GraphKind.NONE or not fitting:
        assert answer.descriptor is None
    else:
        assert answer.kind is kind
        assert answer.descriptor.num_tokens == min(fitting)


@given(MODES, SIZES, st.integers(1, 20))
def test_graphs_are_captured_once_each_in_descending_size(
    mode: CudagraphMode, sizes: list[int], max_num_seqs: int
) -> None:
    graphs = CudagraphDispatcher(mode, sizes, max_num_seqs).graphs()
    numbers = [graph.descriptor.num_tokens for graph in graphs if graph.descriptor is not None]
    assert len(numbers) == len(graphs) == len(set(graphs))
    assert numbers == sorted(numbers, reverse=True)


def test_the_largest_decode_graph_is_the_smallest_that_fits_all_sequences() -> None:
    dispatcher = CudagraphDispatcher(
        CudagraphMode.FULL_DECODE_ONLY, [1, 2, 4, 8, 16], max_num_seqs=6
    )
    descriptors = [graph.descriptor for graph in dispatcher.graphs()]
    assert descriptors == [BatchDescriptor(size, size, True) for size in (8, 4, 2, 1)]
