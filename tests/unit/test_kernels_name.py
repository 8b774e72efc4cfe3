"""Our package is called `kernels`, like a Hugging Face distribution that transformers probes for.

transformers imports whatever has that name; if it found version metadata too, it would expect that
distribution's contents and die. So our package stays empty and the other is never installed.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from cluster.commands.preflight import Preflight
from cluster.config.examples import DEMO
from cluster.config.load import load_config

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


def test_it_needs_no_gpu_libraries():
    code = (
        "import sys, kernels.backends.select\n"
        "print({'deep_ep', 'deep_gemm', 'flashinfer', 'ray', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.stdout == "set()\n", run.stderr


def test_transformers_imports_beside_it():
    """In this process, in which other tests need the import too."""
    from transformers import Qwen3MoeForCausalLM

    assert issubclass(Qwen3MoeForCausalLM, torch.nn.Module)


def test_a_start_warns_of_the_distribution(tmp_path, monkeypatch):
    """`phalanx serve` prints the warnings of the check, which runs in a process of its own."""
    folder = tmp_path / "kernels-0.17.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: kernels\nVersion: 0.17.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    preflight = Preflight(load_config(DEMO, ["cluster.device=cpu"]), 0)
    try:
        (warning,) = [text for text in preflight.warnings() if "kernels" in text]
    finally:
        preflight.close()
    assert warning.startswith("the distribution 'kernels' 0.17.2 is installed")
    assert "Run `pip uninstall kernels`, then install Phalanx again" in warning


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"__init__.py": "from kernels.deps import get_kernel_dep"}, "is not that of Phalanx"),
        ({"deps.py": ""}, "has lost its __init__.py"),  # after `pip uninstall kernels`
    ],
)
def test_a_package_in_its_place_is_an_error_with_a_remedy(tmp_path, theirs, says):
    """Installed after Phalanx, the other distribution replaces our __init__.py; nothing could be imported."""
    for layer in ("cluster", "workers"):
        (tmp_path / layer).symlink_to(ROOT / layer)
    (tmp_path / "kernels").mkdir()
    for name, text in theirs.items():
        (tmp_path / "kernels" / name).write_text(text)
    # -S: without site-packages, where an editable installation finds ours in the second case
    command = [sys.executable, "-S", "-c", "import cluster"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1 and last.startswith("ImportError: the package 'kernels'"), run.stderr
    assert says in last and "Run `pip uninstall kernels`" in last
