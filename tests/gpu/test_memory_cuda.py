"""A GPU without enough room: the start of a rank ends with an error that says what was asked for and what to lower."""

import gc
import re
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.attention.flashinfer import FlashInferAttention
from kernels.interface.kv_layout import kv_block_bytes
from kernels.routing.expert_map import ContiguousMap
from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import rank_config
from workers.config import RankConfig
from workers.models.registry import load_model_config
from workers.rank.device_memory import OutOfDeviceMemoryError
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous, start_stages
from workers.weights.loader import load_weights
from workers.weights.tensors import rank_weight_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

MIB, GIB = 2**20, 2**30
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": MIB, "GiB": GIB}
# Enough for CUDA, attention's workspace and the largest step of these models; the KV cache and the weights want more.
ROOM = 4 * GIB
MAX_LEN, BLOCK_SIZE = 256, 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 MB of tensors of at most 2 MB, so that they are read in portions of nearly 32 MiB."""
    sizes = {"num_layers": 3, "hidden_size": 512, "moe_intermediate_size": 128, "num_heads": 8}
    return make_checkpoint(tmp_path_factory.mktemp("memory") / "model", **sizes, head_dim=128)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 GB in bfloat16, which nobody ever draws."""
    sizes = {"num_layers": 10, "hidden_size": 2048, "num_experts": 128}
    folder = tmp_path_factory.mktemp("wide") / "model"
    return make_checkpoint(folder, **sizes, moe_intermediate_size=768, head_dim=128, weights=False)


def free_unused() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@contextmanager
def crowded(room: int) -> Iterator[None]:
    """All of the GPU's memory but `room` bytes is taken."""
    free_unused()
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - room, dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del taken
        free_unused()


def configure(
    path: Path, *, weights: str = "checkpoint", attention: str = "auto", **cache: Any
) -> RankConfig:
    return rank_config(
        path,
        1,
        "cuda",
        model={"dtype": "bfloat16", "max_model_len": MAX_LEN, "weights": weights},
        scheduler={"max_num_seqs": 12, "max_num_batched_tokens": 96},
        kernels={"attention": attention},
        cache={"block_size": BLOCK_SIZE, **cache},
    )


def failed_start(config: RankConfig) -> tuple[type[Exception], str]:
    """What the start of a rank raises. Of the error itself nothing is kept: it would hold the rank's memory."""
    epoch = Epoch(RankProcess(0, config), Rendezvous("", 0, "alone"), 30)
    try:
        for stage in start_stages("cuda"):
            epoch.run_stage(stage, lambda done, total: None)
    except Exception as error:
        return type(error), str(error)
    finally:
        if epoch._attention_compiled is not None:  # its thread goes on, and takes memory
            wait([epoch._attention_compiled])
        epoch.process.close()
    raise AssertionError("there was room for everything")


def named_sizes(text: str) -> list[float]:
    """All numbers of bytes in a text."""
    units = "|".join(UNITS)
    found = re.findall(rf"([\d.,]*\d) ?({units})\b", text)
    return [float(number.replace(",", "")) * UNITS[unit] for number, unit in found]


def check_error(found: tuple[type[Exception], str], asked: tuple[float, float], *keys: str) -> None:
    """It names a size between those of `asked`, and all of `keys`."""
    kind, text = found
    assert kind is OutOfDeviceMemoryError, found
    assert any(asked[0] <= size <= asked[1] for size in named_sizes(text)), text
    assert all(key in text for key in keys), text


def test_parameters_without_room(wide_model: Path):
    config = load_model_config(wide_model)
    asked = rank_weight_bytes(config, ContiguousMap(config.num_experts, 1), 0, "bfloat16")
    assert asked > 2 * ROOM
    with crowded(ROOM):
        found = failed_start(configure(wide_model, weights="dummy", num_blocks=64))
    check_error(found, (0.99 * asked, 1.01 * asked), "cluster.ranks", "model.dtype")


def test_no_room_to_read_a_checkpoint(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    """The parameters fit, what they are read through does not: that fails in another thread, in torch or in CUDA."""

    def read_in_a_crowd(*args: Any, **options: Any) -> None:
        with crowded(24 * MIB):
            load_weights(*args, **options)

    monkeypatch.setattr("workers.rank.process.load_weights", read_in_a_crowd)
    # sdpa takes no memory meanwhile.
    found = failed_start(configure(checkpoint, attention="sdpa", num_blocks=64))
    check_error(found, (0, 33 * MIB), "the weights", "cluster.ranks", "model.dtype")


def test_more_blocks_than_there_is_room_for(checkpoint: Path):
    groups = FlashInferAttention.kv_groups(load_model_config(checkpoint).attention_specs)
    block_bytes = kv_block_bytes(groups, BLOCK_SIZE, 2)
    num_blocks = 2 * ROOM // block_bytes
    with crowded(ROOM):
        found = failed_start(configure(checkpoint, num_blocks=num_blocks))
    asked = num_blocks * block_bytes
    check_error(found, (0.98 * asked, 1.02 * asked), "cache.num_blocks", "cache.memory_fraction")


def test_no_block_is_left_by_what_others_hold(checkpoint: Path):
    """The number of blocks is the rank's to find."""
    with crowded(ROOM):
        kind, text = failed_start(configure(checkpoint, num_blocks="auto", memory_fraction=0.5))
    assert issubclass(kind, ValueError), text
    keys = ("model.max_model_len", "scheduler.max_num_batched_tokens", "cache.memory_fraction")
    assert all(key in text for key in keys), text
    assert re.search(rf"\b{MAX_LEN // BLOCK_SIZE}\b", text), "the longest request's blocks"
    assert max(named_sizes(text)) > ROOM, "what the rank holds besides"
