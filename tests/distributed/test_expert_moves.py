"""Engines that move experts while they serve: tokens, log-probabilities and weights are those of experts that stay.

The test plans the moves and hands them to the ranks; a step of every rank may then commit a layer.
"""

import os
import random
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kernels.routing.expert_map import ExpertMap
from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import Event, make_request, rank_config, run_engines
from tests.distributed.test_expert_placement import LAYERS, SIZES
from tests.family_cases import family_checkpoint
from workers.config import RankConfig

STEPS_A_MOVE = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moves") / "model"
    return make_checkpoint(path, num_layers=LAYERS, head_dim=32, **SIZES)


def random_slots(
    draw: random.Random, before: tuple[int, ...], experts: ExpertMap
) -> tuple[int, ...]:
    """Any map of one layer; experts that stay on a rank keep their slots, as the planner has it."""
    while True:
        slots: list[int] = []
        for start, end in pairwise(experts.starts):
            was, now = before[start:end], draw.sample(range(experts.num_experts), end - start)
            coming = iter([expert for expert in now if expert not in was])
            slots += [expert if expert in now else next(coming) for expert in was]
        if len(set(slots)) == experts.num_experts:
            return tuple(slots)


def moving_rank(
    rank: int,
    num_ranks: int,
    info: Any,
    config: RankConfig,
    rendezvous: Any,
    events: list[Event],
    keep_logits: bool,
    max_steps: int,
) -> Any:
    """As run_rank, with a new random move whenever the last one has ended."""
    from tests.distributed import engine_harness
    from workers.engine import engine as engine_module
    from workers.specs.expert_layout import ExpertMove

    draw, state = random.Random(5), {"number": 0, "steps": 0}
    step = engine_module.Engine.step

    def moving_step(self: Any) -> Any:
        plan = step(self)
        state["steps"] += 1
        if self.moves.number == 0 and state["steps"] % STEPS_A_MOVE == 0 and plan.run:
            experts = self.runner.model.experts_for_test
            state["number"] += 1
            layers = tuple(
                (layer, random_slots(draw, it.slots, experts.base))
                for layer, it in experts.present.layers.items()
            )
            self.moves.begin(ExpertMove(state["number"], layers))
        if self.moves.number and self.moves._started:  # so that ranks stage in few steps
            deadline = time.monotonic() + 30
            while self.moves.number and not self.moves._staged and not self.moves._error:
                assert time.monotonic() < deadline
                time.sleep(0.0005)
            assert not self.moves._error, self.moves._error
        return plan

    load = engine_harness.__dict__["_step_to_the_end"]

    def with_experts(epoch: Any, *args: Any) -> None:
        epoch.engine.runner.model.experts_for_test = epoch.process.experts
        load(epoch, *args)
        moves = epoch.engine.moves
        assert moves.completed > 3 and moves.cancelled == 0, (moves.completed, moves.cancelled)
        assert moves._stager._peers.copied > 3, "experts come from the memory of the other rank"
        assert_weights(epoch.process)

    engine_module.Engine.step = moving_step  # type: ignore[method-assign]
    engine_harness._step_to_the_end = with_experts
    try:
        return engine_harness.run_rank(
            rank, num_ranks, info, config, rendezvous, events, keep_logits, max_steps
        )
    finally:
        engine_module.Engine.step = step  # type: ignore[method-assign]
        engine_harness._step_to_the_end = load


def stopped_rank(rank: int, *args: Any) -> Any:
    """As moving_rank; rank 1 is stopped for a second while it stages a layer in the middle of a move."""
    from workers.rank.expert_staging import ExpertStager

    stage, calls = ExpertStager.stage, []

    def stopping(self: Any, layer: int, slots: Any, waiting: Any, rest: Any) -> Any:
        staged = stage(self, layer, slots, waiting, rest)
        calls.append(layer)
        if rank == 1 and len(calls) == LAYERS + 2:
            # One process sends both signals, so that this one cannot be stopped after it was continued.
            signals = "kill -STOP $0; sleep 1; kill -CONT $0"
            subprocess.run(["sh", "-c", signals, str(os.getpid())], check=True)
        return staged

    ExpertStager.stage = stopping  # type: ignore[method-assign]
    try:
        return moving_rank(rank, *args)
    finally:
        ExpertStager.stage = stage  # type: ignore[method-assign]
        assert len(calls) > LAYERS + 2


