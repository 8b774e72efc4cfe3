"""model.path as a name on the Hub, fetched by huggingface_hub from a server of this machine."""

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants
from rich.console import Console

from cluster.commands import download
from cluster.commands.check import check, render
from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from cluster.config.phalanx_config import PhalanxConfig
from cluster.supervisor import group
from cluster.supervisor.group import Group
from tests.checkpoints.writer import make_checkpoint
from tests.unit.hub_server import HubRepository, HubServer
from tests.unit.ray_fakes import FakeLauncher, FakeRank, group_spec, rank_config, until
from tests.unit.test_rebuild import Scene, run
from workers import hub
from workers.weights.checkpoint_files import find_files
from workers.weights.files import read_headers

REPOSITORY = Path(__file__).parents[2]
NAME = "owner/Tiny-MoE"
DESCRIPTION = [
    "config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A checkpoint in two shards, with copies of the weights in other formats beside them."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("model"), num_layers=1, hidden_size=32, num_shards=2
    )
    surplus = {
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": b"all",
        "onnx/config.json": b"{}",
        "original/params.json": b"{}",
        "original/tokenizer.model": b"a copy",
        "README.md": b"#",
    }
    return {file.name: file.read_bytes() for file in folder.iterdir()} | surplus


@pytest.fixture
def server(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HubServer]:
    server = HubServer()
    server.repositories[NAME] = HubRepository()
    server.repositories[NAME].commit(files)
    set_endpoint(monkeypatch, server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub._commits.clear()
    yield server
    hub._commits.clear()
    server.close()


def set_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Do to this process what HF_ENDPOINT does before huggingface_hub is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def yaml_path(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(f"model:\n  path: {NAME}\n")
    return path


def test_the_files_of_modules_are_fetched_from_their_folders(
    server: HubServer, files: dict[str, bytes]
) -> None:
    modules = {
        "modules.json": b"[]",
        "1_Pooling/config.json": b"{}",
        "2_Dense/model.safetensors": b"weights",
    }
    server.repositories[NAME].commit(files | modules)
    folder = hub.snapshot_folder(NAME, hub.fetch_description(NAME, None))
    assert (folder / "1_Pooling" / "config.json").exists()
    assert not (folder / "onnx").exists() and not (folder / "2_Dense").exists()
    found = find_files(folder, weights=False).files
    assert {"modules.json", "1_Pooling/config.json"} <= found.keys()


def problem(path: Path, *overrides: str) -> tuple[str, str]:
    """Key and message of the one thing that is wrong."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    (found,) = caught.value.problems
    return found.key, found.message


def fetch(config: PhalanxConfig) -> Path:
    hub.fetch_weights(config.model.path, config.model.revision)
    return config.model.folder


def test_a_name_is_fetched_in_two_parts(server: HubServer, yaml_path: Path, tmp_path: Path) -> None:
    config = load_config(yaml_path)
    assert (config.model.path, config.serve.model_name) == (NAME, NAME)
    assert config.model.revision == server.repositories[NAME].branches["main"]
    assert config.model.folder.is_relative_to(tmp_path / "cache")
    assert set(DESCRIPTION) <= set(server.fetched())
    assert not {"params.json", "tokenizer.model"} & set(server.fetched()), "files of subfolders"
    assert not [name for name in server.fetched() if name.endswith((".safetensors", ".bin", ".md"))]

    server.requests.clear()
    folder = fetch(config)
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert server.fetched() == shards
    assert len(read_headers(folder)) > 10
    assert server.tokens == {None}

    server.requests.clear()
    fetch(load_config(yaml_path))
    assert not server.requests, "a process resolves a branch once"
    hub._commits.clear()
    fetch(load_config(yaml_path))
    assert [request.split("/")[1] for request in server.requests] == ["api"], "the main branch"


def test_one_file_of_weights(server: HubServer, yaml_path: Path, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", num_layers=1, hidden_size=32)
    server.repositories[NAME].commit({file.name: file.read_bytes() for file in folder.iterdir()})
    fetch(load_config(yaml_path))
    assert "model.safetensors" in server.fetched()


def test_a_revision(server: HubServer, yaml_path: Path, files: dict[str, bytes]) -> None:
    repository = server.repositories[NAME]
    first = load_config(yaml_path).model.revision
    longer = json.loads(files["config.json"]) | {"max_position_embeddings": 77}
    second = repository.commit({**files, "config.json": json.dumps(longer).encode()})
    repository.branches["old"] = str(first)
    hub._commits.clear()
    assert load_config(yaml_path).model.revision == second
    for revision in ("old", str(first)):
        config = load_config(yaml_path, [f"model.revision={revision}"])
        assert config.model.revision == first
    assert "77" in problem(yaml_path, "model.max_model_len=78")[1]


def test_check_prints_revision_and_commit(server: HubServer, yaml_path: Path) -> None:
    """The branch that was named, and the commit that every rank and every later start reads."""
    repository = server.repositories[NAME]
    commit = repository.branches["main"]
    repository.branches["v1"] = commit
    assert check(load_config(yaml_path)).checkpoint == f"{NAME}, commit {commit} (main)"
    hub._commits.clear()
    report = check(load_config(yaml_path, ["model.revision=v1"]))
    assert report.checkpoint == f"{NAME}, commit {commit} (main, v1)"
    console = Console(file=io.StringIO(), width=60)
    render(report, console)
    assert f"checkpoint: {report.checkpoint}\n" in console.file.getvalue()


def test_a_folder_wins_over_a_name(
    server: HubServer, yaml_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / NAME, num_layers=1, hidden_size=32)
    config = load_config(yaml_path)
    assert (config.model.path, config.model.revision) == (str(folder), None)
    assert config.model.folder == folder and config.serve.model_name == "Tiny-MoE"
    fetch(config)
    shutil.rmtree(folder)
    folder.mkdir()
    assert "holds no config.json" in problem(yaml_path)[1]
    assert server.requests == []
    # An override starts at the current folder.
    monkeypatch.chdir(tmp_path / "owner")
    assert load_config(yaml_path, [f"model.path={NAME}"]).model.revision is not None


@pytest.mark.parametrize(
    "path", ["/owner/model", "./owner/model", "model", "a/b/c", "~/model", "../a"]
)
def test_paths_that_are_no_names(path: str, server: HubServer, yaml_path: Path) -> None:
    key, message = problem(yaml_path, f"model.path={path}")
    assert key == "model.path" and "is not a folder" in message
    assert server.requests == []


def test_a_wrong_name(server: HubServer, yaml_path: Path) -> None:
    key, message = problem(yaml_path, "model.path=models/dem")
    assert (
        key == "model.path"
        and "'models/dem' is neither a folder here nor a public model" in message
    )
    assert server.url in message and "HF_TOKEN" in message


def test_a_wrong_revision(server: HubServer, yaml_path: Path) -> None:
    key, message = problem(yaml_path, "model.revision=v9")
    assert (key, message) == ("model.revision", f"'v9' is no branch, tag or commit of {NAME}")


def test_a_revision_of_a_folder(server: HubServer, yaml_path: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / NAME, num_layers=1, hidden_size=32)
    key, message = problem(yaml_path, "model.revision=main")
    assert key == "model.revision" and "model.path is a folder here" in message


def test_tokens(server: HubServer, yaml_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = server.repositories[NAME]
    repository.private_to = "secret"
    assert "if the model is private, set the environment variable HF_TOKEN" in problem(yaml_path)[1]
    monkeypatch.setenv("HF_TOKEN", "wrong")
    key, message = problem(yaml_path)
    assert key == "model.path" and "refuses the token" in message and "wrong" not in message
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert load_config(yaml_path).model.revision
    repository.gated = True
    monkeypatch.setenv("HF_TOKEN", "other")
    repository.private_to = None
    server.repositories["owner/gated"] = repository
    key, message = problem(yaml_path, "model.path=owner/gated")
    assert key == "model.path" and f"accept its terms at {server.url}/owner/gated" in message


def test_without_a_connection(
    server: HubServer, yaml_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_endpoint(monkeypatch, "http://127.0.0.1:9")
    key, message = problem(yaml_path)
    assert key == "model.path" and "http://127.0.0.1:9 cannot be reached" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids to fetch it" in problem(yaml_path)[1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    set_endpoint(monkeypatch, server.url)
    config = load_config(yaml_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub._commits.clear()
    assert load_config(yaml_path) == config, "the cached files count"
    with pytest.raises(hub.HubError, match="HF_HUB_OFFLINE forbids"):
        fetch(config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fetch(config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fetch(config)


def test_a_hub_with_an_error(server: HubServer, yaml_path: Path) -> None:
    server.broken = True
    key, message = problem(yaml_path)
    assert key == "model.path" and "503" in message


def test_a_full_disk(server: HubServer, yaml_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(yaml_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 0))
    with pytest.raises(hub.HubError, match=r"GB more in .*, the disk has 0.0 GB free; .*HF_HOME"):
        fetch(config)


def test_weights_without_safetensors(
    server: HubServer, yaml_path: Path, files: dict[str, bytes]
) -> None:
    kept = {name: content for name, content in files.items() if "safetensors" not in name}
    server.repositories[NAME].commit(kept)
    with pytest.raises(hub.HubError, match="in safetensors only"):
        fetch(load_config(yaml_path))


@pytest.fixture
def in_processes(server: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let new processes find the server and the cache by the variables of huggingface_hub."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def test_a_download_before_the_start(
    server: HubServer, in_processes: None, yaml_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = load_config(yaml_path)
    download.run(config)
    assert len(read_headers(config.model.folder)) > 10
    out, err = capfd.readouterr()
    assert "Fetching 2 files" in err and not out, "huggingface_hub's bar"
    server.repositories[NAME].gated = True
    shutil.rmtree(config.model.folder.parents[1] / "blobs")
    with pytest.raises(hub.HubError, match="accept its terms"):
        download.run(config)


def test_a_download_ends_at_a_signal(
    server: HubServer, in_processes: None, yaml_path: Path
) -> None:
    config = load_config(yaml_path)
    server.stall = True  # until `close`, so that only the signal can end the download
    download.run(config, server.stalled.is_set)
    assert server.stalled.is_set()
    assert not list(config.model.folder.glob("*.safetensors"))


def test_what_needs_no_download(server: HubServer, yaml_path: Path) -> None:
    assert download.is_needed(load_config(yaml_path))
    for override in ("model.weights=dummy", "cluster.ray_address=auto"):
        assert not download.is_needed(load_config(yaml_path, [override])), override


def test_the_configuration_needs_no_torch(
    server: HubServer, in_processes: None, yaml_path: Path
) -> None:
    program = (
        "import sys; from cluster.config.load import load_config\n"
        "print(load_config(sys.argv[1]).model.folder); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, yaml_path],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == load_config(yaml_path).model.folder


def test_a_rebuild_waits_for_a_hub_that_cannot_be_reached(
    server: HubServer, yaml_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files have left the disk of the node too; a process that lives has fetched them before."""
    model = load_config(yaml_path).model
    hub.fetch_weights(model.path, model.revision)
    weights = hub._weight_files(model.path, model.revision)

    async def fetch_checkpoint(rank: FakeRank, token: str | None) -> None:
        await asyncio.to_thread(hub.fetch_weights, model.path, model.revision)

    async def scenario() -> None:
        now = Scene(rebuild_attempts=1, hang_timeout_s=60.0)
        roster = now.group._roster
        roster.config = roster.wanted = roster.config.model_copy(update={"model": model})
        await now.serving(0)
        shutil.rmtree(constants.HF_HUB_CACHE)
        monkeypatch.setattr(
            constants, "HF_HUB_OFFLINE", True
        )  # without a connection it takes 20 s to fail
        now.kill(1)
        await until(lambda: now.group.health.epoch > 3)
        state, _, error = now.group.health[:3]
        assert state == "rebuilding" and error.count("HF_HUB_OFFLINE forbids to fetch it") == 1
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        await until(lambda: now.group.health.state == "serving")
        await now.close()

    monkeypatch.setattr(FakeRank, "fetch_checkpoint", fetch_checkpoint)
    monkeypatch.setattr(group, "FILES_RETRY_S", 0.01)
    monkeypatch.setattr(group, "STOP_TIMEOUT_S", 0.02)
    run(scenario())
    assert {path.name for path in model.folder.iterdir()} >= {"config.json", *weights}


def test_each_node_fetches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the token of the supervisor, which no variable of a process may carry: Ray writes them to its logs."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    config = rank_config(4)
    model = config.model.model_copy(update={"revision": "0" * 40})
    ranks = [FakeRank(rank, address=f"10.0.0.{rank // 2}") for rank in range(4)]
    for rank in ranks:
        rank.node_id = rank.address
    config = config.model_copy(update={"model": model, "num_nodes": 2})
    spec = replace(group_spec(), ranks=config)
    subject = Group(spec, FakeLauncher(ranks), start_timeout_s=5.0)
    asyncio.run(subject.start())
    assert subject.health.state == "serving", subject.health.error
    calls = [rank.calls["fetch_checkpoint"] for rank in ranks]
    assert calls == [[("hf_secret",)], [], [("hf_secret",)], []]
    stages = [name for name, _ in subject.status.stages]
    assert stages[:3] == ["placement", "processes", "checkpoint"]
