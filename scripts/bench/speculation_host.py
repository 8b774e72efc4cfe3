"""The host's time in steps of one rank: with drafts of a draft model and without, with a JSON schema and without.

A device computes while the host prepares, but only what was launched. So what counts is the time to the launch of the
next forward, `ahead`: scheduling, vote and preparation. With drafts of a draft model too, tokens are committed behind
that launch. `host` is all time of a step that is no model, behind the launch too. The model is small and runs on the
CPU, in steps that are launched ahead as on a GPU. Times are those of the thread's CPU, which other work on the machine
does not take.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cluster.api.request.grammar_check import single_grammar
from cluster.api.request.structured import json_schema_node
from cluster.config.examples import DEMO
from scripts.bench.inputs import rank_config
from scripts.bench.results import markdown_table
from scripts.make_checkpoint import make_checkpoint
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.wire.request import EngineRequest, RequestOutput, SamplingParams

IN_FLIGHT = (1, 8, 32, 128)
NUM_DRAFTS = 3
ACCEPTANCE = (0.8, 0.65, 0.5)
STRUCTURED_IN_FLIGHT = 64
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 10_000}  # no answer ends it
WARM_UP_STEPS, STEPS = 8, 30
PARTS = ("schedule", "vote", "prepare", "output")
Medians = dict[str, float]  # milliseconds


class HostSteps:
    """One rank with a small model, stepped by hand."""

    def __init__(self, folder: Path, *, drafts: bool):
        settings = [
            *("cluster.ranks=1", "cluster.device=cpu", "scheduler.async_scheduling=true"),
            *(f"model.path={folder}", "model.weights=dummy", "model.max_model_len=2048"),
            *(f"scheduler.max_num_seqs={IN_FLIGHT[-1]}", "cache.num_blocks=6000"),
        ]
        if drafts:
            settings += [
                *("speculation.method=mtp", "speculation.adaptive=false"),
                f"speculation.num_draft_tokens={NUM_DRAFTS}",
                f"speculation.accept_lengths={list(ACCEPTANCE)}",
            ]
        self._number = 0
        process = RankProcess(0, rank_config(DEMO, settings))
        self._epoch = Epoch(process, Rendezvous("127.0.0.1", 0, "alone"), timeout_s=60)
        self._epoch.load()
        self._ended: list[str] = []
        self._epoch.start_engine(self._publish, lambda step: None)

    def close(self) -> None:
        """End the rank."""
        self._epoch.process.close()

    def _publish(self, _ingress_id: str, outputs: list[RequestOutput]) -> None:
        self._ended += [it.request_id for it in outputs if it.finish_reason is not None]

    def measure(self, in_flight: int, grammar: str | None = None) -> Medians:
        """Return medians of steps in which so many sequences decode, the first one under `grammar`."""
        engine, scheduler, chance = self._epoch.engine, self._epoch.scheduler, random.Random(0)
        for index in range(in_flight):
            self._number += 1
            params = SamplingParams(
                max_tokens=(WARM_UP_STEPS + STEPS) * (1 + NUM_DRAFTS) + 64,
                temperature=0.0,
                grammar=None if index else grammar,
            )
            prompt = [chance.randrange(256) for _ in range(8)]
            engine.submit(
                EngineRequest(
                    request_id=str(self._number),
                    ingress_id="",
                    prompt_token_ids=prompt,
                    params=params,
                )
            )
        while len(scheduler.running) < in_flight:  # a grammar is compiled meanwhile
            engine.step()
        for _ in range(WARM_UP_STEPS):
            engine.step()
        self._ended.clear()
        with cpu_clock():
            steps = [self._step() for _ in range(STEPS)]
        assert not self._ended and len(scheduler.running) == in_flight, self._ended
        for seq in list(scheduler.running):
            engine.abort(seq.request.request_id)
        while engine.step().run:
            pass
        return {name: 1e3 * statistics.median(it[name] for it in steps) for name in steps[0]}

    def _step(self) -> Medians:
        """Return the seconds of one step by part."""
        engine = self._epoch.engine
        before = dict(engine.stats.seconds)
        engine.step()
        found = {name: engine.stats.seconds[name] - before[name] for name in PARTS}
        found["commit"] = engine._commit_s
        ahead = found["schedule"] + found["vote"] + found["prepare"]
        return {**found, "ahead": ahead, "host": ahead + found["commit"] + found["output"]}


@contextmanager
def cpu_clock() -> Iterator[None]:
    """Let the engine measure its parts by the CPU time of the thread."""
    clock = time.perf_counter
    time.perf_counter = time.thread_time
    try:
        yield
    finally:
        time.perf_counter = clock


def measure_host(num_pairs: int) -> dict[str, Any]:
    """Return rows with drafts and without, and with a JSON schema and without: turns in pairs, in alternating order."""
    with tempfile.TemporaryDirectory(prefix="phalanx-host-") as name:
        folder = make_checkpoint(
            Path(name) / "model",
            family="glm4_moe",
            weights=False,
            num_hidden_layers=2,
        )
        torch.set_num_threads(
            1
        )  # of the model, which is not measured: less of a machine with other work
        off, on = HostSteps(folder, drafts=False), HostSteps(folder, drafts=True)
        grammar = single_grammar(json_schema_node(SCHEMA))
        found: dict[str, Any] = {"steps": [], "schema": []}
        for in_flight in IN_FLIGHT:
            turns = partial(off.measure, in_flight), partial(on.measure, in_flight)
            found["steps"].append({"in_flight": in_flight, **compare(turns, num_pairs)})
        in_flight = STRUCTURED_IN_FLIGHT
        turns = partial(off.measure, in_flight), partial(off.measure, in_flight, grammar)
        found["schema"].append({"in_flight": in_flight, **compare(turns, num_pairs)})
        for one in (off, on):
            one.close()
    return found


def compare(turns: Sequence[Callable[[], Medians]], num_pairs: int) -> dict[str, Any]:
    """Return both sides' medians over pairs of turns, and medians of the ratios within pairs."""
    pairs = []
    for pair in range(num_pairs + 1):
        order = (1, 0) if pair % 2 else (0, 1)
        sides = {side: turns[side]() for side in order}
        pairs.append((sides[0], sides[1]))
    del pairs[0]  # the first pair warms up
    found: dict[str, Any] = {
        side: {name: statistics.median(it[index][name] for it in pairs) for name in pairs[0][0]}
        for index, side in enumerate(("off", "on"))
    }
    for name in ("ahead", "host"):
        found[f"{name}_ratio"] = statistics.median(b[name] / a[name] for a, b in pairs)
    return found


def tables(found: dict[str, Any]) -> str:
    """The tables of `measure_host`."""
    head = (
        *("sequences", "ahead, off (ms)", "ahead, on (ms)", "on / off"),
        *("host, off (ms)", "host, on (ms)", "on / off"),
    )

    def rows(of: list[dict[str, Any]]) -> list[list[str]]:
        return [
            [
                str(row["in_flight"]),
                *(f"{row[side]['ahead']:.3f}" for side in ("off", "on")),
                f"{row['ahead_ratio']:.2f}",
                *(f"{row[side]['host']:.3f}" for side in ("off", "on")),
                f"{row['host_ratio']:.2f}",
            ]
            for row in of
        ]

    return (
        "\nThe host's CPU time in a step, small model. `ahead`: until the next forward is launched, which a GPU may "
        "wait for; `host`: all that is no model. On: three drafts of each sequence by a head for multi-token "
        "prediction, "
        f"accepted with {', '.join(map(str, ACCEPTANCE))}:\n\n"
        + markdown_table(head, rows(found["steps"]))
        + "\nOn: one of the sequences under a JSON schema, without drafts:\n\n"
        + markdown_table(head, rows(found["schema"]))
    )
