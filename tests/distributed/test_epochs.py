"""Epochs torn down and built again in living processes: nothing leaks, and open requests get the same tokens.

Each epoch ends in one of three ways, in turn: an orderly stop; a rank whose step raises; an abort from another thread
while the loop runs. Requests that are open then go on in the next epoch from what they have emitted.
"""

import gc
import os
import threading
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.writer import make_checkpoint
from tests.devices import take_gpu
from tests.distributed.engine_harness import Event, make_request, rank_config, run_engines
from workers.config import RankConfig
from workers.rank.process_group import local_rendezvous
from workers.step.step_sync import LockstepError
from workers.wire.request import EngineRequest

NUM_RANKS = 3
TOKENS_AN_EPOCH = 3
SLOW_STEP_S = 0.02
# Bytes that the epochs after the warm-up may add: the prompts that are computed again grow with what was emitted, and
# so do buffers (5 to 10 MB were seen); one epoch's shared memory and runner take more than 1 MB.
RSS_BOUND = 16 << 20
WAYS = ("stop", "failure", "abort")
SHM = Path("/dev/shm")


@dataclass
class Found:
    """What one rank emitted, by request, and what its process held after each epoch."""

    tokens: dict[str, list[int]]
    threads: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    seconds: list[dict[str, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)
    device_bytes: list[int] = field(default_factory=list)
    states_restored: int = 0

    @property
    def num_tokens(self) -> int:
        """Of all requests of this rank."""
        return sum(map(len, self.tokens.values()))

    def measure(self) -> None:
        self.threads.append(len(os.listdir("/proc/self/task")))
        self.descriptors.append(len(os.listdir("/proc/self/fd")))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.rss.append(pages * os.sysconf("SC_PAGE_SIZE"))
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.device_bytes.append(total - free)


class FailedStepError(RuntimeError):
    """What the failing rank's step raises."""


def fail_after(epoch: Any, num_tokens: int, found: Found) -> None:
    """Let the first step raise that begins when this rank has emitted `num_tokens` in all."""
    launch = epoch.runner.launch

    def failing(batch: Any, plan: Any) -> Any:
        if found.num_tokens >= num_tokens:
            raise FailedStepError("this step fails")
        return launch(batch, plan)

    epoch.runner.launch = failing


class Client:
    """Sends one rank's requests to each epoch, with what earlier epochs have emitted."""

    def __init__(self, requests: list[EngineRequest], found: Found):
        self._requests = {request.request_id: request for request in requests}
        self._open, self._found = set(self._requests), found

    def serve(self, epoch: Any, stop: bool) -> int:
        """Start the epoch's engine with the open requests; returns how many tokens are enough for this epoch.

        stop   stop the group in order when they have been emitted
        """
        enough = self._found.num_tokens + TOKENS_AN_EPOCH * len(self._open)
        self.reached = threading.Event()

        def publish(_: str, outputs: list[Any]) -> None:
            for output in outputs:
                self._found.tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    self._open.discard(output.request_id)
                    self._found.ends[output.request_id] = output.finish_reason
            if self._found.num_tokens >= enough:
                self.reached.set()
                time.sleep(SLOW_STEP_S)  # a GPU would finish all requests before the abort
                if stop:
                    epoch.engine.stop()

        assert self._open, "the requests are too short for so many epochs"
        epoch.start_engine(publish, lambda step: None)
        for name in sorted(self._open):
            emitted = list(self._found.tokens[name])
            epoch.engine.submit(replace(self._requests[name], emitted_token_ids=emitted))
        return enough


def live(
    rank: int,
    _num_ranks: int,
    _info: Any,
    config: RankConfig,
    rendezvous: Any,
    requests: list[list[EngineRequest]],
    num_epochs: int,
) -> Found:
    """One rank through `num_epochs` epochs that are torn down, and a last one that serves to the end."""
    from workers.rank.epoch import Epoch
    from workers.rank.process import RankProcess
    from workers.rank.rank_info import start_stages

    if config.device == "cuda":
        take_gpu(rank)
    gc.freeze()  # as RankActor
    gc.disable()  # a closed epoch leaves no cycles to a later collection
    found = Found({request.request_id: [] for request in requests[rank]})
    client, process, model = Client(requests[rank], found), RankProcess(rank, config), None
    for number in range(num_epochs + 1):
        name = f"{rendezvous.name}-{number}"
        epoch = Epoch(process, replace(rendezvous, name=name, epoch=number), 30)
        for stage in start_stages(config.device):
            epoch.run_stage(stage, lambda done, total: None)
        way = WAYS[number % len(WAYS)] if number < num_epochs else "end"
        enough = client.serve(epoch, stop=way == "stop")
        if way == "end":
            while epoch.engine.step().run:
                pass
        elif way == "stop":
            epoch.run()
        else:
            if way == "failure" and rank == number % config.num_ranks:
                fail_after(epoch, enough, found)
            loop = threading.Thread(target=expect_failure, args=(epoch.run, found))
            loop.start()
            # A GPU's peers wait for the failed rank's rows, not for its vote.
            if way == "abort" or config.device == "cuda":
                reached = client.reached.wait(60 if way == "abort" else 3)
                assert reached or way == "failure", (number, way, found.seconds, found.errors)
                epoch.abort()
            loop.join(60)
            assert not loop.is_alive(), "an aborted loop goes on"
        found.seconds.append(epoch.seconds)
        epoch.close()
        assert model is None or model is process.model, "the weights were loaded again"
        model = process.model
        found.measure()
    found.states_restored = process.caches.manager.gauges().get("states_restored", 0)
    process.close()
    gc.enable()
    gc.unfreeze()
    return found


def expect_failure(run: Any, found: Found) -> None:
    """The failing rank raises its own error; a peer's exchange or vote ends with one of the transport's."""
    try:
        run()
    except (FailedStepError, LockstepError, ConnectionError, RuntimeError) as error:
        found.errors.append("".join(traceback.format_exception(error)))
    else:
        raise AssertionError("the epoch ended in order")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("epochs") / "model"
    return make_checkpoint(
        path, num_layers=2, hidden_size=32, num_experts=4, num_experts_per_tok=2, head_dim=32
    )


def requests_of(rank: int, num_epochs: int) -> list[EngineRequest]:
    """Two requests that outlive all epochs, and one that ends in an early epoch."""
    total = 2 * num_epochs * TOKENS_AN_EPOCH  # an aborted loop runs on for a while
    seeded = {"temperature": 1.0, "seed": 5 + rank, "repetition_penalty": 1.2}
    return [
        make_request(f"greedy-{rank}", [3, 1, 4, 1, 5, 9 + rank], max_tokens=total),
        make_request(f"seeded-{rank}", [2, 7, 1, 8 + rank], max_tokens=total, **seeded),
        make_request(f"short-{rank}", [1, 6, 1 + rank], max_tokens=20),
    ]


@pytest.mark.parametrize(
    ("all2all", "num_epochs"),
    [
        *(("shm", 8), ("hierarchical", 8), ("torch_dist", 8), ("allgather", 8)),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("shm", 50), ("hierarchical", 26), ("torch_dist", 26), ("allgather", 26))
        ),
    ],
)
def test_rebuilt_epochs_leak_nothing_and_change_no_token(
    rank_pool, checkpoint, all2all, num_epochs
):
    config = rank_config(
        checkpoint,
        NUM_RANKS,
        model={"max_model_len": 512},
        cache={"num_blocks": 128},
        kernels={"all2all": all2all},
    )
    requests = [requests_of(rank, num_epochs) for rank in range(NUM_RANKS)]
    for rebuilt in rebuild(rank_pool, config, requests, num_epochs):
        assert_flat(rebuilt, num_epochs)


