"""Imports and configuration errors of a connector."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import zmq

from baton_kv_transfer import side_channel
from baton_kv_transfer.connector import BlockSave, ConnectorMetadata, LoadRequest
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.transfer_connector import TransferConnector
from baton_protocol.options.config import KVRole, KVTransferConfig
from support.kv_transfer.kv_processes import HOST, LAYOUT
from support.waiting import eventually


def test_importing_the_package_does_not_import_ucx_torch_or_numpy() -> None:
    code = (
        "import sys, baton_kv_transfer; "
        "print([m for m in ('ucxx', 'libucx', 'torch', 'numpy') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_role_none_and_a_port_in_use_are_refused() -> None:
    with pytest.raises(ValueError, match="role is none"):
        TransferConnector(
            KVTransferConfig(transport="inproc"), instance_id="i", compatibility_hash="c", host=HOST
        )
    config = KVTransferConfig(role=KVRole.PRODUCER, transport="inproc", port=0)
    first = TransferConnector(config, instance_id="i", compatibility_hash="c", host=HOST)
    try:
        taken = KVTransferConfig(role=KVRole.PRODUCER, transport="inproc", port=first.port)
        with pytest.raises(OSError, match=str(first.port)):
            TransferConnector(taken, instance_id="j", compatibility_hash="c", host=HOST)
    finally:
        first.shutdown()


def test_both_roles_in_one_process_ignore_invalid_messages_and_wake_the_engine() -> None:
    memory = {
        name: np.zeros((LAYOUT.num_blocks, LAYOUT.block_nbytes), dtype=np.uint8) for name in "PD"
    }
    memory["P"][3] = np.frombuffer(random.Random(1).randbytes(LAYOUT.block_nbytes), dtype=np.uint8)
    woken: list[str] = []
    config = KVTransferConfig(role=KVRole.BOTH, transport="inproc", port=0)
    engines = {}
    for name in "PD":
        connector = TransferConnector(config, instance_id=name, compatibility_hash="c", host=HOST)
        connector.set_wakeup(lambda name=name: woken.append(name))
        connector.register_kv_cache(HostMemory(memory[name].ctypes.data, LAYOUT))
        engines[name] = connector
    intruder = zmq.Context.instance().socket(zmq.DEALER)
    intruder.linger = 0
    try:
        intruder.connect(f"tcp://{HOST}:{engines['P'].port}")
        release = side_channel.encode(side_channel.Release("t", 1, 0, 1, completed=True))
        no_text = release.replace(b"\xa1t", b"\xa1\xff")
        nested = b"\x92\xa9Subscribe" + b"\x91" * 100_000
        for frame in (b"", b"\xc1garbage", no_text, nested, release):
            intruder.send(frame)
            assert intruder.poll(5000), "the untrusted client got no response"
            assert isinstance(
                side_channel.decode_to_consumer(intruder.recv()), side_channel.Refused
            )

        hashes = [b"h" * 16]
        with pytest.raises(ValueError, match="outside"):
            engines["P"].save(
                ConnectorMetadata(
                    saves=[BlockSave("t", 0, [LAYOUT.num_blocks], hashes, 16, last=True)]
                )
            )
        engines["P"].start(ConnectorMetadata(offers={"t": "D"}))
        engines["D"].start(
            ConnectorMetadata(
                loads=[LoadRequest("t", HOST, engines["P"].port, "P", 0, [9], hashes)]
            )
        )
        engines["P"].save(ConnectorMetadata(saves=[BlockSave("t", 0, [3], hashes, 16, last=True)]))
        eventually(lambda: set(woken) == {"P", "D"}, "both wake-ups")
        assert engines["D"].get_finished().load_results["t"].num_valid_blocks == 1
        assert engines["P"].get_finished().finished_sending == {"t"}
        assert not engines["D"].get_finished()
        np.testing.assert_array_equal(memory["D"][9], memory["P"][3])
    finally:
        intruder.close()
        for connector in engines.values():
            connector.shutdown()
    with pytest.raises(ValueError, match="not running"):
        engines["P"].start(ConnectorMetadata(offers={"u": "D"}))
