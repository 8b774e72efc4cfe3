"""A checkpoint that one node has reaches another: whole, verified, from where an earlier copy ended."""

import hashlib
import os
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from kernels.host.file_locks import lock_file
from workers.weights import checkpoint_copy
from workers.weights.checkpoint_copy import CheckpointServer, CopyAddress, CopyError, copy_files
from workers.weights.checkpoint_files import NUM_SAMPLES, SAMPLE_BYTES, file_facts, find_files

NAMES = frozenset({"config.json", "model.safetensors", "1_Pooling/config.json"})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("[]")
    (folder / "secret.txt").write_text("not of the checkpoint")
    (folder / "model.safetensors").write_bytes(os.urandom(9_000_001))
    return folder


@pytest.fixture
def server(source: Path):
    server = CheckpointServer(source, NAMES, "127.0.0.1")
    yield server
    server.close()


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def copied(server: CheckpointServer, source: Path, target: Path) -> list[tuple[int, int]]:
    reports: list[tuple[int, int]] = []
    files = {name: file_facts(source / name) for name in NAMES}
    copy_files(server.address, files, target, lambda *progress: reports.append(progress))
    for name in NAMES:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert files_in(target) == NAMES, "no part is left"
    return reports


def refuses(address: CopyAddress, name: str) -> bool:
    """Whether the server closes the connection without a byte of a file."""
    try:
        with checkpoint_copy._ask(address, {"read": name, "from": 0}) as answer:
            return answer.recv(1) == b""
    except ConnectionError:  # the server closed before it had read the whole request
        return True


def test_a_copy_is_whole_and_reports_its_bytes(
    server: CheckpointServer, source: Path, tmp_path: Path
) -> None:
    reports = copied(server, source, tmp_path / "new" / "folder")
    assert reports[-1] == (9_000_005, 9_000_005)


def test_a_begun_copy_continues(
    server: CheckpointServer,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    data = (source / "model.safetensors").read_bytes()
    (target / "model.safetensors.part").write_bytes(data[:8_000_000])
    (target / "config.json").write_text("{}")
    requests = []
    ask = checkpoint_copy._ask
    monkeypatch.setattr(
        checkpoint_copy,
        "_ask",
        lambda address, request: requests.append(request) or ask(address, request),
    )
    copied(server, source, target)
    assert {"read": "model.safetensors", "from": 8_000_000} in requests
    assert not any(request.get("read") == "config.json" for request in requests)


def test_a_wrong_begin_is_copied_anew(
    server: CheckpointServer, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "model.safetensors.part").write_bytes(b"of another model" * 1000)
    reports = copied(server, source, target)
    assert reports[-1] == (9_000_005, 9_000_005)


def test_files_that_never_match_are_an_error(
    server: CheckpointServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = hashlib.sha256(b"another").digest()
    monkeypatch.setattr(checkpoint_copy, "_digest", lambda path: another)
    facts = {"model.safetensors": file_facts(source / "model.safetensors")}
    with pytest.raises(CopyError, match="SHA-256 differs"):
        copy_files(server.address, facts, tmp_path / "target")
    assert not (tmp_path / "target" / "model.safetensors").exists()


def test_a_lost_connection_names_the_file_and_the_node(source: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = CopyAddress("127.0.0.1", listener.getsockname()[1], b"key")

        def refuse() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=refuse, daemon=True).start()
        facts = {"config.json": file_facts(source / "config.json")}
        with pytest.raises(CopyError, match=r"config.json cannot be copied from 127.0.0.1 in 3"):
            copy_files(address, facts, tmp_path / "target")
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("name", ["secret.txt", "../source/secret.txt", "/etc/passwd"])
def test_only_the_files_of_the_checkpoint_leave_the_node(
    server: CheckpointServer, name: str
) -> None:
    assert refuses(server.address, name)


def test_a_wrong_key_gets_nothing(server: CheckpointServer) -> None:
    wrong = CopyAddress(server.address.host, server.address.port, b"guessed")
    assert "key" not in repr(wrong)
    assert refuses(wrong, "config.json") and not refuses(server.address, "config.json")


def test_a_full_disk_is_an_error_before_the_first_byte(
    server: CheckpointServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        checkpoint_copy.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})
    )
    facts = {"model.safetensors": file_facts(source / "model.safetensors")}
    with pytest.raises(CopyError, match=r"needs 0\.0 GB more"):
        copy_files(server.address, facts, tmp_path / "target")
    assert not list((tmp_path / "target").iterdir())


