"""Load an engine. For each call on stdin, run it and print the result.

    python run.py MODULE OPTIONS

Calls and results are lines of JSON, see `candidate.py`. The script imports nothing of Baton,
because it runs in a peer's environment.
"""

import importlib
import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine's own output goes to the log
    runner = importlib.import_module(sys.argv[1]).Runner(**json.loads(sys.argv[2]))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        method, argument = json.loads(line)
        start = time.perf_counter()
        result = getattr(runner, method)(argument)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "result": result}), file=answers, flush=True)


if __name__ == "__main__":
    main()
