"""MXFP4: values of 4 bits, two a byte, with a power of two as scale for each group of 32 values of a row.

N rows, G groups of a row, K = 32 G values of a row.
"""

import torch

GROUP = 32
EXPONENT_BIAS = 127
# The values of the 4 bits: a sign, two bits of exponent, one bit of fraction.
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., K] of packed values uint8 [..., G, 16] and exponents uint8 [..., G].

    The low bits of a byte hold the earlier value. Values and scales are exact in bfloat16 too.
    """
    table = torch.tensor([*POSITIVE, *(-value for value in POSITIVE)], device=blocks.device)
    pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    values = table[pairs.int()]
    return torch.ldexp(values, scales.int().sub_(EXPONENT_BIAS).unsqueeze(-1)).flatten(-2)


def quantise_mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed values and exponents of [..., K], each value rounded to the nearest; see `dequantise_mxfp4`."""
    groups = torch.unflatten(values.float(), -1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    # The largest value of a group comes to 4 or more, at most 8, of which 6 is the largest that 4 bits hold.
    exponents = torch.where(largest > 0, largest.log2().floor() - 2, 0).clamp_(-EXPONENT_BIAS, 127)
    table = torch.tensor(POSITIVE, device=values.device)
    scaled = torch.ldexp(groups, -exponents.int().unsqueeze(-1))
    nearest = (scaled.abs().unsqueeze(-1) - table).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    scales = (exponents + EXPONENT_BIAS).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales
