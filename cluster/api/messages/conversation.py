"""Translates `system` and `messages` with their content blocks into chat messages. Knows nothing of other fields."""

from collections.abc import Callable, Iterator
from typing import Any

from cluster.errors import BadRequestError

Block = dict[str, Any]
ChatMessage = dict[str, Any]
Part = dict[str, Any]

# Claude Code puts this block before its instructions. It has a new value in every request, so the prompts of one
# conversation would share no prefix.
_BILLING = "x-anthropic-billing-header:"


def chat_messages(system: Any, messages: Any) -> list[ChatMessage]:
    """Return the chat messages of a conversation. Raises BadRequestError with the path of the wrong part."""
    if not isinstance(messages, list) or not messages:
        raise _bad("messages", "must be a list of at least one message")
    result: list[ChatMessage] = list(_system(system, "system"))
    for i, message in enumerate(messages):
        for translated in _message(message, f"messages.{i}"):
            _append(result, translated)
    for message in result:
        if "reasoning_content" in message:
            message["reasoning_content"] = "\n".join(filter(None, message["reasoning_content"]))
    return result


def _message(message: Any, where: str) -> Iterator[ChatMessage]:
    if not isinstance(message, dict):
        raise _bad(where, "must be an object with role and content")
    translate = _ROLES.get(role) if isinstance(role := message.get("role"), str) else None
    if translate is None:
        raise _bad(f"{where}.role", "must be user, assistant or system")
    return translate(message.get("content"), f"{where}.content")


def _append(messages: list[ChatMessage], message: ChatMessage) -> None:
    """Append a message, or join it to the last message if both are turns of the user or of the assistant.

    Lists grow in place: a copy for each message took minutes for a body of 4 MB.
    """
    last = messages[-1] if messages else {}
    if message["role"] != last.get("role") or message["role"] not in ("user", "assistant"):
        messages.append(message)
        return
    for name in ("content", "tool_calls", "reasoning_content"):
        if name in message:
            last.setdefault(name, []).extend(message[name])


def _system(content: Any, where: str) -> Iterator[ChatMessage]:
    if content is None:
        return
    blocks = _blocks(content, where, empty=True)
    texts = [_text_block(block, f"{where}.{i}") for i, block in enumerate(blocks)]
    texts = [text for text in texts if text and not text.startswith(_BILLING)]
    if texts:
        yield {"role": "system", "content": _parts(texts)}


def _user(content: Any, where: str) -> Iterator[ChatMessage]:
    """Yield the turn as user messages and, between them, a tool message for each result."""
    parts: list[Part] = []
    for i, block in enumerate(_blocks(content, where)):
        place = f"{where}.{i}"
        if block["type"] != "tool_result":
            parts.append(_part(block, place))
            continue
        if parts:
            yield {"role": "user", "content": parts}
            parts = []
        yield {
            "role": "tool",
            "tool_call_id": _string(block, "tool_use_id", place),
            "content": _result(block, f"{place}.content"),
        }
    if parts:
        yield {"role": "user", "content": parts}


def _assistant(content: Any, where: str) -> Iterator[ChatMessage]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(_blocks(content, where, empty=True)):
        place = f"{where}.{i}"
        kind = block["type"]
        if kind == "thinking":
            thoughts.append(_string(block, "thinking", place))
        elif kind == "tool_use":
            calls.append(_call(block, place))
        elif kind != "redacted_thinking":  # encrypted: no other server can read it
            texts.append(_text_block(block, place))
    message: ChatMessage = {"role": "assistant", "content": _parts(texts)}
    if thoughts:
        message["reasoning_content"] = thoughts  # joined at the end
    if calls:
        message["tool_calls"] = calls
    yield message


_ROLES: dict[str, Callable[[Any, str], Iterator[ChatMessage]]] = {
    "user": _user,
    "assistant": _assistant,
    "system": _system,
}


def _call(block: Block, where: str) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise _bad(f"{where}.input", "must be an object")
    function = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _result(block: Block, where: str) -> list[Part]:
    """Return the content of a tool's result. A chat message has no field for is_error, so the text begins with it."""
    content = block.get("content")
    blocks = [] if content is None else _blocks(content, where, empty=True)
    parts = [_part(part, f"{where}.{i}") for i, part in enumerate(blocks)]
    if block.get("is_error") is True:
        texts = [part["text"] for part in parts if part["type"] == "text"]
        images = [part for part in parts if part["type"] != "text"]
        return [*_parts(["Error: " + "\n".join(texts)]), *images]
    return parts


def _blocks(content: Any, where: str, *, empty: bool = False) -> list[Block]:
    """Return content as a list of blocks; a string is one block of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not (content or empty):
        least = "" if empty else " at least one"
        raise _bad(where, f"must be a string or a list of{least} content blocks")
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise _bad(f"{where}.{i}", "must be an object with a type")
    return content


def _part(block: Block, where: str) -> Part:
    """Return a text or an image of the user or of a tool."""
    if block["type"] != "image":
        return {"type": "text", "text": _text_block(block, where)}
    source = block.get("source")
    match source:
        case {"type": "base64", "data": str(data)}:
            # The content decides the format of an image, so the media type of the block is not read.
            url = f"data:;base64,{data}"
        case {"type": "url", "url": str(url)}:
            pass
        case _:
            raise _bad(
                f"{where}.source",
                "must be {type: base64, media_type, data} or {type: url, url}; files are not served",
            )
    return {"type": "image_url", "image_url": {"url": url}}


def _text_block(block: Block, where: str) -> str:
    if block["type"] != "text":
        raise BadRequestError(
            f"{where}.type: blocks of type {block['type'][:80]!r} are not supported here",
            param=f"{where}.type",
            code="unsupported_content_part",
        )
    return _string(block, "text", where)


def _parts(texts: list[str]) -> list[Part]:
    return [{"type": "text", "text": text} for text in texts]


def _string(block: Block, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _bad(f"{where}.{name}", "must be a string")
    return value


def _bad(param: str, problem: str) -> BadRequestError:
    return BadRequestError(f"{param} {problem}", param=param)
