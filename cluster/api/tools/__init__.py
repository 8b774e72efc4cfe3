"""Tool calls: what the client offers, how models write calls, one file for each format."""

from cluster.api.tools.base import CallFormat
from cluster.api.tools.hermes import HERMES, OPEN
from cluster.api.tools.json_calls import JSON

FORMATS = {"hermes": HERMES, "json": JSON}


def choose_format(name: str, chat_template: str) -> CallFormat:
    """The format of that name; auto is what the chat template writes itself."""
    if name == "auto":
        name = "hermes" if OPEN in chat_template else "json"
    return FORMATS[name]
