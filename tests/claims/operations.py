"""Claims of docs/operations.md with measured figures."""

from collections.abc import Iterator
from operator import itemgetter
from statistics import median
from typing import Any

from scripts.bench.chaos_resources import SLACK
from tests.claims import Experiment, load, row

Found = dict[str, Any]

CHAOS = ("chaos-cpu", "chaos-cpu-hang", "chaos-cpu-faults", "chaos-cpu-200")


def gpu_pauses() -> Iterator[str]:
    """Failures of ranks on GPUs: one event each, and the streams that its pause counts."""
    found = load("gpu-recovery")
    assert found["clean_tree"] and len(found["hardware"]["gpus"]) == 2
    yield f"with the shapes of Qwen3-30B-A3B and {found['streams']} requests in flight"
    servers = found["servers"]
    for beginning, server, number in (
        ("an error in a step, no process died", "plain", 0),
        ("SIGKILL of one of two ranks", "plain", 1),
        ("SIGSTOP of one of two ranks", "plain", 2),
        ("SIGKILL of a single rank with a standby", "standby", 0),
        ("SIGKILL of one of two ranks, the group goes on with one", "shrink", 0),
    ):
        failure = servers[server]["failures"][number]
        assert failure["streams"] == found["streams"]
        yield row(beginning, *(f"{failure[key]:.1f} s" for key in ("pause_s", "serving_s")))
    growth = servers["shrink"]["failures"][1]
    assert growth["ranks"] == 2
    yield row(
        "growth back to two ranks", *(f"{growth[key]:.1f} s" for key in ("pause_s", "serving_s"))
    )
    assert [server["answers"] for server in servers.values()] == [0, 0, 0]
    yield f"The runs ended before an answer of {found['output_len']:,} tokens was complete"


def groups() -> Iterator[str]:
    """Ranks of groups that are killed, in a pool of a prefill and a decode group on CPUs."""
    found = load("cpu-group-failures")
    options, servers = found["options"], found["servers"]
    assert found["clean_tree"] and found["hardware"]["cores"] == 2 and options["rounds"] == "2"
    yield f"under {options['streams']} streams of {options['output_len']} tokens"

    def cells(events: list[Found]) -> list[str]:
        slowest = [max(it["rebuilds"].values(), key=itemgetter("seconds")) for it in events]
        assert {it["equal_answers"] for it in events} == {"8 of 8"}
        figures = (
            [it["pause_max_s"] for it in events],
            [it["seconds"] for it in slowest],
            [it["stages"]["processes"] + it["stages"]["group"] for it in slowest],
        )
        return [" and ".join(f"{seconds:.1f} s" for seconds in column) for column in figures]

    for killed, name in (
        ("decode", "the decode group"),
        ("prefill", "the prefill group"),
        ("both", "both groups"),
    ):
        yield row(name, *cells([it for it in servers["plain"] if it["killed"] == killed]))
    yield row("both groups, with a standby rank each", *cells(servers["standby"]))


def chaos() -> Iterator[str]:
    """Answers, pauses and resources under failures on CPUs."""
    runs = {name: load(name) for name in CHAOS}
    assert all(run["hardware"]["cores"] == 2 for run in runs.values())
    kinds = {
        name: [entry["count"] for entry in run["failures"].values()] for name, run in runs.items()
    }
    assert set(kinds["chaos-cpu"]) == {6} and set(runs["chaos-cpu"]["failures"]) == {
        "kill",
        "supervisor",
        "forward",
    }
    faults = kinds["chaos-cpu-faults"]
    assert set(faults) == {3}
    failures = {
        "chaos-cpu": "6 each of SIGKILL of a rank, SIGKILL of the supervisor, an error in a step",
        "chaos-cpu-hang": f"{runs['chaos-cpu-hang']['failures']['stop']['count']} times SIGSTOP of a rank",
        "chaos-cpu-faults": f"{sum(faults)}, 3 each of {len(faults)} kinds",
        "chaos-cpu-200": f"{runs['chaos-cpu-200']['failures']['kill']['count']} times SIGKILL of a rank, on a machine "
        "busy with other work",
    }
    for name, run in runs.items():
        yield row(
            f"[{run['ranks']}](results/{name}.json)",
            run["streams"],
            failures[name],
            f"{sum(run['answered'].values()):,}",
            len(run["failed"]),
            len(run["rounding"]),
            run["connections_ended_with_their_ingress"],
        )
    yield f"- The {len(faults)} kinds:"
    left_out = [run["requests_without_one_answer"] for run in runs.values()]
    yield f"were left out before: {left_out[0]}, {left_out[1]}, {left_out[2]} and {left_out[3]} requests"
    yield from _pauses(runs["chaos-cpu"]["failures"])
    stop = runs["chaos-cpu-hang"]["failures"]["stop"]
    pause = stop["pause_s"]
    yield (
        f"By SIGSTOP in the second row {pause['median']:.1f} s (median) and {pause['most']:.1f} s at most, of which "
        f"{stop['stages_s']['detection']:.0f} s pass before the group notices"
    )
    last = runs["chaos-cpu-200"]
    kill = last["failures"]["kill"]
    yield (
        f"In the last row {last['streams']} streams wait for two cores: its pauses ({kill['pause_s']['median']:.0f} s, "
        f"median) measure their queue, and its ranks served again after {kill['serving_s']['median']:.1f} s (median)"
    )
    yield from _resources(list(runs.values()))


