"""flashinfer's kernel for sequences of several rows in CUDA graphs, planned without the Python of its own plan.

That plan takes 0.2 ms: it copies again what the caller has copied, copies lengths that no kernel of ours reads, and
takes maxima that only other backends use. A step with drafts makes two plans, one of them before its forward.
"""

from typing import Any

import torch

from kernels.attention.flashinfer_decodes import Pages, Shape


class GraphExtends:
    """A BatchPrefillWithPagedKVCacheWrapper with use_cuda_graph; the caller fills its buffers before each plan.

    causal   a row sees the keys up to its own; False: all keys of its sequence
    """

    def __init__(self, wrapper: Any, shape: Shape, *, causal: bool):
        self.wrapper = wrapper
        self._shape, self._causal = shape, causal
        self._planned = False

    def plan(self, pages: Pages, chunk: int | None = None) -> None:
        """Plan the sequences of `pages`, which were shipped to the wrapper's buffers with their query starts.

        chunk   as `chunk_pages` returns it
        """
        if self._planned:
            self._plan_alone(pages, -1 if chunk is None else chunk)
            return
        # The wrapper's own plan, once: it also loads the kernel's module.
        self.wrapper.plan(
            pages.query_starts_cpu,
            pages.starts_cpu,
            pages.pages[: pages.total],
            pages.last_lens_cpu,
            *self._shape.arguments,
            causal=self._causal,
            fixed_split_size=chunk,
            **self._shape.types,
        )
        assert hasattr(self.wrapper, "_plan_info"), "flashinfer has changed"
        self._planned = True

    def _plan_alone(self, pages: Pages, chunk: int) -> None:
        """Compute the schedule and start its copy to the device, as the last lines of the wrapper's own plan."""
        wrapper, spec = self.wrapper, self._shape.spec
        of_fa2 = (
            (chunk, False, 0) if wrapper._backend == "fa2" else ()
        )  # cuts, and no SMs of others
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            pages.query_starts_cpu,
            pages.starts_cpu,
            pages.lens_cpu,
            wrapper._max_total_num_rows,
            pages.num_rows,
            spec.num_heads,
            spec.num_kv_heads,
            self._shape.block_size,
            True,  # a CUDA graph
            spec.head_dim,
            spec.head_dim,
            self._causal,
            -1,  # no window
            *of_fa2,
        )

    def run(self, q_THd: torch.Tensor, caches: Any, *, out: torch.Tensor) -> None:
        """Write the attention of the planned rows to `out`."""
        self.wrapper.run(q_THd, caches, out=out)
