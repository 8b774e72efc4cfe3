"""The kernels of a step's slices: those of the whole step, but an exchange and an attention of its own for each."""

from dataclasses import replace

import torch

from kernels.select import KernelContext, Kernels, Selection, build


def build_slices(
    selection: Selection, context: KernelContext, whole: Kernels, num_slices: int
) -> list[Kernels]:
    """Kernels for `num_slices` slices of a step that `whole` was built for with the same two arguments.

    A slice has at most 1 / num_slices of `context.max_num_tokens`, rounded up. Bind the attentions to the caches.
    On GPUs all exchanges of slices share one stream, beside that of the compute.
    """
    stream = torch.cuda.Stream(context.device, -1) if context.device.type == "cuda" else None
    share = replace(context, max_num_tokens=-(-context.max_num_tokens // num_slices))
    slices = []
    for _ in range(num_slices):
        if selection.all2all.name == "shm":
            # Its slots, laid out for whole steps, serve any number of exchanges under way.
            own = build(selection, context)
            own = replace(own, all2all=whole.all2all)
        else:
            own = build(selection, share)
            own.all2all.stream = stream
        slices.append(replace(own, grouped_gemm=whole.grouped_gemm, expert_load=whole.expert_load))
    return slices
