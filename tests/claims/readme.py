"""Claims of README.md."""

import json
from collections.abc import Iterator

from cluster.config.resolve import RANK_PROCESS_BYTES
from tests import gpus_needed
from tests.claims import RESULTS, load, row
from workers.config import CacheConfig

FOUR, ONE, NEWER = "vllm-comparison", "vllm-comparison-one-gpu", "gpu-serving-four-h200"
# Beginning of a row, place of the load in the file, key of the figures.
FOUR_GPUS = (
    ("512 / 1,024 / 1,024: output tok/s", 0, "output_tokens_per_s"),
    ("128 / 128 / 512: output tok/s", 1, "output_tokens_per_s"),
    ("256 / 4,096 / 8: tok/s in all", 2, "tokens_per_s"),
    ("512, mixed lengths, shared prefixes: output tok/s", 3, "output_tokens_per_s"),
    ("start to first answer, nothing compiled before (s)", 5, "seconds"),
)
# Beginning of a row, the load, key of the figures, and whether the row has the ratio.
MIXED = "mixed lengths, 128 in flight"
ONE_GPU = (
    (
        "128 / 1,024 / 1,024: output tok/s",
        "128 in flight, 1024 / 1024",
        "output_tokens_per_s",
        True,
    ),
    ("32 / 128 / 512: output tok/s", "32 in flight, 128 / 512", "output_tokens_per_s", True),
    ("64 / 4,096 / 8: tok/s in all", "64 in flight, 4096 / 8", "tokens_per_s", True),
    ("4 / 512 / 256: ms a token", "4 in flight, 512 / 256", "ms_per_token", True),
    ("128, mixed lengths: output tok/s", MIXED, "output_tokens_per_s", True),
    ("128, mixed lengths: worst gap of a stream, p99 (ms)", MIXED, "worst_gap_ms_p99", False),
)


def four_gpus() -> Iterator[str]:
    """The comparison on four H200, and what later versions made of these loads."""
    found = load(FOUR)
    loads = found["loads"]
    assert found["hardware"] == "4 x NVIDIA H200"
    first = loads[0]
    yield (
        f"On four H200 with Qwen3-30B-A3B's shapes, Phalanx makes {first['phalanx']['output_tokens_per_s']:,} output "
        f"tokens/s over HTTP and vLLM 0.26 makes {first['vllm']['output_tokens_per_s']:,}"
    )
    yield (
        f"Four H200, Qwen3-30B-A3B in bfloat16, version 0.1 of {found['date']}, beside vLLM "
        f"{found['versions']['vllm']}"
    )
    for beginning, number, key in FOUR_GPUS:
        phalanx, vllm = (loads[number][server][key] for server in ("phalanx", "vllm"))
        yield row(beginning, f"{phalanx:,}", f"{vllm:,}", f"{loads[number]['ratio']:.2f}")
    few = loads[4]
    own, vllm = few["phalanx"]["ms_per_token"], few["vllm"]
    tensor = vllm["ms_per_token_tensor_parallel_4"]
    yield row(
        "4 / 512 / 256: ms a token",
        own,
        f"{vllm['ms_per_token']} ({tensor} with tensor parallelism)",
        f"{few['ratio']:.2f} ({tensor / own:.2f})",
    )
    date, rates, token = _newer(NEWER)
    yield (
        f"On four H200 the development version of {date} makes {rates} tok/s in these three loads, and takes {token} a "
        "token with 4 in flight"
    )
    _, rates, token = _newer(f"{NEWER}-fp8")
    yield f"in FP8 {rates} tok/s, and {token}"
    fp8 = found["fp8_on_two_gpus_output_tokens_per_s"]
    ratios = [one["ratio"] for one in fp8]
    yield (
        f"[FP8](docs/results/gpu-fp8.md) on two H200 was {min(ratios)} to {max(ratios)} times as fast as vLLM in the "
        "comparison"
    )
    later = load("gpu-fp8-pair")
    (prompts,) = (one for one in later["loads"] if one["input_len"] == 4096)
    assert prompts["in_flight"] == 128 and fp8[2]["load"].startswith("128 in flight, 4096 / 8")
    yield (
        f"{fp8[2]['phalanx']:,} tok/s in all with version 0.1, {prompts['result']['total_tokens_per_s']:,.0f} with "
        f"that of {later['date'][:10]}"
    )


