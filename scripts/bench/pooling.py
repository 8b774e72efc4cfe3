"""Tokens per second of embeddings beside those of prompts of generations, on one rank, without Ray and HTTP.

Both run on one engine: a generation draws one token, an embedding none. The kinds take turns of a few seconds, so that
a slow spell of the machine meets all of them; the ratio is the median of the ratios of a turn. No prompt is cached.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median

from scripts.bench.inputs import rank_config
from scripts.bench.results import add_options, origin, save
from scripts.make_checkpoint import make_checkpoint
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.wire.request import (
    NO_OUTPUT,
    EngineRequest,
    PoolingParams,
    RequestOutput,
    SamplingParams,
)

KINDS: dict[str, PoolingParams | None] = {
    "generation": None,
    "last": PoolingParams(rows="last", normalize=True),
    "mean": PoolingParams(rows="mean", normalize=True),
}
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


class Loop:
    """A closed loop on an engine: the end of a request sends the next one."""

    def __init__(self, epoch: Epoch, input_len: int):
        self._random = random.Random(0)
        self._input_len = input_len
        self._sent = self._left = 0
        self._kind = ""
        epoch.start_engine(self._on_outputs, lambda step: None)
        self._engine = epoch.engine

    def run(self, kind: str, requests: int, concurrency: int) -> float:
        """Return the tokens per second of a round."""
        started = time.perf_counter()
        self._kind, self._left = kind, requests
        for _ in range(min(concurrency, requests)):
            self._send()
        while self._engine.step().run:
            pass
        return requests * self._input_len / (time.perf_counter() - started)

    def _send(self) -> None:
        self._left -= 1
        self._sent += 1
        pooling = KINDS[self._kind]
        self._engine.submit(
            EngineRequest(
                request_id=str(self._sent),
                ingress_id="here",
                prompt_token_ids=[self._random.randrange(256) for _ in range(self._input_len)],
                params=ONE_TOKEN if pooling is None else NO_OUTPUT,
                pooling=pooling,
            )
        )

    def _on_outputs(self, _ingress_id: str, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.finish_reason in (None, "length", "stop"), output
            if output.finish_reason and self._left:
                self._send()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="name or folder; by default a small random model")
    parser.add_argument("--set", action="append", default=[], help="setting for Phalanx")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each kind")
    parser.add_argument("--requests", type=int, default=64, help="requests of a round")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=512)
    add_options(parser, "cpu-pooling", drawn=False)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        model = options.model or str(make_checkpoint(Path(folder) / "model"))
        yaml = Path(folder) / "config.yaml"
        yaml.write_text(json.dumps({"model": {"path": model}}))
        config = rank_config(yaml, [*options.set, "cluster.ranks=1"])
        epoch = Epoch(RankProcess(0, config), Rendezvous("", 0, "bench-pooling"), timeout_s=60)
        epoch.load()
        loop = Loop(epoch, options.input_len)
        turns: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(1 + options.rounds):
            # The first turn warms up. Each kind comes first in as many turns.
            kinds = list(KINDS)[number % len(KINDS) :] + list(KINDS)[: number % len(KINDS)]
            for kind in kinds:
                rate = loop.run(kind, options.requests, options.concurrency)
                if number:
                    turns[kind].append(rate)
    report = {
        **origin(int(config.device == "cuda"), options.commit),
        "load": {
            name: getattr(options, name)
            for name in ("requests", "concurrency", "input_len", "rounds")
        },
        "tokens_per_s": {kind: round(median(rates), 1) for kind, rates in turns.items()},
        "of_generation": {
            kind: _ratio(turns[kind], turns["generation"]) for kind in KINDS if KINDS[kind]
        },
        "turns": {kind: [round(rate, 1) for rate in rates] for kind, rates in turns.items()},
    }
    save(options.out, report)
    print(json.dumps({name: report[name] for name in ("tokens_per_s", "of_generation")}, indent=1))


def _ratio(rates: list[float], others: list[float]) -> float:
    return round(median(rate / other for rate, other in zip(rates, others, strict=True)), 3)


if __name__ == "__main__":
    main()
