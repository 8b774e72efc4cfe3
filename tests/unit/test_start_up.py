"""The start of a rank: sizes that are warmed up, the environment of GPU processes, memory that does not suffice."""

import itertools
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.commands.start import progress_line
from kernels.host import cache_folder
from kernels.host.cuda_environment import (
    MULTICAST_OFF,
    MulticastError,
    check_multicast_off,
    share_compiled_kernels,
)
from kernels.linear_attention.base import LinearAttention, LinearStates
from tests.checkpoints.writer import make_checkpoint
from workers.config import RankConfig
from workers.models.decoder import DecoderLM
from workers.parallel import ParallelDims
from workers.rank import process_group
from workers.rank.device_memory import OutOfDeviceMemoryError, memory_for
from workers.rank.epoch import Epoch
from workers.rank.epoch_runner import RunnerMaker
from workers.rank.process import RankProcess
from workers.rank.rank_info import KERNELS, WEIGHTS, Rendezvous, start_stages, total_progress
from workers.rank.warm_up import DENSE_TOKENS, few_first, warm_up_sizes
from workers.rank.warm_up_steps import WarmUpSteps
from workers.scheduler.scheduler import Scheduler
from workers.wire.request import EngineRequest


@pytest.mark.parametrize("largest", [1, 2, 3, 64, 100, 2048, 8192, 8193])
def test_warm_up_meets_every_size_within_a_factor_of_two(largest: int) -> None:
    sizes = warm_up_sizes(largest, dense=False)
    assert sizes[0] == largest and sizes == sorted(set(sizes), reverse=True)
    for tokens in range(1, largest + 1):
        assert any(tokens <= size < 2 * tokens for size in sizes)
    assert set(sizes) <= set(warm_up_sizes(largest, dense=True))


def test_a_dense_warm_up_leaves_no_gap() -> None:
    sizes = warm_up_sizes(1000, dense=True)
    large = [size for size in sizes if size >= DENSE_TOKENS]
    gaps = [high - low for high, low in itertools.pairwise(large)]
    assert max(gaps) <= DENSE_TOKENS


def test_steps_of_few_tokens_come_before_other_products() -> None:
    few, many = [32, 16, 8, 4, 2, 1], [300, 256, 128, 64]
    found = few_first(warm_up_sizes(300, dense=False))
    assert [size for size, _ in found] == few + many
    assert [(size, products) for size, products in found if products] == [(32, few), (300, many)]
    assert few_first([7, 4]) == [(7, [7, 4]), (4, [])]


def test_multicast_must_be_off() -> None:
    check_multicast_off({**MULTICAST_OFF, "HOME": "/root"})
    for name in MULTICAST_OFF:
        others = {key: value for key, value in MULTICAST_OFF.items() if key != name}
        with pytest.raises(MulticastError, match=f"{name} is not set, needed is"):
            check_multicast_off(others)
    with pytest.raises(MulticastError, match="NCCL_NVLS_ENABLE is 1, needed is 0"):
        check_multicast_off({**MULTICAST_OFF, "NCCL_NVLS_ENABLE": "1"})


def test_compiled_kernels_go_where_told_or_to_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    environment = {"TRITON_CACHE_DIR": "/mine"}
    share_compiled_kernels(environment)
    assert environment == {
        "TRITON_CACHE_DIR": "/mine",
        "DG_JIT_CACHE_DIR": "/caches/phalanx/deep_gemm",
        "FLASHINFER_WORKSPACE_BASE": "/caches/phalanx/flashinfer",
    }


def test_a_configured_folder_of_kernels_comes_before_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_folder, "_chosen", None)
    environment = {"TRITON_CACHE_DIR": "/mine"}
    share_compiled_kernels(environment, "/shipped")
    assert environment == {
        "TRITON_CACHE_DIR": "/shipped/triton",
        "DG_JIT_CACHE_DIR": "/shipped/deep_gemm",
        "FLASHINFER_WORKSPACE_BASE": "/shipped/flashinfer",
    }
    assert cache_folder.cache_folder() == Path("/shipped")
    cache_folder.use_cache_folder(None)
    assert cache_folder.cache_folder() == Path("/shipped"), "later readers find the same folder"


def test_what_does_not_fit_is_named() -> None:
    with (
        pytest.raises(OutOfDeviceMemoryError, match=r"no room for the weights \(61.1 GB\)") as said,
        memory_for("the weights", 61_100_000_000),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    assert str(said.value).endswith("`phalanx check` on a GPU names settings that fit")
    with (
        pytest.raises(
            OutOfDeviceMemoryError, match=r"this machine has no room for the KV cache: ."
        ),
        memory_for("the KV cache"),
    ):
        np.empty(2**60, np.uint8)  # more than any address space
    with pytest.raises(ZeroDivisionError), memory_for("a step"):
        _ = 1 // 0


def rank_of(folder: Path, **cache: object) -> RankProcess:
    """The only rank of a checkpoint."""
    config = RankConfig(
        model={"path": str(folder), "dtype": "float32", "max_model_len": 64},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 100},
        cache={"num_blocks": 32, **cache},
        kernels={},
        num_ranks=1,
        device="cpu",
        threads=1,
        vote_timeout_s=5,
    )
    return RankProcess(0, config)


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> RankProcess:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return rank_of(make_checkpoint(folder, num_layers=1, hidden_size=32))


