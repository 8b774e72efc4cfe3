"""Makes chat messages of items. Knows nothing of their checks."""

from collections.abc import Iterable
from typing import Any

from cluster.api.responses.items import Item

_Message = dict[str, Any]


def chat_messages(instructions: str | None, items: Iterable[Item]) -> list[_Message]:
    """Return the messages of a conversation; reasoning, text and calls of one turn of the assistant are one message."""
    messages: list[_Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    turn: _Message | None = None  # the open turn of the assistant
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            message = {"role": "tool", "tool_call_id": item["call_id"]}
            messages.append(message | {"content": _content(item["output"])})
            turn = None
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _content(item["content"])})
            turn = None
        else:
            if turn is None or not _fits(kind, turn):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(item, turn)
    return messages


def _fits(kind: str, turn: _Message) -> bool:
    """Whether a turn can take another item of the kind: reasoning, then text, then calls."""
    if kind == "function_call":
        return True
    if kind == "message":
        return not turn["content"] and "tool_calls" not in turn
    return set(turn) == {"role", "content"} and not turn["content"]


def _add(item: Item, turn: _Message) -> None:
    if item["type"] == "message":
        turn["content"] = _content(item["content"])
    elif item["type"] == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        texts = [part["text"] for part in item["content"] or item["summary"]]
        if texts:
            turn["reasoning_content"] = "\n".join(texts)


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a chat message; chat joins several texts, and has an image part of the same form."""
    if len(parts) == 1 and "text" in parts[0]:
        return str(parts[0]["text"])
    return [{"type": "text", "text": part["text"]} if "text" in part else part for part in parts]
