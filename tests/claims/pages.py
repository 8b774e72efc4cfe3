"""Claims of measured figures: adapters, api, backends, bench, configuration, experts, kv-cache, models and offline."""

from collections.abc import Iterator
from statistics import median
from typing import Any

from tests.claims import load, row

ROUTES = ("chat", "responses", "messages")
RIGHT = "mtp, 0.8 0.65 0.5"  # server with drafts that are right with these probabilities


def _streams() -> tuple[list[float], list[float]]:
    """The most tokens per second of each route, and the median time to the first token in ms."""
    found = load("ingress-routes")
    assert found["connections"] == 32
    routes = [found["routes"][name] for name in ROUTES]
    rates = [max(pace["output_tokens_per_s"] for pace in route["paces"]) for route in routes]
    return rates, [route["first_token"]["first_token_ms"]["p50"] for route in routes]


def adapters() -> Iterator[str]:
    """Rates with adapters of routed experts, as shares of the rate of a server without LoRA."""
    shares = []
    for name in ("gpu-adapters-experts-bf16", "gpu-adapters-experts-fp8"):
        found = load(name)
        assert (found["rank"], found["targets"]) == (16, "attention,experts")
        loads = found["loads"]
        assert all(
            (one["in_flight"], one["result"]["errors"]) == (64, {}) for one in loads.values()
        )
        rates = {use: one["result"]["output_tokens_per_s"] for use, one in loads.items()}
        uses = ("1 adapter", "8 adapters")
        shares.append([f"{rates[use] / rates['without LoRA']:.2f}" for use in uses])
        in_slot, swapped = (
            median(found["swaps"][request]["longest_gaps_ms"])
            for request in ("adapter in its slot", "adapter swapped in")
        )
    (bf16_one, bf16_eight), (fp8_one, fp8_eight) = shares
    yield (
        f"64 requests in flight made {bf16_one} of the rate without LoRA with one adapter and {bf16_eight} with eight "
        f"in [bfloat16](results/gpu-adapters-experts-bf16.md), {fp8_one} and {fp8_eight} in "
        "[FP8](results/gpu-adapters-experts-fp8.md)"
    )
    yield f"the longest gap of other streams {swapped - in_slot:.1f} ms longer (medians)"


def api() -> Iterator[str]:
    """The HTTP front end alone."""
    rates, first = _streams()
    yield (
        f"One HTTP process streams {rates[0]:,.0f} tokens/s on chat completions, {rates[1]:,.0f} on responses and "
        f"{rates[2]:,.0f} on messages to 32 connections"
    )
    yield f"The median first token comes after {first[0]:.1f}, {first[1]:.1f} and {first[2]:.1f} ms"


def backends() -> Iterator[str]:
    """Prompts of gated delta nets by both backends of GPUs."""
    found = load("gpu-delta-nets")
    assert found["clean_tree"] and found["hardware"]["gpus"] == ["NVIDIA H200, 143771 MiB"]
    assert (found["heads"], found["dim"]) == ([16, 32], 128)
    ms = {
        (one["backend"], one["sequences"], one["new_tokens"]): f"{one['us'] / 1e3:.2f} ms"
        for one in found["rows"]
    }
    for beginning, size, has in (
        ("With one prompt of 8,192 tokens a layer of Qwen3.6-35B-A3B took", (1, 8192), True),
        ("with eight prompts of 1,024 tokens", (8, 1024), False),
    ):
        names = [f" with `{name}`" if has else "" for name in ("triton", "flashinfer")]
        yield f"{beginning} {ms['triton', *size]}{names[0]} and {ms['flashinfer', *size]}{names[1]}"


