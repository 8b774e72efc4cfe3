"""`trace_step` on real ranks, and what is drawn of it."""

import json
from pathlib import Path

import pytest

from cluster.commands import trace_drawing
from cluster.commands.trace import summary
from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import rank_config
from tests.distributed.rank_pool import RankError
from workers.config import RankConfig
from workers.rank.process_group import local_rendezvous
from workers.trace.spans import RankTrace

LAYERS = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "model"
    return make_checkpoint(path, num_layers=LAYERS, hidden_size=64, num_experts=6, head_dim=32)


def _trace(rank_index, num_ranks, info, config, rendezvous, phase, num_tokens) -> RankTrace:
    from workers.rank.epoch import Epoch
    from workers.rank.process import RankProcess
    from workers.rank.trace_step import trace_step

    epoch = Epoch(RankProcess(rank_index, config), rendezvous, 30)
    try:
        epoch.load()
        return trace_step(epoch, phase, num_tokens)
    finally:
        epoch.process.close()


def traces(pool, config: RankConfig, phase: str, num_tokens: int) -> list[RankTrace]:
    with local_rendezvous() as rendezvous:
        arguments = (config.num_ranks, config, rendezvous, phase, num_tokens)
        return pool.run(_trace, *arguments, with_group=False)


@pytest.mark.parametrize("all2all", ["torch_dist", "allgather", "shm"])
@pytest.mark.parametrize(("phase", "num_tokens"), [("prefill", 96), ("decode", 9)])
def test_both_forms_of_a_step_are_traced(
    rank_pool, checkpoint, tmp_path, all2all, phase, num_tokens
):
    config = rank_config(checkpoint, 2, kernels={"all2all": all2all}, overlap={"mode": "on"})
    found = traces(rank_pool, config, phase, num_tokens)
    for rank, trace in enumerate(found):
        assert (trace.rank, trace.num_tokens, trace.all2all) == (rank, num_tokens, all2all)
        assert trace.plain.order() == [("dispatch", 0), ("combine", 0)] * LAYERS
        one_layer = [(x, i) for x in ("dispatch", "combine") for i in range(2)]
        assert trace.ubatched.order() == one_layer * LAYERS
        assert 0 < trace.plain.exposed < trace.plain.seconds
        assert all(seconds > 0 for seconds in trace.unrecorded)
        for step in (trace.plain, trace.ubatched):
            assert step.num_layers() == LAYERS and 0 <= step.covered_share < 1
            assert step.exposed + step.covered <= step.seconds
            begin, end = step.interval_of(1, 1)
            assert 0 < begin < end <= step.seconds
    check_files(found, tmp_path)
    assert len(summary(found)) == 6 and "% covered" in summary(found)[1]


def check_files(found: list[RankTrace], folder: Path) -> None:
    json_path, png_path = trace_drawing.write(found, folder / "new" / "trace", "a title")
    assert png_path.read_bytes().startswith(b"\x89PNG")
    events = json.loads(json_path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    lanes = {f"{what}ubatch {index}" for what in ("", "all-to-alls of ") for index in range(2)}
    assert lanes <= names
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    threads: dict[tuple[int, int], float] = {}
    for span in sorted(spans, key=lambda event: event["ts"]):
        thread = span["pid"], span["tid"]
        assert span["ts"] >= threads.get(thread, 0) - 1e-3, "spans of a thread overlap"
        threads[thread] = span["ts"] + span["dur"]


def test_as_many_decodes_as_half_of_a_step(rank_pool, checkpoint):
    """While prompts come in, those that already decode leave them less and less room in each step."""
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 16}
    config = rank_config(
        checkpoint,
        2,
        model={"max_model_len": 96},
        kernels={"all2all": "shm"},
        overlap={"mode": "on"},
        scheduler=limits,
    )
    assert [trace.num_tokens for trace in traces(rank_pool, config, "decode", 16)] == [16, 16]


def test_a_size_that_does_not_fit_is_refused(rank_pool, checkpoint):
    config = rank_config(checkpoint, 2, kernels={"all2all": "shm"}, overlap={"mode": "on"})
    with pytest.raises(RankError, match=r"a decode step has 2 to 16 tokens .* got 17"):
        traces(rank_pool, config, "decode", 17)


def test_prompts_are_as_long_and_as_many_as_the_limits_allow(rank_pool, checkpoint):
    config = rank_config(
        checkpoint,
        2,
        model={"max_model_len": 32},
        kernels={"all2all": "shm"},
        overlap={"mode": "on"},
        scheduler={"max_num_seqs": 3},
    )
    assert [trace.num_tokens for trace in traces(rank_pool, config, "prefill", 90)] == [90, 90]
    with pytest.raises(RankError, match=r"a prefill step has 2 to 90 tokens .* got 91"):
        traces(rank_pool, config, "prefill", 91)
