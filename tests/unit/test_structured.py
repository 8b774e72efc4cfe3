"""Structured output at the ingress: what becomes of response_format and guided_*, and what is refused."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from cluster.api.request.grammar_check import _check_in_child
from cluster.api.work.processes import WorkProcesses
from scripts.byte_tokenizer import byte_tokenizer
from tests.unit.api_fakes import IM_END, Api, FakeBackend, assert_error, events, says, shared_api

__all__ = ["shared_api"]  # a fixture

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
TOKENIZER = LLTokenizer(byte_tokenizer().to_str(), n_vocab=300, eos_token=[IM_END])


def grammars(api):
    return [params.grammar for _ids, params in api.backend.requests.values()]


def grammar_of(path="/v1/chat/completions", **fields):
    """What the rank is told for such a request."""
    api = Api(FakeBackend(says("{}", end=[IM_END])))
    base = {"prompt": "hi"} if path == "/v1/completions" else {}
    base["messages"] = [{"role": "user", "content": "hi"}]
    response = api.post(path, base | fields)
    assert response.status_code == 200, response.text
    (grammar,) = grammars(api)
    return grammar


def accepts(grammar, text):
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def wrapped(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


JSON_WAYS = [
    {"response_format": wrapped(SCHEMA)},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": SCHEMA, "strict": False},
        }
    },
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None, "json_object": False}},
    {"guided_json": SCHEMA, "response_format": {"type": "text"}},
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("fields", JSON_WAYS)
def test_a_schema_by_any_name(path, fields):
    grammar = grammar_of(path, **fields)
    assert accepts(grammar, '{"n":5}') and accepts(grammar, '{\n  "n": -12\n}')
    assert not accepts(grammar, '{"n":"5"}') and not accepts(grammar, '{"n":5')
    assert not accepts(grammar, '{"n":5,"m":6}')


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"a": [1, "x"]}', "{}"], ["[]", "5", "{"]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["null"]),
        ({"guided_regex": r"\d{3}-[a-z]+/x"}, ["123-ab/x"], ["12-ab/x", "123-ab/xy"]),
        ({"structured_outputs": {"regex": "yes|no"}}, ["yes", "no"], ["yesno", "y"]),
        ({"guided_choice": ["a|b", 'q"\n\\/', "é😀"]}, ["a|b", 'q"\n\\/', "é😀"], ["a", "b", "é"]),
        ({"structured_outputs": {"choice": ["x", "xy"]}}, ["x", "xy"], ["y", "xx", ""]),
        ({"guided_grammar": 'start: "a" B+\nB: /[0-9]/'}, ["a1", "a123"], ["a", "1"]),
        (
            {"guided_grammar": 'root ::= "(" root ")" | word\nword ::= [a-z]+ # a comment'},
            ["((ab))", "q"],
            ["((ab)", "Q"],
        ),
        ({"structured_outputs": {"grammar": 'root ::= "k"{2,3}'}}, ["kk", "kkk"], ["k", "kkkk"]),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
            ['{ "n" : 5 }'],
            ['{  "n": 5}', '{\n"n":5}'],
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            ['{"n":5}'],
            ['{"n": 5}'],
        ),
    ],
)
def test_what_the_output_may_be(fields, good, bad):
    grammar = grammar_of(**fields)
    for text in good:
        assert accepts(grammar, text), text
    for text in bad:
        assert not accepts(grammar, text), text


def test_unknown_formats_are_remarks_and_data_is_left_alone():
    part = {"type": "string", "format": "password", "maxLength": 2}
    data = {"const": {"format": "password"}}
    properties = {"default": part, "day": {"type": "string", "format": "date"}, "data": data}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    grammar = grammar_of(guided_json=schema)
    good = '{"default":"ab","day":"2024-05-06","data":{"format":"password"}}'
    assert accepts(grammar, good)
    assert not accepts(grammar, good.replace("2024-05-06", "today"))
    assert not accepts(grammar, good.replace("password", "other"))


def test_white_space_has_an_end():
    grammar = grammar_of(guided_json=SCHEMA)
    assert accepts(grammar, '{"n":' + " " * 33 + "5}")
    assert not accepts(grammar, '{"n":' + " " * 34 + "5}")


def test_plain_requests_have_no_grammar():
    assert grammar_of() is None
    assert grammar_of(response_format={"type": "text"}) is None
    assert grammar_of(structured_outputs={}) is None
    assert grammar_of("/v1/completions", guided_json=None, response_format=None) is None


def test_all_choices_of_a_request_share_it():
    api = Api(FakeBackend(says("yes", end=[IM_END])))
    response = api.complete(["a", "b"], n=2, guided_choice=["yes"])
    assert [choice["text"] for choice in response.json()["choices"]] == ["yes"] * 4
    assert len(set(grammars(api))) == 1 and len(grammars(api)) == 4


def nested(part):
    return {"type": "object", "properties": {"list": {"type": "array", "items": part}}}


PLACE = "guided_json.properties.list.items"


@pytest.mark.parametrize(
    ("schema", "param", "says_"),
    [
        ({"type": "strin"}, "guided_json", "strin"),
        (nested({"type": "strin"}), PLACE, "strin"),
        ({"minimum": 5, "maximum": 3, "type": "integer"}, "guided_json", "minimum (5)"),
        (
            {"type": "object", "properties": {"a": False}, "required": ["a"]},
            "guided_json",
            "'a' is unsatisfiable",
        ),
        (nested({"type": "string", "pattern": "a("}), PLACE, "unclosed group"),
        (nested({"type": "string", "pattern": "(?=a)"}), PLACE, "look-ahead"),
        (nested({"anyOf": [{"type": "null"}, {"type": "nul"}]}), PLACE + ".anyOf.1", "nul"),
        (nested({"$ref": "#/nowhere"}), PLACE, "/nowhere"),
        (nested({"$ref": "http://127.0.0.1:9/x"}), PLACE, "127.0.0.1"),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": {"type": "y"}}},
            "guided_json.$defs.x",
            "Invalid type",
        ),
        (nested({"type": "array", "uniqueItems": True}), PLACE, "uniqueItems"),
        (nested({"not": {"type": "string"}}), PLACE, "not"),
        (nested({"oneOf": [{"type": "number"}, {"type": "integer"}]}), PLACE, "anyOf"),
        ({"enum": []}, "guided_json", "Unsatisfiable"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "guided_json", "Unsatisfiable"),
        ({"type": "object", "properties": [1]}, "guided_json", "properties"),
        ({"type": "string", "minLength": 5, "maxLength": 1}, "guided_json", "minLength"),
    ],
)
def test_a_broken_or_impossible_schema_is_refused_where_it_is(schema, param, says_):
    error = assert_error(Api().chat(guided_json=schema), 400, "invalid_grammar")
    assert error["param"] == param
    assert error["message"].startswith(param + ": ") and says_ in error["message"]


def test_the_place_counts_from_where_the_client_wrote_it():
    schema = {"properties": {"a": {"type": "strin"}}}
    error = assert_error(Api().chat(response_format=wrapped(schema)), 400)
    assert error["param"] == "response_format.json_schema.schema.properties.a"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a("}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "\ud800"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_grammar": "nonsense"}, "guided_grammar"),
        ({"guided_grammar": 'start: "a" missing'}, "guided_grammar"),
        ({"guided_grammar": "root ::= missing"}, "guided_grammar"),
        ({"guided_grammar": "root ::= " + "(" * 50_000}, "guided_grammar"),
        ({"guided_grammar": "start: " + "(" * 50_000}, "guided_grammar"),
        ({"guided_grammar": "start: a0\n" + "a: b\n" * 5000}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": True}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": {"enum": ["\ud800"]}}, "guided_json"),
        ({"guided_json": '{"enum": [NaN]}'}, "guided_json"),
        ({"guided_json": {"maximum": 10**400, "type": "integer"}}, "guided_json"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_json": {}, "guided_whitespace_pattern": "("}, "guided_json"),
        ({"guided_json": {}, "guided_whitespace_pattern": 5}, "guided_whitespace_pattern"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_wrong_is_named(shared_api, path, fields, param):
    base = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    assert assert_error(shared_api.post(path, base | fields), 400)["param"] == param
    assert not shared_api.backend.requests


def test_limits_of_size_and_nesting():
    limits = {"max_schema_bytes": 200, "max_schema_depth": 6}
    long, deep = {"enum": ["x" * 300]}, {}
    for _ in range(4):
        deep = {"properties": {"a": deep}}
    for fields in (
        {"guided_json": long},
        {"guided_json": json.dumps(long)},
        {"guided_regex": "x" * 300},
        {"guided_choice": ["x" * 150, "y" * 150]},
        {"guided_grammar": 'start: "' + "x" * 300 + '"'},
    ):
        error = assert_error(Api(**limits).chat(**fields), 400)
        assert error["param"] == next(iter(fields)) and "200" in error["message"]
    error = assert_error(Api(**limits).chat(guided_json=deep), 400)
    assert "6 levels" in error["message"]
    assert (
        Api(**limits).chat(guided_json=deep["properties"]["a"]["properties"]["a"]).status_code
        == 200
    )


def test_a_large_schema_is_checked_once_and_off_the_event_loop(monkeypatch):
    run, in_processes = WorkProcesses.run, []

    async def counted(processes, work, *args, cpu_s):
        in_processes.append(work)
        return await run(processes, work, *args, cpu_s=cpu_s)

    monkeypatch.setattr(WorkProcesses, "run", counted)
    parts = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{3,50}}{i}?$"} for i in range(300)}
    api = Api(FakeBackend(says("{}", end=[IM_END])))
    for _ in range(2):
        assert api.chat(guided_json={"type": "object", "properties": parts}).status_code == 200
        assert in_processes.count(_check_in_child) == 1


def test_a_grammar_that_fails_in_the_rank_is_the_clients_error():
    backend = FakeBackend(says("x" * 9))
    backend.error_output = "the grammar cannot go on: too many items"
    error = assert_error(Api(backend).chat(guided_regex="x+"), 400, "invalid_grammar")
    assert "too many items" in error["message"] and error["param"] == "guided_regex"
    backend = FakeBackend(says("x" * 9))
    backend.error_output = "the grammar cannot go on: too many items"
    assert_error(Api(backend).chat(), 503)  # without a grammar it cannot be that


def test_streams_are_as_without():
    api = Api(FakeBackend(says('{"n":1}', end=[IM_END])))
    items = events(api.chat(stream=True, response_format=wrapped(SCHEMA)))
    text = "".join(item["choices"][0]["delta"].get("content", "") for item in items)
    assert text == '{"n":1}'
    assert items[-1]["choices"][0]["finish_reason"] == "stop"
