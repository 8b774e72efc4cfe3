"""The actor shell of a rank without Ray: multicast refused, calls of other epochs refused, streams."""

import asyncio
from typing import Any

import pytest

from kernels.host.cuda_environment import MULTICAST_OFF, MulticastError
from tests.unit.ray_fakes import rank_config
from workers.rank import actor
from workers.rank.actor import RankActor, RankFailedError, StaleEpochError
from workers.wire.secure_socket import StreamAddress


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "set_up_logging", lambda *_, **__: None)
    monkeypatch.setattr(actor, "node_address", lambda: "127.0.0.1")


@pytest.mark.parametrize("missing", sorted(MULTICAST_OFF))
def test_a_gpu_rank_refuses_to_start_with_multicast(monkeypatch, missing):
    for name, value in MULTICAST_OFF.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(MulticastError, match=f"{missing} is not set"):
        RankActor(0, rank_config(device="cuda"))


def test_a_gpu_rank_starts_without_multicast(monkeypatch):
    for name, value in MULTICAST_OFF.items():
        monkeypatch.setenv(name, value)
    subject = RankActor(0, rank_config(device="cuda"))
    subject._inbox.close()


ADDRESS = StreamAddress("tcp://127.0.0.1:9", b"0" * 40)
CALLS: dict[str, tuple[Any, ...]] = {
    "start": ([],),
    "done": (),
    "open_stream": ("i.1", ADDRESS),
    "close_stream": ("i.1",),
    "stop": (),
}


@pytest.mark.parametrize("method", CALLS)
def test_calls_of_another_epoch_are_refused(method):
    subject = RankActor(1, rank_config())
    subject._epoch = 3
    with pytest.raises(StaleEpochError, match="rank 1 is in epoch 3, not 2"):
        asyncio.run(getattr(subject, method)(2, *CALLS[method]))
    subject._inbox.close()


def test_before_the_start_there_is_no_engine():
    subject = RankActor(0, rank_config())
    with pytest.raises(RankFailedError, match="not started"):
        asyncio.run(subject.stats())
    subject._inbox.close()
