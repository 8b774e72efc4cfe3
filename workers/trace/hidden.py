"""How much of the communication of a step is hidden: two shares, with the sentence that defines each.

Compute that is slower beside an all-to-all (fewer SMs, a lower clock, shared memory bandwidth) lowers the saved share,
not the covered share. So nearly all communication can be covered while only half of its time is saved.
"""

COVERED = (
    "covered: of the time in which a rank waits for an all-to-all or computes while one is in flight, the share in "
    "which it computes"
)
SAVED = "saved: 1 - (time that the all-to-alls add to the step in ubatches) / (time that they add to the whole step)"


def covered_share(covered: float, exposed: float) -> float:
    """Return the share of communication during which compute runs, 0 to 1; 0 without communication.

    covered   time in which the rank computes while an all-to-all is in flight
    exposed   time in which it waits for an all-to-all and computes nothing
    """
    total = covered + exposed
    return covered / total if total else 0.0


def saved_share(added_ubatched: float, added_whole: float) -> float | None:
    """Return the share of the whole step's communication time that ubatches save; None if it adds no time.

    At most 1; below 0 where ubatches add more.
    """
    return 1 - added_ubatched / added_whole if added_whole > 0 else None
