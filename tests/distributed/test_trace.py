"""`trace_step` on real ranks: a profile of each rank with both forms of a step."""

import gzip
import json
from pathlib import Path

import pytest

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import rank_config
from tests.distributed.rank_pool import RankError
from workers.config import RankConfig
from workers.rank.process_group import local_rendezvous
from workers.rank.rank_info import RankTrace

LAYERS = 2
FORMS = {"whole", "in ubatches"}


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


@pytest.mark.parametrize("all2all", ["torch_dist", "shm"])
@pytest.mark.parametrize(("phase", "num_tokens"), [("prefill", 96), ("decode", 9)])
def test_both_forms_of_a_step_are_profiled(rank_pool, checkpoint, all2all, phase, num_tokens):
    config = rank_config(checkpoint, 2, kernels={"all2all": all2all}, overlap={"mode": "on"})
    for rank, trace in enumerate(traces(rank_pool, config, phase, num_tokens)):
        assert (trace.rank, trace.all2all) == (rank, all2all)
        assert set(trace.seconds) == FORMS and all(s > 0 for s in trace.seconds.values())
        events = json.loads(gzip.decompress(trace.events))["traceEvents"]
        ranges = [event for event in events if event.get("cat") == "user_annotation"]
        forms = [e for e in ranges if e["name"].startswith(f"{phase} of {num_tokens} tokens, ")]
        assert {form["name"].rpartition(", ")[2] for form in forms} == FORMS
        for form in forms:
            names = [e["name"] for e in ranges if form["ts"] <= e["ts"] < form["ts"] + form["dur"]]
            cut = "in ubatches" in form["name"]
            if all2all == "torch_dist":  # each ubatch has one of its own
                for suffix in (" of ubatch 0", " of ubatch 1"):
                    assert (names.count(f"dispatch{suffix}") >= LAYERS) == cut
                    assert (names.count(f"combine{suffix}") >= LAYERS) == cut
            else:
                assert names.count("dispatch") >= (1 + cut) * LAYERS
            assert "launch" in names and "wait for an all-to-all" in names


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
    assert len(traces(rank_pool, config, "decode", 16)) == 2


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
    assert len(traces(rank_pool, config, "prefill", 90)) == 2
    with pytest.raises(RankError, match=r"a prefill step has 2 to 90 tokens .* got 91"):
        traces(rank_pool, config, "prefill", 91)
