"""`phalanx batch`: the file format, errors by line, and resuming at any point without loss or repetition."""

import asyncio
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.api.settings import ApiSettings
from cluster.bench.progress import Progress
from cluster.errors import EngineDeadError
from cluster.offline import batch as batch_module
from cluster.offline import batch_output
from cluster.offline.batch import BatchRun, LocalServer, Response
from cluster.offline.batch_input import BatchError, BatchInput, Line
from cluster.offline.batch_output import BatchOutput
from cluster.offline.dispatcher import Dispatcher
from tests.unit.api_fakes import Api, FakeBackend, tiny_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def request(custom_id: Any, url: Any = COMPLETIONS, **body: Any) -> str:
    body = body or {"prompt": f"prompt {custom_id}", "max_tokens": 3, "temperature": 0}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def local(backend: FakeBackend) -> LocalServer:
    return LocalServer(Dispatcher(backend, tiny_tokenizer(), ApiSettings()), backend)


def never() -> bool:
    return False


def run(
    source: Path,
    out: Path,
    server: Any = None,
    concurrency: int = 4,
    stopped: Callable[[], bool] = never,
) -> BatchRun:
    """One run over the files, as the command makes it."""
    server = server or local(FakeBackend("hello"))
    output = BatchOutput(out)
    try:
        batch = BatchRun(BatchInput(source), output, Progress())
        asyncio.run(batch.run(server, concurrency, stopped))
    finally:
        output.close()
    return batch


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "requests.jsonl", tmp_path / "results.jsonl"


def test_results_have_the_answers_of_http(paths) -> None:
    source, out = paths
    chat = {"messages": USER, "max_tokens": 5, "logprobs": True, "seed": 1}
    write(source, request("a"), request("b", CHAT, **chat))
    batch = run(source, out)
    assert batch.complete and batch.num_errors == 0
    found = {item["custom_id"]: item for item in results(out)}
    assert set(found) == {"a", "b"}
    for item in found.values():
        assert set(item) == {"id", "custom_id", "response", "error"} and item["error"] is None
        assert set(item["response"]) == {"status_code", "request_id", "body"}
        assert item["response"]["status_code"] == 200 and len(item["response"]["request_id"]) == 32
    expected = Api(FakeBackend("hello")).post(CHAT, chat).json()
    differing = {"id": None, "created": None}
    assert found["b"]["response"]["body"] | differing == expected | differing


BAD_LINES = [
    ("{", "invalid_json_line", None),
    ("[1]", "invalid_json_line", None),
    ('{"custom_id": "n", "body": NaN}', "invalid_json_line", None),
    ("[" * 3000, "invalid_json_line", None),
    (json.dumps({"url": COMPLETIONS, "body": {}}), "invalid_custom_id", None),
    (request(3), "invalid_custom_id", None),
    (request(""), "invalid_custom_id", None),
    (json.dumps({"custom_id": "g", "method": "GET"}), "invalid_method", "g"),
    (json.dumps({"custom_id": "u", "body": {}}), "invalid_url", "u"),
    (request("v", "http://elsewhere/v1/completions"), "invalid_url", "v"),
    (json.dumps({"custom_id": "w", "url": COMPLETIONS, "body": []}), "invalid_body", "w"),
    (request("good"), "duplicate_custom_id", "good"),
]


def test_all_routes_of_generations(paths) -> None:
    source, out = paths
    message = {"messages": USER, "max_tokens": 5, "model": "tiny/model"}
    write(
        source,
        request("responses", "/v1/responses", input="hi", max_output_tokens=16),
        request("messages", "/v1/messages", **message),
        request("wrong", "/v1/messages", **message | {"max_tokens": "5"}),
    )
    assert run(source, out).num_errors == 1
    found = {item["custom_id"]: item["response"]["body"] for item in results(out)}
    assert found["responses"]["object"] == "response"
    assert found["responses"]["output"][0]["content"][0]["text"] == ("hello" * 4)[:16]
    assert found["messages"]["content"] == [{"type": "text", "text": "hello"}]
    assert found["wrong"]["type"] == "error"


def test_a_wrong_value_of_a_line_is_shown(paths) -> None:
    source, out = paths
    text = json.dumps({"custom_id": "b", "url": COMPLETIONS, "body": "x"})
    absent = json.dumps({"custom_id": "c", "url": COMPLETIONS})
    write(source, request(3), text, absent)
    run(source, out)
    assert [item["error"]["message"] for item in results(out)] == [
        "line 1: custom_id is 3; expected a text",
        'line 2: body is "x"; expected an object',
        "line 3: body is missing; expected an object",
    ]


