"""Calls of Qwen3-Coder, with the opening tag and without it, which the model often leaves out."""

import random

import pytest

from tests.unit.test_tool_parsers import CODER, NOW, ROME, parse

BARE = CODER.removeprefix("<tool_call>\n")
EMPTY = "<function=time.now>\n</function>\n</tool_call>"
LOOSE = BARE.removesuffix("\n</tool_call>")

CASES = [  # text, content, calls
    (CODER, "", [ROME]),
    (f"Hm.\n\n{CODER}\n<tool_call>\n{EMPTY}", "Hm.", [ROME, NOW]),
    (CODER.replace("\n</tool_call>", f"\n{LOOSE}\n</tool_call>"), "", [ROME, ROME]),
    # No opening tag.
    (BARE, "", [ROME]),
    (f"I look it up.\n\n{BARE}", "I look it up.", [ROME]),
    (f"{BARE}\n{EMPTY}", "", [ROME, NOW]),
    (f"{BARE}\n{CODER}\nDone. ", "Done.", [ROME, ROME]),
    (f"{CODER}\n{BARE}", "", [ROME, ROME]),
    (f"a\n{LOOSE}\n\nb\n{EMPTY} \n", "ab", [ROME, NOW]),
    (LOOSE, "", [ROME]),
    (f"{LOOSE}\n</tool", "", [ROME]),
    (BARE.partition("me\n")[0], "", [("get_weather", '{"city": "Ro')]),
    # Not a call: an unknown function, or a name that no argument and no end follows.
    (BARE.replace("get_weather", "other"),) * 2 + ([],),
    ("Write <function=get_weather> to call it.",) * 2 + ([],),
    ("a <function=get_weather>",) * 2 + ([],),
    ("a <function=get_weather>\n<param",) * 2 + ([],),
    ("a <function=<function=get_weather> b",) * 2 + ([],),
    ("a <function=</tool_call> b",) * 2 + ([],),
    ("a <functio",) * 2 + ([],),
    ("if a <function= b",) * 2 + ([],),
    (f"Write <function=get_weather>, so:\n{BARE}", "Write <function=get_weather>, so:", [ROME]),
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_calls_do_not_depend_on_how_the_text_comes(text, content, calls):
    assert parse("qwen3_coder", [text]) == (content, calls)
    assert parse("qwen3_coder", list(text)) == (content, calls)
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), 5)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse("qwen3_coder", pieces) == (content, calls), pieces
