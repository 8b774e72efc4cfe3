"""Grammars through whole engines: answers hold to them, also after preemption, and nobody else notices."""

import json
import random
from pathlib import Path

import jsonschema
import pytest

from cluster.api.request.grammar_check import single_grammar
from cluster.api.request.structured import json_schema_node
from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import Event, make_request, rank_config, run_engines
from tests.unit.grammar_cases import random_schema

NUM_RANKS, NUM_SCHEMAS = 2, 12
ENDS = frozenset({256, 258})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("grammar") / "model"
    make_checkpoint(
        path, num_layers=1, hidden_size=32, num_experts=4, num_experts_per_tok=2, head_dim=32
    )
    return path


def traffic(schemas: list[dict]) -> list[Event]:
    """Requests with and without grammars on both ranks; one grammar is broken, one never ends."""
    events = []
    for i, schema in enumerate(schemas):
        params = {"max_tokens": 200, "temperature": 1.0, "seed": i, "stop_token_ids": ENDS}
        grammar = single_grammar(json_schema_node(schema))
        request = make_request(f"json-{i}", list(range(5 + i)), grammar=grammar, **params)
        events.append(Event(i // 2, i % NUM_RANKS, request))
        request = make_request(f"plain-{i}", [i] * 20, **{**params, "max_tokens": 30})
        events.append(Event(i // 2, i % NUM_RANKS, request))
    broken = make_request("broken", [1, 2], grammar="start: /a(/")
    endless = make_request("endless", [1, 2], grammar='start: "ab" a\na: a')
    short = make_request(
        "short", [1, 2], grammar="start: /[xy]{3}/", min_tokens=9, stop_token_ids=ENDS
    )
    return [*events, Event(1, 0, broken), Event(2, 1, endless), Event(2, 1, short)]


def run(rank_pool, checkpoint, events, num_blocks, asynchronous=False):
    config = rank_config(
        checkpoint,
        NUM_RANKS,
        scheduler={
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "async_scheduling": asynchronous,
        },
        cache={"num_blocks": num_blocks, "block_size": 8},
        model={"max_model_len": 256},
    )
    results = run_engines(rank_pool, config, events)
    tokens = {name: ids for result in results for name, ids in result.tokens.items()}
    reasons = {name: reason for result in results for name, reason in result.reasons.items()}
    errors = {name: error for result in results for name, error in result.errors.items()}
    return tokens, reasons, errors, sum(result.num_preemptions for result in results)


def test_answers_hold_to_their_grammars_also_after_preemption(rank_pool, checkpoint):
    rng = random.Random(11)
    schemas = [random_schema(rng) for _ in range(NUM_SCHEMAS)]
    events = traffic(schemas)
    tokens, reasons, errors, preemptions = run(rank_pool, checkpoint, events, 1000)
    assert preemptions == 0
    num_finished = 0
    for i, schema in enumerate(schemas):
        name = f"json-{i}"
        if reasons[name] == "stop":
            text = bytes(token for token in tokens[name] if token < 256).decode()
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            num_finished += 1
    assert num_finished >= NUM_SCHEMAS * 2 // 3
    assert set(errors) == {"broken", "endless"}
    assert reasons["broken"] == reasons["endless"] == "error"
    assert "unclosed group" in errors["broken"] and "cannot go on" in errors["endless"]
    # Nothing can follow three letters, whatever min_tokens says.
    assert reasons["short"] == "stop" and len(tokens["short"]) == 3

    alone = [event for event in events if event.request.request_id.startswith("plain")]
    assert run(rank_pool, checkpoint, alone, 1000)[0].items() <= tokens.items()

    tight = run(rank_pool, checkpoint, events, 34)
    assert tight[3] > 0
    assert tight[:3] == (tokens, reasons, errors)

    ahead = run(rank_pool, checkpoint, events, 34, asynchronous=True)
    assert ahead[3] > 0
    assert ahead[:3] == (tokens, reasons, errors)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in turn", "asynchronous"])
def test_a_request_that_forbids_all_tokens_ends_alone(rank_pool, checkpoint, asynchronous):
    events, expected = [], {}
    for kind, sampling in (("greedy", {}), ("sampled", {"temperature": 1.0, "seed": 3})):
        cases = {
            "other letters": (1, {"allowed_token_ids": (ord("z"),), "grammar": "start: /[xy]+/"}),
            "words of a grammar": (
                1,
                {"bad_words_ids": ((ord("x"),),), "grammar": "start: /x{3}/"},
            ),
            "third letter": (
                3,
                {"bad_words_ids": ((ord("x"),) * 3,), "grammar": "start: /x{5}/"},
            ),
            "second of one token": (
                2,
                {"allowed_token_ids": (7,), "bad_words_ids": ((7, 7),)},
            ),
        }
        for number, (case, (position, params)) in enumerate(cases.items()):
            name = f"{case}, {kind}"
            request = make_request(name, [1, 2, number], logprobs=1, **params, **sampling)
            events.append(Event(number, number % NUM_RANKS, request))
            expected[name] = position
    for number in range(4):
        plain = make_request(f"plain {number}", [number] * 9, temperature=1.0, seed=number)
        events.append(Event(0, number % NUM_RANKS, plain))
    tokens, reasons, errors, _ = run(rank_pool, checkpoint, events, 1000, asynchronous)
    assert errors == {
        name: f"no token is allowed as output token {position}"
        for name, position in expected.items()
    }
    for name, position in expected.items():
        assert reasons[name] == "error" and len(tokens[name]) == position - 1
    alone = [event for event in events if event.request.request_id.startswith("plain")]
    found = run(rank_pool, checkpoint, alone, 1000, asynchronous)[0]
    assert len(found) == 4 and found.items() <= tokens.items()
