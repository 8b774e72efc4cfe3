"""How much memory the chosen backends of one rank take, by the arithmetic of their classes. Builds nothing."""

from dataclasses import dataclass, replace

from kernels.backends.select import Selection
from kernels.interface.backend import BackendShape


@dataclass(frozen=True)
class BackendMemory:
    """Bytes of one rank.

    kept      what the backends of whole steps hold from their start to their end
    ubatches  the same of the backends of all ubatches
    step      of one full step, cut into ubatches or not: rows, sums and the experts' activations, or what a layer of
              linear attention allocates, whichever is more
    """

    kept: int
    ubatches: int
    step: int

    @property
    def total(self) -> int:
        return self.kept + self.ubatches + self.step


def backend_memory(
    selection: Selection, shape: BackendShape, *, num_ubatches: int = 0
) -> BackendMemory:
    """Return the bytes that steps of up to `shape.max_num_tokens` tokens of each rank take.

    num_ubatches   ubatches that have backends of their own; 0 where no step is ever cut
    """
    shape = replace(shape, fp8_rows=selection.fp8_rows)
    all2all, gemm = selection.all2all_class, selection.grouped_gemm_class
    workspace = selection.attention_class.kept_bytes(shape)
    ubatches = num_ubatches * workspace
    if num_ubatches and not all2all.ubatch_shareable:
        share = replace(shape, max_num_tokens=-(-shape.max_num_tokens // num_ubatches))
        ubatches += num_ubatches * all2all.kept_bytes(share)
    step = all2all.step_bytes(shape) + gemm.step_bytes(shape, all2all.expert_rows(shape))
    linear = selection.linear_attention_class
    if linear is not None:  # a layer's linear attention has ended before its experts begin
        step = max(step, linear.step_bytes(shape))
    return BackendMemory(workspace + all2all.kept_bytes(shape), ubatches, step)
