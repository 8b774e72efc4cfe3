"""Translates a messages request into a chat request, so that both have the same prompt and the same answer.

Knows nothing of tokenizers or answers.
"""

from typing import Any

from cluster.api.messages.conversation import chat_messages
from cluster.api.messages.fields import CountTokensRequest, MessagesRequest
from cluster.api.request.protocol import ChatRequest, parse_chat
from cluster.errors import BadRequestError, UnsupportedParameterError

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING: dict[str, bool | None] = {"enabled": True, "disabled": False, "adaptive": None}


def chat_request(request: CountTokensRequest) -> ChatRequest:
    """Return the chat request with the prompt and the output format of `request`. Raises BadRequestError.

    The chat request has no max_tokens, because here a limit beyond the context is cut and not refused.
    """
    messages = chat_messages(request.system, request.messages)
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "continue_final_message": _continues(messages),
        "tools": _tools(request.tools),
        "response_format": _response_format(request),
        "reasoning_effort": (request.output_config or {}).get("effort"),
        **_tool_choice(request.tool_choice),
        **_thinking(request.thinking),
    }
    if isinstance(request, MessagesRequest):
        fields |= {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop": request.stop_sequences,
            "stream": request.stream,
            "seed": request.seed,
            "user": _session(request.metadata),
        }
    return parse_chat(fields)


def _session(metadata: Any) -> Any:
    """Return the user_id, in which Claude Code writes the session."""
    return metadata.get("user_id") if isinstance(metadata, dict) else None


def _continues(messages: list[dict[str, Any]]) -> bool:
    """Whether the answer continues the final message. Removes a final message of the assistant without content."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        return False
    if last.get("tool_calls"):
        raise BadRequestError(
            "messages ends with a tool_use block; add a user message with its tool_result",
            param="messages",
        )
    if any(part["text"] for part in last["content"]):
        return True
    messages.pop()
    return False


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise _bad("tools", "must be a list")
    return [_tool(tool, f"tools.{i}") for i, tool in enumerate(tools)]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise _bad(where, "must be an object with name and input_schema")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise UnsupportedParameterError(
            f"{where}.type: tools of type {str(kind)[:80]!r} are not supported; this server has no tools of its "
            "own, define the tool with name and input_schema",
            param=f"{where}.type",
        )
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise _bad(f"{where}.input_schema", "must be a JSON schema, an object")
    function = {"name": tool.get("name"), "parameters": schema}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type")
    fields: dict[str, Any] = {}
    if kind == "tool":
        if not isinstance(choice.get("name"), str):
            raise _bad("tool_choice.name", "must be the name of a tool")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(kind, str) and kind in _TOOL_CHOICES:
        fields["tool_choice"] = _TOOL_CHOICES[kind]
    else:
        raise _bad("tool_choice.type", "must be auto, any, tool or none")
    if (single := choice.get("disable_parallel_tool_use")) is not None:
        if not isinstance(single, bool):
            raise _bad("tool_choice.disable_parallel_tool_use", "must be true or false")
        fields["parallel_tool_calls"] = not single
    return fields


def _thinking(thinking: dict[str, Any] | None) -> dict[str, Any]:
    """Return the chat fields of `thinking`. adaptive leaves the choice to the model.

    A model without a switch thinks although it is disabled; the thoughts are then left out of the answer.
    """
    if thinking is None:
        return {}
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in _THINKING:
        raise _bad("thinking.type", "must be enabled, disabled or adaptive")
    budget = thinking.get("budget_tokens")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise _bad("thinking.budget_tokens", "must be a number of at least 1")
    display = thinking.get("display")
    if display not in (None, "summarized", "omitted"):
        raise _bad("thinking.display", "must be summarized or omitted")
    fields: dict[str, Any] = {"include_reasoning": display != "omitted" and kind != "disabled"}
    if (enabled := _THINKING[kind]) is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": enabled}
    return fields


def _response_format(request: CountTokensRequest) -> dict[str, Any] | None:
    config = request.output_config or {}
    chosen, where = config.get("format"), "output_config.format"
    if request.output_format is not None:
        if chosen is not None:
            raise _bad("output_format", "and output_config.format exclude each other")
        chosen, where = request.output_format, "output_format"
    if chosen is None:
        return None
    if not isinstance(chosen, dict) or chosen.get("type") != "json_schema":
        raise _bad(where, "must be {type: json_schema, schema}")
    if not isinstance(chosen.get("schema"), dict):
        raise _bad(f"{where}.schema", "must be a JSON schema, an object")
    schema = {"name": "answer", "schema": chosen["schema"]}
    return {"type": "json_schema", "json_schema": schema}


def _bad(param: str, problem: str) -> BadRequestError:
    return BadRequestError(f"{param} {problem}", param=param)
