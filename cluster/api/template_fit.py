"""Adapts messages, tools and variables to what a chat template takes. Knows nothing of tokenizers and of requests."""

import json
import re
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

from cluster.errors import BadRequestError

# {% for part in message.content %} and message['content']
_PARTS_LOOP = re.compile(r"""{%-?\s*for\s+\w+\s+in\s+\w+(\.content|\[['"]content['"]\])""")
_REASONING = ("reasoning", "reasoning_content")
# The switch of DeepSeek-V3.1's template, where all others have enable_thinking.
_THINKING = re.compile(r"(?<![\w.'\"])thinking is (not )?defined")
_NO_PARAMETERS = {"type": "object", "properties": {}}
_INSTRUCTIONS = ("system", "developer")
_SHORT_ID = 9
_PROBE = ("system", "system", "user", "assistant", "system", "user")

Message = dict[str, Any]


class TemplateFit:
    """What one chat template takes.

    template   its text
    render     renders messages; raises BadRequestError if the template refuses them
    """

    def __init__(self, template: str, render: Callable[[list[Message]], str]) -> None:
        self._template = template
        self._render = render

    def messages(self, messages: list[Message]) -> list[Message]:
        """Return the messages in a form that the template takes."""
        misplaced = any(message["role"] in _INSTRUCTIONS for message in messages[1:])
        if misplaced and not self._takes_instructions:
            messages = _with_one_instruction(messages)
        return self._formed(messages)

    def variables(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the variables under the names that the template reads."""
        if "enable_thinking" in given and has_thinking_variable(self._template):
            return {"thinking": given["enable_thinking"], **given}
        return given

    def _formed(self, messages: list[Message]) -> list[Message]:
        if "developer" not in self._template:  # most templates have only the older name
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        if "message.thinking" in self._template:
            messages = [_without_thoughts_beside_content(message) for message in messages]
        if "message.tool_calls[0]" in self._template:
            messages = _with_single_calls(messages)
        if "length != 9" in self._template:
            messages = [_with_short_ids(message) for message in messages]
        if self._reads_parts:
            messages = [{**message, "content": _parts(message["content"])} for message in messages]
        return messages

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template takes contents only as lists of parts: it goes through them and tests no types."""
        return bool(_PARTS_LOOP.search(self._template)) and "is string" not in self._template

    @cached_property
    def _takes_instructions(self) -> bool:
        """Whether the template renders all messages of the system: in a row, and in the middle of a conversation."""
        texts = [f"instruction number {i}" for i in range(len(_PROBE))]
        messages = [
            {"role": role, "content": text} for role, text in zip(_PROBE, texts, strict=True)
        ]
        try:
            rendered = self._render(self._formed(messages))
        except BadRequestError:
            return False
        return all(text in rendered for text in texts)


@cache
def has_thinking_variable(template: str) -> bool:
    """Whether the switch for thoughts of a chat template is `thinking`."""
    return "enable_thinking" not in template and bool(_THINKING.search(template))


def complete_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with all that gpt-oss's and DeepSeek-V3.1's templates need.

    These are the fields that may be left out, and defaults of listed values as texts.
    """
    given = {key: value for key, value in tool["function"].items() if value is not None}
    function: dict[str, Any] = {"description": "", "parameters": _NO_PARAMETERS, **given}
    parameters = function["parameters"]
    if isinstance(properties := parameters.get("properties"), dict):
        texts = {key: _with_default_text(schema) for key, schema in properties.items()}
        function["parameters"] = {**parameters, "properties": texts}
    return {**tool, "function": function}


def _with_default_text(schema: Any) -> Any:
    if not isinstance(schema, dict) or not schema.keys() & {"enum", "oneOf"}:
        return schema
    default = schema.get("default", "")
    return schema if isinstance(default, str) else {**schema, "default": json.dumps(default)}


def _with_one_instruction(messages: list[Message]) -> list[Message]:
    """Return the messages with those of the system joined at the beginning."""
    given = [message for message in messages if message["role"] in _INSTRUCTIONS]
    content = "\n\n".join(message["content"] for message in given)
    others = [message for message in messages if message["role"] not in _INSTRUCTIONS]
    return [{**given[0], "content": content}, *others]


def _without_thoughts_beside_content(message: Message) -> Message:
    """Return the message; without its reasoning if it has content and calls, which gpt-oss's template refuses."""
    if not message.get("tool_calls") or not message.get("content"):
        return message
    return {key: value for key, value in message.items() if key not in _REASONING}


def _with_single_calls(messages: list[Message]) -> list[Message]:
    """Return the messages with at most one call each, and its results behind it: gpt-oss's template has one call."""
    result: list[Message] = []
    turn: list[Message] = []  # the open turn of several calls
    for message in messages:
        calls = message.get("tool_calls") or []
        if message["role"] == "tool" and turn:
            ids = [each["tool_calls"][0]["id"] for each in turn if "tool_calls" in each]
            known = message.get("tool_call_id") in ids
            turn.insert(_behind(turn, message["tool_call_id"]) if known else len(turn), message)
            continue
        result += turn
        turn = []
        if len(calls) > 1:
            turn = [{"role": message["role"], "content": "", "tool_calls": [it]} for it in calls]
            turn[0] = {**message, "tool_calls": calls[:1]}
        else:
            result.append(message)
    return result + turn


def _behind(turn: list[Message], call_id: str) -> int:
    """Return the position behind a call and its results."""
    ids = [each["tool_calls"][0]["id"] if "tool_calls" in each else None for each in turn]
    position = ids.index(call_id) + 1
    while position < len(turn) and turn[position]["role"] == "tool":
        position += 1
    return position


def _with_short_ids(message: Message) -> Message:
    """Return the message with ids of calls that Mixtral's template takes: nine letters and digits."""
    if message.get("tool_calls"):
        calls = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    return message


def _short_id(call_id: str | None) -> str:
    """Return an id of nine letters and digits, the same for the same id; ids of calls of this server stay."""
    letters = re.sub("[^A-Za-z0-9]", "", call_id or "")
    return letters[-_SHORT_ID:].rjust(_SHORT_ID, "0")


def _parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
