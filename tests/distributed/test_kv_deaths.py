"""Whole engines over a store of KV that loses ranks and keepers and gets damaged rows and files: no token differs."""

import itertools
import os
import pickle
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed.engine_harness import Event, RankResult, make_request, run_rank
from tests.distributed.rank_pool import RankFailure, RankPool
from tests.distributed.test_kv_tiers import MAX_LEN, SHORT, configure, metric, total
from tests.distributed.test_random_traffic import compare_with_alone
from tests.family_cases import family_checkpoint
from tests.kv_tier_case import kill_process
from workers.config import RankConfig
from workers.kv_cache import transfers
from workers.kv_transfer import host_tier
from workers.kv_transfer.host_index import Place
from workers.kv_transfer.keeper import KeeperConfig
from workers.kv_transfer.keeper_client import KeeperClient
from workers.kv_transfer.row_copies import CpuCopies, RowPlace
from workers.rank.process_group import local_rendezvous

# What happens before a part (rows, files, bytes, kill: of the keeper) or within it (load, save, keeper), in order.
QUICK = [("save",), ("rows", "files"), ("kill", "bytes", "load")]
LONG = [
    *((), ("rows",), ("files", "load"), ("bytes",), ("kill",), ("save",), ("keeper",), ()),
    *(("rows", "files"), ("kill", "save"), ("rows",), ("bytes", "load"), ("files", "save")),
]
EARLY = (1, 2, 3)
# Of one or two sessions: most of what returns comes from files.
MEMORY_GIB = dict.fromkeys(SHORT, 0.0002) | {"qwen3_moe": 0.0006}
DISK_GIB = 0.008
NUM_FILES = 40  # that the first part writes at least
NUM_LATEST = 2  # sessions that return at the begin of a part
SPOILT = 128  # bytes; a single one may change no token


@dataclass(frozen=True)
class Death:
    """What ends in the middle of a part, by the thread of rank `rank` that moves rows.

    what     "load", "save" = the rank, with some rows moved; "keeper" = the keeper, when it is to give room
    number   of the loads, the saves or the requests for room, from 1
    """

    what: str
    rank: int
    number: int

    def begin(self) -> AbstractContextManager[object]:
        """Let it happen in this process."""
        calls = itertools.count(1)
        if self.what == "keeper":
            reserve = KeeperClient.reserve

            def reserve_of_none(client: KeeperClient, places: list[Any]) -> Any:
                if next(calls) == self.number:
                    kill_process(client.keeper[0])
                return reserve(client, places)

            return patch.object(KeeperClient, "reserve", reserve_of_none)
        copy = getattr(CpuCopies, self.what)

        def copy_some(copies: CpuCopies, contents: Any, rows: list[RowPlace]) -> Any:
            if not rows or next(calls) < self.number:
                return copy(copies, contents, rows)
            half = len(rows) // 2
            copy(copies, contents, rows[:half])
            if self.what == "save":
                copies._units[rows[half].units] = 99
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("a killed process goes on")

        return patch.object(CpuCopies, self.what, copy_some)


def live_and_die(
    rank: int, num_ranks: int, info: Any, note: Path, death: Death | None, *arguments: Any
) -> RankResult:
    """A rank that leaves as a killed one does, without a word to the keeper; `note` gets the keeper's configuration."""
    connect = KeeperClient.__init__

    def connect_and_note(client: KeeperClient, config: KeeperConfig) -> None:
        connect(client, config)
        if not note.exists():
            note.write_bytes(pickle.dumps(config))

    dying = death.begin() if death is not None and death.rank == rank else nullcontext()
    with (
        patch.object(KeeperClient, "__init__", connect_and_note),
        patch.object(KeeperClient, "leave", lambda self: None),
        patch.object(transfers, "BATCH_S", 0.0),  # what is filled is saved, however quick a part is
        patch.object(host_tier, "RETRY_S", 0.1),
        patch.object(host_tier, "COUNTS_S", 0.1),
        dying,
    ):
        return run_rank(rank, num_ranks, info, *arguments)


