"""`phalanx experts` and the route that it reads."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from kernels.routing.expert_map import ContiguousMap
from tests.unit.api_fakes import Api
from workers.specs.expert_layout import ExpertLayout

LOADS = {0: [900, 800, 700, 100, 100, 100, 100, 100], 2: [100] * 8}


def layout(loads: dict[int, list[int]] = LOADS) -> ExpertLayout:
    return ExpertLayout.of(ContiguousMap(8, 2, 1), loads).with_loads(loads)


@pytest.fixture
def served():
    """A server whose /experts is that of the application."""
    api = Api()
    api.backend.layouts = [layout()]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = api.get(self.path)
            self.send_response(answer.status_code)
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield api, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def run(*args: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["experts", *args])
    return found.exit_code, found.output


def test_the_route_has_maps_that_a_start_takes():
    api = Api()
    api.backend.layouts = [layout()]
    (group,) = api.get("/experts").json()["groups"]
    assert ExpertLayout.of_json(group, "the route") == layout()


def test_gain_picture_and_files(served, tmp_path: Path):
    pytest.importorskip("matplotlib")
    _, url = served
    png, saved, balanced = tmp_path / "load.png", tmp_path / "map.json", tmp_path / "balanced.json"
    code, text = run(url, "--png", str(png), "--save-map", str(saved))
    assert code == 0, text
    assert "8 experts in 10 slots of 2 rank(s)" in text and "fewer rows" in text
    assert png.read_bytes().startswith(b"\x89PNG") and ExpertLayout.read(saved) == layout()
    code, text = run(url, "--save-map", str(balanced), "--balanced")
    assert code == 0 and ExpertLayout.read(balanced) == layout().planned() != layout()
    before, even = layout().busiest()
    after, _ = layout().planned().busiest()
    assert f"{before / even:.3f}" in text and f"{after / even:.3f}" in text


def test_servers_without_load_without_groups_and_without_an_answer(served):
    api, url = served
    api.backend.layouts = [layout({0: [0] * 8})]
    assert run(url) == (0, "no tokens have reached experts yet\n")
    api.backend.layouts = []
    assert run(url)[0] == 1
    code, text = run("http://127.0.0.1:9")
    assert code == 1 and "no answer from" in text
    assert run("ftp://x")[0] == 2
    data = json.loads(Api().get("/experts").content)
    assert data == {"groups": []}


def test_files_that_cannot_be_written_are_refused_before_the_report(served, tmp_path: Path):
    _, url = served
    for option in ("--png", "--save-map"):
        found = run(url, option, str(tmp_path / "absent" / "file"))
        assert found == (2, f"error: {option}: folder {tmp_path / 'absent'} does not exist\n")
    code, text = run(url, "--balanced")
    assert code == 2 and "--save-map FILE" in text


def test_a_picture_without_matplotlib_is_refused_before_the_report(
    served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _, url = served
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, text = run(url, "--png", str(tmp_path / "x.png"), "--save-map", str(tmp_path / "map"))
    assert code == 2 and text.startswith("error: --png needs matplotlib") and "pip install" in text
    assert not list(tmp_path.iterdir())
