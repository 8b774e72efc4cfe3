"""One thread a test process: the suite runs several processes on few cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in children

import torch

torch.set_num_threads(1)
