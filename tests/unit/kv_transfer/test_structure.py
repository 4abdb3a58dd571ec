"""Structure of consumer/ and producer/: constructors take a clock and `send`, no other callable."""

from __future__ import annotations

from pathlib import Path

import baton_kv_transfer
from support.structure import constructor_callables, read_folder, unannotated_parameters

FOLDER = Path(baton_kv_transfer.__file__).parent
SOURCES = read_folder(FOLDER / "consumer") + read_folder(FOLDER / "producer")


def test_constructors_take_no_callable_except_a_clock_and_send() -> None:
    assert any("class ConsumerSide" in source for source in SOURCES)
    assert any("class ProducerSide" in source for source in SOURCES)
    assert list(constructor_callables(SOURCES, allowed=["clock", "send"])) == []
    assert {name for _, name in constructor_callables(SOURCES)} == {"clock", "send"}


def test_every_parameter_of_a_constructor_has_an_annotation() -> None:
    assert unannotated_parameters(SOURCES) == []
