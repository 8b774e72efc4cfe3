"""DeepEP is refused with versions and numbers, and chosen with a grouped GEMM that takes what it brings."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.all2all import deepep_package
from kernels.backends import select
from kernels.backends.select import BackendChoiceError, Selection
from kernels.interface.backend import BackendShape
from kernels.interface.config import KernelsConfig
from kernels.interface.registry import backend_class
from tests.distributed import deep_ep_fake

QWEN = BackendShape(
    device="cuda",
    dtype=torch.bfloat16,
    num_ranks=4,
    hidden_size=2048,
    moe_intermediate_size=768,
    num_experts=128,
    top_k=8,
    max_num_tokens=512,
)
EITHER = ("deepep", "deepep_low_latency")
ALL = (*EITHER, "deepep_hosts")
NORMAL, LOW_LATENCY, HOSTS = ("deepep",), ("deepep_low_latency",), ("deepep_hosts",)
TWO_HOSTS = {"num_ranks": 16, "num_nodes": 2}
SHAPES = [
    (EITHER, {}, None),
    (EITHER, {"num_ranks": 3}, "2, 4 or 8 ranks of a host, cluster.ranks is 3"),
    (NORMAL, {"num_nodes": 2}, "share a host, cluster.nodes is 2"),
    (LOW_LATENCY, {"num_nodes": 2}, None),
    (LOW_LATENCY, TWO_HOSTS, None),
    (LOW_LATENCY, {"num_ranks": 16}, "8 ranks of a host, cluster.ranks is 16"),
    (
        LOW_LATENCY,
        {"num_ranks": 12, "num_nodes": 2, "num_experts": 132},
        "or a multiple of 8 of several hosts, cluster.ranks is 12",
    ),
    (HOSTS, {}, "all ranks share a host, which deepep serves"),
    (HOSTS, {"num_ranks": 8, "num_nodes": 2}, "cluster.nodes is 2 and cluster.ranks 8"),
    (HOSTS, {"num_ranks": 24, "num_nodes": 3}, "2, 4, 8, 16, 18, 20 hosts, cluster.nodes is 3"),
    (HOSTS, TWO_HOSTS | {"max_num_tokens": 16384, "max_num_seqs": 256}, None),
    (HOSTS, TWO_HOSTS | {"max_num_tokens": 16384}, None),
    (HOSTS, TWO_HOSTS | {"dtype": torch.float16}, "bfloat16 only"),
    (HOSTS, TWO_HOSTS | {"num_experts": 136}, "136 do not divide by cluster.ranks, which is 16"),
    (HOSTS, TWO_HOSTS | {"hidden_size": 8192}, "multiple of 256 up to 7936, the model's is 8192"),
    (HOSTS, TWO_HOSTS | {"hidden_size": 2304}, "compiled for a hidden size .* model's is 2304"),
    (HOSTS, TWO_HOSTS | {"top_k": 12}, "a token may have 11 experts, the model's have 12"),
    (EITHER, {"dtype": torch.float16}, "bfloat16 only, model.dtype is float16"),
    (EITHER, {"num_experts": 130}, "130 do not divide by cluster.ranks, which is 4"),
    (NORMAL, {"hidden_size": 2112}, "multiple of 256 up to 7936, the model's is 2112"),
    (NORMAL, {"hidden_size": 8192}, "multiple of 256 up to 7936, the model's is 8192"),
    (NORMAL, {"num_experts": 640}, "up to 1024 experts, 128 of them on a rank; .* 640 and 160"),
    (NORMAL, {"num_experts": 2048, "num_ranks": 8}, "up to 1024 experts, .* 2048 and 256"),
    (NORMAL, {"top_k": 33}, "a token may have 32 experts, the model's have 33"),
    (NORMAL, {"max_num_tokens": 16384}, None),
    (LOW_LATENCY, {"hidden_size": 2304}, "hidden size of 2048, 2560, .* the model's is 2304"),
    (LOW_LATENCY, {"hidden_size": 8192}, None),
    (LOW_LATENCY, {"top_k": 12}, "a token may have 11 experts, the model's have 12"),
    (
        LOW_LATENCY,
        {"max_num_tokens": 8192},
        "1024 at most, .*max_num_batched_tokens is 8192; set that to 1024 or less",
    ),
    (LOW_LATENCY, {"max_num_tokens": 1024}, None),
]


def choose(all2all: str, grouped_gemm: str = "auto", **changes: Any) -> Selection:
    unavailable = changes.pop("unavailable", {})
    config = KernelsConfig(all2all=all2all, grouped_gemm=grouped_gemm)
    return select.select(config, unavailable, replace(QWEN, **changes))


@pytest.mark.parametrize(("names", "changes", "says"), SHAPES, ids=str)
def test_shapes(names: tuple[str, ...], changes: dict[str, Any], says: str | None):
    for name in names:
        found = backend_class("all2all", name).unsupported_reason(replace(QWEN, **changes))
        assert found is None if says is None else re.search(says, found or ""), found
        if says is None:
            assert choose(name, **changes).all2all.name == name
        else:
            with pytest.raises(BackendChoiceError, match=says):
                choose(name, **changes)


@pytest.mark.parametrize("name", ALL)
def test_it_runs_on_gpus_between_several_ranks(name: str):
    with pytest.raises(BackendChoiceError, match="on GPUs only"):
        choose(name, device="cpu")
    with pytest.raises(BackendChoiceError, match="only one rank"):
        choose(name, num_ranks=1)


def test_the_grouped_gemm_takes_the_layout():
    assert choose("deepep").grouped_gemm.name == "triton"
    assert choose("deepep_low_latency").grouped_gemm.name == "deepgemm"
    for gemm in ("deepgemm", "deepgemm_fp8"):
        for name in EITHER:
            assert choose(name, gemm).grouped_gemm.name == gemm
    for gemm in ("auto", "deepgemm", "deepgemm_fp8"):
        chosen = choose("deepep_hosts", gemm, **TWO_HOSTS)
        assert chosen.grouped_gemm.name == gemm.replace("auto", "deepgemm")
        assert chosen.fp8_rows == (gemm == "deepgemm_fp8")
    with pytest.raises(BackendChoiceError, match="brings rows in the masked layout"):
        choose("deepep_hosts", "triton", **TWO_HOSTS)
    says = "deepep_low_latency brings rows in the masked layout, it takes contiguous.*deepgemm"
    with pytest.raises(BackendChoiceError, match=says) as error:
        choose("deepep_low_latency", "triton")
    assert error.value.key == "kernels.grouped_gemm"
    gemms = ("grouped_gemm.deepgemm", "grouped_gemm.deepgemm_fp8")
    without = dict.fromkeys(gemms, "not installed")
    with pytest.raises(BackendChoiceError, match="deepgemm: not installed"):
        choose("deepep_low_latency", unavailable=without)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    module = deep_ep_fake.fake_module()
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    monkeypatch.delitem(sys.modules, "deep_ep_cpp", raising=False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("kernels.all2all.base.triton_unavailable", lambda: None)
    deepep_package.deep_ep_unavailable.cache_clear()
    yield module
    deepep_package.deep_ep_unavailable.cache_clear()


def unavailable() -> dict[str, str]:
    """Mode of DeepEP to why it cannot run on a GPU of this machine."""
    deepep_package.deep_ep_unavailable.cache_clear()
    found = select.probe("cuda")
    return {name: found[f"all2all.{name}"] for name in ALL if f"all2all.{name}" in found}


def test_a_gpu_too_old(module, monkeypatch: pytest.MonkeyPatch):
    assert unavailable() == {}
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    assert unavailable() == dict.fromkeys(ALL, "it needs compute capability 9.0, found 8.0")


def test_a_package_that_is_not_there(module, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "deep_ep")
    monkeypatch.setattr(deepep_package, "find_spec", lambda name: None)
    reason = "deep_ep is not installed, 1.2.1 or newer is needed"
    assert unavailable() == dict.fromkeys(ALL, reason)


def test_a_package_that_does_not_load(module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delitem(sys.modules, "deep_ep")
    (tmp_path / "deep_ep.py").write_text("assert False, 'two NCCLs are loaded'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reason = unavailable()["deepep"]
    assert re.fullmatch(
        r"import deep_ep failed \(.* is installed, 1.2.1 or newer is needed\): .*two NCCLs.*",
        reason,
    )


def test_a_package_too_old(module):
    class Old(deep_ep_fake.FakeBuffer):
        def dispatch(self, x, handle=None):  # type: ignore[override]
            raise NotImplementedError

    module.Buffer, module.__version__ = Old, "1.1.0"
    reason = unavailable()["deepep_low_latency"]
    assert reason == (
        "deep_ep 1.1.0 is installed, 1.2.1 or newer is needed: "
        "it has no Buffer.dispatch(num_worst_tokens)"
    )
    del module.Buffer
    assert "Buffer.low_latency_combine(return_recv_hook)" in unavailable()["deepep"]


def test_a_build_without_nvshmem(module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """1.2.1 may have been built without NVSHMEM, which the low-latency mode needs."""
    extension = tmp_path / "deep_ep_cpp.so"
    extension.write_bytes(b"...num_rdma_ranks == 1 and NVSHMEM is disabled during compilation...")
    monkeypatch.setitem(sys.modules, "deep_ep_cpp", SimpleNamespace(__file__=str(extension)))
    assert list(unavailable()) == ["deepep_low_latency", "deepep_hosts"]
    assert "built without NVSHMEM" in unavailable()["deepep_low_latency"]
    extension.write_bytes(b"...libnvshmem_host.so.3...")
    assert unavailable() == {}


def test_auto_never_takes_what_has_not_run_between_hosts(module):
    for name in ALL:
        found = backend_class("all2all", name)
        assert found.auto_reason(replace(QWEN, **TWO_HOSTS)) is None
    assert choose("auto", **TWO_HOSTS).all2all.name == "allgather"


def test_graphs_hold_decodes_between_hosts():
    rows = backend_class("all2all", "deepep_hosts").graph_rows
    shape = replace(QWEN, **TWO_HOSTS, max_num_tokens=8192)
    assert rows(replace(shape, max_num_seqs=250)) == 252  # a multiple of four
    assert rows(replace(shape, max_num_seqs=4096)) == rows(shape) == 1024
    assert backend_class("all2all", "deepep").graph_rows(shape) == 8192
