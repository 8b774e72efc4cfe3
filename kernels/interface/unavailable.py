"""The backends that a machine cannot run, probed one by one: some packages take seconds to import."""

from collections.abc import Callable, Iterator, Mapping


class Unavailable(Mapping[str, str]):
    """Backend as "seam.name" to why it cannot run. Each probe runs once, when its backend is first looked up.

    probes   backend to a function that returns the reason, or None for a backend that can run
    """

    def __init__(self, probes: Mapping[str, Callable[[], str | None]]):
        self._probes = probes
        self._found: dict[str, str | None] = {}

    def __getitem__(self, backend: str) -> str:
        if backend not in self._found:
            self._found[backend] = self._probes[backend]()
        reason = self._found[backend]
        if reason is None:
            raise KeyError(backend)
        return reason

    def __iter__(self) -> Iterator[str]:
        return (backend for backend in self._probes if backend in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
