"""One thread a test process: the suite runs several processes on few cores. Without a GPU, Triton interprets."""

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in children

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # For tests/triton. Read when Triton is imported, and libraries of other tests do that.
    os.environ["TRITON_INTERPRET"] = "1"

# A shell starts background jobs with SIGINT ignored, and the commands that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
