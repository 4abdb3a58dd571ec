"""The block checksum against its formula in plain integers, and what create_connector refuses and costs."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from kv_processes import HOST, LAYOUT, wait_for

from baton_engine.protocol.config import KVRole, KVTransferConfig
from baton_kv_transfer import checksum, create_connector, side_channel
from baton_kv_transfer.connector import BlockLoad, BlockSave, ConnectorMetadata

MASK = 2**64 - 1


def reference(words: list[int]) -> int:
    total = 0
    for index, word in enumerate(words):
        z = (index + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        weight = (z ^ (z >> 31)) | 1
        total += (word ^ (word >> 32)) * weight
    return total & MASK


def block_sum(words: list[int]) -> int:
    array = np.array(words, dtype=np.uint64)
    return checksum.block_sum(array.ctypes.data, array.nbytes)


@given(st.lists(st.integers(0, MASK), min_size=1, max_size=100))
def test_sum_is_the_documented_formula(words: list[int]) -> None:
    assert block_sum(words) == reference(words)


@given(st.lists(st.integers(0, MASK), min_size=2, max_size=50), st.data())
def test_flips_and_swaps_change_the_sum(words: list[int], data: st.DataObject) -> None:
    flipped = list(words)
    for position in data.draw(st.sets(st.integers(0, len(words) - 1), min_size=1, max_size=2)):
        flipped[position] ^= 1 << data.draw(st.integers(0, 63))
    assert block_sum(flipped) != block_sum(words)
    swapped = [words[1], words[0], *words[2:]]
    assert (block_sum(swapped) == block_sum(words)) == (words[0] == words[1])


def test_binding_separates_transfers_and_tokens() -> None:
    base = checksum.bind(7, "transfer", b"h" * 16)
    assert base == checksum.bind(7, "transfer", b"h" * 16)
    assert len({base, checksum.bind(8, "transfer", b"h" * 16), checksum.bind(7, "other", b"h" * 16)}) == 3
    assert base != checksum.bind(7, "transfer", b"g" * 16)


def test_importing_the_package_loads_neither_ucx_nor_torch_nor_numpy() -> None:
    code = "import sys, baton_kv_transfer; print([m for m in ('ucxx', 'libucx', 'torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("transport", ["nixl", "carrier-pigeon"])
def test_unknown_transports_are_refused_naming_the_options(transport: str) -> None:
    config = KVTransferConfig(role=KVRole.BOTH, transport=transport, port=0)
    with pytest.raises(ValueError, match=f"ucx, inproc, got '{transport}'"):
        create_connector(config, instance_id="i", compatibility_hash="c", host=HOST)


def test_role_none_and_taken_ports_are_refused() -> None:
    with pytest.raises(ValueError, match="role is none"):
        create_connector(KVTransferConfig(transport="inproc"), instance_id="i", compatibility_hash="c", host=HOST)
    config = KVTransferConfig(role=KVRole.PRODUCER, transport="inproc", port=0)
    first = create_connector(config, instance_id="i", compatibility_hash="c", host=HOST)
    try:
        taken = KVTransferConfig(role=KVRole.PRODUCER, transport="inproc", port=first.port)
        with pytest.raises(OSError, match=str(first.port)):
            create_connector(taken, instance_id="j", compatibility_hash="c", host=HOST)
    finally:
        first.shutdown()


def test_both_roles_in_one_process_over_inproc_survive_garbage_and_wake_the_engine() -> None:
    memory = {name: np.zeros((LAYOUT.num_blocks, LAYOUT.block_nbytes), dtype=np.uint8) for name in "PD"}
    memory["P"][3] = np.frombuffer(random.Random(1).randbytes(LAYOUT.block_nbytes), dtype=np.uint8)
    woken: list[str] = []
    config = KVTransferConfig(role=KVRole.BOTH, transport="inproc", port=0)
    engines = {}
    for name in "PD":
        connector = create_connector(config, instance_id=name, compatibility_hash="c", host=HOST)
        connector.set_wakeup(lambda name=name: woken.append(name))
        connector.register_kv_cache(memory[name].ctypes.data, LAYOUT)
        engines[name] = connector
    intruder = zmq.Context.instance().socket(zmq.DEALER)
    intruder.linger = 0
    try:
        intruder.connect(f"tcp://{HOST}:{engines['P'].port}")
        no_text = side_channel.encode(side_channel.Subscribe("t"))[:-1] + b"\xff"
        nested = b"\x92\xa9Subscribe" + b"\x91" * 100_000
        for frame in (b"", b"\xc1garbage", no_text, nested, side_channel.encode(side_channel.Subscribe("t"))):
            intruder.send(frame)
            assert intruder.poll(5000), "no answer to an intruder"
            assert isinstance(side_channel.decode_to_consumer(intruder.recv()), side_channel.Refused)

        hashes = [b"h" * 16]
        with pytest.raises(ValueError, match="outside"):
            engines["P"].save(ConnectorMetadata(saves=[BlockSave("t", 0, [LAYOUT.num_blocks], hashes, 16, last=True)]))
        engines["P"].start(ConnectorMetadata(offers={"t": "D"}))
        engines["D"].start(ConnectorMetadata(loads=[BlockLoad("t", HOST, engines["P"].port, "P", 0, [9], hashes)]))
        engines["P"].save(ConnectorMetadata(saves=[BlockSave("t", 0, [3], hashes, 16, last=True)]))
        wait_for("both wake-ups", lambda: set(woken) == {"P", "D"})
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
