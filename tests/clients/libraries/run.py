"""Run every check of a module against a server: `run.py URL FOLDER MODULE`.

A module has functions `check_NAME(url, api)` and the APIs that its client library speaks. FOLDER/MODULE.json becomes a
JSON object of the failures: {"NAME of API": traceback, or null}.
"""

import importlib
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType


def run(module: ModuleType, url: str) -> dict[str, str | None]:
    """Each check once per API: those of its own `apis`, otherwise those of the module."""
    report: dict[str, str | None] = {}
    for name, check in vars(module).items():
        if not name.startswith("check_"):
            continue
        for api in getattr(check, "apis", module.APIS):
            try:
                check(url, api)
            except Exception:
                report[f"{name} of {api}"] = traceback.format_exc()
            else:
                report[f"{name} of {api}"] = None
    return report


def main(url: str, folder: str, name: str) -> None:
    found = run(importlib.import_module(name), url)
    (Path(folder) / f"{name}.json").write_text(json.dumps(found))


main(*sys.argv[1:])
