"""Fails ranks of a server under load, and compares every stream with that of an undisturbed run.

A fixed set of requests is answered five times by the undisturbed server. A request with two different answers is
dropped: the batch, or a cached prefix, decides by rounding errors between two tokens or two experts. Then `--streams`
clients repeat the other requests while failures follow each other, a few seconds apart. A stream fails by an error, a
missing or a doubled token, or a wrong usage. An answer that differs counts as rounding if the undisturbed server also
gives it when noise of the size of rounding errors is added to all hidden states. The pause of a failure is the time
until every stream that was open has its next item. Memory, files, threads and segments after the last rebuild are
compared with those after the first, when each has answered all requests: pools start their threads with the first work.
Run it as scripts/chaos.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Coroutine
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from scripts.bench import ROOT, soak
from scripts.bench.chaos_faults import (
    BREAKS_CONNECTIONS,
    FAULTS,
    OF_ROOT,
    OWN_FILE_SYSTEMS,
    TWO_RANKS,
    Failure,
    cause,
)
from scripts.bench.chaos_judge import answers, control, judge
from scripts.bench.chaos_pauses import pauses
from scripts.bench.chaos_ray_faults import MODEL_FOLDER
from scripts.bench.chaos_resources import growth, measure
from scripts.bench.chaos_scarcity import DISK, own_file_systems
from scripts.bench.chaos_streams import (
    MODEL,
    Answer,
    Found,
    Request,
    reference,
    repeat,
    requests_of,
)
from scripts.bench.chaos_victim import OPERATOR_KEY, Victim
from scripts.bench.results import add_options, origin, save, write
from scripts.bench.servers import ServerProcess, free_port, phalanx
from scripts.bench.soak import GROW_MB
from scripts.bench.soak_curve import ALL_ROLES, page

CONFIG = ROOT / "configs" / "local.yaml"
HOOKS = ROOT / "scripts" / "bench" / "fault_hooks"
DEMO = ROOT / "cluster" / "share" / "models" / "demo"
SETTLE_S = 3.0
SETTINGS = ["cluster.rebuild_attempts=20", "model.max_model_len=1024", "cache.num_blocks=4096"]
SOAK = {
    "streams": 24,
    "requests": 54,
    "faults": list(FAULTS),
    "every_s": 60.0,
    "timeout_s": 60.0,
    "out": ROOT / "docs" / "results" / "chaos-cpu-soak",
}
"""Defaults of --soak."""


async def disturb(
    options: argparse.Namespace, server: ServerProcess, folder: Path
) -> dict[str, Any]:
    """Answer all requests undisturbed, then under failures. Returns the results."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=options.timeout_s, limits=limits
    ) as client:
        victim = Victim(server.pid, folder / "log", client, folder, options.ranks)
        asked = requests_of(MODEL, options.requests)
        requests, expected = await reference(client, asked)
        print(f"{len(requests)} of {len(asked)} requests have one answer", file=sys.stderr)
        await cause(victim, ["kill"], 0.0, options.seed)
        await answers(client, requests, "after the first failure")
        await asyncio.sleep(SETTLE_S)
        before = measure(server.pid, options.app_name)
        causes = partial(cause, victim, schedule(options), options.every_s, options.seed)
        found, failures = await streams_under(
            client, requests, expected, causes, options.streams, options.faults
        )
        await asyncio.sleep(SETTLE_S)
        after = measure(server.pid, options.app_name)
        rounding = await judge(victim, client, requests, found)
        noise = await control(victim, client, requests, expected)
    return {
        "different_requests": len(requests),
        "requests_without_one_answer": len(asked) - len(requests),
        "answered": dict(found.done),
        "failed": found.failed,
        "rounding": [str(difference) for difference in rounding],
        "noise_without_failures": asdict(noise),
        "connections_ended_with_their_ingress": found.broken,
        "failures": pauses(failures, found),
        "resources": {"after_first": before, "after_last": after, "grew": growth(before, after)},
    }


async def streams_under(
    client: httpx.AsyncClient,
    requests: list[Request],
    expected: list[Answer],
    causes: Callable[[], Coroutine[Any, Any, list[Failure]]],
    num_streams: int,
    kinds: Collection[str],
) -> tuple[Found, list[Failure]]:
    """Keep `num_streams` requests open until `causes` has caused its failures, which are of these kinds."""
    found, ended = Found(), asyncio.Event()
    may_break = not BREAKS_CONNECTIONS.isdisjoint(kinds)
    async with asyncio.TaskGroup() as tasks:
        for number in range(num_streams):
            turns = range(number, 1_000_000, num_streams)
            tasks.create_task(
                repeat(client, requests, expected, found, turns, ended, may_break=may_break)
            )
        failures = await causes()
        ended.set()
    return found, failures


def schedule(options: argparse.Namespace) -> list[str]:
    """The kinds of failures: of each kind equally many, in random order."""
    kinds = [options.faults[number % len(options.faults)] for number in range(options.failures)]
    random.Random(options.seed).shuffle(kinds)
    return kinds


