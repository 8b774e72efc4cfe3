"""Shared memory between processes: slots are never overwritten early, lost ranks are named."""

import errno
import gc
import mmap
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kernels.host import shm
from kernels.host.awake import AwakeTime
from kernels.host.shm import SHM_FOLDER, PeerLeftError, SharedMemoryGroup, segment_bytes
from kernels.pending import Pending
from tests.distributed.rank_pool import GroupInfo, RankPool

SLOT_WORDS = 512
LONG_S = 30.0  # a wait of this length, for a rank that is lost, was not cut short


def _mark(info: GroupInfo, rank: int) -> None:
    (Path(info.store_path).parent / f"mark-{rank}").touch()


def _await_marks(info: GroupInfo, ranks: range) -> None:
    deadline = time.monotonic() + LONG_S
    while not all((Path(info.store_path).parent / f"mark-{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline, "a rank has not marked what it has seen"
        time.sleep(1e-3)


def _segments(name: str) -> list[str]:
    return [path.name for path in SHM_FOLDER.iterdir() if name in path.name]


def _rows(rank: int, num_ranks: int, info: GroupInfo, steps: int) -> list[str]:
    group = SharedMemoryGroup(info.name, rank, num_ranks, timeout_s=LONG_S)
    for step in range(steps):
        rows = group.all_gather_row([step, rank, -(2**62)])
        assert rows.dtype == np.int64
        assert rows.tolist() == [[step, peer, -(2**62)] for peer in range(num_ranks)]
    left = _segments(info.name)
    group.close()
    group.close()
    return left


def _stress(rank: int, num_ranks: int, info: GroupInfo, exchanges: int) -> None:
    """Fill whole slots with a pattern, up to three exchanges under way, ranks at uneven speed."""
    slots = (8 * SLOT_WORDS, 64)
    group = SharedMemoryGroup(info.name, rank, num_ranks, slot_bytes=slots, timeout_s=60)
    channel = group.channels[0]
    words = channel.slots.view(np.int64)
    random = np.random.default_rng(rank)

    def read(parity: int, counts: list[int]) -> tuple[np.ndarray, list[int]]:
        return words[parity].copy(), counts

    open_: list[tuple[int, Pending]] = []
    for exchange in range(exchanges):
        parity = channel.begin()
        words[parity, rank] = exchange * num_ranks + rank
        open_.append((exchange, channel.publish(exchange + rank, read)))
        if exchange % 97 == rank:
            time.sleep(1e-3)
        while len(open_) > random.integers(0, 3):
            number, pending = open_.pop(int(random.integers(0, len(open_))))
            found, counts = pending.wait()
            assert counts == [number + peer for peer in range(num_ranks)]
            expected = number * num_ranks + np.arange(num_ranks)
            assert (found == expected[:, None]).all(), (number, found[:, 0], found[:, -1])
        if exchange % 50 == 0:
            assert (group.all_gather_row([exchange])[:, 0] == exchange).all()
    for _, pending in open_:
        pending.wait()
    group.close()


def _leave(rank: int, num_ranks: int, info: GroupInfo, how: str) -> tuple[str, str, float]:
    """The last rank goes away in some manner; the others say what they saw, and after how long."""
    group = SharedMemoryGroup(info.name, rank, num_ranks, slot_bytes=(64,), timeout_s=LONG_S)
    group.all_gather_row([rank])
    others = range(num_ranks - 1)
    if rank not in others:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "late":
            _await_marks(info, others)
        group.close()
        return "", "", 0
    start = time.monotonic()
    try:
        if how == "late":
            group.timeout_s, group._row_timeout_s = 0.2, 0.1
            group.channels[0].begin()
            pending = group.channels[0].publish(0, lambda parity, counts: None)
            with pytest.raises(TimeoutError, match=r"publish round 1 of channel 0 within 0\.2 s"):
                pending.wait()
            with pytest.raises(TimeoutError):  # and says so again
                pending.wait()
            start = time.monotonic()
        group.all_gather_row([rank])
    except OSError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        _mark(info, rank)
        _await_marks(info, others)  # each waiting rank must find the lost one, not another one
        group.close()
    raise AssertionError("the missing rank was not noticed")


def _abort_while_waiting(rank: int, num_ranks: int, info: GroupInfo) -> None:
    group = SharedMemoryGroup(info.name, rank, num_ranks, timeout_s=LONG_S)
    if rank == 0:
        threading.Timer(0.1, group.abort).start()
        with pytest.raises(PeerLeftError, match="this rank left"):
            group.all_gather_row([0])
        _mark(info, rank)
    else:
        _await_marks(info, range(1))
    group.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_rows_of_all_ranks(rank_pool: RankPool, num_ranks: int):
    found = rank_pool.run(_rows, num_ranks, 300, with_group=False)
    assert found == [[]] * num_ranks  # unlinked while in use


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_slots_survive_500_exchanges(rank_pool: RankPool, num_ranks: int):
    rank_pool.run(_stress, num_ranks, 500, with_group=False, timeout_s=180)


def test_a_late_rank_is_named(rank_pool: RankPool):
    found = rank_pool.run(_leave, 3, "late", with_group=False)
    for name, text, waited in found[:2]:
        assert name == "TimeoutError"
        assert text == "rank 2 did not send its row within 0.1 s"
        assert waited >= 0.1


def test_a_rank_that_leaves_is_noticed_at_once(rank_pool: RankPool):
    for name, text, waited in rank_pool.run(_leave, 3, "close", with_group=False)[:2]:
        assert name == "PeerLeftError" and "rank 2 left the group" in text
        assert waited < LONG_S / 2


def test_a_killed_rank_is_noticed_at_once():
    pool = RankPool(2)
    try:
        name, text, waited = pool.outcomes(_leave, 2, "kill", with_group=False)[0]
    finally:
        pool.close()
    assert name == "PeerLeftError" and "rank 1 died" in text
    assert waited < LONG_S / 2


def test_abort_ends_a_wait_in_another_thread(rank_pool: RankPool):
    rank_pool.run(_abort_while_waiting, 2, with_group=False)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_never_attaches(rank: int, monkeypatch: pytest.MonkeyPatch):
    """Of three ranks, one attaches and finds another one there."""
    name, create = f"alone-{os.getpid()}-{rank}", shm._create

    def create_for_two(path: Path, size: int) -> int:
        fd = create(path, size)
        with mmap.mmap(fd, size) as mapped, memoryview(mapped).cast("q") as words:
            words[(2 - rank) * shm.LINE] = 1
        return fd

    monkeypatch.setattr(shm, "_create", create_for_two)
    if rank:
        os.close(create_for_two(SHM_FOLDER / f"phalanx-{name}", segment_bytes(3, ())))
    with pytest.raises(TimeoutError, match=r"^rank 1 did not attach within 0\.1 s$"):
        SharedMemoryGroup(name, rank, 3, timeout_s=LONG_S, attach_timeout_s=0.1)
    assert _segments(name) == []


@pytest.mark.parametrize("looks", [1, 5])
def test_a_pause_of_a_rank_is_no_silence_of_its_peer(looks: int, monkeypatch: pytest.MonkeyPatch):
    """The peer has sent its row in the pause, or sends it some looks later, because it was paused too."""
    name, groups = f"stopped-{os.getpid()}", dict[int, SharedMemoryGroup]()

    def join(rank: int) -> None:
        groups[rank] = SharedMemoryGroup(name, rank, 2, timeout_s=LONG_S)

    peer = threading.Thread(target=join, args=(1,))
    peer.start()
    join(0)
    peer.join()
    num_calls = 0

    def clock_with_a_stop() -> float:
        """No time passes, but before the first look the process was stopped for a long time."""
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1 + looks:
            groups[1].words[shm._row_word(1, 2)] = 1
        return 2 * LONG_S if num_calls > 1 else 0.0

    def awake_time(longest_s: float) -> AwakeTime:
        limits = longest_s > shm.LATE_POLL_S  # the other one counts the wait for the statistics
        return AwakeTime(longest_s, clock_with_a_stop if limits else time.monotonic)

    monkeypatch.setattr(shm, "AwakeTime", awake_time)
    assert groups[0].all_gather_row([7])[0] == 7
    assert num_calls == 1 + looks
    monkeypatch.undo()
    for group in groups.values():
        group.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_waits_for_no_peer(rank: int):
    left, name = threading.Event(), f"left-{os.getpid()}-{rank}"
    threading.Timer(0.1, left.set).start()
    with pytest.raises(PeerLeftError, match="this rank left"):
        SharedMemoryGroup(name, rank, 2, timeout_s=60, left=left)
    assert _segments(name) == []


def test_a_rank_that_fails_to_attach_frees_the_segment_and_tells_its_peers():
    """Its process lives on, for the next attempt. Of two ranks that wait for the third, one leaves."""
    name, left = f"failed-{os.getpid()}", threading.Event()
    size = segment_bytes(3, ())
    own = shm._create(SHM_FOLDER / f"phalanx-{name}", size)
    left.set()
    with pytest.raises(PeerLeftError, match="this rank left"):
        SharedMemoryGroup(name, 1, 3, timeout_s=60, left=left)
    with mmap.mmap(own, size) as mapped, memoryview(mapped).cast("q") as words:
        assert words[shm.LINE + 1] == 1
    os.close(own)
    gc.collect()
    open_ = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    assert [path for path in open_ if name in path] == []


def test_a_rank_removes_the_segment_of_a_killed_rank_0():
    name = f"killed-{os.getpid()}"
    size = segment_bytes(2, ())
    rank_0 = shm._create(SHM_FOLDER / f"phalanx-{name}", size)
    try:
        with pytest.raises(TimeoutError, match="rank 0 did not attach"):
            SharedMemoryGroup(name, 1, 2, timeout_s=0.2)
    finally:
        os.close(rank_0)
    assert _segments(name) == []


def test_a_name_that_is_in_use_is_not_taken_over():
    name = f"used-{os.getpid()}"
    path = SHM_FOLDER / f"phalanx-{name}"
    path.write_bytes(b"of another container")
    try:
        with pytest.raises(FileExistsError):
            SharedMemoryGroup(name, 0, 1, timeout_s=1)
        assert path.read_bytes() == b"of another container"
        assert _segments(name) == [path.name]
    finally:
        path.unlink()


def test_a_segment_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch):
    name = f"foreign-{os.getpid()}"
    path = SHM_FOLDER / f"phalanx-{name}"
    path.write_bytes(bytes(segment_bytes(2, ())))
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    try:
        with pytest.raises(PermissionError, match=f"was made by user {own}, not by rank 0"):
            SharedMemoryGroup(name, 1, 2, timeout_s=1)
        link = path.with_name(f"{path.name}-link")
        link.symlink_to(path)
        with pytest.raises(OSError, match="symbolic links"):
            SharedMemoryGroup(f"{name}-link", 1, 2, timeout_s=1)
        link.unlink()
    finally:
        path.unlink()


def test_too_little_shared_memory_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shm, "SHM_FOLDER", tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="max_num_batched_tokens") as error:
        SharedMemoryGroup("full", 0, 1, slot_bytes=(2**20,), timeout_s=1)
    assert error.value.errno == errno.ENOSPC and "needs 2.0 MiB" in str(error.value)
    assert list(tmp_path.iterdir()) == []
