"""UCX moves blocks between GPU and host memory as they are."""

from __future__ import annotations

import pytest
import torch

from baton_kv_transfer.agent.agent_factory import create_agent
from support.waiting import eventually

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCK_BYTES = 64 * 1024
NUM_BLOCKS = 64
DEVICES = {"VRAM": "cuda", "DRAM": "cpu"}


@pytest.mark.parametrize("op", ["READ", "WRITE"])
@pytest.mark.parametrize("local", DEVICES)
@pytest.mark.parametrize("remote", DEVICES)
def test_blocks_arrive_as_they_were_sent(op: str, local: str, remote: str) -> None:
    """Half of the blocks are moved, and each to another place."""
    pytest.importorskip("ucxx")
    torch.manual_seed(0)
    moved = torch.randperm(NUM_BLOCKS)[: NUM_BLOCKS // 2].tolist()
    blocks = {"one": moved, "owner": moved[::-1]}
    agents, caches, descs = {}, {}, {}
    try:
        for name, kind in (("one", local), ("owner", remote)):
            agents[name] = create_agent(name, "ucx")
            cache = torch.randint(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
            caches[name] = cache.to(DEVICES[kind])
            address = caches[name].data_ptr()
            agents[name].register_memory([(address, cache.nbytes, 0, "")], kind)
            rows = [(address + block * BLOCK_BYTES, BLOCK_BYTES, 0) for block in blocks[name]]
            descs[name] = agents[name].get_xfer_descs(rows, kind)
        torch.cuda.synchronize()
        source, target = ("owner", "one") if op == "READ" else ("one", "owner")
        sent, expected = caches[source].clone(), caches[target].clone()
        expected[blocks[target]] = sent[blocks[source]].to(expected.device)

        agents["one"].add_remote_agent(agents["owner"].get_agent_metadata())
        handle = agents["one"].initialize_xfer(op, descs["one"], descs["owner"], "owner", b"done")
        agents["one"].transfer(handle)
        eventually(lambda: agents["one"].check_xfer_state(handle) != "PROC", "end of the transfer")
        assert agents["one"].check_xfer_state(handle) == "DONE"
        assert torch.equal(caches[target], expected)
        assert torch.equal(caches[source], sent)
    finally:
        for agent in agents.values():
            agent.close()
