"""Turns the output constraint of a request into a grammar of llguidance. Knows nothing of tools, reasoning or ranks.

The fields are OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`; a request may have one.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from cluster.api.request.json_body import is_deeper
from cluster.api.request.protocol import GenerationRequest, check_text
from cluster.api.settings import ApiSettings
from cluster.errors import BadRequestError, UnsupportedParameterError

Node = dict[str, Any]
"""One of llguidance's grammars: {"json_schema": ...} or {"lark_grammar": ...}."""

# Bounded, so that a model cannot indent without end; long enough for eight levels of four spaces.
WHITESPACE = r"[ \t\n\r]{1,33}"
_ARGUMENTS_WHITESPACE = " "  # of tool calls, which programs read
# Chains of 10,000 rules took llguidance 80 s; a grammar has at most one rule for each colon.
_MAX_RULES = 4000
# The formats that llguidance enforces. Validators ignore all other formats, and so does this module.
_FORMATS = {
    *("date-time", "time", "date", "duration", "uuid", "uri"),
    *("email", "hostname", "ipv4", "ipv6", "unknown"),
}
_DATA = ("const", "enum", "default", "examples")  # keywords with values that are not schemas
_NAMED = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
)  # keywords with a map of names to schemas
# Keywords of an object that allow or need properties that `properties` does not list.
_OPENING = frozenset(
    (
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"),
        *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "dependentRequired"),
    )
)
_SOURCES = ("json", "regex", "choice", "grammar", "json_object")


def json_schema_node(schema: dict[str, Any]) -> Node:
    """Return a grammar of JSON that matches the schema, with white space of `WHITESPACE`."""
    options = {"whitespace_pattern": WHITESPACE}
    return {"json_schema": {**_without_unknown_formats(schema), "x-guidance": options}}


def arguments_node(schema: dict[str, Any], *, strict: bool) -> Node:
    """Return a grammar of a tool's arguments.

    Not strict: keywords that llguidance does not support are ignored, and oneOf counts as anyOf.
    A schema that lists its properties and is silent about others allows no others, because functions refuse them.
    """
    options: dict[str, Any] = {"whitespace_pattern": _ARGUMENTS_WHITESPACE}
    if not strict:
        options |= {"lenient": True, "coerce_one_of": True}
    if _lists_all_properties(schema):
        schema = {**schema, "additionalProperties": False}
    return {"json_schema": {**_without_unknown_formats(schema), "x-guidance": options}}


@dataclass(frozen=True)
class Constraint:
    """A constraint from the field `param`; `schema` is the client's JSON schema, if the constraint is one.

    of_part: makes a node of a part of the schema, by the rules by which `node` was made of the whole.
    """

    param: str
    node: Node
    schema: Any = field(default=None, repr=False)
    of_part: Callable[[Any], Node] = json_schema_node


def find_constraint(request: GenerationRequest, settings: ApiSettings) -> Constraint | None:
    """Return the output constraint of a request; None if it has none."""
    if not request.asks_for_structure:
        return None
    found = list(_constraints(request))
    if len(found) > 1:
        params = " and ".join(param for param, _, _ in found)
        raise BadRequestError(f"{params} exclude each other: give one of them", param=found[1][0])
    if not found:
        return None
    param, kind, value = found[0]
    node, schema = _NODES[kind](param, value, settings)
    if "json_schema" in node:
        _apply_whitespace(node, request)
    return Constraint(param, node, schema)


def check_schema_limits(schema: Any, param: str, settings: ApiSettings) -> int:
    """Raise BadRequestError for a schema that is too large or too deep; return its size in bytes."""
    text = json.dumps(schema, ensure_ascii=False)
    check_text(text, param)
    size = len(text.encode())
    _check_size(size, param, settings)
    if is_deeper(schema, settings.max_schema_depth):
        raise BadRequestError(
            f"{param} is nested more than {settings.max_schema_depth} levels deep", param=param
        )
    return size


def _constraints(request: GenerationRequest) -> Iterator[tuple[str, str, Any]]:
    """Yield (param, kind, value) of every constraint of the request."""
    response_format = request.response_format
    if response_format is not None:
        yield from _from_response_format(response_format)
    options = request.structured_outputs or {}
    for kind in _SOURCES:
        if options.get(kind) is not None and options[kind] is not False:
            yield f"structured_outputs.{kind}", kind, options[kind]
    if options.get("structural_tag") is not None:
        raise _unsupported("structured_outputs.structural_tag")
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(request, f"guided_{kind}")
        if value is not None:
            yield f"guided_{kind}", kind, value


