"""Words in memory shared by the GPUs of one host. Kernels add to them to signal that rows have arrived.

A rank has one word for each peer. A call of the peer's kernel adds UNITS to it in total, each program a share. So the
word divided by UNITS is the number of calls that have arrived whole, whatever their grids. Words wrap around.
"""

import triton
import triton.language as tl

UNITS: tl.constexpr = tl.constexpr(1024)
MAX_PROGRAMS = UNITS.value
ABORT_POLLS: tl.constexpr = tl.constexpr(512)  # about 0.3 ms


@triton.jit
def signal_ranks(bases_ptr, word_at, NUM_RANKS: tl.constexpr):
    """Signal every rank that this program has stored its rows. A rank that reads the grown word reads the rows too.

    word_at   offset of this rank's word in every rank's memory, in bytes
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
def wait_for_ranks(words_ptr, call, abort_ptr, NUM_RANKS: tl.constexpr):
    """Wait until call number `call` (from 1) of every rank has arrived whole, or the abort word is set.

    words_ptr   int32 [NUM_RANKS]
    abort_ptr   int32 [1], in memory of the host; read once in ABORT_POLLS polls, because that takes 1 to 2 us

    After an abort the rows of this call are undefined.
    """
    aborted = call * 0
    for rank in tl.static_range(NUM_RANKS):
        polls = call * 0
        while (_load_acquire(words_ptr + rank) - call * UNITS < 0) & (aborted == 0):
            polls += 1
            if polls % ABORT_POLLS == 0:
                aborted = _load_acquire(abort_ptr)


@triton.jit
def _load_acquire(ptr):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.s32 $0, [$1];", "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1
    )
