"""The tokens that `phalanx check` prints for host memory and files, against bytes that are counted by hand."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from tests.family_cases import family_checkpoint

BLOCK, TOKENS, GIB = 16, 1000, 2**30
FLOAT = 4
NUM_BLOCKS = 63  # of 1000 tokens

# Bytes of a session: K and V of each cache, and what a family has beside them.
SESSIONS = {
    "qwen3_moe": NUM_BLOCKS * BLOCK * 3 * 2 * (2 * 64) * FLOAT,  # 3 layers, 2 heads of 64
    # Of 3 layers, the 2 with a window of 9 tokens, which touches 2 blocks, share a cache with the other one.
    "gpt_oss": (NUM_BLOCKS + 2) * BLOCK * 2 * 2 * (2 * 16) * FLOAT,
    # 1 layer over all tokens; 2 with a state of 4 heads of 16 x 24 values, and 2 tokens of 160 values before it.
    "qwen3_next": NUM_BLOCKS * BLOCK * 2 * 32 * FLOAT + 2 * (4 * 16 * 24 + 2 * 160) * FLOAT,
}


@pytest.mark.parametrize("family", SESSIONS)
def test_tiers_hold_as_many_sessions_as_their_bytes_allow(tmp_path: Path, family: str) -> None:
    checkpoint = family_checkpoint(tmp_path, family, "untied")
    cache = f"block_size: {BLOCK}, expected_tokens: {TOKENS}"
    path = tmp_path / "config.yaml"
    path.write_text(
        f"model: {{path: {checkpoint}}}\ncluster: {{device: cpu}}\n"
        f"cache: {{host_memory_gib: 0.25, disk_path: {tmp_path}, disk_gib: 2, {cache}}}\n"
    )
    result = CliRunner().invoke(app, ["check", str(path), "--json"])
    assert result.exit_code == 0, result.output
    expected = {}
    for key, gib in (("host_memory_gib", 0.25), ("disk_gib", 2)):
        num = int(gib * GIB / SESSIONS[family])
        expected[key] = (
            f"{gib:g} GiB a node hold {num * TOKENS:,} tokens: {num:,} sessions of {TOKENS:,} tokens"
        )
    assert json.loads(result.stdout)["tiers"] == expected
