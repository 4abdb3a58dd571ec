"""The piecewise backend of torch.compile: logits, graph splits and compiled sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from baton_engine.compilation.cache_key import piece_key
from baton_engine.compilation.inductor import InductorCompiler
from baton_engine.compilation.passes import RemoveNoOps
from baton_engine.compilation.piecewise import PieceCompiler, PiecewiseBackend, compile_model
from baton_engine.distributed.group import ParallelContext
from baton_engine.models.layers import CausalLM
from baton_engine.models.operators import SPLITTING
from baton_engine.random_checkpoint import create_checkpoint
from support.engine.model_cases import CPU, load, run_model, run_ranks

NUM_LAYERS = 3
SEQUENCES = [list(range(3, 20)), list(range(40, 57))]


class RecordingCompiler:
    """Compiles nothing and records the pieces and sizes it gets."""

    def __init__(self) -> None:
        self.requested: list[tuple[str | None, int | None]] = []
        self.graphs: list[fx.GraphModule] = []

    def open(self, key: str) -> None:
        pass

    def compile(
        self, graph: fx.GraphModule, arguments: Sequence[Any], size: int | None
    ) -> Callable[..., Any]:
        self.requested.append((piece_key(graph), size))
        self.graphs.append(graph)
        return graph.forward


class CompiledModel:
    """A model whose forward is compiled, as `run_model` takes it."""

    def __init__(
        self, model: CausalLM, compiler: PieceCompiler, compile_sizes: Sequence[int] = ()
    ) -> None:
        self.parallel, self.config, self.compute_logits = (
            model.parallel,
            model.config,
            model.compute_logits,
        )
        self.backend = PiecewiseBackend(compiler, SPLITTING, compile_sizes, (model.config,), CPU)
        self._forward = compile_model(model, self.backend)

    def __call__(self, *args: Tensor | None) -> Tensor:
        return self._forward(*args)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> dict[str, CausalLM]:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": NUM_LAYERS,
        "vocab_size": 300,
    }
    return {
        arch: load(create_checkpoint(checkpoints / arch, arch, **sizes))
        for arch in ("llama", "qwen3", "qwen3_moe")
    }


def assert_same_logits(compiled: CompiledModel, model: CausalLM) -> None:
    """Compare steps of several sizes.

    The first is traced. Later ones have one token per sequence, or more tokens than the first.
    """
    for chunk in (5, 1, 17):
        actual = run_model(compiled, SEQUENCES, chunk)  # type: ignore[arg-type]
        torch.testing.assert_close(actual, run_model(model, SEQUENCES, chunk), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("arch", "sizes"), [("llama", ()), ("qwen3", (2,)), ("qwen3_moe", (2, 10))]
)
def test_inductor_computes_the_same_logits_and_a_second_start_compiles_nothing(
    models: dict[str, CausalLM],
    arch: str,
    sizes: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: list[fx.Graph] = []
    run_pass = RemoveNoOps.__call__
    monkeypatch.setattr(
        RemoveNoOps,
        "__call__",
        lambda self, graph: (passed.append(graph), run_pass(self, graph))[1],
    )
    model = models[arch]
    compiled = CompiledModel(model, InductorCompiler(tmp_path), sizes)
    assert_same_logits(compiled, model)
    assert compiled.backend.num_pieces == NUM_LAYERS + 1
    # Pieces before the first attention, between two, and after the last. Those between are equal.
    num_different = 3 * (1 + len(sizes))
    assert len(passed) == num_different

    assert_same_logits(CompiledModel(model, InductorCompiler(tmp_path), sizes), model)
    assert len(passed) == num_different, "the second start loads all pieces"


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3_moe"])
def test_the_graph_is_split_at_every_attention_and_the_layers_share_one_key(
    models: dict[str, CausalLM], arch: str
) -> None:
    compiler = RecordingCompiler()
    compiled = CompiledModel(models[arch], compiler)
    assert_same_logits(compiled, models[arch])
    assert compiled.backend.num_pieces == len(compiler.requested) == NUM_LAYERS + 1
    assert len({key for key, _ in compiler.requested}) == 3
    operators = [str(node.target) for graph in compiler.graphs for node in graph.graph.nodes]
    assert not any("attend" in name for name in operators)
    assert sum("mix_experts" in name for name in operators) == (
        NUM_LAYERS if arch == "qwen3_moe" else 0
    )


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_compiled_ranks_compute_the_logits_of_one_rank(
    checkpoints: Path, models: dict[str, CausalLM], tensor: int, pipeline: int
) -> None:
    def work(parallel: ParallelContext) -> Tensor:
        compiled = CompiledModel(load(checkpoints / "llama", parallel), RecordingCompiler())
        return run_model(compiled, SEQUENCES, 5)  # type: ignore[arg-type]

    expected = run_model(models["llama"], SEQUENCES, 5)
    torch.testing.assert_close(
        run_ranks(work, tensor, pipeline)[-1], expected, atol=1e-4, rtol=1e-4
    )


def test_two_models_of_one_class_keep_their_own_weights(
    models: dict[str, CausalLM], tmp_path: Path
) -> None:
    other = load(
        create_checkpoint(
            tmp_path / "other", "llama", hidden_size=32, num_layers=1, vocab_size=300, seed=5
        )
    )
    both = [
        (CompiledModel(model, RecordingCompiler()), model) for model in (models["llama"], other)
    ]
    for compiled, model in (*both, *both):
        assert_same_logits(compiled, model)


def test_a_second_trace_of_the_model_is_an_error(
    models: dict[str, CausalLM],
) -> None:
    compiler = RecordingCompiler()
    compiled = CompiledModel(models["llama"], compiler)
    run_model(compiled, SEQUENCES, 5)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="traces the model again"):
        compiled.backend(compiler.graphs[0], [])


def test_pieces_are_compiled_again_for_each_compile_size(models: dict[str, CausalLM]) -> None:
    compiler = RecordingCompiler()
    compiled = CompiledModel(models["llama"], compiler, compile_sizes=[2, 10])
    assert_same_logits(compiled, models["llama"])
    sizes = [size for _, size in compiler.requested]
    assert sizes == [None] * 4 + [10] * 4 + [2] * 4, "two sequences: 10 tokens come before 2"


def test_a_model_is_not_traced_with_one_token() -> None:
    compiled = compile_model(nn.Linear(3, 3), backend=lambda graph, _: graph.forward)
    with pytest.raises(ValueError, match="at least 2 tokens, not 1"):
        compiled(torch.zeros(1, 3))
