"""Judges by the beats of a rank whether messages between the rank and an ingress were lost. No I/O.

A rank sends a beat every BEAT_S. A missing message before it is detected by the receiver of the tokens, so a beat only
has to prove that the rank lives and that the ingress's messages have arrived.
"""

import time
from collections import deque
from collections.abc import Callable

from kernels.host.awake import AwakeTime
from workers.wire.token_stream import BEAT_S

ARRIVAL_BEATS = 5
"""Beats within which a message must have arrived; a message takes some milliseconds."""

SILENCE_S = 7.5 * BEAT_S
"""Time without a beat, after which connections are opened again. ZeroMQ notices a dead one in 7 s; a client looks every
2 s, so that it gives up a rank that it cannot reach within 10 s."""


class StreamWatch:
    """The stream of one rank. `silence` is called at least every SILENCE_S / 2.

    clock   returns seconds
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._awake = AwakeTime(SILENCE_S / 2, clock)
        self._last_beat = self._counted = 0.0  # seconds awake
        self._sent = deque([0], maxlen=ARRIVAL_BEATS)  # messages sent before each of the last beats

    def beat(self, num_taken: int | None, num_sent: int) -> str | None:
        """Take a beat; return what was lost, if anything was.

        num_taken   messages that have arrived at the rank; None after one is missing
        num_sent    messages that were sent to it
        """
        now = self._last_beat = self._awake.look()
        due = self._sent[0]
        # After a pause of this process many beats come at once, of times before what it has sent now.
        if now - self._counted >= BEAT_S / 2:
            self._counted = now
            self._sent.append(num_sent)
        if num_taken is None:
            return "the rank misses a message of this ingress"
        if num_taken < due:
            return f"{num_taken} of {due} messages of this ingress have arrived at the rank"
        return None

    def silence(self) -> str | None:
        """Return the reason to give the stream up if no beat has come for SILENCE_S in which this process was awake."""
        silent_s = self._awake.look() - self._last_beat
        if silent_s < SILENCE_S:
            return None
        return f"the rank has sent nothing for {silent_s:.0f} s"
