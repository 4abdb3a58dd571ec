"""For all tests: Triton kernels run natively on a GPU if there is one, else in Triton's interpreter on the CPU. How long an example
of hypothesis takes says something of the machine, and nothing of the code.

The first choice is read when a kernel is decorated, so it is made here, before any test module imports one. Nothing but torch and
pytest need be there to import this, for `make gpu` runs on machines that have little else.

Whoever starts the tests in the background may have told them, and so all processes that they start, to ignore SIGINT.
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
