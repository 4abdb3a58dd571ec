"""Keys of compiled pieces: what changes them and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx, nn

from baton_engine.compilation.cache_key import environment_key, piece_key
from support.engine.model_cases import CPU

pytestmark = pytest.mark.usefixtures("one_thread")


def test_cache_keys_depend_on_sources_configuration_and_operators_and_not_on_names(
    tmp_path: Path,
) -> None:
    source = tmp_path / "layer.py"
    source.write_text("a = 1")
    key = environment_key([str(source)], ["config"], CPU)
    assert environment_key([str(source)], ["config"], CPU) == key
    assert environment_key([str(source)], ["other"], CPU) != key
    source.write_text("a = 2")
    assert environment_key([str(source)], ["config"], CPU) != key

    def graph(names: tuple[str, str], factor: float) -> fx.GraphModule:
        made = fx.Graph()
        x, y = map(made.placeholder, names)
        made.output(made.call_function(torch.add, (x, y), {"alpha": factor}))
        return fx.GraphModule(nn.Module(), made)

    assert piece_key(graph(("a", "b"), 1.0)) == piece_key(graph(("l_weight", "s0"), 1.0))
    assert piece_key(graph(("a", "b"), 1.0)) != piece_key(graph(("a", "b"), 2.0))


def test_the_cache_key_for_a_cpu_depends_on_threads_and_inductor_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = environment_key([], [], CPU)
    torch.set_num_threads(2)
    assert environment_key([], [], CPU) != key
    torch.set_num_threads(1)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert environment_key([], [], CPU) == key
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert environment_key([], [], CPU) != key
