"""The decode window against plain gathers over random traffic that reuses blocks as soon as they are free."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kernels.attention import decode_window
from kernels.attention.base import AttentionSpec
from kernels.attention.sdpa import SdpaAttention

LAYERS, BLOCKS, BLOCK, HEADS, KV_HEADS, DIM = 2, 40, 4, 4, 2, 8


@dataclass
class Batch:
    num_tokens: int
    num_seqs: int
    num_decodes: int
    query_start_loc_cpu: np.ndarray
    seq_lens_cpu: np.ndarray
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(eq=False)
class Seq:
    length: int  # tokens in the cache
    prompt: int
    blocks: list[int] = field(default_factory=list)


class Traffic:
    """Sequences that prefill in chunks, decode, end and give their blocks to the next at once."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self.free = list(range(BLOCKS))
        self.seqs: list[Seq] = []

    def next_batch(self) -> Batch:
        chance = self.chance
        for seq in list(self.seqs):
            if seq.length >= seq.prompt and (chance.random() < 0.05 or seq.length > 24):
                self.seqs.remove(seq)
                self.free += seq.blocks
        while len(self.seqs) < 4 and chance.random() < 0.3 and len(self.free) > 8:
            self.seqs.append(Seq(0, chance.choice([1, 1, 2, 5, 9])))
        work = [
            (seq, 1 if seq.length >= seq.prompt else min(seq.prompt - seq.length, 4))
            for seq in self.seqs
        ]
        work.sort(key=lambda item: item[1] != 1)
        starts, lens, slots = [0], [], []
        for seq, count in work:
            while len(seq.blocks) * BLOCK < seq.length + count:
                seq.blocks.append(self.free.pop())
            for position in range(seq.length, seq.length + count):
                slots.append(seq.blocks[position // BLOCK] * BLOCK + position % BLOCK)
            seq.length += count
            starts.append(starts[-1] + count)
            lens.append(seq.length)
        width = max((len(seq.blocks) for seq, _ in work), default=1)
        table = torch.zeros(len(work), width, dtype=torch.int64)
        for row, (seq, _) in enumerate(work):
            table[row, : len(seq.blocks)] = torch.tensor(seq.blocks)
        return Batch(
            num_tokens=starts[-1],
            num_seqs=len(work),
            num_decodes=sum(count == 1 for _, count in work),
            query_start_loc_cpu=np.array(starts, dtype=np.int32),
            seq_lens_cpu=np.array(lens, dtype=np.int32),
            block_table=table,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
        )


def make_attention(windowed: bool) -> SdpaAttention:
    attention = SdpaAttention(AttentionSpec(HEADS, KV_HEADS, DIM, BLOCK, DIM**-0.5))
    attention.bind([torch.zeros(2, BLOCKS, BLOCK, KV_HEADS, DIM) for _ in range(LAYERS)])
    if not windowed:
        attention._window = None
    return attention


@pytest.mark.parametrize("seed", range(6))
def test_same_as_gathering_every_step(seed, monkeypatch):
    torch.manual_seed(seed)
    traffic, windowed, plain = Traffic(seed), make_attention(True), make_attention(False)
    continued = 0
    for _ in range(300):
        batch = traffic.next_batch()
        if not batch.num_tokens:
            continue
        windowed.plan(batch)
        plain.plan(batch)
        continued += windowed._window._continues and any(g.windowed for g in windowed._decodes)
        rows = batch.num_tokens + int(torch.randint(3, ()))  # some steps run with padding
        for layer in range(LAYERS):
            q = torch.randn(rows, HEADS, DIM)
            k, v = torch.randn(2, rows, KV_HEADS, DIM)
            got, want = windowed(q, k, v, layer), plain(q, k, v, layer)
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    assert continued > 50, "the window was hardly used"


def test_a_copy_that_would_be_too_large_is_not_made(monkeypatch):
    monkeypatch.setattr(decode_window, "MAX_BYTES", 1000)
    traffic, attention = Traffic(0), make_attention(True)
    for _ in range(50):
        batch = traffic.next_batch()
        if batch.num_tokens:
            attention.plan(batch)
            assert not any(group.windowed for group in attention._decodes)


def test_a_new_sequence_in_the_same_blocks_is_not_mistaken_for_the_old():
    """The old one decodes to 8 tokens; the new one prefills 8 into the same block list, then decodes the ninth."""
    windowed, plain = make_attention(True), make_attention(False)

    def run(first: int, count: int) -> None:
        batch = Batch(
            num_tokens=count,
            num_seqs=1,
            num_decodes=int(count == 1),
            query_start_loc_cpu=np.array([0, count], dtype=np.int32),
            seq_lens_cpu=np.array([first + count], dtype=np.int32),
            block_table=torch.tensor([[5, 6, 7]]),
            slot_mapping=torch.arange(5 * BLOCK + first, 5 * BLOCK + first + count),
        )
        for attention in (windowed, plain):
            attention.plan(batch)
        for layer in range(LAYERS):
            q = torch.randn(count, HEADS, DIM)
            k, v = torch.randn(2, count, KV_HEADS, DIM)
            torch.testing.assert_close(windowed(q, k, v, layer), plain(q, k, v, layer))

    run(0, 7)
    run(7, 1)
    run(0, 8)
    run(8, 1)
