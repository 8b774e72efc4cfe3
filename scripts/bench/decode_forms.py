"""Times decodes over caches in FP8 in several forms of our kernels, against the floor of the device, on one GPU.

    python -m scripts.bench.decode_forms --out forms.json

Heads of K and V are Qwen3-30B-A3B's, latents (MLA) those of DeepSeek-V3 (128 heads) and GLM-4.7-Flash (20). A form is
timed with as many chunks as give each SM `programs` programs. flashinfer's kernel over latents in bfloat16 is timed
beside, where it runs. The floor is one read of what is cached, or the products, whichever is longer.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from kernels.attention.batch import AttentionBatch
from kernels.attention.decode_chunks import cut_rows, leaves_whole, max_chunks, whole_rows
from kernels.attention.flashinfer_mla import FlashInferMlaAttention
from kernels.attention.fp8_latents import latent_parts
from kernels.attention.fp8_pages import Fp8Pages
from kernels.interface.attention_spec import AttentionSpec, MlaDims
from kernels.interface.kv_layout import layout_of
from scripts.bench.inputs import need_gpus
from scripts.bench.results import add_options, origin, save
from scripts.bench.timing import alternate, repeated

BLOCK_SIZE, LAYERS, ROUNDS = 16, 4, 15
CASES = ((128, 1536), (32, 1536), (128, 512), (32, 8192), (4, 8192), (1, 32768))  # rows, keys
HEADS = AttentionSpec(32, 4, 128, 128**-0.5, fp8_cache=True)
LATENTS = {
    "DeepSeek-V3": AttentionSpec(128, 1, 192, 0.07, mla=MlaDims(512, 64, 128, 128), fp8_cache=True),
    "GLM-4.7-Flash": AttentionSpec(
        20, 1, 256, 0.06, mla=MlaDims(512, 64, 192, 256), fp8_cache=True
    ),
}


@dataclass(frozen=True)
class Variant:
    """A form, programs that an SM holds of it, and the programs that share the keys of a chunk."""

    form: Any
    programs: int
    shared_by: int


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb-per-s", type=float, default=4000.0, help="of the device's memory")
    parser.add_argument("--tflops", type=float, default=989.0, help="of the device, in bfloat16")
    parser.add_argument("--kinds", nargs="+", choices=("heads", "latents"), default=("heads",))
    add_options(parser, "gpu-decode-forms", drawn=False)
    args = parser.parse_args()
    need_gpus(1)
    torch.manual_seed(0)
    report: dict[str, Any] = {**origin(1, args.commit), "decodes": []}
    with torch.inference_mode():
        for rows, keys in CASES:
            found = time_heads(rows, keys, args) if "heads" in args.kinds else []
            if "latents" in args.kinds:
                for model, spec in LATENTS.items():
                    found += time_latents(model, spec, rows, keys, args)
            report["decodes"] += found
            save(args.out, report)


def time_heads(rows: int, keys: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the forms of `paged_decode` over K and V in e4m3."""
    from kernels.triton import paged_decode

    form, shared = paged_decode.DecodeForm, HEADS.num_kv_heads
    per_warp = paged_decode.E4M3_WARPS.programs_per_sm
    variants = [
        Variant(paged_decode.E4M3, 4, shared),
        Variant(form(64, 4, 128), 4, shared),
        Variant(form(64, 2), 6, shared),
        Variant(paged_decode.E4M3_WARPS, per_warp, shared),
        Variant(paged_decode.E4M3_WARPS, per_warp // 2, shared),
    ]
    caches = [
        Fp8Pages(random_cache(HEADS, rows, keys), HEADS, BLOCK_SIZE).tensors for _ in range(LAYERS)
    ]
    q = torch.randn(rows, HEADS.num_heads, HEADS.head_dim, device="cuda", dtype=torch.bfloat16)

    def call(variant: Variant) -> Callable[[int], object]:
        out, chunks = torch.empty_like(q), chunks_of(rows, keys, variant)
        options = {"scale": HEADS.scale, "sinks_H": None, "form": variant.form}
        return lambda layer: paged_decode.paged_decode(q, caches[layer], out, chunks, **options)

    pairs = rows * keys * HEADS.num_heads
    return timed("heads", HEADS, rows, keys, variants, call, 4 * pairs * HEADS.head_dim, args)


def time_latents(
    model: str, spec: AttentionSpec, rows: int, keys: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Time the forms of `latent_decode`, and flashinfer over latents in bfloat16."""
    from kernels.triton import latent_decode

    dims = spec.mla
    assert dims is not None
    forms = {(64, 8): 1, (32, 8): 1, (16, 4): 2}
    forms |= {(64, 8, 16): 1, (32, 8, 16, 128): 2, (32, 4, 16): 2, (16, 4, 16): 3}
    wide = latent_decode.WIDE
    forms |= {(wide.keys, wide.num_warps, wide.heads): 1}
    variants = [
        Variant(form, programs, latent_decode.head_parts(spec.num_heads, form))
        for values, programs in forms.items()
        for form in [latent_decode.LatentForm(*values)]
    ]
    caches = [latent_parts(random_cache(spec, rows, keys), spec, BLOCK_SIZE) for _ in range(LAYERS)]
    q = torch.randn(spec.num_heads, rows, dims.rank, device="cuda", dtype=torch.bfloat16)
    rope = torch.randn(rows, spec.num_heads, dims.rope_dim, device="cuda", dtype=torch.bfloat16)

    def call(variant: Variant) -> Callable[[int], object]:
        out, chunks = q.new_empty(rows, *q.shape[::2]), chunks_of(rows, keys, variant)
        options = {"scale": spec.scale, "form": variant.form}
        inputs = q.transpose(0, 1), rope
        return lambda layer: latent_decode.latent_decode(
            *inputs, caches[layer], out, chunks, **options
        )

    flops = 2 * rows * keys * spec.num_heads * (2 * dims.rank + dims.rope_dim)
    found = timed(model, spec, rows, keys, variants, call, flops, args)
    if FlashInferMlaAttention.unavailable(torch.device("cuda")) is None:
        wide = replace(spec, fp8_cache=False)
        attention = FlashInferMlaAttention([wide] * LAYERS, BLOCK_SIZE)
        attention.bind([random_cache(wide, rows, keys) for _ in range(LAYERS)])
        attention.plan(batch_of(rows, keys))
        us = device_us(lambda layer: attention._attend_absorbed(q, rope, layer))
        found.append(line_of(model, wide, rows, keys, "flashinfer_mla", us, flops, args))
    return found


def timed(
    label: str,
    spec: AttentionSpec,
    rows: int,
    keys: int,
    variants: Sequence[Variant],
    call: Callable[[Variant], Callable[[int], object]],
    flops: int,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return a line of each variant; one that does not compile or run has its error."""
    found = []
    for variant in variants:
        try:
            us: float | str = device_us(call(variant))
        except Exception as error:  # the compiler's too, which end no other form
            us = str(error).splitlines()[0]
        form = {**asdict(variant.form), "programs": variant.programs}
        found.append(line_of(label, spec, rows, keys, form, us, flops, args))
        print(json.dumps(found[-1]), flush=True)
    return found


def line_of(
    label: str,
    spec: AttentionSpec,
    rows: int,
    keys: int,
    form: Any,
    us: float | str,
    flops: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Return one measurement beside the floor."""
    cached = rows * keys * layout_of(spec).block_bytes(1, 2)
    floor_us = max(cached / args.gb_per_s / 1e3, flops / args.tflops / 1e6)
    line = {"of": label, "rows": rows, "keys": keys, "form": form, "us": us}
    if isinstance(us, float):
        line |= {"gb_per_s": round(cached / us / 1e3), "of_floor": round(floor_us / us, 3)}
    return line


def device_us(call: Callable[[int], object]) -> float:
    """Return the median of one call, captured for all layers in turn."""
    runs = {"us": repeated(call, LAYERS, graph=True)}
    return alternate(runs, ROUNDS, LAYERS, torch.device("cuda"), digits=2)["us"]


def chunks_of(rows: int, keys: int, variant: Variant) -> Any:
    """Return the chunks of equal rows as the backends cut them."""
    from kernels.triton.decode_merge import Chunks

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    most = max_chunks(rows, max(1, variant.programs * sms // variant.shared_by))
    lens = np.full(rows, keys, np.int32)
    cut = not leaves_whole(lens, rows, most)
    arrays = (cut_rows(lens, None, rows, most) if cut else whole_rows(lens, None, rows)).arrays
    integers = (torch.from_numpy(it.astype(np.int32)).cuda() for it in arrays)
    return Chunks(*integers, batch_of(rows, keys).block_table, cut)


def batch_of(rows: int, keys: int) -> AttentionBatch:
    """Return decodes of equal lengths on all blocks, in an order of chance."""
    blocks = -(-keys // BLOCK_SIZE)
    order = np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks)
    return AttentionBatch(
        num_tokens=rows,
        num_seqs=rows,
        num_single_rows=rows,
        query_start_loc_cpu=np.arange(rows + 1, dtype=np.int32),
        seq_lens_cpu=np.full(rows, keys, np.int32),
        block_table=torch.from_numpy(order).cuda(),
        slot_mapping=torch.from_numpy(order[:, -1] * BLOCK_SIZE).cuda(),
    )


def random_cache(spec: AttentionSpec, rows: int, keys: int) -> torch.Tensor:
    """Return a cache of values that are numbers; exponents of scales are 120 to 127."""
    blocks = rows * -(-keys // BLOCK_SIZE)
    shape = layout_of(spec).shape(blocks, BLOCK_SIZE)
    if not spec.fp8_cache:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    cache = torch.zeros(shape, dtype=torch.uint8, device="cuda")
    if spec.mla is None:
        *values, k_exponents, v_exponents = Fp8Pages(cache, spec, BLOCK_SIZE).tensors
        exponents = [k_exponents, v_exponents]
    else:
        latents, keys_of, exponent = latent_parts(cache, spec, BLOCK_SIZE)
        values, exponents = [latents], [exponent]
        keys_of.normal_()
    for it in values:
        it.view(torch.uint8).random_(0, 0x7F)  # positive; 0x7F is not a number
    for it in exponents:
        it.random_(120, 128)
    return cache


if __name__ == "__main__":
    main()
