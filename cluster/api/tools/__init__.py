"""Tool calls in the text of models. Knows nothing of requests."""

from cluster.api.tools.base import CallFormat
from cluster.api.tools.hermes import HERMES, OPEN
from cluster.api.tools.json_calls import JSON

FORMATS = {"hermes": HERMES, "json": JSON}


def choose_format(name: str, chat_template: str) -> CallFormat:
    """Return the format `name`; `auto` selects the format that the chat template writes."""
    if name == "auto":
        name = "hermes" if OPEN in chat_template else "json"
    return FORMATS[name]
