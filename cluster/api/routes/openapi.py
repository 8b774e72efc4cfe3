"""Completes the OpenAPI document: FastAPI has no schemas of bodies and answers, because the routes read and write them.

Knows nothing of the work of a route.
"""

from functools import cache
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
_MESSAGES = "/v1/messages"
_MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
_MEDIA_TYPES = {
    _MESSAGES: ("application/json", "text/event-stream"),
    "/metrics": ("text/plain",),
    "/v1/completions": ("application/json", "text/event-stream"),
    "/v1/chat/completions": ("application/json", "text/event-stream"),
    "/v1/responses": ("application/json", "text/event-stream"),
}


@cache
def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return `openapi_extra` of a route with a body of `model`. FastAPI must not parse the body: its errors are 422.

    The value is shared: FastAPI copies it into the document.
    """
    schema = model.model_json_schema(ref_template=_REF + "{model}")
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def complete_openapi(app: FastAPI, *, with_keys: bool) -> None:
    """Add errors, media types, shared schemas and, with_keys, the API key to app.openapi()."""
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
    schemas |= {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
    for path, item in document["paths"].items():
        name = "MessagesError" if path.startswith(_MESSAGES) else "Error"
        failed = {"application/json": {"schema": {"$ref": _REF + name}}}
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
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"key": []}, {"header": []}]
