"""Sessions that pause, with and without a host tier of KV: rates, first tokens, restores, and a rank that is killed.

Two servers, one after the other, with `cache.host_memory_gib` and without. The KV caches of the devices together hold a
quarter of the KV of all sessions; without the part `sessions` all sessions of `kill`. For each server, `--parts`:

sessions  each turn of a session sends its text so far and `--growth` random tokens more; `--concurrency` sessions at
          once, in turns. Counted are the turns behind the first one
random    prompts that share nothing
kill      SIGKILL for a rank while sessions of `--kill-tokens` tokens stream, see `scripts.bench.kv_kill`

Restores: bytes over the time of their copies, from /metrics, beside one plain copy of pinned memory to the device (on
CPU: from memory to memory). Answers of both servers are compared; on GPUs they may differ by rounding.

A dry run on a CPU:

    python -m scripts.bench.kv_tier --config configs/local.yaml --ranks 2 --sessions 8 --tokens 512 --turns 2 \\
        --concurrency 4 --output-len 8 --kill-sessions 4 --kill-tokens 256 --host-gib 0.5 --set cluster.device=cpu \\
        --out /tmp/kv-tier

The failure alone, on two ranks of a CPU, with random weights:

    python -m scripts.make_checkpoint /tmp/kv-kill --set max_position_embeddings=8192
    python -m scripts.bench.kv_tier --config configs/local.yaml --ranks 2 --parts kill --host-gib 4 \\
        --set model.path=/tmp/kv-kill --set cluster.device=cpu --set scheduler.max_num_seqs=32 \\
        --out docs/results/cpu-kv-kill
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.bench import machine
from cluster.config.load import load_config
from kernels.host import cuda_environment
from scripts.bench import ROOT, results
from scripts.bench.kv_kill import VOCABULARY, Kills
from scripts.bench.kv_streams import Stream, ask, at_once, figures
from scripts.bench.kv_tier_report import page
from scripts.bench.servers import ServerProcess, free_port, phalanx

TIMEOUT_S = 900.0
PARTS = ("sessions", "random", "kill")
COUNTS_S = 3.0
"""Time after which a rank has looked at the counters of its store."""
LINK = """
import time, torch
cuda = torch.cuda.is_available()
source = torch.ones(2**28, dtype=torch.uint8, pin_memory=cuda)
target = torch.empty(2**28, dtype=torch.uint8, device="cuda" if cuda else "cpu")
best = 0.0
for _ in range(6):
    started = time.perf_counter()
    target.copy_(source, non_blocking=True)
    if cuda:
        torch.cuda.synchronize()
    best = max(best, 2**28 / (time.perf_counter() - started))
