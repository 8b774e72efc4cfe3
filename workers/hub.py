"""Fetches checkpoints from the Hugging Face Hub into its cache on this machine. Needs no torch.

A checkpoint of the Hub is a name and a commit; on each machine both together are one folder of the cache. Only
huggingface_hub's own functions read the network, so its cache, locks, token, HF_ENDPOINT and HF_HUB_OFFLINE apply.
"""

import errno
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Configuration, tokenizer, chat template and the index of the weights: all that a start reads before the weights.
DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")
# Of sentence-transformers: what follows the model, and a small file for each such step.
MODULES, MODULE_CONFIGS = "modules.json", "[0-9]*_*/config.json"
SUBFOLDERS = "*/*"  # hold other formats and adapters; in the patterns of the Hub, * matches a / too

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class HubError(ValueError):
    """A checkpoint cannot be fetched; `key` is the setting that names it."""

    def __init__(self, reason: str, key: str = "model.path"):
        super().__init__(reason, key)  # all arguments, or it would not survive pickling
        self.reason, self.key = reason, key

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


def is_name(text: str) -> bool:
    """Whether a text has the form OWNER/MODEL."""
    return _NAME.fullmatch(text) is not None


def snapshot_folder(name: str, commit: str) -> Path:
    """Return the folder of a fetched checkpoint in the cache of this machine. Reads nothing."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots", commit)


def revisions(name: str, commit: str) -> list[str]:
    """Return the branches and tags of a commit that this machine has fetched."""
    folder = snapshot_folder(name, commit).parents[1] / "refs"
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(folder)) for path in files if path.read_text() == commit)


_commits: dict[
    tuple[str, str | None], str
] = {}  # that this process has fetched, by name and revision


def fetch_description(name: str, revision: str | None) -> str:
    """Fetch all files but the weights, and return the commit of `revision`; None is the main branch.

    Without a connection the cached files count. A process reads a branch once, and again if the cache was emptied.
    Raises HubError.
    """
    commit = _commits.get((name, revision))
    if commit is None or not (snapshot_folder(name, commit) / "config.json").exists():
        with _no_bars():
            found = _fetch(name, commit or revision, DESCRIPTION, ignored=SUBFOLDERS)
            if (found / MODULES).exists():
                _fetch(name, found.name, (MODULE_CONFIGS,))
        commit = _commits[name, revision] = found.name
    return commit


def fetch_adapter(path: str, revision: str | None) -> None:
    """Fetch the files of a LoRA adapter. Without a commit `path` is a folder: do nothing. Raises HubError."""
    if revision is None:
        return
    folder = snapshot_folder(path, revision)
    # Each of them: another process, which may have ended in between, fetches them in any order.
    if not all((folder / file).exists() for file in ADAPTER):
        with _no_bars():
            _fetch(path, revision, ADAPTER)


def find_adapter(name: str) -> str:
    """Fetch the adapter `name`, and return the commit of its main branch. Raises HubError."""
    with _no_bars():
        return _fetch(name, None, ADAPTER).name


def fetch_weights(path: str, commit: str | None, *, bars: bool = False) -> None:
    """Fetch all files of the checkpoint `path` that a rank reads. Without a commit `path` is a folder: do nothing.

    bars: show huggingface_hub's progress on standard error. Raises HubError.
    """
    if commit is None:
        return
    fetch_description(path, commit)
    files = _weight_files(path, commit)
    folder = snapshot_folder(path, commit)
    if all((folder / file).exists() for file in files):
        return
    _check_space(path, commit, files)
    if bars:
        _fetch(path, commit, files)
    else:
        with _no_bars():
            _fetch(path, commit, files)
    if not all((folder / file).exists() for file in files):
        raise HubError(
            f"{path} on the Hub holds neither {SINGLE_FILE} nor all files of {INDEX_FILE}; Phalanx reads weights "
            "in safetensors only: name another model, or set model.weights: dummy for random weights"
        )


def _weight_files(name: str, commit: str) -> list[str]:
    """Return the files that hold the tensors. Repositories may hold copies in other formats or other shards."""
    index = snapshot_folder(name, commit) / INDEX_FILE
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except FileNotFoundError:
        return [SINGLE_FILE]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise HubError(f"{index} cannot be read as a weight index: {error!r}") from error


def _fetch(
    name: str, revision: str | None, files: Sequence[str], *, ignored: str | None = None
) -> Path:
    from huggingface_hub import snapshot_download

    with _reasons(name, revision):
        found = snapshot_download(
            name, revision=revision, allow_patterns=list(files), ignore_patterns=ignored
        )
    return Path(found)


def _missing_bytes(name: str, commit: str, files: Sequence[str]) -> int:
    from huggingface_hub import snapshot_download

    with _reasons(name, commit), _no_bars():
        plan = snapshot_download(name, revision=commit, allow_patterns=list(files), dry_run=True)
    blobs = snapshot_folder(name, commit).parents[1] / "blobs"
    begun = sum(map(part_bytes, blobs.glob("*.incomplete")))
    return max(0, sum(file.file_size or 0 for file in plan if file.will_download) - begun)


def fetched_bytes(name: str, commit: str) -> int:
    """Return the bytes of the files of all commits in the cache, begun files too. Reads no network."""
    blobs = snapshot_folder(name, commit).parents[1] / "blobs"
    return sum(map(part_bytes, blobs.glob("*")))


def part_bytes(part: Path) -> int:
    """Return the bytes of a begun file, 0 without one. Another process may complete and rename it at any time."""
    try:
        return part.stat().st_size
    except FileNotFoundError:
        return 0


def _check_space(name: str, commit: str, files: Sequence[str]) -> None:
    """Raise HubError if the disk of the cache has too little room."""
    missing = _missing_bytes(name, commit, files)
    cache = snapshot_folder(name, commit).parents[2]
    free = shutil.disk_usage(cache).free
    if missing > free:
        raise HubError(
            f"{name} needs {missing / 1e9:,.1f} GB more in {cache}, the disk has {free / 1e9:,.1f} GB free; free "
            "some, or set the environment variable HF_HOME to a folder on a larger disk"
        )


@contextmanager
def _no_bars() -> Iterator[None]:
    """Switch huggingface_hub's bars off: ranks share a console, and small files need none."""
    from huggingface_hub import utils

    if utils.are_progress_bars_disabled():  # type: ignore[attr-defined]
        yield
        return
    utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        utils.enable_progress_bars()  # type: ignore[attr-defined]


