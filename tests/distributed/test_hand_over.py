"""A prompt computed by one engine and continued by another one: the same tokens, and little computed twice."""

import os
import random
import select
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.adapter_case import chosen, make_adapter, merge, weight_shapes
from tests.distributed.engine_harness import make_request, rank_config
from tests.family_cases import SAME_MODEL, VARIANTS, family_checkpoint
from tests.kv_tier_case import kill_process
from workers.engine import hand_overs
from workers.kv_transfer.keeper_client import KeeperClient
from workers.lora_config import LoadedAdapter
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.wire.request import EngineRequest, RequestOutput

BLOCK, PROMPT, NEW = 8, 203, 12
FAMILIES = [family for family in VARIANTS if family not in SAME_MODEL]
FAST = ("qwen3_moe", "gpt_oss", "qwen3_next")
FAMILY_CASES = [
    family if family in FAST else pytest.param(family, marks=pytest.mark.exhaustive)
    for family in FAMILIES
]
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end waits for its KV, however slow the machine is: the tests see what the other engine finds."""
    monkeypatch.setattr(hand_overs, "HOLD_S", WAIT_S)


class Side:
    """An engine of one rank, which is stepped here."""

    def __init__(self, epoch: Epoch):
        self.epoch = epoch
        self.outputs: list[RequestOutput] = []
        epoch.start_engine(lambda _, outputs: self.outputs.extend(outputs), lambda step: None)

    def run(self, request: EngineRequest) -> list[RequestOutput]:
        """The outputs of a request until its end."""
        self.outputs.clear()
        self.epoch.engine.submit(request)
        deadline = time.monotonic() + WAIT_S
        while not any(output.finish_reason for output in self.outputs):
            assert time.monotonic() < deadline, self.outputs
            if self.epoch.engine.step().sleeps:
                time.sleep(0.001)  # the threads that copy KV need Python's lock
                self.epoch.engine._must_vote()  # what a sleeping loop does when it is woken
        return [output for output in self.outputs if not output.begins]

    def gauge(self, name: str) -> float:
        return self.epoch.engine.scheduler.cache.gauges().get(name, 0)


@contextmanager
def sides(
    checkpoint: Path,
    count: int,
    *,
    apart: bool = False,
    adapters: tuple[Path, ...] = (),
    **cache: object,
) -> Iterator[list[Side]]:
    """Engines of one rank each, which share the memory of their node if there is some. `apart`: each has its own.

    The ids of `adapters` are 1, 2 ..., as those of the adapters in the YAML of a server.
    """
    config = rank_config(
        checkpoint,
        1,
        model={"max_model_len": 320},
        cache={"block_size": BLOCK, **cache},
        lora={"max_loras": len(adapters)},
    )
    loaded = [LoadedAdapter(id=n, name=f"a{n}", path=str(it)) for n, it in enumerate(adapters, 1)]
    config = config.model_copy(update={"adapters": tuple(loaded)})
    with ExitStack() as stack:
        made = []
        for number in range(count):
            process = RankProcess(0, config)
            stack.callback(process.close)
            name = f"{checkpoint}-{number}"
            store = name if apart else str(checkpoint)
            epoch = Epoch(process, Rendezvous("127.0.0.1", 0, name, store=store), 30)
            epoch.load()
            made.append(Side(epoch))
            assert process.kv_places.wait_ready(WAIT_S)
        yield made


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("hand-over"), "qwen3_moe", "untied")


PROMPT_IDS = [(7 * number * number + 3) % 200 for number in range(PROMPT)]


def first_part(name: str = "x", adapter: int = 0) -> EngineRequest:
    request = make_request(name, PROMPT_IDS, max_tokens=1)
    return replace(request, hands_over=True, adapter=adapter)


def rest_behind(tokens: list[int], name: str = "x~2", adapter: int = 0) -> EngineRequest:
    request = make_request(name, PROMPT_IDS, max_tokens=NEW)
    return replace(request, emitted_token_ids=tokens, adapter=adapter)


@dataclass(frozen=True)
class Adapted:
    """Two adapters that change K and V; `expected`: the tokens of model and adapters, by the merged models."""

    checkpoint: Path
    folders: tuple[Path, Path]
    expected: tuple[list[int], ...]

    @classmethod
    def make(cls, folder: Path) -> "Adapted":
        checkpoint = family_checkpoint(folder, "qwen3_moe", "untied")
        modules = chosen(weight_shapes(checkpoint), ("k_proj", "v_proj"))
        one, two = (make_adapter(folder / f"a{n}", modules, seed=n, alpha=24) for n in (1, 2))
        merged = [merge(checkpoint, it, folder / f"merged-{it.name}") for it in (one, two)]
        expected = []
        for path in (checkpoint, *merged):
            with sides(path, 1) as (alone,):
                whole = make_request("whole", PROMPT_IDS, max_tokens=NEW)
                expected.append(ids_of(alone.run(whole)))
        assert len({tuple(tokens) for tokens in expected}) == 3
        return cls(checkpoint, (one, two), tuple(expected))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted.make(tmp_path_factory.mktemp("adapted"))


def ids_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_another_engine_goes_on_behind_the_prompt(tmp_path: Path, family: str) -> None:
    checkpoint = family_checkpoint(tmp_path, family, "untied")
    sampled = {"temperature": 0.8, "seed": 5}
    with sides(checkpoint, 1) as (alone,):
        expected = ids_of(alone.run(make_request("whole", PROMPT_IDS, max_tokens=NEW, **sampled)))
    with sides(checkpoint, 2, host_memory_gib=0.02) as (first, second):
        part = make_request("x", PROMPT_IDS, max_tokens=1, **sampled)
        token, end = first.run(replace(part, hands_over=True))
        assert (token.token_ids, token.finish_reason) == (expected[:1], None)
        assert (end.token_ids, end.finish_reason) == ([], "length") and end.times is not None
        rest = make_request("x~2", PROMPT_IDS, max_tokens=NEW, **sampled)
        found = second.run(replace(rest, emitted_token_ids=token.token_ids))
        assert token.token_ids + ids_of(found) == expected
        assert second.gauge("kv_restored_host") >= PROMPT // BLOCK * BLOCK - 64
        assert not first.epoch.engine.open_requests.ids_of_ingress("test")


def test_the_other_engine_goes_on_with_the_kv_of_the_adapter(adapted: Adapted) -> None:
    """One prompt with each adapter and without: each finds its own KV in the memory of the node, and no other."""
    memory = {"adapters": adapted.folders, "host_memory_gib": 0.02}
    with sides(adapted.checkpoint, 2, **memory) as (first, second):
        for adapter in (1, 0, 2):
            name, before = f"x{adapter}", second.gauge("kv_restored_host")
            tokens = ids_of(first.run(first_part(name, adapter)))
            rest = rest_behind(tokens, f"{name}~2", adapter)
            assert tokens + ids_of(second.run(rest)) == adapted.expected[adapter]
            assert second.gauge("kv_restored_host") >= before + PROMPT // BLOCK * BLOCK - 64


def test_files_outlive_a_server_without_the_kv_of_its_adapters(
    adapted: Adapted, tmp_path: Path
) -> None:
    """The next server gives the ids to other adapters."""
    memory = {"host_memory_gib": 0.02, "disk_path": str(tmp_path), "disk_gib": 0.02}
    whole = make_request("x", PROMPT_IDS, max_tokens=NEW)
    plain, *of_adapters = adapted.expected
    for number, expected in enumerate(of_adapters):
        folder = adapted.folders[number]
        with sides(adapted.checkpoint, 1, adapters=(folder,), **memory) as (side,):
            assert ids_of(side.run(replace(whole, adapter=1))) == expected
            assert not side.gauge("kv_restored_disk")
            assert ids_of(side.run(whole)) == plain
            assert bool(side.gauge("kv_restored_disk")) == (number > 0), "files have the model's KV"
            end_of_transfers(side)
            keeper = os.pidfd_open(keeper_pid(side))
        assert select.select([keeper], [], [], WAIT_S)[0], "it writes what waits, and ends"
        os.close(keeper)


def test_without_host_memory_an_end_waits_for_nothing(checkpoint: Path) -> None:
    with sides(checkpoint, 1) as (alone,):
        (output,) = alone.run(first_part())
        assert output.finish_reason == "length" and len(output.token_ids) == 1
        assert not alone.epoch.engine.open_requests.ids_of_ingress("test")


def test_every_loss_between_both_sides_costs_time_alone(checkpoint: Path) -> None:
    """The prefill side ends, or the keeper, or nothing was handed over: the same tokens."""
    with sides(checkpoint, 1) as (alone,):
        expected = ids_of(alone.run(make_request("whole", PROMPT_IDS, max_tokens=NEW)))
    with sides(checkpoint, 2, host_memory_gib=0.02) as (first, second):
        tokens = ids_of(first.run(first_part()))
        first.epoch.process.close()  # the prefill group ends between the two parts
        assert tokens + ids_of(second.run(rest_behind(tokens))) == expected
        assert second.gauge("kv_restored_host") > 0
    with sides(checkpoint, 2, host_memory_gib=0.02) as (first, second):
        tokens = ids_of(first.run(first_part()))
        kill_keeper(second)
        assert tokens + ids_of(second.run(rest_behind(tokens))) == expected
        again = ids_of(first.run(first_part("y")))
        assert again == tokens, "without a keeper an end is not held back for ever"


def test_an_abort_in_the_middle_of_a_hand_over_leaves_nothing(checkpoint: Path) -> None:
    with sides(checkpoint, 1, host_memory_gib=0.02) as (side,):
        engine = side.epoch.engine
        engine.submit(first_part())
        while not any(output.token_ids for output in side.outputs):
            engine.step()
        assert not any(output.finish_reason for output in side.outputs)
        engine.abort("x")
        engine.step()
        end_of_transfers(side)
        assert not any(output.finish_reason for output in side.outputs)
        assert not engine.open_requests.ids_of_ingress("test")
        engine.scheduler.check_integrity()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_random_prompts_aborts_and_losses(checkpoint: Path, seed: int) -> None:
    """Tiny caches and a tiny store: each answer is that of an engine alone, and nothing is held at the end."""
    chance = random.Random(seed)
    stems = [[chance.randrange(200) for _ in range(150)] for _ in range(4)]
    prompts = [
        [*chance.choice(stems)[: chance.randrange(20, 150)], chance.randrange(200)]
        for _ in range(40)
    ]
    with sides(checkpoint, 1) as (alone,):
        expected = [ids_of(alone.run(whole_of(number, ids))) for number, ids in enumerate(prompts)]
    with sides(checkpoint, 2, num_blocks=45, host_memory_gib=0.002) as (first, second):
        for number, ids in enumerate(prompts):
            part = replace(make_request(f"p{number}", ids, max_tokens=1), hands_over=True)
            if chance.random() < 0.2:
                abort_somewhere(first, replace(part, request_id=f"a{number}"), chance)
            loss = chance.random() if number >= len(prompts) // 2 else 1.0
            if loss < 0.1:
                kill_keeper(second)
            tokens = ids_of(first.run(part))
            if 0.1 <= loss < 0.2:
                kill_keeper(second)
            rest = replace(whole_of(number, ids), emitted_token_ids=tokens)
            if chance.random() < 0.2:
                abort_somewhere(second, replace(rest, request_id=f"b{number}"), chance)
            assert tokens + ids_of(second.run(rest)) == expected[number], number
        assert second.gauge("kv_restored_host") > 0
        for side in (first, second):
            scheduler = side.epoch.engine.scheduler
            deadline = time.monotonic() + WAIT_S
            while scheduler.cache.transfers.num_open:
                assert time.monotonic() < deadline
                side.epoch.engine._must_vote()
            assert not side.epoch.engine.open_requests.ids_of_ingress("test")
            scheduler.check_integrity()
            assert scheduler.cache.gauges()["kv_cache_usage"] == 0


def whole_of(number: int, ids: list[int]) -> EngineRequest:
    return make_request(f"r{number}", ids, max_tokens=6)


def abort_somewhere(side: Side, request: EngineRequest, chance: random.Random) -> None:
    """Abort a request after some steps, before, in or behind its hand-over."""
    engine = side.epoch.engine
    engine.submit(request)
    for _ in range(chance.randrange(6)):
        engine.step()
    engine.abort(request.request_id)
    engine.step()


def end_of_transfers(side: Side) -> None:
    """Let a sleeping loop enter the transfers until all have ended."""
    engine, deadline = side.epoch.engine, time.monotonic() + WAIT_S
    while engine.scheduler.cache.names_on_way:
        assert time.monotonic() < deadline
        engine._must_vote()
    engine._must_vote()


def keeper_pid(side: Side) -> int:
    """The process that keeps the memory of the node."""
    tier = side.epoch.process.kv_places._host
    assert tier is not None
    client = KeeperClient(tier._config)
    try:
        return int(client._ask("attach")["pid"])
    finally:
        client.close()


def kill_keeper(side: Side) -> None:
    kill_process(keeper_pid(side))
