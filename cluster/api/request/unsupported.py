"""Refuses parameters that other servers support and this server does not. Knows nothing of supported parameters.

A value that means "off" is accepted, because some clients always send all fields. Any other value is a 400, because an
answer that ignores a parameter is worse. Fields in neither table do not change the output and are ignored.
"""

from typing import Any

from cluster.errors import UnsupportedParameterError

# Field -> the values that change nothing. null always does so.
_COMMON: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "structural_tag": (),
    "lora_request": (),
}
COMPLETION: dict[str, tuple[Any, ...]] = _COMMON | {
    "suffix": ("",),
    "prompt_embeds": ([],),
}
CHAT: dict[str, tuple[Any, ...]] = _COMMON | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),
}
_HINTS = {"chat_template": " in a request; the server's setting serve.chat_template sets it"}


def refuse_unsupported(fields: dict[str, Any], table: dict[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedParameterError for the first field with a value that would change the output."""
    for name in table.keys() & fields.keys():
        value = fields[name]
        if value is None or any(_same(value, neutral) for neutral in table[name]):
            continue
        raise UnsupportedParameterError(
            f"{name} is not supported{_HINTS.get(name, '')}; leave it out", param=name
        )


def _same(value: Any, neutral: Any) -> bool:
    if isinstance(value, bool) or isinstance(neutral, bool):  # 0 == False in Python, not in JSON
        return value is neutral
    return bool(value == neutral)
