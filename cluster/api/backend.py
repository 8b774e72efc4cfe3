"""What the HTTP layer asks of the engine. Knows nothing of who implements it."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from cluster.metrics.snapshot import Snapshot
from workers.wire.request import RequestOutput, SamplingParams


class EngineBackend(Protocol):
    """All ranks, seen from an ingress.

    Any method may raise `cluster.errors.EngineDeadError` (503) or `OverloadedError` (429).
    """

    model_name: str
    max_model_len: int
    max_request_tokens: int
    """KV capacity of one rank in tokens: no request can be longer."""

    num_ranks: int

    def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """One output per step that gave new tokens; the last one carries a finish_reason.

        rank pins the request to that rank; priority and cache_salt as in `EngineRequest`. Closing
        the generator early (aclose or cancellation) aborts the request in its rank.
        """
        ...

    def health(self) -> tuple[bool, str]:
        """(ready, the reason when not)."""
        ...

    async def rank_stats(self) -> list[dict[str, Any]]:
        """Per rank, in rank order: `workers.stats.stats.EngineStats.snapshot()`."""
        ...

    async def ingress_metrics(self, own: Snapshot) -> Snapshot:
        """What all ingresses have counted together; `own` is what the one that asks has."""
        ...
