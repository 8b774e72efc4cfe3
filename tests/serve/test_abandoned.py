"""A detached supervisor without ingresses ends its own process, over real Ray."""

import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray

from cluster.config.phalanx_config import PhalanxConfig
from cluster.supervisor.launcher import NAMESPACE
from cluster.supervisor.leases import Leases
from cluster.supervisor.supervisor import Supervisor
from tests.serve.server import JOINING


class Abandoned(Supervisor):
    """A supervisor without ranks that waits half a second for its first ingress."""

    def __init__(self, config: PhalanxConfig):
        super().__init__(config)
        self._leases = Leases(0.5)

    def _create_groups(self, config: PhalanxConfig) -> list[Any]:
        return []

    async def pid(self) -> int:
        import os

        return os.getpid()


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in JOINING:  # of the shared server's Ray, if a test before has it
        monkeypatch.delenv(name, raising=False)
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE)
    yield
    ray.shutdown()


def test_an_abandoned_supervisor_leaves_no_process(local_ray):
    config = PhalanxConfig(model={"path": "nowhere"}, serve={"model_name": "tiny"})
    actor = ray.remote(Abandoned).options(name="abandoned", lifetime="detached", num_cpus=0)
    handle = actor.remote(config)
    process = psutil.Process(ray.get(handle.pid.remote()))
    waiting = handle.drain_requested.remote()  # as an ingress does
    ray.get(handle.start.remote(config))
    process.wait(60)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(waiting)
    deadline = time.monotonic() + 60
    while True:
        try:
            ray.get_actor("abandoned")
        except ValueError:
            return  # its name is free
        assert time.monotonic() < deadline, "the actor is still known"
        time.sleep(0.1)
