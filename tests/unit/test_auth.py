"""API keys: where they come from, who gets in, and that they show up nowhere."""

import pytest

from cluster.config import api_keys
from cluster.config.api_keys import ApiKeyError, KeyDigests, digest, load_digests, read_keys_file
from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from tests.unit.api_fakes import Api, assert_error, tiny_checkpoint

KEYS = ("first-key", "second-key")
OPERATOR_KEY = "operator-key"
ACCEPTED = KeyDigests(
    clients=tuple(digest(key.encode()) for key in KEYS), operators=(digest(OPERATOR_KEY.encode()),)
)
GUARDED = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/x"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/nothing"),
    ("GET", "/nothing"),
    ("GET", "//v1/models"),
    ("GET", "/live/../v1/models"),
    ("GET", "/web"),
]
OPEN = ["/", "/live", "/ready", "/health", "/ping", "/version", "/load", "/metrics", "/ranks"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(""),
        bearer("first-key2"),
        bearer("first-ke"),
        bearer("first-key,second-key"),
        {"authorization": "first-key"},
        {"authorization": "Basic first-key"},
        {"authorization": b"Bearer \xff\xfe"},
        {"x-api-key": "wrong"},
        {"x-api-key": "Bearer first-key"},
        {"authorization": "Bearer " + "x" * 10_000},
    ],
)
def test_without_a_right_key_nothing_is_answered(method, path, headers):
    api = Api(keys=ACCEPTED)
    response = api.request(method, path, headers=headers)
    error = assert_error(response, 401, "invalid_api_key")
    assert error["type"] == "invalid_request_error"
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    assert "first" not in response.text
    assert api.backend.requests == {}


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("key", [*KEYS, OPERATOR_KEY])
def test_each_key_opens(key, scheme):
    api = Api(keys=ACCEPTED)
    headers = {"authorization": f"{scheme} {key}"}
    assert api.get("/v1/models", headers=headers).status_code == 200
    answer = api.request("POST", "/v1/completions", json={"prompt": "a"}, headers=headers)
    assert answer.status_code == 200
    assert_error(api.get("/v1/nothing", headers=headers), 404)


@pytest.mark.parametrize(
    "path", [*OPEN, "/docs", "/openapi.json", "/web/page.js", "/web/docs/swagger-ui.css"]
)
def test_probes_and_pages_need_no_key(path):
    assert Api(keys=ACCEPTED).get(path).status_code == 200


def test_without_keys_nobody_is_asked():
    assert Api().complete().status_code == 200
    assert Api().get("/v1/models", headers=bearer("anything")).status_code == 200


def test_refusals_are_counted():
    api = Api(keys=ACCEPTED)
    api.complete()
    assert "phalanx:http_requests_total{" in api.get("/metrics").text
    assert 'status="401"' in api.get("/metrics").text


def test_the_document_says_that_a_key_is_needed():
    assert "security" not in Api().get("/openapi.json").json()
    document = Api(keys=ACCEPTED).get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


def test_keys_come_from_variable_and_file(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# those of the team\nfile-key   # of the cat\n\n  other#key\n#no\nfile-key\n")
    assert read_keys_file(str(file)) == ["file-key", "other#key", "file-key"]
    monkeypatch.delenv(api_keys.VARIABLE, raising=False)
    monkeypatch.delenv(api_keys.OPERATOR_VARIABLE, raising=False)
    assert load_digests(None) == KeyDigests()
    monkeypatch.setenv(api_keys.VARIABLE, "")
    assert load_digests(None) == KeyDigests()
    monkeypatch.setenv(api_keys.VARIABLE, " one , two,")
    monkeypatch.setenv(api_keys.OPERATOR_VARIABLE, "three")
    both = KeyDigests(clients=(digest(b"one"), digest(b"two")), operators=(digest(b"three"),))
    assert load_digests(None) == both
    assert load_digests(str(file)).clients[2:] == (digest(b"file-key"), digest(b"other#key"))


def test_a_key_of_operators_is_no_key_of_clients(monkeypatch):
    monkeypatch.setenv(api_keys.VARIABLE, "one,two")
    monkeypatch.setenv(api_keys.OPERATOR_VARIABLE, "two")
    with pytest.raises(ApiKeyError, match=api_keys.OPERATOR_VARIABLE) as error:
        load_digests(None)
    assert "two" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("good\nse cret\n", "line 2"),
        ("se,cret\n", "line 1"),
        ("secr\u00e9t\n", "line 1"),
        ("secret" * 100, "line 1"),
    ],
)
def test_bad_key_files_are_told_without_the_key(tmp_path, text, words):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ApiKeyError) as error:
        read_keys_file(str(file))
    assert words in str(error.value) and str(file) in str(error.value)
    assert "cret" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ApiKeyError, match="No such file"):
        read_keys_file(str(tmp_path / "none"))
    with pytest.raises(ApiKeyError, match="directory"):
        read_keys_file(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ApiKeyError, match="no text file"):
        read_keys_file(str(tmp_path / "binary"))


@pytest.mark.parametrize("value", [",", " ", "a b", "ok,a b", "\u00e9"])
def test_bad_variable(monkeypatch, value):
    monkeypatch.setenv(api_keys.VARIABLE, value)
    with pytest.raises(ApiKeyError, match=api_keys.VARIABLE):
        load_digests(None)


@pytest.fixture
def yaml_path(tmp_path):
    tiny_checkpoint(tmp_path / "tiny")
    path = tmp_path / "server.yaml"
    path.write_text("model:\n  path: tiny\nserve:\n  api_keys_file: keys\n")
    return path


def test_the_file_counts_from_the_yaml_and_is_checked_early(yaml_path):
    with pytest.raises(ConfigError) as error:
        load_config(yaml_path)
    assert "serve.api_keys_file" in str(error.value) and "line 4" in str(error.value)
    (yaml_path.parent / "keys").write_text("the-secret\n")
    config = load_config(yaml_path)
    assert config.serve.api_keys_file == str(yaml_path.parent / "keys")
    assert "the-secret" not in repr(config) + config.model_dump_json()


def test_check_never_shows_a_key_and_warns_of_an_open_door(yaml_path, monkeypatch):
    from typer.testing import CliRunner

    from cluster.cli import app

    (yaml_path.parent / "keys").write_text("the-secret\n")
    monkeypatch.setenv(api_keys.VARIABLE, "the-other-secret")
    arguments = ["check", str(yaml_path), "--set", "serve.host=0.0.0.0", "--set"]
    guarded = CliRunner().invoke(app, [*arguments, "cluster.ranks=1"])
    assert guarded.exit_code == 0, guarded.output
    assert "secret" not in guarded.output
    assert "serve.host is 0.0.0.0" not in guarded.output
    monkeypatch.delenv(api_keys.VARIABLE)
    unguarded = CliRunner().invoke(app, [*arguments, "serve.api_keys_file=null"])
    assert unguarded.exit_code == 0, unguarded.output
    assert "serve.host is 0.0.0.0" in unguarded.output and api_keys.VARIABLE in unguarded.output


def test_settings_do_not_show_digests():
    from cluster.api.settings import ApiSettings

    assert "digest" not in repr(ApiSettings(keys=ACCEPTED))
