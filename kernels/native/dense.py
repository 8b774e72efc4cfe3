"""Operators between attention and experts, in C, for float32 on CPU.

An operator of torch costs 1 to 10 us even with one row, and a norm is four operators. For the 8 rows of a decode step
a library's matrix product takes 20 to 40 us, the product here 8 to 15 us. Knows nothing of layers or requests.

R rows, K and N widths of a projection, E experts, k experts per row, H heads, d head dim.
"""

import functools

import torch

from kernels.native.library import load_or_none

# Above these limits a library's blocking and threads are faster.
MAX_LINEAR_ROWS = 16
MAX_LINEAR_WEIGHTS = 2**20


class DenseKernels:
    """Dense operators on CPU. Tensors are contiguous and float32 unless a docstring states otherwise."""

    def __init__(self) -> None:
        library = load_or_none()
        assert library is not None, "dense_kernels() checks this"
        self._linear, self._rms_norm = library.linear, library.rms_norm
        self._norm_and_rotate, self._route_top_k = library.norm_and_rotate, library.route_top_k

    def takes(self, x_RK: torch.Tensor, w_NK: torch.Tensor) -> bool:
        """Return whether `linear` is faster than torch for this product."""
        return (
            x_RK.shape[0] <= MAX_LINEAR_ROWS
            and w_NK.numel() <= MAX_LINEAR_WEIGHTS
            and x_RK.is_contiguous()
        )

    def linear(
        self, x_RK: torch.Tensor, w_NK: torch.Tensor, start: torch.Tensor | None
    ) -> torch.Tensor:
        """Return start + x @ w.T: [R, N]. start is [R, N], or [N] for all rows, or None."""
        num_rows, width = x_RK.shape
        y_RN = torch.empty(num_rows, w_NK.shape[0])
        self._linear(
            x_RK.data_ptr(),
            w_NK.data_ptr(),
            None if start is None else start.data_ptr(),
            start is not None and start.dim() == 1,
            num_rows,
            width,
            w_NK.shape[0],
            y_RN.data_ptr(),
        )
        return y_RN

    def rms_norm(self, x: torch.Tensor, weight_K: torch.Tensor, floor: float) -> torch.Tensor:
        """Return x / sqrt(sum(x^2) + floor) * weight over the last dim."""
        x = x.contiguous()
        out = torch.empty_like(x)
        width = weight_K.shape[0]
        self._rms_norm(
            x.data_ptr(), weight_K.data_ptr(), floor, x.numel() // width, width, out.data_ptr()
        )
        return out

    def norm_and_rotate(
        self,
        x_RHd: torch.Tensor,
        weight_Hd: torch.Tensor,
        floor: float,
        rotation_R1d: torch.Tensor,
    ) -> None:
        """Norm each head with its weight, then rotate its interleaved pairs; in place.

        x may be strided between rows; rotation complex64 [R, 1, d/2].
        """
        num_rows, num_heads, head_dim = x_RHd.shape
        assert x_RHd.stride()[1:] == (head_dim, 1) and rotation_R1d.is_contiguous()
        self._norm_and_rotate(
            x_RHd.data_ptr(),
            x_RHd.stride(0),
            weight_Hd.data_ptr(),
            floor,
            rotation_R1d.data_ptr(),
            num_rows,
            num_heads,
            head_dim,
        )

    def route_top_k(
        self,
        logits_RE: torch.Tensor,
        top_k: int,
        norm_topk_prob: bool,
        *,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return topk_idx int64 [R, k], best first, and their weights; see `kernels.triton.route.route_top_k`."""
        num_rows, num_experts = logits_RE.shape
        ids_Rk = torch.empty(num_rows, top_k, dtype=torch.int64)
        weights_Rk = torch.empty(num_rows, top_k)
        self._route_top_k(
            logits_RE.data_ptr(),
            num_rows,
            num_experts,
            top_k,
            norm_topk_prob,
            scoring_func == "sigmoid",
            routed_scaling_factor,
            ids_Rk.data_ptr(),
            weights_Rk.data_ptr(),
        )
        return ids_Rk, weights_Rk


@functools.cache
def dense_kernels(device_type: str, dtype: torch.dtype) -> DenseKernels | None:
    """Return the kernels where they can run; None: the caller uses torch's operators."""
    if device_type != "cpu" or dtype != torch.float32 or load_or_none() is None:
        return None
    return DenseKernels()
