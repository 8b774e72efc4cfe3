"""Claims of docs/experiments.md with measured figures."""

from collections.abc import Iterator

from tests.claims import Experiment, load


def two_gpus() -> Iterator[str]:
    """Overlap, all-to-alls and skew on two H200."""
    overlap = Experiment("overlap")
    assert len(overlap.hardware["gpus"]) == 2
    off: dict[str, object] = {"mode": "off"}
    lengths = (1024, 4096)
    whole = [
        overlap.median("total_tokens_per_s", mode="off", phase="prefill", input_len=n)
        for n in lengths
    ]
    shares = [
        overlap.ratio("total_tokens_per_s", off, mode="on", phase="prefill", input_len=n)
        for n in lengths
    ]
    step = overlap.ratio("decode_ms_per_token", off, mode="on", phase="decode")
    yield (
        f"Whole prefills make {whole[0]:,.0f} and {whole[1]:,.0f} tokens/s with prompts of 1,024 and "
        "4,096 tokens, ubatched "
        f"prefills {shares[0]:.2f} and {shares[1]:.2f} of that. A decode step in ubatches takes "
        f"{step:.2f} times as long"
    )
    clocks = {
        f"{overlap.ratio('gpu_mhz', off, mode='on', phase='prefill', input_len=n):.2f}"
        for n in lengths
    }
    watts = [
        overlap.median("gpu_watts", mode=mode, phase="prefill", input_len=n)
        for n in lengths
        for mode in ("off", "on")
    ]
    yield (
        f"the clock falls to {clocks.pop()}, because both forms draw the power that the GPU allows "
        f"({min(watts):.0f} to "
        f"{max(watts):.0f} W)"
    )
    assert not clocks
    yield from _all2all()
    skew = Experiment("skew")
    even: dict[str, object] = {"s": 0.0}
    prompts = [skew.ratio("total_tokens_per_s", even, s=s, phase="prefill") for s in (1.0, 2.0)]
    decodes = [skew.ratio("decode_tokens_per_s", even, s=s, phase="decode") for s in (1.0, 2.0)]
    yield (
        f"Prompts make {prompts[0]:.2f} of their tokens/s with s = 1, {prompts[1]:.2f} with s = 2. Decodes make "
        f"{decodes[0]:.2f} with s = 1 and {decodes[1]:.2f} with s = 2"
    )


def _all2all() -> Iterator[str]:
    runs = Experiment("all2all")
    sizes = (32, 512, 2048, 8192)
    times = {
        name: [runs.median("exchange_us", all2all=name, tokens=tokens) for tokens in sizes]
        for name in ("copy_engine", "symm", "torch_dist")
    }
    engine, symm, slow = times.values()
    yield (
        f"`copy_engine` and `symm` alike: {engine[0]:.1f} and {symm[0]:.1f} us with 32 tokens of a rank, "
        f"{engine[-1]:.0f} "
        f"and {symm[-1]:.0f} us with 8,192"
    )
    base: dict[str, object] = {"all2all": "copy_engine"}
    gather = [
        runs.ratio("exchange_us", base, all2all="allgather", tokens=tokens) for tokens in sizes
    ]
    yield f"`allgather` takes {min(gather):.1f} to {max(gather):.1f} times as long as `copy_engine`"
    yield f"`torch_dist` takes {min(slow):,.0f} to {max(slow):,.0f} us"


