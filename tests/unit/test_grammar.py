"""Grammars in a rank: compiling, masks beside a forward, complete answers, errors."""

import json
import random
import threading

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from cluster.api.request.grammar_check import single_grammar
from cluster.api.request.structured import json_schema_node
from tests.unit.grammar_cases import (
    VOCAB_SIZE,
    RandomModel,
    compile_now,
    random_schema,
    tokenizer_folder,
    wide_tokenizer,
)
from workers.sampling.grammar_bitmask import GrammarBitmasks
from workers.sampling.grammar_compiler import SMALL_CHARS, GrammarCompiler
from workers.step.grammar import GRAMMAR_FAILED, Grammar

torch.set_num_threads(1)
NUM_SCHEMAS = 300


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    compiler = GrammarCompiler(tokenizer_folder(tmp_path_factory.mktemp("tokenizer")), VOCAB_SIZE)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def tokenizer():
    return wide_tokenizer()


def grammar_of(compiler, regex):
    return compile_now(compiler, LLMatcher.grammar_from_regex(regex))


def allowed(grammar, masks=None):
    """Token ids that the grammar allows next."""
    pending = (masks or GrammarBitmasks(VOCAB_SIZE, 1)).start([(grammar, ())])
    logits = torch.zeros(1, VOCAB_SIZE)
    pending.wait().apply(logits)
    return set(np.flatnonzero(np.isfinite(logits[0].numpy())).tolist())


def spell(tokenizer, text):
    return set(tokenizer.encode(text, add_special_tokens=False).ids)


def test_finished_answers_of_random_schemas_parse_and_validate(compiler, tokenizer):
    rng = random.Random(3)
    schemas, grammars = [], []
    while len(grammars) < NUM_SCHEMAS:
        schema = random_schema(rng)
        jsonschema.Draft202012Validator.check_schema(schema)
        grammar = compile_now(compiler, single_grammar(json_schema_node(schema)))
        assert isinstance(grammar, Grammar), (schema, grammar)
        schemas.append(schema)
        grammars.append(grammar)
    num_finished = 0
    answers = RandomModel(5, max_tokens=400).answers(grammars)
    for schema, (tokens, finished) in zip(schemas, answers, strict=True):
        if not finished:
            continue
        num_finished += 1
        text = tokenizer.decode(tokens)
        checker = jsonschema.FormatChecker(["date"])
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
    assert num_finished >= 0.95 * NUM_SCHEMAS


