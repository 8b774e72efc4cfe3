"""What a KV cache in FP8 costs in precision: loss and logits of the demo model on text, beside other precisions.

The texts are docstrings of the running interpreter's standard library and its help topics: those that the model was not
trained on, and others. Each row of a text is computed as one prompt whose attention reads K and V as the cache
holds them. Runs on the CPU in a minute: `python -m scripts.bench.kv_precision`.

T tokens, V vocabulary.
"""

import argparse
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.api.tokenizer import load_tokenizer
from kernels.all2all.local import LocalAllToAll
from kernels.attention import layer_cache
from kernels.attention.sdpa import SdpaAttention
from kernels.backends.select import Backends
from kernels.grouped_gemm.reference import ReferenceGroupedGemm
from kernels.routing.expert_map import ContiguousMap
from kernels.routing.permute import Permutation
from scripts.bench import ROOT, results
from scripts.demo import corpus
from workers.kv_cache.caches import allocate_kv_caches
from workers.models.decoder import DecoderLM
from workers.models.registry import load_model_config
from workers.step.forward_batch import ForwardBatch
from workers.weights.loader import load_weights

MODEL = ROOT / "configs" / "models" / "demo"
BLOCK_SIZE, ROW_TOKENS, MOST_ROWS = 16, 512, 16
CPU = torch.device("cpu")
# Name: dtype of the model, whether the cache is in FP8, whether each token and head has a scale there.
PRECISIONS = {
    "float32": (torch.float32, False, True),
    "bfloat16": (torch.bfloat16, False, True),
    "float32, FP8 cache": (torch.float32, True, True),
    "bfloat16, FP8 cache": (torch.bfloat16, True, True),
    "float32, FP8 cache without scales": (torch.float32, True, False),
}


