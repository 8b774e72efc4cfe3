"""The fence of a rank process: the epoch that it is in, and the first epoch that it may join. Pure."""


class StaleEpochError(RuntimeError):
    """A call of an epoch that this rank is not in; the caller must fetch the current epoch first."""


class Fence:
    """Calls that belong to an epoch carry its number; another number than that of `join` raises StaleEpochError.

    epoch   the epoch that the rank is in, -1 in none
    first   the first epoch that the rank may join
    """

    def __init__(self, rank: int, epoch: int = -1, first: int = 0):
        self.rank = rank
        self.epoch, self.first = epoch, first

    def join(self, epoch: int) -> None:
        """Enter `epoch`."""
        if epoch < self.first:
            raise StaleEpochError(
                f"rank {self.rank} joins no epoch before {self.first}, not {epoch}"
            )
        self.epoch = epoch

    def leave(self, first: int) -> None:
        """Leave the epoch, and refuse all epochs before `first` from now on."""
        if first <= self.epoch or first < self.first:
            raise StaleEpochError(
                f"rank {self.rank} is in epoch {self.epoch}, fenced from {self.first}, not {first}"
            )
        self.first, self.epoch = first, -1

    def check(self, epoch: int) -> None:
        """Raise StaleEpochError unless the rank is in `epoch`."""
        if epoch != self.epoch:
            raise StaleEpochError(f"rank {self.rank} is in epoch {self.epoch}, not {epoch}")