def two_cores() -> Iterator[str]:
    """The same questions on two CPU cores."""
    overlap = Experiment("overlap-cpu")
    off: dict[str, object] = {"mode": "off"}
    shares = [
        f"{overlap.ratio('total_tokens_per_s', off, mode='on', input_len=n):.2f}"
        for n in (16, 64, 256)
    ]
    yield f"ubatched prefills make {shares[0]}, {shares[1]} and {shares[2]} of the tokens/s of whole ones"
    runs = Experiment("all2all-cpu")
    first, last = (runs.median("exchange_us", all2all="shm", tokens=tokens) for tokens in (1, 256))
    yield f"`shm`: {first:.0f} us with one token of a rank, {last:.0f} us with 256"
    base: dict[str, object] = {"all2all": "shm"}
    times, steps = (
        [
            runs.ratio(metric, base, all2all=name, tokens=tokens)
            for name in ("torch_dist", "allgather")
            for tokens in (1, 4, 16, 64, 256)
        ]
        for metric in ("exchange_us", "step_ms")
    )
    yield (
        f"take {min(times):.0f} to {max(times):.0f} times as long, and steps {min(steps):.1f} to "
        f"{max(steps):.1f} times"
    )
    skew = Experiment("skew-cpu")
    even: dict[str, object] = {"s": 0.0}
    rates = [
        skew.ratio("total_tokens_per_s", even, s=s, phase=phase)
        for s in (0.5, 1.0, 2.0)
        for phase in ("prefill", "decode")
    ]
    balanced = [skew.median("expert_balancedness", s=s, phase="decode") for s in (0.0, 2.0)]
    yield (
        f"({min(rates):.2f} to {max(rates):.2f} of the tokens/s) though the experts' balancedness falls from "
        f"{balanced[0]:.2f} to {balanced[1]:.2f}"
    )
    yield from _beside_decodes()


def _beside_decodes() -> Iterator[str]:
    mixed = Experiment("mixed-cpu")
    large: dict[str, object] = {"max_num_batched_tokens": 512}
    first, gaps = (
        [
            mixed.ratio(metric, large, max_num_batched_tokens=32, request_rate=rate)
            for rate in (2.0, 6.0)
        ]
        for metric in ("ttft_ms.p50", "itl_ms.p99")
    )
    yield (
        f"the median time to the first token is {first[0]:.1f} and {first[1]:.1f} times that with 512 (2 "
        "and 6 requests/s), "
        f"and gaps between tokens are not shorter (p99 {gaps[0]:.1f} and {gaps[1]:.1f} times)"
    )
    tails = Experiment("tails-cpu")
    cells: list[dict[str, object]] = [
        {"max_prefill_tokens_with_decodes": limit, "target_itl_ms": target}
        for limit, target in (
            ("auto", None),
            (256, None),
            (128, None),
            ("auto", 200),
            ("auto", 100),
        )
    ]
    metrics = ("itl_ms.p99", "worst_gap_ms.p50", "worst_gap_ms.p99")
    times = [[f"{tails.median(metric, **cell):.0f}" for metric in metrics] for cell in cells]
    none, *others = times
    limits = [", ".join(one) for one in others]
    yield (
        f"Without a limit the gap between tokens has p99 {none[0]} ms, the worst gap of a stream is "
        f"{none[1]} ms (p50) and "
        f"{none[2]} ms (p99). 256 tokens: {limits[0]} ms; 128 tokens: {limits[1]} ms; a target of 200 "
        f"ms: {limits[2]} ms; "
        f"of 100 ms: {limits[3]} ms"
    )
    rates, first = (
        [tails.ratio(metric, cells[0], **cell) for cell in cells[1:]]
        for metric in ("output_tokens_per_s", "ttft_ms.p50")
    )
    yield (
        f"Output tokens/s are {min(rates):.2f} to {max(rates):.2f} of those without a limit, the median "
        "time to the first "
        f"token {min(first):.2f} to {max(first):.2f}"
    )


def lockstep() -> Iterator[str]:
    """Simulated ranks, and the errors of the simulation."""
    found = load("experiments/lockstep-cpu/simulation")
    one, most = found["simulated"][0], found["simulated"][-1]
    assert (one["ranks"], most["ranks"]) == (1, 256)
    share = most["output_tokens_per_s_per_rank"] / one["output_tokens_per_s_per_rank"]
    errors = [100 * error["mean"] for error in found["errors"].values()]
    yield (
        f"256 ranks make {share:.2f} of the tokens/s of single ranks: {100 * most['waiting']:.0f} % of a "
        "step waits for "
        f"the rank with the most tokens, {100 * most['exchange']:.0f} % is all-to-all. The mean error of a step is "
        f"{errors[1]:.0f} % on sizes that the fit did not see; the all-to-all of eight ranks from fewer ranks is "
        f"{errors[2]:.0f} % off"
    )


def claims() -> Iterator[str]:
    """All measured claims of the page."""
    for part in (two_gpus, two_cores, lockstep):
        yield from part()