def assert_weights(process: Any) -> None:
    """The weights of every slot equal those that a new process reads for the present map, bit for bit."""
    import torch

    from workers.rank.process import RankProcess

    fresh = RankProcess(process.rank, process.config, process.experts.present)
    fresh.load()
    assert fresh.experts.map == process.experts.map
    pairs = zip(process.model.moe_blocks().values(), fresh.model.moe_blocks().values(), strict=True)
    for mine, theirs in pairs:
        assert mine.held == mine.wanted == theirs.held
        for ours, new in zip(mine.parameters, theirs.parameters, strict=True):
            assert torch.equal(ours, new)
        assert torch.equal(mine.table.slots_EC, theirs.table.slots_EC)
        assert torch.equal(mine.table.copies_E, theirs.table.copies_E)
    fresh.close()


def events() -> list[Event]:
    """Requests that come, go and share prefixes; rank 1 is idle at first."""
    seeded = {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2}
    shared = [*range(40, 90)]
    return [
        Event(0, 0, make_request("greedy", [3, 1, 4, 1, 5, 9], max_tokens=40, logprobs=2)),
        Event(4, 0, make_request("aborted", [*range(30)], max_tokens=60)),
        Event(9, 1, make_request("prefix", shared, max_tokens=20, logprobs=1)),
        Event(14, 0, abort="aborted"),
        Event(20, 1, make_request("again", [*shared, 7], max_tokens=30, **seeded)),
        Event(25, 0, make_request("late", [2, 7, 1, 8], max_tokens=40, **seeded)),
        *(
            Event(28, 0, make_request(f"many-{n}", [n, *range(50)], max_tokens=40))
            for n in range(6)
        ),
    ]


@pytest.mark.parametrize(
    ("all2all", "spare", "weights"),
    [("shm", 1, "checkpoint"), ("allgather", 0, "checkpoint"), ("torch_dist", 2, "dummy")],
)
def test_tokens_while_experts_move(rank_pool, checkpoint, all2all, spare, weights):
    sections: dict[str, Any] = {"kernels": {"all2all": all2all}, "model": {"weights": weights}}
    sections |= {"cache": {"num_blocks": 32}, "model": {"weights": weights, "max_model_len": 256}}
    still = rank_config(checkpoint, 2, **sections)
    expected = run_engines(rank_pool, still, events())
    experts = {"redundant_slots": spare, "rebalance": "auto"}
    moving = rank_config(checkpoint, 2, **sections, experts=experts)
    found = run_engines(rank_pool, moving, events(), function=moving_rank)
    assert found[0].num_preemptions > 0 and found[1].prefix_cache_hits > 0
    for mine, theirs in zip(found, expected, strict=True):
        mine.tokens.pop("aborted", None), theirs.tokens.pop("aborted", None)
        assert mine.tokens == theirs.tokens and mine.reasons == theirs.reasons
        for name, entries in theirs.logprobs.items():
            for one, other in zip(mine.logprobs[name], entries, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_a_rank_that_is_stopped_in_the_middle_of_a_move_goes_on_with_it(rank_pool, checkpoint):
    sections: dict[str, Any] = {"cache": {"num_blocks": 32}, "model": {"max_model_len": 256}}
    expected = run_engines(rank_pool, rank_config(checkpoint, 2, **sections), events())
    experts = {"redundant_slots": 1, "rebalance": "auto"}
    moving = rank_config(checkpoint, 2, **sections, experts=experts)
    found = run_engines(rank_pool, moving, events(), function=stopped_rank)
    for mine, theirs in zip(found, expected, strict=True):
        mine.tokens.pop("aborted", None), theirs.tokens.pop("aborted", None)
        assert mine.tokens == theirs.tokens


@pytest.mark.parametrize(
    "family", ["deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.exhaustive)]
)
def test_moves_beside_draft_models_dense_layers_biases_and_asynchronous_steps(
    rank_pool, tmp_path, family
):
    """The experts of a draft model stay; those of DeepSeek's are in groups, those of gpt-oss have biases."""
    mtp = family == "deepseek_v3"
    changes = {"num_nextn_predict_layers": 1} if mtp else {}
    path = family_checkpoint(
        tmp_path, family, "untied", **({"mtp": True} if mtp else {}), **changes
    )
    sections: dict[str, Any] = {
        "scheduler": {"async_scheduling": True},
        "model": {"max_model_len": 256},
        "speculation": {"method": "mtp" if mtp else "off"},
    }
    expected = run_engines(rank_pool, rank_config(path, 2, **sections), events())
    experts = {"redundant_slots": 1, "rebalance": "auto"}
    moving = rank_config(path, 2, **sections, experts=experts)
    found = run_engines(rank_pool, moving, events(), function=moving_rank)
    for mine, theirs in zip(found, expected, strict=True):
        mine.tokens.pop("aborted", None), theirs.tokens.pop("aborted", None)
        assert mine.tokens == theirs.tokens
