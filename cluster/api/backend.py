"""The interface of the engine for the HTTP layer. Knows nothing of its implementations."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from cluster.config.phalanx_config import Role
from cluster.metrics.snapshot import Snapshot
from workers.specs.expert_layout import ExpertLayout
from workers.wire.request import ImageInput, PoolingParams, RequestOutput, SamplingParams


class EngineBackend(Protocol):
    """All ranks, seen from an ingress.

    Any method may raise `cluster.errors.EngineDeadError` (503) or `OverloadedError` (429).
    """

    model_name: str

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        ...

    @property
    def max_request_tokens(self) -> int:
        """KV capacity of one rank in tokens: no request can be longer."""
        ...

    @property
    def num_ranks(self) -> int:
        """Ranks of all groups."""
        ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """Folder or Hub name of each LoRA adapter that takes requests, by the name that requests have as `model`."""
        ...

    def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        rank: int | None = None,
        whole: bool = False,
        pooling: PoolingParams | None = None,
        adapter: str = "",
        images: tuple[ImageInput, ...] = (),
        session: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield one output per step with new tokens; the last output has a finish_reason.

        rank pins the request to that rank; priority and cache_salt as in `EngineRequest`; with `whole` the generator
        yields one output, of all steps; adapter is the name of one of `adapters`, or "". With `pooling` the request
        draws no token, and its one output has a vector. Requests of one `session` go to one rank while its load allows.
        images are those of the prompt, see `EngineRequest`.

        Closing the generator early (aclose or cancellation) aborts the request in its rank.
        """
        ...

    def health(self) -> tuple[bool, str]:
        """Return (whether requests are taken, the reason if not)."""
        ...

    def token_ages(self) -> dict[int, float]:
        """Return the seconds since this ingress received tokens, of each rank that can be reached; infinite before."""
        ...

    async def groups(self) -> list[dict[str, Any]]:
        """Return `cluster.supervisor.status.GroupStatus.to_json()` of each group."""
        ...

    async def rank_stats(self) -> list[dict[str, Any]]:
        """Return `workers.stats.stats.EngineStats.snapshot()` of each rank, with its `rank`.

        A rank that does not answer in time has nothing but `rank` and `silent`.
        """
        ...

    async def expert_layouts(self) -> list[ExpertLayout]:
        """Return where the experts of each group are, with their recent load."""
        ...

    async def ingress_metrics(self, own: Snapshot) -> Snapshot:
        """Return the sum of the counts of all ingresses; `own` has the counts of the calling ingress."""
        ...

    async def drain(self, timeout_s: float | None, group: str | None = None) -> None:
        """Refuse new requests, finish the open ones in `timeout_s` seconds, then end; None: serve.drain_timeout_s.

        group: the one that ends, in favour of the other groups; None: the server
        """
        ...

    async def scale(self, num_ranks: int, group: str | None = None) -> None:
        """Go on with another number of ranks. Returns when they serve; raises BadRequestError if that is impossible."""
        ...

    async def restart(self, settings: list[str], group: str | None = None) -> None:
        """Replace the processes of all ranks, or of one group, with these settings. Returns and raises as `scale`."""
        ...

    async def switch_role(self, role: Role, group: str | None = None) -> None:
        """Let a group have another part of requests; open ones go on. Raises BadRequestError if that is impossible."""
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter. Returns when requests may name it; raises BadRequestError if it cannot be loaded."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; open ones end. Raises NotFoundError."""
        ...
