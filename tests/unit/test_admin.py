"""Operators: routes and their access, settings that a running server can change, commands, the supervisor's part."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any, get_args

import httpx
import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import changes, load
from cluster.config.api_keys import KeyDigests
from cluster.config.changes import RESTART, SCALE, ChangeRefusedError, changed_config
from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from cluster.config.phalanx_config import Role, json_schema
from cluster.errors import BadRequestError
from cluster.supervisor import operations
from tests.unit.api_fakes import Api, assert_error, tiny_checkpoint
from tests.unit.client_scene import run, scene, use_fakes
from tests.unit.ray_fakes import rank_config, until
from tests.unit.test_auth import ACCEPTED, KEYS, OPERATOR_KEY, bearer

BODIES: dict[str, dict[str, Any]] = {
    "drain": {"timeout_s": 3},
    "scale": {"ranks": 4},
    "restart": {"set": ["scheduler.max_num_seqs=8"]},
    "role": {"role": "decode"},
}
CALLS = {"drain": 3, "scale": 4, "restart": ["scheduler.max_num_seqs=8"], "role": "decode"}


OPERATOR = bearer(OPERATOR_KEY)
OPERATORS = KeyDigests(operators=ACCEPTED.operators)


def operate(api: Api, operation: str, body: Any) -> httpx.Response:
    return api.request("POST", f"/admin/{operation}", json=body, headers=OPERATOR)


@pytest.mark.parametrize("keys", [ACCEPTED, OPERATORS], ids=["with-clients", "alone"])
@pytest.mark.parametrize("operation", BODIES)
def test_operators_have_a_key_of_their_own(operation, keys):
    api = Api(keys=keys)
    assert operate(api, operation, BODIES[operation]).status_code == 200
    assert api.backend.operations == [(operation, CALLS[operation])]


@pytest.mark.parametrize("operation", BODIES)
def test_a_call_may_name_a_group(operation):
    api = Api(keys=OPERATORS)
    assert operate(api, operation, BODIES[operation] | {"group": "b"}).status_code == 200
    assert api.backend.operations == [(operation, CALLS[operation], "b")]
    assert_error(operate(api, operation, BODIES[operation] | {"group": 1}), 400)


@pytest.mark.parametrize("keys", [ACCEPTED, OPERATORS], ids=["with-clients", "alone"])
@pytest.mark.parametrize("operation", BODIES)
def test_no_other_key_operates(operation, keys):
    api = Api(keys=keys)
    path, body = f"/admin/{operation}", BODIES[operation]
    refused = api.post(path, body)
    assert_error(refused, 401, "invalid_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert_error(api.request("POST", path, json=body, headers=bearer("wrong")), 401)
    answer = api.request("POST", path, json=body, headers=bearer(KEYS[0]))
    assert answer.status_code == (403 if keys.clients else 401)
    assert api.backend.operations == []


@pytest.mark.parametrize("keys", [KeyDigests(), KeyDigests(clients=ACCEPTED.clients)])
@pytest.mark.parametrize("operation", BODIES)
def test_without_a_key_of_operators_their_routes_are_off(operation, keys):
    api = Api(keys=keys)
    headers = bearer(KEYS[0])
    answer = api.request("POST", f"/admin/{operation}", json=BODIES[operation], headers=headers)
    assert "PHALANX_OPERATOR_KEY" in assert_error(answer, 403, "forbidden")["message"]
    assert api.backend.operations == []


def test_with_keys_of_operators_alone_clients_need_none():
    assert Api(keys=OPERATORS).complete().status_code == 200


@pytest.mark.parametrize(
    ("operation", "body", "param"),
    [
        ("scale", {}, "ranks"),
        ("scale", {"ranks": 0}, "ranks"),
        ("scale", {"ranks": "2"}, "ranks"),
        ("drain", {"timeout_s": -1}, "timeout_s"),
        ("restart", {"set": "a=b"}, "set"),
        ("restart", {"sets": []}, "sets"),
        ("role", {"role": "decoder"}, "role"),
        ("role", {"group": "b"}, "role"),
    ],
)
def test_wrong_bodies(operation, body, param):
    api = Api(keys=ACCEPTED)
    assert assert_error(operate(api, operation, body), 400)["param"] == param
    assert api.backend.operations == []


def test_a_change_that_is_impossible_is_answered_with_its_reason():
    answer = operate(Api(keys=ACCEPTED), "scale", {"ranks": 9})
    assert "no free CPU" in assert_error(answer, 400)["message"]


def test_a_page_of_another_origin_cannot_operate():
    body = json.dumps({"ranks": 2}).encode()
    headers = {"content-type": "text/plain", **OPERATOR}
    api = Api(keys=ACCEPTED)
    assert_error(api.request("POST", "/admin/scale", content=body, headers=headers), 415)
    assert api.backend.operations == []


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("admin"))
    return load_config({"model": {"path": str(folder)}, "cluster": {"ranks": 2, "device": "cpu"}})


def test_settings_of_rank_processes_can_change(config):
    settings = ["scheduler.max_num_seqs=8", "kernels.all2all=torch_dist", "cache.block_size=32"]
    changed = changed_config(config, settings, RESTART)
    assert changed.scheduler.max_num_seqs == 8 and changed.cache.block_size == 32
    assert changed.serve == config.serve and changed.model == config.model
    assert changed_config(config, [], RESTART) == config
    assert changed_config(config, ["cluster.ranks=3"], SCALE).cluster.ranks == 3


@pytest.mark.parametrize(
    ("settings", "allowed", "key"),
    [
        (["serve.port=1234"], RESTART, "serve.port"),
        (["model.max_model_len=64"], RESTART, "model.max_model_len"),
        (["cluster.ranks=3"], RESTART, "cluster.ranks"),
        (["model.weights=dummy"], RESTART, "model.weights"),
        (["kernels.cache=/tmp/x"], RESTART, "kernels.cache"),
        (["kernels={cache: /tmp/x}"], RESTART, "kernels.cache"),
        (["cache.disk_path=/tmp/x"], RESTART, "cache.disk_path"),
        (["cache.host_memory_gib=1"], RESTART, "cache.host_memory_gib"),
        (["model.path=/tmp/x"], RESTART, "model.path"),
        (["serve.chat_template=/etc/passwd"], RESTART, "serve.chat_template"),
        (["cluster.ranks=3", "overlap.mode=off"], SCALE, "overlap.mode"),
    ],
)
def test_other_settings_cannot(config, settings, allowed, key):
    with pytest.raises(ChangeRefusedError, match=f"a running server cannot change {key};"):
        changed_config(config, settings, allowed)


def test_a_refused_setting_is_not_loaded_before(config, monkeypatch):
    monkeypatch.setattr(load.hub, "fetch_description", lambda *_: pytest.fail("fetched"))
    with pytest.raises(ChangeRefusedError, match=r"model\.path"):
        changed_config(config, ["model.path=evil/model", "model.revision=main"], RESTART)


def test_no_setting_of_restart_can_name_a_path_or_code():
    """Free text may be a path; the settings that HTTP can change are numbers, switches and names from a list."""
    schema = json_schema()

    def texts(node: Any, key: str) -> Iterator[str]:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        if node.get("type") == "string" and "enum" not in node and "const" not in node:
            yield key
        for part in node.get("anyOf", ()):
            yield from texts(part, key)
        for name, part in node.get("properties", {}).items():
            yield from texts(part, f"{key}.{name}" if key else name)

    free = list(texts(schema, ""))
    assert "kernels.cache" in free and "model.path" in free
    assert not [k for k in free if any(k == name or k.startswith(f"{name}.") for name in RESTART)]


def test_wrong_settings_are_named(config):
    with pytest.raises(ConfigError, match=r"scheduler\.max_num_seq\b"):
        changed_config(config, ["scheduler.max_num_seq=8"], RESTART)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that resolves no configuration."""
    use_fakes(monkeypatch)

    def changed(config: Any, settings: list[str], allowed: Any) -> Any:
        (setting,) = settings or ["cluster.ranks=2"]
        if not setting.startswith("cluster.ranks="):
            raise ChangeRefusedError(f"a running server cannot change {setting}")
        ranks = int(setting.partition("=")[2])
        cluster = config.cluster.model_copy(update={"ranks": ranks})
        return config.model_copy(update={"cluster": cluster})

    monkeypatch.setattr(operations, "changed_config", changed)
    monkeypatch.setattr(
        operations, "resolve_on_cluster", lambda config: rank_config(config.cluster.ranks)
    )


