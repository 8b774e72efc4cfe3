"""The names of the gated MLP's activations. Imports no torch; knows nothing of config.json's names."""

from typing import Literal, get_args

# gelu is exact, gelu_tanh its approximation by tanh. cpu.c numbers the activations in this order.
Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
