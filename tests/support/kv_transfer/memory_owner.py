"""Script that registers memory, prints the agent's metadata, and runs until its stdin is closed.

For the chaos test of the TCP transport.

python -m support.kv_transfer.memory_owner TRANSPORT HOST NUM_BYTES
"""

from __future__ import annotations

import json
import sys

import numpy as np

from baton_kv_transfer.agent.agent_factory import create_agent


def main() -> None:
    transport, host, num_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    agent = create_agent("owner", transport, host)
    words = np.arange(num_bytes // 8, dtype=np.int64)
    agent.register_memory([(words.ctypes.data, words.nbytes, 0, "")])
    print(
        json.dumps({"metadata": agent.get_agent_metadata().hex(), "address": words.ctypes.data}),
        flush=True,
    )
    sys.stdin.read()
    agent.close()


if __name__ == "__main__":
    main()
