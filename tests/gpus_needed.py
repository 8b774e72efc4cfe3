"""GPUs that released models need, by `phalanx check`: `python -m tests.gpus_needed` prints the table of README.md.

A number of GPUs suffices if weights, buffers, graphs, states and the KV cache of one request of the longest context fit
in `cache.memory_fraction` of each GPU: `phalanx check` warns by these sizes, and a start ends by them.
"""

import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from cluster.commands.check import check
from cluster.config.load import load_config
from cluster.config.phalanx_config import GPU_BATCHED_TOKENS
from tests.published_configs import PUBLISHED
from workers.config import CacheConfig
from workers.kv_cache.demand import KVDemand
from workers.models.registry import load_model_config

GPU_GB = (80, 141)
RANKS = (1, 2, 4, 8)  # of one host; GPU ranks of several hosts were never measured
CONTEXT = 32768
SMALL_STEPS = {"max_num_batched_tokens": 2048, "max_num_seqs": 64}
HEADER = "| model | weights | GB | GPUs of 80 GB | GPUs of 141 GB |"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
# Name, config.json of the release, form of the weights, additions to config.json.
_MODELS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("OLMoE-1B-7B", "olmoe", "bfloat16", {}),
    ("GLM-4.7-Flash", "glm4_moe_lite", "bfloat16", {}),
    ("Qwen3-30B-A3B", "qwen3_moe", "FP8", {"quantization_config": FP8}),
    ("Qwen3-30B-A3B", "qwen3_moe", "bfloat16", {}),
    ("Qwen3.6-35B-A3B, text", "qwen3_5_moe_text", "FP8", {"quantization_config": FP8}),
    ("Qwen3.6-35B-A3B, text", "qwen3_5_moe_text", "bfloat16", {}),
    ("Mixtral-8x7B", "mixtral", "bfloat16", {}),
    ("Qwen3-Next-80B-A3B", "qwen3_next", "bfloat16", {}),
    ("GLM-4.5-Air", "glm4_moe", "bfloat16", {}),
    ("gpt-oss-120b", "gpt_oss", "MXFP4", {}),
    ("MiniMax-M2", "minimax_m2", "FP8", {}),
    ("DeepSeek-V3, R1", "deepseek_v3", "FP8", {}),
    ("Kimi-K2", "kimi_k2", "FP8", {}),
)


def table() -> Iterator[str]:
    """Yield the rows of the table."""
    for name, family, weights, more in _MODELS:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(PUBLISHED[family] | more))
            whole, _ = _rank_bytes(folder, 1, small=False)
            gpus = [_gpus(folder, gigabytes) for gigabytes in GPU_GB]
        yield f"| {' | '.join((name, weights, f'{whole / 1e9:.0f}', *gpus))} |"


def _gpus(folder: str, gigabytes: int) -> str:
    """Return the least number of GPUs that suffices; with a star, the least with small steps."""
    for ranks in RANKS:
        for small in (False, True):
            _, needed = _rank_bytes(folder, ranks, small=small)
            if needed <= gigabytes * 1e9 * CacheConfig().memory_fraction:
                return f"{ranks}{'*' * small}"
    return f"more than {RANKS[-1]}"


@cache
def _rank_bytes(folder: str, ranks: int, *, small: bool) -> tuple[int, int]:
    """Return the bytes of rank 0's weights, and all of its bytes with the KV cache of the longest request."""
    model = load_model_config(folder)
    scheduler = SMALL_STEPS if small else {}
    length = min(CONTEXT, model.max_position_embeddings)
    block_size = CacheConfig().block_size
    step_tokens = scheduler.get("max_num_batched_tokens", GPU_BATCHED_TOKENS)
    blocks = KVDemand(block_size, model.window, step_tokens).blocks(length)
    config = load_config(
        {
            "model": {"path": folder, "max_model_len": length},
            "cluster": {"device": "cuda", "ranks": ranks},
            "scheduler": scheduler,
            "cache": {"num_blocks": blocks},
        }
    )
    row = check(config, num_api_keys=0).ranks[0]
    assert row.kv_bytes is not None
    return row.weight_bytes, row.fixed_bytes + row.kv_bytes


if __name__ == "__main__":
    print(HEADER)
    for line in table():
        print(line)
