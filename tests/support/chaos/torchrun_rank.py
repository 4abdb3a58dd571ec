"""Script of one rank under torchrun: generate until an error, and write FOLDER/<rank>.error.

For the chaos test of torchrun.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from baton_engine import LLM, SamplingParams

if __name__ == "__main__":
    # torchrun sends SIGTERM when another rank has ended. The rank has to detect that itself.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    checkpoint, folder, rank = sys.argv[1], Path(sys.argv[2]), os.environ["RANK"]
    llm = LLM(
        checkpoint,
        tensor_parallel_size=2,
        executor="external_launcher",
        device="cpu",
        num_threads=1,
        num_blocks=64,
    )
    for round_number in range(10**6):
        try:
            llm.generate(
                [[5, 6, 7]], SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False
            )
        except RuntimeError as error:
            (folder / f"{rank}.error").write_text(str(error))
            sys.exit(3)
        if round_number == 0:
            (folder / f"{rank}.pid").write_text(str(os.getpid()))
