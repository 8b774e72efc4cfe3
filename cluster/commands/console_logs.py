"""Shows the log lines of ranks, supervisor and ingresses on the console of `phalanx serve`, from every node.

Ray brings a worker's output to the driver, but prints it behind a coloured prefix, without lines that look alike, and
together with whatever its own processes and C libraries say. Our lines say themselves who wrote them.
"""

import json
import sys
from datetime import UTC, datetime
from typing import Any

from workers.stats.log import LogFormat

# The classes of our actors, as Ray names them.
ACTORS = ("RankActor", "Supervisor", "ServeReplica:")


def show_logs(log_format: LogFormat) -> None:
    """Call after ray.init(log_to_driver=True)."""
    # Private, and checked by a test: the public switches can neither take the prefix away nor choose the processes.
    from ray._private.ray_logging import global_worker_stdstream_dispatcher

    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
    global_worker_stdstream_dispatcher.remove_handler("phalanx")
    global_worker_stdstream_dispatcher.add_handler(
        "phalanx", lambda batch: print_batch(batch, log_format)
    )


def print_batch(batch: dict[str, Any], log_format: LogFormat) -> None:
    """Print what one of our processes wrote to its standard error; ours and the last words of a crash alike."""
    name = batch.get("actor_name") or ""
    if not batch.get("is_err") or not name.startswith(ACTORS):
        return
    lines = batch.get("lines", [])
    if log_format == "json":
        lines = [line if line.startswith("{") else _wrapped(line, name) for line in lines]
    # One write: the spinner of the start and other threads write too.
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()


def _wrapped(line: str, process: str) -> str:
    """A line that did not come from a logger, such as a library's."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": "warning", "process": process, "message": line})
