"""A rank on a GPU compiles all of its kernels before it is ready, and none while it serves."""

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.host.cuda_environment import share_compiled_kernels
from kernels.host.hopper import on_hopper
from tests.checkpoints.writer import make_checkpoint
from tests.devices import need_gpus, take_gpu
from tests.distributed.engine_harness import make_request, rank_config
from tests.distributed.rank_pool import RankPool
from workers.config import RankConfig
from workers.rank.process_group import local_rendezvous
from workers.rank.rank_info import Rendezvous

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CACHES = ("TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
MAX_NUM_SEQS, MAX_TOKENS = 32, 512  # of a step
LONGEST = 700
# Prompts that come alone, so that all sizes and block tables of these widths are those of one sequence.
ALONE = (1, 2, 15, 16, 17, 31, 127, 128, 129, 255, 256, 257, 511, 512, 513, LONGEST)
NUM_MIXED = 120
STYLES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 5},
    {"temperature": 0.0, "prompt_logprobs": 2, "logit_bias": ((7, 2.0),)},
    {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": frozenset({5})},
)


@dataclass(frozen=True)
class Served:
    """What a rank had compiled when it was ready and after traffic of all kinds, and how many tokens it gave.

    cut   the modes of the graphs that it replayed in ubatches
    """

    before: set[str]
    after: set[str]
    num_tokens: int
    cut: set[str]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start-up") / "model"
    return make_checkpoint(
        folder, num_layers=2, hidden_size=256, head_dim=128, moe_intermediate_size=128
    )


@pytest.mark.parametrize(
    ("grouped_gemm", "num_ranks", "overlap", "cache"),
    [
        ("auto", 1, "off", "auto"),
        ("deepgemm", 1, "off", "auto"),
        ("deepgemm_fp8", 1, "off", "auto"),
        ("auto", 1, "off", "fp8"),
        ("auto", 2, "on", "auto"),
    ],
)
def test_nothing_compiles_once_it_is_ready(
    checkpoint: Path,
    grouped_gemm: str,
    num_ranks: int,
    overlap: str,
    cache: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_gpus(num_ranks)
    if grouped_gemm != "auto":
        pytest.importorskip("deep_gemm")
    for name in CACHES[:2]:  # flashinfer's, which take minutes, may have been compiled before
        monkeypatch.setenv(name, str(tmp_path / name))
    config = rank_config(
        checkpoint,
        num_ranks,
        "cuda",
        model={"dtype": "bfloat16"},
        scheduler={"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_TOKENS},
        cache={"num_blocks": "auto", "memory_fraction": 0.2, "dtype": cache},
        kernels={"grouped_gemm": grouped_gemm},
        overlap={"mode": overlap},
    )
    pool = RankPool(num_ranks)
    with local_rendezvous() as rendezvous:
        try:
            arguments = (config, rendezvous)
            found = pool.run(_serve, num_ranks, *arguments, with_group=False, timeout_s=280)
        finally:
            pool.close()
    in_ubatches = {"DECODE", "MIXED" if on_hopper() else "NONE"} if overlap == "on" else set()
    for served in found:
        assert served.before, "a fresh cache was filled by the start"
        assert served.after - served.before == set(), "compiled in the middle of traffic"
        assert served.num_tokens >= len(ALONE) + len(STYLES) + MAX_NUM_SEQS + NUM_MIXED
        assert served.cut == in_ubatches


def _serve(
    rank_index: int, num_ranks: int, info: Any, config: RankConfig, rendezvous: Rendezvous
) -> Served:
    """Start one rank, and send it traffic in step with the others."""
    take_gpu(rank_index)
    for name in CACHES[:2]:  # a rank's own: it finds nothing there that another one has compiled
        os.environ[name] = str(Path(os.environ[name]) / str(rank_index))
    share_compiled_kernels(os.environ)
    from workers.rank.epoch import Epoch
    from workers.rank.process import RankProcess
    from workers.rank.rank_info import start_stages

    epoch = Epoch(RankProcess(rank_index, config), rendezvous, 30)
    try:
        for stage in start_stages("cuda"):
            epoch.run_stage(stage, lambda done, total: None)
        tokens: list[int] = []

        def publish(ingress_id: str, outputs: list[Any]) -> None:
            assert not any(output.error for output in outputs), outputs
            tokens.extend(token for output in outputs for token in output.token_ids)

        epoch.start_engine(publish, lambda step: None)
        before = _compiled()
        _send_traffic(epoch.engine, rank_index, num_ranks)
        torch.cuda.synchronize()
        cut = {graph for _, graph, cut in epoch.engine.stats.kinds if cut == "True"}
        return Served(before, _compiled(), len(tokens), cut)
    finally:
        epoch.process.close()


def _send_traffic(engine: Any, rank: int, num_ranks: int) -> None:
    """One sequence at a time, as many as fit at once in the largest steps, then all kinds as they come.

    All ranks take the same steps: as many requests come to each at the same time, of other lengths.
    """
    source, arrivals = random.Random(rank), random.Random(0)

    def submit(name: str, length: int, style: int) -> None:
        prompt = [source.randrange(256) for _ in range(length)]
        params = {"max_tokens": source.randint(1, 24), **STYLES[style % len(STYLES)]}
        engine.submit(make_request(name, prompt, **params))

    def finish() -> None:
        while engine.step().run:  # on any rank
            pass

    for index, length in enumerate(ALONE):
        for turn in range(num_ranks):  # the others run along without tokens
            if turn == rank:
                submit(f"alone-{index}", length, 0)
            finish()
    for style in range(len(STYLES)):
        submit(f"style-{style}", 33, style)
        finish()
    for index in range(MAX_NUM_SEQS):
        submit(f"full-{index}", MAX_TOKENS // MAX_NUM_SEQS + index % 3, index)
    finish()
    left, running = NUM_MIXED, True
    while left or running:
        for _ in range(min(left, arrivals.choice((0, 0, 1, 1, 2, 9)))):
            left -= 1
            submit(f"mixed-{left}", int(LONGEST ** source.random()), left)
        running = engine.step().run


def _compiled() -> set[str]:
    """Everything in the folders of compiled kernels, but locks and logs."""
    folders = [Path(os.environ[name]) for name in CACHES]
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    return {str(file) for file in files if file.suffix not in (".lock", ".log")}
