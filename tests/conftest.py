"""For all tests: Triton kernels run natively on a GPU if there is one, else in Triton's interpreter on the CPU.

The choice is read when a kernel is decorated, so it is made here, before any test module imports one. Only torch and pytest may be
imported here, for `make gpu` runs on machines that have little else.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
