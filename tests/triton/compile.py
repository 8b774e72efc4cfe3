"""A process that compiles each Triton kernel, and says in JSON for which shapes anew and what its programs need.

    python -m tests.triton.compile

For Hopper, and without running anything, where there is no GPU; else for the GPU that is there, where steps are run. A
process of its own, because without a GPU the tests' own have Triton interpret.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.triton import pdl
from tests.triton.device import COMPILED, DEVICE
from tests.triton.launch_inputs import OFFSETS, SIZES, Inputs
from tests.triton.launches import CASES, LAUNCHES

# The others' programs are small and do not wait for each other.
LARGE = (
    "grouped_gemm_kernel",
    "grouped_gemm_fp8_kernel",
    "hopper_grouped_gemm_kernel",
    "hopper_grouped_gemm_fp8_kernel",
    "hopper_thin_fp8_kernel",
    "push_rows_kernel",
    "push_sums_kernel",
    "paged_decode_kernel",
    "paged_decode_fp8_kernel",
)


class NoGpu:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def nothing_runs() -> Iterator[list[Any]]:
    """Launches compile and no more; yields what they compiled."""
    compiled, run = [], JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run


def forget_forms() -> None:
    """As if this process had launched none of our kernels."""
    modules = [module for name, module in sys.modules.items() if name.startswith("kernels.triton.")]
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                value.device_caches = defaultdict(value.create_binder)


def forms_of(case: Callable[[Inputs], None]) -> dict[str, list[str]]:
    """What the first step compiles, and what those of other sizes, whose slices begin elsewhere, compile more."""
    case(Inputs(DEVICE, SIZES[0], OFFSETS[0]))  # imports the kernels
    forget_forms()
    compiled: list[str] = []
    # Called at the first launch of each form, whether its compiled code was on the disk or not.
    knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["repr"])
    case(Inputs(DEVICE, SIZES[0], OFFSETS[0]))
    first = list(compiled)
    for size in SIZES:
        for offset in OFFSETS:
            case(Inputs(DEVICE, size, offset))
    knobs.runtime.jit_post_compile_hook = None
    return {"first": first, "later": compiled[len(first) :]}


def needs_of(launch: Callable[[], list[int]]) -> list[dict[str, Any]]:
    """What a program of each kernel needs: bytes of shared memory, threads, registers and local bytes of each."""
    with nothing_runs() as compiled:
        programs = launch()
    own = [kernel for kernel in compiled if kernel.name in LARGE]
    return [
        {**_resources(kernel), "kernel": kernel.name, "programs_per_sm": count}
        for kernel, count in zip(own, programs, strict=True)
    ]


def _resources(kernel: Any) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told))
    return {
        "shared": kernel.metadata.shared,
        "threads": 32 * kernel.metadata.num_warps,
        "registers": int(found["REG"]),
        "local": int(found["STACK"]) + int(found["LOCAL"]),
    }


def rounds_and_widens(code: str) -> bool:
    """Return whether intermediate code converts values to e4m3, and these values from e4m3.

    Triton 3.6 returned wrong values of such a pair on an H200.
    """
    rounded: set[str] = set()
    for line in code.splitlines():
        found = re.match(r"\s*(%\w+) = (\S+) (%\w+)", line)
        if found is None:
            continue
        result, operation, operand = found.groups()
        if operand in rounded and operation == "tt.fp_to_fp":
            return True
        to_e4m3 = "f8E4M3" in line.rsplit("->", 1)[-1]
        if to_e4m3 and (operand in rounded or operation == "tt.fp_to_fp"):
            rounded.add(result)
    return False


def main() -> None:
    """Print {"forms": {case: forms}, "needs": {launch: needs}, "widened": kernels for which rounds_and_widens}."""
    if not COMPILED:
        driver.set_active(NoGpu())
        pdl.supported = lambda: True
    with nullcontext([]) if COMPILED else nothing_runs() as compiled:
        forms = {name: forms_of(case) for name, case in CASES.items()}
    widened = sorted({it.name for it in compiled if rounds_and_widens(it.asm["ttgir"])})
    if COMPILED:
        torch.cuda.synchronize()  # what went wrong there is told here
    needs = {name: needs_of(launch) for name, launch in LAUNCHES.items()}
    print(json.dumps({"forms": forms, "needs": needs, "widened": widened}))


if __name__ == "__main__":
    main()
