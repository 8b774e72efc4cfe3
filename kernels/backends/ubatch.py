"""The backends of a step's ubatches: those of the whole step, with own all-to-all, attentions and streams."""

from dataclasses import replace

import torch

from kernels.all2all.comm_stream import comm_streams
from kernels.backends.select import (
    Backends,
    Selection,
    build,
    build_attention,
    build_linear_attention,
)
from kernels.interface.context import BackendContext


def build_ubatch_backends(
    selection: Selection, context: BackendContext, whole: Backends, num_ubatches: int
) -> list[Backends]:
    """Return backends for `num_ubatches` ubatches; `whole` are the backends of whole steps. Collective.

    A ubatch has at most 1 / num_ubatches of the context's max_num_tokens, rounded up. The caller binds each attention
    to the caches and states. On GPUs each ubatch has a stream for its all-to-all. All but the first have a stream to
    compute on in CUDA graphs, so that kernels of one ubatch use the SMs that kernels of another leave idle.
    """
    share = context.with_max_num_tokens(-(-context.shape.max_num_tokens // num_ubatches))
    ubatches = []
    for _ in range(num_ubatches):
        if selection.all2all_class.ubatch_shareable:
            own = replace(
                whole,
                attention=build_attention(selection, context),
                linear_attention=build_linear_attention(selection, context),
            )
        else:
            own = build(selection, share)
        ubatches.append(
            replace(own, grouped_gemm=whole.grouped_gemm, expert_load=whole.expert_load)
        )
    device = context.device
    if device.type != "cuda":
        return ubatches
    for own, stream in zip(ubatches, comm_streams(device, num_ubatches), strict=True):
        own.all2all.stream = stream
    return [ubatches[0], *(replace(own, stream=_stream(device)) for own in ubatches[1:])]


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
