"""Epochs with other numbers of ranks in living processes: open requests get the tokens of an undisturbed run.

Processes join and leave the group, take other ranks, and start as standbys. Requests live in the process that is in
every epoch.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.routing.expert_map import STANDBY
from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import Event, make_request, rank_config, run_engines
from workers.config import RankConfig
from workers.rank.process_group import local_rendezvous
from workers.wire.request import EngineRequest

# The processes of each epoch, in rank order; process 2 waits as a standby at first.
EPOCHS = ((0, 1), (2, 1, 0), (0,), (1, 0, 2), (2, 0))
TOKENS_AN_EPOCH = 6
STAYS = 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("elastic") / "model"
    return make_checkpoint(
        path, num_layers=2, hidden_size=32, num_experts=4, num_experts_per_tok=2, head_dim=32
    )


def requests() -> list[EngineRequest]:
    total = TOKENS_AN_EPOCH * (len(EPOCHS) + 1)
    seeded = {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2}
    return [
        make_request("greedy", [3, 1, 4, 1, 5, 9], max_tokens=total),
        make_request("seeded", [2, 7, 1, 8], max_tokens=total, **seeded),
    ]


def configured(checkpoint: Path, num_ranks: int, all2all: str) -> RankConfig:
    kernels = {"all2all": all2all if num_ranks > 1 else "auto"}
    return rank_config(checkpoint, num_ranks, kernels=kernels, cache={"num_blocks": 64})


def live(
    number: int, _num_ranks: int, _info: Any, configs: list[RankConfig], rendezvous: Any
) -> dict[str, list[int]]:
    """One process through all epochs."""
    from workers.rank.epoch import Epoch
    from workers.rank.process import RankProcess

    first = EPOCHS[0]
    process = RankProcess(first.index(number) if number in first else STANDBY, configs[0])
    if number not in first:
        process.load()
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests()}
    for at, (members, config) in enumerate(zip(EPOCHS, configs, strict=True)):
        if number not in members:
            continue
        process.become(members.index(number), config)
        name = f"{rendezvous.name}-{at}"
        epoch = Epoch(process, replace(rendezvous, name=name, epoch=at), 60)
        epoch.load()

        def publish(_: str, outputs: list[Any], epoch: Any = epoch, at: int = at) -> None:
            for output in outputs:
                tokens[output.request_id] += output.token_ids
            if min(map(len, tokens.values())) >= TOKENS_AN_EPOCH * (at + 1):
                epoch.engine.stop()

        epoch.start_engine(publish, lambda step: None)
        for block in process.model.moe_blocks().values():
            assert block.held == [*process.experts.map.experts_of(process.rank)]
        if number == STAYS:
            for request in requests():
                emitted = list(tokens[request.request_id])
                epoch.engine.submit(replace(request, emitted_token_ids=emitted))
        else:
            epoch.engine.wake(0)  # the wake of the peer with requests
        epoch.run()
        epoch.close()
    process.close()
    return tokens


@pytest.mark.parametrize("all2all", ["shm", "torch_dist", "allgather"])
def test_tokens_do_not_depend_on_the_ranks_of_each_epoch(rank_pool, checkpoint, all2all):
    configs = [configured(checkpoint, len(members), all2all) for members in EPOCHS]
    with local_rendezvous() as rendezvous:
        found = rank_pool.run(live, 3, configs, rendezvous, with_group=False, timeout_s=120)
    events = [Event(0, 0, request) for request in requests()]
    whole = run_engines(rank_pool, configured(checkpoint, 2, all2all), events)[0].tokens
    for name, tokens in found[STAYS].items():
        assert len(tokens) >= TOKENS_AN_EPOCH * len(EPOCHS)
        assert tokens == whole[name][: len(tokens)], name