def test_two_copies_into_one_shared_folder(
    server: CheckpointServer, source: Path, tmp_path: Path
) -> None:
    files = {name: file_facts(source / name) for name in NAMES}
    target = tmp_path / "shared"
    failures: list[BaseException] = []

    def copy() -> None:
        try:
            copy_files(server.address, files, target)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=copy) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert files_in(target) == NAMES
    data = (target / "model.safetensors").read_bytes()
    assert data == (source / "model.safetensors").read_bytes()


def test_a_copy_that_waits_for_another_process_says_so_and_reports_its_bytes(
    server: CheckpointServer, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "shared"
    target.mkdir()
    reports: queue.SimpleQueue[int] = queue.SimpleQueue()
    files = {"model.safetensors": file_facts(source / "model.safetensors")}
    with (target / "model.safetensors.part").open("wb") as part, ThreadPoolExecutor(1) as thread:
        assert lock_file(part.fileno())
        copy = thread.submit(
            copy_files, server.address, files, target, lambda done, total: reports.put(done)
        )
        for size in (1000, 3000):
            part.truncate(size)
            while reports.get(timeout=60) != size:
                pass
        assert "model.safetensors to this shared folder; this process waits" in caplog.text
        assert f"process {os.getpid()} of this host copies" in caplog.text or not lists_locks(part)
        part.truncate(0)
        part.close()  # as the other process ends
        copy.result(60)
    data = (target / "model.safetensors").read_bytes()
    assert data == (source / "model.safetensors").read_bytes()


def lists_locks(part: BinaryIO) -> bool:
    """Whether the kernel lists the lock with the file's device, which some file systems replace."""
    facts = os.fstat(part.fileno())
    device = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}"
    return f" {device}:{facts.st_ino} " in Path("/proc/locks").read_text()


def test_a_file_that_cannot_be_copied_ends_the_wait_for_another_one(
    server: CheckpointServer, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "shared"
    target.mkdir()
    files = {
        "model.safetensors": file_facts(source / "model.safetensors"),
        "secret.txt": file_facts(source / "secret.txt"),
    }
    with (target / "model.safetensors.part").open("wb") as part:
        assert lock_file(part.fileno())
        with pytest.raises(CopyError, match=r"secret\.txt cannot be copied"):
            copy_files(server.address, files, target)


def test_a_part_that_another_process_completes_is_no_error(
    server: CheckpointServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It renames the part between a look at the part and the next one."""
    target = tmp_path / "shared"
    target.mkdir()
    part = target / "config.json.part"
    part.write_text("{}")
    exists = Path.exists

    def complete(path: Path, **options: bool) -> bool:
        found = exists(path, **options)
        if path == part and found:
            part.rename(target / "config.json")
        return found

    monkeypatch.setattr(Path, "exists", complete)
    copy_files(server.address, {"config.json": file_facts(source / "config.json")}, target)
    assert files_in(target) == {"config.json"}


def test_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    assert find_files(tmp_path / "nowhere", weights=True).missing == (
        "config.json",
        "model.safetensors",
    )
    assert find_files(tmp_path, weights=False).missing == ("config.json",)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}}'
    )
    (tmp_path / "one.safetensors").write_bytes(b"1")
    found = find_files(tmp_path, weights=True)
    assert found.missing == ("two.safetensors",)
    assert set(found.files) == {"config.json", "model.safetensors.index.json", "one.safetensors"}


def test_digests_differ_with_any_sampled_byte(tmp_path: Path) -> None:
    large = bytearray(2 * SAMPLE_BYTES * NUM_SAMPLES)
    path = tmp_path / "model.safetensors"
    digests = set()
    for changed in (None, 0, len(large) - 1):
        content = bytearray(large)
        if changed is not None:
            content[changed] = 1
        path.write_bytes(content)
        digests.add(file_facts(path).digest)
    assert len(digests) == 3
