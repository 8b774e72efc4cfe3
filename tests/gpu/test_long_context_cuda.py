"""A prompt of 32,768 tokens in chunks on a GPU, with windows: their old KV blocks are freed and not read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.backends.select import probe
from kernels.interface.attention_spec import AttentionSpec
from tests.devices import take_gpu
from tests.distributed.engine_harness import make_request, rank_config
from tests.gpu_families import released_shape
from tests.unit.test_kernels_attention import check
from workers.kv_cache.demand import KVDemand
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous

MISSING = probe("cuda").get("attention.triton") if torch.cuda.is_available() else "needs a GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

PROMPT, ANSWER, CHUNK, BLOCK, WINDOW = 32_768, 6, 4096, 16, 128
SINKS: dict[str, Any] = {
    "num_heads": 8,
    "num_kv_heads": 1,
    "head_dim": 64,
    "scale": 0.125,
    "sinks": True,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.inference_mode()
def test_the_end_of_a_long_prompt_equals_dense_attention(dtype: torch.dtype):
    """One decode and one chunk behind 32,704 tokens; blocks before the window are NaN."""
    from kernels.attention.triton_paged import TritonPagedAttention

    check(
        [(PROMPT - 1, 1), (PROMPT - 64, 64)],
        specs=(AttentionSpec(**SINKS, window=WINDOW), AttentionSpec(**SINKS)),
        block_size=BLOCK,
        dtype=dtype,
        backend=TritonPagedAttention,
        device="cuda",
    )


def answer(checkpoint: Path, num_blocks: int) -> tuple[list[int], int]:
    """Return the greedy answer to the prompt and the most blocks that were held."""
    config = rank_config(
        checkpoint,
        1,
        "cuda",
        model={"dtype": "bfloat16", "max_model_len": PROMPT + ANSWER},
        scheduler={"max_num_seqs": 2, "max_num_batched_tokens": CHUNK},
        cache={"num_blocks": num_blocks, "block_size": BLOCK, "prefix_caching": False},
    )
    tokens: list[int] = []
    held = 0

    def take(_: str, outputs: list[Any]) -> None:
        tokens.extend(token for output in outputs for token in output.token_ids)

    epoch = Epoch(RankProcess(0, config), Rendezvous("", 0, "alone"), 30)
    try:
        epoch.load()
        epoch.start_engine(take, lambda step: None)
        engine = epoch.engine
        engine.submit(make_request("long", [7 * i % 251 for i in range(PROMPT)], max_tokens=ANSWER))
        while engine.step().run:
            pool = engine.scheduler.cache.pool
            held = max(held, pool.num_blocks - pool.num_free)
    finally:
        epoch.process.close()
    return tokens, held


def test_a_long_prompt_holds_no_more_than_its_demand(tmp_path: Path):
    """The answer equals that of a server with blocks for all tokens of all layers."""
    take_gpu(0)
    checkpoint = released_shape(
        tmp_path / "model", "gpt_oss", max_position_embeddings=131072, sliding_window=WINDOW
    )
    demand = KVDemand(BLOCK, WINDOW, CHUNK).blocks(PROMPT + ANSWER)
    whole = 2 * -(-(PROMPT + ANSWER) // BLOCK)
    assert demand < 0.6 * whole
    tokens, held = answer(checkpoint, demand)
    assert len(tokens) == ANSWER and whole // 2 < held <= demand
    assert answer(checkpoint, whole)[0] == tokens
