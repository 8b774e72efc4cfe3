"""DeepEP's `Buffer` on CPU over gloo: what arrives where, and complaints about calls that the real one refuses.

Written after what DeepEP documents of itself and refuses in its host code; the GPU tests run the same contract on the
real one. Groups of more ranks than `peers_per_host` span hosts: then the normal mode goes between hosts.
"""

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

FP8_BLOCK = 128
ALIGNMENT = 128  # bytes of a buffer are a multiple of it
MIN_SMS_BETWEEN_HOSTS = 4
INT_MAX = 2**31 - 1


class FakeConfig:
    def __init__(self, num_sms: int):
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return aligned(self.num_sms * hidden_bytes * min(num_ranks, FakeBuffer.peers_per_host))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        num_hosts = num_ranks // FakeBuffer.peers_per_host
        assert num_hosts > 1, "NVSHMEM is disabled, as a build for one host may have it"
        return aligned(2 * self.num_sms * hidden_bytes * num_hosts)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class FakeBuffer:
    """Counts how many are `alive`, and how many of them in low-latency mode. `calls`: the launches, in order."""

    num_sms = 20
    peers_per_host = 8
    alive = 0
    low_latency_alive = 0

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        explicitly_destroy: bool = False,
    ):
        assert explicitly_destroy, "ending in a destructor can hang"
        self.group, self.num_ranks, self.rank = group, group.size(), group.rank()
        self.num_hosts = max(1, self.num_ranks // self.peers_per_host)
        assert self.num_ranks < self.peers_per_host or self.num_ranks % self.peers_per_host == 0
        assert num_nvl_bytes % ALIGNMENT == num_rdma_bytes % ALIGNMENT == 0
        assert num_nvl_bytes <= INT_MAX and (low_latency_mode or num_rdma_bytes <= INT_MAX)
        assert num_rdma_bytes == 0 or self.num_hosts > 1 or low_latency_mode
        assert num_qps_per_rank > 0
        self.low_latency_mode, self.num_qps_per_rank = low_latency_mode, num_qps_per_rank
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.hook: Callable[[], None] | None = None
        self.flags_clear, self.destroyed = True, False
        self.calls: list[str] = []
        type(self).alive += 1
        type(self).low_latency_alive += low_latency_mode
        assert type(self).low_latency_alive <= 1, "the first to end would end NVSHMEM for both"

    def destroy(self) -> None:
        assert not self.destroyed
        self.destroyed = True
        type(self).alive -= 1
        type(self).low_latency_alive -= self.low_latency_mode

    @classmethod
    def set_num_sms(cls, num_sms: int) -> None:
        assert num_sms % 2 == 0, num_sms
        cls.num_sms = num_sms

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> FakeConfig:
        return FakeConfig(cls.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        max_tokens: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return aligned(4 * 2 * max_tokens * hidden * num_experts)

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        experts = torch.arange(num_experts).view(self.num_ranks, -1)
        chosen_TE = (topk_idx.unsqueeze(2) == torch.arange(num_experts)).any(1)
        in_rank = torch.stack([chosen_TE[:, ids].any(1) for ids in experts], 1)
        on_host = in_rank.view(len(topk_idx), self.num_hosts, -1).any(2)
        per_host = on_host.sum(0).int() if self.num_hosts > 1 else None
        return in_rank.sum(0).int(), per_host, chosen_TE.sum(0).int(), in_rank, None

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: Any = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        num_worst_tokens: int = 0,
        config: Any = None,
    ) -> tuple[Any, ...]:
        fp8 = isinstance(x, tuple)
        x, *scales = x if isinstance(x, tuple) else (x,)
        assert x.dtype == (torch.float8_e4m3fn if fp8 else torch.bfloat16)
        assert all(part.dtype == torch.float32 for part in (topk_weights, *scales))
        assert all(part.shape == (len(x), x.shape[1] // FP8_BLOCK) for part in scales)
        assert all(part.is_contiguous() for part in (x, topk_idx, topk_weights))
        assert handle is None
        if self.num_hosts > 1:
            self._between_hosts(x, config)
            assert num_worst_tokens == 0, "the host waits for the number of rows between hosts"
            assert num_tokens_per_rdma_rank.dtype == torch.int32
            assert num_tokens_per_rdma_rank.shape == (self.num_hosts,)
            num_worst_tokens = self._rows_of_all(is_token_in_rank)
        else:
            assert num_worst_tokens == self.num_ranks * len(x) > 0
        assert is_token_in_rank.shape == (len(x), self.num_ranks) and topk_idx.shape[1] <= 32
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        self.calls.append("dispatch")
        assert int(num_tokens_per_rank.sum()) == int(is_token_in_rank.sum())
        assert config.get_nvl_buffer_size_hint(2 * x.shape[1], self.num_ranks) <= self.num_nvl_bytes
        num_experts = len(num_tokens_per_expert)
        local = num_experts // self.num_ranks
        # As bytes, because pickle of torch refuses e4m3.
        mine = (is_token_in_rank, topk_idx, topk_weights, x.view(torch.uint8), *scales)
        sent = [
            [part[in_rank[:, self.rank]] for part in parts]
            for in_rank, *parts in self._gather(mine)
        ]
        all_ids, all_weights, *rows = zip(*sent, strict=True)
        ids = torch.cat(all_ids) - self.rank * local
        here = (ids >= 0) & (ids < local)
        room = num_worst_tokens - len(ids)
        recv_values, *recv_scales = (_with_room(parts, room) for parts in rows)
        recv_values = recv_values.view(x.dtype)
        recv_ids = torch.cat([ids.where(here, -1), ids.new_full((room, ids.shape[1]), -1)])
        recv_weights = _with_room([torch.cat(all_weights).where(here, 0)], room)
        counts = [len(ids) for ids in all_ids]
        way = (counts, is_token_in_rank, config.num_sms, num_worst_tokens)
        recv_x = (recv_values, *recv_scales) if fp8 else recv_values
        return recv_x, recv_ids, recv_weights, [], way, None

    def combine(self, x: torch.Tensor, handle: Any, *, config: Any = None) -> tuple[Any, ...]:
        counts, in_rank, num_sms, num_rows = handle
        assert config.num_sms == num_sms, "combine must have as many channels as its dispatch"
        if self.num_hosts > 1:
            self._between_hosts(x, config)
            assert num_sms >= MIN_SMS_BETWEEN_HOSTS
        self.calls.append("combine")
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and len(x) == num_rows
        back = self._gather(x[: sum(counts)].split(counts))
        out = torch.zeros(len(in_rank), x.shape[1])
        for rank, of_rank in enumerate(back):
            out[in_rank[:, rank]] += of_rank[self.rank].float()
        return out.to(x.dtype), None, None

    def _between_hosts(self, x: torch.Tensor, config: FakeConfig) -> None:
        """The normal mode writes to the memory of the low-latency mode, of which nothing may be under way."""
        assert self.low_latency_mode, "one buffer, because a process has one NVSHMEM"
        assert self.hook is None, "not received yet"
        sizes = 2 * x.shape[1], self.num_ranks
        assert config.get_rdma_buffer_size_hint(*sizes) <= self.num_rdma_bytes
        assert config.num_sms <= self.num_qps_per_rank, "each SM has a queue pair"
        self.flags_clear = False

    def _rows_of_all(self, in_rank: torch.Tensor) -> int:
        """Rows that arrive at this rank."""
        return sum(int(of_rank[:, self.rank].sum()) for of_rank in self._gather(in_rank))

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        assert self.low_latency_mode and self.hook is None, "not received yet"
        sizes = num_max_dispatch_tokens_per_rank, hidden, num_experts
        assert self._gather(sizes) == [sizes] * self.num_ranks  # a barrier of all ranks
        self.calls.append("clean")
        self.flags_clear = True

    def _low_latency(self, max_tokens: int, hidden: int, num_experts: int) -> None:
        assert self.low_latency_mode and self.hook is None, "not received yet"
        assert self.flags_clear, "the normal mode has overwritten the flags"
        needed = self.get_low_latency_rdma_size_hint(
            max_tokens, hidden, self.num_ranks, num_experts
        )
        assert needed <= self.num_rdma_bytes
        assert self.num_qps_per_rank >= num_experts // self.num_ranks
        assert self.num_ranks * max_tokens % 4 == 0, "TMA needs a multiple of four"

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        max_tokens: int,
        num_experts: int,
        use_fp8: bool = True,
        return_recv_hook: bool = False,
    ) -> tuple[Any, ...]:
        self._low_latency(max_tokens, x.shape[1], num_experts)
        assert return_recv_hook
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and len(x) <= max_tokens
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        assert topk_idx.shape[1] <= 11 and len(topk_idx) == len(x)
        self.calls.append("low_latency_dispatch")
        local = num_experts // self.num_ranks
        recv = torch.full((local, self.num_ranks * max_tokens, x.shape[1]), torch.nan).bfloat16()
        counts = torch.full((local,), -1, dtype=torch.int32)
        values, scales = recv, None
        if use_fp8:
            values = recv.to(torch.float8_e4m3fn)
            scales = torch.full((local, x.shape[1] // FP8_BLOCK, recv.shape[1]), torch.nan)
            scales = scales.transpose(1, 2)
        origin: list[Any] = []

        def receive() -> None:
            self.hook = None
            counts.zero_()
            for source, (rows, ids) in enumerate(self._gather((x, topk_idx))):
                for token, expert in _pairs(ids):
                    if expert // local != self.rank or expert < 0:
                        continue
                    own = expert % local
                    place = int(counts[own])
                    if use_fp8:
                        values[own, place], scales[own, place] = quantise(rows[token])
                    else:
                        values[own, place] = rows[token]
                    origin.append((source, token, own, place))
                    counts[own] += 1

        self.hook = receive
        return (values, scales) if use_fp8 else values, counts, (origin, local), None, receive

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        return_recv_hook: bool = False,
    ) -> tuple[Any, ...]:
        origin, local = handle
        self._low_latency(x.shape[1] // self.num_ranks, x.shape[2], local * self.num_ranks)
        assert return_recv_hook and x.is_contiguous() and x.shape[0] == local
        assert x.dtype == torch.bfloat16 and topk_weights.dtype == torch.float32
        assert topk_weights.shape == topk_idx.shape and topk_weights.is_contiguous()
        self.calls.append("low_latency_combine")
        out = torch.full((len(topk_idx), x.shape[2]), torch.nan, dtype=x.dtype)
        sent = [
            (source, token, self.rank * local + own, x[own, place])
            for source, token, own, place in origin
        ]

        def receive() -> None:
            self.hook = None
            sums = torch.zeros(out.shape)
            for part in self._gather(sent):
                for source, token, expert, row in part:
                    if source == self.rank:
                        weight = topk_weights[token][topk_idx[token] == expert]
                        sums[token] += weight * row.float()
            out.copy_(sums)

        self.hook = receive
        return out, None, receive

    def _gather(self, mine: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(gathered, mine, group=self.group)
        return gathered


def _with_room(parts: Sequence[torch.Tensor], room: int) -> torch.Tensor:
    """All rows, and `room` rows of NaN, whose bytes are all ones in every format."""
    rows = torch.cat([part.view(torch.uint8) for part in parts])
    return torch.cat([rows, rows.new_full((room, rows.shape[1]), 255)]).view(parts[0].dtype)


def _pairs(ids: torch.Tensor):
    """(row, expert) of each entry, row by row."""
    return ((row, expert) for row, experts in enumerate(ids.tolist()) for expert in experts)


def quantise(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values of one row, and a float32 scale per 128 of them."""
    blocks = row.float().view(-1, FP8_BLOCK)
    scale = blocks.abs().amax(1).clamp_min(1e-4) / 448
    return (blocks / scale.unsqueeze(1)).flatten().to(torch.float8_e4m3fn), scale


def fake_module() -> types.ModuleType:
    """What `import deep_ep` gives where it is 1.2.1."""
    module = types.ModuleType("deep_ep")
    module.Buffer = FakeBuffer  # type: ignore[attr-defined]
    return module


def install(peers_per_host: int = 8) -> None:
    """From now on this process finds it, with no buffer alive."""
    FakeBuffer.peers_per_host = peers_per_host
    FakeBuffer.alive = FakeBuffer.low_latency_alive = 0
    sys.modules["deep_ep"] = fake_module()
