"""The lower bound of a load's time on given GPUs: bytes, FLOPs and link bytes over the rates of the hardware. Pure.

All work that can overlap does overlap, routing is even, and no other work takes time, so no server reaches the bound.
Each of R ranks has its share of the requests and of the experts, and a copy of all other weights.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from scripts.bench.step_work import LayerKind, StepPart, StepShape, Work, step_work
from workers.specs.model import ModelConfig


@dataclass(frozen=True)
class Hardware:
    """Practical rates of one GPU per second. Defaults: an H200 in bfloat16, in FP8 by DeepGEMM, with NVLink."""

    memory_bytes: float = 4.0e12
    flops: float = 750e12
    fp8_flops: float = 1300e12
    link_bytes: float = 380e9

    @classmethod
    def of(cls, gpus: Sequence[str]) -> "Hardware":
        """Return the rates of these GPUs by their names; those of an H200 for other names and for no GPU.

        An H100 differs in its memory, whose rate is that of a copy between two buffers of the GPU.
        """
        return cls(memory_bytes=3.0e12) if gpus and "H100" in gpus[0] else cls()


@dataclass(frozen=True)
class Part:
    """Seconds of one rank for a part of the work, by resource; the largest is the floor."""

    memory_s: float
    compute_s: float
    link_s: float

    @property
    def floor_s(self) -> float:
        """The largest of the three: they overlap."""
        return max(self.memory_s, self.compute_s, self.link_s)

    def __rmul__(self, times: float) -> "Part":
        return Part(times * self.memory_s, times * self.compute_s, times * self.link_s)


@dataclass(frozen=True)
class Floor:
    """The floor of one load: prefill, one decode step at mean length, and the resulting rates.

    prefill_kinds, decode_kinds   the floors of each kind of layer alone, of prefill and of a decode step
    """

    prefill: Part
    decode_step: Part
    prefill_kinds: dict[LayerKind, Part]
    decode_kinds: dict[LayerKind, Part]
    output_tokens_per_s: float
    total_tokens_per_s: float


def floor_of(
    model: ModelConfig,
    num_ranks: int,
    *,
    in_flight: int,
    input_len: int,
    output_len: int,
    max_num_batched_tokens: int = 8192,
    fp8_experts: bool = False,
    four_bit: bool = False,
    fp8_cache: bool = False,
    states: str | None = None,
    hardware: Hardware | None = None,
) -> Floor:
    """Return the floor of a load: all requests are prefilled, then decoded together.

    in_flight counts requests on all ranks; lengths are tokens; a prefill step has max_num_batched_tokens of a rank;
    `four_bit` as in StepShape; `states` is the dtype of the states of linear attention, None that of the checkpoint.
    """
    hardware = hardware or Hardware()
    seqs = in_flight / num_ranks
    prompt_tokens = seqs * input_len
    steps = max(1.0, prompt_tokens / max_num_batched_tokens)
    # Few of a prompt's tokens are sampled from.
    prompts = StepShape(
        prompt_tokens / steps,
        context=input_len / 2,
        kv_reads=0.0,
        sampled=0.0,
        fp8=fp8_experts,
        four_bit=four_bit,
    )
    prefill = steps * step_floor(model, num_ranks, prompts, hardware)
    context = input_len + output_len / 2
    decodes = StepShape(
        seqs,
        context,
        kv_reads=seqs * context,
        sampled=seqs,
        fp8=fp8_experts,
        four_bit=four_bit,
        fp8_cache=fp8_cache,
        states=states,
    )
    decode = step_floor(model, num_ranks, decodes, hardware)
    seconds = prefill.floor_s + (output_len - 1) * decode.floor_s  # a prefill gives the first token
    of_prompts = kind_floors(model, num_ranks, prompts, hardware)
    return Floor(
        prefill,
        decode,
        {kind: steps * part for kind, part in of_prompts.items()},
        kind_floors(model, num_ranks, decodes, hardware),
        output_tokens_per_s=in_flight * output_len / seconds,
        total_tokens_per_s=in_flight * (input_len + output_len) / seconds,
    )


def step_floors(
    model: ModelConfig, num_ranks: int, shape: StepShape, hardware: Hardware | None = None
) -> dict[StepPart, Part]:
    """Return the floor of each part of a step as separate kernels with inputs and outputs in memory.

    The sum exceeds the floor of the step, because in the step all parts overlap and pass data without memory.
    """
    hardware = hardware or Hardware()
    return {
        part: Part(
            (work.memory_bytes + work.activation_bytes) / hardware.memory_bytes,
            work.flops / hardware.flops + work.fp8_flops / hardware.fp8_flops,
            work.link_bytes / hardware.link_bytes,
        )
        for part, work in step_work(model, num_ranks, shape).items()
    }


def step_floor(
    model: ModelConfig, num_ranks: int, shape: StepShape, hardware: Hardware | None = None
) -> Part:
    """Return the floor of one step."""
    return _floor(step_work(model, num_ranks, shape).values(), hardware or Hardware())


def kind_floors(
    model: ModelConfig, num_ranks: int, shape: StepShape, hardware: Hardware | None = None
) -> dict[LayerKind, Part]:
    """Return the floor of each kind of layer in one step; parts of one kind overlap, kinds do not."""
    work = step_work(model, num_ranks, shape)
    return {
        kind: _floor([work[part] for part in StepPart if part.kind == kind], hardware or Hardware())
        for kind in LayerKind
    }


def _floor(parts: Collection[Work], hardware: Hardware) -> Part:
    return Part(
        sum(work.memory_bytes for work in parts) / hardware.memory_bytes,
        sum(work.flops for work in parts) / hardware.flops
        + sum(work.fp8_flops for work in parts) / hardware.fp8_flops,
        sum(work.link_bytes for work in parts) / hardware.link_bytes,
    )
