"""Tokens per second of one CPU rank with drafts and without, by turns, in one process with the demo model.

    python -m scripts.bench.speculation --out docs/results/cpu-speculation
    python -m scripts.bench.speculation --loads host

`repeating`: questions with an answer that the model has learned; the request's prediction is that answer with every
16th token changed, as an edit leaves it. `random`: prompts of random tokens, answered at temperature 1. A pair of turns
runs the same requests with drafts and without, and the order changes from pair to pair. Tokens of both turns are
compared. Rates are those of the process's CPU time, with one thread of torch, which other work on the machine does not
take. `host`: the time of the host in steps, see scripts.bench.speculation_host. Writes OUT.json and OUT.md; what was
not chosen stays as it was there.
"""

import argparse
import random
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer

from cluster.config.examples import DEMO
from cluster.config.load import load_config
from cluster.config.resolve import resolve_rank_config
from scripts.bench.inputs import names_of
from scripts.bench.results import (
    add_options,
    load,
    markdown_table,
    measure_or_redraw,
    origin,
    origin_line,
    save,
    write,
)
from scripts.bench.speculation_host import measure_host, tables
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.speculation.speculator import make_speculator
from workers.speculation_config import SpeculationConfig
from workers.wire.request import EngineRequest, RequestOutput, SamplingParams

FUNCTIONS = (
    *("textwrap.dedent", "os.path.join", "json.dumps", "shutil.copytree", "re.findall", "math.gcd"),
    *("os.path.exists", "random.shuffle", "time.monotonic", "itertools.chain", "heapq.heappush"),
    *("bisect.insort", "copy.deepcopy", "glob.glob", "string.capwords", "zlib.compress"),
)
EDIT_EVERY = 16
IN_FLIGHT = (1, 8)
KINDS = ("repeating", "random", "host")
SPECULATION = SpeculationConfig(method="ngram")


class Engine:
    """One rank, stepped by hand."""

    def __init__(self) -> None:
        settings = ["cluster.ranks=1", "cluster.device=cpu", "cache.prefix_caching=false"]
        self.config = resolve_rank_config(load_config(DEMO, settings))
        self.epoch = Epoch(RankProcess(0, self.config), Rendezvous("127.0.0.1", 0, "alone"), 10)
        self.epoch.load()
        self.outputs: list[RequestOutput] = []
        self.epoch.start_engine(lambda _, outputs: self.outputs.extend(outputs), lambda step: None)
        torch.set_num_threads(1)
        self.tokenizer = Tokenizer.from_file(str(self.config.model.folder / "tokenizer.json"))

    def run(self, requests: list[EngineRequest], in_flight: int, drafts: bool) -> dict[str, Any]:
        """Run the requests, `in_flight` at once; return seconds, tokens by request, and counts of drafts."""
        engine, waiting = self.epoch.engine, list(requests)
        self.epoch.scheduler.speculator = make_speculator(SPECULATION) if drafts else None
        before = engine.stats.snapshot()
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        started, cpu_before, open_ = time.perf_counter(), time.process_time(), 0
        while waiting or open_:
            while waiting and open_ < in_flight:
                engine.submit(waiting.pop())
                open_ += 1
            engine.step()
            for output in self.outputs:
                tokens[output.request_id] += output.token_ids
                open_ -= output.finish_reason is not None
            self.outputs.clear()
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
        after = engine.stats.snapshot()
        counts = {
            name: after[name] - before[name]
            for name in ("draft_tokens", "accepted_tokens", "steps")
        }
        return {"seconds": seconds, "cpu_s": cpu_s, "tokens": tokens, **counts}

    def requests(self, kind: str, seed: int, count: int) -> list[EngineRequest]:
        """Return the requests of a pair of turns."""
        chance, made = random.Random(seed), []
        for number in range(count):
            params = SamplingParams(max_tokens=96, temperature=1.0, seed=chance.getrandbits(60))
            prompt = [chance.randrange(300, self.tokenizer.get_vocab_size()) for _ in range(64)]
            if kind == "repeating":
                question = f"What does {chance.choice(FUNCTIONS)} do?"
                text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
                prompt = self.tokenizer.encode(text).ids
                stops = frozenset(
                    self.tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")
                )
                params = SamplingParams(max_tokens=256, temperature=0.0, stop_token_ids=stops)
            made.append(
                EngineRequest(
                    request_id=f"{kind}-{seed}-{number}",
                    ingress_id="",
                    prompt_token_ids=prompt,
                    params=params,
                )
            )
        return made


