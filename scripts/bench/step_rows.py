"""The time of a step by its rows, of decodes and of decodes with drafts, on one rank without Ray and HTTP.

S sequences decode behind `--context` tokens, with 0 to K drafts each, in the graphs that a server replays. Drafts are
accepted by chance (speculation.accept_lengths), so weights are random. Columns: device time of the forward and of the
draft model's passes, and the time from the schedule to the tokens on the host. `break-even` is the number of tokens
that a sequence must get of a step so that drafts pay.

    python -m scripts.bench.step_rows --shape qwen3.6-35b-a3b --quantization fp8 --speculation mtp --out /tmp/rows

The dry run of scripts.bench.gpu_speculation works here too, without --ranks, --in-flight and --lengths:

    python -m scripts.bench.step_rows --config configs/local.yaml --set cluster.device=cpu --set model.path=/tmp/glm \\
        --set model.weights=dummy --sequences 1,2,4 --context 16 --out /tmp/rows
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from scripts.bench import results
from scripts.bench.gpu_serving import add_model_options, model_settings
from scripts.bench.inputs import counts, rank_config
from scripts.bench.results import markdown_table, origin_line
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous, start_stages
from workers.runner.draft_passes import draft_vote
from workers.speculation.speculator import Speculator, make_speculator
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.step_sync import PlanConfig, StepPlan, decide
from workers.step.vote import Vote
from workers.wire.request import EngineRequest, SamplingParams

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Row:
    """Milliseconds of a step, medians. rows: of the forward, without padding; graph: what the steps replayed."""

    sequences: int
    drafts: int
    rows: int
    graph: str
    forward_ms: float
    draft_ms: float
    step_ms: float


class Steps:
    """One rank, stepped by hand."""

    def __init__(self, config: Any, num_steps: int, context: int):
        self._num_steps, self._context = num_steps, context
        self._config = config
        self._random = random.Random(0)
        process = RankProcess(0, config)
        self._epoch = Epoch(process, Rendezvous("", 0, "step-rows"), timeout_s=60)
        for name in start_stages(config.device):
            self._epoch.run_stage(name, lambda done, total: None)
        speculator = make_speculator(config.speculation)
        assert speculator is not None, "speculation.method is off"
        self._speculator: Speculator = speculator

    def measure(self, num_seqs: int, num_drafts: int) -> Row:
        """Return the times of steps in which `num_seqs` sequences decode with `num_drafts` drafts each."""
        scheduler, runner = self._epoch.scheduler, self._epoch.runner
        for number in range(num_seqs):
            refused = scheduler.add(self._request(f"{num_drafts}-{number}"))
            if refused is not None:
                raise SystemExit(refused)
        found: list[tuple[float, float, float]] = []
        plan, batch = StepPlan(False, ()), ScheduledBatch.of([])
        while len(found) < WARM_UP_STEPS + self._num_steps:
            started = time.perf_counter()
            decodes = [seq for seq in scheduler.running if seq.takes_drafts]
            counts_here = len(decodes) == num_seqs
            if counts_here and num_drafts:
                for seq in decodes:
                    seq.propose([0] * num_drafts)
            batch = scheduler.schedule()
            plan = self._plan(batch)
            output = runner.launch(batch, plan)
            scheduler.launched(batch)
            step = output.wait()
            scheduler.commit(batch, step)
            if counts_here:
                took = time.perf_counter() - started
                times = step.times()
                found.append((times.forward, times.draft, took))
        for seq in list(scheduler.running):
            scheduler.abort(seq.request.request_id)
        median = [
            1e3 * statistics.median(column) for column in zip(*found[WARM_UP_STEPS:], strict=True)
        ]
        graph = f"{plan.graph_mode.name} {plan.padded_tokens}" if plan.graph_mode else "-"
        return Row(num_seqs, num_drafts, batch.num_tokens, graph, *median)

    def _request(self, name: str) -> EngineRequest:
        rows = self._config.speculation.rows_per_seq
        vocab = self._epoch.model.config.vocab_size
        return EngineRequest(
            request_id=name,
            ingress_id="",
            prompt_token_ids=[self._random.randrange(vocab) for _ in range(self._context)],
            params=SamplingParams(
                max_tokens=(WARM_UP_STEPS + self._num_steps + 1) * rows + self._context,
                temperature=0.0,
            ),
        )

    def _plan(self, batch: ScheduledBatch) -> StepPlan:
        """Return the plan of the vote that an engine makes."""
        epoch = self._epoch
        sizes = epoch.graph_sizes.vote(
            batch.forward_mode, batch.num_tokens, prompts=batch.has_prompts
        )
        drafting = draft_vote(self._speculator, batch, step=0)
        if drafting:
            drafting["draft_steps"] = self._config.speculation.num_draft_tokens
        vote = Vote(epoch=0, step=0, num_tokens=batch.num_tokens, has_work=1, **sizes, **drafting)
        equal = epoch.backends.all2all.needs_equal_tokens
        return decide(vote.row()[None], PlanConfig(equal))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speculation", choices=("ngram", "mtp", "eagle3"), default="mtp")
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--sequences", type=counts, default="1,2,4,8,16,32,64,128")
    parser.add_argument("--context", type=int, default=512, help="tokens before the decodes")
    parser.add_argument("--steps", type=int, default=10, help="steps of each size")
    add_model_options(parser)
    results.add_options(parser)
    options = parser.parse_args()
    options.ranks = 1
    results.measure_or_redraw(options, measure, page, lambda found, out: None)


def measure(options: argparse.Namespace) -> None:
    """Measure all sizes and write the results."""
    speculation = [
        f"speculation.method={options.speculation}",
        f"speculation.num_draft_tokens={options.num_draft_tokens}",
        "speculation.accept_lengths=[0.5]",
        "cluster.ranks=1",
    ]
    with model_settings(options) as (model, _):
        config = rank_config(options.config, [*model, *options.set, *speculation])
        made_at = results.origin(int(config.device == "cuda"), options.commit)
        steps, rows = Steps(config, options.steps, options.context), []
        for num_seqs in options.sequences:
            for num_drafts in range(options.num_draft_tokens + 1):
                rows.append(steps.measure(num_seqs, num_drafts))
                print(json.dumps(asdict(rows[-1])), flush=True)
        found = {
            **made_at,
            "model": config.model.path,
            "shape": options.shape and [options.shape, options.layers, options.quantization],
            "speculation": config.speculation.model_dump(),
            "context": options.context,
            "rows": [asdict(row) for row in rows],
        }
    results.save(options.out, found)
    results.write(options.out, found, page)


def page(found: dict[str, Any], _name: str) -> str:
    """The table of all sizes."""
    alone = {row["sequences"]: row["step_ms"] for row in found["rows"] if not row["drafts"]}
    lines = [
        (
            *(str(row[name]) for name in ("sequences", "drafts", "rows", "graph")),
            *(f"{row[name]:.3f}" for name in ("forward_ms", "draft_ms", "step_ms")),
            f"{row['step_ms'] / alone[row['sequences']]:.2f}",
        )
        for row in found["rows"]
    ]
    head = (
        *("sequences", "drafts of each", "rows", "graph", "forward (ms)", "draft passes (ms)"),
        *("step (ms)", "break-even"),
    )
    speculation = found["speculation"]
    return (
        "# The time of a step by its rows\n\n"
        f"{origin_line(found)} {found['shape'] or 'Model of the configuration'}, method {speculation['method']}, "
        f"{speculation['num_draft_tokens']} drafts behind every step, {found['context']} tokens of context and more. "
        "Steps one after another: an engine that launches a step ahead hides work of the host.\n\n"
        + markdown_table(head, lines)
    )


if __name__ == "__main__":
    main()
