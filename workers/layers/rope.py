"""Rotary position embedding over interleaved pairs. Knows nothing of layers or attention.

T tokens, N heads, d head dim, P positions.

Checkpoints pair dim i of a head with dim i + d/2. The model stores q and k heads with each pair
side by side instead (the rows of their projections are permuted while loading; scores do not change
as long as q and k agree). A pair is then one complex number and the rotation one multiplication:
3 us a layer for 8 rows on CPU, against 10 us for the form that rolls halves.
"""

from types import SimpleNamespace

import torch

from workers.layers.norm import RMSNorm
from workers.models.specs import ModelConfig


def build_rope_table(config: ModelConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """Rotations of every position: complex64 [P, d/2], scaled by the type's attention factor."""
    inv_freq, factor = _inverse_frequencies(config)
    angles_Pd = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    return torch.complex(angles_Pd.cos() * factor, angles_Pd.sin() * factor).to(device)


def apply_rope(x_TNd: torch.Tensor, rotation_T1d: torch.Tensor) -> torch.Tensor:
    """Rotate float32 x [T, N, d] in place by complex64 rotation [T, 1, d/2]; returns x.

    x's last dim is contiguous and holds interleaved pairs.
    """
    x_TNd.view(torch.complex64).mul_(rotation_T1d)
    return x_TNd


def norm_and_rotate(norm: RMSNorm, x_TNd: torch.Tensor, rotation_T1d: torch.Tensor) -> torch.Tensor:
    """`apply_rope(norm(x))` in x's dtype; x may be overwritten. norm's weight is [N, d]."""
    if norm.native is not None:
        norm.native.norm_and_rotate(x_TNd, norm.weight, norm.floor, rotation_T1d)
        return x_TNd
    if norm.triton is not None:
        norm.triton.norm_rotate(x_TNd, norm.weight, norm.eps, rotation_T1d)
        return x_TNd
    return apply_rope(norm(x_TNd, torch.float32), rotation_T1d).to(x_TNd.dtype)


def _inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """float32 [d/2] on the CPU, and the factor on cos and sin."""
    rope, dim = config.attention.rope, config.attention.head_dim
    if rope.rope_type == "default":
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / (rope.rope_theta**exponents), 1.0
    # Imported for scaled types only: transformers costs memory that most models can spare.
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
        num_attention_heads=config.attention.num_heads,
        max_position_embeddings=config.max_position_embeddings,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[rope.rope_type](stand_in, torch.device("cpu"))