def test_only_what_fits_is_allowed_and_the_end_only_where_it_may_end(compiler, tokenizer):
    ends = {tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")}
    grammar = grammar_of(compiler, "x{2}[ab]*")
    x, a, b = (ord(char) for char in "xab")
    assert allowed(grammar) == {x}
    assert grammar.advance(x) is None
    assert allowed(grammar) == {x}
    grammar.advance(x)
    ab = tokenizer.token_to_id("ab")
    assert (
        allowed(grammar) == {a, b, ab} | ends
    )  # no id beyond the tokenizer, no other special token
    grammar.advance(ab)
    assert not grammar.complete
    assert grammar.advance(min(ends)) is None
    assert grammar.complete


def test_an_output_is_complete_where_nothing_can_follow(compiler):
    grammar = grammar_of(compiler, "a{3}")
    for expected in (False, False, True):
        assert grammar.advance(ord("a")) is None
        assert grammar.complete is expected


def test_requests_with_the_same_grammar_go_their_own_ways(compiler):
    text = LLMatcher.grammar_from_regex("[pq]r")
    first = compile_now(compiler, text)
    first.advance(ord("p"))
    second, third = compiler.ready(text), compile_now(compiler, text)
    assert allowed(first) == {ord("r")}
    assert allowed(second) == allowed(third) == {ord("p"), ord("q")}


def test_old_grammars_are_forgotten(compiler):
    first = LLMatcher.grammar_from_regex("old")
    compile_now(compiler, first)
    assert compiler.ready(first) is not None
    for i in range(70):
        compile_now(compiler, LLMatcher.grammar_from_regex(f"new{i}"))
    assert compiler.ready(first) is None
    assert len(compiler._compiled) <= 64


def test_a_small_grammar_does_not_wait_for_a_large_one(compiler):
    properties = {f"p{i}": {} for i in range(2000)}
    large = single_grammar({"json_schema": {"type": "object", "properties": properties}})
    assert len(large) > SMALL_CHARS
    done, came = threading.Event(), list[bool]()
    compiler.compile(large, lambda _: came.append(done.wait(60)))
    compiler.compile(LLMatcher.grammar_from_regex("small"), lambda _: done.set())
    compiler.wait()
    assert came == [True]


@pytest.mark.parametrize(
    "grammar", ["start: /a(/", "start: missing", '{"grammars": 5}', "start: <no>"]
)
def test_a_broken_grammar_is_a_message(compiler, grammar):
    error = compile_now(compiler, grammar)
    assert isinstance(error, str)
    assert error.startswith(GRAMMAR_FAILED)
    assert "verbose" not in error


def test_a_token_that_does_not_fit_is_a_message(compiler):
    grammar = grammar_of(compiler, "abc")
    error = grammar.advance(ord("x"))
    assert error.startswith(GRAMMAR_FAILED) and "x" in error


def test_a_grammar_without_an_end_is_a_message(compiler, tokenizer):
    grammar = compile_now(compiler, 'start: "q" loop\nloop: loop')
    grammar_masks = GrammarBitmasks(VOCAB_SIZE, 1)
    error = None
    for _ in range(3):
        token = min(allowed(grammar, grammar_masks))
        error = grammar.advance(token)
        if error is not None:
            break
    assert error.startswith(GRAMMAR_FAILED)


def test_rows_without_a_grammar_are_free(compiler):
    masks = GrammarBitmasks(VOCAB_SIZE, 2)
    assert masks.start([(None, ()), (None, ())]) is None
    grammars = None, grammar_of(compiler, "k"), None, grammar_of(compiler, "[mn]")
    pending = masks.start((grammar, ()) for grammar in grammars)
    logits = torch.zeros(4, VOCAB_SIZE)
    pending.wait().apply(logits)
    assert [int(n) for n in torch.isfinite(logits).sum(dim=1)] == [VOCAB_SIZE, 1, VOCAB_SIZE, 2]


def test_a_mask_is_computed_while_its_caller_goes_on(compiler, monkeypatch):
    masks = GrammarBitmasks(VOCAB_SIZE, 1)
    may_fill, fill = threading.Event(), masks._fill

    def slow_fill(matchers, num_rows):
        assert may_fill.wait(60)
        return fill(matchers, num_rows)

    monkeypatch.setattr(masks, "_fill", slow_fill)
    pending = masks.start([(grammar_of(compiler, "z"), ())])
    may_fill.set()  # would never happen if start waited
    assert pending.wait().allowed_GW.shape == (1, VOCAB_SIZE // 32)


def test_deep_chains_of_references_do_not_end_the_process(compiler):
    rules = "".join(f"a{i}: a{i + 1}\n" for i in range(3900))
    assert isinstance(compile_now(compiler, f'start: a0\n{rules}a3900: "x"'), Grammar)
    leaf = {"a5000": {"type": "string"}}
    chain = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(5000)}
    schema = {"$ref": "#/$defs/a0", "$defs": chain | leaf}
    assert compile_now(compiler, json.dumps({"grammars": [{"json_schema": schema}]})) is not None


def test_a_checkpoint_without_a_tokenizer_refuses_grammars(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    compiler = GrammarCompiler(tmp_path, VOCAB_SIZE)
    error = grammar_of(compiler, "a")
    assert isinstance(error, str) and error.startswith(GRAMMAR_FAILED)
    compiler.close()
