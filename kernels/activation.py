"""The names of the gated MLP's activations. Imports no torch; knows nothing of config.json's names."""

from typing import Literal, get_args

# gelu is exact, gelu_tanh its approximation by tanh. clamped_swiglu is gate * sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
# with gate at most SWIGLU_LIMIT and up within it on both sides. cpu.c numbers the activations in this order.
Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
