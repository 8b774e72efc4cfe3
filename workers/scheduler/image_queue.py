"""Sequences that wait for the embeddings of their images, outside of the work of the scheduler. Knows no tower."""

from collections.abc import Callable
from functools import partial

from workers.images.encoder import ImageEncoder
from workers.images.step_share import StepShare
from workers.step.images import problem_of
from workers.step.sequence import Sequence
from workers.step.step_sync import StepPlan
from workers.wire.request import EngineRequest


class ImageQueue:
    """The sequences of one scheduler that wait for `encoder`. All methods belong to the thread of the step loop.

    waiting   by the id of the request
    notify    notify(request_id): `take` may find the sequence; called on any thread
    """

    def __init__(self, encoder: ImageEncoder):
        self.waiting: dict[str, Sequence] = {}
        self.notify: Callable[[str], None] = lambda request_id: None
        self._encoder, self._share = encoder, StepShare()

    def refusal(self, request: EngineRequest) -> str | None:
        """Return why the images of a request can never be computed here, or None."""
        spec, limits = self._encoder.spec, self._encoder.limits
        problem = problem_of(request.images, len(request.prompt_token_ids))
        if problem is not None:
            return problem
        for number, image in enumerate(request.images):
            if (problem := spec.problem(image)) is not None:
                return f"image {number}: {problem}"
            if image.num_tokens > limits.image:
                return (
                    f"image {number} has {image.num_tokens} tokens; this rank takes images of at most {limits.image} "
                    "(scheduler.max_image_tokens)"
                )
        total = sum({image.digest: image.num_tokens for image in request.images}.values())
        if total > limits.cache:
            return (
                f"the images have {total} tokens; this rank keeps the embeddings of {limits.cache} at most "
                "(cache.image_tokens)"
            )
        return None

    def holds(self, seq: Sequence, num_cached: int) -> bool:
        """Return whether `seq` has the embeddings of its tokens from `num_cached` on; else it waits here for them."""
        images = seq.images
        assert images is not None, "the sequence has no images"
        needed = images.from_token(num_cached)
        if images.covers(needed):
            return True
        images.release()
        request_id = seq.request.request_id
        order = self._encoder.order(needed, partial(self.notify, request_id))
        images.hold(order, needed)
        if order.complete:
            return True
        # The order may be complete from now on: then the notice comes for the sequence that waits.
        self.waiting[request_id] = seq
        if order.error is not None:
            self.notify(request_id)
        return False

    def take(self, request_id: str) -> Sequence | None:
        """Return a sequence that waits no longer, because its order is complete or has failed; None if it has left."""
        seq = self.waiting.get(request_id)
        if seq is None or seq.images is None or seq.images.pending:
            return None
        return self.waiting.pop(request_id)

    def drop(self, seq: Sequence) -> bool:
        """Let `seq` wait no longer, because its request has ended; return whether it waited."""
        return self.waiting.pop(seq.request.request_id, None) is not None

    def gauges(self) -> dict[str, int]:
        """Return the statistics of images by name."""
        encoder = self._encoder
        return {
            "images_waiting": len(self.waiting),
            "images_computed": encoder.num_computed,
            "images_found": encoder.num_found,
        }

    def follow(self, plan: StepPlan) -> None:
        """Set the pace of the encoder beside a step of the group; without decodes no stream waits for the step."""
        encoder, per_step = self._encoder, self._encoder.limits.per_step
        if not (plan.run and plan.decodes):
            encoder.pace.free()
        elif per_step is None:
            encoder.pace.stepped(self._share.tokens(plan, encoder.token_s))
        else:
            encoder.pace.stepped(per_step + plan.prefill_tokens)

    def observe(self, plan: StepPlan, gap_s: float) -> None:
        """Note a step that ended `gap_s` seconds after the step before it."""
        self._share.observe(plan, gap_s, beside=self._encoder.pace.took())
