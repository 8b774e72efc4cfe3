"""A cache of the Hub into which several processes fetch at once, without the Hub."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from workers import hub

NAME, COMMIT = "owner/tiny", "0" * 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the commit, empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = hub.snapshot_folder(NAME, COMMIT)
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("first", hub.ADAPTER)
def test_an_adapter_is_fetched_until_each_of_its_files_is_there(
    folder: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has fetched one of them, and still fetches the other, or was killed."""
    fetched = []
    monkeypatch.setattr(hub, "_fetch", lambda *args: fetched.append(args))
    (folder / first).touch()
    hub.fetch_adapter(NAME, COMMIT)
    assert fetched == [(NAME, COMMIT, hub.ADAPTER)]
    for file in hub.ADAPTER:
        (folder / file).touch()
    hub.fetch_adapter(NAME, COMMIT)
    hub.fetch_adapter(str(folder), None)
    assert len(fetched) == 1


def test_a_download_that_another_process_completes_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It renames the begun file between the list of the folder and the look at the file."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: [])
    blobs = folder.parents[1] / "blobs"
    blobs.mkdir()
    # In the list of the folder, but without a file behind it.
    (blobs / "weights.incomplete").symlink_to("renamed")
    hub._check_space(NAME, COMMIT, ["model.safetensors"])
