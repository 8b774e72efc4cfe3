"""The response object: the fields that repeat the request, and the states of a response. Knows nothing of events."""

import time
from typing import Any

from cluster.api.answer.events import image_details
from cluster.api.answer.generation import Generation
from cluster.api.responses.protocol import ResponsesRequest
from cluster.api.responses.tools import shown_tools
from cluster.errors import BadRequestError, ServingError

_TEXT: dict[str, Any] = {"type": "text"}
_FORMAT_FIELDS = ("type", "name", "description", "schema", "strict")


def repeated_fields(request: ResponsesRequest, generation: Generation) -> dict[str, Any]:
    """Return the fields that never change: the id, and the request with its defaults."""
    params = generation.choices[0].params
    text, reasoning = request.text, request.reasoning
    given = (text.format if text is not None else None) or _TEXT
    return {
        "id": generation.response_id,
        "object": "response",
        "created_at": generation.created,
        "background": bool(request.background),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": generation.model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {
            "format": {name: given[name] for name in _FORMAT_FIELDS if name in given},
            "verbosity": "medium",
        },
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": shown_tools(request.tools),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


def running_state(status: str) -> dict[str, Any]:
    """Return the fields of a response that is queued or in progress."""
    return {
        "status": status,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }


def ended_state(generation: Generation, output: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a response after its last token: the model has stopped, or a limit is reached."""
    complete = generation.choices[0].finish_reason != "length"
    reason = None if complete else {"reason": "max_output_tokens"}
    return running_state("completed" if complete else "incomplete") | {
        "completed_at": int(time.time()) if complete else None,
        "incomplete_details": reason,
        "output": output,
        "usage": _usage(generation),
    }


def failed_state(error: ServingError, output: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a response that ended with an error."""
    code = "invalid_prompt" if isinstance(error, BadRequestError) else "server_error"
    described = {"code": code, "message": error.message}
    return running_state("failed") | {"error": described, "output": output}


def _usage(generation: Generation) -> dict[str, Any]:
    num_input, num_output = generation.num_prompt_tokens, generation.num_completion_tokens
    return {
        "input_tokens": num_input,
        # Every prompt token is kept in the cache while there is room; the number written is not counted.
        "input_tokens_details": {
            "cached_tokens": generation.num_cached_tokens,
            "cache_write_tokens": 0,
            **image_details(generation.num_image_tokens),
        },
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": generation.num_reasoning_tokens},
        "total_tokens": num_input + num_output,
    }