def bench() -> Iterator[str]:
    """Phalanx on two CPU cores, the client's CPU time, guidellm."""
    found = load("cpu-local")
    servers = found["servers"].values()
    small, large = found["loads"]
    rounds = [load["rounds"] * found["cycles"] for load in found["loads"].values()]
    assert rounds == [6, 1] and found["cycles"] == 1
    results = [entry["median"] for server in servers for entry in server["loads"].values()]
    assert not any(result["errors"] for result in results), "the page states that no request failed"
    yield "medians of six rounds, with 32 in flight those of one round; each start and stop is one value"
    yield row("", *found["servers"])
    medians = [
        [server["loads"].get(name, {}).get("median") for server in servers]
        for name in (small, large)
    ]
    for beginning, one in (
        ("**8 in flight, 64 in / 64 out**", medians[0]),
        ("**32 in flight, 256 in / 128 out**", medians[1]),
    ):
        yield row(
            f"{beginning}: output tok/s",
            *(f"{m['output_tokens_per_s']:,.0f}" if m else "-" for m in one),
        )
    yield row("requests/s", *(f"{m['requests_per_s']:.1f}" for m in medians[0]))
    for beginning, key in (("first token", "ttft_ms"), ("per output token", "tpot_ms")):
        times = (m[key] for m in medians[0])
        yield row(
            f"{beginning}, p50 / p99 (ms)",
            *(f"{time['p50']:.1f} / {time['p99']:.1f}" for time in times),
        )
    starts = [server["start_to_first_answer_s"] for server in servers]
    stops = [server["stop_s"] for server in servers]
    assert all(len(values) == 1 for values in (*starts, *stops))
    yield row("start to first answer (s)", *(f"{one:.1f}" for (one,) in starts))
    yield row("Ctrl-C to end (s)", *("killed" if one is None else f"{one:.1f}" for (one,) in stops))
    memory = [
        ", ".join(f"{rank['beyond_weights']:.0f}" for rank in server.get("rank_memory_mb") or [])
        or "-"
        for server in servers
    ]
    yield row("rank memory beyond weights (MB)", *memory)
    alone = found["engine_alone_output_tokens_per_s"]
    assert median(alone) < medians[0][0]["output_tokens_per_s"] and len(alone) == 6
    yield f"The engine alone, without Ray and HTTP, made {median(alone):,.0f} tok/s (median of six rounds)"
    rates, first = _streams()
    yield f"streams {rates[0]:,.0f} tok/s over 32 connections, and its median first token comes after {first[0]:.1f} ms"
    yield from _client()


def experts() -> Iterator[str]:
    """Gaps between tokens while experts move."""
    gpus, cpus = load("gpu-expert-moves-four"), load("cpu-expert-moves")
    assert gpus["ranks"] == 4 and gpus["load"]["share"] == 0.5 and cpus["ranks"] == 2
    yield f"was [{gpus['gap_p99_of_still']:.2f} times](results/gpu-expert-moves-four.md) as long"
    assert gpus["layers"] == 48
    yield f"a move of 48 layers took {gpus['all_layers_s_max']:.1f} s"
    yield f"it was [{cpus['gap_p99_of_still']:.2f} times](results/cpu-expert-moves.md) as long"


def _client() -> Iterator[str]:
    paces = [pace for route in load("ingress-routes")["routes"].values() for pace in route["paces"]]
    times = [pace["client_us_per_chunk"] for pace in paces]
    yield f"A streamed chunk took {min(times):.1f} to {max(times):.1f} us of CPU time on two cores"
    found = load("guidellm")
    yield f"guidellm {found['versions']['guidellm']}"
    names = ("synchronous, chat", "constant rate of 4/s, chat", "8 streams, completions")
    for name, run in zip(names, found["runs"], strict=True):
        assert run["requests"]["errored"] == 0 and run["seconds"] == 20
        first = run["ttft_ms"]
        yield row(
            name,
            run["requests_per_s"],
            f"{run['output_tokens_per_s']:.0f}",
            f"{first['p50']:.0f} / {first['p95']:.0f}",
            f"{run['inter_token_ms']['p50']:.1f}",
        )


