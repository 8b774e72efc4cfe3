"""Arguments of earlier calls that were cut off: chat templates go through them, so they are completed."""

import json

import pytest

from cluster.api.request.cut_json import completed
from tests.unit.api_fakes import Api, tiny_tokenizer

WHOLE = '{"city": "a \\"b\\\\", "days": [1, {"k": "}"}], "exact": true, "end": null}'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{", {}),
        ('{"ci', {}),
        ('{"city"', {}),
        ('{"city": ', {}),
        ('{"city": "Ro', {"city": "Ro"}),
        ('{"city": "Ro\\', {"city": "Ro"}),
        ('{"city": "Ro\\"', {"city": 'Ro"'}),
        ('{"city": "Ro\\\\', {"city": "Ro\\"}),
        ('{"city": "Ro\\u00', {}),
        ('{"city": "Rome"', {"city": "Rome"}),
        ('{"city": "Rome", ', {"city": "Rome"}),
        ('{"city": "Rome", "days": tr', {"city": "Rome"}),
        ('{"a": {"b": [1, {"c": 2', {"a": {"b": [1, {"c": 2}]}}),
        ('{"a": {"b": [1, {"c":', {"a": {"b": [1, {}]}}),
        # No object that was cut off.
        ("", None),
        ("Rome", None),
        ("[1", None),
        ("{]", None),
        ("{} {", None),
        ("{'a': 1", {}),
        ("{a, b", None),
        ('{"a": 1}', None),
        ("[" * 9999, None),
    ],
)
def test_what_is_whole_is_kept(text, value):
    assert completed(text) == value


def test_every_cut_is_an_object_with_values_of_the_whole():
    whole = json.loads(WHOLE)
    for length in range(1, len(WHOLE)):
        value = completed(WHOLE[:length])
        assert value is not None and value.keys() <= whole.keys()
        assert list(value) == list(whole)[: len(value)]
        assert all(value[key] == whole[key] for key in list(value)[:-1])


@pytest.mark.parametrize(("text", "items"), [('{"city": "Ro', "[('city', 'Ro')]"), ('{"ci', "[]")])
def test_a_conversation_with_a_call_that_was_cut_off_goes_on(monkeypatch, text, items):
    template = "{{ messages[0].tool_calls[0].function.arguments.items() | list }}"
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", template)
    api = Api()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    response = api.post("/v1/chat/completions", {"messages": messages})
    assert response.status_code == 200, response.text
    ((ids, _params),) = api.backend.requests.values()
    assert tiny_tokenizer().decode(ids) == items