@pytest.mark.parametrize("method", ["off", "ngram"])
def test_states_of_linear_attention_stay_over_rebuilds(rank_pool, tmp_path: Path, method: str):
    """A request that comes again goes on from the state that an earlier epoch kept at the end of its prompt.

    With drafts, slots have accepted drafts of sequences of the epoch before.
    """
    num_epochs = 6
    config = rank_config(
        make_checkpoint(tmp_path / "model", family="qwen3_next", num_layers=2, hidden_size=32),
        NUM_RANKS,
        model={"max_model_len": 512},
        cache={"num_blocks": 128},
        speculation={"method": method, "num_draft_tokens": 2, "adaptive": False},
    )
    requests = [
        [
            replace(request, prompt_token_ids=[(rank + 7 * i) % 251 for i in range(99)])
            for request in requests_of(rank, num_epochs)
        ]
        for rank in range(NUM_RANKS)
    ]
    for rebuilt in rebuild(rank_pool, config, requests, num_epochs):
        assert rebuilt.states_restored >= num_epochs


def rebuild(
    pool: Any, config: RankConfig, requests: list[list[EngineRequest]], num_epochs: int
) -> list[Found]:
    """Serve the requests of all ranks over rebuilds; compare their tokens with those of one undisturbed epoch."""
    events = [Event(0, rank, request) for rank in range(NUM_RANKS) for request in requests[rank]]
    undisturbed = run_engines(pool, config, events)
    with local_rendezvous() as rendezvous:
        arguments = (config, rendezvous, requests, num_epochs)
        found: list[Found] = pool.run(live, NUM_RANKS, *arguments, with_group=False, timeout_s=120)
    left = list(SHM.glob(f"phalanx-{rendezvous.name}*"))  # other groups of this machine have others
    assert not left, "a segment of shared memory is left"
    for rank, (rebuilt, whole) in enumerate(zip(found, undisturbed, strict=True)):
        assert rebuilt.tokens == whole.tokens, f"rank {rank}"
    return found


def assert_flat(found: Found, num_epochs: int) -> None:
    # The kernel ends a joined thread a little later, so one epoch may count one more.
    warm_up = min(12, num_epochs // 2)
    for held in (found.threads, found.descriptors):
        assert min(held[-min(10, warm_up) :]) <= min(held[:warm_up]), (
            f"threads or files leak: {held}"
        )
    before, after = found.rss[warm_up], found.rss[-1]
    assert after - before < RSS_BOUND, f"{(after - before) / 1e6:.1f} MB in {num_epochs} epochs"
    assert len(found.seconds) == num_epochs + 1
    assert len(found.errors) == sum(WAYS[n % len(WAYS)] != "stop" for n in range(num_epochs))
