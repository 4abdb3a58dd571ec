"""Commands reject invalid numbers before they start, with the name of the flag."""

from __future__ import annotations

import sys

import pytest

import baton_engine.elastic.coordinator.coordinator_cli
import baton_engine.fetch.command
import baton_local.cli
import baton_operator.cli
from baton_local.serve.server import run_serve

FETCH = ["fetch", "--uri", "s3://a/b", "--to", "/nowhere/model"]


def serve() -> int:
    return run_serve("/nowhere", sys.argv[1:])


@pytest.mark.parametrize(
    ("main", "argv", "complaint"),
    [
        (
            baton_local.cli.main,
            ["up", "-f", "x", "--ingress-port", "99999"],
            "--ingress-port: must be in [0, 65535]",
        ),
        (
            baton_local.cli.main,
            ["up", "-f", "x", "--ingress-port", "-1"],
            "--ingress-port: must be in [0, 65535]",
        ),
        (
            baton_local.cli.main,
            ["up", "-f", "x", "--timeout", "nan"],
            "--timeout: must be a positive number, got nan",
        ),
        (
            baton_local.cli.main,
            ["up", "-f", "x", "--timeout", "soon"],
            "--timeout: must be a positive number",
        ),
        (serve, ["--port", "65536"], "--port: must be in [0, 65535], got 65536"),
        (serve, ["--request-timeout-s", "nan"], "--request-timeout-s: must be a number, 0 or more"),
        (serve, ["--ready-timeout-s", "inf"], "--ready-timeout-s: must be a positive number"),
        (
            baton_operator.cli.main,
            ["--kubeconfig", "x", "--http-port", "99999"],
            "--http-port: must be in [0, 65535]",
        ),
        (
            baton_operator.cli.main,
            ["--kubeconfig", "x", "--resync", "nan"],
            "--resync: must be a positive number",
        ),
        (
            baton_operator.cli.main,
            ["--kubeconfig", "x", "--resync", "0"],
            "--resync: must be a positive number",
        ),
        (
            baton_engine.elastic.coordinator.coordinator_cli.main,
            ["--port", "-1"],
            "--port: must be in [0, 65535]",
        ),
        (
            baton_engine.elastic.coordinator.coordinator_cli.main,
            ["--http-port", "99999"],
            "--http-port: must be in [0, 65535]",
        ),
        (
            baton_engine.elastic.coordinator.coordinator_cli.main,
            ["--dead-after-s", "-1"],
            "--dead-after-s: must be a number, 0 or",
        ),
        (
            baton_engine.fetch.command.main,
            [*FETCH, "--http-port", "99999"],
            "--http-port: must be in [0, 65535]",
        ),
        (
            baton_engine.fetch.command.main,
            [*FETCH, "--give-up-after", "nan"],
            "--give-up-after: must be a positive",
        ),
    ],
)
def test_an_invalid_number_is_refused_with_the_name_of_its_flag(
    main, argv, complaint, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]
