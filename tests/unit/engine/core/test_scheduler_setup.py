"""Scheduler classes that do not exist."""

from __future__ import annotations

import pytest

from baton_engine.models.errors import ConfigurationError
from baton_protocol.options.config import (
    SchedulerConfig,
)
from support.engine.core_rig import make_core


def test_a_scheduler_class_that_does_not_exist_is_a_configuration_error() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"scheduler\.scheduler_class: cannot load scheduler nowhere\.Nothing",
    ):
        make_core(scheduler=SchedulerConfig(scheduler_class="nowhere.Nothing"))


def test_an_unknown_short_name_of_a_scheduler_is_a_configuration_error() -> None:
    with pytest.raises(
        ConfigurationError, match=r"cannot load scheduler 'nope': it is neither a known name"
    ):
        make_core(scheduler=SchedulerConfig(scheduler_class="nope"))