def test_ranks_of_different_settings_do_not_form_a_group(
    rank: RankProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks meet, with a peer that only sends other settings."""
    monkeypatch.setattr(rank, "dims", ParallelDims(num_ranks=2))
    monkeypatch.setattr(process_group, "join", lambda *_: None)

    def gather_json(value: tuple) -> list:
        settings, *rest = value
        return [value, ({**settings, "cache.block_size": 32}, *rest)]

    monkeypatch.setattr(process_group, "gather_json", gather_json)
    with pytest.raises(ValueError, match=r"cache\.block_size"):
        Epoch(rank, Rendezvous("", 0, "settings"), timeout_s=5)


def test_the_stages_of_a_rank(rank: RankProcess) -> None:
    epoch = Epoch(rank, Rendezvous("", 0, "stages"), timeout_s=5)
    told: dict[str, list[tuple[int, int]]] = {stage: [] for stage in start_stages("cuda")}
    for stage, heard in told.items():
        epoch.run_stage(stage, lambda done, total, heard=heard: heard.append((done, total)))
        if stage == KERNELS:
            assert not epoch.backends.attention.kv_caches, "the warm-up's small cache is gone"
    done, total = told[WEIGHTS][-1]
    assert done == total > 0
    assert told[KERNELS] == [(n, 10) for n in range(11)], "100, 64, 32 .. 1, sampling, attention"
    info = epoch.start_engine(lambda ingress_id, outputs: None, lambda step: None)
    assert info.num_blocks == 32
    assert epoch.engine is not None and not epoch.engine.scheduler.has_work
    assert epoch.engine.scheduler.cache.pool.usage == 0, "the warm-up left nothing behind"
    epoch.process.close()


def test_warm_up_prompts_are_random_and_equal_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one id would all go to the same experts."""
    rank = rank_of(make_checkpoint(tmp_path / "tiny", num_layers=1, hidden_size=32))
    found: list[list[int]] = []
    add = Scheduler.add

    def watched(scheduler: Scheduler, request: EngineRequest) -> str | None:
        found.append(request.prompt_token_ids)
        return add(scheduler, request)

    monkeypatch.setattr(Scheduler, "add", watched)
    epoch = Epoch(rank, Rendezvous("", 0, "prompts"), timeout_s=5)
    epoch.load()
    epoch.size_cache()
    found.clear()
    for _ in range(2):
        epoch.make.warm_up_steps().cut_prompt(epoch.runner, epoch.scheduler)
    first, second, *again = found
    assert len(set(first)) > len(first) // 2 and first != second
    assert max(first + second) < rank.model_config.vocab_size
    assert again == [first, second]
    rank.close()


def test_products_compile_right_before_the_steps_that_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = rank_of(make_checkpoint(tmp_path / "tiny", num_layers=1, hidden_size=32))
    calls: list[object] = []
    monkeypatch.setattr(
        DecoderLM, "compile_products", lambda _, sizes: sizes and calls.append(sizes)
    )
    monkeypatch.setattr(WarmUpSteps, "prefill", lambda *step: calls.append(step[-1]))
    epoch = Epoch(rank, Rendezvous("", 0, "products"), timeout_s=5)
    epoch.load()
    epoch.compile_kernels()
    few = [32, 16, 8, 4, 2, 1]
    assert calls == [few, *few, [100, 64], 100, 64]
    rank.close()


def test_states_of_a_measured_size_take_the_place_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pools may take most of the memory, so two of them need not fit."""
    folder = make_checkpoint(tmp_path / "m", family="qwen3_next", num_layers=4, hidden_size=32)
    rank, pools, allocate = rank_of(folder, state_snapshots=2), [], LinearAttention.allocate
    sizes = []

    def watched(specs: object, num_slots: int, *place: object, num_rows: int) -> list[LinearStates]:
        assert not any(pool() is not None for pool in pools), "the first pools are still there"
        assert num_rows == 1 + 4
        found = allocate(specs, num_slots, *place, num_rows=num_rows)
        sizes.append(num_slots)
        pools.extend(weakref.ref(layer.state) for layer in found)
        return found

    monkeypatch.setattr(LinearAttention, "allocate", watched)
    monkeypatch.setattr(RunnerMaker, "cache_sizes", lambda *_: (32, 9))
    epoch = Epoch(rank, Rendezvous("", 0, "states"), timeout_s=5)
    epoch.load()
    epoch.size_cache()
    assert sizes == [1 + 4 + 2, 1 + 4 + 9]
    assert epoch.backends.linear_attention.states is rank.caches.states
    rank.close()


@pytest.mark.parametrize(
    ("stage", "of_ranks", "expected"),
    [
        (WEIGHTS, [(10, 40), (30, 50)], (40, 90)),
        (KERNELS, [(3, 14), (5, 14)], (3, 14)),
        (KERNELS, [], (0, 0)),
    ],
)
def test_progress_of_all_ranks(stage: str, of_ranks: list, expected: tuple[int, int]) -> None:
    assert total_progress(stage, of_ranks) == expected


@pytest.mark.parametrize(
    ("stage", "progress", "line"),
    [
        (WEIGHTS, (500_000_000, 2_000_000_000), "500 of 2,000 MB"),
        (KERNELS, (7, 14), "kernels ###############............... 7 of 14"),
        ("placement", (0, 0), "placement"),
    ],
)
def test_the_console_shows_a_bar(stage: str, progress: tuple[int, int], line: str) -> None:
    assert progress_line(stage, *progress).endswith(line)
