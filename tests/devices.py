"""Which GPU the rank of a test takes. Ranks may share GPUs, which shows that they are right and nothing of their speed.

With PHALANX_TEST_SHARE_GPUS=1 tests of more ranks than there are GPUs run too. NCCL lets ranks share one since 2.30.
"""

import os

import pytest
import torch

SHARED = os.environ.get("PHALANX_TEST_SHARE_GPUS") == "1"
if SHARED:
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"


def most_ranks(wanted: int) -> int:
    """So many ranks, or as many as there are GPUs for."""
    found = torch.cuda.device_count()
    return wanted if SHARED and found else min(wanted, found)


def need_gpus(num_ranks: int) -> None:
    """Skip the test where there are not enough GPUs for its ranks."""
    if most_ranks(num_ranks) < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs, found {torch.cuda.device_count()}")


def take_gpu(rank: int) -> torch.device:
    """Make this rank's GPU the current one."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
