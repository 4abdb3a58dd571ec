"""`python run.py MODULE OPTIONS`: load an engine, and answer calls on stdin by runs on stdout.

Calls and runs are lines of JSON, as `Candidate` describes them. It imports nothing of Baton,
because it runs in the environments of others.
"""

import importlib
import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints belongs to the log
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
