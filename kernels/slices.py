"""The kernels of a step's slices: those of the whole step, but for each its own exchange, attention and streams."""

from dataclasses import replace

import torch

from kernels.all2all.side_stream import side_streams
from kernels.select import KernelContext, Kernels, Selection, build


def build_slices(
    selection: Selection, context: KernelContext, whole: Kernels, num_slices: int
) -> list[Kernels]:
    """Kernels for `num_slices` slices of a step that `whole` was built for with the same two arguments.

    A slice has at most 1 / num_slices of `context.max_num_tokens`, rounded up. Bind the attentions to the caches.
    On GPUs each has a stream for its exchanges, and all but the first have one to compute on in CUDA graphs, so that
    one's kernels begin where another's leave SMs idle.
    """
    share = replace(context, max_num_tokens=-(-context.max_num_tokens // num_slices))
    slices = []
    for _ in range(num_slices):
        if selection.all2all.name == "shm":
            # Its slots, laid out for whole steps, serve any number of exchanges under way.
            own = build(selection, context)
            own = replace(own, all2all=whole.all2all)
        else:
            own = build(selection, share)
        slices.append(replace(own, grouped_gemm=whole.grouped_gemm, expert_load=whole.expert_load))
    device = context.device
    if device.type != "cuda":
        return slices
    for own, stream in zip(slices, side_streams(device, num_slices), strict=True):
        own.all2all.stream = stream
    return [slices[0], *(replace(own, stream=torch.cuda.Stream(device)) for own in slices[1:])]
