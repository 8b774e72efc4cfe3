"""Which kernels start before the kernel before them has ended."""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.all2all.base import ExpertInput
from kernels.grouped_gemm.triton_grouped import TritonGroupedGemm
from kernels.pending import set_yield_ubatch
from kernels.routing.device_routing import route_on_device
from kernels.triton import grouped_gemm, pdl, permute_pairs, qk_rope
from kernels.triton.pdl import MOST_ROWS, dependent_launch
from workers.rank.warm_up import warm_up_sizes

OFF, ON = ({"PDL": on, "launch_pdl": on} for on in (False, True))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdl, "supported", lambda: True)


def test_kernels_of_few_rows_start_early(hopper: None) -> None:
    assert dependent_launch(1) == dependent_launch(MOST_ROWS) == ON
    assert dependent_launch(MOST_ROWS + 1) == dependent_launch(1, early=False) == OFF


def test_no_kernel_starts_early_in_ubatches(hopper: None) -> None:
    set_yield_ubatch(lambda: None)
    try:
        assert dependent_launch(1) == OFF
    finally:
        set_yield_ubatch(None)
    assert dependent_launch(1) == ON


def test_flashinfer_does_not_start_early() -> None:
    """Its kernel for a rank without sequences ends without waiting, and so before the kernels before it."""
    assert "begin_last(PDL)" in inspect.getsource(qk_rope)


def kernels_that_start_early() -> list[ast.FunctionDef]:
    """Return the kernels in Triton that have a parameter PDL."""
    files = Path(pdl.__file__).parent.glob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    found = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    taken = [it for it in found if "PDL" in (arg.arg for arg in it.args.args)]
    return [it for it in taken if not it.name.startswith("begin")]


def called(statement: ast.stmt) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)}


# What a kernel reads earlier, because no kernel of a step writes it before: weights in all kernels, and in a decode of
# a delta net the slots, which the host copies before a step, and states, which this kernel alone writes.
EARLY = ("weight_at", "scale_at")
EARLY_OF = {"_advance": ("slots_ptr", "state_at")}


def test_kernels_wait_before_they_read_or_write() -> None:
    kernels = kernels_that_start_early()
    assert len(kernels) > 8
    for kernel in kernels:
        waits = [bool(called(it) & {"begin", "begin_last"}) for it in kernel.body]
        assert any(waits), f"{kernel.name} does not wait"
        for statement in kernel.body[: waits.index(True)]:
            text = ast.unparse(statement)
            functions = {name for name in called(statement) if name.startswith(("_", "tl.store"))}
            assert not functions, f"{kernel.name} calls {functions} too early"
            if "tl.load" in called(statement):
                loads = text
                for name in (*EARLY, *EARLY_OF.get(kernel.name, ())):
                    loads = loads.replace(f"tl.load({name}", "")
                assert "tl.load" not in loads, f"{kernel.name} reads too early: {text}"


class Recorder:
    """A kernel that records the constants of its launches."""

    def __init__(self) -> None:
        self.forms: set[tuple[tuple[str, Any], ...]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: object, **constants: Any) -> None:
            found = {name: it for name, it in constants.items() if not torch.is_tensor(it)}
            self.forms.add(tuple(sorted(found.items())))

        return launch


def run_experts(num_rows: int, top_k: int, num_experts: int) -> None:
    """Route rows and multiply them, as a rank that holds all experts does."""
    ids = torch.zeros(num_rows, top_k, dtype=torch.int64)
    routing = route_on_device(ids, range(num_experts), num_experts=num_experts)
    x, w13 = torch.zeros(num_rows, 16).half(), torch.zeros(num_experts, 32, 16).half()
    gemm = TritonGroupedGemm(num_sms=1, hopper=True)
    gemm(ExpertInput(x, routing.offs_e, None, routing), w13, w13[:, :16].contiguous())


@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 6), (64, 8), (128, 8), (60, 4), (512, 10)])
def test_warm_up_meets_all_forms(
    hopper: None, monkeypatch: pytest.MonkeyPatch, num_experts: int, top_k: int
) -> None:
    """Sizes between those of the warm-up launch no other form, so that nothing compiles in traffic."""
    limit = 256
    names = {permute_pairs: "permute_pairs_few_kernel", grouped_gemm: "grouped_gemm_kernel"}
    recorders = {module: Recorder() for module in names}
    for module, name in names.items():
        monkeypatch.setattr(module, name, recorders[module])
    for size in warm_up_sizes(limit, dense=False):
        run_experts(size, top_k, num_experts)
    met = {module: set(recorder.forms) for module, recorder in recorders.items()}
    for size in range(1, limit):
        run_experts(size, top_k, num_experts)
    for module, recorder in recorders.items():
        assert recorder.forms == met[module]
        assert any(dict(form)["launch_pdl"] for form in met[module])
