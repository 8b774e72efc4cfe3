"""Settings that must be there before a GPU is touched, in this process and in the ranks it starts."""

import os

from kernels.cuda_environment import MULTICAST_OFF

os.environ.update(MULTICAST_OFF)
