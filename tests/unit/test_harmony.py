"""Harmony: channels are split into reasoning, calls and content, in messages and grammars."""

import random

import pytest

from cluster.api.answer.message_parser import MessageParser
from cluster.api.tools import FORMATS, choose_format
from cluster.api.tools.base import CallDelta, Thought
from cluster.api.tools.harmony import FINAL, HARMONY
from tests.unit.api_fakes import Api, assert_error, tiny_tokenizer
from tests.unit.test_tool_parsers import CALLABLE, NOW, RENDERED, ROME
from tests.unit.test_tools import NAMED, accepts, api_that_says, sent_grammar

ANALYSIS = "<|channel|>analysis<|message|>Hm.\n So.<|end|><|start|>assistant"
TO_ROME = RENDERED["harmony"]
TO_NOW = "<|channel|>commentary to=functions.time.now <|constrain|>json<|message|>{}"
PREAMBLE = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"

CASES = [  # text, reasoning, content, calls
    (f"{ANALYSIS}{FINAL}Yes.\n<|return|>", "Hm.\n So.", "Yes.\n", []),
    (f"{FINAL}Yes.", "", "Yes.", []),
    (f"{ANALYSIS}{TO_ROME}<|call|>", "Hm.\n So.", "", [ROME]),
    (f"{ANALYSIS}{TO_ROME}", "Hm.\n So.", "", [ROME]),
    (f"{PREAMBLE}{TO_NOW}<|call|>", "", "I will look.", [NOW]),
    (f"{TO_ROME}<|call|><|start|>assistant{TO_NOW}<|call|>", "", "", [ROME, NOW]),
    # The recipient before the channel, a call in the channel of reasoning, a call without arguments.
    (
        " to=functions.time.now<|channel|>commentary json<|message|><|call|>",
        "",
        "",
        [NOW],
    ),
    (TO_NOW.replace("commentary", "analysis"), "", "", [NOW]),
    # Unknown functions and the model's own tools.
    (TO_NOW.replace("time.now", "other"), "{}", "", []),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", "", []),
    # Cut in a text, in a header, in a marker.
    ("<|channel|>analysis<|message|>Hm", "Hm", "", []),
    (f"{ANALYSIS}<|channel|>fin", "Hm.\n So.", "", []),
    (f"{TO_ROME}<|cal", "", "", [ROME]),
    (f"{FINAL}a < b <|e", "", "a < b <|e", []),
    ("<|chan", "", "<|chan", []),
    ("", "", "", []),
    # Damaged messages: an end without a start, a channel inside a text, a header without a message.
    (f"{FINAL}a<|end|>{FINAL}b", "", "ab", []),
    (f"<|channel|>analysis<|message|>a{FINAL}b", "a", "b", []),
    (f"<|channel|>analysis<|start|>assistant{FINAL}b", "", "b", []),
    # No header at all.
    ("just text", "", "just text", []),
    ("to be\n", "", "to be\n", []),
]


def parse(pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    parser = HARMONY.parser(CALLABLE)
    found = [piece for text in pieces for piece in parser.push(text)] + parser.flush()
    calls: list[list[str]] = []
    for piece in found:
        if isinstance(piece, CallDelta):
            if piece.name is not None:
                calls.append([piece.name, ""])
            calls[piece.index][1] += piece.arguments
    thoughts = "".join(piece.text for piece in found if isinstance(piece, Thought))
    content = "".join(piece for piece in found if isinstance(piece, str))
    return thoughts, content, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
def test_the_parts_do_not_depend_on_how_the_text_comes(text, reasoning, content, calls):
    expected = (reasoning, content, calls)
    assert parse([text]) == expected
    assert parse(list(text)) == expected
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), 5)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(pieces) == expected, pieces


def test_arguments_come_as_they_are_written():
    parser = HARMONY.parser(CALLABLE)
    parser.push(TO_ROME.partition("Rome")[0])
    assert parser.push("Ro") == [CallDelta(0, None, "Ro")]


def test_auto_finds_channels_in_the_template():
    assert choose_format("auto", "... <|channel|>analysis ... <tool_call>") is FORMATS["harmony"]


def test_reasoning_is_left_out_where_the_client_asks():
    for shows in (True, False):
        parser = MessageParser(
            calls=HARMONY.parser(CALLABLE), shows_reasoning=shows, has_channels=True
        )
        parser.push(ANALYSIS + FINAL + "Yes.", last=True)
        assert parser.thinks and parser.content == "Yes."
        assert parser.reasoning == ("Hm.\n So." if shows else "")


def test_messages_have_content_reasoning_and_calls():
    answer = api_that_says(ANALYSIS + FINAL + "Yes.", tool_parser="harmony").chat().json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Yes.", "Hm.\n So.")


def test_thinking_cannot_be_turned_off():
    error = assert_error(Api(tool_parser="harmony").chat(reasoning_effort="none"), 400)
    assert error["param"] == "reasoning_effort" and error["code"] == "always_thinks"


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"tool_choice": "required"},
            [TO_ROME, ANALYSIS + TO_ROME, TO_NOW],
            ["text", FINAL + "text", ANALYSIS + FINAL + "text", TO_NOW.replace("{}", '{"a": 1}')],
        ),
        ({"tool_choice": NAMED}, [ANALYSIS + TO_NOW], [TO_ROME]),
        (
            {"response_format": {"type": "json_object"}},
            [FINAL + '{"a": 1}', ANALYSIS + FINAL + '{"a": 1}', TO_ROME],
            [FINAL + "text", '{"a": 1}'],
        ),
        (
            {"response_format": {"type": "json_object"}, "tool_choice": "none"},
            [ANALYSIS + FINAL + '{"a": 1}'],
            [TO_ROME, FINAL + "text"],
        ),
    ],
)
def test_grammars_allow_reasoning_before_what_is_required(fields, good, bad):
    grammar = sent_grammar(settings={"tool_parser": "harmony"}, **fields)
    for text in good:
        assert accepts(grammar, text), text
    for text in bad:
        assert not accepts(grammar, text), text


def test_thoughts_reach_the_template(monkeypatch):
    """gpt-oss's template refuses thoughts beside content and calls."""
    template = "{% for message in messages %}[{{ message.thinking }}]{% endfor %}"
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", template)
    call = {"type": "function", "function": {"name": "time.now", "arguments": {}}}
    thought = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    messages = [
        thought | {"tool_calls": [call]},
        thought | {"tool_calls": [call], "content": "Yes."},
        thought,
    ]
    assert tiny_tokenizer().render_chat(messages, {}) == "[Hm.][][Hm.]"
