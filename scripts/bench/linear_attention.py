"""Times linear attention of one layer: decodes with drafts or without, and prompts, against floors of the device.

    python -m scripts.bench.linear_attention --out /tmp/linear

Shapes are Qwen3.6-35B-A3B's. The floor of decodes is one read and one write of each state; that of prompts is one read
of the inputs and one write of the outputs, or the products, whichever is longer. Floors need `--gb-per-s` and
`--tflops`. `--drafts 3` also times the decodes' sequences with 3 drafts, of which the step before accepted all, or
half, or none. On a CPU:

    python -m scripts.bench.linear_attention --device cpu --heads 2 4 --dim 32 --drafts 3 --prompts 1x64 --out /tmp/x
"""

import argparse
import json
from collections.abc import Callable

import numpy as np
import torch

from kernels.attention.batch import AttentionBatch
from kernels.backends.select import probe
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.interface.registry import LINEAR_ATTENTION, backend_class
from kernels.linear_attention.base import LinearAttention
from kernels.linear_attention.chunks import MAX_CHUNK
from scripts.bench import results
from scripts.bench.inputs import need_gpus
from scripts.bench.timing import alternate, repeated

LAYERS = 3  # one after the other, so that no state of a few decodes stays in a cache
ROUNDS = 15


def _batch(num_seqs: int, new: int, device: torch.device, *, drafts: bool) -> AttentionBatch:
    """Sequences with states, each with `new` tokens: prompts, or decodes with drafts."""
    return AttentionBatch(
        num_tokens=num_seqs * new,
        num_seqs=num_seqs,
        num_single_rows=num_seqs if new == 1 else 0,
        num_verify=num_seqs if drafts else 0,
        query_start_loc_cpu=np.arange(num_seqs + 1, dtype=np.int32) * np.int32(new),
        seq_lens_cpu=np.full(num_seqs, new + 1, dtype=np.int32),
        block_table=torch.zeros(num_seqs, 1, dtype=torch.int64, device=device),
        slot_mapping=torch.zeros(num_seqs * new, dtype=torch.int64, device=device),
        state_slots=torch.arange(1, num_seqs + 1, device=device),
    )


def _call(
    subject: LinearAttention, spec: LinearAttentionSpec, num_tokens: int, dtype: torch.dtype
) -> Callable[[int], object]:
    """Return a call of the layer of a number, with random inputs."""
    device, heads = subject.states[0].state.device, spec.num_value_heads
    mixed = torch.randn(num_tokens, spec.channels, dtype=dtype, device=device)
    gates = torch.randn(2, num_tokens, heads, dtype=dtype, device=device)
    weight = torch.randn(spec.channels, spec.conv_width, dtype=dtype, device=device)
    neg_exp_a, dt_bias = -torch.rand(heads, device=device), torch.randn(heads, device=device)
    return lambda layer: subject(mixed, *gates, layer, weight, neg_exp_a, dt_bias)


def _flops(spec: LinearAttentionSpec, num_tokens: int) -> int:
    """Multiplications and additions of the products of prompts, those within chunks included."""
    inner = spec.key_dim + spec.value_dim
    within = MAX_CHUNK * (2 * spec.key_dim + inner + spec.value_dim)
    across = 3 * spec.key_dim * spec.value_dim
    return 2 * num_tokens * spec.num_value_heads * (within + across)


def _measure(
    args: argparse.Namespace, name: str, num_seqs: int, new: int, accepted: int | None = None
) -> results.Found:
    """accepted: of the drafts of the step before; None: there are no drafts."""
    drafts = accepted is not None
    spec = LinearAttentionSpec(
        *(*args.heads, args.dim, args.dim, args.conv_width), num_drafts=new - 1 if drafts else 0
    )
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    backend = backend_class("linear_attention", name)
    subject = backend([spec] * LAYERS)
    subject.bind(subject.allocate(subject.specs, num_seqs + 1, dtype, device))
    batch, decodes = _batch(num_seqs, new, device, drafts=drafts), drafts or new == 1
    if accepted:
        subject.states[0].accepted.fill_(accepted)
    # A captured plan of one step serves prompts too, and hides how long the host takes to launch.
    graph = backend.graph
    if graph and decodes:
        subject.reserve_graphs(num_seqs * new, num_seqs)
        subject.plan_graph(batch, num_seqs * new, prompts=False, drafts=drafts)
    else:
        subject.plan(batch)
    calls = repeated(_call(subject, spec, num_seqs * new, dtype), LAYERS, graph=graph)
    us = alternate({"us": calls}, ROUNDS, LAYERS, device, digits=3)["us"]
    found: results.Found = {"backend": name, "sequences": num_seqs, "new_tokens": new, "us": us}
    found |= {"accepted": accepted} if drafts else {}
    if args.gb_per_s:
        row = (spec.channels + spec.value_size) * dtype.itemsize
        kept = (new - 1 + (accepted or 0)) * spec.row_size * dtype.itemsize if drafts else 0
        moved = num_seqs * (2 * spec.slot_bytes(dtype.itemsize) + new * row + kept)
        flops = 0 if decodes else _flops(spec, num_seqs * new)
        floor_us = max(moved / args.gb_per_s / 1e3, flops / args.tflops / 1e6)
        found |= {"floor_us": floor_us, "of_floor": floor_us / us}
    return found


def _prompts(text: str) -> tuple[int, int]:
    """Return the sequences and tokens of `8x1024`."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not sequences x tokens, as 8x1024")
    return int(parts[0]), int(parts[1])


def main() -> None:
    """Measure every backend that runs here; write and print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--backends", nargs="+", choices=LINEAR_ATTENTION, help="by default all that run here"
    )
    parser.add_argument("--heads", nargs=2, type=int, default=(16, 32), help="of keys, of values")
    parser.add_argument("--dim", type=int, default=128, help="of keys and of values")
    parser.add_argument("--conv-width", type=int, default=4)
    parser.add_argument("--decodes", nargs="*", type=int, default=(8, 32, 128, 512))
    parser.add_argument(
        "--prompts", nargs="*", type=_prompts, default=[(1, 8192), (8, 1024), (1, 32768), (8, 4096)]
    )
    parser.add_argument("--drafts", nargs="*", type=int, default=(), help="of each decode")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--gb-per-s", type=float, help="memory bandwidth of the device")
    parser.add_argument("--tflops", type=float, default=989.0, help="of the device, in bfloat16")
    results.add_options(parser, drawn=False)
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.device == "cuda":
        need_gpus(1, "--device cpu is a dry run")
    cases: list[tuple[int, int, int | None]] = [
        *((count, 1, None) for count in args.decodes),
        *(
            (count, 1 + drafts, accepted)
            for count in args.decodes
            for drafts in args.drafts
            for accepted in sorted({0, drafts // 2, drafts})
        ),
        *((count, new, None) for count, new in args.prompts),
    ]
    absent = probe(args.device)
    names = args.backends or [x for x in LINEAR_ATTENTION if f"linear_attention.{x}" not in absent]
    rows = list[results.Found]()
    found = {"method": __doc__, **results.origin(int(args.device == "cuda"), args.commit)}
    shape = {"heads": args.heads, "dim": args.dim, "dtype": args.dtype}
    found |= {**shape, "layers": LAYERS, "rows": rows}
    with torch.inference_mode():
        for name in names:
            for case in cases:
                rows.append(_measure(args, name, *case))
                print(json.dumps(rows[-1]), flush=True)
                results.save(args.out, found)


if __name__ == "__main__":
    main()
