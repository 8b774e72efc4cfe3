"""The kernels of a step's slices: those of the whole step, but for each its own exchange, attention and streams."""

from dataclasses import replace

import torch

from kernels.all2all.comm_stream import comm_streams
from kernels.backends.context import BackendContext
from kernels.backends.select import Backends, Selection, build, build_attention


def build_ubatch_backends(
    selection: Selection, context: BackendContext, whole: Backends, num_ubatches: int
) -> list[Backends]:
    """Backends for `num_ubatches` slices of a step that `whole` was built for with the same two arguments.

    A slice has at most 1 / num_ubatches of the context's max_num_tokens, rounded up. Bind the attentions to the caches.
    On GPUs each has a stream for its exchanges, and all but the first have one to compute on in CUDA graphs, so that
    one's kernels begin where another's leave SMs idle.
    """
    share = context.with_max_num_tokens(-(-context.shape.max_num_tokens // num_ubatches))
    slices = []
    for _ in range(num_ubatches):
        if selection.all2all_class.ubatch_shareable:
            own = replace(whole, attention=build_attention(selection, context))
        else:
            own = build(selection, share)
        slices.append(replace(own, grouped_gemm=whole.grouped_gemm, expert_load=whole.expert_load))
    device = context.device
    if device.type != "cuda":
        return slices
    for own, stream in zip(slices, comm_streams(device, num_ubatches), strict=True):
        own.all2all.stream = stream
    return [slices[0], *(replace(own, stream=torch.cuda.Stream(device)) for own in slices[1:])]
