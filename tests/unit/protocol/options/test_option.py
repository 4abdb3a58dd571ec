"""Options declared by the annotations of nested structs."""

from __future__ import annotations

import argparse
from typing import Annotated

import msgspec
import pytest

from baton_protocol.options.option import (
    Bound,
    Option,
    add_flags,
    at_least,
    choice,
    options,
    set_field,
)


class Cache(msgspec.Struct):
    block_size: Annotated[int, Option("tokens per block", at_least(1))] = 16
    blocks: Annotated[int | None, Option("blocks", at_least(1), "--num-blocks")] = None


class Config(msgspec.Struct):
    cache: Cache
    device: Annotated[str, choice("auto", "cpu", "cuda")] = "auto"


def test_options_are_the_annotated_fields_of_all_sections_in_order() -> None:
    assert [option[:1] + option[2:] for option in options(Config)] == [
        ("tokens per block", "--block-size", "cache.block_size", int),
        ("blocks", "--num-blocks", "cache.blocks", int | None),
        ("auto, cpu or cuda", "--device", "device", str),
    ]


@pytest.mark.parametrize(
    ("config", "problems"),
    [
        (Config(Cache()), [None, None, None]),
        (
            Config(Cache(0, 0), "tpu"),
            [
                "must be at least 1, got 0",
                "must be at least 1, got 0",
                "must be auto, cpu or cuda, got 'tpu'",
            ],
        ),
    ],
)
def test_a_value_out_of_bounds_is_a_problem(config: Config, problems: list[str | None]) -> None:
    assert [option.problem(config) for option in options(Config)] == problems


def test_a_choice_may_have_its_own_help_text() -> None:
    option = choice("pull", "push", help="who copies", flag="--kv-mode")
    assert (option.help, option.flag) == ("who copies", "--kv-mode")
    assert isinstance(option.bound, Bound)
    assert option.bound.text == "be pull or push"


def test_a_flag_sets_the_attribute_with_the_path_of_its_option() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, options(Config))
    assert vars(parser.parse_args(["--num-blocks", "3", "--device", "cpu"])) == {
        "cache.block_size": None,
        "cache.blocks": 3,
        "device": "cpu",
    }


def test_commas_separate_strings_and_numbers() -> None:
    class Lists(msgspec.Struct):
        origins: Annotated[tuple[str, ...], Option("origins")] = ()
        sizes: Annotated[tuple[int, ...], Option("sizes")] = ()

    parser = argparse.ArgumentParser()
    add_flags(parser, options(Lists))
    assert vars(parser.parse_args(["--origins", "a, b,", "--sizes", "1,2"])) == {
        "origins": ["a", "b"],
        "sizes": [1, 2],
    }


def test_setting_a_field_creates_its_section() -> None:
    content = {"cache": {"blocks": 3}}
    set_field(content, "cache.block_size", 8)
    set_field(content, "scheduler.policy", "fcfs")
    set_field(content, "device", "cpu")
    assert content == {
        "cache": {"blocks": 3, "block_size": 8},
        "scheduler": {"policy": "fcfs"},
        "device": "cpu",
    }
