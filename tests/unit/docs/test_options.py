"""docs/reference/options.md lists every option with its readers. An unread option is found."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
import pytest

from baton_engine.cli import OPTIONS
from baton_operator.api.llmservice import Spec
from baton_operator.builders import config_maps, coordinator_deployment, engine_settings

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/options.md"


@pytest.fixture
def hack(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "hack"))
    return {name: importlib.import_module(name) for name in ("field_readers", "options_reference")}


def rows(process: str) -> dict[str, list[str]]:
    """Return the cells of each row in a process's table, by flag."""
    section = PAGE.read_text().split(f"\n## {process}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| `--")]
    return {
        cells[0].strip("`"): cells[1:] for line in lines if (cells := line.strip("| ").split(" | "))
    }


def test_the_page_is_generated_from_the_options() -> None:
    command = [sys.executable, "hack/options_reference.py", str(PAGE), "--check"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_rows_have_default_bounds_role_field_and_readers() -> None:
    engine = rows("baton-engine")
    assert {option.flag for option in OPTIONS} == set(engine) - {"--config", "--log-level"}
    assert engine["--kv-lease-s"][:6] == [
        "`kv_transfer.lease_s`",
        "`30.0`",
        "positive number of seconds",
        "prefill",
        "`kvTransfer.leaseSeconds`",
        "`baton_kv_transfer.producer`",
    ]
    assert engine["--watermark"][:6] == [
        "`cache.watermark`",
        "`0.01`",
        "number in [0, 1)",
        "all",
        "`engine.extraArgs`",
        "`baton_engine.core`",
    ]
    assert engine["--engine-port"][4] == "the operator"
    assert engine["--tensor-parallel-size"][3:5] == [
        "all",
        "`prefill.parallelism.tensor`, `decode.parallelism.tensor`",
    ]
    assert rows("baton-gateway")["--queue-wait-s"][:5] == [
        "`queue_wait_s`",
        "`10.0`",
        "number, not negative",
        "`gateway.queueTimeoutSeconds`",
        "`baton_gateway.components`, `baton_gateway.endpoints`",
    ]
    assert rows("baton-coordinator")["--rebalance-window-s"][:4] == [
        "`300.0`",
        "number, 0 or more",
        "`decode.parallelism.rebalance.minIntervalSeconds`",
        "`baton_engine.elastic.coordinator.placement`",
    ]
    assert rows("baton-operator")["--http-port"][:3] == [
        "`8081`",
        "integer in [0, 65535]",
        "`baton_operator.process`",
    ]


def test_an_option_that_nothing_reads_is_an_error(hack: dict[str, ModuleType]) -> None:
    code = {
        "baton_gateway.server": "def run(config: GatewayConfig): config.port",
        "baton_engine.cli": "def run(config: GatewayConfig): config.hold_s",
    }
    gateway = next(
        process
        for process in hack["options_reference"]._processes()
        if process.name == "baton-gateway"
    )

    def read_by(option: str) -> str:
        readers = hack["field_readers"].FieldReaders(code)
        return hack["options_reference"]._read_by(gateway, gateway.fields[option], readers)

    assert read_by("port") == "`baton_gateway.server`"
    with pytest.raises(LookupError, match=r"no code of baton-gateway reads GatewayConfig\.hold_s"):
        read_by("hold_s")


@pytest.mark.parametrize(
    "code",
    [
        "def run(config: Config): return config.a",
        "def run(config: Config | None): return config.a",
        "def run():\n    config = Config()\n    return config.a",
        "def load() -> Config: ...\ndef run(): return load().a",
        "def load() -> tuple[Config, int]: ...\ndef run():\n    c, n = load()\n    return c.a",
        "def run(config: Config):\n    c, n = config, 1\n    return c.a",
        "def run(config: Config): return msgspec.structs.replace(config, b=1).a",
        "class C:\n    config: Config\ndef run(c: C): return c.config.a",
        "class C:\n    @property\n    def config(self) -> Config: ...\n"
        "def run(c: C): return c.config.a",
        "class C:\n    def __init__(self, config: Config): self.own = config\n"
        "    def run(self): return self.own.a",
        "class C:\n    def __init__(self, config: Config): self.own = config\n"
        "class D(C):\n    def run(self): return self.own.a",
        "def run(configs: list[Config]): return configs[0].a",
        "def run(configs: tuple[Config, ...] | None): return [c.a for c in configs or ()]",
        "def run(configs: dict[str, Config]):\n"
        "    for name, config in configs.items(): print(name, config.a)",
        "def run(body: bytes): return msgspec.json.decode(body, type=Config).a",
    ],
)
def test_a_reader_is_found_by_the_type_of_the_expression(
    code: str, hack: dict[str, ModuleType]
) -> None:
    declared = "class Config:\n    a: int = 0\n    b: int = 0\n"
    readers = hack["field_readers"].FieldReaders({"config": declared, "m": code})
    assert readers.modules("Config", "a") == {"m"}
    assert readers.modules("Config", "b") == set()


def test_an_equal_field_of_another_type_is_not_a_reader(hack: dict[str, ModuleType]) -> None:
    code = "def run(config: Config, other: Other):\n    config.a = 1\n    return other.a"
    assert hack["field_readers"].FieldReaders({"m": code}).modules("Config", "a") == set()


def structs(type_: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs in the annotation `type_`, with those in their fields."""
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        yield type_
        for field in msgspec.structs.fields(type_):
            yield from structs(field.type)
    for argument in get_args(type_):
        yield from structs(argument)


def unread(spec: type[msgspec.Struct], readers: Any) -> set[str]:
    """Return the fields of a spec that neither a setting nor code of the operator reads.

    An expression of unknown type counts as a reader of all fields with its name.
    """
    every = set(structs(spec))
    tables = (
        config_maps.GATEWAY,
        coordinator_deployment.REBALANCE,
        engine_settings.ENGINE,
        engine_settings.KV_TRANSFER,
    )
    set_by_table = {name for table in tables for each in table for name in each.field.split(".")}
    found = set()
    for struct in every:
        related = [each for each in every if issubclass(each, struct)]
        owners = {base.__name__ for each in related for base in each.__mro__} | {""}
        for field in msgspec.structs.fields(struct):
            modules = set().union(*(readers.modules(owner, field.name) for owner in owners))
            is_read = any(not name.startswith("baton_operator.api.") for name in modules)
            if not is_read and field.name not in set_by_table:
                found.add(f"{struct.__name__}.{field.name}")
    return found


class Routing(msgspec.Struct):
    """A part of a spec."""

    policy: str = "leastLoaded"


class SpecWithRouting(Spec, frozen=True):
    """A spec with a field that the operator does not read."""

    routing: Routing | None = None


def test_every_field_of_the_spec_is_read(hack: dict[str, ModuleType]) -> None:
    found = hack["field_readers"]
    readers = found.FieldReaders(found.read_modules([ROOT / "operator"]))
    assert unread(Spec, readers) == set(), "remove these fields"
    assert unread(SpecWithRouting, readers) == {"SpecWithRouting.routing", "Routing.policy"}
