"""What the HTTP layer can be told. Knows nothing of the YAML; the app's builder fills it in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any


def _fingerprint() -> str:
    try:
        return f"phalanx-{version('phalanx')}"
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "phalanx"


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Limits and defaults of one ingress.

    `default_sampling` holds temperature, top_p, top_k, min_p of the checkpoint's
    generation_config.json (`tokenizer.load_default_sampling`), used where a request says nothing.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    max_choices: int = 1024
    """Prompts times n of one request."""
    max_stop_strings: int = 16
    max_stop_chars: int = 1024
    inline_tokenize_chars: int = 8192
    """Longer texts are tokenised in a thread, so that they do not stall running streams."""
    stats_timeout_s: float = 2.0
    """How long /metrics waits for the ranks before it answers without them."""
    default_sampling: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    system_fingerprint: str = field(default_factory=_fingerprint)
