"""JSON schemas of `input` and `tools` of /v1/responses, for the OpenAPI document."""

from pydantic import JsonValue

_TEXT_PART: dict[str, JsonValue] = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {
        "type": {"enum": ["input_text", "output_text"]},
        "text": {"type": "string"},
    },
}
_IMAGE_PART: dict[str, JsonValue] = {
    "type": "object",
    "required": ["type", "image_url"],
    "properties": {"type": {"const": "input_image"}, "image_url": {"type": "string"}},
}
_CONTENT: dict[str, JsonValue] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]}},
    ]
}
_ITEMS: dict[str, JsonValue] = {
    "anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "type": {"const": "message"},
                "role": {"enum": ["user", "assistant", "system", "developer"]},
                "content": _CONTENT,
            },
        },
        {
            "type": "object",
            "required": ["type", "call_id", "name", "arguments"],
            "properties": {
                "type": {"const": "function_call"},
                "call_id": {"type": "string"},
                "name": {"type": "string"},
                "arguments": {"type": "string"},
            },
        },
        {
            "type": "object",
            "required": ["type", "call_id", "output"],
            "properties": {
                "type": {"const": "function_call_output"},
                "call_id": {"type": "string"},
                "output": _CONTENT,
            },
        },
        {
            "type": "object",
            "required": ["type", "id"],
            "properties": {"type": {"const": "item_reference"}, "id": {"type": "string"}},
        },
        {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"const": "reasoning"}},
        },
    ]
}
INPUT: dict[str, JsonValue] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _ITEMS, "minItems": 1}]
}
_FUNCTION: dict[str, JsonValue] = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
FUNCTIONS: dict[str, JsonValue] = {
    "anyOf": [{"type": "array", "items": _FUNCTION}, {"type": "null"}]
}
