"""Places of patches in their images: positions resampled to the grid of an image, and rotations. Knows no weights.

Patches of an image come frame by frame, in each frame by blocks of merge x merge neighbours, row by row.
h rows and w columns of patches, S side of the table of positions, D hidden, r rotated values of a head.
"""

from typing import Literal

import torch

Resampling = Literal["linear", "cubic"]
_CUBIC = -0.75  # the parameter of the cubic kernel (Keys, 1981), as torch has it


def by_blocks(x_hwD: torch.Tensor, merge: int) -> torch.Tensor:
    """Return values of patches, row by row, in the order of blocks: [h * w, ...]."""
    height, width, *rest = x_hwD.shape
    blocks = x_hwD.reshape(height // merge, merge, width // merge, merge, *rest)
    return blocks.transpose(1, 2).flatten(0, 3)


def axis_weights(size: int, side: int, resampling: Resampling) -> torch.Tensor:
    """Return float32 [size, S]: the weights of the entries of an axis of the table for each of `size` positions.

    linear   the first and the last position are those of the table (`align_corners` of `interpolate`)
    cubic    positions are centres of equal parts of the axis; entries beyond the edge repeat it
    """
    index = torch.arange(size, dtype=torch.float32)
    if resampling == "linear":
        source, first, count = index * (side - 1) / max(1, size - 1), 0, 2
    else:
        source, first, count = (index + 0.5) * side / size - 0.5, -1, 4
    floor = source.floor()
    weights = torch.zeros(size, side)
    for tap in range(first, first + count):
        distance = (source - floor - tap).abs()
        if resampling == "linear":
            share = (1 - distance).clamp(min=0)
        else:
            near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
            far = ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC
            share = torch.where(distance <= 1, near, far)
        entry = (floor.long() + tap).clamp(0, side - 1)
        weights.scatter_add_(1, entry[:, None], share[:, None])
    return weights


def resample(
    table_GD: torch.Tensor, height: int, width: int, merge: int, resampling: Resampling
) -> torch.Tensor:
    """Return the positions of the patches of one frame, [h * w, D] in the table's dtype, by blocks.

    table   [S * S, D], row by row; the arithmetic is float32
    """
    side = round(table_GD.shape[0] ** 0.5)
    rows_hS, columns_wS = (
        axis_weights(size, side, resampling).to(table_GD.device) for size in (height, width)
    )
    table_SX = table_GD.float().view(side, -1)
    of_rows_hSD = (rows_hS @ table_SX).view(height, side, -1)
    return by_blocks(columns_wS @ of_rows_hSD, merge).to(table_GD.dtype)


def rotations(
    height: int, width: int, merge: int, head_dim: int, theta: float, device: torch.device
) -> torch.Tensor:
    """Return the rotations of the patches of one frame, complex64 [h * w, 1, r/2], by blocks.

    The first half of the pairs turns by the row of a patch, the second half by its column.
    """
    half = head_dim // 2
    inv_freq = 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    rows_hr = (torch.arange(height, dtype=torch.float32)[:, None] * inv_freq).to(device)
    columns_wr = (torch.arange(width, dtype=torch.float32)[:, None] * inv_freq).to(device)
    shape = height, width, len(inv_freq)
    angles = torch.cat((rows_hr[:, None].expand(shape), columns_wr[None].expand(shape)), dim=-1)
    return by_blocks(torch.polar(torch.ones_like(angles), angles), merge)[:, None]
