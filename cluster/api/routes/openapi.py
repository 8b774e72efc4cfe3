"""The OpenAPI document: what FastAPI cannot know, since bodies are read and answers written by hand here.

Knows nothing of what the routes do.
"""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

_REF = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MEDIA_TYPES = {
    "/metrics": ("text/plain",),
    "/v1/completions": ("application/json", "text/event-stream"),
    "/v1/chat/completions": ("application/json", "text/event-stream"),
}


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route with such a body. FastAPI does not read it itself: it would answer 422."""
    schema = model.model_json_schema(ref_template=_REF + "{model}")
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def complete_openapi(app: FastAPI, *, with_keys: bool) -> None:
    """Let app.openapi() tell of errors, media types, shared schemas and, with_keys, of the API key."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(original(), with_keys)
        assert app.openapi_schema is not None, "FastAPI keeps what it made"
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: dict[str, Any], with_keys: bool) -> None:
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own answers, never given
        schemas.pop(name, None)
    schemas["Error"] = _ERROR
    failed = {"application/json": {"schema": {"$ref": _REF + "Error"}}}
    for path, item in document["paths"].items():
        for operation in item.values():
            responses = operation["responses"]
            responses.pop("422", None)
            responses["4XX"] = {"description": "The request is wrong.", "content": failed}
            responses["5XX"] = {"description": "The server cannot answer.", "content": failed}
            if path in _MEDIA_TYPES:
                responses["200"]["content"] = {kind: {"schema": {}} for kind in _MEDIA_TYPES[path]}
            for media in operation.get("requestBody", {}).get("content", {}).values():
                schemas.update(media["schema"].pop("$defs", {}))
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
