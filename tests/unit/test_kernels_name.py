"""Our package is called `kernels`, like a Hugging Face distribution that transformers probes for.

transformers imports whatever has that name; if it found version metadata too, it would expect that
distribution's contents and die. So our package stays empty and the other is never installed.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import kernels

ROOT = Path(__file__).parents[2]


def test_the_package_is_ours_and_empty():
    assert kernels.__file__ is not None
    path = Path(kernels.__file__)
    assert path.parent == ROOT / "kernels"
    assert path.read_text() == ""
    assert not hasattr(kernels, "__version__")


def test_the_distribution_of_that_name_is_absent():
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")


def test_it_needs_no_gpu_libraries_and_transformers_imports_beside_it():
    code = (
        "import sys, kernels.backends.select\n"
        "print(sorted({'deep_ep', 'deep_gemm', 'flashinfer', 'ray'} & set(sys.modules)))\n"
        "from transformers import Qwen3MoeForCausalLM\n"
        "print(Qwen3MoeForCausalLM.__name__)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.stdout.split() == ["[]", "Qwen3MoeForCausalLM"], run.stderr
