"""Parsers of tool calls: what each format's answers mean, however they are cut into pieces."""

import random

import pytest

from cluster.api.answer.message_parser import MessageParser
from cluster.api.tools import FORMATS, choose_format
from cluster.api.tools.base import Thought, Tool

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
CALL = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
OTHER = '{"name": "time.now", "arguments": {}}'
ROME = ("get_weather", '{"city": "Rome"}')
NOW = ("time.now", "{}")


CALLABLE = [
    Tool(function["name"], function.get("parameters"), False, {})
    for function in (entry["function"] for entry in TOOLS)
]


def parse(name, pieces):
    """(content, [(name, arguments)]) of an answer that came in these pieces."""
    parser = FORMATS[name].parser(CALLABLE)
    found = [item for piece in pieces for item in parser.push(piece)] + parser.flush()
    content = "".join(item for item in found if isinstance(item, str))
    calls = []
    for item in found:
        if isinstance(item, str | Thought):
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
    (f"{tag(CALL)}\nIt is sunny.\nBye", "It is sunny.\nBye", [ROME]),
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
    (f"{tag(OTHER)}{tag('x')} y", f"{tag('x')} y", [NOW]),
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


BAR, BLOCK = chr(0xFF5C), chr(0x2581)


def deepseek(words):
    return f"<{BAR}{words.replace(' ', BLOCK)}{BAR}>"


SEP = deepseek("tool sep")
DEEPSEEK = (deepseek("tool calls begin"), deepseek("tool calls end"), deepseek("tool call begin"))
# opening and closing of a section, of a call with its name, and of the arguments
SECTIONS = {
    "deepseek_v3": (
        *DEEPSEEK[:2],
        lambda name, _: f"{DEEPSEEK[2]}function{SEP}{name}\n```json\n",
        f"\n```{deepseek('tool call end')}",
        "\n",
    ),
    "deepseek_v31": (
        *DEEPSEEK[:2],
        lambda name, _: f"{DEEPSEEK[2]}{name}{SEP}",
        deepseek("tool call end"),
        "",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        lambda name, i: f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "",
    ),
}


def section(name, *calls):
    opening, closing, head, end, between = SECTIONS[name]
    texts = [head(called, i) + arguments + end for i, (called, arguments) in enumerate(calls)]
    return opening + between.join(texts) + closing


def section_cases(name):
    opening, closing, head, end, _ = SECTIONS[name]
    both = section(name, ROME, NOW)
    nested = ("get_weather", '{"city": "</x>\\n```", "days": {"a": [1]}}')
    return [
        ("just text", "just text", []),
        (" two \n\n", " two \n\n", []),
        (section(name, ROME), "", [ROME]),
        (f"Let me see.\n{both}", "Let me see.", [ROME, NOW]),
        (f"{both}\n\nIt is sunny. Bye ", "It is sunny. Bye", [ROME, NOW]),
        (section(name, nested), "", [nested]),
        # The end of the section or of a call is missing.
        (both[: -len(closing)], "", [ROME, NOW]),
        (both[: -len(closing + end)], "", [ROME, NOW]),
        (opening + head("get_weather", 0) + '{"city"', "", [("get_weather", '{"city"')]),
        (opening + head("time.now", 0) + end + closing, "", [NOW]),
        # No call at all: text.
        (opening, opening, []),
        (f"a {opening}b{closing} c d", f"a {opening}b{closing} c d", []),
        (opening[:-1], opening[:-1], []),
        (opening + head("", 0), opening + head("", 0), []),
        (f"{opening}{head('time.now', 0)[:-1]}", f"{opening}{head('time.now', 0)[:-1]}", []),
    ]


def glm(name, **arguments):
    pairs = [
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


GLM = [
    ("just text", "just text", []),
    (" two \n\n", " two \n\n", []),
    (glm("get_weather", city="Rome"), "", [ROME]),
    (glm("time.now"), "", [NOW]),
    (f"Hm.\n{glm('get_weather', city='Rome')}\n{glm('time.now')}", "Hm.", [ROME, NOW]),
    (f"{glm('time.now')}\n It is late. Bye ", "It is late. Bye", [NOW]),
    # A string is a string whatever it looks like; other values are JSON, or strings if they are none.
    (glm("get_weather", city="5"), "", [("get_weather", '{"city": "5"}')]),
    (
        glm("get_weather", city='a"\\\n<b>', days="3"),
        "",
        [("get_weather", '{"city": "a\\"\\\\\\n<b>", "days": 3}')],
    ),
    (glm("get_weather", days="many"), "", [("get_weather", '{"days": "many"}')]),
    (glm("get_weather", other='{"a": [1]}'), "", [("get_weather", '{"other": {"a": [1]}}')]),
    # As GLM-4.7 writes it.
    (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
        "",
        [ROME],
    ),
    # A call without its end.
    (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ro",
        "",
        [("get_weather", '{"city": "Ro')],
    ),
    (f"{glm('time.now')[:-12]}{glm('time.now')}", "<tool_call>time.now\n", [NOW]),
    # No call at all: text.
    ("<tool_call>hello</tool_call> x y", "<tool_call>hello</tool_call> x y", []),
    ("<tool_call>hello", "<tool_call>hello", []),
    ("a <tool_call>", "a <tool_call>", []),
    ("x <tool_cal", "x <tool_cal", []),
    (f"<tool_call>{glm('time.now')}", "<tool_call>", [NOW]),
]


def minimax(*calls):
    """Calls as (name, arguments as text)."""
    texts = [
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in found.items())
        + "</invoke>\n"
        for name, found in calls
    ]
    return f"<minimax:tool_call>\n{''.join(texts)}</minimax:tool_call>"


