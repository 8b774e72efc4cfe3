"""Which decode graphs there are and what is voted for them; capturing and replaying is tested on GPUs."""

from dataclasses import replace

import pytest
import torch

from kernels.select import Choice, Selection
from tests.unit.test_step_sync import rows, vote
from workers.config import SchedulerConfig
from workers.cuda_graphs import graph_sizes, graph_vote, graphs_to_capture
from workers.step_sync import ForwardMode, GraphMode, PlanConfig, decide


@pytest.mark.parametrize("max_rows", [*range(1, 70), 96, 100, 128, 200, 256, 500, 512, 1000, 1024])
def test_padding_wastes_little(max_rows):
    sizes = graph_sizes(max_rows)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_rows
    waste = [
        next(size for size in sizes if size >= count) / count - 1
        for count in range(1, max_rows + 1)
    ]
    assert sum(waste) / len(waste) <= 0.12 and max(waste) < 0.25


def test_there_are_not_many():
    assert len(graph_sizes(256)) == 28 and len(graph_sizes(1024)) == 36


@pytest.mark.parametrize(
    ("mode", "num_tokens", "expected"),
    [
        (ForwardMode.IDLE, 0, (GraphMode.FULL, 1)),
        (ForwardMode.DECODE, 8, (GraphMode.FULL, 8)),
        (ForwardMode.DECODE, 9, (GraphMode.FULL, 10)),
        (ForwardMode.DECODE, 21, (GraphMode.NONE, 21)),
        (ForwardMode.MIXED, 4, (GraphMode.NONE, 4)),
        (ForwardMode.EXTEND, 4, (GraphMode.NONE, 4)),
    ],
)
def test_votes(mode, num_tokens, expected):
    assert graph_vote(graph_sizes(20), mode, num_tokens) == expected
    assert graph_vote((), mode, num_tokens) == (GraphMode.NONE, num_tokens)


def test_all_ranks_replay_the_size_of_the_busiest_or_none_replays():
    ragged = PlanConfig(equal_tokens=False)

    def of(mode: ForwardMode, num_tokens: int):
        graph_mode, graph_tokens = graph_vote(graph_sizes(64), mode, num_tokens)
        return vote(
            num_tokens, graph_mode=graph_mode, graph_tokens=graph_tokens, wants_microbatch=1
        )

    plan = decide(rows(of(ForwardMode.DECODE, 5), of(ForwardMode.DECODE, 17), of(0, 0)), ragged)
    assert (plan.graph_mode, plan.padded_tokens) == (GraphMode.FULL, 20)
    assert not plan.microbatch and plan.num_tokens_across_dp == (5, 17, 0)
    plan = decide(rows(of(ForwardMode.DECODE, 5), of(ForwardMode.EXTEND, 17)), ragged)
    assert plan.graph_mode == GraphMode.NONE and plan.padded_tokens == 0


def test_what_is_captured():
    can = Selection(Choice("copy_engine", ""), Choice("triton", ""), Choice("flashinfer", ""))
    cuda, cpu, cannot = torch.device("cuda"), torch.device("cpu"), Choice("sdpa", "")

    def sizes(wanted, selection=can, device=cuda):
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 6}
        config = SchedulerConfig(cuda_graphs=wanted, **limits)
        return graphs_to_capture(config, selection, device)

    assert sizes("auto") == sizes(True) == (1, 2, 3, 4, 5, 6)
    assert sizes(False) == sizes("auto", replace(can, attention=cannot)) == ()
    assert sizes("auto", device=cpu) == ()