class Scorer:
    """The demo model on one rank, for one row of text at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype, fp8: bool):
        config = load_model_config(folder)
        specs = [replace(spec, fp8_cache=fp8) for spec in config.attention_specs]
        self.attention = SdpaAttention(specs, BLOCK_SIZE)
        groups = SdpaAttention.kv_groups(specs)
        blocks = ROW_TOKENS // BLOCK_SIZE
        self.attention.bind(allocate_kv_caches(groups, blocks, BLOCK_SIZE, dtype, CPU))
        experts = range(config.num_experts)
        exchange = LocalAllToAll(Permutation(experts, num_experts=len(experts), device="cpu"))
        backends = Backends(exchange, ReferenceGroupedGemm(), self.attention)
        where: dict[str, Any] = {"expert_map": ContiguousMap(len(experts), 1), "rank": 0}
        where["device"] = CPU
        self.model = DecoderLM(config, backends, dtype=dtype, **where)
        load_weights(self.model, folder, config=config, **where)

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Return float32 [T, V] of one prompt."""
        count = len(ids)
        tokens = torch.arange(count)
        batch = ForwardBatch(
            num_tokens=count,
            num_token_non_padded=count,
            num_seqs=1,
            num_single_rows=0,
            input_ids=torch.tensor(ids),
            positions=tokens,
            slot_mapping=tokens,
            block_table=torch.arange(-(-count // BLOCK_SIZE)).unsqueeze(0),
            seq_lens_cpu=np.array([count], np.int32),
            query_start_loc_cpu=np.array([0, count], np.int32),
            logits_indices=tokens,
            sampling_rows=tokens,
            sampling_rows_cpu=tokens.numpy(),
            sampling_positions_cpu=np.array([count]),
        )
        self.attention.plan(batch)
        logits_TV: torch.Tensor = self.model.compute_logits(self.model.forward(batch))
        return logits_TV


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    results.add_options(parser, "kv-precision", drawn=False)
    args = parser.parse_args()
    torch.set_num_threads(2)
    texts = rows_of_texts(MODEL)
    found = {
        "model": MODEL.name,
        "tokens": {name: sum(map(len, rows)) for name, rows in texts.items()},
        "texts": {name: compare(rows) for name, rows in texts.items()},
    }
    found |= results.origin(0, args.commit)
    results.save(args.out, found)
    results.write(args.out, found, page)
    print(page(found, args.out.stem))


def rows_of_texts(folder: Path) -> dict[str, list[list[int]]]:
    """Return rows of token ids: of texts that the model was not trained on, and of others."""
    held_out = set(json.loads((folder / "training.json").read_text())["held_out"])
    documents = corpus.gather(None)
    tokenizer = load_tokenizer(folder)
    unseen = [it.text for it in documents if it.name in held_out]
    seen = [it.text for it in documents if it.name not in held_out and it.text]
    sample = random.Random(1).sample(seen, 2 * MOST_ROWS)
    return {"held-out text": cut(unseen, tokenizer), "training text": cut(sample, tokenizer)}


def cut(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Return rows of up to ROW_TOKENS ids."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    rows = [ids[i : i + ROW_TOKENS] for ids in encoded for i in range(0, len(ids), ROW_TOKENS)]
    return [row for row in rows if len(row) > 1][:MOST_ROWS]


def compare(rows: list[list[int]]) -> dict[str, dict[str, float]]:
    """Return each precision's figures; logits and choices against those in float32."""
    found, exact = {}, None
    for name, (dtype, fp8, scales) in PRECISIONS.items():
        scorer = Scorer(MODEL, dtype, fp8)
        with scales_of_one(not scales):
            logits = [scorer.logits(row) for row in rows]
        exact = exact or logits
        found[name] = figures(rows, logits, exact)
    return found


@contextmanager
def scales_of_one(wanted: bool) -> Iterator[None]:
    """Round to e4m3 with a scale of 1 for all values, as a cache without scales does; values above 448 become 448."""
    kept = layer_cache.round_heads
    if wanted:
        layer_cache.round_heads = _round_plainly
    try:
        yield
    finally:
        layer_cache.round_heads = kept


def _round_plainly(x_Thd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ones = torch.full(x_Thd.shape[:2], 127, dtype=torch.uint8)
    return x_Thd.float().clamp(-448, 448).to(torch.float8_e4m3fn), ones


def figures(
    rows: list[list[int]], logits: list[torch.Tensor], exact: list[torch.Tensor]
) -> dict[str, float]:
    """Return loss (nats a token), perplexity, and the distance from the exact logits."""
    loss = divergence = difference = spread = 0.0
    same = count = 0
    for row, found_TV, exact_TV in zip(rows, logits, exact, strict=True):
        log_TV, exact_log_TV = found_TV.log_softmax(-1), exact_TV.log_softmax(-1)
        following = torch.tensor(row[1:]).unsqueeze(1)
        loss -= float(log_TV[:-1].gather(1, following).sum())
        kl_T = (exact_log_TV.exp() * (exact_log_TV - log_TV)).sum(-1)
        divergence += float(kl_T[:-1].sum())
        same += int((found_TV.argmax(-1) == exact_TV.argmax(-1))[:-1].sum())
        difference += float((found_TV - exact_TV).square().mean(-1)[:-1].sum())
        spread += float(exact_TV.var(-1)[:-1].sum())
        count += len(row) - 1
    return {
        "loss": loss / count,
        "perplexity": math.exp(loss / count),
        "kl_nats": divergence / count,
        "logit_error": math.sqrt(difference / spread),
        "same_choice": same / count,
    }


def page(found: results.Found, stem: str) -> str:
    """Return the page."""
    text = "# Precision of a KV cache in FP8\n\n"
    text += f"The demo model on Python's documentation. {results.origin_line(found)} "
    text += f"[{stem}.json]({stem}.json), by `python -m scripts.bench.kv_precision`.\n\n"
    text += "Logits are compared with those in float32: root mean square error over the spread of the logits, mean "
    text += "divergence (KL) a token, and how often the likeliest token is the same.\n"
    head = ["precision", "loss", "perplexity", "error of logits", "KL, nats", "same choice"]
    for name, precisions in found["texts"].items():
        text += f"\n## {name.capitalize()}, {found['tokens'][name]:,} tokens\n\n"
        rows = [
            [
                precision,
                f"{it['loss']:.4f}",
                f"{it['perplexity']:.3f}",
                f"{it['logit_error']:.2%}",
                f"{it['kl_nats']:.2e}",
                f"{it['same_choice']:.2%}",
            ]
            for precision, it in precisions.items()
        ]
        text += results.markdown_table(head, rows)
    return text


if __name__ == "__main__":
    main()
