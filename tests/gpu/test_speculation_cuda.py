"""Steps with drafts on GPUs, replayed from graphs: tokens are those that float32 would choose, or nearly so."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.backends.select import probe
from tests.devices import need_gpus
from tests.distributed.engine_harness import Event, make_request
from tests.gpu.pools import Pools
from tests.gpu.test_cuda_graphs import (
    MARGIN,
    MEAN,
    alone,
    check_answers,
    configure,
    serve,
)
from tests.gpu.test_cuda_graphs import traffic as traffic_of_ranks
from tests.gpu_families import released_shape
from tests.token_judge import TokenJudge, steep_routers, transformers_reference
from workers.config import RankConfig
from workers.rank.process_group import local_rendezvous
from workers.speculation_config import SpeculationConfig

MISSING = probe("cuda").get("attention.flashinfer") if torch.cuda.is_available() else "needs a GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


def traffic(num_requests: int) -> list[Event]:
    """Prompts of one repeated phrase, and some requests that are aborted."""
    chance, events = random.Random(6), []
    for number in range(num_requests):
        phrase = [chance.randrange(256) for _ in range(chance.choice([2, 5, 9]))]
        prompt = (phrase * 40)[: chance.choice([1, 16, 40, 100])]
        asked = make_request(str(number), prompt, max_tokens=chance.randint(20, 60))
        step = 3 * number
        events.append(Event(step, 0, asked))
        if chance.random() < 0.1:
            events.append(Event(step + chance.randint(5, 15), 0, abort=str(number)))
    return events


def predicting(event: Event, answers: dict[str, list[int]]) -> Event:
    """The same request, which predicts its answer of another run."""
    request = event.request
    if request is None:
        return event
    found = tuple(answers.get(request.request_id, ()))
    params = replace(request.params, prediction_token_ids=found)
    return replace(event, request=replace(request, params=params))


def drafting(config: RankConfig, method: str, num_drafts: int) -> RankConfig:
    speculation = SpeculationConfig(method=method, num_draft_tokens=num_drafts, adaptive=False)
    return config.model_copy(update={"speculation": speculation})


def make(folder: Path, family: str, *, mtp: bool) -> Path:
    """A checkpoint of a family, with a head for multi-token prediction or without."""
    return steep_routers(released_shape(folder, family, num_experts_per_tok=8, mtp=mtp))


@pytest.mark.parametrize(
    ("family", "method", "num_drafts"),
    [("qwen3_moe", "ngram", 3), ("qwen3_next", "ngram", 4), ("qwen3_next", "mtp", 2)],
)
def test_drafts_change_no_token(tmp_path: Path, family: str, method: str, num_drafts: int) -> None:
    """Prompts in chunks, decodes with and without drafts, and aborts.

    Text is drafted where it repeats the answer of a run without drafts: a random model seldom repeats itself.
    """
    checkpoint = make(tmp_path / "model", family, mtp=method == "mtp")
    events = traffic(40)
    # A draft model reads its drafts on the host between its passes.
    waits = method == "mtp"
    if not waits:
        plain = alone(configure(checkpoint), events)
        assert not plain.num_of("VERIFY")
        events = [predicting(event, plain.tokens) for event in events]
    config = drafting(configure(checkpoint), method, num_drafts)
    answers = alone(config, events, no_waiting=not waits)
    assert answers.num_of("VERIFY") > 5, answers.kinds
    assert answers.num_of("MIXED") and not answers.num_of("NONE")
    judge = TokenJudge(transformers_reference(checkpoint), MARGIN, MEAN)
    for event in events:
        if event.request is not None and (tokens := answers.tokens.get(event.request.request_id)):
            judge.greedy(event.request.prompt_token_ids, tokens, event.request.request_id)
    judge.close(at_least=500)


@pytest.mark.parametrize("all2all", ["allgather", "copy_engine"])
def test_ranks_draft_together(pools: Pools, tmp_path: Path, all2all: str) -> None:
    """Ranks with prompts, drafts and nothing at the same time: a rank without sequences runs the passes along."""
    need_gpus(2)
    checkpoint = make(tmp_path / "model", "qwen3_next", mtp=True)
    events = traffic_of_ranks(random.Random(4), 150, 2)
    config = drafting(configure(checkpoint, 2, all2all), "mtp", 2)
    with local_rendezvous() as rendezvous:
        arguments = (config, rendezvous, events)
        answers = pools.run(serve, 2, *arguments, with_group=False, timeout_s=120)
    for found in answers:
        forms = Counter(found.forms)
        assert forms["idle"] > 30 and forms["VERIFY"] > 5, forms
    check_answers(checkpoint, events, answers)
