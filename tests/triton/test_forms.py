"""Our Triton kernels have one compiled form each, and their programs fit on an SM as often as the launches count on.

Triton compiles anew for an integer that is 1 or a multiple of 16 and for a pointer that is a multiple of 16 bytes,
unless told not to; a warm-up cannot meet all combinations of those. Without a GPU they are compiled for Hopper.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.triton.launches import CASES
from tests.triton.resident_launches import LAUNCHES

pytestmark = pytest.mark.timeout(600)  # the first test waits for the compiler

# Of an SM of Hopper: shared memory, of which each program's launch takes one KiB; registers; threads.
SHARED, RESERVED, REGISTERS, THREADS = 228 * 1024, 1024, 64 * 1024, 2048


# With these launches each large kernel is compiled; all tiles, numbers of ranks and of SMs are exhaustive.
SHORT = (
    *("8_rows_an_expert", "1000_rows_an_expert", "48_rows_an_expert_fp8", "16_rows_fp8"),
    *("push_fp8", "decodes", "8_rows_an_expert_mxfp4", "64_rows_an_expert_int4"),
    *("shared_decodes_of_128", "expert_lora_of_rank_128"),
)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the process says that compiles what the selected tests need."""
    items = [item for item in request.session.items if item.path == request.path]
    arguments = [
        item.callspec.params["launch"]
        for item in items
        if hasattr(item, "callspec") and "launch" in item.callspec.params
    ]
    if any(item.name == "test_every_form_compiles" for item in items):
        arguments.append("--every-form")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.triton.compile", *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_one_form_serves_all_sizes_and_offsets(compiled: dict[str, Any], case: str) -> None:
    found = compiled["forms"][case]
    assert found["first"] and not found["later"]


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(name, marks=[] if name in SHORT else pytest.mark.exhaustive)
        for name in LAUNCHES
    ],
)
def test_programs_fit_beside_each_other(compiled: dict[str, Any], launch: str) -> None:
    """Else the last ones begin when the first have ended, or wait for them for ever."""
    for needs in compiled["needs"][launch]:
        programs = needs["programs_per_sm"]
        assert programs * (needs["shared"] + RESERVED) <= SHARED, needs
        assert programs * needs["threads"] <= THREADS, needs
        # Registers are given to warps in units of 256, so 8 a thread.
        assert programs * needs["threads"] * -(-needs["registers"] // 8) * 8 <= REGISTERS, needs
        assert needs["local"] <= 16, f"registers spilled: {needs}"


def test_no_kernel_widens_what_it_has_rounded_to_e4m3(compiled: dict[str, Any]) -> None:
    """Of one form of each kernel."""
    assert not compiled["widened"]


@pytest.mark.exhaustive
def test_every_form_compiles(compiled: dict[str, Any]) -> None:
    """And none widens what it has rounded to e4m3."""
    assert not compiled["widened"]