def _from_response_format(response_format: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    kind = response_format.get("type")
    if kind == "text":
        return
    if kind == "json_object":
        yield "response_format", "json_object", True
    elif kind == "json_schema":
        param = "response_format.json_schema"
        described = response_format.get("json_schema")
        if not isinstance(described, dict):
            raise BadRequestError(f"{param} must be an object with name and schema", param=param)
        if described.get("schema") is None:
            raise BadRequestError(f"{param}.schema is missing", param=f"{param}.schema")
        yield f"{param}.schema", "json", described["schema"]
    elif kind == "structural_tag":
        raise _unsupported("response_format.type")
    else:
        raise BadRequestError(
            "response_format.type must be text, json_object or json_schema",
            param="response_format.type",
        )


def _unsupported(param: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(f"{param}: structural tags are not supported", param=param)


def _json(param: str, value: Any, settings: ApiSettings) -> tuple[Node, Any]:
    if isinstance(value, str):
        _check_size(len(value), param, settings)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRequestError(f"{param} is a string that holds no JSON", param=param) from None
    if not isinstance(value, dict):
        raise BadRequestError(f"{param} must be a JSON schema, an object", param=param)
    check_schema_limits(value, param, settings)
    return json_schema_node(value), value


def _json_object(param: str, value: Any, _settings: ApiSettings) -> tuple[Node, Any]:
    if value is not True:
        raise BadRequestError(f"{param} must be true or false", param=param)
    return json_schema_node({"type": "object"}), None


def _regex(param: str, value: Any, settings: ApiSettings) -> tuple[Node, Any]:
    text = _text(param, value, settings)
    grammars = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
    return {"lark_grammar": grammars[0]["lark_grammar"]}, None


def _choice(param: str, value: Any, settings: ApiSettings) -> tuple[Node, Any]:
    if not isinstance(value, list) or not value or not all(isinstance(x, str) for x in value):
        raise BadRequestError(f"{param} must be a list of at least one string", param=param)
    _check_size(sum(len(choice) for choice in value), param, settings)
    for choice in value:
        check_text(choice, param)
    # A pattern, since Lark's strings have no way to write every character.
    pattern = "|".join(_escaped(choice) for choice in value)
    grammars = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return {"lark_grammar": grammars[0]["lark_grammar"]}, None


def _grammar(param: str, value: Any, settings: ApiSettings) -> tuple[Node, Any]:
    text = _text(param, value, settings)
    try:
        lark = any_to_lark(text)
    except Exception as error:  # the converter raises errors of any type
        reason = str(error) or type(error).__name__
        raise BadRequestError(
            f"{param} is neither Lark (with a rule `start:`) nor GBNF (with `root ::=`): "
            f"{reason[:300]}",
            param=param,
        ) from None
    if lark.count(":") > _MAX_RULES:
        raise BadRequestError(f"{param} has more than {_MAX_RULES} rules", param=param)
    return {"lark_grammar": lark}, None


_NODES = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}


def _text(param: str, value: Any, settings: ApiSettings) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequestError(f"{param} must be a string, and not an empty one", param=param)
    _check_size(len(value), param, settings)
    check_text(value, param)
    return value


def _check_size(size: int, param: str, settings: ApiSettings) -> None:
    if size > settings.max_schema_bytes:
        raise BadRequestError(
            f"{param} has {size} bytes, at most {settings.max_schema_bytes} are allowed",
            param=param,
        )


def _without_unknown_formats(schema: Any, names: bool = False) -> Any:
    """Return the schema without unsupported formats. names: the keys of this part are names, not keywords."""
    if isinstance(schema, list):
        return [_without_unknown_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if names:
        return {name: _without_unknown_formats(value) for name, value in schema.items()}
    return {
        key: value if key in _DATA else _without_unknown_formats(value, key in _NAMED)
        for key, value in schema.items()
        if key != "format" or not isinstance(value, str) or value in _FORMATS
    }


def _lists_all_properties(schema: dict[str, Any]) -> bool:
    """Whether the schema has properties, and no keyword that allows or needs others."""
    properties, required = schema.get("properties"), schema.get("required", [])
    return (
        isinstance(properties, dict)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and not _OPENING.intersection(schema)
    )


def _escaped(choice: str) -> str:
    return re.sub(r"[^\w ]", lambda match: rf"\x{{{ord(match[0]):x}}}", choice, flags=re.ASCII)


def _apply_whitespace(node: Node, request: GenerationRequest) -> None:
    """Apply vLLM's options for white space in JSON."""
    options = request.structured_outputs or {}
    pattern = options.get("whitespace_pattern")
    param = "structured_outputs.whitespace_pattern"
    if pattern is None:
        pattern, param = request.guided_whitespace_pattern, "guided_whitespace_pattern"
    if options.get("disable_any_whitespace") is True:
        node["json_schema"]["x-guidance"] = {"whitespace_flexible": False}
    elif pattern is not None:
        if not isinstance(pattern, str) or len(pattern) > 1000:
            raise BadRequestError(f"{param} must be a short string", param=param)
        node["json_schema"]["x-guidance"] = {"whitespace_pattern": pattern}
