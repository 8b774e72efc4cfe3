"""The declarations of every backend: where it runs, what it refuses and when `auto` takes it.

Each seam (all-to-all, grouped GEMM, attention, linear attention) adds its own conditions and costs. Knows nothing of
particular backends.
"""

from abc import ABC
from dataclasses import dataclass

import torch

from kernels.four_bit_format import FourBitFormat
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.linear_attention_spec import LinearAttentionSpec


@dataclass(frozen=True, kw_only=True)
class BackendShape:
    """The model, the ranks and the steps that backends are chosen for and sized by.

    device           device type, "cpu" or "cuda"
    dtype            of the hidden states, and of the weights unless a grouped GEMM holds them in FP8 or in four bits
    num_ranks        ranks of the group, spread over num_nodes hosts
    hidden_size      D; moe_intermediate_size is the experts' I
    num_experts      slots of all ranks for the model's experts and their copies, top_k of them for a token
    max_num_tokens   most rows of one rank in a step
    max_num_seqs     most sequences of one rank in a step; None: as many as rows
    attention_specs  one entry a layer; empty where every attention serves the model
    linear_specs     one entry a layer of linear attention; empty where the model has none
    fp8_checkpoint   whether the checkpoint stores the experts in FP8
    four_bit         the format of the experts, where the checkpoint packs all of them in four bits in one format
    expert_bias      whether the experts' products have biases
    expert_adapters  adapters may change the experts: the slot of a row's adapter travels with the row
    fp8_rows         rows travel to the experts in FP8; from the chosen all-to-all and grouped GEMM
    """

    device: str
    dtype: torch.dtype
    num_ranks: int
    num_nodes: int = 1
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    max_num_tokens: int
    max_num_seqs: int | None = None
    attention_specs: tuple[AttentionSpec, ...] = ()
    linear_specs: tuple[LinearAttentionSpec, ...] = ()
    fp8_checkpoint: bool = False
    four_bit: FourBitFormat | None = None
    expert_bias: bool = False
    fp8_rows: bool = False
    expert_adapters: bool = False

    @property
    def row_ids(self) -> int:
        """Ids that a row carries to the experts: of its experts, and that of its adapter's slot."""
        return self.top_k + self.expert_adapters

    @property
    def dtype_name(self) -> str:
        """The dtype as the configuration spells it."""
        return str(self.dtype).removeprefix("torch.")


class Backend(ABC):
    """One implementation of a seam. The class declares its needs and costs before any instance is built.

    name            as in the configuration
    devices         device types that it runs on
    auto            why `auto` takes it where it can run; None if `auto` never does
    graph           whether CUDA graphs can hold its calls, because none of them waits for the device
    distributions   Python distributions that it runs on; a new version may change its speed
    """

    name: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    auto: str | None = None
    graph: bool = False
    distributions: tuple[str, ...] = ()

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why this machine cannot run the backend on `device`, one of `devices`, or None.

        May import the backend's package, which can take seconds.
        """
        return None

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        """Return why the backend cannot serve `shape` on any machine, or None. Imports no package of the backend."""
        return None

    @classmethod
    def auto_reason(cls, shape: BackendShape) -> str | None:
        """Return why `auto` takes the backend for `shape` where it can run, or None if `auto` never does."""
        return cls.auto if shape.device in cls.devices else None
