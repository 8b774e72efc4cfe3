"""KV outside the devices: the tokens that the host tier holds, the buffers that it needs, and whether NIXL is there."""

from collections.abc import Iterator
from dataclasses import dataclass

from kernels.backends.select import Selection
from kernels.interface.backend import BackendShape
from kernels.interface.kv_layout import kv_block_bytes
from workers.config import RankConfig
from workers.kv_cache.demand import KVDemand
from workers.kv_transfer.nixl_memory import VERSION, nixl_unavailable
from workers.kv_transfer.row_copies import BUFFER_BYTES
from workers.models.draft_config import load_draft_config
from workers.rank.device_memory import size
from workers.specs.model import ModelConfig

GIB = 2**30


@dataclass(frozen=True)
class SessionBytes:
    """Bytes of the KV of a session outside the device.

    block    of a block of all layers, those of a draft model among them
    draft_block    of a block of the layers of a draft model
    state    of the states of linear attention at the end of a prompt, the only ones that its next turn needs
    window_blocks  blocks of its last window, for layers with one
    """

    block: int
    draft_block: int
    state: int
    window_blocks: int
    block_size: int

    @classmethod
    def of(
        cls, config: RankConfig, model: ModelConfig, selection: Selection, shape: BackendShape
    ) -> "SessionBytes":
        """Return the bytes for a model in the layouts of its backends."""
        groups = selection.attention_class.kv_groups(shape.attention_specs)
        draft = load_draft_config(config.speculation, config.model, model)
        drafting = () if draft is None else draft.kv_groups(config.cache)
        linear, block_size = selection.linear_attention_class, config.cache.block_size
        of_draft = kv_block_bytes(drafting, block_size, shape.dtype.itemsize)
        return cls(
            kv_block_bytes(groups, block_size, shape.dtype.itemsize) + of_draft,
            of_draft,
            0 if linear is None else linear.slot_bytes(shape.linear_specs, shape.dtype),
            KVDemand(block_size, model.window).window_blocks,
            block_size,
        )

    def total(self, num_tokens: int) -> int:
        """Return the bytes of a session of so many tokens."""
        blocks = -(-num_tokens // self.block_size)
        return (blocks + min(blocks, self.window_blocks)) * self.block + self.state


def tier_lines(config: RankConfig, session: SessionBytes) -> dict[str, str]:
    """Return what the tiers outside the device hold, and the way to other nodes, by setting; nothing that is off."""
    cache, lines = config.cache, dict[str, str]()
    tiers = {"host_memory_gib": cache.host_memory_gib}
    if cache.disk_path is not None:
        tiers["disk_gib"] = cache.disk_gib
    longest = min(cache.expected_tokens, int(config.model.max_model_len))
    for key, gib in tiers.items():
        if gib:
            num = int(gib * GIB / max(1, session.total(longest)))
            lines[key] = (
                f"{gib:g} GiB a node hold {num * longest:,} tokens: {num:,} sessions of {longest:,} tokens"
            )
    if cache.transfer == "nixl":
        lines["transfer"] = f"nixl {'cannot run here' if nixl_unavailable() else VERSION}"
    return lines


def transfer_unavailable(config: RankConfig) -> Iterator[str]:
    """Yield why ranks cannot run on this machine for want of what `cache.transfer` needs."""
    if config.cache.transfer == "nixl" and (unfit := nixl_unavailable()) is not None:
        yield f"cache.transfer is nixl, but {unfit} on every node; ranks do not start without it"


def buffer_bytes(config: RankConfig, block_bytes: int, state_bytes: int) -> int:
    """Return the bytes of a GPU's buffers for copies to and from host memory."""
    if config.device != "cuda" or not config.cache.host_memory_gib:
        return 0
    return 2 * max(BUFFER_BYTES, block_bytes, state_bytes)


def too_little_memory(
    config: RankConfig, session: SessionBytes, available: int | None
) -> Iterator[str]:
    """Yield why the host tier is too large for this machine, or too small for a session."""
    cache, longest = config.cache, int(config.model.max_model_len)
    num_bytes = int(cache.host_memory_gib * GIB)
    if num_bytes and available is not None and num_bytes > available:
        yield (
            f"cache.host_memory_gib {cache.host_memory_gib:g} is more than the {size(available)} that this machine has "
            "available; lower cache.host_memory_gib"
        )
    if num_bytes and num_bytes < session.total(min(cache.expected_tokens, longest)):
        yield (
            f"cache.host_memory_gib {cache.host_memory_gib:g} holds less than one session of "
            f"{min(cache.expected_tokens, longest)} tokens (cache.expected_tokens); raise cache.host_memory_gib"
        )
