"""What graphs with flashinfer's attention run: its wrappers, with plans at fixed addresses.

T rows, H query heads, d head dim.
"""

from typing import Any

import torch

from kernels.attention.flashinfer_plans import Caches, NewRows


class PlannedDecodes:
    """One decode a row."""

    def __init__(self, num_rows: int, wrapper: Any):
        self._num_rows, self._wrapper = num_rows, wrapper

    def run(self, new: NewRows, caches: Caches) -> torch.Tensor:
        q_THd, *_ = new
        assert len(q_THd) == self._num_rows, (len(q_THd), self._num_rows)
        out_THd = torch.empty(q_THd.shape, dtype=q_THd.dtype, device=q_THd.device)
        self._wrapper.run(q_THd, caches, out=out_THd)
        return out_THd


class PlannedMixed:
    """Decodes in the first rows, prompts behind them; `out` is kept, and padding rows of it are zero."""

    def __init__(
        self,
        num_decode_rows: int,
        decodes: Any,
        prompts: Any,
        out_THd: torch.Tensor,
        *,
        all_new: bool,
    ):
        self._num_decode_rows, self._all_new = num_decode_rows, all_new
        self._decodes, self._prompts, self._out_THd = decodes, prompts, out_THd

    def run(self, new: NewRows, caches: Caches) -> torch.Tensor:
        q_THd, out_THd, rows = new[0], self._out_THd, self._num_decode_rows
        assert len(q_THd) == len(out_THd), (len(q_THd), len(out_THd))
        self._decodes.run(q_THd[:rows], caches, out=out_THd[:rows])
        if self._all_new:
            self._prompts.run(*new, out=out_THd)
        else:
            self._prompts.run(q_THd, caches, out=out_THd)
        return out_THd


class PlannedDrafts:
    """Decodes with drafts; `out` is kept, and padding rows of it are zero."""

    def __init__(self, kernel: Any, out_THd: torch.Tensor):
        self._kernel, self._out_THd = kernel, out_THd

    def run(self, new: NewRows, caches: Caches) -> torch.Tensor:
        q_THd = new[0]
        assert len(q_THd) == len(self._out_THd), (len(q_THd), len(self._out_THd))
        self._kernel.run(q_THd, caches, out=self._out_THd)
        return self._out_THd
