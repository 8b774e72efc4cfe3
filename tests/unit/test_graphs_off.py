"""What follows from the chosen backends before any is built: whether there are CUDA graphs, and why not."""

import pickle

import pytest

from kernels.backends.select import Choice, Selection
from workers.runner.graph_sizes import GraphsUnavailableError, graphs_off


def selection(**names: str) -> Selection:
    chosen = {"all2all": "copy_engine", "grouped_gemm": "triton", "attention": "flashinfer"} | names
    return Selection(**{family: Choice(name, "") for family, name in chosen.items()})


def test_who_cannot_is_named():
    assert selection().graph_unsupported_reason is None
    for family, name in {
        "all2all": "torch_dist",
        "grouped_gemm": "reference",
        "attention": "sdpa",
    }.items():
        unsupported_reason = selection(**{family: name}).graph_unsupported_reason
        assert unsupported_reason == f"kernels.{family} is {name}, and its steps cannot be captured"


@pytest.mark.parametrize(
    "name",
    [
        *("local", "allgather", "copy_engine", "symm"),
        *("deepep", "deepep_hosts", "deepep_low_latency"),
    ],
)
def test_exchanges_that_never_wait_on_the_host(name):
    assert selection(all2all=name).graph_unsupported_reason is None


def test_why_there_are_none():
    assert graphs_off("auto", selection(), "cuda") is graphs_off(True, selection(), "cuda") is None
    assert graphs_off(False, selection(), "cuda") == "scheduler.cuda_graphs is false"
    assert graphs_off("auto", selection(), "cpu") == "cluster.device is cpu"
    assert "attention is sdpa" in graphs_off(False, selection(attention="sdpa"), "cuda")


def test_what_is_demanded_and_cannot_be():
    with pytest.raises(GraphsUnavailableError, match=r"cuda_graphs is true, but kernels.attention"):
        graphs_off(True, selection(attention="sdpa"), "cuda")
    with pytest.raises(GraphsUnavailableError, match=r"cluster.device is cpu; expected") as caught:
        graphs_off(True, selection(), "cpu")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
