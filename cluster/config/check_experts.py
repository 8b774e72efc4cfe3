"""Checks of the section `experts` against the model and the number of ranks. They yield problems, none raises."""

from collections.abc import Iterator
from pathlib import Path

from cluster.config.errors import Problem
from cluster.config.phalanx_config import PhalanxConfig
from workers.specs.expert_layout import ExpertLayout, LayoutError
from workers.specs.model import ModelConfig


def check_experts(config: PhalanxConfig, model: ModelConfig | None) -> Iterator[Problem]:
    """Yield problems of slots and of a saved map that the model or the number of ranks rules out."""
    if model is None:
        return
    experts = config.experts
    ranks = min((group.ranks for group in config.pool), default=config.cluster.ranks)
    share = -(-model.num_experts // ranks)
    most = model.num_experts - share
    if experts.redundant_slots > most:
        yield Problem(
            "experts.redundant_slots",
            f"{experts.redundant_slots} slots beside {share} of {model.num_experts} experts; a rank holds no expert "
            f"twice, so expected at most {most} with {ranks} rank(s) (cluster.ranks, pool)",
            ("cluster.ranks", "model.path"),
        )
    if experts.map is not None:
        try:
            problem = ExpertLayout.read(Path(experts.map)).problem(model)
        except LayoutError as error:
            problem = str(error)
        if problem is not None:
            yield Problem("experts.map", problem, ("model.path",))
