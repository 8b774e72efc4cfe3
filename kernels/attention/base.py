"""Attention over the paged KV cache: the interface of its backends.

T tokens, H query heads, h KV heads, M = H + 2h, N = H + h, d head dim, r rotated values of a head, B sequences.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from enum import IntEnum

import torch

from kernels.attention.batch import AttentionBatch as AttentionBatch
from kernels.attention.latent_up import LatentHeads
from kernels.attention.shared_prefixes import SharedPrefixes, SharingCost, find_shared
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.backend import Backend, BackendShape
from kernels.interface.kv_layout import KVGroup, KVLayout, group_layers, layout_of
from kernels.interface.shared_reads import SharedReads


class GraphForm(IntEnum):
    """What the attention of a captured forward can compute.

    EVEN_DECODES  decodes of which none is much longer than the rest; a little faster than DECODES
    DECODES       any decodes
    NEW_PROMPTS   decodes, and prompts without computed tokens; faster than MIXED
    MIXED         decodes and any prompts
    DRAFTS        decodes, with drafts behind them or without
    SHARED_DECODES, SHARED_MIXED   as DECODES and MIXED; leading blocks that decodes share are read once
    """

    EVEN_DECODES = 0
    DECODES = 1
    NEW_PROMPTS = 2
    MIXED = 3
    DRAFTS = 4
    SHARED_DECODES = 5
    SHARED_MIXED = 6

    @property
    def takes_prompts(self) -> bool:
        """Whether sequences may be prompts of several rows."""
        return self in (GraphForm.NEW_PROMPTS, GraphForm.MIXED, GraphForm.SHARED_MIXED)

    @property
    def shares(self) -> bool:
        """Whether leading blocks that decodes share are read once."""
        return self in (GraphForm.SHARED_DECODES, GraphForm.SHARED_MIXED)


# Fewer decodes do not read enough to pay for a shared pass, and in steps of more rows prompts take most of the time.
# Each size between has a graph more.
LEAST_SHARED_DECODES = 8
MOST_SHARED_MIXED = 1024


class Attention(Backend):
    """Attention of all layers of a model: `plan` once a forward, then for each layer one of the forms that it has.

    `__call__` writes the new K and V to the cache and attends. Where `fused_store` is true, `store` and `attend` do so
    together, and `store` also norms and rotates. Where `latent` is true, `attend_latent` takes the place of both forms;
    where `fused_store` is true too, `store_latents` comes first, and writes the cache in its place.
    On GPUs all forms call `wait_previous_ubatch` between writing and reading the cache. A class with `graph` is a
    GraphAttention: its decodes can be captured.
    """

    # `captures_prompts` on the GPU of the caches; set by `bind`.
    mixed_graph: bool = False
    # Whether it has `store` and `attend`.
    fused_store: bool = False
    # Whether it serves latent attention (MLA), and no other.
    mla: bool = False
    # Whether it serves sliding windows, and sinks.
    windows: bool = False
    sinks: bool = False
    # Whether it serves caches in e4m3.
    fp8_cache: bool = False
    # Whether its decodes can read leading blocks that they share once, and from where that pays.
    cascades: bool = False
    sharing_cost = SharingCost(group_tokens=256, saved_tokens=4096)

    def __init__(self, specs: Sequence[AttentionSpec], block_size: int):
        """Take one spec a layer."""
        self.specs = tuple(specs)
        self.block_size = block_size
        self.kv_caches: Sequence[torch.Tensor] = ()
        # Set where decodes read leading blocks that they share once.
        self.shared_reads: SharedReads | None = None

    @classmethod
    def kept_bytes(cls, shape: BackendShape) -> int:
        """Return the bytes that one instance holds beside the caches, at least."""
        return 0

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        for spec in shape.attention_specs:
            if spec.mla is None and cls.mla:
                return "it computes latent attention (MLA) alone, the model caches heads of K and V"
            if spec.mla is not None and not cls.mla:
                return f"it has no latent attention (MLA), the model caches latents of {spec.mla.width} values"
            if spec.window is not None and not cls.windows:
                return f"it has no sliding window, the model has one of {spec.window} tokens"
            if spec.sinks and not cls.sinks:
                return "it has no attention sinks, the model has one for each head"
            if spec.fp8_cache and not cls.fp8_cache:
                return "it reads K and V in model.dtype alone, cache.dtype is fp8"
        return None

    @classmethod
    def cascade_refusal(cls, specs: Iterable[AttentionSpec]) -> str | None:
        """Return why decodes never read leading blocks that they share once, or None."""
        if not cls.cascades:
            return f"{cls.name} reads each sequence by itself"
        if all(spec.window is not None for spec in specs):
            return "no layer reads all tokens"
        return None

    @classmethod
    def captures_prompts(cls, *, hopper: bool) -> bool:
        """Return whether forwards with prompts can be captured too, on Hopper GPUs or on other GPUs."""
        return False

    @classmethod
    def compile_kernels(cls, dtype: torch.dtype, specs: Iterable[AttentionSpec]) -> None:
        """Compile the missing kernels for layers of these specs on this machine's GPU, before a rank needs them."""

    @classmethod
    def kv_layout(cls, spec: AttentionSpec) -> KVLayout:
        """Return what the backend keeps in the cache of a layer of this spec."""
        return layout_of(spec)

    @classmethod
    def kv_groups(cls, specs: Iterable[AttentionSpec]) -> tuple[KVGroup, ...]:
        """Group a model's layers by the layout of their caches; `specs` has one entry a layer."""
        specs = tuple(specs)
        return group_layers(
            (cls.kv_layout(spec) for spec in specs), (spec.window for spec in specs)
        )

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Use these caches from now on, one a layer, in the shape of `kv_layout`; none: release the old ones."""
        assert len(kv_caches) in (0, len(self.specs)), (len(kv_caches), len(self.specs))
        self.kv_caches = kv_caches

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare what all layers of this forward share."""

    def find_shared(self, batch: AttentionBatch) -> SharedPrefixes | None:
        """Return the leading blocks that decodes of the batch share, if reading them once pays."""
        if self.shared_reads is None:
            return None
        return find_shared(batch, self.block_size, self.sharing_cost)

    def take_shared(self, batch: AttentionBatch) -> SharedPrefixes | None:
        """Return the blocks of `find_shared`, and count them: the batch is planned with them."""
        shared = self.find_shared(batch)
        if shared is not None and self.shared_reads is not None:
            self.shared_reads.add(len(shared.rows), shared.saved_tokens)
        return shared

    def __call__(
        self,
        q_THd: torch.Tensor,
        k_Thd: torch.Tensor,
        v_Thd: torch.Tensor,
        layer: int,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write K and V to the cache, attend from each new token to its sequence; return o_THd in q's dtype.

        sinks   float32, where the layer's spec has sinks
        """
        raise NotImplementedError(f"{self.name} has no attention over heads of K and V")

    def store(
        self,
        qkv_TMd: torch.Tensor,
        layer: int,
        rotation_T1r: torch.Tensor | None = None,
        norm_Nd: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Norm and rotate q and k in place, then write K and V to the cache.

        qkv       [T, H + 2h, d], heads contiguous
        rotation  complex64 [T, 1, r/2], r <= d: turns the first r values of each head in interleaved pairs;
                  None: no rotation
        norm      [H + h, d], weights of a root-mean-square norm of each head, with `eps`; None: no norm
        """
        raise NotImplementedError(f"{self.name} has no fused store")

    def attend(
        self, qkv_TMd: torch.Tensor, layer: int, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend from each new token to its sequence, after `store` of the same qkv; return o_THd in its dtype."""
        raise NotImplementedError(f"{self.name} has no fused store")

    def store_latents(
        self,
        q_THd: torch.Tensor,
        latent_TW: torch.Tensor,
        layer: int,
        rotation_T1r: torch.Tensor,
        norm_C: torch.Tensor,
        eps: float,
    ) -> None:
        """Rotate q, norm and rotate the latents in place, then write the latents to the cache.

        q          [T, H, nope_dim + rope_dim], heads contiguous; the last part is rotated
        latent     [T, rank + rope_dim]: the first part is normed, the last rotated
        rotation   complex64 [T, 1, rope_dim / 2], of interleaved pairs
        norm       [rank], weights of a root-mean-square norm with `eps`
        """
        raise NotImplementedError(f"{self.name} has no fused store of latents")

    def attend_latent(
        self, q_THd: torch.Tensor, latent_TW: torch.Tensor, heads: LatentHeads, layer: int
    ) -> torch.Tensor:
        """Write latents to the cache, attend from each new token to its sequence; return o [T, H, value_dim].

        Where `fused_store` is true, `store_latents` has written the cache.

        q        [T, H, nope_dim + rope_dim], the last part rotated
        latent   [T, rank + rope_dim]: the normed latent, then the rotated key that all heads share
        heads    the product that makes each head's K and V of a latent
        """
        raise NotImplementedError(f"{self.name} has no latent attention")


class GraphAttention(Attention):
    """Attention that can be captured in CUDA graphs: `reserve_graphs` once, `plan_graph` before capture and replay."""

    graph = True
    # Whether it has `shorten`.
    shortens: bool = False

    @abstractmethod
    def reserve_graphs(self, max_rows: int, max_seqs: int, max_blocks: int) -> None:
        """Allocate for graphs of up to `max_rows` rows and `max_seqs` sequences of up to `max_blocks` blocks each.

        Call it before any capture. Graphs captured before the call must not be replayed after it.
        """

    @abstractmethod
    def forms(self, num_rows: int, *, prompts: bool) -> tuple[GraphForm, ...]:
        """Return the forms to capture for `num_rows` rows, of decodes alone or with prompts.

        The last form serves any batch.
        """

    def shared_forms(self, num_rows: int, *, prompts: bool) -> tuple[GraphForm, ...]:
        """Return the form of `forms` that reads shared blocks once, if there is one."""
        if self.shared_reads is None:
            return ()
        if prompts:
            return (GraphForm.SHARED_MIXED,) if num_rows <= MOST_SHARED_MIXED else ()
        return (GraphForm.SHARED_DECODES,) if num_rows >= LEAST_SHARED_DECODES else ()

    @abstractmethod
    def form(self, batch: AttentionBatch, num_rows: int, *, prompts: bool) -> GraphForm:
        """Return the fastest of `forms` that serves this batch."""

    @abstractmethod
    def plan_graph(self, batch: AttentionBatch, num_rows: int, form: GraphForm) -> None:
        """Plan for a graph of `num_rows` rows and this form; the batch may leave the last rows empty.

        Every address and launch shape equals that of the capture with the same `num_rows` and `form`. K and V of empty
        rows are not written; their output is finite, zero in the forms of decodes.
        """

    def drafts_form(self, num_rows: int) -> GraphForm:
        """Return the form of a graph of decodes with drafts, where `mixed_graph` is true."""
        return GraphForm.MIXED

    def follows(self, num_rows: int) -> bool:
        """Return whether `plan_graph` of the form of drafts takes `AttentionBatch.behind`."""
        return False

    def shorten(self, lens_R: torch.Tensor, slots_R: torch.Tensor) -> None:
        """Compute the decodes of the last `plan_graph` from here on with these lengths, which only the device has.

        Part of a captured forward, which may call it several times; the next `plan_graph` ends it. Layers have no
        windows.

        lens    int32 [R], R the rows of the plan: tokens of each row's sequence, at most as planned, and at least 1
                where a sequence was planned; 0 for empty rows
        slots   int64 [R]: where the new K and V go, -1: nowhere
        """
        raise NotImplementedError(f"{self.name} has the lengths of its plans")
