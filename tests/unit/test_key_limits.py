"""What the key of a client may do: priority and rank, prefixes of others, open requests and tokens."""

from typing import Any

import httpx
import pytest

from cluster.api.admission import AdmissionGate, KeyLimits
from cluster.config.api_keys import KeyDigests
from cluster.config.load import load_config
from cluster.config.serve_section import AccessConfig
from cluster.errors import BadRequestError, OverloadedError
from cluster.ingress import settings
from tests.unit.api_fakes import Api, assert_error, tiny_checkpoint
from tests.unit.test_auth import ACCEPTED, KEYS, OPERATOR_KEY, bearer


def ask(api: Api, key: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"prompt": "hi", "max_tokens": 1, **fields}
    return api.request("POST", "/v1/completions", json=body, headers=bearer(key) | (headers or {}))


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"priority": -1}, {}, "priority"),
        ({}, {"x-data-parallel-rank": "0"}, "x-data-parallel-rank"),
    ],
)
def test_priority_and_rank_may_be_for_operators_alone(fields, headers, param):
    api = Api(keys=ACCEPTED, client_routing=False)
    assert assert_error(ask(api, KEYS[0], headers, **fields), 403, "forbidden")["param"] == param
    assert ask(api, OPERATOR_KEY, headers, **fields).status_code == 200
    assert ask(api, KEYS[0], priority=0).status_code == 200
    api = Api(keys=ACCEPTED)
    assert ask(api, KEYS[0], headers, **fields).status_code == 200


def test_keys_share_no_prefixes():
    api = Api(keys=ACCEPTED, separate_prefixes=True)
    for key in (*KEYS, KEYS[0]):
        assert ask(api, key).status_code == 200
    first, second, again = (options["cache_salt"] for options in api.backend.options.values())
    assert first == again != second and KEYS[0] not in first
    api.backend.options.clear()
    ask(api, KEYS[0], cache_salt="mine")
    (options,) = api.backend.options.values()
    assert options["cache_salt"] == f"{first}:mine"
    api = Api(keys=ACCEPTED)
    ask(api, KEYS[0])
    assert list(api.backend.options.values()) == [{}]


def test_kept_responses_are_of_their_key():
    api = Api(keys=ACCEPTED)

    def call(method: str, path: str, key: str, **body: Any) -> httpx.Response:
        return api.request(method, f"/v1/responses{path}", headers=bearer(key), json=body or None)

    mine = [{"role": "user", "content": "secret", "id": "msg_1"}]
    response_id = call("POST", "", KEYS[0], input=mine, max_output_tokens=1).json()["id"]
    path = f"/{response_id}"
    for method, part in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        assert_error(call(method, path + part, KEYS[1]), 404)
    previous = call("POST", "", KEYS[1], input="x", previous_response_id=response_id)
    assert_error(previous, 400, "previous_response_not_found")
    reference = [{"type": "item_reference", "id": "msg_1"}]
    assert assert_error(call("POST", "", KEYS[1], input=reference), 400)["param"] == "input.0.id"
    assert call("POST", "", KEYS[0], input=reference, max_output_tokens=1).status_code == 200
    assert call("GET", path, KEYS[0]).status_code == 200


def test_open_requests_of_a_key():
    gate = AdmissionGate(limits=KeyLimits(max_requests=2))
    first, _ = gate.admit(1, "a"), gate.admit(1, "a")
    with pytest.raises(OverloadedError, match="2 open requests"):
        gate.admit(1, "a")
    gate.admit(1, "b")
    for _ in range(5):
        gate.admit(1)  # operators, and servers without keys
    first.release()
    gate.admit(1, "a")


def test_open_tokens_of_a_key():
    gate = AdmissionGate(limits=KeyLimits(max_tokens=100))
    first, second = gate.admit(1, "a"), gate.admit(1, "a")
    gate.resize(first, 1, 60)
    with pytest.raises(OverloadedError, match="60 of 100 tokens"):
        gate.resize(second, 1, 50)
    gate.resize(gate.admit(1, "b"), 1, 50)
    gate.resize(gate.admit(1), 1, 1000)
    first.release()
    gate.resize(second, 2, 50)
    assert gate.num_choices == 2 + 1 + 1
    with pytest.raises(BadRequestError, match="101 tokens"):
        gate.resize(gate.admit(1, "c"), 1, 101)


def test_tokens_are_those_of_prompt_and_answer():
    api = Api(keys=ACCEPTED, limits=KeyLimits(max_tokens=20))
    assert ask(api, KEYS[0], max_tokens=18).status_code == 200
    assert_error(ask(api, KEYS[0], max_tokens=19), 400)
    assert_error(ask(api, KEYS[0], max_tokens=9, n=2), 400)
    assert ask(api, OPERATOR_KEY, max_tokens=19).status_code == 200


ONE, TWO = (KeyDigests(clients=ACCEPTED.clients[:number]) for number in (1, 2))


@pytest.mark.parametrize(
    ("access", "keys", "routing", "separate"),
    [
        (AccessConfig(), KeyDigests(), True, False),
        (AccessConfig(), ONE, True, False),
        (AccessConfig(), TWO, False, True),
        (AccessConfig(client_routing=True, separate_prefixes=False), TWO, True, False),
        (AccessConfig(client_routing=False, separate_prefixes=True), ONE, False, True),
    ],
)
def test_several_keys_are_kept_apart_by_default(
    access, keys, routing, separate, tmp_path, monkeypatch
):
    monkeypatch.setattr(settings, "num_gpus", lambda: 0)
    config = load_config({"model": {"path": str(tiny_checkpoint(tmp_path / "tiny"))}})
    config = config.model_copy(update={"serve": config.serve.model_copy(update={"access": access})})
    found = settings.api_settings(config, keys)
    assert (found.client_routing, found.separate_prefixes) == (routing, separate)
