"""Calls of GLM-4.5 and later beside text that only looks like one."""

from tests.unit.test_tool_parsers import (
    NOW,
    glm,
    tag,
)
from tests.unit.test_tool_parsers import (
    test_calls_do_not_depend_on_how_the_text_comes as check_pieces,
)


def test_white_space_behind_what_is_no_call_is_content():
    check_pieces("glm45", f"{glm('time.now')}{tag('x')} y", f"{tag('x')} y", [NOW])
