"""Errors of a rank that a supervisor reads: it has no torch, and must not import torch in a rebuild."""

import asyncio
import pickle
import subprocess
import sys

import pytest
import torch.distributed as dist

from workers.rank.in_thread import in_thread
from workers.rank.rank_info import SignatureError


def raised(error: Exception) -> Exception:
    def work(found: Exception) -> None:
        raise found

    with pytest.raises(type(error) if "torch" not in type(error).__module__ else RuntimeError) as e:
        asyncio.run(in_thread(work, error))
    return e.value


def test_results_come_back() -> None:
    assert asyncio.run(in_thread(divmod, 7, 2)) == (3, 1)


@pytest.mark.parametrize(
    "error",
    [dist.DistNetworkError("no store"), SignatureError("not signed")],
    ids=["torch", "ours"],
)
def test_an_error_is_read_without_torch(error: Exception) -> None:
    found = raised(error)
    assert str(error) in str(found)
    script = "import pickle, sys; pickle.loads(sys.stdin.buffer.read()); sys.exit('torch' in sys.modules)"
    read = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(found), timeout=60)
    assert read.returncode == 0


def test_other_errors_keep_their_class() -> None:
    error = FileNotFoundError(2, "model.safetensors")
    assert raised(error) is error
