"""FATAL lines, which the operator reads from the status of a pod."""

from __future__ import annotations

import os

from baton_protocol.fatal import ConfigurationError, report_fatal


def test_a_message_of_several_lines_becomes_one_fatal_line(capsys) -> None:
    error = ConfigurationError("ModelInvalid", "config.json is damaged:\n  line 3\n")
    assert report_fatal(error.reason, error) == os.EX_CONFIG
    assert capsys.readouterr().err == "FATAL ModelInvalid: config.json is damaged: line 3\n"
