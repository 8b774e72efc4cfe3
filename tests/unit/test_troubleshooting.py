"""What README.md and docs/troubleshooting.md quote of the product is what the product prints."""

import ast
import io
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cluster.commands.check import check, render
from cluster.config.load import load_config
from tests.gpus_needed import FP8
from tests.published_configs import PUBLISHED

ROOT = Path(__file__).parents[2]
GAP = "\0"  # a value in a message


@cache
def messages() -> str:
    """All texts in the code of the product, a line each, with GAP for each value that Python puts in."""
    trees = [
        ast.parse(path.read_text())
        for layer in ("cluster", "workers", "kernels")
        for path in (ROOT / layer).rglob("*.py")
    ]
    return "\n".join(
        _text(node)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Constant)
    )


def _text(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
    return "".join(map(str, parts))


def quoted(page: str) -> list[str]:
    """The messages in the first column of the page's tables: code with more than one word."""
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row) if " " in text]


def test_messages_are_those_of_the_code() -> None:
    found = quoted((ROOT / "docs" / "troubleshooting.md").read_text())
    assert len(found) > 15
    missing = [text for text in found if not _printed(text)]
    assert not missing, "no code prints:\n" + "\n".join(missing)


def _printed(message: str) -> bool:
    """Each part stands in one text of the code. `...` is a value, and the code joins some messages at a comma."""
    parts = [part.split("...") for part in re.split(r", and |[,;] ", message)]
    patterns = [".*".join(re.escape(piece.strip()) for piece in pieces) for pieces in parts]
    patterns = [pattern for pattern in patterns if len(pattern.replace(".*", "")) > 1]
    return bool(patterns) and all(re.search(pattern, messages()) for pattern in patterns)


@pytest.mark.parametrize("text", ["the GPU has no space for ...", "no room for ... rank(s) on ..."])
def test_another_message_is_not_printed(text: str) -> None:
    assert not _printed(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page shows a machine without GPUs")
def test_the_readme_shows_what_check_prints(tmp_path: Path) -> None:
    model = PUBLISHED["qwen3_moe"] | {"quantization_config": FP8}
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = load_config(
        {
            "model": {"path": str(tmp_path), "max_model_len": 32768},
            "cluster": {"ranks": 1, "device": "cuda"},
        }
    )
    text = io.StringIO()
    render(check(config, num_api_keys=0), Console(file=text, width=250, no_color=True))
    printed = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    page = (ROOT / "README.md").read_text()
    (shown,) = re.findall(r"<!-- check -->\n```\n(.*?)```", page, re.DOTALL)
    assert [line for line in shown.splitlines() if " ".join(line.split()) not in printed] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 260