def configuration() -> Iterator[str]:
    """The host's time in steps with drafts, drafts of copied text on a CPU, and drafts of a draft model on a GPU."""
    found = load("cpu-speculation")
    host, ratios = found["host"], {(it["load"], it["in_flight"]): it for it in found["loads"]}
    assert found["clean_tree"] and host["clean_tree"]
    different = {"repeating": 0, "random": 0}
    for it in found["loads"]:
        different[it["load"]] += sum(pair["different"] for pair in it["pairs"])
    assert different["repeating"] == 0, "greedy answers are equal"
    sampled = sum(3 * it["in_flight"] * len(it["pairs"]) for it in found["loads"]) // 2
    yield f"No greedy answer differed; of {sampled} sampled ones {different['random']} did"
    for one in host["steps"]:
        times = (one[side]["ahead"] for side in ("off", "on"))
        both = f"{one['ahead_ratio']:.1f}", f"{one['host_ratio']:.1f}"
        yield row(one["in_flight"], *(f"{time:.2f}" for time in times), *both)
    (schema,) = host["schema"]
    assert schema["in_flight"] == 64
    yield f"With one of 64 sequences under a JSON schema the host took {schema['ahead_ratio']:.2f} times as long"
    repeats, others = (
        [ratios[kind, number]["ratio"] for number in (1, 8)] for kind in ("repeating", "random")
    )
    yield (
        f"{repeats[0]:.1f} and {repeats[1]:.1f} times the tokens per second of CPU time with 1 and 8 in flight, "
        f"{others[0]:.2f} and {others[1]:.2f} times for random prompts"
    )
    yield from _drafts_on_a_gpu()


def _drafts_on_a_gpu() -> Iterator[str]:
    in_flight, ratios = _ratios_with_drafts("gpu-speculation", RIGHT)
    *most, last = ratios
    yield (
        f"made [{', '.join(most)} and {last} times](results/gpu-speculation.md) the tokens/s without drafts with "
        f"{', '.join(in_flight[:-1])} and {in_flight[-1]} requests in flight, "
        "where drafts were right with probabilities 0.8, 0.65 and 0.5"
    )
    earlier = [
        _ratios_with_drafts(f"gpu-speculation-{name}", RIGHT)[1][0]
        for name in ("before", "earlier")
    ]
    yield f"earlier versions made up to {max(earlier)} times with 1"
    in_flight, ratios = _ratios_with_drafts("gpu-speculation", "mtp, 0.2")
    yield (
        f"Where 0.2 of them were right, it made [{' and '.join(ratios)} times](results/gpu-speculation.md) "
        f"the tokens/s with {' and '.join(in_flight)} requests in flight"
    )


def _ratios_with_drafts(name: str, server: str) -> tuple[list[str], list[str]]:
    """Requests in flight, and the rates with drafts as multiples of those without."""
    found = load(name)
    assert found["hardware"]["gpus"] == ["NVIDIA H200, 143771 MiB"]
    off, drafts = (
        {
            str(one["in_flight"]): one["result"]["output_tokens_per_s"]
            for one in found["servers"][side]["loads"]
            if not one["beside"]
        }
        for side in ("off", server)
    )
    return list(drafts), [f"{rate / off[number]:.2f}" for number, rate in drafts.items()]


def kv_cache() -> Iterator[str]:
    """docs/kv-cache.md: a rank that is killed, with the host tier and without."""
    found = load("cpu-kv-kill")
    options, servers = found["options"], found["servers"]
    assert not found["hardware"]["gpus"] and found["clean_tree"]
    assert (options["ranks"], options["kills"]) == ("2", "2")
    yield (
        f"Two ranks of a CPU, busy with other work, lost one of them by SIGKILL under {options['kill_sessions']} "
        f"sessions of {int(options['kill_tokens']):,} tokens, two times with the tier and two times without"
    )
    for name, server in (("with `cache.host_memory_gib`", "host tier"), ("without", "without")):
        kill = servers[server]["kill"]
        pauses = kill["killed_rank"], kill["killed_rank_behind_rebuild"]
        assert [it["streams"] for it in pauses] == [32, 32]
        figures = pauses[0]["pause_p50_s"], pauses[0]["pause_p99_s"], pauses[1]["pause_p50_s"]
        yield row(name, *(f"{seconds:.1f} s" for seconds in figures))
        assert [event["equal_answers"] for event in kill["events"]] == ["32 of 32"] * 2
    assert found["ratios"]["equal_answers"] == {"kill": "64 of 64"}
    yield "All tokens are those of answers without a failure"
    yield from _kill_on_a_gpu()