@contextmanager
def _reasons(name: str, revision: str | None) -> Iterator[None]:
    """Turn every failure of huggingface_hub into a HubError with a remedy."""
    try:
        yield
    except (
        Exception
    ) as error:  # the library raises errors of its own, of its HTTP client, and OSErrors
        raise _reason(name, revision, error) from error


def _reason(name: str, revision: str | None, error: Exception) -> HubError:
    from huggingface_hub import constants, errors

    cause = error.__cause__
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(
        cause, errors.HfHubHTTPError | errors.FileMetadataError
    ):
        return _reason(
            name, revision, cause
        )  # of the request that came before the look into the cache
    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    token = "set the environment variable HF_TOKEN (or run `hf auth login`)"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        return HubError(
            f"{name} is gated: accept its terms at {hub}/{name}, then {token} to a token of that account"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(
            f"{name!r} is neither a folder here nor a public model of {hub}; check the name, or if the model is "
            f"private, {token}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(f"{revision!r} is no branch, tag or commit of {name}", "model.revision")
    if status in (401, 403):
        return HubError(
            f"{hub} refuses the token for {name} (HTTP {status}); {token} to a valid one"
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        offline = constants.is_offline_mode()
        why = "HF_HUB_OFFLINE forbids to fetch it" if offline else f"{hub} cannot be reached"
        return HubError(
            f"{name!r} is no folder here, {cache} holds no complete copy of it, and {why}; "
            f"{'unset it, ' if offline else ''}fetch the model where the Hub can be reached (`hf download {name}`), "
            "or name a folder in its place"
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return HubError(
            f"the disk of {cache} is full; free some, or set the environment variable HF_HOME to a folder on a "
            "larger disk"
        )
    return HubError(f"{name} cannot be fetched from {hub}: {type(error).__name__}: {error}")