print(best)
"""


@dataclass
class Bench:
    """One server under measurement."""

    options: argparse.Namespace
    client: httpx.AsyncClient
    model: str
    server: ServerProcess

    async def sessions(self) -> dict[str, Any]:
        """Play all turns; return the figures of those behind the first one."""
        options, chance = self.options, random.Random(1)
        texts = [chance.choices(VOCABULARY, k=options.tokens) for _ in range(options.sessions)]
        found, num_prompt_tokens, first = list[Stream](), 0, list[Stream]()
        for turn in range(options.turns):
            streams = await at_once(
                options.concurrency,
                [self._call(list(text), options.output_len) for text in texts],
            )
            if turn:
                found += streams
                num_prompt_tokens += sum(map(len, texts))
            else:
                first = streams
            for text in texts:
                text += chance.choices(VOCABULARY, k=options.growth)
        own = figures(found, num_prompt_tokens)
        return {**own, "first_turn": {**figures(first, 0), "answers": []}}

    def _call(self, prompt: list[int], length: int) -> Callable[[], Awaitable[Stream]]:
        return lambda: ask(self.client, self.model, prompt, length)

    async def random(self) -> dict[str, Any]:
        """Prompts that share nothing, all at once."""
        options, chance = self.options, random.Random(2)
        prompts = [chance.choices(VOCABULARY, k=options.tokens) for _ in range(options.prompts)]
        calls = [self._call(prompt, options.output_len) for prompt in prompts]
        return figures(await at_once(options.concurrency, calls), sum(map(len, prompts)))

    async def kill(self) -> dict[str, Any]:
        """A rank that dies while all sessions stream."""
        return await Kills(self.options, self.client, self.model, self.server).run()

    async def counters(self) -> dict[str, float]:
        """Return the counters of KV of all ranks, added up, with the values of their labels."""
        await asyncio.sleep(COUNTS_S)
        text, found = (await self.client.get("/metrics")).text, dict[str, float]()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("phalanx:kv_"):
                    labels = sample.labels
                    parts = [labels[it] for it in ("place", "direction", "kind") if it in labels]
                    name = " ".join([sample.name.removeprefix("phalanx:"), *parts])
                    found[name] = found.get(name, 0) + sample.value
        return found


def settings_of(options: argparse.Namespace, *, tier: bool) -> list[str]:
    """Return the settings of a server, with caches as the method has it."""
    block, ranks = options.block_size, options.ranks
    longest = options.kill_tokens + options.kill_output_len
    wanted = -(-options.kill_sessions // ranks) * -(-longest // block)
    if "sessions" in options.parts:
        longest = max(longest, options.tokens + options.growth * options.turns + options.output_len)
        wanted = options.sessions * options.tokens // (4 * ranks * block)
    num_blocks = options.num_blocks or max(wanted, -(-longest // block)) + 1
    return [
        f"cluster.ranks={ranks}",
        "cache.prefix_caching=true",
        f"cache.block_size={block}",
        f"cache.num_blocks={num_blocks}",
        f"cache.host_memory_gib={options.host_gib if tier else 0}",
        f"model.max_model_len={longest}",
        *options.set,
    ]


async def measure(server: ServerProcess, options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Run all parts on one server."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=TIMEOUT_S, limits=limits, trust_env=False
    ) as client:
        bench, found = Bench(options, client, model, server), dict[str, Any]()
        for part in options.parts:
            found[part] = await getattr(bench, part)()
            found[part]["counters"] = await bench.counters()
            told = {key: it for key, it in found[part].items() if key != "answers"}
            print(json.dumps({part: told}), file=sys.stderr, flush=True)
        return found


def serve(options: argparse.Namespace, *, tier: bool) -> dict[str, Any]:
    """Start a server, measure it, stop it."""
    settings = settings_of(options, tier=tier)
    with tempfile.TemporaryDirectory(prefix="phalanx-kv-tier-") as folder:
        port, log = free_port(), Path(folder) / "log"
        if options.log is not None:
            log = options.log if tier else options.log.with_suffix(".without.log")
        command = phalanx("serve", options.config, [f"serve.port={port}", *settings])
        model = load_config(options.config, settings).serve.model_name
        assert model is not None
        try:
            server = ServerProcess(command, port, model, log, options.start_timeout_s)
            print(f"first answer after {server.start_s:.1f} s", file=sys.stderr, flush=True)
            try:
                return {"settings": settings, **asyncio.run(measure(server, options, model))}
            finally:
                server.stop()
        except BaseException:
            print(log.read_text(errors="replace")[-6000:], file=sys.stderr)
            raise


def compare(on: dict[str, Any], off: dict[str, Any], link: float) -> dict[str, Any]:
    """Return the figures of the tier over those without it, and remove the answers."""
    parts = [part for part in PARTS if part in on]
    answers = {part: (on[part].pop("answers"), off[part].pop("answers")) for part in parts}
    found: dict[str, Any] = {
        "equal_answers": {
            part: f"{sum(a == b for a, b in zip(*pair, strict=True))} of {len(pair[0])}"
            for part, pair in answers.items()
        }
    }
    if "sessions" in on:
        own, without = on["sessions"], off["sessions"]
        loaded, seconds = (
            own["counters"].get(f"{name}_total load", 0)
            for name in ("kv_moved_bytes", "kv_copy_seconds")
        )
        found |= {
            "output_tok_s": own["output_tok_s"] / without["output_tok_s"],
            "first_token_p50": without["first_token_p50_s"] / own["first_token_p50_s"],
            "restore_bytes_s": loaded / seconds if seconds else None,
            "restore_share_of_link": loaded / seconds / link if seconds else None,
        }
    if "random" in on:
        found["random_total_tok_s"] = on["random"]["total_tok_s"] / off["random"]["total_tok_s"]
    if "kill" in on:
        for name in ("killed_rank", "killed_rank_behind_rebuild"):
            pauses = [it["kill"][name]["pause_p50_s"] for it in (off, on)]
            found[f"{name}_pause_p50"] = pauses[0] / pauses[1]
    return {
        key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gpu-bench.yaml")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a session's first turn")
    parser.add_argument("--growth", type=int, default=128, help="tokens that each turn adds")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=16, help="sessions in flight")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=32, help="random prompts")
    parser.add_argument("--kill-sessions", type=int, default=32)
    parser.add_argument("--kill-tokens", type=int, default=4000)
    parser.add_argument("--kill-output-len", type=int, default=512)
    parser.add_argument("--kills", type=int, default=2, help="failures, one after another")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--host-gib", type=float, default=128.0)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, help="in place of a quarter of the sessions' KV")
    parser.add_argument("--set", action="append", default=[], help="setting of both servers")
    parser.add_argument("--start-timeout-s", type=float, default=600.0)
    parser.add_argument("--log", type=Path, help="keep the servers' output here")
    results.add_options(parser, "kv-tier")
    options = parser.parse_args()
    if options.redraw:
        results.write(options.out, results.load(options.out), page)
        return
    cuda_environment.prepare(os.environ)
    num_gpus = min(len(machine.hardware()["gpus"]), options.ranks)
    report: dict[str, Any] = {
        "method": __doc__,
        **results.origin(num_gpus, options.commit, served=True),
        "options": {key: str(value) for key, value in vars(options).items()},
    }
    measured = subprocess.run([sys.executable, "-c", LINK], capture_output=True, check=True)
    report["link_bytes_s"] = link = float(measured.stdout)
    report["servers"] = servers = {}
    for name, tier in (("host tier", True), ("without", False)):
        servers[name] = serve(options, tier=tier)
        results.save(options.out, report)
    report["ratios"] = compare(servers["host tier"], servers["without"], link)
    results.save(options.out, report)
    results.write(options.out, report, page)
    print(json.dumps(report["ratios"], indent=1))


if __name__ == "__main__":
    main()