def _pauses(failures: dict) -> Iterator[str]:
    kill, supervisor, error = (
        failures[kind]["pause_s"] for kind in ("kill", "supervisor", "forward")
    )
    yield (
        f"Pauses in the first row: {kill['median']:.1f} s (median) and {kill['most']:.1f} s at most by "
        "SIGKILL of a rank, "
        f"{supervisor['median']:.1f} s and {supervisor['most']:.1f} s by SIGKILL of the supervisor, "
        f"{error['median']:.1f} s and {error['most']:.1f} s by an error in a step"
    )


def _resources(runs: list[dict]) -> Iterator[str]:
    yield (
        f"grown by more than {SLACK['files']} files, {SLACK['threads']} threads or {SLACK['rss_mb']:.0f} MB; shared "
        "segments do not grow"
    )
    for run in runs:
        before, after = (run["resources"][f"after_{which}"] for which in ("first", "last"))
        assert after["host"] == before["host"] and run["resources"]["grew"] == []
        cells = [
            " -> ".join(
                f"{one[role]['files']}, {one[role]['threads']}, {one[role]['rss_mb']:.0f}"
                for one in (before, after)
            )
            for role in ("rank", "supervisor", "ingress")
        ]
        yield row(f"{run['ranks']}, {run['streams']}", *cells)


def soak() -> Iterator[str]:
    """An hour of mixed traffic and failures."""
    found = load("chaos-cpu-soak")
    failures = [of["count"] for of in found["failures"].values()]
    wait = max(row["longest_wait_s"] for row in found["ten_minutes"])
    (grew,) = found["resources"]["grew"]
    name, before, _, after, *_ = grew.replace(":", "").split()
    assert found["failed"] == [] and name == "gcs_rss_mb"
    yield (
        f"In a [soak](results/chaos-cpu-soak.md) of {found['seconds'] / 60:.0f} minutes with {sum(failures)} failures "
        f"of {len(failures)} kinds, {found['ranks']} ranks and {found['streams']} clients, no answer of "
        f"{sum(found['answered'].values()):,} failed; the longest time without an item of an answer was {wait:.1f} s. "
        f"Ray's `gcs_server` grew by {float(after) - float(before):.0f} MB"
    )


def hosts() -> Iterator[str]:
    """CPU ranks over two hosts."""
    found = load("cpu-hosts")
    assert found["load"]["rounds"] == 5
    for ranks in (2, 4):
        rates = [median(x["output_tokens_per_s"]) for x in found["layouts"] if x["ranks"] == ranks]
        yield row(ranks, *(f"{rate / rates[0]:.2f}" for rate in rates[1:]))


def start() -> Iterator[str]:
    """A first start on a GPU, and the start after it."""
    found = load("gpu-start")
    assert found["hardware"]["cores"] == 16
    cold, warm = (
        (start["stages_s"]["kernels"], f"{start['start_to_first_answer_s']:.1f}")
        for start in (found["starts"]["cold"], found["starts"]["warm"])
    )
    yield (
        f"in one first start on one H200 with 16 cores the stage of kernels took {cold[0]} of {cold[1]} "
        "s, in the start "
        f"after it {warm[0]} of {warm[1]} s"
    )


def tails() -> Iterator[str]:
    """Prompts beside decodes under a limit."""
    runs = Experiment("tails-cpu")
    base: dict[str, object] = {"max_prefill_tokens_with_decodes": "auto", "target_itl_ms": None}
    target = base | {"target_itl_ms": 100}

    def both(metric: str) -> str:
        return f"from {runs.median(metric, **base):.0f} to {runs.median(metric, **target):.0f} ms"

    assert len(runs.values("itl_ms.p99", **base)) == 3
    share = runs.ratio("output_tokens_per_s", base, **target)
    yield (
        f"with {runs.runs[0]['workload']['request_rate']} requests/s a target of 100 ms lowered p99 of the gaps "
        f"{both('itl_ms.p99')} and the longest gap {both('itl_ms.max')}, with {share:.2f} of the output "
        "tokens/s; p50 of "
        f"the first token rose {both('ttft_ms.p50')} (medians of three runs"
    )
    none, limited = load("gpu-tails")["runs"]
    assert limited["scheduler.target_itl_ms"] == 25
    old, new = none["result"], limited["result"]

    def pair(metric: str, point: str) -> str:
        return f"from {old[metric][point]:.0f} to {new[metric][point]:.0f} ms"

    yield (
        f"a target of 25 ms lowered the worst gap of a stream {pair('worst_gap_ms', 'p50')} (p50) and "
        f"{pair('worst_gap_ms', 'p99')} (p99) with {new['output_tokens_per_s']:,.0f} instead of "
        f"{old['output_tokens_per_s']:,.0f} output tokens/s; p99 of the first token rose {pair('ttft_ms', 'p99')}"
    )


def claims() -> Iterator[str]:
    """All measured claims of the page."""
    for part in (gpu_pauses, groups, chaos, soak, hosts, start, tails):
        yield from part()
