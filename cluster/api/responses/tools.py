"""Translates `tools` and `tool_choice` to the forms of chat completions. Knows nothing of their schemas."""

from typing import Any

from cluster.errors import BadRequestError, UnsupportedParameterError

_FIELDS = ("name", "description", "parameters", "strict")
_MODES = ("auto", "required")


def chat_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return the functions in chat's form. Raises for tools that a server would have to run."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise BadRequestError("tools must be a list", param="tools")
    return [_chat_tool(tool, f"tools.{i}") for i, tool in enumerate(tools)]


def _chat_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise BadRequestError(f"{where} must be an object with type and name", param=where)
    kind = tool.get("type")
    if kind != "function":
        what = f"the tool {kind[:60]!r}" if isinstance(kind, str) else "a tool without a type"
        raise UnsupportedParameterError(
            f"{where}.type: {what} is not supported; this server runs no tools, it takes functions: "
            '{"type": "function", "name": ..., "parameters": ...}',
            param=f"{where}.type",
        )
    if not isinstance(tool.get("strict"), bool | None):
        raise BadRequestError(f"{where}.strict must be true or false", param=f"{where}.strict")
    return {"type": "function", "function": _given(tool)}


def _given(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in _FIELDS if tool.get(name) is not None}


def shown_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the tools of a checked request as the response object shows them."""
    defaults = {"description": None, "parameters": None, "strict": False}
    return [{"type": "function", **defaults, **_given(tool)} for tool in tools or ()]


def chat_tool_choice(choice: Any) -> Any:
    """Return `tool_choice` in chat's form."""
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return {"type": "function", "function": {"name": _name(choice, "tool_choice")}}
    if kind == "allowed_tools":
        return {"type": "allowed_tools", "allowed_tools": _allowed(choice)}
    if isinstance(kind, str):
        raise UnsupportedParameterError(
            f"tool_choice.type: {kind[:60]!r} is not supported; "
            "this server takes function and allowed_tools",
            param="tool_choice.type",
        )
    raise BadRequestError(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "name": ...}',
        param="tool_choice",
    )


def _allowed(choice: dict[str, Any]) -> dict[str, Any]:
    tools = choice.get("tools")
    if choice.get("mode", "auto") not in _MODES:
        raise BadRequestError("tool_choice.mode must be auto or required", param="tool_choice.mode")
    if not isinstance(tools, list) or not tools:
        raise BadRequestError(
            "tool_choice.tools must be a list of at least one tool", param="tool_choice.tools"
        )
    named = []
    for i, tool in enumerate(tools):
        where = f"tool_choice.tools.{i}"
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise BadRequestError(
                f'{where} must be {{"type": "function", "name": ...}}', param=where
            )
        named.append({"type": "function", "function": {"name": _name(tool, where)}})
    return {"mode": choice.get("mode", "auto"), "tools": named}


def _name(value: dict[str, Any], where: str) -> str:
    name = value.get("name")
    if not isinstance(name, str):
        raise BadRequestError(f"{where}.name must be a string", param=f"{where}.name")
    return name