class Store:
    """The store of a node that outlives its ranks, and what is done to it.

    harms    by name, between two parts
    deaths   of ranks in the middle of a load or a save, and of keepers between two parts, by name
    """

    def __init__(self, pool: RankPool, folder: Path):
        self.disk, self.deaths = folder / "disk", Counter[str]()
        self.harms = {
            "rows": self._damage_rows,
            "files": self._damage_files,
            "bytes": self._change_files,
            "kill": self._kill,
        }
        self._pool, self._note, self._name = pool, folder / "keeper", os.urandom(8).hex()
        self._counts: dict[tuple[int, int], dict[str, float]] = {}  # of each keeper

    def serve(
        self, config: RankConfig, events: list[Event], death: Death | None = None
    ) -> list[RankResult]:
        """Serve all events by new ranks over what earlier ranks have left; after the death of a rank once more."""
        with local_rendezvous() as rendezvous:
            arguments = config, replace(rendezvous, store=self._name), events, False, 20_000
            found = self._pool.outcomes(
                *(live_and_die, config.num_ranks, self._note, death, *arguments),
                with_group=False,
                timeout_s=300,
            )
        self.look()
        if death is not None and "died, exit code -9" in str(found[death.rank]):
            self.deaths[death.what] += 1
            self._take_all_units()
            return self.serve(config, events)
        failures = [str(it) for it in found if isinstance(it, RankFailure)]
        assert not failures, "\n".join(failures)
        return found

    def look(self) -> None:
        """Keep the counters of the keeper, once it has written its files: what is killed next loses none."""
        deadline = time.monotonic() + 60
        with self._keeper() as keeper:
            while (counts := keeper.counts()).get("disk_queued_bytes", 0):
                assert time.monotonic() < deadline, "the keeper does not write"
                time.sleep(1e-3)
            self._counts[keeper.keeper] = counts

    def count(self, name: str) -> float:
        """Return a counter of all keepers together, as they were when this store has looked."""
        return sum(counts.get(name, 0) for counts in self._counts.values())

    def gauges(self) -> dict[str, float]:
        """Return the counters as statistics of a rank."""
        names = {name for counts in self._counts.values() for name in counts}
        return {f"kv_host_{name}": self.count(name) for name in names}

    def close(self) -> None:
        """End the keeper, which else waits for ranks."""
        with self._keeper() as keeper:
            keeper.leave()

    def _take_all_units(self) -> None:
        """Reserve the whole memory: what a dead rank has read or filled is free for others."""
        with self._keeper() as keeper:
            num_units = int(keeper.counts()["bytes"]) // self._config.row_bytes
            (units,) = keeper.reserve([Place(os.urandom(32), b"", b"", 0, num_units)])
            assert units is not None, "a dead rank holds units"

    @property
    def _config(self) -> KeeperConfig:
        config: KeeperConfig = pickle.loads(self._note.read_bytes())
        return config

    @contextmanager
    def _keeper(self) -> Iterator[KeeperClient]:
        """A connection to the keeper that the ranks have left."""
        client = KeeperClient(self._config)
        try:
            yield client
        finally:
            client.close()

    def _damage_rows(self, chance: random.Random) -> None:
        """Change a part of each row in memory."""
        unit = self._config.row_bytes
        with self._keeper() as keeper:
            assert keeper.counts()["used_bytes"] > 0, "this keeper has nothing"
            for start in range(0, len(keeper.memory) - unit + 1, unit):
                at = start + chance.randrange(unit - SPOILT)
                keeper.memory[at : at + SPOILT] = chance.randbytes(SPOILT)

    def _damage_files(self, chance: random.Random) -> None:
        """Delete some files, and cut the ends of others off."""
        for path, size in self._files():
            what = chance.choice(["keep", "delete", "delete", "cut", "cut"])
            if what == "delete":
                path.unlink(missing_ok=True)
            elif what == "cut":
                with suppress(FileNotFoundError):
                    os.truncate(path, size // 2)

    def _change_files(self, chance: random.Random) -> None:
        """Change a part of some files."""
        for path, size in self._files():
            at = size - chance.randrange(SPOILT, 2 * SPOILT)
            if chance.random() < 0.5 and at > 0:
                with suppress(FileNotFoundError), path.open("r+b") as file:
                    file.seek(at)
                    file.write(chance.randbytes(SPOILT))

    def _files(self) -> list[tuple[Path, int]]:
        """Return files and their sizes. The keeper may still write, and delete files for it."""
        deadline, found = time.monotonic() + 60, list[tuple[Path, int]]()
        while len(found) < NUM_FILES:
            assert time.monotonic() < deadline, "the keeper does not write"
            found = []
            for path in sorted(self.disk.glob("phalanx-kv/*.kv")):
                with suppress(FileNotFoundError):
                    found.append((path, path.stat().st_size))
            time.sleep(1e-3)
        return found

    def _kill(self, chance: random.Random) -> None:
        """Kill the keeper, with contents."""
        with self._keeper() as keeper:
            assert keeper.counts()["used_bytes"] > 0, "this keeper has nothing"
            kill_process(keeper.keeper[0])
        self.deaths["kill"] += 1


def random_part(
    chance: random.Random,
    texts: list[list[int]],
    part: int,
    num_steps: int,
    num_ranks: int,
    before: list[Event],
) -> list[Event]:
    """Sessions that return, go on or part from each other anywhere, and aborts.

    before   of the earlier parts; the last sessions of them return first, because the memory holds these alone
    """
    events, step = [], 0
    latest = [event.request for event in before if event.request is not None][-NUM_LATEST:]
    for index, request in enumerate(latest):
        again = make_request(f"{part}-latest-{index}", [*request.prompt_token_ids, 1], max_tokens=1)
        events.append(Event(0, chance.randrange(num_ranks), again))
    while step < num_steps:
        name, text = f"{part}-{len(events)}", chance.choice(texts)
        if len(text) > MAX_LEN - 60 or chance.random() < 0.1:
            text[:] = chance.choice(texts)[: chance.choice([0, 24, 100])]
        text += [chance.randrange(200) for _ in range(chance.choice([1, 20, 50]))]
        request = make_request(name, list(text), max_tokens=chance.randint(1, 10))
        rank = chance.randrange(num_ranks)
        events.append(Event(step, rank, request))
        if chance.random() < 0.15:
            events.append(Event(step + chance.randint(0, 8), rank, abort=name))
        step += chance.choice([0, 1, 4, 12])
    return sorted(events, key=lambda event: event.step)


@pytest.mark.parametrize(
    ("family", "parts", "most_ranks", "num_steps"),
    [
        pytest.param("qwen3_next", QUICK, 1, 40, id="quick"),
        *(
            pytest.param(
                *(family, LONG, 4, 250),
                marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)],
                id=family,
            )
            for family in SHORT
        ),
    ],
)
def test_random_steps_with_deaths(rank_pool, tmp_path, family, parts, most_ranks, num_steps):
    """Ranks and keepers die in the middle of their work, and what they have left is damaged: no token differs."""
    chance = random.Random(f"{family} {num_steps}")
    checkpoint = family_checkpoint(tmp_path, family, "untied")
    store = Store(rank_pool, tmp_path)
    texts = [[chance.randrange(200) for _ in range(100)] for _ in range(6)]
    events, results, seen = list[Event](), list[RankResult](), Counter[str]()
    num_blocks = 64 if family == "gpt_oss" else 40  # windows have blocks of their own
    tiers = {"host_memory_gib": MEMORY_GIB[family], "disk_path": str(store.disk)}
    for number, harms in enumerate(parts):
        num_ranks, death = chance.randint(1, most_ranks), None
        config = configure(checkpoint, num_ranks, num_blocks=num_blocks, disk_gib=DISK_GIB, **tiers)
        for harm in harms:
            if harm in store.harms:
                store.harms[harm](chance)
            else:  # a harm within the part
                death = Death(harm, chance.randrange(num_ranks), chance.choice(EARLY))
        part_events = random_part(chance, texts, number, num_steps, num_ranks, events)
        before = store.count("damaged")
        results += store.serve(config, part_events, death)
        events += part_events
        for harm in {"rows", "bytes"}.intersection(harms):  # one of them at most
            seen[harm] += store.count("damaged") - before
    store.close()
    seen |= store.deaths
    seen["keeper"] = total(results, "kv_host_lost")
    seen["files"] = min(store.count("disk_missing"), store.count("disk_damaged"))
    missing = [harm for harms in parts for harm in harms if not seen[harm]]
    assert not missing, f"the run proves nothing about {missing}: {seen}"
    assert total(results, "kv_restored_host") > 0 and total(results, "kv_restored_disk") > 0
    in_files = metric([RankResult(gauges=store.gauges())], "kv_disk_bytes")
    assert in_files["load"] > 0 and in_files["save"] > 0
    alone = configure(checkpoint, 1, prefix_caching=False, num_blocks=num_blocks)
    alone = alone.model_copy(
        update={"scheduler": alone.scheduler.model_copy(update={"max_num_seqs": 1})}
    )
    compare_with_alone(rank_pool, alone, events, results)
