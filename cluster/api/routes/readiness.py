"""Checks that every rank can answer: by the tokens of real requests, or by a request of one token to each other rank.

A probe runs like any other request, so it finds a rank that hangs while its process answers. No metric counts it.
Knows nothing of HTTP.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from cluster.api.backend import EngineBackend
from cluster.api.settings import ApiSettings
from cluster.errors import EngineDeadError, ServingError
from kernels.host.awake import wait_awake
from workers.wire.request import NO_OUTPUT, PROBE_PREFIX, SamplingParams

logger = logging.getLogger(__name__)

PROBE_PRIORITY = -(
    2**31
)  # a client can only ask for less: a full queue does not look like a dead rank


class Readiness:
    """A rank is proven for `probe_fresh_s` after its last token, of any request of this ingress or of a probe."""

    def __init__(self, provider: Callable[[], EngineBackend], settings: ApiSettings) -> None:
        self._provider = provider
        self._settings = settings
        self._proven: dict[int, float] = {}  # time of the last probe that proved a rank
        self._probe: asyncio.Task[str] | None = None

    async def groups(self) -> list[dict[str, Any]]:
        """Return the states of the groups; [] if nothing answers."""
        try:
            async with asyncio.timeout(self._settings.stats_timeout_s):
                return await self._provider().groups()
        except (ServingError, TimeoutError):
            return []

    async def check(self, groups: list[dict[str, Any]]) -> None:
        """Raise EngineDeadError, which names the rank, unless requests can be served."""
        backend = self._provider()
        if state := not_serving(groups):
            raise EngineDeadError(state)
        ready, reason = backend.health()
        if not ready:
            raise EngineDeadError(reason or "the engine is not ready")
        unproven = self._unproven(backend)
        if not unproven:
            return
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._run(backend, unproven))
        reason = await asyncio.shield(self._probe)  # others wait for the same one
        if reason:
            raise EngineDeadError(reason)

    def _unproven(self, backend: EngineBackend) -> list[int]:
        fresh_s, now = self._settings.probe_fresh_s, time.monotonic()
        return [
            rank
            for rank, age in backend.token_ages().items()
            if min(age, now - self._proven.get(rank, -float("inf"))) >= fresh_s
        ]

    async def _run(self, backend: EngineBackend, unproven: list[int]) -> str:
        """Probe all unproven ranks at once; return the reason if a rank is not ready, else "".

        unproven: one rank at least
        """
        counting = asyncio.create_task(self._busy_steps(backend))
        probes = {rank: asyncio.create_task(self._one_answer(backend, rank)) for rank in unproven}
        await wait_awake(probes.values(), self._settings.probe_timeout_s)
        silent = {rank for rank, probe in probes.items() if probe.cancel()}
        await asyncio.gather(*probes.values(), counting, return_exceptions=True)
        for rank, probe in probes.items():
            error = None if rank in silent else probe.exception()
            if isinstance(error, ServingError):
                return f"rank {rank}: {error}"
            if error is not None:
                logger.error("the probe of rank %d failed", rank, exc_info=error)
                return f"rank {rank}: internal error; the server's log has the details"
        if silent:
            # A rank that goes on with its steps is busy, not dead: all its places are taken.
            before, after = await counting, await self._busy_steps(backend)
            silent -= {rank for rank in before if after.get(rank, 0) > before[rank]}
        if silent:
            names = ", ".join(str(rank) for rank in sorted(silent))
            return f"no token in {self._settings.probe_timeout_s:g} s from rank {names}"
        self._proven |= dict.fromkeys(probes, time.monotonic())
        return ""

    async def _one_answer(self, backend: EngineBackend, rank: int) -> None:
        """Get a token of a rank, or a vector if the model makes vectors."""
        pooling = self._settings.pooling
        options: dict[str, Any] = {"priority": PROBE_PRIORITY, "rank": rank}
        params = SamplingParams(max_tokens=1, temperature=0.0)
        if pooling is not None:
            params, options["pooling"] = NO_OUTPUT, pooling.warm_up_params()
        outputs = backend.generate(f"{PROBE_PREFIX}{uuid.uuid4().hex}", [0], params, **options)
        async with aclosing(outputs):
            async for output in outputs:
                if output.finish_reason in ("error", "abort"):
                    raise EngineDeadError(output.error or "the engine ended a probe")
                if output.finish_reason is not None:
                    return
        raise EngineDeadError("the engine ended a probe without an answer")

    async def _busy_steps(self, backend: EngineBackend) -> dict[int, int]:
        """Return the steps with tokens of each rank so far; {} if the ranks do not answer."""
        try:
            async with asyncio.timeout(self._settings.stats_timeout_s):
                stats = await backend.rank_stats()
        except (ServingError, TimeoutError):
            return {}
        return {values["rank"]: _busy(values) for values in stats if not values.get("silent")}


def not_serving(groups: list[dict[str, Any]]) -> str:
    """Return the states of the groups, with their reasons, if none of them serves; "" otherwise."""
    if any(group["state"] == "serving" for group in groups):
        return ""
    return "; ".join(map(_state, groups))


def _state(group: dict[str, Any]) -> str:
    stage = f" (stage {group['stage']})" if group["stage"] else ""
    reason = f": {group['error']}" if group["error"] else ""
    return f"the group is {group['state']}{stage} since {group['seconds']:.1f} s{reason}"


def _busy(stats: dict[str, Any]) -> int:
    return int(stats.get("steps", 0) - stats.get("idle_steps", 0))