def test_a_wrong_line_is_a_result_and_the_others_run(paths) -> None:
    source, out = paths
    write(source, request("good"), *(line for line, _, _ in BAD_LINES), "", request("last"))
    batch = run(source, out)
    found = results(out)
    errors = {item["id"].split("_")[2]: item for item in found if item["error"]}
    for number, (_, code, custom_id) in enumerate(BAD_LINES, 2):
        item = errors.pop(str(number))
        assert item["error"]["code"] == code and item["custom_id"] == custom_id, item
        assert item["error"]["message"].startswith(f"line {number}: ") and item["response"] is None
    assert not errors and batch.complete and batch.num_errors == len(BAD_LINES)
    assert {i["custom_id"] for i in found if i["response"]} == {"good", "last"}


def test_a_refused_body_has_the_response_of_http(paths) -> None:
    source, out = paths
    write(
        source,
        request("temperature", prompt="a", temperature=9),
        request("stream", prompt="a", stream=True),
        request("route", "/v1/nothing", prompt="a"),
        request("good"),
    )
    batch = run(source, out)
    found = {item["custom_id"]: item["response"] for item in results(out)}
    status = {name: response["status_code"] for name, response in found.items()}
    assert status == {"temperature": 400, "stream": 400, "route": 404, "good": 200}
    assert found["temperature"]["body"]["error"]["param"] == "temperature"
    assert found["stream"]["body"]["error"]["param"] == "stream"
    assert CHAT in found["route"]["body"]["error"]["message"]
    assert batch.num_errors == 3
    again = run(source, out)
    assert again.num_errors == 3 and again.complete and len(results(out)) == 4


def test_the_end_of_the_ranks_is_no_result(paths) -> None:
    source, out = paths
    write(source, *(request(str(i)) for i in range(9)))
    backend = FakeBackend("hello")
    backend.fail_before = EngineDeadError("rank 1: its process died")
    backend.ready = (False, "rank 1: its process died")
    with pytest.raises(BatchError, match="rank 1: its process died"):
        run(source, out, local(backend))
    assert results(out) == []
    begun = len(backend.requests)
    assert 1 <= begun <= 4
    backend.ready = (True, "")  # the ranks live: each request was ended three times
    batch = run(source, out, local(backend))
    assert batch.num_errors == 9 and len(backend.requests) == begun + 3 * 9
    assert {item["response"]["status_code"] for item in results(out)} == {503}


def test_a_request_goes_on_after_its_rank_is_rebuilt(paths) -> None:
    source, out = paths
    write(source, request("a"))
    backend = FakeBackend("hello")
    backend.fail_after = (2, EngineDeadError("the ranks are rebuilding"))

    def script(_prompt: list[int], _params: Any) -> list[list[int]]:
        if len(backend.requests) == 2:
            backend.fail_after = None
        return [[104], [105], [106]]

    backend.script = script
    assert run(source, out, local(backend)).num_errors == 0
    assert results(out)[0]["response"]["body"]["choices"][0]["text"] == "hij"


