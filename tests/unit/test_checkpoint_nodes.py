"""Each node of the ranks gets the checkpoint from a node that has it, over fake actors and real files."""

import asyncio
import queue
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from cluster.supervisor import checkpoint_nodes
from cluster.supervisor.checkpoint_nodes import CheckpointNodesError, spread
from workers.config import ModelSection
from workers.rank import checkpoint_holder
from workers.rank.checkpoint_holder import CheckpointHolder
from workers.weights.checkpoint_copy import CopyAddress, CopyError
from workers.weights.checkpoint_files import CheckpointFiles, FileFacts

OWN = "127.0.0.9"


class FakeNodeRank:
    """The checkpoint's calls of a rank's actor, on a folder that stands for its node."""

    def __init__(self, folder: Path, loaded: bool = False):
        self.folder, self.loaded = folder, loaded
        self.copied: list[str] = []
        self.fetched = 0
        self.holder = CheckpointHolder(ModelSection(path=str(folder)), "127.0.0.1")

    async def checkpoint_files(self) -> CheckpointFiles | None:
        return None if self.loaded else self.holder.files()

    async def share_checkpoint(self) -> CopyAddress:
        return self.holder.share()

    async def end_sharing(self) -> None:
        self.holder.close()

    async def copy_checkpoint(self, address: CopyAddress, files: dict[str, FileFacts]) -> None:
        self.copied.append(address.host)
        await asyncio.to_thread(self.holder.copy, address, files, lambda done, total: None)

    async def fetch_checkpoint(self, token: str | None) -> None:
        self.fetched += 1
        write(self.folder)


def write(folder: Path, text: str = "weights") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(text)


async def call(rank: FakeNodeRank, method: str, *arguments: Any) -> Any:
    return await getattr(rank, method)(*arguments)


def run(model: ModelSection, *ranks: FakeNodeRank) -> None:
    calls = {f"10.0.0.{n}": partial(call, rank) for n, rank in enumerate(ranks)}
    asyncio.run(spread(model, calls, OWN))


def folders(tmp_path: Path, *having: str) -> list[FakeNodeRank]:
    for name in having:
        write(tmp_path / name)
    return [FakeNodeRank(tmp_path / name) for name in ("a", "b", "c")]


def nowhere(tmp_path: Path) -> ModelSection:
    return ModelSection(path=str(tmp_path / "own"))


def test_the_nodes_that_lack_files_copy_them_from_a_rank_s_node(tmp_path: Path) -> None:
    ranks = folders(tmp_path, "b")
    run(nowhere(tmp_path), *ranks)
    assert [len(rank.copied) for rank in ranks] == [1, 0, 1]
    for rank in ranks:
        assert (rank.folder / "model.safetensors").read_text() == "weights"
    assert ranks[1].holder._server is None, "the server is closed"


def test_the_node_of_the_command_is_the_first_choice(tmp_path: Path) -> None:
    ranks = folders(tmp_path, "b", "own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.OWN", "127.0.0.1")
        run(nowhere(tmp_path), *ranks)
    assert [rank.copied for rank in ranks] == [["127.0.0.1"], [], ["127.0.0.1"]]
    assert (ranks[2].folder / "model.safetensors").read_text() == "weights"


def test_nothing_is_copied_where_all_nodes_have_the_files(tmp_path: Path) -> None:
    ranks = folders(tmp_path, "a", "b", "c")
    run(nowhere(tmp_path), *ranks)
    assert [rank.copied for rank in ranks] == [[], [], []]


def test_processes_that_have_read_their_weights_need_no_files(tmp_path: Path) -> None:
    rank = FakeNodeRank(tmp_path / "gone", loaded=True)
    run(nowhere(tmp_path), rank)
    assert not rank.copied and not rank.folder.exists()


def test_no_node_has_the_files(tmp_path: Path) -> None:
    ranks = folders(tmp_path, "b")
    (tmp_path / "b" / "model.safetensors").unlink()
    with pytest.raises(CheckpointNodesError) as caught:
        run(nowhere(tmp_path), *ranks)
    lines = str(caught.value).splitlines()
    assert "cluster.fetch_weights" in lines[0] and "model.path" in lines[0]
    assert lines[1:] == [
        "  10.0.0.0: config.json, model.safetensors",
        "  10.0.0.1: model.safetensors",
        "  10.0.0.2: config.json, model.safetensors",
        f"  {OWN}: config.json, model.safetensors",
    ]


def test_different_files_of_one_name_are_an_error_and_stay(tmp_path: Path) -> None:
    ranks = folders(tmp_path, "a")
    write(tmp_path / "b", "another model")
    with pytest.raises(
        CheckpointNodesError, match=r"differ from those of 10\.0\.0\.0; .*"
    ) as caught:
        run(nowhere(tmp_path), *ranks)
    assert str(caught.value).splitlines()[1:] == ["  10.0.0.1: model.safetensors"]
    assert (tmp_path / "b" / "model.safetensors").read_text() == "another model"
    assert not (tmp_path / "c").exists()


def test_one_node_fetches_a_model_of_the_hub_for_all(tmp_path: Path) -> None:
    ranks = folders(tmp_path)
    model = ModelSection(path="owner/model", revision="c0ffee")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workers.hub.snapshot_folder", lambda name, commit: tmp_path / "own")
        run(model, *ranks)
    assert [rank.fetched for rank in ranks] == [1, 0, 0]
    assert [len(rank.copied) for rank in ranks] == [0, 1, 1]


@pytest.mark.parametrize("end", ["silent", "dead"])
def test_a_source_that_is_gone_leaves_the_error_of_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(checkpoint_nodes, "END_S", 0.01)
    ranks = folders(tmp_path, "b")

    async def end_sharing() -> None:
        ranks[1].holder.close()
        if end == "dead":
            raise ActorDiedError
        await asyncio.Event().wait()

    async def copy_checkpoint(address: CopyAddress, files: dict[str, FileFacts]) -> None:
        raise CopyError("cannot be copied from 10.0.0.1")

    monkeypatch.setattr(ranks[1], "end_sharing", end_sharing)
    for rank in (ranks[0], ranks[2]):
        monkeypatch.setattr(rank, "copy_checkpoint", copy_checkpoint)

    async def bounded() -> None:
        calls = {f"10.0.0.{n}": partial(call, rank) for n, rank in enumerate(ranks)}
        async with asyncio.timeout(60):
            await spread(nowhere(tmp_path), calls, OWN)

    with pytest.raises(CopyError, match="cannot be copied"):
        asyncio.run(bounded())


def test_a_fetch_from_the_hub_reports_the_bytes_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a begun file, as of another process that holds the file's lock."""
    reports: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    blobs = tmp_path / "blobs"
    blobs.mkdir()

    def fetch(path: str, commit: str) -> None:
        for size in (1000, 3000):
            (blobs / "c0ffee.incomplete").write_bytes(bytes(size))
            while reports.get(timeout=60) != (size, 0):
                pass

    monkeypatch.setattr("workers.hub.snapshot_folder", lambda *_: tmp_path / "snapshots" / "commit")
    monkeypatch.setattr("workers.hub.fetch_weights", fetch)
    monkeypatch.setattr(checkpoint_holder, "PROGRESS_S", 0.001)
    model = ModelSection(path="owner/model", revision="c0ffee")
    CheckpointHolder(model, OWN).fetch(None, lambda *progress: reports.put(progress))
