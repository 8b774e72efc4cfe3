"""Backends are chosen with reasons; a named one that cannot run is an error that says what works."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention.spec import AttentionSpec
from kernels.backends import select
from kernels.backends.config import KernelsConfig
from kernels.backends.select import BackendChoiceError, Capabilities
from kernels.routing.placement import ExpertPlacement

CPU = Capabilities("cpu", {})
CUDA = Capabilities("cuda", {"shm": "it exchanges CPU tensors only"})
HEADS_OF_96 = AttentionSpec(4, 2, 96, 1.0)
SHAPE: dict[str, Any] = {"dtype": torch.bfloat16, "hidden_size": 128, "expert_width": 64}


def choose(
    capabilities: Capabilities = CPU, num_ranks: int = 2, num_nodes: int = 1, **names: Any
) -> select.Selection:
    shape = {key: names.pop(key, default) for key, default in SHAPE.items()}
    shape["attention_specs"] = names.pop("attention_specs", ())
    config = KernelsConfig(**names)
    return select.select(config, capabilities, num_ranks=num_ranks, num_nodes=num_nodes, **shape)


@pytest.mark.parametrize(
    ("capabilities", "num_ranks", "num_nodes", "expected"),
    [
        (CPU, 1, 1, "local"),
        (CUDA, 1, 1, "local"),
        (CPU, 2, 1, "shm"),
        (CPU, 4, 2, "torch_dist"),
        (CUDA, 4, 1, "copy_engine"),
        (CUDA, 4, 2, "allgather"),
        (Capabilities("cuda", {"copy_engine": "no peer access"}), 4, 1, "allgather"),
        (Capabilities("cpu", {"shm": "no /dev/shm"}), 2, 1, "torch_dist"),
    ],
)
def test_auto_all2all(capabilities: Capabilities, num_ranks: int, num_nodes: int, expected: str):
    selection = choose(capabilities, num_ranks, num_nodes)
    assert selection.names()["all2all"] == expected
    assert selection.reasons()["all2all"].startswith("auto: ")


@pytest.mark.parametrize(
    ("capabilities", "changes", "expected"),
    [
        (CPU, {}, "torch_grouped"),
        (CPU, {"dtype": torch.float32}, "native"),
        (CPU, {"dtype": torch.float32, "expert_width": 63}, "reference"),
        (Capabilities("cpu", {"native": "no C"}), {"dtype": torch.float32}, "torch_grouped"),
        (CUDA, {}, "triton"),
        (CUDA, {"dtype": torch.float32}, "triton"),
        (Capabilities("cuda", {"triton": "too old"}), {}, "deepgemm"),
        (Capabilities("cuda", {"triton": "-"}), {"expert_width": 48}, "torch_grouped"),
        (Capabilities("cuda", {"triton": "-"}), {"dtype": torch.float32}, "reference"),
        (CPU, {"hidden_size": 129}, "reference"),
        (CPU, {"expert_width": 60}, "reference"),
        (Capabilities("cpu", {"torch_grouped": "too old"}), {}, "reference"),
    ],
)
def test_auto_grouped_gemm(capabilities: Capabilities, changes: dict, expected: str):
    assert choose(capabilities, **changes).grouped_gemm.name == expected


@pytest.mark.parametrize(
    ("capabilities", "changes", "expected"),
    [
        (CPU, {}, "sdpa"),
        (CPU, {"dtype": torch.float32}, "native"),
        (CUDA, {}, "flashinfer"),
        (CUDA, {"attention_specs": (AttentionSpec(4, 2, 64, 1.0),)}, "flashinfer"),
        (CUDA, {"attention_specs": (HEADS_OF_96,)}, "sdpa"),
        (CUDA, {"dtype": torch.float32}, "sdpa"),
        (Capabilities("cuda", {"flashinfer": "too old"}), {}, "sdpa"),
    ],
)
def test_auto_attention(capabilities: Capabilities, changes: dict, expected: str):
    assert choose(capabilities, **changes).attention.name == expected


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        ({"all2all": "local"}, "kernels.all2all", "cluster.ranks is 2.*shm"),
        ({"all2all": "shm", "num_nodes": 2}, "kernels.all2all", "cluster.nodes is 2.*torch_dist"),
        ({"all2all": "shm", "num_ranks": 1}, "kernels.all2all", "only one rank.*local"),
        ({"all2all": "symm"}, "kernels.all2all", "on GPUs only.*shm"),
        (
            {"all2all": "copy_engine", "capabilities": CUDA, "num_nodes": 2},
            "kernels.all2all",
            "must share a host, cluster.nodes is 2.*allgather",
        ),
        ({"all2all": "shm", "capabilities": CUDA}, "kernels.all2all", "CPU tensors.*allgather"),
        (
            {"grouped_gemm": "torch_grouped", "expert_width": 60},
            "kernels.grouped_gemm",
            "expert width 60 in bfloat16 has 120.*reference",
        ),
        ({"attention": "flashinfer"}, "kernels.attention", "on GPUs only.*sdpa"),
        (
            {"attention": "flashinfer", "capabilities": CUDA, "attention_specs": (HEADS_OF_96,)},
            "kernels.attention",
            "head_dim of 64, 128, 256, the model's is 96.*sdpa",
        ),
        (
            {"attention": "flashinfer", "capabilities": CUDA, "dtype": torch.float32},
            "kernels.attention",
            "float16 or bfloat16, model.dtype is float32.*sdpa",
        ),
        (
            {"attention": "native"},
            "kernels.attention",
            "float32, model.dtype is bfloat16.*sdpa",
        ),
        (
            {"grouped_gemm": "torch_grouped", "capabilities": CUDA, "dtype": torch.float32},
            "kernels.grouped_gemm",
            "bfloat16 only, model.dtype is float32",
        ),
        ({"grouped_gemm": "triton"}, "kernels.grouped_gemm", "on GPUs only.*torch_grouped"),
        (
            {"grouped_gemm": "triton", "capabilities": CUDA, "expert_width": 60},
            "kernels.grouped_gemm",
            "expert width 60 in bfloat16 has 120",
        ),
        (
            {"grouped_gemm": "deepgemm", "capabilities": CUDA, "dtype": torch.float16},
            "kernels.grouped_gemm",
            "deepgemm takes bfloat16 only, model.dtype is float16.*triton",
        ),
        (
            {"grouped_gemm": "deepgemm_fp8", "capabilities": CUDA},
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
    selection = choose(CPU, 3, all2all="allgather", grouped_gemm="reference", attention="sdpa")
    expected = {"all2all": "allgather", "grouped_gemm": "reference", "attention": "sdpa"}
    assert selection.names() == expected
    assert set(selection.reasons().values()) == {"named in the configuration"}


def test_probe_refuses_shared_memory_where_it_is_unsafe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "aarch64" in select.probe("cpu").missing["shm"]
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert select.probe("cpu").missing == {}
    monkeypatch.setattr("kernels.all2all.choice.SHM_FOLDER", "/no/such/folder")
    assert "not writable" in select.probe("cpu").missing["shm"]


def test_build_one_rank():
    selection = choose(num_ranks=1)
    context = select.BackendContext(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        rank=0,
        num_ranks=1,
        group=None,
        shared_memory=None,
        placement=ExpertPlacement(4, 1),
        hidden_size=128,
        top_k=2,
        max_num_tokens=16,
        attention=(AttentionSpec(4, 2, 8, 1.0),),
        block_size=4,
    )
    kernels = select.build(selection, context)
    built = [kernels.all2all.name, kernels.grouped_gemm.name, kernels.attention.name]
    assert built == list(selection.names().values())
    several = replace(context, num_ranks=2)
    with pytest.raises(AssertionError, match="needs a SharedMemoryGroup"):
        select.build(choose(num_ranks=2), several)


def test_nothing_works_for_one_reason_that_is_said_once():
    missing = dict.fromkeys(("copy_engine", "allgather", "torch_dist"), "no triton")
    with pytest.raises(BackendChoiceError) as caught:
        choose(Capabilities("cuda", missing | {"symm": "no triton", "shm": "no"}), 3)
    says = "copy_engine, allgather, torch_dist: no triton. Nothing works"
    assert str(caught.value).endswith(says)


def test_an_error_lists_all_that_could_run_and_survives_pickling():
    with pytest.raises(BackendChoiceError) as caught:
        choose(CUDA, 3, all2all="deepep")
    says = str(pickle.loads(pickle.dumps(caught.value)))
    assert says == str(caught.value) and "cluster.ranks is 3" in says
    assert says.endswith("What works: auto, copy_engine, allgather, torch_dist or symm")
