"""Parsers of tool calls: what each format's answers mean, however they are cut into pieces."""

import random

import pytest

from cluster.api.answer.message_parser import MessageParser
from cluster.api.tools import FORMATS, choose_format

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time.now"}}
TOOLS = [WEATHER, TIME]
NAMES = frozenset({"get_weather", "time.now"})
CALL = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
OTHER = '{"name": "time.now", "arguments": {}}'
ROME = ("get_weather", '{"city": "Rome"}')
NOW = ("time.now", "{}")


def parse(name, pieces):
    """(content, [(name, arguments)]) of an answer that came in these pieces."""
    parser = FORMATS[name].parser(NAMES)
    found = [item for piece in pieces for item in parser.push(piece)] + parser.flush()
    content = "".join(item for item in found if isinstance(item, str))
    calls = []
    for item in found:
        if isinstance(item, str):
            continue
        if item.name is not None:
            assert item.index == len(calls)
            calls.append([item.name, ""])
        calls[item.index][1] += item.arguments
        assert item.index == len(calls) - 1, "a call went on after the next one began"
    return content, [tuple(call) for call in calls]


def tag(call):
    return f"<tool_call>\n{call}\n</tool_call>"


HERMES = [
    ("just text", "just text", []),
    ("", "", []),
    (" two \n\n", " two \n\n", []),
    (tag(CALL), "", [ROME]),
    (f"Let me see.\n{tag(CALL)}", "Let me see.", [ROME]),
    (f"{tag(CALL)}\n{tag(OTHER)}", "", [ROME, NOW]),
    (f"a\n\n{tag(CALL)}\n b \n{tag(OTHER)} \n", "ab", [ROME, NOW]),
    ("<tool_call>" + CALL + "</tool_call>", "", [ROME]),
    ("a < b <tool", "a < b <tool", []),
    ("x <tool_calls> y", "x <tool_calls> y", []),
    # The end of a call is missing, or there is more than a call.
    (f"<tool_call>{CALL}", "", [ROME]),
    (f"<tool_call>{CALL}\n{tag(OTHER)}", "", [ROME, NOW]),
    (f"<tool_call>{CALL}}}}}</tool_call>done", "done", [ROME]),
    (f"<tool_call>{CALL[:-2]}", "", [("get_weather", '{"city": "Rome"')]),
    # Other ways to write arguments.
    (tag('{"arguments": {"city": "Rome"}, "name": "get_weather"}'), "", [ROME]),
    (tag('{"name": "get_weather", "parameters": {"city": "Rome"}}'), "", [ROME]),
    (tag(r'{"name": "get_weather", "arguments": "{\"city\": \"Rome\"}"}'), "", [ROME]),
    (tag('{"name": "time.now"}'), "", [NOW]),
    (tag('{"name": "time.now", "arguments": null}'), "", [NOW]),
    (tag('{"id": 5, "x": [1, {"name": "y"}], "name": "time.now"}'), "", [NOW]),
    (
        tag('{"name": "f", "arguments": {"s": "}{\\"]</tool_call>"}}'),
        "",
        [("f", '{"s": "}{\\"]</tool_call>"}')],
    ),
    (tag('{"name": "f", "arguments": {}, "arguments": {"b": 1}}'), "", [("f", "{}")]),
    # Arguments that are no JSON are handed on as they are.
    (tag('{"name": "f", "arguments": {city: Rome}}'), "", [("f", "{city: Rome}")]),
    (tag('{"name": "f", "arguments": Rome}'), "", [("f", "Rome")]),
    (tag('{"name": "f", "arguments": 5}'), "", [("f", "5")]),
    # No call at all: text.
    (tag("hello"), tag("hello"), []),
    ("  " + tag('{"foo": 1}'), "  " + tag('{"foo": 1}'), []),
    (tag('{"name": 5}'), tag('{"name": 5}'), []),
    (tag('{"name": "f", "arguments": }'), tag('{"name": "f", "arguments": }'), []),
    ('<tool_call>\n{"na', '<tool_call>\n{"na', []),
    (tag("[1]") + " " + tag(OTHER), tag("[1]"), [NOW]),
]
JSON = [
    ("just text", "just text", []),
    ("", "", []),
    ("  hm", "  hm", []),
    (CALL, "", [ROME]),
    (f"\n {CALL}\n", "", [ROME]),
    (f"[{CALL}, {OTHER}]", "", [ROME, NOW]),
    (f"{CALL}\n{OTHER}", "", [ROME, NOW]),
    (f"{CALL}; {OTHER}", "", [ROME, NOW]),
    ('{"name": "get_weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    ('{"type": "function", "name": "time.now", "parameters": {}}', "", [NOW]),
    (CALL[:-2], "", [("get_weather", '{"city": "Rome"')]),
    # An answer in JSON that is no call.
    ('{"city": "Rome"}', '{"city": "Rome"}', []),
    ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ('{"name": "Bob", "arguments": {}}', '{"name": "Bob", "arguments": {}}', []),
    ('{"name": "time.now"}', '{"name": "time.now"}', []),
    ('[1, 2, {"name": 3}]', '[1, 2, {"name": 3}]', []),
    ("[]", "[]", []),
    ('{"na', '{"na', []),
    ('"quoted"', '"quoted"', []),
    (f"{CALL} and more", " and more", [ROME]),
]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [("hermes", *case) for case in HERMES] + [("json", *case) for case in JSON],
)
def test_calls_do_not_depend_on_how_the_text_comes(name, text, content, calls):
    assert parse(name, [text]) == (content, calls)
    assert parse(name, list(text)) == (content, calls)
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), 5)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(name, pieces) == (content, calls), pieces


@pytest.mark.parametrize("name", FORMATS)
def test_no_text_breaks_a_parser_and_none_is_lost_without_a_call(name):
    rng = random.Random(name)
    parts = [
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
        "\\",
        " ",
        "\n",
        '"name"',
        '"get_weather"',
        '"arguments"',
        "5",
        "null",
        "é",
        CALL,
    ]
    for _ in range(3000):
        pieces = rng.choices(parts, k=rng.randint(0, 14))
        content, calls = parse(name, pieces)
        if not calls:
            assert content == "".join(pieces)


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_stream_as_they_come(name):
    text = tag(CALL) if name == "hermes" else CALL
    parser = FORMATS[name].parser(NAMES)
    shown = ""
    for position, char in enumerate(text):
        for delta in parser.push(char):
            shown += delta.arguments
        if text[: position + 1].endswith('{"city": "Ro'):
            assert shown == '{"city": "Ro'
    assert shown == ROME[1]


def test_auto_takes_the_format_of_the_template():
    assert choose_format("auto", "... <tool_call> ...") is FORMATS["hermes"]
    assert choose_format("auto", "...") is FORMATS["json"]
    assert choose_format("json", "<tool_call>") is FORMATS["json"]


def message_of(name, text, **options):
    parser = MessageParser(calls=FORMATS[name].parser(NAMES), **options)
    parser.push(text, last=True)
    return parser


def test_only_the_first_of_several_calls_when_they_may_not_be_parallel():
    parser = message_of("hermes", tag(CALL) + tag(OTHER), max_calls=1)
    assert [call.name for call in parser.calls] == ["get_weather"]
