"""Memory of the chosen backends by arithmetic: grows with what is exchanged, and with ubatches by what those hold."""

from dataclasses import replace

import pytest
import torch

from kernels.all2all.peer_memory import HEADER_BYTES
from kernels.attention.flashinfer import WORKSPACE_BYTES
from kernels.backends.memory import BackendMemory, backend_memory
from kernels.backends.select import Choice, Selection
from kernels.interface.backend import BackendShape
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.interface.registry import backend_class

GPU = BackendShape(
    device="cuda",
    dtype=torch.bfloat16,
    num_ranks=1,
    hidden_size=128,
    moe_intermediate_size=64,
    num_experts=8,
    top_k=4,
    max_num_tokens=256,
)
CPU = replace(GPU, device="cpu")
QWEN = replace(GPU, hidden_size=2048, moe_intermediate_size=768, top_k=8)


def selection(all2all: str, grouped_gemm: str = "triton", attention: str = "sdpa") -> Selection:
    return Selection(*(Choice(name, "") for name in (all2all, grouped_gemm, attention)))


def of(
    chosen: Selection,
    num_ranks: int,
    num_tokens: int = 256,
    num_ubatches: int = 0,
    shape: BackendShape = GPU,
) -> BackendMemory:
    shape = replace(shape, num_ranks=num_ranks, max_num_tokens=num_tokens)
    return backend_memory(chosen, shape, num_ubatches=num_ubatches)


def test_grows_with_what_is_exchanged():
    def total(all2all: str, num_ranks: int, num_tokens: int = 256) -> int:
        return of(selection(all2all, "torch_grouped"), num_ranks, num_tokens, shape=CPU).total

    alone = total("local", 1)
    assert alone == 256 * 4 * (2 * 128 + 3 * 64) * 2  # activations only
    for name in ("shm", "torch_dist", "allgather", "hierarchical"):
        assert alone < total(name, 2) < total(name, 4)
        assert total(name, 2, 512) > 1.9 * total(name, 2, 256)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_memory_that_gpus_share(num_ranks: int):
    rows = num_ranks * 256
    sums, experts = rows * 128 * 2, rows * 4 * (128 + 64) * 2
    held = rows * (256 + 32) + sums + HEADER_BYTES
    assert of(selection("symm"), num_ranks) == BackendMemory(held, 0, experts)
    assert of(selection("copy_engine"), num_ranks) == BackendMemory(held, 0, sums + experts)


def test_deepep():
    def total(name: str, num_ranks: int = 2, num_tokens: int = 512, num_experts: int = 128) -> int:
        shape = replace(QWEN, num_experts=num_experts)
        return of(selection(name, "deepgemm"), num_ranks, num_tokens, shape=shape).total

    for name in ("deepep", "deepep_low_latency"):
        assert total(name, num_tokens=1024) > 1.5 * total(name)
    assert total("deepep", num_ranks=4) > 1.5 * total("deepep")
    assert total("deepep_low_latency", num_experts=256) == 2 * total("deepep_low_latency")
    # Buffers to send from and receive in, twice each, and what 128 * 512 rows become.
    rows = 128 * 512
    assert total("deepep_low_latency") == rows * (4 * (4096 + 64) + 2 * (2 * 2048 + 3 * 768))


def test_deepep_between_hosts():
    """One memory holds the queues of other hosts or the rows of decodes, whichever is more, beside NVLink's queues."""
    shape = replace(QWEN, num_experts=128, num_nodes=2, num_ranks=16, max_num_seqs=128)
    kept = backend_class("all2all", "deepep_hosts").kept_bytes
    decodes, queues = 4 * 128 * 128 * (4096 + 64), 16 * (4096 + 128 * 16 + 8)
    assert kept(shape) == 8 * 288 * queues + decodes
    few = replace(shape, max_num_seqs=1)
    assert kept(few) == (8 * 288 + 2 * 128 * 2) * queues


def test_ubatches_hold_an_exchange_and_a_workspace_each():
    chosen = selection("symm", attention="flashinfer")
    whole, cut = of(chosen, 4), of(chosen, 4, num_ubatches=2)
    assert replace(cut, ubatches=0) == whole and not whole.ubatches
    half = of(chosen, 4, 128)
    assert half.kept > WORKSPACE_BYTES and cut.ubatches == 2 * half.kept
    assert of(chosen, 4, 255, num_ubatches=2).ubatches == cut.ubatches, "the larger half decides"


def test_a_step_needs_the_experts_or_the_linear_attention():
    spec = LinearAttentionSpec(16, 32, 128, 128, 4)
    hybrid = replace(QWEN, linear_specs=(spec,) * 3)
    for name in ("torch", "triton"):
        chosen = replace(selection("symm"), linear_attention=Choice(name, ""))
        plain, found = of(chosen, 1, 4096, shape=QWEN), of(chosen, 1, 4096, shape=hybrid)
        linear = backend_class("linear_attention", name).step_bytes
        expected = linear(replace(hybrid, max_num_tokens=4096))
        assert expected >= 4096 * 2 * (spec.channels + spec.value_size)
        assert found.step == max(expected, plain.step) and found.kept == plain.kept
        wide = replace(hybrid, moe_intermediate_size=2**20)
        assert of(chosen, 1, 4096, shape=wide).step > expected


@pytest.mark.parametrize("name", ["shm", "torch_dist", "allgather"])
def test_ubatches_that_hold_nothing(name: str):
    """Those of `shm` use the slots of whole steps, the others allocate rows as they go."""
    assert not of(selection(name), 2, num_ubatches=4).ubatches
    paged = selection(name, attention="flashinfer")
    assert of(paged, 2, num_ubatches=4).ubatches == 4 * WORKSPACE_BYTES