@pytest.mark.usefixtures("faked")
def test_the_supervisor_changes_its_groups(monkeypatch):
    async def scenario() -> None:
        async with scene() as now:
            await now.client.scale(3)
            await until(lambda: now.client.num_ranks == 3)
            await now.client.scale(1)
            await until(lambda: now.client.num_ranks == 1)
            before = now.ranks
            with pytest.raises(BadRequestError, match=r"cannot change serve\.port"):
                await now.client.restart(["serve.port=1"])
            await now.client.restart([])
            assert before[0].died and len(now.ranks) == 2  # as the fake has it
            now.supervisor.launcher.full = True
            with pytest.raises(BadRequestError, match="no free CPU"):
                await now.client.scale(4)
            # Another ingress, or the same one after its end, comes with the configuration of the start.
            await now.supervisor.start(now.supervisor._config)
            on_gpus = rank_config(2, "cuda")
            monkeypatch.setattr(operations, "resolve_on_cluster", lambda config: on_gpus)
            with pytest.raises(BadRequestError, match="would run on cuda instead of cpu"):
                await now.client.scale(2)

    run(scenario())


@pytest.mark.usefixtures("faked")
def test_a_drain_by_request():
    async def scenario() -> None:
        async with scene() as now:
            await now.client.drain(7.0)
            assert await now.client.drain_requested() == 7.0
            (health,) = await now.supervisor.healths()
            assert health.state == "draining" and health.alive

    run(scenario())


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    """(URL, requests): a server that notes (path, authorization, body) of each request."""
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append((self.path, self.headers["authorization"], body))
            errors = {8: (401, "a key is needed"), 9: (400, "no free CPU")}
            status, reason = errors.get(body.get("ranks"), (200, ""))
            answer = {"error": {"message": reason}} if reason else {"status": "done"}
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}", seen
    httpd.shutdown()
    httpd.server_close()


