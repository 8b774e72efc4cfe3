"""The command `phalanx bench`: options, messages, table, JSON, picture, exit codes, Ctrl-C."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from cluster.bench import progress
from cluster.bench.command import make_load
from cluster.bench.ratios import compare
from cluster.cli import app
from tests.unit.bench_case import load
from tests.unit.bench_server import FakeServer, serving

REPOSITORY = Path(__file__).parents[2]
SHORT = "--requests 4 --concurrency 2 --output-len 4 --warmup 0"


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


def test_table_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret-key")
    json_path = tmp_path / "figures.json"
    fake, other = FakeServer(cached_tokens=3, drafts=(3, 1)), FakeServer()
    with serving(fake, other) as (url, other_url):
        options = [*SHORT.split(), "--goodput", "ttft:60000", "--goodput", "e2e:1"]
        options += ["--api-key-env", "MY_KEY", "--save-requests", "--rounds", "2"]
        result = bench(
            *options,
            f"--url=x={url}",
            f"--url=y={other_url}",
            "--output",
            json_path,
        )
    assert result.exit_code == 0, result.output
    assert "authorization: bearer secret-key" in fake.headers
    report = json.loads(json_path.read_text())
    assert "secret-key" not in json_path.read_text()
    assert report["load"]["requests"] == 4
    assert not report["interrupted"]
    assert report["hardware"]["cores"] >= 1
    assert report["versions"].keys() >= {"python", "torch", "ray"}
    first, second = report["servers"]
    assert (first["name"], second["name"]) == ("x", "y")
    median = first["median"]
    assert f"{median['output_tokens_per_s']:,.1f}" in result.stdout
    assert (median["cached_tokens"], second["median"]["cached_tokens"]) == (12, None)
    assert (median["draft_tokens"], median["accepted_draft_share"]) == (4 * 4, 0.75)
    assert second["median"]["accepted_draft_share"] is None
    (line,) = (line for line in result.stdout.splitlines() if "accepted drafts" in line)
    assert line.split()[2:] == ["75.0", "%", "-"]
    assert median["goodput"]["share"] == 0.0
    assert median["goodput"]["met"] == {"ttft": 1.0, "e2e": 0.0}
    assert [row["round"] for row in first["requests"]] == [0] * 4 + [1] * 4
    row = first["requests"][0]
    assert row["output_tokens"] == 4
    assert (row["accepted_drafts"], row["rejected_drafts"]) == (3, 1)
    assert len(row["chunks_s"]) == 2
    for words in (
        "time to first token, p99",
        "time per output token, p90",
        "errors",
        "ttft within 60000 ms",
        "100.0 %",
        "ratio to x",
    ):
        assert words in result.stdout


def test_every_option_arrives(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 3)
    given: dict[str, Any] = {
        "prompts": None, "endpoint": None, "concurrency": None, "request_rate": None,
        "requests": None, "repeats": 2, "timeout": 5.0, "prompt_form": "text", "ignore_eos": None,
        "extra_body": '{"top_k": 5}', "goodput": ["ttft:100"], "burstiness": 1.0, "input_len": "8-9",
        "output_len": "4", "prefix_groups": 2, "prefix_tokens": 16, "vocab_size": 99, "seed": 4,
        "temperature": 0.5, "sampling_seed": 1, "warmup": 3,
    }  # fmt: skip
    closed = make_load(given)
    assert closed == load(
        requests=64, concurrency=8, rounds=2, timeout_s=5.0, prompts="text", warmup=3, seed=4,
        extra_body={"top_k": 5}, goodput={"ttft": 100.0}, input_len="8-9", output_len="4",
        prefix_groups=2, prefix_tokens=16, vocab_size=99, temperature=0.5, sampling_seed=1,
    )  # fmt: skip
    opened = make_load(given | {"request_rate": 4.0, "burstiness": 0.5})
    assert (opened.concurrency, opened.request_rate, opened.burstiness) == (None, 4.0, 0.5)
    of_file = make_load(given | {"prompts": path, "prefix_groups": 0, "prefix_tokens": 0})
    assert (of_file.requests, of_file.endpoint, of_file.ignore_eos) == (3, "chat", False)
    assert of_file.prompts_file == str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "ftp://host"], "not of the form http://host:port"),
        (["--url", "a=http://h:1", "--url", "a=http://h:2"], "two servers are called 'a'"),
        (["--output", "/nowhere/file.json"], "folder /nowhere does not exist"),
        (["--save-requests"], "give --output"),
        (["--url", "http://127.0.0.1:9"], "cannot connect"),
        (["--input-len", "many"], "'many' is not a length"),
        (["--goodput", "ttft"], "write ttft:MS"),
        (["--extra-body", "{"], "not JSON"),
        (["--extra-body", "[]"], "must be a JSON object"),
        (["--prompts", "/nowhere/file.jsonl"], "No such file"),
        (["--request-rate", "-1"], "is not above 0"),
    ],
)
def test_mistakes_are_one_message(options: list[str], message: str) -> None:
    result = bench(*options)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_server_that_answers_nothing() -> None:
    refusing = FakeServer(status=lambda index: 500 if index else 200)
    with serving(refusing) as (url,):
        result = bench("--url", url, *SHORT.split())
    assert result.exit_code == 1
    assert "4 x HTTP 500" in result.stdout
    assert (
        f'error: {url} completed no request: HTTP 500: {{"detail": "this server says no"}}'
        in result.stderr
    )


def test_remarks_on_figures_not_to_trust() -> None:
    """A cache that knew the prompts, a client that was late, a server without usage."""
    with serving(FakeServer(cached_tokens=40), FakeServer(sends_usage=False)) as (known, silent):
        options = [
            "--input-len",
            "64",
            "--request-rate",
            "inf",
            "--concurrency",
            "1",
            "--prompt-form",
            "ids",
        ]
        result = bench(*SHORT.split(), *options, f"--url=a={known}", f"--url=b={silent}")
    assert result.exit_code == 0, result.output
    assert "accepted drafts" not in result.stdout
    remarks = result.stdout.splitlines()[-4:]
    assert [remark[:14] for remark in remarks] == [
        "a: has these p",
        "a: requests we",
        "b: sends no us",
        "b: requests we",
    ]


def test_ctrl_c_gives_the_partial_result(tmp_path: Path) -> None:
    output = tmp_path / "partial.json"
    fake = FakeServer()
    with serving(fake) as (url,):
        command = [sys.executable, "-m", "cluster.cli", "bench", "--url", url, "--output", output]
        command += [
            "--requests",
            "100000",
            "--concurrency",
            "2",
            "--output-len",
            "4",
            "--input-len",
            "4",
        ]
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            deadline = time.monotonic() + 60
            while len(fake.bodies) < 30 and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, stderr
    assert "interrupted: only the requests that ended are counted" in stdout
    assert "Traceback" not in stderr
    report = json.loads(output.read_text())
    assert report["interrupted"]
    (server,) = report["servers"]
    assert 10 <= server["median"]["completed"] < 100_000
    assert server["median"]["errors"] == {}
    assert server["median"]["unfinished"] <= 2


def test_progress() -> None:
    text = io.StringIO()
    shown = progress.Progress(Console(file=text, force_terminal=True, width=100))
    with shown.stage("a: round 1 of 2", 3):
        shown.advance()
        shown.advance()
    drawn = text.getvalue()
    assert "a: round 1 of 2" in drawn and "2/3" in drawn
    shown.advance()
    assert text.getvalue() == drawn, "no bar stands after its stage"
    silent = progress.Progress.for_terminal(False)
    with silent.stage("b", 1):
        silent.advance()


def test_ratios_are_taken_round_by_round() -> None:
    def figures(rate: float | None, ttft: float) -> dict[str, Any]:
        latency = {"p50": ttft, "p99": None}
        empty = {
            key: {"p50": None, "p99": None}
            for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "worst_gap_ms")
        }
        rates = {"requests_per_s": rate, "output_tokens_per_s": None, "total_tokens_per_s": 0.0}
        return empty | rates | {"ttft_ms": latency, "goodput": None}

    base = [figures(100.0, 10.0), figures(50.0, 20.0), figures(80.0, 10.0)]
    other = [figures(200.0, 5.0), figures(110.0, 10.0), figures(None, 10.0)]
    assert compare(other, base) == {
        "requests_per_s": {"median": 2.1, "low": 2.0, "high": 2.2},
        "ttft_ms.p50": {"median": 0.5, "low": 0.5, "high": 1.0},
    }
    assert compare([], base) == {}
