"""Checks `tools`, `tool_choice` and `parallel_tool_calls` of a chat request. Knows nothing of call formats."""

import re
from dataclasses import dataclass
from typing import Any

from cluster.api.request.protocol import ChatRequest, check_text
from cluster.api.request.structured import check_schema_limits
from cluster.api.settings import ApiSettings
from cluster.api.tools.base import Tool
from cluster.errors import BadRequestError, UnsupportedParameterError

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")  # OpenAI's own rule is stricter: [A-Za-z0-9_-]{1,64}


@dataclass(frozen=True)
class ToolOptions:
    """The tools of one request.

    tools      all tools, for the prompt
    callable   the tools that the model may call
    required   the model must call one of `callable`
    named      the client named the tool to call
    parallel   the model may call several tools
    hides      the prompt has `callable` alone, because without a required call no grammar forbids the other tools
    """

    tools: list[Tool]
    callable: list[Tool]
    required: bool
    named: bool
    parallel: bool
    hides: bool = False

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools of the prompt as the client defined them."""
        return [tool.definition for tool in (self.callable if self.hides else self.tools)]


def parse_tool_options(request: ChatRequest, settings: ApiSettings) -> ToolOptions | None:
    """Return the tools of a request; None if it has none or forbids calls."""
    choice = request.tool_choice
    if not request.tools:
        if request.tools not in (None, []):
            raise BadRequestError("tools must be a list", param="tools")
        if choice not in (None, "none", "auto"):
            raise BadRequestError("tool_choice needs tools", param="tool_choice")
        return None
    tools = _tools(request.tools, settings)
    several = request.parallel_tool_calls is not False
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed, required = _allowed(choice.get("allowed_tools"), tools)
        return ToolOptions(tools, allowed, required, False, several, hides=not required)
    chosen = _chosen(choice, tools)
    if choice == "none":
        return None
    if chosen is not None:
        return ToolOptions(tools, [chosen], True, named=True, parallel=False)
    required = choice == "required"
    return ToolOptions(tools, tools, required=required, named=False, parallel=several)


def _tools(value: Any, settings: ApiSettings) -> list[Tool]:
    if not isinstance(value, list):
        raise BadRequestError("tools must be a list", param="tools")
    if len(value) > settings.max_tools:
        raise BadRequestError(
            f"tools has {len(value)} entries, at most {settings.max_tools} are allowed",
            param="tools",
        )
    tools = [_tool(item, f"tools.{i}", settings) for i, item in enumerate(value)]
    num_bytes = sum(
        check_schema_limits(tool.definition, f"tools.{i}", settings) for i, tool in enumerate(tools)
    )
    if num_bytes > settings.max_schema_bytes:
        raise BadRequestError(
            f"tools have {num_bytes} bytes, at most {settings.max_schema_bytes} are allowed",
            param="tools",
        )
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            param = f"tools.{i}.function.name"
            raise BadRequestError(f"{param}: there is another tool {tool.name!r}", param=param)
        seen.add(tool.name)
    return tools


def _tool(value: Any, where: str, settings: ApiSettings) -> Tool:
    if not isinstance(value, dict):
        raise BadRequestError(f"{where} must be an object with type and function", param=where)
    if value.get("type", "function") != "function":
        raise UnsupportedParameterError(
            f'{where}.type: only "function" is supported', param=f"{where}.type"
        )
    function = value.get("function")
    where += ".function"
    if not isinstance(function, dict):
        raise BadRequestError(f"{where} must be an object with a name", param=where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequestError(
            f"{where}.name must be 1 to 128 of the characters a-z A-Z 0-9 _ - . : /",
            param=f"{where}.name",
        )
    if not isinstance(function.get("description", ""), str | None):
        raise BadRequestError(f"{where}.description must be a string", param=f"{where}.description")
    check_text(function.get("description") or "", f"{where}.description")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise BadRequestError(
            f"{where}.parameters must be a JSON schema, an object", param=f"{where}.parameters"
        )
    return Tool(name, parameters, function.get("strict") is True, {"type": "function", **value})


def _chosen(choice: Any, tools: list[Tool]) -> Tool | None:
    """Return the tool that tool_choice names; None if it names none."""
    if choice is None or choice in ("none", "auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type", "function") != "function":
        raise BadRequestError(
            'tool_choice must be "none", "auto", "required", '
            '{"type": "function", "function": {"name": ...}} or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
            param="tool_choice",
        )
    return _find(name, tools, "tool_choice.function.name")


def _allowed(allowed: Any, tools: list[Tool]) -> tuple[list[Tool], bool]:
    """Return the tools that `allowed_tools` names, and whether one of them must be called."""
    where = "tool_choice.allowed_tools"
    named = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(named, list) or not named:
        raise BadRequestError(
            f"{where}.tools must be a list of at least one tool", param=f"{where}.tools"
        )
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise BadRequestError(f"{where}.mode must be auto or required", param=f"{where}.mode")
    found = []
    for i, item in enumerate(named):
        function = item.get("function") if isinstance(item, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        param = f"{where}.tools.{i}.function.name"
        if not isinstance(name, str):
            raise BadRequestError(f"{param} must be a string", param=param)
        tool = _find(name, tools, param)
        if tool not in found:
            found.append(tool)
    return found, mode == "required"


def _find(name: str, tools: list[Tool], param: str) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    raise BadRequestError(f"{param}: there is no tool {name[:100]!r}", param=param)
