"""The client part of experiments of kind http, against the shared server and its Ray."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cluster.config.examples import DEMO
from cluster.config.load import load_config
from cluster.experiments import server_target
from cluster.experiments.metrics import known_metrics, metrics_of
from cluster.experiments.planned_load import first_requests, plan_load
from cluster.experiments.server_target import ServerClient, check_epochs, on_port
from cluster.experiments.target import EngineError, Job
from cluster.experiments.workload_section import RequestWorkload


def test_requests_and_figures_of_a_server(server) -> None:
    client = ServerClient(server.url, "tiny", {})
    assert client.is_ready()
    workload = RequestWorkload(requests=6, input_len=40, output_len=8, request_rate=50.0)
    load = plan_load(workload, 0, 1)
    found = metrics_of(client.run(Job(workload, load, "first", 0), 60), workload)
    assert found["completed"] == 6 and found["errors"] == 0
    assert (found["prompt_tokens"], found["output_tokens"]) == (240, 48)
    assert 0 < found["forward_share"] < 1
    assert found.keys() <= set(known_metrics("http"))
    again = metrics_of(client.run(Job(workload, load, "second", 0), 60), workload)
    assert not again.get("cached_tokens"), "a salt of its own keeps a run from cached prompts"
    warm_up = client.run(Job(workload, first_requests(load, 4), "warm-up", 0), 60)
    assert len(warm_up.answers) == 4, "a warm-up of an open loop is sent at once"
    with pytest.raises(EngineError, match="took longer than 0"):
        client.run(Job(workload, load, "third", 0), 0.01)


def test_servers_of_one_ray_have_names_of_their_own() -> None:
    config = load_config({"model": {"path": str(DEMO.parent / "models" / "demo")}})
    first, second = (on_port(config, 1234).serve for _ in range(2))
    assert (first.host, first.port) == ("127.0.0.1", 1234)
    assert len({first.app_name, second.app_name, config.serve.app_name}) == 3


def test_a_rebuilt_group_has_no_figures() -> None:
    before = [{"epoch": 1}, {"epoch": 1}]
    check_epochs(before, before)
    with pytest.raises(EngineError, match=r"a rank was lost in the run.*\(epoch 1 to 2\)"):
        check_epochs(before, [{"epoch": 2}, {"epoch": 2}])


class Rebuilding(BaseHTTPRequestHandler):
    """A server whose ranks are being rebuilt, with requests that get no answer."""

    def do_GET(self) -> None:
        ready = self.path == "/ready"
        group = {"state": "rebuilding", "error": "rank 1: its process died"}
        body = {"groups": [group]} if ready else {"ranks": [{"epoch": 0}]}
        text = json.dumps(body).encode()
        self.send_response(503 if ready else 200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        self.rfile.read()

    def log_message(self, *_: object) -> None:
        pass


def test_a_lost_rank_ends_a_run_though_its_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group may wait for its node for as long as cluster.start_timeout_s."""
    monkeypatch.setattr(server_target, "WATCH_S", 0.01)
    workload = RequestWorkload(requests=1)
    with ThreadingHTTPServer(("127.0.0.1", 0), Rebuilding) as fake:
        fake.daemon_threads = True
        threading.Thread(target=fake.serve_forever, args=(0.01,), daemon=True).start()
        client = ServerClient(f"http://127.0.0.1:{fake.server_port}", "tiny", {})
        expected = "a rank was lost in the run; rank 1: its process died"
        with pytest.raises(EngineError, match=expected):
            client.run(Job(workload, plan_load(workload, 0, 1), "", 0), 60)
        fake.shutdown()


def test_a_server_that_is_not_there() -> None:
    client = ServerClient("http://127.0.0.1:9", "tiny", {})
    workload = RequestWorkload(requests=1)
    assert not client.is_ready()
    with pytest.raises(EngineError, match="does not answer"):
        client.run(Job(workload, plan_load(workload, 0, 1), "", 0), 1)