class Recording:
    """A server that answers at once, keeps what it has answered, and may stop after some requests."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.custom_ids: list[str | None] = []
        self.stop_after = stop_after

    async def answer(self, line: Line) -> Response:
        if self.stopped():
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        self.custom_ids.append(line.custom_id)
        return Response(200, "r", json.dumps({"of": line.custom_id}).encode(), 1)

    def stopped(self) -> bool:
        return len(self.custom_ids) >= self.stop_after


def test_a_stopped_batch_resumes_with_the_rest(paths) -> None:
    source, out = paths
    names = [str(i) for i in range(20)]
    write(source, *map(request, names))
    first = Recording(stop_after=7)
    batch = run(source, out, first, stopped=first.stopped)
    assert not batch.complete and f"{len(results(out))} of 20 lines" in batch.summary
    assert sorted(item["custom_id"] for item in results(out)) == sorted(first.custom_ids)
    second = Recording()
    assert run(source, out, second).complete
    assert sorted(first.custom_ids + second.custom_ids, key=int) == names
    third = Recording()
    assert run(source, out, third).complete and third.custom_ids == []


def test_a_batch_resumes_from_every_byte_of_its_output(paths) -> None:
    """A crash may leave any prefix of the output."""
    source, out = paths
    lines = [
        request("a"),
        "{",
        request("a"),
        request('quote " and \u2028 \U0001f600'),
        "",
        request("b"),
    ]
    write(source, *lines)
    run(source, out, Recording(), concurrency=1)
    whole = out.read_bytes()
    assert len(results(out)) == 5
    for cut in range(len(whole) + 1):
        out.write_bytes(whole[:cut])
        kept = whole[:cut].count(b"\n")
        server = Recording()
        batch = run(source, out, server, concurrency=1)
        assert out.read_bytes() == whole, cut
        assert batch.complete and batch.num_errors == 2
        done = [item["custom_id"] for item in results(out)[:kept] if item["error"] is None]
        assert sorted(done + server.custom_ids) == ["a", "b", 'quote " and \u2028 \U0001f600']


def test_crashes_at_random_lose_and_repeat_nothing(paths, monkeypatch) -> None:
    source, out = paths
    monkeypatch.setattr(batch_module, "POLL_S", 0.001)  # after which a run sees that it is to stop
    draw = random.Random(3)
    for _ in range(30):
        names = [str(i) for i in range(draw.randrange(1, 40))]
        write(source, *map(request, names))
        out.unlink(missing_ok=True)
        answered: list[str | None] = []
        complete = False
        while not complete:
            server = Recording(stop_after=draw.randrange(1, 15))
            batch = run(source, out, server, draw.randrange(1, 6), server.stopped)
            complete = batch.complete
            kept = out.read_bytes()
            cut = draw.randrange(30) if draw.random() < 0.5 and not complete else 0
            out.write_bytes(kept[: len(kept) - cut])
            lost = kept.count(b"\n") - kept[: len(kept) - cut].count(b"\n")
            answered += server.custom_ids[: len(server.custom_ids) - lost]
            complete = complete and not cut
        assert sorted(item["custom_id"] for item in results(out)) == sorted(names)
        assert sorted(filter(None, answered)) == sorted(names)


def test_lines_may_be_added_to_the_input(paths) -> None:
    source, out = paths
    write(source, request("a"))
    run(source, out)
    write(source, request("a"), request("b"))
    server = Recording()
    assert run(source, out, server).complete and server.custom_ids == ["b"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([request("x"), request("b")], "line 1 of .*requests.jsonl is not the line"),
        ([request("a")], "result for line 2, which .*requests.jsonl does not have"),
        ([request("b"), request("a")], "choose another --output"),
    ],
)
def test_the_output_of_another_input_is_refused(paths, lines: list[str], message: str) -> None:
    source, out = paths
    write(source, request("a"), request("b"))
    run(source, out)
    before = out.read_bytes()
    write(source, *lines)
    with pytest.raises(BatchError, match=message):
        run(source, out)
    assert out.read_bytes() == before


@pytest.mark.parametrize("text", ["notes", "notes\n", '{"a": 1}\n', '{"id":"x"}', "\n\nhello\n"])
def test_a_foreign_file_is_not_overwritten(paths, text: str) -> None:
    source, out = paths
    write(source, request("a"))
    out.write_text(text)
    with pytest.raises(BatchError, match="is not a result of phalanx batch; choose another"):
        run(source, out)
    assert out.read_text() == text


def test_zeros_of_a_crashed_file_system_are_cut_off(paths) -> None:
    source, out = paths
    write(source, request("a"), request("b"))
    run(source, out, Recording(), concurrency=1)
    whole = out.read_bytes()
    out.write_bytes(whole[: whole.index(b"\n") + 1] + bytes(100))
    run(source, out, Recording())
    assert out.read_bytes() == whole


def test_files_that_cannot_be_used(paths, tmp_path) -> None:
    source, out = paths
    with pytest.raises(BatchError, match=r"cannot read .*requests.jsonl: no such file"):
        BatchInput(source)
    with pytest.raises(BatchError, match="it is not a file"):
        BatchInput(tmp_path)
    with pytest.raises(BatchError, match=r"cannot write .*: No such file or directory"):
        BatchOutput(tmp_path / "nowhere" / "results.jsonl")
    with pytest.raises(BatchError, match=r"cannot write .*: Is a directory"):
        BatchOutput(tmp_path)
    first = BatchOutput(out)
    with pytest.raises(BatchError, match="another phalanx batch writes"):
        BatchOutput(out)
    first.close()
    BatchOutput(out).close()


def test_a_full_disk_ends_the_batch_after_a_whole_line(paths, monkeypatch) -> None:
    source, out = paths
    write(source, *(request(str(i)) for i in range(5)))
    room = 400
    real_write = os.write

    def write_some(fd: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        written = real_write(fd, data[:room])
        room -= written
        return written

    monkeypatch.setattr(batch_output.os, "write", write_some)
    with pytest.raises(BatchError, match=r"cannot write .*: No space left on device"):
        run(source, out, Recording(), concurrency=1)
    assert 0 < len(results(out)) < 5 and out.read_bytes().endswith(b"\n")
    monkeypatch.undo()
    assert run(source, out, Recording()).complete and len(results(out)) == 5


def test_an_empty_input_is_complete(paths) -> None:
    source, out = paths
    write(source, "", "  ")
    assert run(source, out).complete and out.read_bytes() == b""
