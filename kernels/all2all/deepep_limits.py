"""The limits of DeepEP's kernels, and the bytes of their buffers. Imports nothing of DeepEP.

T tokens of a rank, H hidden, E experts of all ranks, K experts per token.
"""

from dataclasses import replace

import torch

from kernels.interface.backend import BackendShape

RANKS = (2, 4, 8)  # of a host: the kernels are compiled for these
RANKS_PER_HOST = 8  # where there are several: a rank's peer on another host has its number modulo 8
HOSTS = (2, 4, 8, 16, 18, 20)  # the kernels of the normal mode between hosts are compiled for these
MAX_SMS = 32  # of the normal mode; its queues are sized for this number
MAX_TOP_K, MAX_TOP_K_LOW_LATENCY = 32, 11
MAX_EXPERTS, MAX_LOCAL_EXPERTS = 1024, 128
# A warp sums a row 512 bytes at a time with all its lanes, and stages half of it in 8 KiB beside a barrier.
HIDDEN_MULTIPLE, MAX_HIDDEN = 256, 7936
LOW_LATENCY_HIDDEN = (2048, 2560, 4096, 5120, 6144, 7168, 8192)  # one instance of the kernels each
# Each expert has buffers for all tokens of all ranks: 2.3 GB for 128 experts, hidden 2048.
MAX_TOKENS_LOW_LATENCY = 1024
QUEUED_TOKENS = 256  # per channel (two SMs) and rank
QUEUED_TOKENS_HOSTS, QUEUED_TOKENS_RDMA = (
    288,
    128,
)  # the same between hosts: of a GPU of the host, and of a host
MIN_SMS_HOSTS = 4  # two channels


def one_host_unsupported_reason(shape: BackendShape) -> str | None:
    """Return why the normal mode cannot carry `shape` within a host, or None."""
    if shape.num_ranks not in RANKS:
        return f"DeepEP serves 2, 4 or 8 ranks of a host, cluster.ranks is {shape.num_ranks}"
    return _unsupported_reason(shape) or normal_unsupported_reason(shape)


def hosts_unsupported_reason(shape: BackendShape) -> str | None:
    """Return why both modes in one buffer cannot carry `shape` between hosts, or None."""
    nodes = shape.num_nodes
    if nodes == 1:
        return "all ranks share a host, which deepep serves"
    if nodes not in HOSTS or shape.num_ranks != nodes * RANKS_PER_HOST:
        return (
            f"between hosts DeepEP's normal mode serves {RANKS_PER_HOST} ranks on each of "
            f"{', '.join(map(str, HOSTS))} hosts, cluster.nodes is {nodes} and cluster.ranks {shape.num_ranks}"
        )
    decodes = replace(shape, max_num_tokens=decode_rows(shape))
    return (
        _unsupported_reason(shape)
        or normal_unsupported_reason(shape)
        or low_latency_unsupported_reason(decodes)
    )


def decode_rows(shape: BackendShape) -> int:
    """Return the rows up to which a step travels in low-latency mode between hosts, where both modes serve."""
    decodes = shape.max_num_tokens if shape.max_num_seqs is None else shape.max_num_seqs
    return low_latency_rows(min(decodes, shape.max_num_tokens, MAX_TOKENS_LOW_LATENCY))


def _unsupported_reason(shape: BackendShape) -> str | None:
    """Return why neither mode of DeepEP can carry `shape`, or None."""
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
    """Return why the low-latency mode cannot carry `shape`, or None."""
    many = shape.num_nodes > 1 and shape.num_ranks % RANKS_PER_HOST == 0
    if shape.num_ranks not in RANKS and not many:
        more = f", or a multiple of {RANKS_PER_HOST} of several hosts" * (shape.num_nodes > 1)
        return f"DeepEP serves 2, 4 or 8 ranks of a host{more}, cluster.ranks is {shape.num_ranks}"
    if (reason := _unsupported_reason(shape)) is not None:
        return reason
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


def _row_bytes(hidden_size: int) -> int:
    """Return the approximate bytes of a row in the queues: values, with 128 experts and scales each."""
    return 2 * hidden_size + 128 * (8 + 4 + 4) + 8


def normal_buffer_bytes(hidden_size: int, num_ranks: int) -> int:
    """Return the approximate bytes of a rank's queues in normal mode within a host."""
    return MAX_SMS // 2 * num_ranks * QUEUED_TOKENS * _row_bytes(hidden_size)


def hosts_buffer_bytes(shape: BackendShape) -> int:
    """Return the approximate bytes of a rank's buffer for both modes between hosts.

    Queues of the GPUs of its host, and one memory for the queues of other hosts and for the low-latency mode.
    """
    hidden, channels = shape.hidden_size, MAX_SMS // 2
    nvlink = channels * RANKS_PER_HOST * QUEUED_TOKENS_HOSTS * _row_bytes(hidden)
    rdma = channels * shape.num_nodes * QUEUED_TOKENS_RDMA * 2 * _row_bytes(hidden)
    decodes = low_latency_buffer_bytes(hidden, shape.num_experts, decode_rows(shape))
    return nvlink + max(rdma, decodes)


def low_latency_rows(max_num_tokens: int) -> int:
    """Return the rows of each rank in an expert's array: a multiple of four, which TMA needs."""
    return -(-max(1, max_num_tokens) // 4) * 4


def low_latency_buffer_bytes(hidden_size: int, num_experts: int, max_num_tokens: int) -> int:
    """Return the approximate bytes of a rank's two send and two receive buffers."""
    row = 2 * hidden_size + 4 * (hidden_size // 128)
    return 4 * num_experts * low_latency_rows(max_num_tokens) * row
