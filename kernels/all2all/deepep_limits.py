"""The limits of DeepEP's kernels, and the bytes of their buffers. Imports nothing of DeepEP.

T tokens of a rank, H hidden, E experts of all ranks, K experts per token.
"""

import torch

from kernels.interface.backend import BackendShape

RANKS = (2, 4, 8)  # the kernels are compiled for these
MAX_SMS = 32  # of the normal mode; its queues are sized for this number
MAX_TOP_K, MAX_TOP_K_LOW_LATENCY = 32, 11
MAX_EXPERTS, MAX_LOCAL_EXPERTS = 1024, 128
# A warp sums a row 512 bytes at a time with all its lanes, and stages half of it in 8 KiB beside a barrier.
HIDDEN_MULTIPLE, MAX_HIDDEN = 256, 7936
LOW_LATENCY_HIDDEN = (2048, 2560, 4096, 5120, 6144, 7168, 8192)  # one instance of the kernels each
# Each expert has buffers for all tokens of all ranks: 2.3 GB for 128 experts, hidden 2048.
MAX_TOKENS_LOW_LATENCY = 1024
QUEUED_TOKENS = 256  # per channel (two SMs) and rank


def unsupported_reason(shape: BackendShape) -> str | None:
    """Return why neither mode of DeepEP can carry `shape`, or None."""
    if shape.num_ranks not in RANKS:
        return f"DeepEP serves 2, 4 or 8 ranks of a host, cluster.ranks is {shape.num_ranks}"
    if shape.dtype != torch.bfloat16:
        return f"DeepEP sums bfloat16 only, model.dtype is {shape.dtype_name}"
    if shape.num_experts % shape.num_ranks:
        return (
            f"DeepEP needs an equal number of experts on each rank, {shape.num_experts} do not divide by "
            f"cluster.ranks, which is {shape.num_ranks}"
        )
    return None


def normal_unsupported_reason(shape: BackendShape) -> str | None:
    """Return why the normal mode cannot carry `shape`, which DeepEP can, or None."""
    hidden, local = shape.hidden_size, shape.num_experts // shape.num_ranks
    if hidden % HIDDEN_MULTIPLE or hidden > MAX_HIDDEN:
        return (
            f"it needs a hidden size of a multiple of {HIDDEN_MULTIPLE} up to {MAX_HIDDEN}, "
            f"the model's is {hidden}"
        )
    if shape.num_experts > MAX_EXPERTS or local > MAX_LOCAL_EXPERTS:
        return (
            f"it takes up to {MAX_EXPERTS} experts, {MAX_LOCAL_EXPERTS} of them on a rank; "
            f"there are {shape.num_experts} and {local}"
        )
    return _too_many_experts_per_token(shape, MAX_TOP_K)


def low_latency_unsupported_reason(shape: BackendShape) -> str | None:
    """Return why the low-latency mode cannot carry `shape`, which DeepEP can, or None."""
    if shape.hidden_size not in LOW_LATENCY_HIDDEN:
        return (
            f"it is compiled for a hidden size of {', '.join(map(str, LOW_LATENCY_HIDDEN))}, "
            f"the model's is {shape.hidden_size}"
        )
    if shape.max_num_tokens > MAX_TOKENS_LOW_LATENCY:
        return (
            f"it has buffers for every token of a step at each expert, {MAX_TOKENS_LOW_LATENCY} at most, and "
            f"scheduler.max_num_batched_tokens is {shape.max_num_tokens}; set that to "
            f"{MAX_TOKENS_LOW_LATENCY} or less"
        )
    return _too_many_experts_per_token(shape, MAX_TOP_K_LOW_LATENCY)


def _too_many_experts_per_token(shape: BackendShape, most: int) -> str | None:
    if shape.top_k > most:
        return f"a token may have {most} experts, the model's have {shape.top_k}"
    return None


def normal_buffer_bytes(hidden_size: int, num_ranks: int) -> int:
    """Return the approximate bytes of a rank's queues in normal mode: rows, with 128 experts and scales each."""
    row = 2 * hidden_size + 128 * (8 + 4 + 4) + 8
    return MAX_SMS // 2 * num_ranks * QUEUED_TOKENS * row


def low_latency_rows(max_num_tokens: int) -> int:
    """Return the rows of each rank in an expert's array: a multiple of four, which TMA needs."""
    return -(-max(1, max_num_tokens) // 4) * 4


def low_latency_buffer_bytes(hidden_size: int, num_experts: int, max_num_tokens: int) -> int:
    """Return the approximate bytes of a rank's two send and two receive buffers."""
    row = 2 * hidden_size + 4 * (hidden_size // 128)
    return 4 * num_experts * low_latency_rows(max_num_tokens) * row
