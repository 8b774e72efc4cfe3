"""Renders the OpenAPI document as one HTML page, which loads no script, style or font.

Knows nothing of the routes themselves.
"""

from collections.abc import Iterator
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { font: 600 1rem ui-monospace, monospace; margin: 2rem 0 0 }
h2 b { display: inline-block; min-width: 3.5rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .15rem .75rem .15rem 0; border-top: 1px solid #8884 }
code { font: 13px ui-monospace, monospace }
:root { color-scheme: light dark }
"""


def render_docs(document: dict[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    title = escape(document["info"]["title"])
    body = "".join(
        _operation(path, methods, operation, document)
        for path, methods, operation in _operations(document)
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title} API</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title} {escape(document['info']['version'])}</h1>"
        '<p>For tools: <a href="openapi.json">openapi.json</a>. Errors are '
        '<code>{"error": {"message", "type", "param", "code"}}</code>, below <code>/v1/messages</code> '
        '<code>{"type", "error": {"type", "message"}, "request_id"}</code>.</p>'
        f"{body}</body></html>\n"
    )


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (path, methods, operation); methods of a path with one description are joined."""
    for path, item in document["paths"].items():
        by_text: dict[str, list[str]] = {}
        for method, operation in item.items():
            by_text.setdefault(operation.get("description", ""), []).append(method)
        for methods in by_text.values():
            yield path, " ".join(methods).upper(), item[methods[0]]


def _operation(path: str, methods: str, operation: dict[str, Any], document: dict[str, Any]) -> str:
    text = escape(operation.get("description") or operation.get("summary", ""))
    content = operation.get("requestBody", {}).get("content", {}).values()
    fields = "".join(_fields(media["schema"], document) for media in content)
    return f"<h2><b>{methods}</b> {escape(path)}</h2><p>{text}</p>{fields}"


def _fields(schema: dict[str, Any], document: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = []
    for name, field in schema.get("properties", {}).items():
        mark = " *" if name in required else ""
        rows.append(
            f"<tr><td><code>{escape(name)}{mark}</code></td>"
            f"<td>{escape(_type(field, document))}</td>"
            f"<td>{escape(field.get('description', ''))}</td></tr>"
        )
    return f"<table><tr><th>field<th>type<th></tr>{''.join(rows)}</table>" if rows else ""


def _type(schema: dict[str, Any], document: dict[str, Any]) -> str:
    """Describe a JSON schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return _type(document.get("components", {}).get("schemas", {}).get(name, {}), document)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            arms = [_type(arm, document) for arm in schema[key] if arm.get("type") != "null"]
            return " or ".join(dict.fromkeys(arms))
    if "enum" in schema:
        return " or ".join(str(value) for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), document)}"
    if kind == "object" and "properties" in schema:
        return "{" + ", ".join(schema["properties"]) + "}"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    bounds = [f"from {low:g}"] if low is not None and abs(low) < 2**31 - 1 else []
    bounds += [f"to {high:g}"] if high is not None and high < 2**31 - 1 else []
    return " ".join([kind, *bounds])
