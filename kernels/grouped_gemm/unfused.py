"""The experts' MLP with gate and up in memory, where the products of LoRA adapters are added. No kernel of its own.

R rows in expert order, D hidden, I expert width.
"""

from collections.abc import Callable

import torch

from kernels.activation import Activation
from kernels.all2all.base import ExpertInput
from kernels.gated_activation import gated_activation
from kernels.lora.experts import ExpertAdapters
from kernels.pending import wait_previous_ubatch

Step = Callable[[torch.Tensor], torch.Tensor]


def unfused_mlp(
    expert_input: ExpertInput,
    adapters: ExpertAdapters | None,
    *,
    up: Callable[[], torch.Tensor],
    activate: Step,
    down: Step,
) -> torch.Tensor:
    """Return y_RD = down(activate(up())), with the adapters' products added behind `up` and behind `down`.

    adapters   None: no row has one
    up         to gate and up [R, 2I] of the rows of `expert_input`
    activate   [R, 2I] to [R, I]
    down       [R, I] to [R, D]
    All are in expert order and in the model's dtype; unused rows are undefined before and after each step.
    """
    h_R2I = up()
    if adapters is not None:
        rows = expert_input.adapter_rows()
        adapters.up.add_to(h_R2I, expert_input.wide_rows(), rows, gathered=True)
    h_RI = activate(h_R2I)
    del h_R2I  # the output of `down` takes its memory
    wait_previous_ubatch()
    y_RD = down(h_RI)
    if adapters is not None:
        adapters.down.add_to(y_RD, h_RI, rows, gathered=False)
    return y_RD


def activate_used(
    h_R2I: torch.Tensor, ends_e: torch.Tensor, activation: Activation
) -> torch.Tensor:
    """Return activation(gate) * up; on a GPU of the rows before the last end. Rows between experts are computed too."""
    if not h_R2I.is_cuda:
        return gated_activation(h_R2I, activation)
    from kernels.triton import gated_activation as on_gpu

    return on_gpu.gated_activation(h_R2I.unsqueeze(0), ends_e[-1:], activation).squeeze(0)
