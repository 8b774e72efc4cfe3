"""`LLM` over a scripted engine: the answers of HTTP, in the order of the prompts, errors apart."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.api.settings import ApiSettings
from cluster.commands import start
from cluster.config.errors import ConfigError
from cluster.config.phalanx_config import PhalanxConfig
from cluster.errors import BadRequestError, EngineDeadError, ServingError
from cluster.offline import LLM, engine
from cluster.offline.dispatcher import Dispatcher
from cluster.offline.pool import run_pool
from tests.unit.api_fakes import Api, FakeBackend, says, tiny_checkpoint, tiny_tokenizer
from tests.unit.pooling_case import PoolingBackend
from workers.specs.pooling import PoolingSpec


class FakeEngine:
    """`OfflineEngine` over a scripted backend."""

    backend = FakeBackend()
    pooling: PoolingSpec | None = None
    started: list[PhalanxConfig]

    def __init__(self, config: PhalanxConfig, console: Any) -> None:
        FakeEngine.started.append(config)
        self.console = console
        settings = ApiSettings(pooling=FakeEngine.pooling)
        self.client = FakeEngine.backend
        self.dispatcher = Dispatcher(FakeEngine.backend, tiny_tokenizer(), settings)
        self.concurrency = 3
        self.closed = 0

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    monkeypatch.setattr(engine, "OfflineEngine", FakeEngine)
    FakeEngine.started = []
    folder = tiny_checkpoint(tmp_path / "tiny")

    def make(
        backend: FakeBackend | None = None, pooling: PoolingSpec | None = None, **settings: Any
    ) -> LLM:
        FakeEngine.backend, FakeEngine.pooling = backend or FakeBackend(), pooling
        return LLM(folder, **settings)

    yield make


def _echo(prompt: list[int], _params: Any) -> list[list[int]]:
    """A script that generates the prompt; a long prompt takes more steps."""
    return [[token] for token in prompt]


def test_answers_keep_the_order_of_prompts(make_llm) -> None:
    backend = FakeBackend(_echo)
    prompts = ["a much longer prompt", "b", "cc", [100, 101], "f" * 7]
    answers = make_llm(backend).generate(prompts, [{"max_tokens": len(p)} for p in prompts])
    assert [answer.text for answer in answers] == [*prompts[:3], "de", prompts[4]]
    assert [answer.num_output_tokens for answer in answers] == [len(p) for p in prompts]
    assert [answer.num_prompt_tokens for answer in answers] == [len(p) for p in prompts]
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert not backend.open and not backend.aborted


@pytest.mark.parametrize(
    ("prompts", "count"),
    [("one", 1), ([104, 105], 1), (["one"], 1), ([[104], [105]], 2), ([], 0), (("a", "b"), 2)],
)
def test_prompts_may_be_one_or_several(make_llm, prompts: Any, count: int) -> None:
    assert [a.text for a in make_llm().generate(prompts, max_tokens=5)] == ["hello"] * count


def test_answers_are_those_of_http(make_llm) -> None:
    def of_http(response: Any) -> dict[str, Any]:
        return response.json() | {"id": None, "created": None}

    def of_llm(answer: Any) -> dict[str, Any]:
        return answer.body | {"id": None, "created": None}

    fields = {"max_tokens": 4, "logprobs": 2, "n": 2, "seed": 5}
    (answer,) = make_llm().generate("hi", fields)
    assert of_llm(answer) == of_http(Api().complete("hi", **fields))
    assert answer.texts == ["hell", "hell"] and answer.text == "hell"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    script = says(call, end=[258])
    (answer,) = make_llm(FakeBackend(script)).chat([{"role": "user", "content": "1?"}], tools=tools)
    assert answer.error is None
    assert answer.finish_reason == "tool_calls" and answer.text == ""
    assert answer.tool_calls[0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_conversations_may_be_one_or_several(make_llm) -> None:
    user = [{"role": "user", "content": "hi"}]
    llm = make_llm(FakeBackend(says("good day", end=[258])))
    assert [a.text for a in llm.chat(user)] == ["good day"]
    assert [a.text for a in llm.chat([user, [*user, *user]], max_tokens=4)] == ["good", "good"]
    assert llm.chat([]) == []
    assert llm.chat(user)[0].reasoning == "" and llm.chat(user)[0].tool_calls == []


def test_the_error_of_a_prompt_is_in_its_answer(make_llm) -> None:
    llm = make_llm()
    answers = llm.generate(["a", "", "b", "c"], [{}, {}, {"temperature": 9}, {"stream": True}])
    assert [type(answer.error) for answer in answers] == [type(None), *[BadRequestError] * 3]
    assert answers[2].error.param == "temperature" and answers[3].error.param == "stream"
    assert answers[0].text
    for name in ("text", "finish_reason", "tool_calls", "reasoning", "num_output_tokens"):
        with pytest.raises(BadRequestError, match="the prompt is empty"):
            getattr(answers[1], name)


def test_the_end_of_the_ranks_is_the_error_of_each_open_prompt(make_llm) -> None:
    backend = FakeBackend()
    backend.fail_after = (3, EngineDeadError("rank 1: its process died"))
    answers = make_llm(backend).generate(["a", "b"], [{"max_tokens": 2}, {"max_tokens": 9}])
    assert answers[0].text == "he"
    assert isinstance(answers[1].error, EngineDeadError)


def test_a_defect_is_an_error_and_loses_no_other_prompt(make_llm) -> None:
    backend = FakeBackend(lambda prompt, _params: [[1 // (len(prompt) - 1)]])
    answers = make_llm(backend).generate(["a", "bb"], max_tokens=1)
    assert type(answers[0].error) is ServingError and "ZeroDivisionError" in str(answers[0].error)
    assert answers[1].error is None


def test_an_adapter_is_loaded_once_and_becomes_the_model(make_llm, tmp_path: Path) -> None:
    backend = FakeBackend()
    llm, folder = make_llm(backend), tmp_path / "fr"
    folder.mkdir()
    backend.adapters["legal"] = "owner/legal"
    for _ in range(2):
        assert llm.generate("a", max_tokens=2, adapter=folder)[0].body["model"] == str(folder)
    assert backend.adapters == {"legal": "owner/legal", str(folder): str(folder)}
    (answer,) = llm.chat([{"role": "user", "content": "hi"}], adapter="legal")
    assert answer.body["model"] == "legal"
    assert llm.generate("a", max_tokens=2)[0].body["model"] not in backend.adapters
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a", adapter="other")


def test_a_misspelt_field_is_refused(make_llm) -> None:
    with pytest.raises(TypeError, match="'max_tokns'"):
        make_llm().generate("a", max_tokns=3)
    with pytest.raises(TypeError, match="'prompt_len'"):
        make_llm().chat([{"role": "user", "content": "hi"}], prompt_len=3)
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        make_llm().generate(["a", "b"], [{}])


def test_settings_change_the_configuration(make_llm, tmp_path) -> None:
    make_llm(cluster={"ranks": 2}, **{"scheduler.max_num_seqs": 5})
    (config,) = FakeEngine.started
    assert config.cluster.ranks == 2 and config.scheduler.max_num_seqs == 5
    assert config.model.path == str(tmp_path / "tiny")
    LLM({"model": {"path": tmp_path / "tiny"}, "cluster": {"ranks": 3}}, cache={"num_blocks": 640})
    assert FakeEngine.started[1].cluster.ranks == 3
    assert FakeEngine.started[1].cache.num_blocks == 640
    with pytest.raises(ConfigError, match=r"cluster\.ranks: 0 is not allowed.*\(argument\)"):
        make_llm(cluster={"ranks": 0})
    with pytest.raises(ConfigError, match="model: is missing"):
        LLM()


def test_a_closed_llm_answers_nothing(make_llm) -> None:
    with make_llm(progress=False) as llm:
        inner = llm._engine
        assert inner.console.quiet
    llm.close()
    assert inner.closed == 1
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")


def test_a_failed_loop_ends_the_calls_that_wait_for_it() -> None:
    async def end() -> None:
        raise SystemExit

    loop = engine._LoopThread()
    # The first call may get the error itself.
    with pytest.raises((RuntimeError, SystemExit)):
        loop.run(end())
    loop._thread.join()
    with pytest.raises(RuntimeError, match="event loop of the client failed: SystemExit"):
        loop.run(end())
    loop.close()


def test_the_ranks_stop_when_a_second_ctrl_c_ends_the_close_of_the_client() -> None:
    subject = engine.OfflineEngine.__new__(engine.OfflineEngine)
    subject._connected, subject.client = True, Mock()
    subject._loop, subject._ranks, subject._preflight = Mock(), Mock(), Mock()
    subject._loop.run.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        subject.close()
    subject._ranks.shut_down.assert_called_once_with()
    subject._loop.close.assert_called_once_with()


def test_a_second_ray_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    with pytest.raises(start.ServerError, match="Ray already runs"):
        start.start_ray(PhalanxConfig(model={"path": "x"}))


def test_the_pool_bounds_the_work_and_reads_items_late() -> None:
    running: set[int] = set()
    most, read = 0, 0

    def items() -> Iterator[int]:
        nonlocal read
        while read < 20:
            read += 1
            yield read

    async def work(item: int) -> None:
        nonlocal most
        running.add(item)
        most = max(most, len(running))
        assert read <= item + 5
        await asyncio.sleep(0.001 * (item % 3))
        running.remove(item)

    asyncio.run(run_pool(items(), work, 4))
    assert most == 4 and read == 20 and not running


def test_the_first_error_of_the_pool_ends_it() -> None:
    ended = []

    async def work(item: int) -> None:
        if item == 2:
            raise OSError("disk full")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(item)

    with pytest.raises(OSError, match="disk full"):
        asyncio.run(run_pool(range(10), work, 3))
    assert sorted(ended) == [0, 1]


def test_an_unknown_route_is_an_error() -> None:
    dispatcher = Dispatcher(FakeBackend(), tiny_tokenizer(), ApiSettings())
    with pytest.raises(ServingError, match="'/v1/nothing'; expected one of /v1/completions"):
        asyncio.run(dispatcher.answer("/v1/nothing", {}))
    body = json.loads(asyncio.run(dispatcher.answer("/v1/completions", {"prompt": "a"})).body)
    assert body["object"] == "text_completion"


def test_embeddings_keep_the_order_of_inputs(make_llm) -> None:
    llm = make_llm(PoolingBackend(), PoolingSpec(task="embed", size=4, normalize=False))
    answers = llm.embed(["abc", "", [1, 2]])
    assert answers[0].embedding == [3, ord("a"), ord("c"), 1] and answers[0].num_prompt_tokens == 3
    assert answers[2].embedding == [2, 1, 2, 1]
    with pytest.raises(BadRequestError, match="empty"):
        _ = answers[1].embedding
    assert [answer.score for answer in llm.score("ab", ["ab", "ab"])] == pytest.approx([1, 1])
    with pytest.raises(TypeError, match="dimension"):
        llm.embed("a", dimension=2)
    with pytest.raises(ValueError, match="2 queries for 1 documents"):
        llm.score(["a", "b"], "c")
    (answer,) = llm.generate("a")
    assert isinstance(answer.error, ServingError) and "/v1/embeddings" in str(answer.error)


def test_classes_and_scores_of_a_head(make_llm) -> None:
    labels = ("bad", "good", "odd")
    llm = make_llm(PoolingBackend(), PoolingSpec(task="classify", size=4, labels=labels))
    (answer,) = llm.classify("ab")
    assert answer.label == "odd" and answer.probabilities == pytest.approx([0.02, 0.97, 0.98])
    llm = make_llm(PoolingBackend(), PoolingSpec(task="score", size=4, labels=("yes",)))
    found = [answer.score for answer in llm.score(["ab", "c"], ["cd", "e"])]
    assert found == pytest.approx([0.04, 0.02])
