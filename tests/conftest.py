"""Settings of all tests. This file imports only what `make gpu` has: torch and pytest.

- Triton kernels run on a GPU if there is one, else in Triton's interpreter on the CPU. Triton reads
  the variable when a kernel is decorated, so it is set before any test module imports a kernel.
- SIGINT has its default handler. A shell that starts the tests in the background makes them, and
  all processes that they start, ignore it.
- Hypothesis has no deadline per example: the duration depends on the machine, not on the code.
"""

import contextlib
import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ImportError):
    import hypothesis

    hypothesis.settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any machine")
