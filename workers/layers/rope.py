"""Rotary position embedding over interleaved pairs. Knows nothing of layers or attention.

T tokens, N heads, d head dim, r rotated values of a head, P positions.

Most checkpoints pair value i of a head with value i + d/2. The model stores the two values of a pair of q and k side
by side instead: loading permutes the rows of their projections, and scores stay equal because q and k have the same
order. A pair is then one complex number and the rotation one multiplication, 3 us a layer for 8 rows on CPU instead
of 10 us for the form that rolls halves.
"""

from types import SimpleNamespace

import torch

from kernels.fused import fused_kernels
from workers.layers.norm import RMSNorm
from workers.specs.model import GqaSpec, MlaSpec, ModelConfig


def build_rope_table(config: ModelConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """Return the rotations of every position: complex64 [P, r/2], scaled by the type's attention factor.

    r is 0 for a model that rotates nothing.
    """
    if config.attention is None:
        return torch.empty(num_positions, 0, dtype=torch.complex64, device=device)
    inv_freq, factor = _inverse_frequencies(config, config.attention)
    angles_Pd = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    return torch.complex(angles_Pd.cos() * factor, angles_Pd.sin() * factor).to(device)


def rope_axes(config: ModelConfig, device: torch.device) -> torch.Tensor | None:
    """Return by which of its token's three positions each pair turns: int64 [r/2]; None: a token has one position."""
    axes = [] if config.attention is None else config.attention.rope.axes
    return torch.tensor(axes, device=device) if axes else None


def apply_rope(x_TNd: torch.Tensor, rotation_T1r: torch.Tensor) -> torch.Tensor:
    """Rotate the first r values of each head of float32 x in place by complex64 [T, 1, r/2]; return x.

    x's last dim is contiguous and holds interleaved pairs.
    """
    rotated = (
        x_TNd if _rotates_whole(x_TNd, rotation_T1r) else x_TNd[..., : 2 * rotation_T1r.shape[-1]]
    )
    rotated.view(torch.complex64).mul_(rotation_T1r)
    return x_TNd


def norm_and_rotate(
    norm: RMSNorm | None, x_TNd: torch.Tensor, rotation_T1r: torch.Tensor | None
) -> torch.Tensor:
    """Norm and rotate each head; return the result in x's dtype. x may be overwritten.

    norm      with a weight [N, d]; None: no norm
    rotation  complex64 [T, 1, r/2], r <= d: turns the first r values of each head; None: no rotation
    """
    native = None if norm is None else norm.native
    if native is None and (fused := fused_kernels(x_TNd.device.type)) is not None:
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        fused.norm_rotate(x_TNd, weight, eps, rotation_T1r)
        return x_TNd
    if rotation_T1r is None:
        return x_TNd if norm is None else norm(x_TNd)
    if norm is not None and native is not None and _rotates_whole(x_TNd, rotation_T1r):
        native.norm_and_rotate(x_TNd, norm.weight, norm.floor, rotation_T1r)
        return x_TNd
    x_f32 = x_TNd.float() if norm is None else norm(x_TNd, torch.float32)
    return apply_rope(x_f32, rotation_T1r).to(x_TNd.dtype)


def _rotates_whole(x_TNd: torch.Tensor, rotation_T1r: torch.Tensor) -> bool:
    """Return whether the rotation covers whole heads."""
    return 2 * rotation_T1r.shape[-1] == x_TNd.shape[-1]


def _inverse_frequencies(
    config: ModelConfig, attention: GqaSpec | MlaSpec
) -> tuple[torch.Tensor, float]:
    """Return float32 [r/2] on the CPU, and the factor on cos and sin."""
    rope, dim = attention.rope, attention.rope_dim
    if rope.rope_type == "default":
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / (rope.rope_theta**exponents), 1.0
    # Imported for scaled types only, because transformers takes memory that most models do not need.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # The functions read these few attributes of a transformers config and nothing else.
    stand_in = SimpleNamespace(
        rope_parameters={
            "rope_type": rope.rope_type,
            "rope_theta": rope.rope_theta,
            **rope.scaling,
        },
        head_dim=dim,
        hidden_size=config.hidden_size,
        num_attention_heads=attention.num_heads,
        max_position_embeddings=config.max_position_embeddings,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[rope.rope_type](stand_in, torch.device("cpu"))
