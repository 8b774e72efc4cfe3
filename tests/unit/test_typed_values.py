"""Arguments without quotes: the schema decides what a value is, in answers and in grammars."""

import json

import pytest

from cluster.api.tools import FORMATS
from cluster.api.tools.base import CallDelta, Tool
from cluster.api.tools.typed_values import schemas, value_rules
from cluster.api.tools.value_types import ALL, value_types

DEFS = {
    "Color": {"enum": ["red", "blue"], "type": "string"},
    "Tree": {"type": "object", "properties": {"kids": {"$ref": "#/$defs/Tree"}}},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Code": {"allOf": [{"$ref": "#/$defs/Color"}]},
}
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
INTEGER, BOOLEAN = {"type": "integer"}, {"type": "boolean"}
LIST, OBJECT = {"type": "array", "items": {"type": "string"}}, {"type": "object"}

CASES = [  # schema, text of the model, value
    # A string stays one whatever it looks like, also if it may be missing.
    (OPTIONAL, "00123", "00123"),
    (OPTIONAL, "5", "5"),
    (OPTIONAL, "true", "true"),
    (OPTIONAL, '{"a": 1}', '{"a": 1}'),
    (OPTIONAL, "null", None),
    (OPTIONAL, "None", None),
    ({"type": ["string", "null"]}, "5", "5"),
    ({"type": "string", "nullable": True}, "null", None),
    ({"type": "string"}, "None", "None"),
    ({"$ref": "#/$defs/Color"}, "red", "red"),
    ({"$ref": "#/$defs/Code"}, "5", "5"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"const": "5"}, "5", "5"),
    # Values as Python writes them, because chat templates write earlier calls so.
    (BOOLEAN, "True", True),
    (BOOLEAN, "false", False),
    (BOOLEAN, "\n True ", True),
    ({"anyOf": [INTEGER, {"type": "null"}]}, "None", None),
    (INTEGER, "null", None),
    (LIST, "['a', \"b's\"]", ["a", "b's"]),
    (OBJECT, "{'a': True, 'b': [None, 1.5]}", {"a": True, "b": [None, 1.5]}),
    (OBJECT, "{'é': '</p'}", {"é": "</p"}),
    ({"$ref": "#/$defs/Tree"}, "{'kids': {}}", {"kids": {}}),
    # JSON as before; what is neither becomes a string.
    (INTEGER, "5", 5),
    ({"type": "number"}, "1e3", 1000.0),
    (LIST, '["a"]', ["a"]),
    (INTEGER, "many", "many"),
    (BOOLEAN, "yes", "yes"),
    (LIST, "['a'", "['a'"),
    (LIST, "[open('x')]", "[open('x')]"),
    (OBJECT, "{1, 2}", "{1, 2}"),
    (LIST, "[1e999]", [1e999]),
    (LIST, "[" * 5000, "[" * 5000),
    (LIST, "['" + "-" * 5000 + "1", "['" + "-" * 5000 + "1"),
    # Where a number and a string are possible, what reads as a number is one.
    ({"type": ["string", "integer"]}, "5", 5),
    ({"type": ["string", "integer"]}, "True", "True"),
    ({}, "True", "True"),
    ({}, "5", 5),
    ({"type": "unheard"}, "5", 5),
    ({"$ref": "#/$defs/Loop"}, "5", 5),
    ({"$ref": "#/$defs/none"}, "5", 5),
    ({"$ref": "other.json"}, "5", 5),
]


def tool_of(schema, **others):
    parameters = {"type": "object", "properties": {"key": schema}, "$defs": DEFS, **others}
    return Tool("f", parameters, False, {})


def written(name, key, value):
    """A call of f with one argument as models of a format write it."""
    if name == "glm45":
        return f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
    if name == "minimax_m2":
        return (
            f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="{key}">{value}</parameter>\n'
            "</invoke>\n</minimax:tool_call>"
        )
    return (
        f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n"
        "</tool_call>"
    )


def arguments(name, tool, text):
    for size in (len(text), 1):
        parser = FORMATS[name].parser([tool])
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        found = [piece for part in parts for piece in parser.push(part)] + parser.flush()
        assert all(isinstance(piece, CallDelta) for piece in found), found
        yield json.loads("".join(piece.arguments for piece in found))


@pytest.mark.parametrize("name", ["glm45", "minimax_m2", "qwen3_coder"])
@pytest.mark.parametrize(("schema", "text", "value"), CASES)
def test_the_schema_decides_what_a_value_is(name, schema, text, value):
    for found in arguments(name, tool_of(schema), written(name, "key", text)):
        assert found == {"key": value}
        assert type(found["key"]) is type(value)


def test_other_arguments_follow_additional_properties():
    tool = tool_of({}, additionalProperties={"type": ["string", "null"]})
    for found in arguments("glm45", tool, written("glm45", "other", "5")):
        assert found == {"other": "5"}


@pytest.mark.parametrize(
    ("schema", "rule"),
    [
        (OPTIONAL, "arg_text"),
        ({"$ref": "#/$defs/Color"}, '("red" | "blue") END'),
        ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, '("red" | "blue" | "null") END'),
        ({"allOf": [{"type": "string"}, {"enum": ["a", 1]}]}, '("a") END'),
        ({"oneOf": [{"enum": ["a", "b"]}, {"type": "string"}]}, "arg_text"),
        ({"enum": ["a", "b"], "const": "b"}, '("b") END'),
        (INTEGER, "@args_0_0 END"),
        ({"type": ["string", "integer"]}, "@args_0_0 END"),
    ],
)
def test_grammars_write_texts_without_quotes(schema, rule):
    tool = tool_of(schema)
    assert value_rules(0, tool, "END") == {"key": (rule, False)}
    assert bool(schemas(0, tool)) == rule.startswith("@")


def test_integers_are_numbers():
    assert value_types({"allOf": [INTEGER, {"type": "number"}]}, {}).types == {"number"}


def test_references_are_followed_once():
    """A schema of a client must not take more time than it has parts."""
    twice = [{"$ref": f"#/$defs/{i}"} for i in range(30) for _ in range(30)]
    nested = {str(i): {"anyOf": twice} for i in range(30)}
    types = value_types({"anyOf": [{"type": "string"}, *twice]}, {"$defs": nested})
    assert types.types > {"string", "number"}
    chain = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(2000)}
    assert value_types({"$ref": "#/$defs/0"}, {"$defs": chain}).types == ALL
