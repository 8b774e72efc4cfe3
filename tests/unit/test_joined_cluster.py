"""In a joined Ray cluster the processes of the command's node stay there; the store listens on one address."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from cluster.commands import serve as serve_command
from cluster.commands import start
from cluster.commands.serve import _delete_application
from cluster.commands.start import RankStart
from cluster.commands.stop_signals import StopSignals
from cluster.config.api_keys import KeyDigests
from cluster.config.examples import DEMO
from cluster.config.load import load_config
from cluster.config.phalanx_config import PhalanxConfig
from cluster.ingress import ingress
from cluster.supervisor import actor, launcher
from cluster.supervisor.group import GroupHealth
from tests.unit.ray_fakes import rank_config
from workers.rank.process_group import host_store


def joined(*overrides: str) -> PhalanxConfig:
    return load_config(DEMO, ["cluster.ray_address=auto", *overrides])


@pytest.mark.parametrize(
    ("listen", "overrides", "pinned"),
    [
        (True, (), True),  # clients find it at serve.host of the node of the command
        (False, (), False),  # Serve's proxies find it anywhere
        (False, ("cluster.fetch_weights=true",), True),  # the tokenizer may be on this node alone
    ],
)
def test_the_node_of_an_ingress(
    monkeypatch: pytest.MonkeyPatch, listen: bool, overrides: tuple[str, ...], pinned: bool
) -> None:
    monkeypatch.setattr(ingress, "node_address", lambda: "192.0.2.7")
    app: Any = ingress.deploy(joined(*overrides), listen=listen, keys=KeyDigests())
    found = app._bound_deployment.ray_actor_options.get("resources") or {}
    assert found == ({"node:192.0.2.7": 0.001} if pinned else {})


def test_secrets_are_arguments_of_an_ingress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray writes a runtime_env to logs that all users of a machine can read."""
    monkeypatch.setattr(ingress, "node_address", lambda: "192.0.2.7")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret")
    app: Any = ingress.deploy(joined(), listen=True, keys=KeyDigests())
    deployment = app._bound_deployment
    assert "secret" not in str(deployment.ray_actor_options)
    environment = deployment.init_kwargs["environment"]
    assert environment["OTEL_EXPORTER_OTLP_HEADERS"] == "authorization=secret"


def test_ranks_get_variables_of_their_libraries_and_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    subject = launcher.RankLauncher(rank_config(), name="app", joined=True)
    subject._environment = launcher.rank_environment(subject._config, joined=subject._joined)
    variables = subject._spares.take(None, subject._environment)["runtime_env"]["env_vars"]
    assert variables["HF_HOME"] == "/models" and variables["UCX_NET_DEVICES"] == "eth7"
    assert "hf_secret" not in variables.values()


def test_the_supervisor_runs_on_the_node_that_has_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: dict[str, Any] = {}

    class FakeActorClass:
        def options(self, **options: Any) -> "FakeActorClass":
            chosen.update(options)
            return self

        def remote(self, config: PhalanxConfig) -> str:
            return "handle"

    here = "ab" * 28
    context = type("Context", (), {"get_node_id": lambda self: here})
    monkeypatch.setattr(ray, "remote", lambda cls: FakeActorClass())
    monkeypatch.setattr(ray, "get_runtime_context", context)
    actor.get_or_create(joined())
    # Ray ignores a soft affinity of actors that take no CPU.
    assert (chosen["scheduling_strategy"].node_id, chosen["scheduling_strategy"].soft) == (
        here,
        False,
    )


def test_a_second_server_of_an_application_is_refused_and_leaves_the_first_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended the first server, by the name of the supervisor and of the application."""

    def taken(*_: object, **__: object) -> None:
        raise ValueError("The name supervisor:phalanx (namespace=phalanx) is already taken.")

    monkeypatch.setattr(actor, "_create", taken)
    monkeypatch.setattr(start, "start_ray", lambda *_: None)
    monkeypatch.setattr(start.download, "is_needed", lambda config: False)
    monkeypatch.setattr(start, "lost_ray_process", lambda: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    ranks = RankStart(joined(), StopSignals(), SimpleNamespace(), serve_command.console)
    assert ranks.start_ray()
    with pytest.raises(start.ServerError, match=r"'phalanx' is already running.* serve\.app_name"):
        ranks.create()
    deleted: list[str] = []
    ranks.shut_down(lambda: deleted.append("application"))
    assert not deleted and "stopped" in capsys.readouterr().out


def test_a_start_that_failed_before_serve_ran_ends_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def delete(name: str) -> None:
        raise RayServeException("There is no Serve instance running on this Ray cluster.")

    monkeypatch.setattr(serve, "delete", delete)
    _delete_application(joined())


@pytest.mark.parametrize(
    ("applications", "proxies", "ends"),
    [({}, {}, True), ({"other": None}, {}, False), ({}, {"node": None}, False)],
)
def test_serve_ends_with_its_last_application_unless_it_has_proxies(
    monkeypatch: pytest.MonkeyPatch, applications: dict, proxies: dict, ends: bool
) -> None:
    """Without proxies it would start none for a later `serve deploy`."""
    calls: list[str] = []
    status = SimpleNamespace(applications=applications, proxies=proxies)
    monkeypatch.setattr(serve, "delete", lambda name: calls.append("delete"))
    monkeypatch.setattr(serve, "status", lambda: status)
    monkeypatch.setattr(serve, "shutdown", lambda: calls.append("shutdown"))
    _delete_application(joined())
    assert calls == ["delete", *["shutdown"] * ends]


def test_the_store_listens_on_its_address_alone() -> None:
    store = host_store("127.0.0.1")
    assert (store.host, store.port > 0) == ("127.0.0.1", True)
    socket.create_connection(("127.0.0.1", store.port), 5).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port), 5)  # of this machine too


def test_an_error_with_brackets_does_not_end_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors of gloo name a source file in brackets, which rich took for markup: `phalanx serve` ended."""
    error = "vote: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    healths = iter([GroupHealth("serving", 0, ""), GroupHealth("rebuilding", 1, error)])
    monkeypatch.setattr("ray.wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr("ray.get", lambda call: [next(healths)])
    idle = SimpleNamespace(remote=object)
    ranks = RankStart(joined(), StopSignals(), SimpleNamespace(), serve_command.console)
    ranks.supervisor = SimpleNamespace(healths=idle)
    for _ in range(2):
        ranks.check()
    assert error in capsys.readouterr().out


def test_a_supervisor_that_is_blocked_ends_no_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits up to a minute for Ray's GCS, while the ranks serve."""
    calls: list[object] = []
    answers = iter([*[False] * start.SILENT_CHECKS, True, True])
    monkeypatch.setattr("ray.wait", lambda calls, timeout: (calls if next(answers) else [], []))
    monkeypatch.setattr("ray.get", lambda call: [GroupHealth("serving", 0, "")])
    asked = SimpleNamespace(remote=lambda: calls.append(object()) or calls[-1])
    ranks = RankStart(joined(), StopSignals(), SimpleNamespace(), serve_command.console)
    ranks.supervisor = SimpleNamespace(healths=asked)
    for _ in range(start.SILENT_CHECKS + 1):
        ranks.check()
    assert len(calls) == 1, "one call waits for its answer"
    assert caplog.text.count("the supervisor does not answer") == 1
    ranks.check()
    assert len(calls) == 2
