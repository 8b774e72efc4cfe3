"""Calls as Qwen3-Coder and Qwen3.5 write them."""

import pytest

from tests.unit.test_tool_parsers import (
    CALL,
    NOW,
    RENDERED,
    ROME,
    parse,
    tag,
)
from tests.unit.test_tool_parsers import (
    test_calls_do_not_depend_on_how_the_text_comes as check_pieces,
)
from tests.unit.test_tools import accepts, sent_grammar


def coder(name, **arguments):
    pairs = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"


CODER_ROME, CODER_NOW = coder("get_weather", city="Rome"), coder("time.now")
BARE, BARE_NOW = CODER_ROME.removeprefix("<tool_call>\n"), CODER_NOW.removeprefix("<tool_call>\n")
LOOSE = BARE.removesuffix("\n</tool_call>")
OPEN_VALUE = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n"
CODER = [
    ("just text", "just text", []),
    (" two \n\n", " two \n\n", []),
    (CODER_ROME, "", [ROME]),
    (f"Hm.\n{CODER_ROME}\n{CODER_NOW}", "Hm.", [ROME, NOW]),
    (f"{CODER_NOW}\n It is late. Bye ", "It is late. Bye", [NOW]),
    (coder("get_weather", city="5"), "", [("get_weather", '{"city": "5"}')]),
    # The line ends next to the tags are no part of a value, all others are.
    (
        coder("get_weather", city='\na"\n<b> </p\n', days="3"),
        "",
        [("get_weather", '{"city": "\\na\\"\\n<b> </p\\n", "days": 3}')],
    ),
    (coder("get_weather", city=""), "", [("get_weather", '{"city": ""}')]),
    (coder("get_weather", days="many"), "", [("get_weather", '{"days": "many"}')]),
    (coder("get_weather", days="NaN"), "", [("get_weather", '{"days": "NaN"}')]),
    (coder("get_weather", other='{"a":\n[1]}'), "", [("get_weather", '{"other": {"a":\n[1]}}')]),
    (CODER_ROME.replace("\n", ""), "", [ROME]),
    # A call without its end.
    (CODER_ROME.partition("me\n</p")[0], "", [("get_weather", '{"city": "Ro')]),
    (CODER_ROME[: -len("</tool_call>")], "", [ROME]),
    (CODER_NOW.replace("</function>\n", ""), "", [NOW]),
    (CODER_ROME.replace("\n</tool_call>", f"\n{LOOSE}\n</tool_call>"), "", [ROME, ROME]),
    # A value without its end.
    (f"{OPEN_VALUE}</function>\n</tool_call>", "", [ROME]),
    (
        f"{OPEN_VALUE}<parameter=days>\n3\n</function>\n</tool_call>\n{CODER_NOW}",
        "",
        [("get_weather", '{"city": "Rome", "days": 3}'), NOW],
    ),
    # No opening tag, which the model often leaves out.
    (BARE, "", [ROME]),
    (f"I look it up.\n\n{BARE}", "I look it up.", [ROME]),
    (f"{BARE}\n{BARE_NOW}", "", [ROME, NOW]),
    (f"{BARE}\n{CODER_ROME}\nDone. ", "Done.", [ROME, ROME]),
    (f"{CODER_ROME}\n{BARE}", "", [ROME, ROME]),
    (f"a\n{LOOSE}\n\nb\n{BARE_NOW} \n", "ab", [ROME, NOW]),
    (LOOSE, "", [ROME]),
    (f"{LOOSE}\n</tool", "", [ROME]),
    (BARE.partition("me\n")[0], "", [("get_weather", '{"city": "Ro')]),
    # A name without the tag is no call if it is unknown, or if neither an argument nor the end of a call follows.
    (BARE.replace("get_weather", "other"),) * 2 + ([],),
    ("Write <function=get_weather> to call it.",) * 2 + ([],),
    ("a <function=get_weather>",) * 2 + ([],),
    ("a <function=get_weather>\n<param",) * 2 + ([],),
    ("a <function=<function=get_weather> b",) * 2 + ([],),
    ("a <function=</tool_call> b",) * 2 + ([],),
    ("a <functio",) * 2 + ([],),
    ("if a <function= b",) * 2 + ([],),
    (f"Write <function=get_weather>, so:\n{BARE}", "Write <function=get_weather>, so:", [ROME]),
    # No call at all: text.
    (coder("f"), coder("f"), []),
    (tag(CALL), tag(CALL), []),
    ("a <tool_call>b</tool_call> c d",) * 2 + ([],),
    ("<tool_call>\n<function=time",) * 2 + ([],),
    ("x <tool_", "x <tool_", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), CODER)
def test_calls_of_qwen3_coder(text, content, calls):
    check_pieces("qwen3_coder", text, content, calls)


def test_values_of_too_many_levels_are_passed_on():
    """A model that repeats a bracket must not end its answer with an error of the server."""
    deep = "[" * 9999 + "]" * 9999
    text = coder("get_weather", days=deep)
    assert parse("qwen3_coder", [text]) == ("", [("get_weather", f'{{"days": "{deep}"}}')])
    early = tag(f'{{"arguments": {deep}, "name": "f"}}')
    assert parse("hermes", [early]) == ("", [("f", deep)])


def test_a_required_call_is_one_of_the_tools():
    grammar = sent_grammar(settings={"tool_parser": "qwen3_coder"}, tool_choice="required")
    for text in (coder("get_weather", city="a </b>\n", days=3), f"{CODER_NOW}\n{CODER_ROME}"):
        assert accepts(grammar, text), text
    unknown, joined = coder("f"), CODER_NOW.replace("\n", "")
    for text in ("text", tag(CALL), coder("get_weather", days=3), unknown, joined):
        assert not accepts(grammar, text), text


def test_the_rendered_call():
    assert RENDERED["qwen3_coder"] == CODER_ROME
