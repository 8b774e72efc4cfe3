"""The check beside the start: its warnings are told once, and what it has against a configuration comes first."""

from types import SimpleNamespace
from typing import Any

import pytest

import cluster.check
from cluster import serve
from cluster.serve import BackgroundCheck, ServerError


class UnfitError(ValueError):
    """What the check of these tests raises."""


def _check(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> BackgroundCheck:
    """A check of a configuration that nobody reads: `outcome` is raised, or its warnings."""

    def check(config: object, num_api_keys: int) -> SimpleNamespace:
        assert (config, num_api_keys) == ("configuration", 3)
        if isinstance(outcome, Exception):
            raise outcome
        return SimpleNamespace(warnings=outcome)

    monkeypatch.setattr(cluster.check, "check", check)
    return BackgroundCheck("configuration", 3)


def test_warnings_are_told_once(monkeypatch, capsys) -> None:
    monkeypatch.setattr(serve.console, "file", None)
    check = _check(monkeypatch, ["few cores", "no keys"])
    check.tell()
    check.tell()
    assert check.done()
    assert capsys.readouterr().out == "  warning: few cores\n  warning: no keys\n"


def test_a_failed_start_is_told_by_the_check_if_it_knows_better(monkeypatch) -> None:
    def fail(*args: object) -> None:
        raise ServerError("start failed at stage 'group'")

    monkeypatch.setattr(serve, "_start", fail)
    unfit = _check(monkeypatch, UnfitError("kernels.attention: no GPU"))
    with pytest.raises(UnfitError, match=r"kernels\.attention"):
        serve._start_checked(None, (), None, unfit)
    with pytest.raises(ServerError, match="stage 'group'"):
        serve._start_checked(None, (), None, _check(monkeypatch, []))
