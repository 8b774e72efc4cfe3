"""Texts and pairs of checkpoints whose files make messages of them, against transformers' own rendering."""

from typing import Any

import pytest

from cluster.api.tokenizer import ServingTokenizer, load_tokenizer
from tests.unit.api_fakes import Api, assert_error, tiny_tokenizer
from tests.unit.pooling_case import PoolingBackend
from workers.specs.pooling import PoolingSpec

FOLDER, _ = tiny_tokenizer().source
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
OPENED = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}{{ tail }}"
USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}</>"
RAISES = "{% for m in messages %}{{ m.content if m.role == 'user' else raise_exception('role') }}{% endfor %}"
PAIR = {"text_1": "sky", "text_2": "a blue one"}


def spec(task: Any = "embed", **fields: Any) -> PoolingSpec:
    return PoolingSpec(task=task, size=4, **{"chat_options": {}, **fields})


def api_of(template: str, pooling: PoolingSpec) -> Api:
    return Api(PoolingBackend(), load_tokenizer(FOLDER, template), pooling=pooling)


def prompts_of(api: Api, route: str, body: dict[str, Any]) -> list[list[int]]:
    api.backend.requests.clear()
    assert api.post(route, body).status_code == 200
    return [list(ids) for ids, _ in api.backend.requests.values()]


def reference(template: str, messages: list[dict[str, str]], **keywords: Any) -> list[int]:
    """Token ids as sentence-transformers makes them: apply_chat_template of transformers, without an answer's turn."""
    hf = load_tokenizer(FOLDER, template)._hf
    ids: list[int] = hf.apply_chat_template(messages, return_dict=False, **keywords)
    return ids


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}, {"tail": "END"}])
def test_a_text_is_a_message_of_the_user(options):
    api = api_of(OPENED, spec(chat_options=options))
    expected = [
        reference(OPENED, [{"role": "user", "content": text}], **options) for text in ("hi", "you")
    ]
    assert prompts_of(api, "/v1/embeddings", {"input": ["hi", "you"]}) == expected
    assert prompts_of(api, "/score", {"text_1": "hi", "text_2": "you"}) == expected
    assert prompts_of(api, "/pooling", {"input": "hi"}) == expected[:1]
    message = {"messages": [{"role": "user", "content": "hi"}]}
    assert prompts_of(api, "/v1/embeddings", message) == expected[:1]
    assert prompts_of(api, "/v1/embeddings", {"input": [[1, 2]]}) == [[1, 2]]


def test_a_request_chooses_other_keywords_for_its_messages():
    api = api_of(OPENED, spec(chat_options={"add_generation_prompt": True, "tail": "END"}))
    body: dict[str, Any] = {"messages": [{"role": "system", "content": "hi"}]}
    own = {"add_generation_prompt": False, "chat_template_kwargs": {"tail": "end"}}
    expected = reference(OPENED, body["messages"], tail="end")
    assert prompts_of(api, "/v1/embeddings", {**body, **own}) == [expected]
    assert_error(api.post("/v1/embeddings", {**body, "chat_template_kwargs": ["end"]}), 400)


def test_a_cut_text_keeps_the_template_around_it():
    api = api_of(TURNS, spec())
    expected = reference(TURNS, [{"role": "user", "content": "hel"}])
    body = {"input": "hello", "truncate_prompt_tokens": len(expected)}
    assert prompts_of(api, "/v1/embeddings", body) == [expected]
    error = assert_error(api.post("/v1/embeddings", {**body, "truncate_prompt_tokens": 3}), 400)
    assert "cuts more than the text" in error["message"]


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}])
@pytest.mark.parametrize("fields", [{"score_tokens": (5, 7)}, {"labels": ("relevant",)}])
def test_a_pair_has_its_roles_where_the_template_writes_both(options, fields):
    api = api_of(OPENED, spec("score", chat_options=options, **fields))
    messages = [
        {"role": "query", "content": PAIR["text_1"]},
        {"role": "document", "content": PAIR["text_2"]},
    ]
    assert prompts_of(api, "/score", PAIR) == [reference(OPENED, messages, **options)]


@pytest.mark.parametrize("template", [USERS, RAISES])
@pytest.mark.parametrize("fields", [{"score_tokens": (5, 7)}, {"labels": ("relevant",)}])
def test_a_template_that_drops_pairs_leaves_their_prompts_as_they_were(template, fields):
    """As of the base models of Qwen3-Reranker, with which sentence-transformers fails."""
    found = prompts_of(api_of(template, spec("score", **fields)), "/score", PAIR)
    plain = api_of(template, spec("score", chat_options=None, **fields))
    assert found == prompts_of(plain, "/score", PAIR)


def test_a_checkpoint_without_its_chat_template_is_refused_at_the_start():
    tokenizer: ServingTokenizer = load_tokenizer(FOLDER)
    tokenizer._hf.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        Api(PoolingBackend(), tokenizer, pooling=spec())
    assert Api(PoolingBackend(), tokenizer, pooling=spec(chat_options=None))