def _kill_on_a_gpu() -> Iterator[str]:
    found = load("gpu-kv-kill")
    options, servers = found["options"], found["servers"]
    assert found["hardware"]["gpus"] == ["NVIDIA H200, 143771 MiB"] and found["clean_tree"]
    assert (options["ranks"], options["kills"]) == ("1", "1")
    sessions, tokens = int(options["kill_sessions"]), int(options["kill_tokens"])
    yield f"under {sessions} sessions of {tokens:,} tokens"
    kills = [servers[name]["kill"] for name in ("host tier", "without")]
    pauses, behind = (
        [kill[part]["pause_p50_s"] for kill in kills]
        for part in ("killed_rank", "killed_rank_behind_rebuild")
    )
    yield f"the median pause was {pauses[0]:.1f} s with the tier and {pauses[1]:.1f} s without"
    rebuilds = [kill["events"][0]["rebuild_s"] for kill in kills]
    yield f"of which the rebuild took {rebuilds[0]:.1f} s and {rebuilds[1]:.1f} s"
    yield f"Behind the rebuild it was {behind[0]:.1f} s and {behind[1]:.1f} s"
    rate = _served("gpu-one-qwen3", (64, 4096, 8))["total_tokens_per_s"]
    yield f"this GPU computes all prompts again in about {sessions * tokens / rate:.1f} s"


def models() -> Iterator[str]:
    """A KV cache in FP8."""
    texts = load("kv-precision")["texts"]
    changes = [
        abs(one["float32, FP8 cache"]["perplexity"] / one["float32"]["perplexity"] - 1)
        for one in texts.values()
    ]
    assert max(changes) < 0.005
    held = texts["held-out text"]
    same = [100 * held[name]["same_choice"] for name in ("float32, FP8 cache", "bfloat16")]
    yield (
        "perplexity changes by less than 0.5 %, and on held-out text the likeliest token stays the same "
        f"in {same[0]:.1f} % "
        f"of places; bfloat16 alone keeps {same[1]:.1f} %"
    )
    decodes, prompts = (128, 1024, 1024), (64, 4096, 8)
    rates = [
        _served(name, decodes)["output_tokens_per_s"]
        for name in ("gpu-one-qwen3-kv8", "gpu-one-qwen3")
    ]
    yield (
        f"128 requests in flight (1,024 in, 1,024 out) make {rates[0]:,.0f} output tok/s, with 16 bits {rates[1]:,.0f}"
    )
    title = "Prefill: 2 prompts of 4,096 tokens a rank in each step"
    steps = [
        state["ranks"][0]["step_ms"]
        for name in ("gpu-fp8-kv8-steps", "gpu-fp8-steps")
        for state in load(name)["states"]
        if state["title"] == title
    ]
    yield f"took {steps[0]:.1f} ms, with 16 bits {steps[1]:.1f} ms"
    rates = [
        _served(name, prompts)["total_tokens_per_s"] for name in ("gpu-fp8-kv8", "gpu-fp8-one")
    ]
    yield f"the served load of prompts made {rates[0]:,.0f} tok/s in all instead of {rates[1]:,.0f}"


def _served(name: str, wanted: tuple[int, int, int]) -> dict[str, Any]:
    """The figures of a served load: requests in flight, tokens in and out."""
    (found,) = (
        one["result"]
        for one in load(name)["loads"]
        if (one["in_flight"], one["input_len"], one["output_len"]) == wanted
    )
    return found


def offline() -> Iterator[str]:
    """Batches beside the engine alone."""
    short, long = load("offline"), load("offline-long")
    assert (short["rounds"], long["rounds"]) == (6, 4)
    one, more = short["1-rank"], long["1-rank"]
    shares, longer = one["share_of_engine"], more["share_of_engine"]
    yield (
        f"`phalanx batch` makes {shares['batch']} of the engine's own speed and `LLM.generate` "
        f"{shares['generate']}, medians "
        "of six turns"
    )
    cost = [
        entry["cpu_us_per_token"]["ranks"] / entry["cpu_us_per_token"]["engine"] - 1
        for entry in (one, more)
    ]
    yield f"Four longer turns gave {longer['batch']} and {longer['generate']}"
    yield (
        f"The ranks are in steps {100 * one['of_time_in_steps']:.0f} % of the time. A token takes "
        f"{100 * cost[0]:.0f} % "
        f"(longer turns: {100 * cost[1]:.0f} %) more CPU time of a rank than of the engine alone"
    )
