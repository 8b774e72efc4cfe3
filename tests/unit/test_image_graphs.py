"""Steps with images as graphs, on a CPU: a replay reads mask, embeddings and positions where the capture found them."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.engine_harness import rank_config
from tests.image_case import Prompt, image_checkpoint, prompts
from tests.unit.graph_fakes import eager_graphs, make_capturable
from workers.models.registry import load_model_config
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import KV_CACHE, Rendezvous
from workers.runner.cuda_graphs import StepGraphs
from workers.runner.graph_sizes import GraphKey, GraphSizes, decode_sizes, mixed_sizes
from workers.speculation.drafter import NewTokens
from workers.speculation.model_drafter import ModelDrafter
from workers.step.drafts import Drafts
from workers.wire.request import RequestOutput

DEPTH, TOKENS = 2, 10
PLAIN = GraphSizes(decode_sizes(3), mixed_sizes(32))
DRAFTS = GraphSizes(decode_sizes(3), mixed_sizes(32), decode_sizes(9), decode_sizes(3), DEPTH)


class Run:
    """Serves prompts with images on one rank; the second run replays graphs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, drafts: bool):
        self.sizes, self._monkeypatch = DRAFTS if drafts else PLAIN, monkeypatch
        speculation = {"method": "mtp", "num_draft_tokens": DEPTH, "adaptive": False}
        self._config = rank_config(
            folder,
            1,
            scheduler={"max_num_batched_tokens": 32, "max_num_seqs": 3},
            speculation=speculation if drafts else {},
        )
        self.replayed: set[GraphKey] = set()
        self.drafts: list[tuple[str, int, Any]] = []
        self._record(monkeypatch)

    def _record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plan, replay, taken = StepGraphs.plan, StepGraphs._replay, ModelDrafter.drafted

        def planned(graphs: StepGraphs, batch: Any, key: GraphKey) -> Any:
            self.replayed.add(key)
            return plan(graphs, batch, key)

        def replayed(graphs: StepGraphs, key: GraphKey, form: Any) -> None:
            self.replayed.add(key)
            replay(graphs, key, form)

        def drafted(drafter: ModelDrafter, new: NewTokens, drafts: Drafts) -> None:
            for seq, index in zip(new.seqs, new.indices, strict=True):
                place = seq.request.request_id, seq.num_output_tokens
                self.drafts.append((*place, drafts.read(index)))
            taken(drafter, new, drafts)

        monkeypatch.setattr(StepGraphs, "plan", planned)
        monkeypatch.setattr(StepGraphs, "_replay", replayed)
        monkeypatch.setattr(ModelDrafter, "drafted", drafted)

    def serve(self, asked: list[Prompt], *, graphs: bool) -> dict[str, list[int]]:
        """Return the tokens of each prompt."""
        found: dict[str, list[int]] = {}

        def publish(_ingress_id: str, outputs: list[RequestOutput]) -> None:
            for output in outputs:
                found.setdefault(output.request_id, []).extend(output.token_ids)

        process = RankProcess(0, self._config)
        try:
            epoch = Epoch(process, Rendezvous("127.0.0.1", 0, "alone"), 10)
            epoch.load()
            if graphs:
                self._capture(epoch)
            epoch.start_engine(publish, lambda step: None)
            # Otherwise the speed of the encoder's thread decides in which step a prompt begins.
            assert process.images is not None
            known = process.images.order(
                [it for prompt in asked for it in prompt.images], lambda: None
            )
            process.images.wait()
            assert known.complete
            known.close()
            for number, prompt in enumerate(asked):
                epoch.engine.submit(prompt.request(str(number), max_tokens=TOKENS))
            while epoch.engine.step().run:
                pass
        finally:
            process.close()
        return found

    def _capture(self, epoch: Epoch) -> None:
        epoch.run_stage(KV_CACHE, lambda done, total: None)
        if epoch.runner.drafts is not None:
            make_capturable(epoch.runner.drafts.attention, self._monkeypatch)
        graphs = eager_graphs(epoch.runner, self.sizes, self._monkeypatch)
        graphs.provide(graphs.keys)
        self._monkeypatch.setattr(epoch.runner, "graphs", graphs)
        epoch.graph_sizes = self.sizes


@pytest.mark.parametrize(
    ("family", "drafts"), [("qwen3_5_moe", True), ("qwen3_vl_moe", False), ("glm4v_moe", False)]
)
def test_replays_with_images_are_eager_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, drafts: bool
) -> None:
    """Chunks of images and text beside decodes; passes of a draft model behind them."""
    folder = image_checkpoint(tmp_path, family, mtp=drafts)
    spec = load_model_config(folder).vision
    assert spec is not None
    asked, run = prompts(spec, 6), Run(folder, monkeypatch, drafts=drafts)
    eager = run.serve(asked, graphs=False)
    assert all(len(tokens) == TOKENS for tokens in eager.values()) and not run.replayed
    of_eager = list(run.drafts)
    run.drafts.clear()
    assert run.serve(asked, graphs=True) == eager
    assert run.drafts == of_eager and bool(of_eager) == drafts
    kinds = {(key.mode.name, key.drafts) for key in run.replayed}
    passes = {("MIXED", 1), ("VERIFY", 0), ("VERIFY", 1), ("DRAFT", DEPTH)} if drafts else set()
    assert kinds >= {("MIXED", 0), *passes}, kinds
