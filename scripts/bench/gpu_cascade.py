"""Decodes that share leading KV blocks on a GPU, kernels.cascade auto beside off: attention alone, then whole servers.

    python -m scripts.bench.gpu_cascade --out /tmp/cascade

Attention: one layer of Qwen3-30B-A3B's shape, medians in us of CUDA graphs of CALLS calls, in turn on LAYERS caches.
Served: requests over HTTP that begin with one prefix, and requests that do not, on a server of each setting with random
weights. OUT.json is written after each row. With --no-server or --no-kernels one part is left out. On a CPU with a
small checkpoint it is a dry run of itself:

    python -m scripts.bench.gpu_cascade --config configs/local.yaml --ranks 1 --set cluster.device=cpu --no-kernels \\
        --prefix 64 --load 4/16/8 --out /tmp/cascade
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.attention.base import AttentionBatch, GraphAttention
from kernels.attention.flashinfer import FlashInferAttention
from kernels.attention.flashinfer_fp8 import FlashInferFp8Attention
from kernels.attention.triton_paged import TritonPagedAttention
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.shared_reads import SharedReads
from scripts.bench import results
from scripts.bench.gpu_serving import (
    START_TIMEOUT_S,
    add_server_options,
    find_ranks,
    made_at,
    make_loads,
    model_settings,
    run_load,
    three,
)
from scripts.bench.servers import ServerProcess, free_port, phalanx, resolved
from scripts.bench.timing import alternate, repeated
from workers.kv_cache.caches import allocate_kv_caches

BLOCK_SIZE, LAYERS, CALLS, ROUNDS = 16, 4, 24, 20
SPEC = AttentionSpec(32, 4, 128, 128**-0.5)
# In flight, tokens that all share, tokens of each sequence behind them.
KERNEL_CASES = [
    *((128, 8192, own) for own in (64, 512)),
    *((rows, 8192, 256) for rows in (8, 32, 256)),
    *((128, shared, 256) for shared in (256, 1024, 2048, 32768)),
    (128, 0, 2048),
]
BACKENDS: dict[str, tuple[type[GraphAttention], bool]] = {
    "flashinfer": (FlashInferAttention, False),
    "flashinfer_fp8": (FlashInferFp8Attention, True),
    "triton": (TritonPagedAttention, False),
}
Row = dict[str, Any]


def main() -> None:
    """Command line."""
    options = parse()
    report = {} if options.redraw else measure(options)
    results.write(options.out, report or results.load(options.out), page)
    print(options.out.with_suffix(".md").read_text())


def parse() -> argparse.Namespace:
    """Options, with those that were left out filled in."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prefix", type=int, default=8192, help="tokens that requests share")
    parser.add_argument(
        "--load", type=three, default=(128, 64, 512), metavar="FLIGHT/IN/OUT", help="behind them"
    )
    parser.add_argument("--no-server", action="store_true", help="attention alone")
    parser.add_argument("--no-kernels", action="store_true", help="servers alone")
    add_server_options(parser)
    results.add_options(parser, "gpu-cascade")
    options = parser.parse_args()
    find_ranks(parser, options)
    options.lengths, options.loads, options.scale = 1.0, [], 1.0
    options.load = [options.load]
    return options


def measure(options: argparse.Namespace) -> Row:
    """Return the report, saved after each row."""
    report: Row = {"method": __doc__, **results.origin(options.ranks, options.commit)}
    report |= {"ranks": options.ranks, "attention": [], "served": []}
    if not options.no_kernels:
        for name in BACKENDS:
            for case in KERNEL_CASES:
                report["attention"].append(time_attention(name, *case))
                print(report["attention"][-1], flush=True)
                results.save(options.out, report)
    if not options.no_server:
        for row in serve_all(options, report):
            report["served"].append(row)
            print({key: it for key, it in row.items() if key != "load"}, flush=True)
            results.save(options.out, report)
    return report


@torch.inference_mode()
def time_attention(name: str, rows: int, shared: int, own: int) -> Row:
    """Time one case on a backend; `ratio` is off over auto."""
    backend, fp8 = BACKENDS[name]
    spec = replace(SPEC, fp8_cache=fp8)
    batch, num_blocks = make_batch(rows, shared, own)
    groups = backend.kv_groups([spec] * LAYERS)
    device = torch.device("cuda")
    caches = allocate_kv_caches(groups, num_blocks, BLOCK_SIZE, torch.bfloat16, device)
    for cache in caches:
        if not fp8:
            cache.normal_()
    heads = spec.num_heads + 2 * spec.num_kv_heads
    qkv = torch.randn(rows, heads, spec.head_dim, dtype=torch.bfloat16, device=device)
    runs: dict[str, Callable[[], object]] = {}
    reads = SharedReads()
    # A graph reads the buffers of its attention, which it does not keep.
    attentions = {name: backend([spec] * LAYERS, BLOCK_SIZE) for name in ("off", "auto")}
    for setting, attention in attentions.items():
        attention.shared_reads = reads if setting == "auto" else None
        attention.bind(caches)
        attention.reserve_graphs(rows, rows, batch.block_table.shape[1])
        form = attention.form(batch, rows, prompts=False)
        attention.plan_graph(batch, rows, form)
        runs[setting] = repeated(_layers(attention, qkv, spec), CALLS, graph=True)
    found = alternate(runs, ROUNDS, CALLS, device, digits=2)
    row: Row = {"backend": name, "rows": rows, "shared_tokens": shared, "own_tokens": own}
    row |= {"shares": reads.rows > 0, "off_us": found["off"], "auto_us": found["auto"]}
    return row | {"ratio": round(found["off"] / found["auto"], 3)}


