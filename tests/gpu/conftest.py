"""Settings that must be there before a GPU is touched, in this process and in the ranks it starts."""

import os

from kernels.cuda_environment import MULTICAST_OFF, share_compiled_kernels

os.environ.update(MULTICAST_OFF)
share_compiled_kernels(os.environ)  # as served ranks do: what a start has compiled serves the tests
