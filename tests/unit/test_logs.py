"""Log lines: their form, which ones are written, and what of other processes reaches the console."""

import json
import logging
import re
import subprocess
import sys

import pytest

from cluster.api.app import create_app
from cluster.api.record import Recorder
from cluster.commands import console_logs
from cluster.errors import EngineDeadError
from cluster.metrics.metrics import IngressMetrics
from tests.unit.api_fakes import Api, FakeBackend, tiny_tokenizer
from workers.log import JsonFormatter, TextFormatter
from workers.stats.stats import EngineStats
from workers.stats.stats_line import stats_fields, stats_line


def record(message: str = "hello %d", *args: object, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("workers.engine.engine").makeRecord(
        "workers.engine.engine",
        logging.WARNING,
        "file.py",
        1,
        message,
        args or (7,),
        None,
        extra=extra,
    )
    made.created, made.msecs = 1_700_000_000.25, 250
    return made


def test_text_line():
    line = TextFormatter("rank 1", 1).format(record(request_id="abc", steps=3))
    day, time_, level, rest = line.split(" ", 3)
    assert len(day) == 10 and time_.endswith(".250") and level == "WARNING"
    assert rest == "rank 1: hello 7 [abc]"
    assert TextFormatter("server").format(record()).endswith("server: hello 7")


def test_json_line():
    made = record(request_id="abc", step_ms={"forward": 1.5}, odd=object)
    fields = json.loads(JsonFormatter("rank 1", 1).format(made))
    assert fields.pop("odd").startswith("<class")
    assert fields == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "warning",
        "process": "rank 1",
        "rank": 1,
        "logger": "workers.engine.engine",
        "message": "hello 7",
        "request_id": "abc",
        "step_ms": {"forward": 1.5},
    }
    assert "rank" not in json.loads(JsonFormatter("supervisor").format(record()))


@pytest.mark.parametrize("formatter", [TextFormatter("p"), JsonFormatter("p")])
def test_exceptions_are_told(formatter):
    made = record()
    try:
        raise ZeroDivisionError("what")
    except ZeroDivisionError:
        made.exc_info = sys.exc_info()
    text = formatter.format(made)
    assert "ZeroDivisionError: what" in text and "Traceback" in text
    assert ("\n" in text) == isinstance(formatter, TextFormatter)


