"""Keeps a measured overlap policy for the next start of the same model on the same hardware and software."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from kernels.host.cache_folder import cache_folder
from kernels.interface.registry import SEAMS, backend_class
from workers.overlap.policy import OverlapPolicy
from workers.stats.versions import OURS, source_digest, version_of


def cache_path(facts: Mapping[str, object]) -> Path:
    """Return the file of a policy that was measured under these facts."""
    text = json.dumps({key: repr(value) for key, value in facts.items()}, sort_keys=True)
    return cache_folder() / f"overlap-{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def software(folders: Iterable[Path] = OURS) -> str:
    """Return a text that differs where a step's speed may: a digest of our sources, and the libraries' versions."""
    libraries = (f"{name} {version_of(name)}" for name in _distributions())
    return " ".join([source_digest(folders), *libraries])


def load_policy(path: Path) -> OverlapPolicy | None:
    """Return the policy that `save_policy` wrote; None if the file cannot be read."""
    try:
        return OverlapPolicy(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def save_policy(path: Path, policy: OverlapPolicy) -> None:
    """Write the policy for the next start. If the folder cannot be written to, the next start measures again."""
    draft = path.with_suffix(".draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(asdict(policy), indent=2))
        draft.replace(path)
    except OSError:
        return


def _distributions() -> list[str]:
    """The distributions that any backend runs on."""
    backends = (backend_class(seam, name) for seam, names in SEAMS.items() for name in names)
    return sorted({name for backend in backends for name in backend.distributions})