def fault_list(text: str) -> list[str]:
    """The kinds of `--faults`."""
    names = list(FAULTS) if text == "all" else text.split(",")
    known = FAULTS | OF_ROOT
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    if os.geteuid() and (denied := [name for name in names if name in OF_ROOT]):
        raise argparse.ArgumentTypeError(f"{denied[0]!r} needs root")
    return names


def prepared(kinds: list[str], folder: Path) -> list[str]:
    """Make what these kinds need in `folder`; return the settings by which the server uses it."""
    found = []
    if "checkpoint" in kinds:
        shutil.copytree(DEMO, folder / MODEL_FOLDER)
        found += [f"model.path={folder / MODEL_FOLDER}", f"serve.model_name={MODEL}"]
    if OWN_FILE_SYSTEMS & set(kinds):
        found += [f"kernels.cache={folder / DISK / 'kernels'}"]
    return found


def duration(text: str) -> float:
    """The hours of `--soak`."""
    if not (hours := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{hours:g} hours are no time")
    return hours


def bound(text: str) -> tuple[str, float]:
    """The role and the MB of `--grow-mb`."""
    role, _, limit = text.partition("=")
    if role not in ALL_ROLES:
        raise argparse.ArgumentTypeError(f"{role!r} is none of {', '.join(ALL_ROLES)}")
    return role, float(limit)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; --soak has other defaults."""
    kinds = "; ".join(
        f"{name}: {(fault.__doc__ or '').rstrip('.')}" for name, fault in (FAULTS | OF_ROOT).items()
    )
    shown = ", ".join(
        f"{name} {SOAK[name]}" for name in ("streams", "requests", "every_s", "timeout_s")
    )
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"With --soak: {soak.__doc__} Its defaults: all failures, {shown}. Failures: {kinds}.",
    )
    parser.add_argument("--soak", type=duration, metavar="HOURS", help="mixed traffic for so long")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--streams", type=int, default=200, help="in flight at once")
    parser.add_argument("--requests", type=int, default=72, help="different requests")
    parser.add_argument("--failures", type=int, default=50, help="not of --soak")
    parser.add_argument(
        "--faults",
        type=fault_list,
        default=["kill"],
        help="kinds, by commas; or all, without those of root",
    )
    parser.add_argument("--every-s", type=float, default=5.0, help="between failures, on average")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=300.0,
        help="of a request; of --soak: longest time without an item",
    )
    parser.add_argument(
        "--grow-mb",
        type=bound,
        action="append",
        default=[],
        metavar="ROLE=MB",
        help=f"bound of --soak for the memory of a role: {GROW_MB}",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="setting of the server")
    add_options(parser, "chaos", drawn=False)
    if parser.parse_known_args(arguments)[0].soak is not None:
        parser.set_defaults(**SOAK)
    options = parser.parse_args(arguments)
    options.grow_mb = GROW_MB | dict(options.grow_mb)
    if options.ranks < 2:
        options.faults = [kind for kind in options.faults if kind not in TWO_RANKS]
    return options


def main() -> None:
    """Command line. Exit code 1 when a stream failed, a resource grew, or a bound was broken."""
    options = parse()
    measured = disturb if options.soak is None else soak.soak
    port = free_port()
    settings = [f"cluster.ranks={options.ranks}", *SETTINGS]
    if "ubatch" in options.faults:  # on CPU, and with shm, no step is cut by itself
        settings += ["overlap.mode=on"]
    if "two-ingresses" in options.faults:
        settings += ["serve.replicas=2"]
    options.app_name = f"chaos-{port}"
    own = [f"serve.port={port}", f"serve.app_name={options.app_name}"]
    with tempfile.TemporaryDirectory(prefix="phalanx-chaos-") as name:
        folder = Path(name)
        settings += prepared(options.faults, folder)
        command = phalanx("serve", CONFIG, [*own, *settings, *options.set])
        if OWN_FILE_SYSTEMS & set(options.faults):
            command = own_file_systems(command, folder)
            os.environ["RAY_TMPDIR"] = str(folder / DISK)
        os.environ["PHALANX_FAULTS"] = name
        os.environ["PHALANX_OPERATOR_KEY"] = OPERATOR_KEY
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(HOOKS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        server = ServerProcess(command, port, MODEL, folder / "log")
        try:
            found = asyncio.run(measured(options, server, folder))
        except BaseException:
            print((folder / "log").read_text()[-8000:], file=sys.stderr)
            raise
        finally:
            server.stop()
    results = {
        "method": soak.__doc__ if options.soak else __doc__,
        **origin(0, options.commit, served=True),
        "ranks": options.ranks,
        "streams": options.streams,
        "seconds_between": options.every_s,
        "settings": settings + options.set,
        **found,
    }
    save(options.out, results)
    if options.soak:
        write(options.out, results, page)
    shown = ("answered", "failed", "rounding", "noise_without_failures", "failures", "resources")
    print(json.dumps({key: results[key] for key in shown}, indent=1))
    sys.exit(1 if found["failed"] or found["resources"]["grew"] else 0)


if __name__ == "__main__":
    main()