def with_predictions(
    requests: list[EngineRequest], answers: dict[str, list[int]]
) -> list[EngineRequest]:
    """Return the requests with their answers, edited, as predictions."""
    found = []
    for request in requests:
        edited = [
            t ^ 1 if n % EDIT_EVERY == EDIT_EVERY - 1 else t
            for n, t in enumerate(answers[request.request_id])
        ]
        found.append(
            replace(request, params=replace(request.params, prediction_token_ids=tuple(edited)))
        )
    return found


def measure(args: argparse.Namespace) -> None:
    """Measure all loads and write the results."""
    path = args.out.with_suffix(".json")
    found = load(args.out) if path.is_file() else {}
    # Each part has its origin, taken before other work changes the tree.
    if "host" in args.loads:
        made_at = origin(0, args.commit)
        found["host"] = {**made_at, "pairs": args.pairs, **measure_host(args.pairs)}
        save(args.out, found)
    kinds = [kind for kind in ("repeating", "random") if kind in args.loads]
    if kinds:
        found |= measure_drafts(args, kinds)
        save(args.out, found)
    write(args.out, found, page)


def measure_drafts(args: argparse.Namespace, kinds: list[str]) -> dict[str, Any]:
    """Measure drafts copied from earlier text."""
    made_at = origin(0, args.commit)
    engine, loads = Engine(), []
    for kind in kinds:
        for in_flight in IN_FLIGHT:
            pairs: list[dict[str, Any]] = []
            for pair in range(args.pairs + 1):
                requests = engine.requests(kind, pair, 3 * in_flight)
                if kind == "repeating":
                    answers = engine.run(requests, in_flight, drafts=False)["tokens"]
                    requests = with_predictions(requests, answers)
                turns = {
                    on: engine.run(requests, in_flight, on)
                    for on in ((True, False) if pair % 2 else (False, True))
                }
                different = sum(
                    turns[True]["tokens"][name] != ids
                    for name, ids in turns[False]["tokens"].items()
                )
                count = sum(map(len, turns[True].pop("tokens").values()))
                del turns[False]["tokens"]
                pairs.append(
                    {
                        "tokens": count,
                        "different": different,
                        "on": turns[True],
                        "off": turns[False],
                    }
                )
            pairs = pairs[1:]  # the first pair warms up
            ratios = [pair["off"]["cpu_s"] / pair["on"]["cpu_s"] for pair in pairs]
            loads.append(
                {
                    "load": kind,
                    "in_flight": in_flight,
                    "ratio": statistics.median(ratios),
                    "ratios": ratios,
                    "pairs": pairs,
                }
            )
            print(kind, in_flight, f"{statistics.median(ratios):.2f} x", flush=True)
    engine.epoch.process.close()
    return {
        **made_at,
        "speculation": SPECULATION.model_dump(),
        "pairs": args.pairs,
        "loads": loads,
    }


def page(found: dict[str, Any], _name: str) -> str:
    """The tables of all loads."""
    text = "# Drafts on one CPU rank\n\n"
    if "loads" in found:
        text += _drafts(found)
    if "host" in found:
        text += tables(found["host"]) + f"\n{origin_line(found['host'])}\n"
    return text


def _drafts(found: dict[str, Any]) -> str:
    rows = []
    for one in found["loads"]:
        pairs = one["pairs"]
        drafted = sum(pair["on"]["draft_tokens"] for pair in pairs)
        accepted = sum(pair["on"]["accepted_tokens"] for pair in pairs)
        rates = [
            sum(pair["tokens"] for pair in pairs) / sum(pair[turn]["cpu_s"] for pair in pairs)
            for turn in ("off", "on")
        ]
        steps = sum(p["on"]["steps"] for p in pairs) / sum(p["off"]["steps"] for p in pairs)
        low, high = min(one["ratios"]), max(one["ratios"])
        rows.append(
            (
                one["load"],
                str(one["in_flight"]),
                *(f"{rate:.0f}" for rate in rates),
                f"{one['ratio']:.2f} ({low:.2f} to {high:.2f})",
                f"{steps:.2f}",
                f"{accepted} of {drafted}",
            )
        )
    head = (
        "load",
        "in flight",
        "off, tok/s of CPU",
        "on, tok/s of CPU",
        "on / off",
        "steps, on / off",
        "drafts confirmed",
    )
    return (
        f"Drafts copied from earlier text. {origin_line(found)} Demo model, one rank, turns with drafts and without by "
        f"pairs; ratios are medians of {found['pairs']} pairs, with the lowest and the highest. By "
        "`python -m scripts.bench.speculation`.\n\n" + markdown_table(head, rows)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=6)
    kinds = ",".join(KINDS)
    parser.add_argument("--loads", type=names_of(KINDS), default=kinds, help=f"of {kinds}")
    add_options(parser, "cpu-speculation")
    measure_or_redraw(parser.parse_args(), measure, page, lambda found, out: None)
