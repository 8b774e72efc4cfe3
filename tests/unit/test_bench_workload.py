"""What `phalanx bench` planned for and when: arrivals, lengths, shared prefixes, files of prompts."""

import itertools
import math
import random
from collections import Counter
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import pytest

from cluster.bench.arrivals import arrival_offsets
from cluster.bench.bodies import Target, request_body
from cluster.bench.lengths import Lengths
from cluster.bench.load import Driver
from cluster.bench.prompts import TextLength
from cluster.bench.prompts_file import read_prompts
from cluster.bench.settings import BenchError
from cluster.bench.workload import PlannedRequest, plan_requests
from tests.unit.bench_case import load, run_virtual
from tests.unit.bench_server import FakeServer


def gaps(rate: float, burstiness: float, seed: int = 1, num: int = 20_001) -> list[float]:
    offsets = arrival_offsets(num, rate, burstiness, random.Random(seed))
    assert offsets[0] == 0
    return [after - before for before, after in itertools.pairwise(offsets)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_spread(burstiness: float) -> None:
    """Gamma with shape k has a standard deviation of mean / sqrt(k)."""
    found = gaps(50.0, burstiness)
    assert all(gap >= 0 for gap in found)
    assert fmean(found) == pytest.approx(1 / 50, rel=0.05)
    assert pstdev(found) / fmean(found) == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_arrivals_are_poisson() -> None:
    """Counts in equal spans: variance = mean; gaps: exponential; neighbours: independent."""
    found = gaps(10.0, 1.0)
    offsets = arrival_offsets(20_001, 10.0, 1.0, random.Random(1))
    span = 2.0
    counts = Counter(int(offset // span) for offset in offsets)
    numbers = [counts[k] for k in range(int(offsets[-1] // span))]
    assert fmean(numbers) == pytest.approx(20, rel=0.05)
    assert pstdev(numbers) ** 2 == pytest.approx(20, rel=0.15)
    for quantile in (0.1, 0.5, 0.9):
        expected = 1 - quantile
        share = sum(gap > -math.log(expected) / 10 for gap in found) / len(found)
        assert share == pytest.approx(expected, abs=0.015)
    mean = fmean(found)
    covariance = fmean((a - mean) * (b - mean) for a, b in itertools.pairwise(found))
    assert abs(covariance) < 0.03 * pstdev(found) ** 2


def test_arrivals_of_a_seed() -> None:
    assert gaps(5.0, 1.0, seed=7, num=50) == gaps(5.0, 1.0, seed=7, num=50)
    assert gaps(5.0, 1.0, seed=7, num=50) != gaps(5.0, 1.0, seed=8, num=50)
    assert arrival_offsets(3, math.inf, 1.0, random.Random(0)) == [0.0, 0.0, 0.0]
    assert arrival_offsets(1, 5.0, 1.0, random.Random(0)) == [0.0]


def test_lengths() -> None:
    source = random.Random(3)
    state = source.getstate()
    assert Lengths.parse(64).sample(source) == 64
    assert source.getstate() == state, "a fixed length takes no random number"
    even = [Lengths.parse("10-13").sample(source) for _ in range(4000)]
    assert {10, 11, 12, 13} == set(even)
    assert fmean(even) == pytest.approx(11.5, abs=0.1)
    spread = Lengths.parse("lognormal:200:0.5:1000")
    many = [spread.sample(source) for _ in range(4000)]
    assert median(many) == pytest.approx(200, rel=0.05)
    assert pstdev([math.log(value) for value in many]) == pytest.approx(0.5, rel=0.08)
    assert max(many) <= 1000
    assert min(Lengths.parse("lognormal:1:3:5").sample(source) for _ in range(100)) == 1


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "7-3", "0-4", "a", "1.5", "lognormal:9:1", "lognormal:9:1:5", "normal:1"],
)
def test_wrong_lengths(text: str) -> None:
    with pytest.raises(BenchError, match=r"--input-len: .*lognormal:MEDIAN:SIGMA:MAX"):
        load(input_len=text)


def test_mixed_lengths_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServer()
    settings = load(input_len="5-40", output_len="2-6", requests=30, warmup=0)
    session = run_virtual(monkeypatch, {"a": fake}, settings)
    bodies = fake.bodies[1:]
    inputs = [len(body["prompt"]) for body in bodies]
    outputs = [body["max_tokens"] for body in bodies]
    assert 5 <= min(inputs) < 15 < 30 < max(inputs) <= 40
    assert {2, 3, 4, 5, 6} == set(outputs)
    (result,) = session.servers[0].results({})
    assert (result.prompt_tokens, result.output_tokens) == (sum(inputs), sum(outputs))


@pytest.mark.parametrize("as_text", [False, True])
def test_shared_prefixes(as_text: bool) -> None:
    settings = load(prefix_groups=3, prefix_tokens=50, input_len=10, requests=12)
    text_length = TextLength(0.0, 1.0) if as_text else None
    prompts = [request.prompt for request in plan_requests(settings, [], text_length, 0, 12)]
    assert {len(prompt) for prompt in prompts} == {61 if as_text else 60}
    heads = Counter(str(prompt[:50]) for prompt in prompts)
    assert sorted(heads.values()) == [4, 4, 4]
    assert len({str(prompt[50:]) for prompt in prompts}) == 12, "the rest is unique"
    order = [list(heads).index(str(prompt[:50])) for prompt in prompts]
    assert order != sorted(order), "groups are mixed"
    again = plan_requests(settings, [], text_length, 0, 12)
    assert [request.prompt for request in again] == prompts
    later = plan_requests(settings, [], text_length, 1, 12)
    assert not {str(request.prompt[:50]) for request in later} & heads.keys()


def lines(tmp_path: Path, *content: str) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(content), encoding="utf-8")
    return str(path)


def test_prompts_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(
        tmp_path,
        '{"prompt": "one\u2028line", "max_tokens": 4, "id": 7}',
        "",
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}',
        '{"prompt": "three"}',
    )
    fake = FakeServer()
    settings = load(endpoint="chat", prompts_file=path, requests=2, rounds=2, warmup=1)
    run_virtual(monkeypatch, {"a": fake}, settings)
    bodies = fake.bodies[1:]
    contents = [[message["content"] for message in body["messages"]] for body in bodies]
    warm_up, *rest = contents
    assert warm_up == ["three"], "the end of the file"
    assert rest == [["one\u2028line"], ["s", "u"], ["three"], ["one\u2028line"]]
    assert [body["max_tokens"] for body in bodies[1:]] == [4, 8, 8, 4]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2, column 2: not JSON"),
        ("[1]", r"line 2: an object is expected, not \[1\]"),
        ("{}", r'line 2: exactly one of "prompt" and "messages"'),
        ('{"prompt": "a", "messages": []}', r'line 2: exactly one of "prompt" and "messages"'),
        ('{"prompt": ""}', r'line 2: "prompt" must be a text'),
        ('{"prompt": ["a"]}', r'line 2: "prompt" must be a text'),
        ('{"prompt": 5}', r'line 2: "prompt" must be a text'),
        ('{"messages": []}', r'line 2: "messages" must be a list'),
        ('{"messages": [{"content": "a"}]}', r'line 2: "messages" must be a list'),
        ('{"prompt": "a", "max_tokens": 0}', r'line 2: "max_tokens" is 0'),
        ('{"prompt": "a", "max_tokens": true}', r'line 2: "max_tokens" is true'),
    ],
)
def test_mistakes_in_a_file_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        read_prompts(lines(tmp_path, '{"prompt": "fine"}', line))


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="No such file"):
        read_prompts(str(tmp_path / "absent.jsonl"))
    with pytest.raises(BenchError, match="holds no prompts"):
        read_prompts(lines(tmp_path, "", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(BenchError, match="utf-8"):
        read_prompts(str(tmp_path / "latin.jsonl"))
    chat = lines(tmp_path, '{"prompt": "a"}', '{"messages": [{"role": "user"}]}')
    with pytest.raises(BenchError, match="line 2: messages need --endpoint chat"):
        Driver(load(prompts_file=chat), {})
    ids = lines(tmp_path, '{"prompt": [1, 2]}')
    assert Driver(load(prompts_file=ids), {})
    with pytest.raises(BenchError, match="line 1: a prompt of token ids needs"):
        Driver(load(prompts_file=ids, endpoint="chat"), {})


def test_sampling_parameters_pass_through() -> None:
    import json

    target = Target(name="a", url="http://a", model="m", ignore_eos=True)

    def body(**changes: Any) -> dict[str, Any]:
        return json.loads(request_body(load(**changes), target, PlannedRequest([1, 2], 5)))

    plain = body()
    assert "seed" not in plain
    assert (plain["temperature"], plain["ignore_eos"], plain["max_tokens"]) == (0.0, True, 5)
    extra = {"top_p": 0.5, "ignore_eos": False, "guided": {"regex": "a+"}}
    full = body(temperature=0.7, sampling_seed=9, extra_body=extra)
    assert full == plain | {"temperature": 0.7, "seed": 9} | extra


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": None}, "needs --concurrency or --request-rate"),
        ({"request_rate": 0.0}, "--request-rate 0 is not above 0"),
        ({"request_rate": math.nan}, "--request-rate nan"),
        ({"burstiness": 2.0}, "no meaning without --request-rate"),
        ({"request_rate": 1.0, "burstiness": 0.0}, "--burstiness 0 is not a positive number"),
        ({"prefix_groups": 2}, "go together"),
        ({"prefix_groups": 2, "prefix_tokens": 5, "prompts_file": "x"}, "for random prompts"),
        ({"extra_body": {"stream": False}}, "may not hold 'stream'"),
        ({"extra_body": {"n": 2}}, "may not hold 'n'"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        load(**changes)
