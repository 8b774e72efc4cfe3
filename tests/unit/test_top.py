"""`phalanx top`: its figures from two scrapes, its table, and a server that is not there."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app
from cluster.commands.top_metrics import NotPhalanxError, Scrape, overview, quantile
from cluster.commands.top_table import table
from cluster.metrics.metrics import IngressMetrics
from tests.unit.test_metrics import rebuilding
from workers.stats.histogram import Histogram
from workers.stats.request_times import SECONDS
from workers.stats.stats import EngineStats

REPOSITORY = Path(__file__).parents[2]
INF = float("inf")


def rank_stats(rank: int, factor: int, queue: Histogram) -> dict:
    """Counters of a rank that grow with `factor`."""
    stats = EngineStats().snapshot()
    stats["histograms"]["request_queue_time"] = (queue.bounds, queue.values())
    return {
        **stats,
        "rank": rank,
        "running": 3 + rank,
        "waiting": 1,
        "kv_cache_usage": 0.25,
        "prompt_tokens": 200 * factor,
        "generation_tokens": 1000 * factor,
        "prefix_cache_queries": 10 * factor,
        "prefix_cache_hits": 4 * factor,
        "preemptions": 2 * factor,
        "steps": 500 * factor,
        "step_seconds": {"forward": 1.5 * factor, "vote": 0.5 * factor},
    }


class Server:
    """What /metrics says, one state after another."""

    def __init__(self) -> None:
        self.metrics = IngressMetrics()
        self.metrics.set_model_name("tiny")
        self.queues = [Histogram(SECONDS), Histogram(SECONDS)]
        self.factor = 0

    def work(self) -> None:
        """Two requests end, one of them badly; both ranks step."""
        self.factor += 1
        for _ in range(10):
            self.metrics.observe_first_token(0.03)
            self.metrics.observe_inter_token(0.012)
        self.metrics.observe_end("stop")
        self.metrics.observe_end("error")
        self.queues[0].observe(0.02)

    def text(self) -> str:
        ranks = [rank_stats(i, self.factor, queue) for i, queue in enumerate(self.queues)]
        return self.metrics.render(ranks, groups=[rebuilding().to_json()]).decode()


def test_figures_between_two_scrapes():
    server = Server()
    server.work()
    before = Scrape(server.text(), 100.0)
    server.work()
    seen = overview(before, Scrape(server.text(), 102.0))
    assert (seen.model, seen.seconds, seen.requests_per_s, seen.errors_per_s) == ("tiny", 2, 1, 0.5)
    assert 20 < seen.ttft_p50_ms < 40 and 10 < seen.inter_token_p50_ms < 15
    assert seen.e2e_p50_ms is None
    zero, one = seen.ranks
    assert (zero.rank, zero.running, zero.waiting, zero.kv_cache_usage) == (0, 3, 1, 0.25)
    assert (zero.prompt_tokens_per_s, zero.generation_tokens_per_s) == (100, 500)
    assert (zero.steps_per_s, zero.step_ms, zero.vote_share) == (250, 4.0, 0.25)
    assert (zero.prefix_hit_rate, zero.preemptions) == (0.4, 2)
    assert 10 < zero.queue_p50_ms < 25 and one.queue_p50_ms is None
    assert one.running == 4 and (zero.vote_age_s, one.vote_age_s) == (0.0, 1.5)
    (group,) = seen.groups
    assert (group.state, group.stage, group.epoch, group.rebuilds) == (
        "rebuilding",
        "weights",
        2,
        1,
    )
    assert 3 <= group.seconds < 60


@pytest.mark.parametrize(
    ("caps", "expected"),
    [((None, None), ""), ((512, 512), "512"), ((2048, None), "2,048"), ((900, 512), "512 to 900")],
)
def test_the_limit_of_prompts_beside_decodes(caps, expected):
    """Two ranks of two groups may have two limits."""
    metrics = IngressMetrics()
    metrics.set_model_name("tiny")
    queue = Histogram(SECONDS)
    ranks = [{**rank_stats(i, 1, queue), "prefill_cap": cap} for i, cap in enumerate(caps)]
    scrape = Scrape(metrics.render(ranks).decode(), 0.0)
    seen = overview(scrape, scrape)
    assert tuple(row.prefill_cap for row in seen.ranks) == caps
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table(seen, "http://x"))
    line = f"prompts beside decodes: at most {expected} tokens of a rank in a step"
    assert (line in shown.get()) == bool(expected)
    assert ("beside decodes" in shown.get()) == bool(expected)


def test_an_idle_server_and_one_that_began_anew():
    server = Server()
    server.work()
    scrape = Scrape(server.text(), 1.0)
    still = overview(scrape, scrape)
    assert still.requests_per_s == 0 and still.ttft_p50_ms is None
    assert still.ranks[0].step_ms is None and still.ranks[0].vote_share is None
    assert still.ranks[0].prefix_hit_rate is None
    server.work()
    before = Scrape(server.text(), 1.0)
    again = Server()
    again.work()
    seen = overview(before, Scrape(again.text(), 2.0))
    assert seen.ranks[0].generation_tokens_per_s == 1000 and seen.requests_per_s == 2
    assert 20 < seen.ttft_p50_ms < 40


def test_without_ranks():
    metrics = IngressMetrics()
    metrics.observe_end("error")
    scrape = Scrape(metrics.render([]).decode(), 0.0)
    seen = overview(scrape, scrape)
    assert seen.ranks == []
    console = Console(width=100)
    with console.capture() as shown:
        console.print(table(seen, "http://x"))
    assert "no rank answers" in shown.get()


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ({}, 0.5, None),
        ({1.0: 0, INF: 0}, 0.5, None),
        ({1.0: 4, INF: 4}, 0.5, 0.5),
        ({1.0: 2, 2.0: 4, INF: 4}, 0.75, 1.5),
        ({1.0: 0, 2.0: 10, 4.0: 20, INF: 20}, 0.75, 3.0),
        ({1.0: 1, 2.0: 2, INF: 10}, 0.5, 2.0),
        ({INF: 3}, 0.5, None),
    ],
)
def test_quantiles(buckets, share, expected):
    assert quantile(buckets, share) == expected


@pytest.mark.parametrize("text", ["", "<html>no</html>", "python_info 1.0\n", "a{ b"])
def test_other_peoples_text_is_refused(text):
    with pytest.raises(NotPhalanxError):
        Scrape(text, 0.0)


@pytest.fixture
def url():
    """A server that works between any two scrapes; /metrics only below the root."""
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/metrics"
            state.work()
            self.send_response(200 if found else 404)
            self.end_headers()
            if found:
                self.wfile.write(state.text().encode())

        def log_message(self, *_args) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(*arguments: str):
    return CliRunner(env={"COLUMNS": "80", "no_proxy": "*"}).invoke(app, ["top", *arguments])


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/v1/models?x=1"])
def test_one_table(url, form):
    result = run(form.format(url), "--once", "--interval", "0.1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("tiny  http://127.0.0.1:")
    assert lines[1].startswith("rebuilding for 3") and lines[1].endswith(
        "s, stage weights, epoch 2, 1 rebuild"
    )
    (header,) = (line for line in lines if line.startswith("rank"))
    assert "vote" in header and "KV cache" in header
    assert [line.split()[0] for line in lines[-3:]] == ["0", "1", "all"]
    assert "##....  25%" in lines[-1] and max(map(len, lines)) <= 80


def test_one_json_object(url):
    result = run(url.removeprefix("http://"), "--once", "--json", "--interval", "0.1")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    seen = json.loads(line)
    assert seen["ranks"][1]["rank"] == 1 and seen["ranks"][0]["step_ms"] == 4.0


def test_nobody_there():
    result = run("127.0.0.1:1", "--once")
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "no answer from http://127.0.0.1:1/metrics" in result.stderr
    assert "is the server running?" in result.stderr


def test_no_url():
    result = run("ftp://host")
    assert result.exit_code == 2 and "'ftp://host' is not a URL" in result.stderr


def test_live_view_ends_with_ctrl_c(url):
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "cluster.cli", "top", url, "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "30", "no_proxy": "*"}
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=secondary, stderr=subprocess.PIPE, env=environment
    )
    os.close(secondary)
    shown = b""
    deadline = time.monotonic() + 60
    while b"250" not in shown and b"all" not in shown and time.monotonic() < deadline:
        shown += os.read(primary, 65536)
    process.send_signal(signal.SIGINT)
    drain = threading.Thread(target=_read_all, args=(primary,), daemon=True)
    drain.start()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and errors == b""
    assert b"out tok/s" in shown and b"tiny" in shown


def _read_all(descriptor: int) -> None:
    try:
        while os.read(descriptor, 65536):
            pass
    except OSError:  # the other end is closed
        pass
