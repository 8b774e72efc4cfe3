"""What cannot run on a machine, looked up no further than is asked: some packages take seconds to import."""

from collections.abc import Callable, Iterator, Mapping


class Missing(Mapping[str, str]):
    """Backend name to why it cannot run at all.

    known   what was found by looking
    later   by name, what looks when that name is asked for, and gives the reason or None; `known` comes first
    """

    def __init__(
        self,
        known: Mapping[str, str],
        later: Mapping[str, Callable[[], str | None]] | None = None,
    ):
        self._known, self._later = known, later or {}

    def __getitem__(self, name: str) -> str:
        if name in self._known:
            return self._known[name]
        reason = self._later[name]()
        if reason is None:
            raise KeyError(name)
        return reason

    def __iter__(self) -> Iterator[str]:
        yield from self._known
        for name, look in self._later.items():
            if name not in self._known and look() is not None:
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __or__(self, other: "Missing") -> "Missing":
        """Of both; the same name must not be in both."""
        assert not (self._names() & other._names()), (self._names(), other._names())
        return Missing({**self._known, **other._known}, {**self._later, **other._later})

    def _names(self) -> set[str]:
        return {*self._known, *self._later}
