"""The own time of a rank's steps, and the work that it was for."""

from kernels.host.waits import add_wait, waited_s, waiting
from workers.stats.own_work import OwnWork, WorkMeter
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import DECODE, PROMPT, ScheduledSequence, Sequence
from workers.step.step_sync import StepPlan
from workers.wire.request import EngineRequest, SamplingParams


def part(num_computed: int, num_new: int) -> ScheduledSequence:
    request = EngineRequest(
        request_id="a",
        ingress_id="i",
        prompt_token_ids=[1] * 9,
        params=SamplingParams(max_tokens=1),
    )
    seq = Sequence.from_request(request)
    seq.num_computed_tokens = num_computed
    return ScheduledSequence(seq, PROMPT if num_new > 1 else DECODE, num_new, 1)


class Clocks:
    def __init__(self) -> None:
        self.now = self.waited = 100.0
        self.meter = WorkMeter(lambda: self.now, lambda: self.waited)

    def spend(self, own: float, wait: float) -> None:
        self.now += own + wait
        self.waited += wait


def test_a_step_counts_from_its_launch_to_the_next_or_to_a_pause():
    at = Clocks()
    decodes = ScheduledBatch.of([part(20, 1), part(30, 1)])
    at.spend(7, 7)
    at.meter.launch(decodes, StepPlan(True, (2, 1), padded_tokens=8))
    assert at.meter.total == OwnWork(), "the time before the first launch belongs to no step"
    at.spend(2, 3)
    at.meter.launch(ScheduledBatch.of([part(4, 5)]), StepPlan(True, (5, 1)))
    assert at.meter.total == OwnWork(1, 2.0, 5.0, rows=8, seqs=2, keys=21 + 31)
    at.spend(1, 1)
    at.meter.pause()
    assert at.meter.total == OwnWork(2, 3.0, 7.0, rows=13, seqs=3, keys=52 + 45)
    at.spend(50, 50)  # it sleeps
    at.meter.launch(ScheduledBatch.of([]), StepPlan(True, (0, 1)))
    at.spend(1, 0)
    at.meter.sampled(6)
    at.meter.pause()
    at.meter.pause()
    assert at.meter.total == OwnWork(3, 4.0, 8.0, rows=14, seqs=3, keys=97, expert_rows=6)


def test_the_waits_of_a_thread():
    before = waited_s()
    add_wait(2.5)
    with waiting():
        pass
    assert before + 2.5 <= waited_s() < before + 3.5