def _layers(
    attention: GraphAttention, qkv: torch.Tensor, spec: AttentionSpec
) -> Callable[[int], object]:
    parts = qkv.split_with_sizes([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
    return lambda call: attention(*parts, call % LAYERS)


def make_batch(rows: int, shared: int, own: int) -> tuple[AttentionBatch, int]:
    """Return decodes that share blocks, and the number of all blocks, which lie anywhere."""
    generator = np.random.default_rng(1)
    num_shared, num_own = shared // BLOCK_SIZE, -(-own // BLOCK_SIZE)
    blocks = generator.permutation(num_shared + rows * num_own)
    table = np.empty((rows, num_shared + num_own), np.int64)
    table[:, :num_shared] = blocks[:num_shared]
    table[:, num_shared:] = blocks[num_shared:].reshape(rows, num_own)
    last = shared + own - 1
    device = torch.device("cuda")
    batch = replace(
        AttentionBatch.dummy_decodes(rows, device),
        seq_lens_cpu=np.full(rows, last + 1, np.int32),
        block_table=torch.from_numpy(table).to(device),
        slot_mapping=torch.from_numpy(table[:, last // BLOCK_SIZE] * BLOCK_SIZE).to(device)
        + last % BLOCK_SIZE,
        prefix_groups_cpu=np.full(rows, 0 if shared else -1, np.int32),
        prefix_blocks_cpu=np.full(rows, num_shared, np.int32),
    )
    return batch, len(blocks)


def serve_all(options: argparse.Namespace, report: Row) -> Iterator[Row]:
    """Yield a row for each setting and load."""
    with (
        model_settings(options) as (model, _),
        tempfile.TemporaryDirectory(prefix="phalanx-cascade-") as folder,
    ):
        for setting in ("off", "auto"):
            _, given, answer = options.load[0]
            needed = [f"model.max_model_len={options.prefix + given + answer}"]
            needed += ["cache.prefix_caching=true", f"kernels.cascade={setting}"]
            settings = [f"cluster.ranks={options.ranks}", *model, *needed, *options.set]
            found, port = resolved(options.config, settings), free_port()
            report |= made_at(options, {"resolved": found})
            command = phalanx("serve", options.config, [f"serve.port={port}", *settings])
            name = found["config"]["serve"]["model_name"]
            log = options.log or Path(folder) / f"server-{setting}.log"
            server = ServerProcess(command, port, name, log, START_TIMEOUT_S)
            try:
                (load,) = make_loads(options)
                alone = replace(load, input_len=load.input_len + options.prefix // 8)
                shared = replace(load, prefix_groups=1, prefix_tokens=options.prefix)
                for what, chosen in (("shared", shared), ("alone", alone)):
                    ran = run_load(server, chosen, found)
                    rate, gap = (ran["result"][it] for it in ("output_tokens_per_s", "itl_ms"))
                    row = {"cascade": setting, "prompts": what, "output_tokens_per_s": rate}
                    row |= {"itl_ms_p50": gap["p50"], "start_s": round(server.start_s, 2)}
                    yield {**row, "load": ran}
            finally:
                server.stop()


def page(report: Row, _name: str) -> str:
    """All of the .md but its notes."""
    kernels = [
        [
            *(row["backend"], str(row["rows"]), str(row["shared_tokens"]), str(row["own_tokens"])),
            *(f"{row['off_us']:,.1f}", f"{row['auto_us']:,.1f}", f"{row['ratio']:.2f}"),
        ]
        for row in report["attention"]
    ]
    rates = {(it["prompts"], it["cascade"]): it["output_tokens_per_s"] for it in report["served"]}
    served = [
        [what, *(f"{rates[what, it]:,.0f}" for it in ("off", "auto")), _ratio(rates, what)]
        for what in ("shared", "alone")
        if (what, "auto") in rates
    ]
    titles = ["backend", "rows", "shared", "own", "off (us)", "auto (us)", "ratio"]
    lines = [
        *("# Shared KV blocks read once", "", results.origin_line(report), ""),
        "Attention of one layer; `off`, `auto`: `kernels.cascade`.",
        *("", results.markdown_table(titles, kernels), ""),
        "Output tokens/s over HTTP; `shared`: all prompts begin with one prefix.",
        *("", results.markdown_table(["prompts", "off", "auto", "ratio"], served)),
    ]
    return "\n".join(lines) + "\n"


def _ratio(rates: dict[tuple[str, str], float], what: str) -> str:
    return f"{rates[what, 'auto'] / rates[what, 'off']:.3f}"


if __name__ == "__main__":
    main()
