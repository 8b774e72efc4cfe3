"""Words in memory that GPUs of one host share, by which kernels tell each other that rows have arrived.

A rank has one word for each peer. A call adds UNITS to it, each program of the peer's kernel its share, so
the word says how many calls have arrived whole, whatever their grids. Words wrap around.
"""

import triton
import triton.language as tl

UNITS: tl.constexpr = tl.constexpr(1024)
MAX_PROGRAMS = UNITS.value


@triton.jit
def signal_ranks(bases_ptr, word_at, NUM_RANKS: tl.constexpr):
    """What this program stored is on its way: once a rank sees its word grow, it sees the rows too.

    word_at   where this rank's word lies in every rank's memory, in bytes
    """
    tl.debug_barrier()
    # One fence for all peers: releasing each word by itself would wait for the one before.
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    share = tl.where(tl.program_id(0) == 0, UNITS - tl.num_programs(0) + 1, 1)
    for rank in tl.static_range(NUM_RANKS):
        word_ptr = (tl.load(bases_ptr + rank) + word_at).to(tl.pointer_type(tl.int32))
        tl.atomic_add(word_ptr, share, sem="relaxed", scope="sys")


@triton.jit
def wait_for_ranks(words_ptr, call, NUM_RANKS: tl.constexpr):
    """Until call number `call` (from 1) of every rank has arrived whole. words_ptr int32 [NUM_RANKS]."""
    for rank in tl.static_range(NUM_RANKS):
        while _load_acquire(words_ptr + rank) - call * UNITS < 0:
            pass


@triton.jit
def _load_acquire(ptr):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.s32 $0, [$1];", "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1
    )
