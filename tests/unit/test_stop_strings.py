"""Where stop strings cut a text, however it is split into pieces."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.answer.detokenizer import StopMatcher


def reference_cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """Grow the text by a character until it ends in a stop string; cut the longest such one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


ALPHABET = st.text("ab\n", max_size=40)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=5)


@settings(max_examples=400)
@given(ALPHABET, STOPS, st.lists(st.integers(1, 7), max_size=40))
def test_stop_matcher_equals_the_reference_however_text_is_split(text, stops, sizes):
    expected, hit = reference_cut(text, stops)
    matcher = StopMatcher(stops)
    shown, rest = "", text
    while rest:
        size = sizes.pop() if sizes else 1
        shown += matcher.push(rest[:size])
        rest = rest[size:]
        assert expected.startswith(shown)  # nothing that is taken back later
        if not hit:
            held = text[len(shown) : len(text) - len(rest)]
            assert not held or any(stop.startswith(held) for stop in stops)  # no idle holding back
    shown += matcher.flush()
    assert (shown, matcher.matched is not None) == (expected, hit)


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("a\n\n\nUser", "\n\nUser", "a\n"),
        ("a\n\n\n\n\nUser", "\n\nUser", "a\n\n\n"),
        ("aabaabaaab", "aabaaa", "aab"),
        ("ababac", "abac", "ab"),
    ],
)
def test_a_stop_string_that_begins_inside_a_failed_one(text, stop, shown):
    for size in range(1, len(text) + 1):
        matcher = StopMatcher([stop])
        pieces = [matcher.push(text[i : i + size]) for i in range(0, len(text), size)]
        assert ("".join(pieces), matcher.matched) == (shown, stop), size


def test_every_short_stop_string_in_every_short_text():
    stops = ["".join(letters) for n in range(1, 5) for letters in product("ab", repeat=n)]
    for text in map("".join, product("ab", repeat=8)):
        for stop in stops:
            at = text.find(stop)
            for size in (1, 3, 8):
                matcher = StopMatcher([stop])
                shown = "".join(matcher.push(text[i : i + size]) for i in range(0, 8, size))
                expected = (text, None) if at < 0 else (text[:at], stop)
                assert (shown + matcher.flush(), matcher.matched) == expected


def test_nothing_after_a_match():
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == "a"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_matcher_cost_is_linear_in_the_text():
    stop = "a" * 1000 + "b"
    matcher = StopMatcher([stop])
    text = "a" * 20_000
    assert matcher.push(text) == "a" * 19_000  # quadratic matching would take minutes
    assert matcher.flush() == "a" * 1000


@given(ALPHABET, STOPS, st.integers(1, 7))
def test_included_stop_string_ends_the_text_and_nothing_is_held_back(text, stops, size):
    expected, hit = reference_cut(text, stops)
    matcher = StopMatcher(stops, include=True)
    shown = ""
    for start in range(0, len(text), size):
        shown += matcher.push(text[start : start + size])
        assert hit or shown == text[: start + size]
    assert shown == (expected + matcher.matched if hit else text)
    assert matcher.flush() == ""
