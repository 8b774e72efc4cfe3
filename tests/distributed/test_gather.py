"""The gather of a group: JSON that the ranks sign, so that no rank runs what a stranger sends."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.rank_pool import RankError, RankPool
from workers.rank import process_group
from workers.rank.process_group import _Signer
from workers.rank.rank_info import SignatureError

ROOT = Path(__file__).parents[2]


def _gather(rank: int, num_ranks: int, info: Any, secrets: list[bytes]) -> list[Any]:
    process_group._signer.begin(secrets[rank])
    found = process_group.gather_json({"rank": rank, "text": "x" * 1000 * rank})
    again = process_group.gather_json((rank, None, 0.1, True))
    assert again == [[peer, None, 0.1, True] for peer in range(num_ranks)]
    return found


def test_all_ranks_get_the_values_of_all(rank_pool: RankPool) -> None:
    expected = [{"rank": rank, "text": "x" * 1000 * rank} for rank in range(3)]
    assert rank_pool.run(_gather, 3, [b"secret"] * 3) == [expected] * 3


def test_a_rank_without_the_secret_is_refused(rank_pool: RankPool) -> None:
    with pytest.raises(RankError, match="what rank 1 has sent is not signed by a rank of this"):
        rank_pool.run(_gather, 2, [b"secret", b"guess"])


def test_a_part_is_good_for_its_rank_its_gather_and_its_content_alone() -> None:
    signer, peer = _Signer(), _Signer()
    signer.begin(b"secret"), peer.begin(b"secret")
    parts = [peer.signed(rank, [rank]) for rank in range(2)]
    for wrong in (parts[::-1], [parts[0], parts[1] + b" "], [parts[0], b""]):
        with pytest.raises(SignatureError):
            signer.opened(wrong)
    assert signer.opened(parts) == [[0], [1]]
    with pytest.raises(SignatureError, match="rank 0"):
        signer.opened(parts)  # sent again


def test_a_group_without_a_secret_gathers_nothing() -> None:
    with pytest.raises(AssertionError, match="no secret"):
        _Signer().signed(0, 1)


@pytest.mark.parametrize("folder", ["workers", "kernels"])
def test_no_rank_unpickles_what_comes_by_the_network(folder: str) -> None:
    pickled = re.compile(r"(gather|broadcast|scatter|send|recv)_object|import pickle|pickle\.load")
    assert hasattr(torch.distributed, "all_gather_object"), "the name is that of torch"
    sources = {path: path.read_text() for path in (ROOT / folder).rglob("*.py")}
    assert len(sources) > 50
    assert [str(path) for path, text in sources.items() if pickled.search(text)] == []
