"""Adapters on GPUs: in float32 tokens of the merged models, by every exchange; in bfloat16 from CUDA graphs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.backends.select import probe
from kernels.grouped_gemm.deepgemm import DeepGemmFp8
from kernels.grouped_gemm.skinny_fp8 import MOST_ROWS
from tests.adapter_case import chosen, make_adapter, merge, weight_shapes
from tests.checkpoints.writer import make_checkpoint
from tests.devices import need_gpus
from tests.distributed.engine_harness import Event, make_request, rank_config, run_engines
from tests.gpu.pools import Pools
from tests.token_judge import TokenJudge, steep_routers, transformers_reference
from tests.triton.test_expert_adapters import TOP_K, check
from workers.adapters.layout import AdapterLayout
from workers.adapters.pools import AdapterPools
from workers.config import RankConfig
from workers.lora_config import LoadedAdapter, LoraConfig
from workers.models.registry import load_model_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

EXCHANGES = [
    (1, "local"),
    *((2, name) for name in ("allgather", "torch_dist", "copy_engine", "symm")),
]
NUM_ADAPTERS, NUM_TOKENS, LENGTHS = 3, 12, (1, 7, 40, 130)
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The checkpoint, then the merged ones of each adapter, beside the adapters' folders."""
    folder = tmp_path_factory.mktemp("adapters")
    base = steep_routers(
        make_checkpoint(
            folder / "model-0",
            num_layers=3,
            hidden_size=256,
            num_experts=8,
            num_experts_per_tok=4,
            moe_intermediate_size=192,
            num_heads=8,
            num_kv_heads=2,
            head_dim=128,
        )
    )
    modules = chosen(weight_shapes(base), TARGETS)
    paths = [base]
    for number in range(1, 1 + NUM_ADAPTERS):
        adapter = make_adapter(folder / f"adapter-{number}", modules, seed=number, rank=8, alpha=16)
        paths.append(merge(base, adapter, folder / f"model-{number}"))
    return paths


def configure(models: list[Path], ranks: int, targets: list[str], **sections: Any) -> RankConfig:
    """Two slots for three adapters."""
    lora = {"max_loras": 2, "targets": targets}
    config = rank_config(models[0], ranks, "cuda", lora=lora, cache={"num_blocks": 256}, **sections)
    folder = models[0].parent
    adapters = tuple(
        LoadedAdapter(id=number, name=f"a{number}", path=str(folder / f"adapter-{number}"))
        for number in range(1, 1 + NUM_ADAPTERS)
    )
    return config.model_copy(update={"adapters": adapters})


def prompt_of(length: int, adapter: int) -> list[int]:
    return [(7 * place + 13 * adapter + length) % 256 for place in range(length)]


def judge(pools: Pools, models: list[Path], config: RankConfig, *, margin: float) -> None:
    """Serve all prompts with every adapter and none; fail for a token that the merged model would not choose."""
    need_gpus(config.num_ranks)
    events = []
    for index, length in enumerate(LENGTHS):
        for adapter in range(1 + NUM_ADAPTERS):
            prompt = prompt_of(length, adapter)
            request = make_request(f"{adapter}-{length}", prompt, max_tokens=NUM_TOKENS)
            rank, step = (index + adapter) % config.num_ranks, 2 * index + adapter
            events.append(Event(step, rank, replace(request, adapter=adapter)))
    results = run_engines(pools, config, events, timeout_s=300)
    tokens = {name: ids for result in results for name, ids in result.tokens.items()}
    assert len(tokens) == len(events)
    answers = set()
    for adapter, path in enumerate(models):
        judged = TokenJudge(transformers_reference(path), margin, margin / 4)
        for length in LENGTHS:
            found = tokens[f"{adapter}-{length}"]
            assert len(found) == NUM_TOKENS
            judged.greedy(prompt_of(length, adapter), found, f"adapter {adapter}, {length} tokens")
            answers.add((adapter, tuple(found)))
        judged.close()
    assert len({found for _, found in answers}) > len(LENGTHS), "adapters change the answers"


@pytest.mark.parametrize(("ranks", "all2all"), EXCHANGES)
@pytest.mark.parametrize("grouped_gemm", ["triton", "reference"])
def test_tokens_of_experts_in_float32(
    pools: Pools, models: list[Path], ranks: int, all2all: str, grouped_gemm: str
) -> None:
    kernels = {"all2all": all2all, "grouped_gemm": grouped_gemm}
    config = configure(models, ranks, ["attention", "experts"], kernels=kernels)
    judge(pools, models, config, margin=1e-2)


@pytest.mark.parametrize("grouped_gemm", ["triton", "torch_grouped"])
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_tokens_from_graphs_in_bfloat16(
    pools: Pools, models: list[Path], grouped_gemm: str, overlap: str
) -> None:
    config = configure(
        models,
        1,
        ["attention", "experts"],
        model={"dtype": "bfloat16"},
        kernels={"grouped_gemm": grouped_gemm},
        overlap={"mode": overlap},
    )
    judge(pools, models, config, margin=0.6)


def test_pieces_of_an_adapter_wait_for_readers_before_them_and_readers_behind_wait_for_them(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader before is launched behind a kernel that lasts for longer than all copies."""
    monkeypatch.setattr("workers.adapters.pools.PIECE_BYTES", 2**18)
    lora = LoraConfig(max_loras=2, targets=["attention", "experts"])
    layout = AdapterLayout.of(load_model_config(models[0]), lora, range(8))
    pools = AdapterPools(layout, 2, device=torch.device("cuda"), dtype=torch.bfloat16)
    assert pools.num_pieces > 3
    staged = [torch.randn(layout.size).bfloat16().pin_memory() for _ in range(2)]
    seen = []
    for adapter in staged:
        torch.cuda._sleep(200_000_000)
        seen.append(pools.pool.clone())
        for piece in range(pools.num_pieces):
            pools.write(2, adapter, piece)
    seen.append(pools.pool.clone())
    zeros = torch.zeros(layout.size, dtype=torch.bfloat16)
    for found, expected in zip(seen, (zeros, *staged), strict=True):
        assert torch.equal(found[1].cpu(), expected) and not found[0].any()


@pytest.mark.parametrize(("num_rows", "in_fp8"), [(20, False), (400, False), (400, True)])
@torch.inference_mode()
def test_adapters_beside_experts_of_deepgemm_in_fp8(num_rows: int, in_fp8: bool) -> None:
    """Few rows by the kernels of few rows, many by DeepGEMM's products."""
    if reason := probe("cuda").get("grouped_gemm.deepgemm_fp8"):
        pytest.skip(reason)
    gemm = DeepGemmFp8()
    few = num_rows * TOP_K / 6 <= MOST_ROWS
    check(gemm, "fp8", in_fp8, num_rows, 1 if few else gemm.row_alignment)
