"""The process of the operator reads all objects that API servers accept."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import json
from concurrent.futures import ThreadPoolExecutor

import msgspec

from baton_operator.process.operator_process import allow_deep_objects

LEVELS = 10_000
text = '{"a":' * LEVELS + "1" + "}" * LEVELS


def read():
    json.dumps(json.loads(text))
    msgspec.json.encode(msgspec.json.decode(text))


allow_deep_objects()
read()
with ThreadPoolExecutor(1) as threads:  # kopf has a thread of its own
    threads.submit(read).result()
"""


def test_objects_with_as_many_levels_as_api_servers_accept_are_read() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