@pytest.mark.parametrize(
    ("level", "expected"),
    [("debug", "debug info warning other"), ("info", "info warning other"), ("error", "other")],
)
def test_levels_are_ours_and_libraries_only_warn(level, expected):
    script = f"""
import logging, sys
from workers.log import set_up_logging
set_up_logging("early", "debug", "text")
set_up_logging("p", {level!r}, "json")
log = logging.getLogger("workers.x")
log.debug("debug"); log.info("info"); log.warning("warning")
logging.getLogger("torch").info("chatter")
logging.getLogger("torch").warning("other")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == ""
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert " ".join(line["message"] for line in lines) == expected
    assert {line["process"] for line in lines} == {"p"}


def snapshots() -> tuple[dict, dict]:
    before = EngineStats().snapshot()
    after = {
        **before,
        "time": before["time"] + 10,
        "running": 5,
        "waiting": 1,
        "kv_cache_usage": 0.123456,
        "prompt_tokens": 2000,
        "generation_tokens": 15000,
        "steps": 1000,
        "prefix_cache_queries": 200,
        "prefix_cache_hits": 50,
        "step_seconds": {**before["step_seconds"], "forward": 3.0, "vote": 1.0},
    }
    return before, after


def test_the_line_of_a_busy_rank():
    before, after = snapshots()
    fields = stats_fields(before, after)
    assert fields["prompt_tokens_per_s"] == 200 and fields["generation_tokens_per_s"] == 1500
    assert fields["step_ms"]["forward"] == 3.0 and fields["vote_share"] == 0.25
    assert fields["prefix_hit_rate"] == 0.25
    logging.getLogger("x").makeRecord("x", 20, "f", 1, "m", (), None, extra=fields)  # no clash
    line = stats_line(fields)
    for part in (
        "200 prompt + 1,500 output tok/s, 5 running, 1 waiting, KV 12.3%",
        "1000 steps of 4.00 ms (",
        "vote 1.00, ",
        "forward 3.00, ",
        "waited for others 25%, prefix hits 25%",
    ):
        assert part in line
    assert "preemptions" not in line and "beside decodes" not in line
    assert line.endswith("25%")


def test_an_idle_rank_has_no_line():
    before, after = snapshots()
    assert stats_fields(before, {**before, "time": before["time"] + 10}) is None
    assert stats_fields(after, before) is None
    probed = {**before, "time": before["time"] + 10, "steps": before["steps"] + 1, "running": 0}
    assert stats_fields(before, probed) is None, "a step of a readiness probe"
    without = stats_fields(before, {**after, "prefix_cache_queries": 0, "preemptions": 3})
    assert without["prefix_hit_rate"] is None
    assert stats_line(without).endswith(", 3 preemptions")
    limited = stats_fields(before, {**after, "prefill_cap": 1040})
    assert stats_line(limited).endswith(", at most 1,040 prompt tokens beside decodes")


def batch(actor: str, *lines: str, is_err: bool = True) -> dict:
    return {"actor_name": actor, "is_err": is_err, "lines": list(lines), "pid": 1, "ip": "x"}


def test_only_our_processes_reach_the_console(capsys):
    for actor in ("RankActor", "Supervisor", "ServeReplica:phalanx:Ingress"):
        console_logs.print_batch(batch(actor, f"from {actor}", "more"), "text")
    console_logs.print_batch(batch("RankActor", "chatter", is_err=False), "text")
    console_logs.print_batch(batch("ServeController", "deploying"), "text")
    console_logs.print_batch({"is_err": True, "lines": ["raylet"], "pid": "raylet"}, "text")
    assert capsys.readouterr().err.splitlines() == [
        *("from RankActor", "more", "from Supervisor", "more"),
        *("from ServeReplica:phalanx:Ingress", "more"),
    ]


def test_harmless_warnings_of_libraries_are_left_out(capsys):
    harmless = (
        "[W1122 16:03:17.123456789 socket.cpp:767] [c10d] The client socket cannot be initialized to connect to "
        "[host]:4711 (errno: 97 - Address family not supported by protocol).",
        "[W socket.cpp:464] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97).",
        "The tokenizer you are loading from '/model' with an incorrect regex pattern: https://huggingface.co/x",
    )
    real = (
        "[E1122 16:03:17.123456789 socket.cpp:1027] [c10d] The client socket has timed out after 300s",
        "[W1122 16:03:17.123456789 ProcessGroupNCCL.cpp:1250] Warning: something else",
        "RuntimeError: The client socket cannot be initialized",
    )
    console_logs.print_batch(
        batch("RankActor", harmless[0], real[0], *harmless[1:], *real[1:]), "text"
    )
    assert capsys.readouterr().err.splitlines() == list(real)


def test_json_stays_json(capsys):
    console_logs.print_batch(batch("RankActor", '{"level": "info"}', "Fatal: segfault"), "json")
    ours, wrapped = map(json.loads, capsys.readouterr().err.splitlines())
    assert ours == {"level": "info"}
    assert (wrapped["message"], wrapped["process"]) == ("Fatal: segfault", "RankActor")


def test_rays_dispatcher_is_as_we_know_it(capsys):
    """A private part of Ray: this fails when a new version changes it."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    console_logs.show_logs("text")
    console_logs.show_logs("text")
    try:
        dispatcher.emit(batch("RankActor", "once"))
        assert capsys.readouterr().err == "once\n"
    finally:
        dispatcher.remove_handler("phalanx")


def served(backend: FakeBackend | None = None, *, access_log: bool = False) -> Api:
    api = Api(backend)
    recorder = Recorder(IngressMetrics(), access_log=access_log)
    api.app = create_app(lambda: api.backend, tiny_tokenizer(), recorder=recorder)
    return api


def lines_of(caplog) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "cluster.api.record"]


@pytest.mark.parametrize(("access_log", "level"), [(False, logging.DEBUG), (True, logging.INFO)])
def test_a_finished_request_is_one_line(caplog, access_log, level):
    caplog.set_level(logging.DEBUG, logger="cluster")
    api = served(access_log=access_log)
    body = {"prompt": "abc", "max_tokens": 4, "n": 2}
    api.request("POST", "/v1/completions", json=body, headers={"x-request-id": "mine"})
    (line,) = lines_of(caplog)
    assert line.levelno == level and line.request_id == "mine"
    assert line.getMessage().startswith("cmpl-")
    seconds = r"[0-9]+\.[0-9]{3} s"
    assert re.search(
        rf" length: 3 \+ 8 tokens, first after {seconds}, {seconds}$", line.getMessage()
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_request_is_a_warning_with_its_reason(caplog, stream):
    backend = FakeBackend()
    backend.fail_after = (2, EngineDeadError("cable pulled"))
    served(backend).complete("abc", stream=stream)
    (line,) = lines_of(caplog)
    assert line.levelno == logging.WARNING
    assert " error: 3 + 2 tokens" in line.getMessage()
    assert line.getMessage().endswith("EngineDeadError: cable pulled")


def test_finished_requests_are_silent_by_default(caplog):
    caplog.set_level(logging.INFO, logger="cluster")
    served().complete("abc")
    assert not lines_of(caplog)
