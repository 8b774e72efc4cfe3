"""The official Python client: outputs of a given form."""

import json
import re
from enum import StrEnum
from typing import Annotated

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import HELLO, chat_body

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "people": {"type": "integer", "minimum": 0, "maximum": 9999},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "people", "capital"],
    "additionalProperties": False,
}


def as_format(schema: dict) -> dict:
    """The schema as a `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


# White space lets a model without a plan go on for long.
TIGHT = {"structured_outputs": {"disable_any_whitespace": True}}


def compact(schema: dict) -> dict:
    """`extra_body` that asks for such JSON without white space."""
    return {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}


def test_json_schema(chat):
    choice = chat(HELLO, response_format=as_format(CITY), max_tokens=300).choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), CITY)


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_of_a_hot_sample_fits(client, stream):
    fields = {"temperature": 1.5, "seed": 3, "n": 4, "max_tokens": 300, "stream": stream}
    answer = client.chat.completions.create(**chat_body(HELLO, **fields), extra_body=compact(CITY))
    texts = [""] * 4
    for part in answer if stream else [answer]:
        for choice in part.choices:
            text = choice.delta.content if stream else choice.message.content
            texts[choice.index] += text or ""
            assert choice.finish_reason in (None, "stop")
    assert len(set(texts)) == 4
    for text in texts:
        jsonschema.validate(json.loads(text), CITY)


class Kind(StrEnum):
    """Of a thing."""

    SMALL = "small"
    LARGE = "large"


class Thing(BaseModel):
    """What `parse` gives back."""

    kind: Kind
    sizes: list[Annotated[int, Field(ge=0, le=99)]] = Field(min_length=2, max_length=2)
    heavy: bool | None


def test_the_clients_own_parsing(client):
    answer = client.chat.completions.parse(
        **chat_body(HELLO, max_tokens=60, extra_body=TIGHT), response_format=Thing
    )
    thing = answer.choices[0].message.parsed
    assert isinstance(thing, Thing) and len(thing.sizes) == 2 and thing.kind in Kind


def test_the_clients_streamed_parsing(client):
    with client.chat.completions.stream(
        **chat_body(HELLO, max_tokens=60, extra_body=TIGHT), response_format=Thing
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"content.delta", "content.done"} <= kinds
    assert message.parsed == Thing.model_validate_json(message.content)


def test_parsing_what_was_cut_is_an_error_of_the_client(client):
    with pytest.raises(openai.LengthFinishReasonError) as info:
        client.chat.completions.parse(**chat_body(HELLO, max_tokens=3), response_format=Thing)
    assert info.value.completion.usage.completion_tokens == 3


def test_json_object(chat):
    content = (
        chat(HELLO, response_format={"type": "json_object"}, max_tokens=200)
        .choices[0]
        .message.content
    )
    assert isinstance(json.loads(content), dict)


def test_text_is_any_text(chat):
    assert (
        chat(response_format={"type": "text"}, max_tokens=5).choices == chat(max_tokens=5).choices
    )


FORMS = [
    ({"guided_choice": ["red", "gr\u00fcn", "blue 3"]}, r"red|gr\u00fcn|blue 3"),
    ({"guided_regex": r"[0-9]{3}-[a-c]{2}"}, r"[0-9]{3}-[a-c]{2}"),
    ({"guided_grammar": 'start: ("ab" | "cd")~1..3 "!"\n'}, r"(ab|cd){1,3}!"),
    ({"guided_grammar": 'root ::= "yes" | "no" [0-9] [0-9]'}, r"yes|no\d\d"),
    ({"structured_outputs": {"choice": ["one"]}}, r"one"),
    ({"structured_outputs": {"regex": r"(\d\d:){2}\d\d"}}, r"\d\d:\d\d:\d\d"),
    ({"structured_outputs": {"grammar": "start: /x{5}/"}}, r"xxxxx"),
    (compact({"enum": [1, "a", None]}), r'1|"a"|null'),
    (
        {"guided_json": '{"const": {"a": [1]}}', "guided_whitespace_pattern": " ?"},
        r'\{ ?"a" ?: ?\[ ?1 ?\] ?\}',
    ),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS)
def test_forms_as_vllm_names_them(complete, chat, form, pattern):
    greedy = complete("The answer:", max_tokens=40, extra_body=form).choices[0].text
    hot = complete("x", max_tokens=40, temperature=1.5, seed=1, extra_body=form).choices[0].text
    said = chat(HELLO, extra_body=form, max_tokens=40).choices[0].message.content
    for text in (greedy, hot, said):
        assert re.fullmatch(pattern, text)


def test_max_tokens_cut_the_form(chat):
    whole = chat(HELLO, extra_body=compact(CITY), max_tokens=100).choices[0].message.content
    cut = chat(HELLO, extra_body=compact(CITY), max_tokens=4)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 4
    assert whole.startswith(cut.choices[0].message.content) and len(whole) > 4


def test_a_stop_string_cuts_the_form(chat):
    cut = chat(HELLO, extra_body=compact(CITY), stop=['"people"'], max_tokens=100).choices[0]
    whole = chat(HELLO, extra_body=compact(CITY), max_tokens=100).choices[0].message.content
    assert (cut.finish_reason, cut.stop_reason) == ("stop", '"people"')
    assert cut.message.content == whole[: whole.index('"people"')]


def test_min_tokens_do_not_break_the_form(complete):
    form = {"guided_choice": ["red"], "min_tokens": 6}
    choice = complete("x", extra_body=form).choices[0]
    assert (choice.text, choice.finish_reason) == ("red", "stop")


def test_logprobs_of_a_form(complete):
    choice = complete("x", logprobs=2, extra_body={"guided_choice": ["red", "green"]}).choices[0]
    assert "".join(choice.logprobs.tokens).startswith(choice.text) and choice.text in (
        "red",
        "green",
    )
    assert all(value <= 0 for value in choice.logprobs.token_logprobs)


def test_a_forbidden_token_finds_another_way(complete, ids):
    form = {"guided_choice": ["red", "green"]}
    first = complete("x", extra_body=form).choices[0].text
    (token, *_) = ids(first)
    bias = {str(i): -100 for i in {token, *ids(first[0])}}
    other = complete("x", logit_bias=bias, extra_body=form, logprobs=0).choices[0]
    assert other.text in ("red", "green")


BROKEN = [
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": as_format({"type": "strin"})}, "response_format.json_schema.schema"),
    (
        {"response_format": as_format({"properties": {"a": {"$ref": "#/nowhere"}}})},
        "response_format.json_schema.schema",
    ),
    ({"guided_regex": "["}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": "red"}, "guided_choice"),
    ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
    ({"guided_json": "no json"}, "guided_json"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    (
        {"structured_outputs": {"json": {"type": "object"}, "regex": "a"}},
        "structured_outputs.regex",
    ),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"guided_json": {"minimum": 3, "maximum": 2, "type": "integer"}}, "guided_json"),
]


@pytest.mark.parametrize(("fields", "param"), BROKEN)
def test_broken_forms_are_refused_by_name(chat, complete, fields, param):
    for call in (lambda: chat(extra_body=fields), lambda: complete("x", extra_body=fields)):
        with pytest.raises(openai.BadRequestError) as info:
            call()
        assert info.value.param.startswith(param)
        assert info.value.body["message"]


def test_a_broken_part_is_found(chat):
    schema = {"type": "object", "properties": {"good": {}, "bad": {"type": "strin"}}}
    with pytest.raises(openai.BadRequestError) as info:
        chat(response_format=as_format(schema))
    assert info.value.param == "response_format.json_schema.schema.properties.bad"
    assert info.value.code == "invalid_grammar"
