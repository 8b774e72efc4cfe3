"""The facts of one node by which `phalanx check --cluster` compares nodes. Uses no GPU memory and needs no torch.

GPUs are described by nvidia-smi, because a CUDA context would take memory from a running server.
"""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from workers.stats.versions import source_digest

ROOT = Path(__file__).parents[2]
OWN_PACKAGES = ("cluster", "workers", "kernels")
# Distributions that the kernels use where they are installed, beside all requirements of Phalanx.
OPTIONAL = (
    *("triton", "flashinfer-python", "flashinfer-jit-cache", "sgl-deep-gemm", "deep-gemm"),
    *("sgl-deep-ep", "deep-ep", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    *("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13", "nixl-cu12"),
)
RDMA_DEVICES = Path("/sys/class/infiniband")
SMI_TIMEOUT_S = 30.0
NONE = "none"


@dataclass(frozen=True)
class NodeFacts:
    """What `phalanx check --cluster` compares and shows.

    equal            facts that must be equal on all nodes, by name
    free_memory      bytes that processes can allocate
    free_gpu_memory  bytes of each GPU
    free_shm         bytes in /dev/shm
    """

    equal: dict[str, str]
    free_memory: int
    free_gpu_memory: tuple[int, ...]
    free_shm: int


def node_facts() -> NodeFacts:
    """Look at this node."""
    gpus = _gpus()
    names = sorted({gpu["name"] for gpu in gpus})
    equal = {
        "CPU": f"{os.cpu_count()} cores, {platform.machine()}",
        "GPUs": f"{len(gpus)} x {', '.join(names)}" if gpus else NONE,
        "GPU memory": ", ".join(sorted({f"{gpu['memory.total']} MiB" for gpu in gpus})) or NONE,
        "driver": ", ".join(sorted({gpu["driver_version"] for gpu in gpus})) or NONE,
        "NVLink": _links("-m") if gpus else NONE,
        "P2P": _links("-p2p", "r") if gpus else NONE,
        "RDMA": ", ".join(rdma_devices()) or NONE,
        "Python": platform.python_version(),
        "source": source_digest(ROOT / package for package in OWN_PACKAGES),
        **dict(_versions()),
    }
    return NodeFacts(
        equal,
        _available_memory(),
        tuple(int(gpu["memory.free"]) * 2**20 for gpu in gpus),
        shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
    )


def rdma_devices(folder: Path = RDMA_DEVICES) -> list[str]:
    """Return each port of each RDMA device with its state and rate."""
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        state, rate = (_read(port / name) for name in ("state", "rate"))
        found.append(f"{port.parent.parent.name}:{port.name} {state.split(':')[-1].strip()} {rate}")
    return found


def matrix(text: str) -> str:
    """Return the matrix between GPUs that `nvidia-smi topo` prints: one word if all pairs have it, else rows."""
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*GPU\d+\s+(?!GPU)", line)]
    cells = [row[1 : len(rows) + 1] for row in rows]
    pairs = {
        cell for index, row in enumerate(cells) for other, cell in enumerate(row) if other != index
    }
    if not pairs:
        return NONE
    return pairs.pop() if len(pairs) == 1 else "; ".join(" ".join(row) for row in cells)


def _gpus() -> list[dict[str, str]]:
    fields = ("name", "memory.total", "memory.free", "driver_version")
    query = f"--query-gpu={','.join(fields)}"
    lines = _smi(query, "--format=csv,noheader,nounits").splitlines()
    return [
        dict(zip(fields, map(str.strip, line.split(",")), strict=True)) for line in lines if line
    ]


def _links(*options: str) -> str:
    return matrix(_smi("topo", *options))


def _smi(*arguments: str) -> str:
    """Return what nvidia-smi prints; "" where there is no GPU."""
    try:
        ended = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


def _versions() -> Iterator[tuple[str, str]]:
    """Yield the installed version of each distribution that Phalanx requires or can use."""
    yield "phalanx", _version("phalanx")
    names = set(OPTIONAL)
    try:
        for line in metadata.requires("phalanx") or ():
            if "extra ==" not in line and (found := re.match(r"[\w.-]+", line)):
                names.add(found[0].lower())
    except metadata.PackageNotFoundError:
        pass  # run from a checkout that is not installed
    for name in sorted(names):
        version = _version(name)
        if version != NONE or name not in OPTIONAL:
            yield name, version


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return NONE


def _available_memory() -> int:
    fields: Mapping[str, str] = dict(
        line.split(":", 1) for line in _read(Path("/proc/meminfo")).splitlines()
    )
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
