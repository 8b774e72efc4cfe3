"""A process that compiles Triton kernels, and says in JSON for which shapes anew and what their programs need.

    python -m tests.triton.compile [--every-form] [LAUNCH ...]

Compiled are the large kernels of the named launches and the first form of each other kernel, with --every-form all
forms of all kernels that the cases launch. That a launch has a form of its own shows without its code.

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
from tests.triton.launches import CASES
from tests.triton.resident_launches import LAUNCHES

# The others' programs are small and do not wait for each other.
LARGE = (
    "grouped_gemm_kernel",
    "grouped_gemm_four_bit_kernel",
    "grouped_gemm_fp8_kernel",
    "hopper_grouped_gemm_kernel",
    "hopper_grouped_gemm_fp8_kernel",
    "hopper_skinny_fp8_kernel",
    "push_rows_kernel",
    "push_sums_kernel",
    "paged_decode_kernel",
    "latent_decode_kernel",
    "hopper_latent_decode_kernel",
    "warp_decode_fp8_kernel",
    "shared_decode_kernel",
    "expert_lora_shrink_kernel",
    "expert_lora_expand_kernel",
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


class Forms:
    """Triton's hook before it compiles: keeps the forms, and skips code that is not wanted of a kernel."""

    def __init__(self, every: bool):
        self._every, self._kernels = every, {*LARGE}
        self.seen: dict[str, str] = {}  # of a case: its forms by their keys

    def __call__(self, *, fn: Any, compile: dict[str, Any], repr: str, **_: Any) -> bool:
        self.seen.setdefault(f"{fn.name} {compile['key']}", repr)
        skip = not self._every and fn.name in self._kernels
        self._kernels.add(fn.name)
        return skip

    def of(self, case: Callable[[Inputs], None]) -> dict[str, list[str]]:
        """What the first step compiles, and what those of other sizes, whose slices begin elsewhere, compile more."""
        knobs.runtime.jit_cache_hook = lambda **_: not COMPILED
        case(Inputs(DEVICE, SIZES[0], OFFSETS[0]))  # imports the kernels
        forget_forms()
        self.seen.clear()
        # Called at the first launch of each form, whether its compiled code is on the disk or not.
        knobs.runtime.jit_cache_hook = self
        case(Inputs(DEVICE, SIZES[0], OFFSETS[0]))
        num_first = len(self.seen)
        for size in SIZES:
            for offset in OFFSETS:
                case(Inputs(DEVICE, size, offset))
                if COMPILED:
                    torch.cuda.synchronize()  # what went wrong there is told here
        knobs.runtime.jit_cache_hook = None
        found = list(self.seen.values())
        return {"first": found[:num_first], "later": found[num_first:]}


def compile_large(*, fn: Any, **_: Any) -> bool:
    """Triton's hook before it compiles: skips other kernels than the large ones, where nothing runs."""
    return fn.name not in LARGE


def needs_of(launch: Callable[[], list[int]], kernels: list[Any]) -> list[dict[str, Any]]:
    """What a program of each kernel needs: bytes of shared memory, threads, registers and local bytes of each.

    kernels   takes the compiled ones
    """
    knobs.runtime.jit_cache_hook = compile_large
    with nothing_runs() as compiled:
        programs = launch()
    knobs.runtime.jit_cache_hook = None
    own = [kernel for kernel in compiled if kernel is not None]
    kernels += own
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
    every, launches = "--every-form" in sys.argv, [it for it in sys.argv[1:] if it in LAUNCHES]
    forms_in = Forms(every or COMPILED)
    with nullcontext([]) if COMPILED else nothing_runs() as compiled:
        forms = {name: forms_in.of(case) for name, case in CASES.items()}
    kernels = [it for it in compiled if it is not None]
    needs = {name: needs_of(LAUNCHES[name], kernels) for name in launches}
    widened = sorted({it.name for it in kernels if rounds_and_widens(it.asm["ttgir"])})
    print(json.dumps({"forms": forms, "needs": needs, "widened": widened}))


if __name__ == "__main__":
    main()
