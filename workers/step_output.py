"""What one forward gave the sequences of its batch, on its way from the runner to the scheduler. No tensors."""

from dataclasses import dataclass, replace

from workers.request import RequestOutput, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The sampling sequences are those of the batch that get a new token, in its order.

    token_ids        one for each sampling sequence, -1 = its logits were not finite
    logprobs         one for each of token_ids, None for a sequence that did not ask; None when nobody asked
    prompt_logprobs  by request id, for prompts that this step completed; None when there are none
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] | None = None

    @property
    def has_logprobs(self) -> bool:
        """There is something for `attach` to do."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    def attach(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """`outputs`, one for each sampling sequence, with the log-probabilities that each one asked for."""
        logprobs = self.logprobs or [None] * len(outputs)
        of_prompts = self.prompt_logprobs or {}
        return [
            output
            if not output.token_ids
            else replace(
                output,
                logprobs=None if found is None else [found],
                prompt_logprobs=of_prompts.get(output.request_id),
            )
            for output, found in zip(outputs, logprobs, strict=True)
        ]
