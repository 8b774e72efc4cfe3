"""How the steps of a configuration will run: in CUDA graphs or not, whole or in ubatches, and why."""

from collections.abc import Iterator, Sequence

import torch

from cluster.commands.check_host_memory import SessionBytes
from cluster.commands.check_memory import RankRow
from cluster.config.errors import ConfigError, Problem
from kernels.all2all.base import AllToAll
from kernels.backends.select import Selection
from kernels.host.hopper import on_hopper
from workers.config import OverlapConfig, RankConfig, SchedulerConfig
from workers.overlap.policy import OverlapPolicy, configured, too_many_sms
from workers.rank.device_memory import size
from workers.runner.graph_sizes import NO_PROMPTS, GraphSizes, graphs_off, graphs_to_capture
from workers.specs.model import ModelConfig
from workers.weights.tensors import DTYPE_BYTES

MEASURED = "measured at the start"


def graph_line(
    scheduler: SchedulerConfig,
    selection: Selection,
    device: str,
    rows_per_seq: int = 1,
    *,
    decodes: bool = True,
    max_rows: int | None = None,
) -> tuple[GraphSizes, str]:
    """The sizes of the CUDA graphs, and the reason. Raises GraphsUnavailableError if demanded graphs cannot exist.

    A GPU that is not here is taken for a Hopper. decodes: whether the model decodes. max_rows: as in graphs_to_capture.
    """
    hopper = not torch.cuda.is_available() or on_hopper()
    mixed = selection.attention_class.captures_prompts(hopper=hopper)
    sizes = graphs_to_capture(
        scheduler,
        selection,
        torch.device(device),
        mixed=mixed,
        rows_per_seq=rows_per_seq,
        decodes=decodes,
        max_rows=max_rows,
    )
    if not sizes:
        return sizes, f"off: {graphs_off(scheduler.cuda_graphs, selection, device) or NO_PROMPTS}"
    return sizes, f"on: {sizes}"


def slow_for_want_of_graphs(scheduler: SchedulerConfig, selection: Selection) -> Iterator[str]:
    """Warn of backends that prevent CUDA graphs without a setting that turns graphs off."""
    unsupported_reason = selection.graph_unsupported_reason
    if scheduler.cuda_graphs == "auto" and unsupported_reason is not None:
        yield f"small steps will be slow, since there are no CUDA graphs: {unsupported_reason}"


def overlap_lines(config: OverlapConfig, selection: Selection) -> tuple[int, dict[str, str]]:
    """The number of ubatches, 0 if no step is ever cut; the resolved value of each setting."""
    all2all = selection.all2all_class
    policy, unknown = configured(config, all2all)
    if not policy.enabled and not unknown:
        return 0, {"ubatches": f"off: {policy.reasons['decode']}"}
    lines = {"ubatches": f"{config.num_ubatches} ubatches in each step that is cut"}
    for phase, least, what in (
        ("decode", policy.min_decode_tokens, "sequences"),
        ("prefill", policy.min_prefill_tokens, "tokens"),
    ):
        lines[phase] = f"from {least} {what} of a rank on ({policy.reasons[phase]})"
        if phase in unknown:
            lines[phase] = f"{MEASURED}: from how many {what} of a rank on it pays"
    lines["comm_sms"] = _comm_sms(config, policy, all2all)
    return config.num_ubatches, lines


def _comm_sms(config: OverlapConfig, policy: OverlapPolicy, all2all: type[AllToAll]) -> str:
    if not all2all.sm_choices:
        ignored = "" if config.comm_sms == "auto" else ", overlap.comm_sms is ignored"
        return f"no limit: {all2all.name} takes none{ignored}"
    if policy.comm_sms is None:
        return f"{MEASURED}: no limit or {', '.join(map(str, all2all.sm_choices))}"
    return f"{policy.comm_sms} ({policy.reasons['comm_sms']})"


def cascade_line(config: RankConfig, selection: Selection, model: ModelConfig) -> str:
    """Whether decodes read leading blocks that they share once."""
    if config.kernels.cascade == "off":
        return "off: kernels.cascade is off"
    if not config.cache.prefix_caching:
        return "off: cache.prefix_caching is false, so sequences share no blocks"
    if model.pooling is not None:
        return "off: the model has no decodes"
    refusal = selection.attention_class.cascade_refusal(model.attention_specs)
    if refusal is not None:
        return f"off: {refusal}"
    return (
        "on: decodes that begin with equal KV blocks read them once, where enough tokens are shared"
    )


def speculation_line(
    config: RankConfig, model: ModelConfig, ranks: Sequence[RankRow], session: SessionBytes
) -> str:
    """The drafter, and the memory that drafts add: rows with logits, inputs beside states, a draft model."""
    speculation = config.speculation
    if speculation.method == "off":
        head = (
            ""
            if model.mtp is None
            else ", and mtp if the checkpoint has the head of its config.json"
        )
        return f"off; ngram is possible{head}"
    more = config.max_logits_rows - config.scheduler.max_num_seqs
    chosen = "as many as pay" if speculation.adaptive else "always"
    states = ""
    if model.linear_specs:
        specs = config.cache.cached_states(model.linear_specs, speculation.most_drafts)
        dtype = config.model.dtype
        assert dtype != "auto", "a RankConfig has the checkpoint's dtype in its place"
        each = sum(spec.draft_bytes(DTYPE_BYTES[dtype]) for spec in specs)
        inputs = size((1 + config.scheduler.max_num_seqs) * each)
        states = f", inputs of drafts beside the states of linear attention {inputs}"
    draft = ""
    if speculation.uses_model:
        weights = size(max(row.draft_bytes for row in ranks))
        share = 100 * session.draft_block / session.block
        draft = (
            f", weights of the draft model {weights}, its K and V {share:.1f} % of each KV block"
        )
    return (
        f"{speculation.method}: up to {speculation.num_draft_tokens} drafts of a sequence in a step, {chosen}; "
        f"{more} more rows of logits take {size(4 * more * model.vocab_size)}{states}{draft}"
    )


def check_comm_sms(config: OverlapConfig, selection: Selection, num_ubatches: int) -> None:
    """Raise ConfigError if overlap.comm_sms takes all multiprocessors of a GPU of this machine."""
    all2all = selection.all2all_class
    comm_sms = configured(config, all2all)[0].comm_sms
    unlimited = not num_ubatches or not all2all.sm_choices
    if comm_sms is None or unlimited or not torch.cuda.is_available():
        return
    found = torch.cuda.get_device_properties(0).multi_processor_count
    if message := too_many_sms(comm_sms, found, all2all.sm_choices):
        raise ConfigError.of("configuration", [Problem("overlap.comm_sms", message)])


def never_reached(config: OverlapConfig, scheduler: SchedulerConfig) -> Iterator[str]:
    """Warn of thresholds that no step reaches."""
    for key, most in (
        ("min_decode_tokens", "max_num_seqs"),
        ("min_prefill_tokens", "max_num_batched_tokens"),
    ):
        least, limit = getattr(config, key), getattr(scheduler, most)
        if config.mode != "off" and least != "auto" and least > limit:
            yield f"overlap.{key} is {least}, but scheduler.{most} is {limit}: no such step is ever cut"
