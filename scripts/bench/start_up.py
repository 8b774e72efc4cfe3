"""Times starts of a server to its first answer: nothing compiled, compiled before, and compiled kernels elsewhere.

    python -m scripts.bench.start_up --fp8 --ranks 1 --out docs/results/gpu-start

cold     an empty folder of compiled kernels (`kernels.cache`)
warm     the same folder again
shipped  a copy of the folder at another path, as an image has it; flashinfer's modules are sealed before
Stages are in seconds, as the server's console names them.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from kernels.attention.flashinfer_modules import seal_modules
from scripts.bench import ROOT
from scripts.bench.gpu_serving import STAGE, START_TIMEOUT_S
from scripts.bench.inputs import model_copy, names_of, server_config
from scripts.bench.results import add_options, origin, save
from scripts.bench.servers import ServerProcess, free_port, phalanx

STARTS = ("cold", "warm", "shipped")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gpu-bench.yaml")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--fp8", action="store_true", help="the model as a checkpoint in FP8")
    parser.add_argument(
        "--starts", type=names_of(STARTS), default=list(STARTS), help="which starts, in this order"
    )
    parser.add_argument("--set", action="append", default=[], help="setting of the server")
    parser.add_argument("--logs", type=Path, help="keep the servers' output in this folder")
    add_options(parser, "gpu-start", drawn=False)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-start-") as folder:
        measure(options, Path(folder))


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Start the servers one after another, and save after each."""
    settings = [f"cluster.ranks={options.ranks}", *options.set]
    source = server_config(options.config, settings).model.folder
    model = model_copy(source, folder / source.name, fp8=options.fp8)
    settings, kernels = [f"model.path={model}", *settings], folder / "kernels"
    report: dict[str, Any] = {
        "method": __doc__,
        **origin(options.ranks, options.commit, served=True),
        "model": model.name,
        "fp8": options.fp8,
        "ranks": options.ranks,
        "settings": options.set,
        "starts": {},
    }
    (options.logs or folder).mkdir(parents=True, exist_ok=True)
    for name in options.starts:
        if name == "shipped":
            seal_modules(kernels)
            kernels = kernels.rename(folder / "elsewhere")
        log = (options.logs or folder) / f"{name}.log"
        of_start = [*settings, f"kernels.cache={kernels}"]
        found = {**start(options.config, of_start, model.name, log), **contents(kernels)}
        report["starts"][name] = found
        save(options.out, report)
        print(name, json.dumps(found), file=sys.stderr)


def start(config: Path, settings: list[str], name: str, log: Path) -> dict[str, Any]:
    """Start a server until it has answered, and stop it."""
    port = free_port()
    command = phalanx("serve", config, [f"serve.port={port}", *settings])
    server = ServerProcess(command, port, name, log, START_TIMEOUT_S)
    server.stop()
    stages = STAGE.findall(log.read_text(errors="replace"))
    return {
        "start_to_first_answer_s": round(server.start_s, 2),
        "stages_s": {stage: float(seconds) for stage, seconds in stages},
    }


def contents(kernels: Path) -> dict[str, Any]:
    """Return what the folder of compiled kernels holds."""
    files = [file for file in kernels.rglob("*") if file.is_file()]
    count = {suffix: sum(file.suffix == suffix for file in files) for suffix in (".cubin", ".so")}
    return {"kernels": count, "megabytes": round(sum(f.stat().st_size for f in files) / 1e6, 1)}


if __name__ == "__main__":
    main()
