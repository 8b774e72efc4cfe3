"""Tool calls in the text of models. Knows nothing of requests."""

from cluster.api.tools.base import CallFormat
from cluster.api.tools.glm import GLM45, KEY
from cluster.api.tools.granite import GRANITE
from cluster.api.tools.harmony import CHANNEL, HARMONY
from cluster.api.tools.hermes import HERMES, OPEN
from cluster.api.tools.json_calls import JSON
from cluster.api.tools.minimax import MINIMAX_M2
from cluster.api.tools.mistral import MISTRAL
from cluster.api.tools.qwen3_coder import CALL, QWEN3_CODER
from cluster.api.tools.sections import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2

FORMATS = {
    "hermes": HERMES,
    "json": JSON,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "kimi_k2": KIMI_K2,
    "glm45": GLM45,
    "minimax_m2": MINIMAX_M2,
    "qwen3_coder": QWEN3_CODER,
    "granite": GRANITE,
    "mistral": MISTRAL,
    "harmony": HARMONY,
}


def choose_format(name: str, chat_template: str) -> CallFormat:
    """Return the format `name`; `auto` selects the format that the chat template writes."""
    if name == "auto":
        name = _written_by(chat_template)
    return FORMATS[name]


def _written_by(chat_template: str) -> str:
    """Return the format in which a chat template writes the calls of a conversation."""
    if CHANNEL in chat_template:
        return "harmony"
    if KIMI_K2.markers[0] in chat_template:
        return "kimi_k2"
    if DEEPSEEK_V3.markers[0] in chat_template:
        return "deepseek_v3" if "```json" in chat_template else "deepseek_v31"
    if MINIMAX_M2.markers[0] in chat_template:
        return "minimax_m2"
    if CALL in chat_template:
        return "qwen3_coder"
    if GRANITE.markers[0] in chat_template:
        return "granite"
    if MISTRAL.markers[0] in chat_template:
        return "mistral"
    if KEY in chat_template:
        return "glm45"
    return "hermes" if OPEN in chat_template else "json"
