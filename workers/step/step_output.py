"""The results of one forward for the sequences of its batch, from the runner to the scheduler. No tensors."""

from dataclasses import dataclass, replace

from kernels.routing.expert_load import LoadSample
from workers.wire.request import RequestOutput, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Seconds of one step by part: `prepare` on the host; `forward` and `sample` on a GPU, if any."""

    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Sampling sequences are the sequences of the batch that get a new token, in its order.

    token_ids        one for each sampling sequence, or a number of `workers.sampling.no_token`
    logprobs         one for each of token_ids, None for a request without logprobs; None if no request wants them
    prompt_logprobs  by request id, for prompts that this step completed; None if there are none
    expert_load      None in steps that do not read it
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] | None = None

    times: RunTimes = RunTimes()
    expert_load: LoadSample | None = None

    def attach(self, outputs: list[RequestOutput | None]) -> list[RequestOutput]:
        """Return `outputs`, one for each sampling sequence, with the log-probabilities of each request.

        None in `outputs` stands for a sequence that has ended; it is left out.
        """
        if self.logprobs is None and self.prompt_logprobs is None:
            return [output for output in outputs if output is not None]
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
            if output is not None
        ]