M2_ROME, M2_NOW = ("get_weather", {"city": "Rome"}), ("time.now", {})
MINIMAX = [
    ("just text", "just text", []),
    (" two \n\n", " two \n\n", []),
    (minimax(M2_ROME), "", [ROME]),
    (f"Hm.\n{minimax(M2_ROME, M2_NOW)}", "Hm.", [ROME, NOW]),
    (f"{minimax(M2_NOW)}\n It is late. Bye ", "It is late. Bye", [NOW]),
    (
        minimax(("get_weather", {"city": 'a"\n<b> </p', "days": "3"})),
        "",
        [("get_weather", '{"city": "a\\"\\n<b> </p", "days": 3}')],
    ),
    (minimax(("get_weather", {"days": "many"})), "", [("get_weather", '{"days": "many"}')]),
    # A section or a call without its end.
    (minimax(M2_ROME)[: -len("</minimax:tool_call>")], "", [ROME]),
    (
        minimax(M2_ROME).partition("me</p")[0],
        "",
        [("get_weather", '{"city": "Ro')],
    ),
    (minimax(M2_NOW).replace("</invoke>\n", ""), "", [NOW]),
    # No call at all: text.
    (minimax(("f", {})), minimax(("f", {})), []),
    ("a <minimax:tool_call>b</minimax:tool_call> c d",) * 2 + ([],),
    ('<minimax:tool_call>\n<invoke name="time',) * 2 + ([],),
    ("x <minimax:", "x <minimax:", []),
]
CODER = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
RENDERED = {  # a call of get_weather for Rome
    "hermes": tag(CALL),
    "json": CALL,
    "glm45": glm("get_weather", city="Rome"),
    "minimax_m2": minimax(M2_ROME),
    "qwen3_coder": CODER,
    "granite": f"<|tool_call|>[{CALL}]",
    "mistral": f"[TOOL_CALLS] [{CALL}]",
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    + ROME[1],
    **{name: section(name, ROME) for name in SECTIONS},
}


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [("hermes", *case) for case in HERMES]
    + [("json", *case) for case in JSON]
    + [(name, *case) for name in SECTIONS for case in section_cases(name)]
    + [("glm45", *case) for case in GLM]
    + [("minimax_m2", *case) for case in MINIMAX],
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
        "<|tool_call|>",
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
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "time.now",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        '<invoke name="',
        '<parameter name="',
        '">',
        "</parameter>",
        "</invoke>",
        *("<function=", "<parameter=city", ">", "</function>"),
        *SECTIONS.get(name, "")[:2],
        DEEPSEEK[2],
        SEP,
        deepseek("tool call end"),
        "\n```json\n",
        "<|tool_call_begin|>",
        "functions.time.now:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ]
    for _ in range(3000):
        pieces = rng.choices(parts, k=rng.randint(0, 14))
        content, calls = parse(name, pieces)
        if not calls:
            assert content == "".join(pieces)


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_stream_as_they_come(name):
    text = RENDERED[name]
    parser = FORMATS[name].parser(CALLABLE)
    shown = ""
    for position, char in enumerate(text):
        for delta in parser.push(char):
            shown += delta.arguments
        if text[: position + 1].endswith("Ro"):
            assert shown == '{"city": "Ro'
    assert shown == ROME[1]


def test_auto_takes_the_format_of_the_template():
    assert choose_format("auto", "... <tool_call> ...") is FORMATS["hermes"]
    assert choose_format("auto", "...") is FORMATS["json"]
    assert choose_format("json", "<tool_call>") is FORMATS["json"]
    for name in RENDERED.keys() - {"hermes", "json"}:
        assert choose_format("auto", RENDERED[name]) is FORMATS[name]


def message_of(name, text, **options):
    parser = MessageParser(calls=FORMATS[name].parser(CALLABLE), **options)
    parser.push(text, last=True)
    return parser


def test_only_the_first_of_several_calls_when_they_may_not_be_parallel():
    parser = message_of("hermes", tag(CALL) + tag(OTHER), max_calls=1)
    assert [call.name for call in parser.calls] == ["get_weather"]


def test_the_id_of_a_call_is_what_the_model_wrote():
    """Kimi-K2's chat template repeats it beside the result; other models write none."""
    calls = message_of("kimi_k2", section("kimi_k2", ROME, NOW)).calls
    assert [call.call_id for call in calls] == ["functions.get_weather:0", "functions.time.now:1"]
    (call,) = message_of("deepseek_v31", section("deepseek_v31", ROME)).calls
    assert call.call_id.startswith("call_")
