"""Shows the log lines of ranks, supervisor and ingresses of every node on the console of `phalanx serve`.

Ray sends the output of its workers to the driver, but prints it behind a coloured prefix, drops lines that look alike,
and mixes it with the output of its own processes. Phalanx's lines name their process themselves.
"""

import json
import re
import sys
from datetime import UTC, datetime
from typing import Any

from workers.log import LogFormat

# The classes of Phalanx's actors, as Ray names them.
ACTORS = ("RankActor", "Supervisor", "ServeReplica:")

# Warnings of libraries that a user cannot act on; the log files of Ray keep them.
HARMLESS = re.compile(
    # torch tries the IPv6 and IPv4 addresses of a store in turn; it raises an error if all fail.
    r"\[W\S* (\S+ )?socket\.cpp:\d+\] \[c10d\] "
    # Some versions of transformers print it for every tokenizer; it concerns dense Mistral models of 2025.
    r"|The tokenizer you are loading from .* with an incorrect regex pattern"
)


def show_logs(log_format: LogFormat) -> None:
    """Call after ray.init(log_to_driver=True)."""
    # Private to Ray, and checked by a test: no public switch removes the prefix or selects processes.
    from ray._private.ray_logging import global_worker_stdstream_dispatcher

    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
    global_worker_stdstream_dispatcher.remove_handler("phalanx")
    global_worker_stdstream_dispatcher.add_handler(
        "phalanx", lambda batch: print_batch(batch, log_format)
    )


def print_batch(batch: dict[str, Any], log_format: LogFormat) -> None:
    """Print the standard error of one of Phalanx's processes: log lines, and the output of a crash."""
    name = batch.get("actor_name") or ""
    if not batch.get("is_err") or not name.startswith(ACTORS):
        return
    lines = [line for line in batch.get("lines", []) if not HARMLESS.search(line)]
    if log_format == "json":
        lines = [line if line.startswith("{") else _wrapped(line, name) for line in lines]
    # One write, because the spinner of the start and other threads write too.
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()


def _wrapped(line: str, process: str) -> str:
    """A line that no logger wrote, such as a C library's, as JSON."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": "warning", "process": process, "message": line})