def test_the_commands(server, monkeypatch):
    url, seen = server
    monkeypatch.setenv("MY_KEY", "secret")
    invoke = CliRunner().invoke
    monkeypatch.setenv("PHALANX_OPERATOR_KEY", "operator")
    assert invoke(app, ["scale", "4", url, "--api-key-env", "MY_KEY"]).output == "done\n"
    assert invoke(app, ["drain", url, "--timeout", "3", "--group", "g"]).exit_code == 0
    settings = ["--set", "cache.block_size=32", "--set", "overlap.mode=off"]
    assert invoke(app, ["restart", url, *settings]).exit_code == 0
    assert seen[0] == ("/admin/scale", "Bearer secret", {"ranks": 4})
    assert seen[1] == ("/admin/drain", "Bearer operator", {"timeout_s": 3.0, "group": "g"})
    assert seen[2][2] == {"set": ["cache.block_size=32", "overlap.mode=off"]}
    refused = invoke(app, ["scale", "9", url])
    assert refused.exit_code == 1 and "error: no free CPU" in refused.output
    for variable, found in (("MY_KEY", "has another key"), ("NO_KEY", "is not set")):
        refused = invoke(app, ["scale", "8", url, "--api-key-env", variable])
        assert f"a key is needed; the environment variable {variable} {found}" in refused.output
    nobody = invoke(app, ["drain", "http://127.0.0.1:9"])
    assert (
        nobody.exit_code == 1 and "no answer from http://127.0.0.1:9/admin/drain" in nobody.output
    )
    assert invoke(app, ["drain", "ftp://x"]).exit_code == 2
    for role in get_args(Role):
        assert invoke(app, ["role", role, url, "--group", "g"]).output == "done\n"
        assert seen[-1] == ("/admin/role", "Bearer operator", {"role": role, "group": "g"})
    assert invoke(app, ["role", "decoder", url]).exit_code == 2


def test_keys_of_restart_exist(config):
    values = dict(changes._flat(config.model_dump()))
    for name in (*RESTART, *SCALE):
        assert any(key == name or key.startswith(f"{name}.") for key in values), name
