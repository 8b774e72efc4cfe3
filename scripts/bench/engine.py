"""The step loop alone: one rank in this process, without Ray and HTTP, always as many requests in flight as asked.

Prints output tok/s of each round as JSON. bench_local runs it to tell what the way to the client costs.
"""

import argparse
import json
import random
import sys
import time

from scripts.bench.inputs import rank_config
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.wire.request import EngineRequest, RequestOutput, SamplingParams


class Loop:
    """A closed loop on an engine: who is answered asks again."""

    def __init__(self, epoch: Epoch, input_len: int, output_len: int, seed: int):
        self._random = random.Random(seed)
        self._input_len, self._output_len = input_len, output_len
        self._sent = self._left = 0
        epoch.start_engine(self._on_outputs, lambda step: None)
        self._engine = epoch.engine

    def run(self, requests: int, concurrency: int) -> float:
        """Output tok/s of a round."""
        started = time.perf_counter()
        self._left = requests
        for _ in range(min(concurrency, requests)):
            self._send()
        while self._engine.step().run:
            pass
        return requests * self._output_len / (time.perf_counter() - started)

    def _send(self) -> None:
        self._left -= 1
        self._sent += 1
        request = EngineRequest(
            request_id=str(self._sent),
            ingress_id="here",
            prompt_token_ids=[self._random.randrange(256) for _ in range(self._input_len)],
            params=SamplingParams(max_tokens=self._output_len, temperature=0.0),
        )
        self._engine.submit(request)

    def _on_outputs(self, _ingress_id: str, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.finish_reason in (None, "length"), output
            if output.finish_reason and self._left:
                self._send()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[])
    for name in ("requests", "concurrency", "input-len", "output-len", "rounds", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument(
        "--turns",
        action="store_true",
        help="a round for each line of stdin; prints [tok/s, CPU seconds]",
    )
    options = parser.parse_args()
    config = rank_config(options.config, [*options.set, "cluster.ranks=1"])
    epoch = Epoch(RankProcess(0, config), Rendezvous("", 0, "bench-engine"), timeout_s=60)
    epoch.load()
    loop = Loop(epoch, options.input_len, options.output_len, options.seed)
    loop.run(2 * options.concurrency, options.concurrency)  # warm-up
    if options.turns:
        print("ready", flush=True)
        for _ in sys.stdin:
            before = time.process_time()
            rate = loop.run(options.requests, options.concurrency)
            print(json.dumps([rate, time.process_time() - before]), flush=True)
        return
    rates = [loop.run(options.requests, options.concurrency) for _ in range(options.rounds)]
    print(json.dumps([round(rate, 1) for rate in rates]))


if __name__ == "__main__":
    main()
