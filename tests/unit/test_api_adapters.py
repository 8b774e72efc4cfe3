"""Adapters in every API: chosen by `model`, listed with their parent, loaded and unloaded by operators."""

from typing import Any

import pytest

from tests.unit.api_fakes import MODEL, Api, FakeBackend, assert_error
from tests.unit.test_admin import OPERATOR, OPERATORS
from tests.unit.test_api_pooling import EMBED, api_of
from tests.unit.test_auth import ACCEPTED, KEYS, bearer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/v1/responses": {"input": "hi"},
}


def api() -> Api:
    made = Api(FakeBackend(), keys=OPERATORS)
    made.backend.adapters = {"fr": "/adapters/fr", "de": "owner/de"}
    return made


@pytest.mark.parametrize("path", BODIES)
def test_the_model_of_a_request_chooses_its_adapter(path: str) -> None:
    subject = api()
    for model, options in (("fr", {"adapter": "fr"}), (MODEL, {}), (None, {})):
        body = BODIES[path] if model is None else {**BODIES[path], "model": model}
        if model is None and path == "/v1/messages":
            continue  # its model is required
        answer = subject.post(path, body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == (model or MODEL)
        assert list(subject.backend.options.values())[-1] == options


@pytest.mark.parametrize("path", [*BODIES, "/tokenize"])
def test_an_unknown_model_is_a_404_with_the_names(path: str) -> None:
    body = {**BODIES.get(path, {"prompt": "hi"}), "model": "es"}
    answer = api().post(path, body)
    assert answer.status_code == 404
    message = (
        f"the model 'es' does not exist; this server has {MODEL!r} and its adapters 'de', 'fr'"
    )
    assert answer.json()["error"]["message"] == message
    assert api().post("/tokenize", {"prompt": "hi", "model": "fr"}).status_code == 200


def test_streams_name_the_adapter() -> None:
    answer = api().chat(model="fr", stream=True)
    assert answer.status_code == 200 and '"model":"fr"' in answer.text


def test_vectors_by_an_adapter() -> None:
    subject = api_of(EMBED)
    subject.backend.adapters = {"fr": "/adapters/fr"}
    answer = subject.post("/v1/embeddings", {"input": "hi", "model": "fr"})
    assert answer.status_code == 200 and answer.json()["model"] == "fr"
    assert list(subject.backend.options.values())[-1]["adapter"] == "fr"


def test_models_lists_adapters_with_their_parent() -> None:
    subject = api()
    base, fr, de = subject.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == (MODEL, None)
    assert (fr["id"], fr["root"], fr["parent"]) == ("fr", "/adapters/fr", MODEL)
    assert de["root"] == "owner/de"
    assert subject.get("/v1/models/fr").json() == fr
    assert_error(subject.get("/v1/models/es"), 404, "model_not_found")
    page = subject.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (page["first_id"], page["last_id"]) == (MODEL, "de")
    assert [card["id"] for card in page["data"]] == [MODEL, "fr", "de"]


def operate(subject: Api, route: str, headers: dict[str, str] = OPERATOR, **body: Any) -> Any:
    return subject.request("POST", f"/v1/{route}_lora_adapter", json=body, headers=headers)


def test_operators_load_and_unload() -> None:
    subject = api()
    answer = operate(subject, "load", lora_name="es", lora_path="/adapters/es")
    assert answer.text == "Success: LoRA adapter 'es' added successfully."
    assert subject.complete(model="es").status_code == 200
    assert_error(operate(subject, "load", lora_name="es", lora_path="/x"), 400)
    answer = operate(subject, "unload", lora_name="es", lora_int_id=7)
    assert answer.text == "Success: LoRA adapter 'es' removed successfully."
    assert_error(subject.complete(model="es"), 404, "model_not_found")
    assert_error(operate(subject, "unload", lora_name="es"), 404)


def test_bodies_are_checked() -> None:
    subject = api()
    for route, body in (
        ("load", {"lora_name": "es"}),
        ("load", {"lora_name": "", "lora_path": "/x"}),
        ("load", {"lora_name": "es", "lora_path": "/x", "load_inplace": None}),
        ("load", {"lora_name": "es", "lora_path": "/x", "other": False}),
        ("unload", {}),
    ):
        assert_error(operate(subject, route, **body), 400)
    assert set(subject.backend.adapters) == {"fr", "de"}


def test_an_adapter_is_not_replaced_in_place() -> None:
    """false is the default of vLLM, and some clients send all fields."""
    subject = api()
    for name in ("es", "fr"):
        body = {"lora_name": name, "lora_path": "/x", "load_inplace": True}
        error = assert_error(operate(subject, "load", **body), 400, "unsupported_parameter")
        assert error["param"] == "load_inplace" and "unload the adapter" in error["message"]
    assert subject.backend.adapters == {"fr": "/adapters/fr", "de": "owner/de"}
    body = {"lora_name": "es", "lora_path": "/x", "load_inplace": False}
    assert operate(subject, "load", **body).status_code == 200
    assert subject.backend.adapters["es"] == "/x"


def test_no_other_key_loads() -> None:
    subject = Api(keys=ACCEPTED)
    body = {"lora_name": "es", "lora_path": "/x"}
    assert operate(subject, "load", bearer(KEYS[0]), **body).status_code == 403
    assert operate(subject, "load", bearer("wrong"), **body).status_code == 401
    assert operate(Api(), "load", **body).status_code == 403, "without keys of operators it is off"
    assert subject.backend.adapters == {}
