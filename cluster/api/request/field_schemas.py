"""JSON schemas of the fields that code checks instead of pydantic, for the OpenAPI document."""

from pydantic import JsonValue

from cluster.api.request.messages import IMAGE_PARTS, ROLES, TEXT_PARTS, VIDEO_PARTS

_STRINGS: dict[str, JsonValue] = {"type": "array", "items": {"type": "string"}}
TOKEN_IDS: dict[str, JsonValue] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "minItems": 1,
}
PROMPT: dict[str, JsonValue] = {
    "anyOf": [
        {"type": "string"},
        {**_STRINGS, "minItems": 1},
        TOKEN_IDS,
        {"type": "array", "items": TOKEN_IDS, "minItems": 1},
    ]
}
_TEXT_PART: dict[str, JsonValue] = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": [*TEXT_PARTS]},
        "text": {"type": "string"},
        "refusal": {"type": "string"},
    },
}
_URL: dict[str, JsonValue] = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "required": ["url"], "properties": {"url": {"type": "string"}}},
    ]
}
_IMAGE_PART: dict[str, JsonValue] = {
    "type": "object",
    "required": ["type", "image_url"],
    "properties": {"type": {"enum": [*IMAGE_PARTS]}, "image_url": _URL},
}
_VIDEO_PART: dict[str, JsonValue] = {
    "type": "object",
    "required": ["type", "video_url"],
    "properties": {"type": {"enum": [*VIDEO_PARTS]}, "video_url": _URL},
}
_PARTS: dict[str, JsonValue] = {
    "type": "array",
    "items": {"anyOf": [_TEXT_PART, _IMAGE_PART, _VIDEO_PART]},
}
_MESSAGE: dict[str, JsonValue] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": [*ROLES]},
        "content": {"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]},
    },
}
MESSAGES: dict[str, JsonValue] = {"type": "array", "items": _MESSAGE, "minItems": 1}
STOP: dict[str, JsonValue] = {"anyOf": [{"type": "string"}, _STRINGS, {"type": "null"}]}
TOOLS: dict[str, JsonValue] = {
    "anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]
}
TOOL_CHOICE: dict[str, JsonValue] = {
    "anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]
}
