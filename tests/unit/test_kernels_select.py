"""Backends are chosen with reasons; a named one that cannot run is an error that says what works."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.all2all.base import AllToAll
from kernels.attention.base import Attention
from kernels.backends import select
from kernels.backends.select import BackendChoiceError
from kernels.grouped_gemm.base import GroupedGemm
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.backend import BackendShape
from kernels.interface.config import KernelsConfig
from kernels.interface.context import BackendContext
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.interface.registry import SEAMS, backend_class
from kernels.linear_attention.base import LinearAttention
from kernels.routing.expert_map import ContiguousMap

HEADS_OF_96 = AttentionSpec(4, 2, 96, 1.0)
CPU = BackendShape(
    device="cpu",
    dtype=torch.bfloat16,
    num_ranks=2,
    hidden_size=128,
    moe_intermediate_size=64,
    num_experts=4,
    top_k=2,
    max_num_tokens=16,
    attention_specs=(AttentionSpec(4, 2, 128, 1.0),),
)
CUDA = replace(CPU, device="cuda")
BASES = {
    "all2all": AllToAll,
    "grouped_gemm": GroupedGemm,
    "attention": Attention,
    "linear_attention": LinearAttention,
}


def choose(
    shape: BackendShape = CPU, unavailable: dict[str, str] | None = None, **changes: Any
) -> select.Selection:
    config = KernelsConfig(**{name: changes.pop(name) for name in BASES if name in changes})
    return select.select(config, unavailable or {}, replace(shape, **changes))


@pytest.mark.parametrize(
    ("shape", "unavailable", "num_ranks", "num_nodes", "expected"),
    [
        (CPU, (), 1, 1, "local"),
        (CUDA, (), 1, 1, "local"),
        (CPU, (), 2, 1, "shm"),
        (CPU, (), 4, 2, "hierarchical"),
        (CPU, ["all2all.hierarchical"], 4, 2, "torch_dist"),
        (CUDA, (), 4, 1, "copy_engine"),
        (CUDA, (), 4, 2, "allgather"),
        (CUDA, ["all2all.copy_engine"], 4, 1, "allgather"),
        (CPU, ["all2all.shm"], 2, 1, "torch_dist"),
    ],
)
def test_auto_all2all(
    shape: BackendShape, unavailable: list[str], num_ranks: int, num_nodes: int, expected: str
):
    absent = dict.fromkeys(unavailable, "not here")
    selection = choose(shape, absent, num_ranks=num_ranks, num_nodes=num_nodes)
    assert selection.names()["all2all"] == expected
    assert selection.reasons()["all2all"].startswith("auto: ")


@pytest.mark.parametrize(
    ("shape", "absent", "changes", "expected"),
    [
        (CPU, None, {}, "torch_grouped"),
        (CPU, None, {"dtype": torch.float32}, "native"),
        (CPU, None, {"dtype": torch.float32, "moe_intermediate_size": 63}, "reference"),
        (CPU, "native", {"dtype": torch.float32}, "torch_grouped"),
        (CUDA, None, {}, "triton"),
        (CUDA, None, {"dtype": torch.float32}, "triton"),
        (CUDA, "triton", {}, "deepgemm"),
        (CUDA, "triton", {"moe_intermediate_size": 48}, "torch_grouped"),
        (CUDA, "triton", {"dtype": torch.float32}, "reference"),
        (CPU, None, {"hidden_size": 129}, "reference"),
        (CPU, None, {"moe_intermediate_size": 60}, "reference"),
        (CPU, "torch_grouped", {}, "reference"),
    ],
)
def test_auto_grouped_gemm(shape: BackendShape, absent: str | None, changes: dict, expected: str):
    unavailable = {f"grouped_gemm.{absent}": "too old"}
    assert choose(shape, unavailable, **changes).grouped_gemm.name == expected


@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        (CPU, {}, "sdpa"),
        (CPU, {"dtype": torch.float32}, "native"),
        (CUDA, {}, "flashinfer"),
        (CUDA, {"attention_specs": (AttentionSpec(4, 2, 64, 1.0),)}, "flashinfer"),
        (CUDA, {"attention_specs": (HEADS_OF_96,)}, "sdpa"),
        (CUDA, {"dtype": torch.float32}, "sdpa"),
    ],
)
def test_auto_attention(shape: BackendShape, changes: dict, expected: str):
    assert choose(shape, **changes).attention.name == expected


def test_a_backend_is_unavailable_in_its_own_seam():
    assert choose(CUDA, {"attention.flashinfer": "too old"}).attention.name == "sdpa"
    both = replace(CPU, dtype=torch.float32)
    found = choose(both, {"attention.native": "no C"})
    assert (found.attention.name, found.grouped_gemm.name) == ("sdpa", "native")


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        ({"all2all": "local"}, "kernels.all2all", "cluster.ranks is 2.*shm"),
        ({"all2all": "shm", "num_nodes": 2}, "kernels.all2all", "cluster.nodes is 2.*torch_dist"),
        ({"all2all": "hierarchical"}, "kernels.all2all", "connects hosts, cluster.nodes is 1.*shm"),
        ({"all2all": "shm", "num_ranks": 1}, "kernels.all2all", "only one rank.*local"),
        ({"all2all": "symm"}, "kernels.all2all", "on GPUs only.*shm"),
        (
            {"all2all": "copy_engine", "shape": CUDA, "num_nodes": 2},
            "kernels.all2all",
            "must share a host, cluster.nodes is 2.*allgather",
        ),
        ({"all2all": "shm", "shape": CUDA}, "kernels.all2all", "on CPU only.*allgather"),
        (
            {"grouped_gemm": "torch_grouped", "moe_intermediate_size": 60},
            "kernels.grouped_gemm",
            "expert width 60 in bfloat16 has 120.*reference",
        ),
        ({"attention": "flashinfer"}, "kernels.attention", "on GPUs only.*sdpa"),
        (
            {"attention": "flashinfer", "shape": CUDA, "attention_specs": (HEADS_OF_96,)},
            "kernels.attention",
            "head_dim of 64, 128, 256, the model's is 96.*sdpa",
        ),
        (
            {"attention": "flashinfer", "shape": CUDA, "dtype": torch.float32},
            "kernels.attention",
            "float16 or bfloat16, model.dtype is float32.*sdpa",
        ),
        (
            {"attention": "native"},
            "kernels.attention",
            "float32, model.dtype is bfloat16.*sdpa",
        ),
        (
            {"grouped_gemm": "torch_grouped", "shape": CUDA, "dtype": torch.float32},
            "kernels.grouped_gemm",
            "bfloat16 only, model.dtype is float32",
        ),
        ({"grouped_gemm": "triton"}, "kernels.grouped_gemm", "on GPUs only.*torch_grouped"),
        (
            {"grouped_gemm": "triton", "shape": CUDA, "moe_intermediate_size": 60},
            "kernels.grouped_gemm",
            "expert width 60 in bfloat16 has 120",
        ),
        (
            {"grouped_gemm": "deepgemm", "shape": CUDA, "dtype": torch.float16},
            "kernels.grouped_gemm",
            "deepgemm takes bfloat16 only, model.dtype is float16.*triton",
        ),
        (
            {"grouped_gemm": "deepgemm_fp8", "shape": CUDA},
            "kernels.grouped_gemm",
            "multiple of 128, expert width is 64.*auto, triton, deepgemm",
        ),
    ],
)
def test_a_named_backend_that_cannot_run(arguments: dict, key: str, says: str):
    with pytest.raises(BackendChoiceError, match=says) as error:
        choose(**arguments)
    assert error.value.key == key and isinstance(error.value, ValueError)
    assert str(error.value).startswith(f"{key}: {error.value.value!r}")


def test_named_backends_are_taken():
    selection = choose(num_ranks=3, all2all="allgather", grouped_gemm="reference", attention="sdpa")
    expected = {"all2all": "allgather", "grouped_gemm": "reference", "attention": "sdpa"}
    assert selection.names() == expected
    assert set(selection.reasons().values()) == {"named in the configuration"}


def test_linear_attention_is_chosen_for_models_that_have_it():
    plain = choose(CUDA)
    assert plain.linear_attention is None and plain.linear_attention_class is None
    assert "linear_attention" not in plain.names()
    assert select.build_linear_attention(plain, context(1)) is None
    spec = LinearAttentionSpec(2, 4, 16, 16, 4)
    torch_alone = {f"linear_attention.{x}": "absent" for x in SEAMS["linear_attention"]}
    del torch_alone["linear_attention.torch"]
    hybrid = choose(CUDA, torch_alone, linear_specs=(spec, spec))
    assert hybrid.names()["linear_attention"] == "torch"
    assert "linear_attention is torch" in str(hybrid.graph_unsupported_reason)
    with_shape = replace(context(1), shape=replace(CPU, num_ranks=1, linear_specs=(spec, spec)))
    built = select.build(choose(num_ranks=1, linear_specs=(spec, spec)), with_shape)
    assert built.linear_attention is not None and built.linear_attention.specs == (spec, spec)
    on_gpus = choose(CUDA, linear_specs=(spec, spec))
    assert on_gpus.names()["linear_attention"] == "triton"
    assert on_gpus.graph_unsupported_reason is None
    on_cpu = choose(linear_specs=(spec,), dtype=torch.float32)
    assert on_cpu.names()["linear_attention"] == "native"
    for odd, says in ((replace(spec, conv_width=5), "5"), (replace(spec, key_dim=96), "96")):
        assert choose(CUDA, linear_specs=(odd,)).names()["linear_attention"] == "torch"
        with pytest.raises(BackendChoiceError, match=f"the model has {says}.*auto or torch"):
            choose(CUDA, linear_specs=(odd,), linear_attention="triton")
    with pytest.raises(BackendChoiceError, match="3 value heads are not a multiple of 2"):
        choose(linear_specs=(replace(spec, num_value_heads=3),))


def test_probe_refuses_shared_memory_where_it_is_unsafe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "aarch64" in select.probe("cpu")["all2all.shm"]
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert "all2all.shm" not in select.probe("cpu")
    monkeypatch.setattr("kernels.host.shm.SHM_FOLDER", "/no/such/folder")
    assert "not writable" in select.probe("cpu")["all2all.shm"]


def context(num_ranks: int) -> BackendContext:
    return BackendContext(
        shape=replace(CPU, num_ranks=num_ranks),
        device=torch.device("cpu"),
        rank=0,
        group=None,
        shared_memory=None,
        expert_map=ContiguousMap(4, num_ranks),
        block_size=4,
    )


def test_build_one_rank():
    selection = choose(num_ranks=1)
    backends = select.build(selection, context(1))
    built = [backends.all2all.name, backends.grouped_gemm.name, backends.attention.name]
    assert built == list(selection.names().values())
    with pytest.raises(AssertionError, match="needs a SharedMemoryGroup"):
        select.build(choose(), context(2))
    with pytest.raises(AssertionError, match="torch_dist needs a process group"):
        select.build(choose(all2all="torch_dist"), context(2))


def test_nothing_works_for_one_reason_that_is_said_once():
    absent = ("copy_engine", "allgather", "torch_dist", "symm")
    unavailable = {f"all2all.{name}": "no triton" for name in absent}
    with pytest.raises(BackendChoiceError) as caught:
        choose(CUDA, unavailable, num_ranks=3)
    says = "here: copy_engine, allgather, torch_dist: no triton. Nothing works"
    assert str(caught.value).endswith(says)


def test_an_error_lists_all_that_could_run_and_survives_pickling():
    with pytest.raises(BackendChoiceError) as caught:
        choose(CUDA, num_ranks=3, all2all="deepep")
    says = str(pickle.loads(pickle.dumps(caught.value)))
    assert says == str(caught.value) and "cluster.ranks is 3" in says
    assert says.endswith("What works: auto, copy_engine, allgather, torch_dist or symm")


@pytest.mark.parametrize(("seam", "name"), [(seam, x) for seam in SEAMS for x in SEAMS[seam]])
def test_the_registry_has_the_names_of_the_classes(seam: str, name: str):
    found = backend_class(seam, name)
    assert found.name == name and issubclass(found, BASES[seam])
    KernelsConfig(**{seam: name})
