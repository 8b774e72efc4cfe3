"""Tags of calls and thoughts that are tokens of their own, in small vocabularies and in the published Qwen3 one.

llguidance treats each added token written like <this> as special, whatever `special` says in tokenizer.json.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer

from cluster.api.tokenizer import ServingTokenizer, load_tokenizer
from scripts.bench import gpu_serving, qwen_tokenizer
from tests.unit.api_fakes import Api, FakeBackend, tiny_checkpoint
from tests.unit.test_tool_parsers import CALL, ROME, TOOLS, tag
from workers.sampling.grammar_compiler import GrammarCompiler
from workers.step.grammar import Grammar

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
THOUGHT = "<think>\nHm {\n</think>\n\n"
SHAPE = Path(__file__).parents[2] / "configs" / "models" / "qwen3-30b-a3b"


@dataclass(frozen=True)
class Model:
    """A tokenizer as the API and as a rank have it."""

    tokenizer: ServingTokenizer
    compiler: GrammarCompiler

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def says(self, text: str) -> Api:
        tokens = self.ids(text + "<|im_end|>")
        return Api(FakeBackend(lambda _prompt, _params: [[i] for i in tokens]), self.tokenizer)


def load(folder: Path) -> Model:
    tokenizer = load_tokenizer(folder)
    compiler = GrammarCompiler(folder, tokenizer.vocab_size)
    compiler.wait()
    return Model(tokenizer, compiler)


@cache
def small(special: bool) -> Model:
    with TemporaryDirectory() as name:
        folder = tiny_checkpoint(Path(name) / "model")
        file = str(folder / "tokenizer.json")
        tokenizer = Tokenizer.from_file(file)
        tokenizer.add_tokens([AddedToken(text, special=special) for text in TAGS])
        tokenizer.save(file)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = qwen_tokenizer.CHAT_TEMPLATE
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return load(folder)


@pytest.fixture(scope="module")
def vocabulary() -> Path:
    file = qwen_tokenizer.find_vocabulary()
    if file is None:
        pytest.skip("qwen.tiktoken is not here: pip install dashscope==1.14.1")
    return file


@pytest.fixture(scope="module")
def benchmark_folder(vocabulary, tmp_path_factory) -> Path:
    """The model folder of the benchmark on GPUs, which has the published tokenizer."""
    folder = tmp_path_factory.mktemp("benchmark")
    (setting,) = gpu_serving.published_tokenizer(SHAPE, vocabulary, folder)
    key, _, path = setting.partition("=")
    assert key == "model.path" and Path(path).name == SHAPE.name
    assert gpu_serving.published_tokenizer(SHAPE.with_name("demo"), vocabulary, folder) == []
    return Path(path)


@pytest.fixture(scope="module")
def published(benchmark_folder) -> Model:
    return load(benchmark_folder)


@pytest.fixture(params=["special", "not special", "published"])
def model(request) -> Model:
    if request.param == "published":
        return request.getfixturevalue("published")
    return small(request.param == "special")


def grammar_of(model: Model, **fields) -> Grammar:
    """The grammar of a chat request, compiled as a rank compiles it."""
    api = model.says("x")
    assert api.chat(**fields).status_code == 200
    ((_ids, params),) = api.backend.requests.values()
    compiled: list[Grammar | str] = []
    model.compiler.compile(params.grammar, compiled.append)
    model.compiler.wait()
    assert isinstance(compiled[0], Grammar), compiled[0]
    return compiled[0]


def accepts(model: Model, grammar: Grammar, text: str) -> bool:
    matcher: LLMatcher = grammar.matcher.deep_copy()
    ids = model.ids(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"response_format": {"type": "json_object"}, "tool_choice": "auto"},
    ],
)
def test_a_call_is_what_the_grammar_asks_for(model, fields):
    grammar = grammar_of(model, tools=TOOLS, **fields)
    assert accepts(model, grammar, tag(CALL))
    assert accepts(model, grammar, THOUGHT + tag(CALL))
    assert not accepts(model, grammar, CALL + "x")


def test_structured_output_comes_after_the_thought(model):
    grammar = grammar_of(model, response_format={"type": "json_object"})
    assert accepts(model, grammar, '{"n": 1}')
    assert accepts(model, grammar, THOUGHT + '{"n": 1}')
    assert not accepts(model, grammar, "<think>x") and not accepts(model, grammar, THOUGHT + "x")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    grammar = grammar_of(model, response_format={"type": "json_object"}, **off)
    assert accepts(model, grammar, '{"n": 1}') and not accepts(model, grammar, THOUGHT + '{"n": 1}')


def test_the_answer_is_parsed(model):
    choice = model.says(THOUGHT + tag(CALL)).chat(tools=TOOLS, tool_choice="required").json()
    choice = choice["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "Hm {"
    function = choice["message"]["tool_calls"][0]["function"]
    assert (function["name"], function["arguments"]) == ROME


def test_the_tokens_are_those_that_llguidance_treats_as_special(model):
    tokenizer = model.compiler._tokenizer.result()
    found = model.tokenizer._grammar_token_ids
    assert set(TAGS) < set(found)
    added = model.tokenizer._backend.get_added_tokens_decoder()
    assert {i for i in added if tokenizer.is_special_token(i)} == set(found.values())


def test_the_published_tokenizer(published):
    tokenizer = published.tokenizer
    ids = [9707, 11, 1879, 0, 220, 151667, 87, 151668, 151657]
    text = "Hello, world! <think>x</think><tool_call>"
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == text
    assert not tokenizer.is_hidden("<tool_call>") and tokenizer.is_hidden("<|im_end|>")
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (151_936, {151643, 151645})
    for text in (
        "def f(x):\n    return x**2\n\n\n",
        "I'LL don't 12345",
        "  naïve 你好世界 🦊\r\n\t",
    ):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_bad_words_are_tokenised_with_and_without_a_space(published):
    tokenizer = published.tokenizer
    api = Api(tokenizer=tokenizer)
    assert api.complete(bad_words=["world", " fox", "antidisestablish", "5"]).status_code == 200
    ((_ids, params),) = api.backend.requests.values()
    words = [tokenizer.token_strings(list(word)) for word in params.bad_words_ids]
    assert words == [
        *(["world"], ["Ġworld"], ["fox"], ["Ġfox"]),
        *(["ant", "idis", "establish"], ["Ġant", "idis", "establish"]),
        ["5"],  # the tokenizer has no digit with a space
    ]