def _newer(name: str) -> tuple[str, str, str]:
    """Date, rates of the first three loads, and the time a token with 4 in flight, on four H200."""
    newer = load(name)
    assert newer["hardware"]["gpus"] == 4 * ["NVIDIA H200, 143771 MiB"] and newer["clean_tree"]
    decodes, short, prompts, few = (one["result"] for one in newer["loads"][:4])
    rates = [f"{one['output_tokens_per_s']:,.0f}" for one in (decodes, short)]
    rates.append(f"{prompts['total_tokens_per_s']:,.0f}")
    return (
        newer["date"][:10],
        f"{rates[0]}, {rates[1]} and {rates[2]}",
        f"{few['tpot_ms']['p50']:.1f} ms",
    )


def one_gpu() -> Iterator[str]:
    """The comparison on one H200, losses too."""
    found = load(ONE)
    left, right = ({one["load"]: one for one in loads} for loads in found["models"].values())
    assert found["hardware"] == "one H200"
    yield f"One H200, FP8, the development version of 0.2 of {found['date']}, beside vLLM {found['versions']['vllm']}"
    for beginning, name, key, has_ratio in ONE_GPU:
        cells: list[str] = []
        for one in (left[name], right[name]):
            figure = "{:.2f}" if key == "ms_per_token" else "{:,}"
            cells += [figure.format(one[server][key]) for server in ("phalanx", "vllm")]
            cells.append(f"{one['ratio']:.2f}" if has_ratio else "")
        yield row(beginning, *cells)
    single, arrivals = left["1 in flight, 512 / 256"], left["mixed lengths, 10 requests/s"]
    own, other = (loads["start, nothing compiled before"] for loads in (left, right))
    few = [single[server]["ms_per_token"] for server in ("phalanx", "vllm")]
    yield row("1 / 512 / 256: ms a token", *few, f"{single['ratio']:.2f}", "-", "-", "-")
    servers = [arrivals[server] for server in ("phalanx", "vllm")]
    first = [f"{one['first_token_ms_p50']}, {one['first_token_ms_p99']}" for one in servers]
    beginning = "10 requests/s, mixed lengths"
    yield row(f"{beginning}: first token p50, p99 (ms)", *first, arrivals["ratio"], "-", "-", "-")
    tokens = [one["ms_per_token_p50"] for one in servers]
    yield row(f"{beginning}: ms a token, p50", *tokens, "", "-", "-", "-")
    least, most = own["phalanx"]["seconds"]
    yield row(
        "start to first answer, nothing compiled before (s)",
        f"{least} to {most}",
        f"over {own['vllm']['more_than_seconds']}",
        "",
        other["phalanx"]["seconds"],
        f"{other['vllm']['seconds_with_kernels_compiled_before']}, kernels compiled before",
        "",
    )
    note = "as made they are 97.7 % zeros, which makes its prompts 8 % faster"
    assert note in found["method"]
    yield note


def cpus() -> Iterator[str]:
    """Two CPU cores."""
    servers = load("cpu-local")["servers"].values()
    rates = [
        next(iter(server["loads"].values()))["median"]["output_tokens_per_s"] for server in servers
    ]
    yield (
        f"On two CPU cores a small random model makes {rates[0]:,.0f} output tok/s over HTTP, and {rates[-1]:,.0f} with"
    )


def gpus() -> Iterator[str]:
    """Memory and numbers of GPUs, by the arithmetic of the product; the GPUs of all measurements."""
    hardware = [json.loads(path.read_text())["hardware"] for path in RESULTS.glob("*.json")]
    named = {str(one if isinstance(one, str) else one["gpus"]) for one in hardware} - {"[]"}
    known = ("H200", "H100")
    assert all(any(name in one for name in known) for one in named), named
    yield "every measurement is of H200 or H100"
    yield f"`phalanx check` counts {RANK_PROCESS_BYTES / 1e9:.1f} GB for the process of a rank"
    yield f"GPUs of one host for a context of {gpus_needed.CONTEXT:,} tokens (or the model's, if shorter)"
    yield f"fit in `cache.memory_fraction` ({CacheConfig().memory_fraction}) of each GPU"
    yield gpus_needed.HEADER
    yield from gpus_needed.table()
    steps = ", ".join(f"{key}: {value}" for key, value in gpus_needed.SMALL_STEPS.items())
    yield f"`scheduler: {{ {steps} }}`"


def claims() -> Iterator[str]:
    """All claims of the page."""
    for part in (four_gpus, one_gpu, cpus, gpus):
        yield from part()
