"""Calls of DeepSeek and Kimi-K2 without the opening of their section."""

import pytest

from tests.unit.test_tool_parsers import (
    NOW,
    ROME,
    SECTIONS,
    section,
)
from tests.unit.test_tool_parsers import (
    test_calls_do_not_depend_on_how_the_text_comes as check_pieces,
)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_call_without_a_section_is_a_call(name):
    opening, closing, head, end, _ = SECTIONS[name]
    bare = section(name, ROME, NOW).removeprefix(opening)
    for text, content, calls in [
        (bare, "", [ROME, NOW]),
        (f"Hm.\n{bare}\n", "Hm.", [ROME, NOW]),
        (bare.removesuffix(closing), "", [ROME, NOW]),
        (f"{bare}\nBye {bare}", "Bye", [ROME, NOW, ROME, NOW]),
        (f"{bare.removesuffix(closing)}Bye", "Bye", [ROME, NOW]),
        (head("get_weather", 0) + '{"city"', "", [("get_weather", '{"city"')]),
        # No call at all: text.
        (f"a {head('', 0)}{{}}{end} b", f"a {head('', 0)}{{}}{end} b", []),
        (f"a {head('time.now', 0)[:-1]}", f"a {head('time.now', 0)[:-1]}", []),
    ]:
        check_pieces(name, text, content, calls)
