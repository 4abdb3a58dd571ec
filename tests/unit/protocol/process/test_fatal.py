"""FATAL lines, which the operator reads from the status of a pod."""

from __future__ import annotations

import os

from baton_protocol.process.fatal import ConfigurationError, report_fatal


def test_a_message_of_several_lines_becomes_one_fatal_line(capsys) -> None:
    error = ConfigurationError("ModelInvalid", "config.json is damaged:\n  line 3\n")
    assert report_fatal(error.reason, error) == os.EX_CONFIG
    assert capsys.readouterr().err == "FATAL ModelInvalid: config.json is damaged: line 3\n"


def test_a_fatal_line_fits_a_termination_message_and_has_no_control_characters(capsys) -> None:
    """A message may contain names from a checkpoint. A kubelet keeps the last 2048 bytes."""
    report_fatal("ModelInvalid", "tensor \x1b[2J\ud800\u4f60" + "\u4f60" * 10**6)
    line = capsys.readouterr().err
    assert line.startswith("FATAL ModelInvalid: tensor \\x1b[2J\\ud800\u4f60")
    assert line.endswith("...\n")
    assert len(line.encode()) < 2048
