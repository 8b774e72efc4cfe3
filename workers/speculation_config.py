"""The `speculation` section of the YAML: where drafts come from, and how many a step verifies."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from workers.section import Section

MAX_DRAFT_TOKENS = 16
"""Each draft is a row of logits: at 16 a sequence has 17 of them, and few drafts survive as many draws."""


class SpeculationConfig(Section):
    """Draft tokens that a step verifies, so that a sequence may get several tokens in one step."""

    method: Literal["off", "auto", "ngram", "mtp", "eagle3"] = Field(
        "off",
        description="Source of the drafts. ngram = text that stood behind the last tokens before, in prompt, answer or "
        "the request's prediction; mtp = the head for multi-token prediction of the checkpoint; eagle3 = draft_model; "
        "auto = the best that the model allows. Answers are those of off.",
    )
    draft_model: str | None = Field(
        None,
        min_length=1,
        description="Folder of an EAGLE-3 draft model for method eagle3, relative to the YAML's folder.",
    )

    @field_validator("method", mode="before")
    @classmethod
    def _yaml_words(cls, value: object) -> object:
        """Turn a boolean back into a word, because YAML 1.1 reads a bare `off` as a boolean."""
        return "off" if value is False else value

    num_draft_tokens: int = Field(
        4,
        ge=1,
        le=MAX_DRAFT_TOKENS,
        description="Most drafts of a sequence in one step.",
    )
    adaptive: bool = Field(
        True,
        description="Draft as many tokens as raise tokens per second, by the times of steps and the share of drafts "
        "that the model confirms, at most num_draft_tokens; false = always num_draft_tokens.",
    )
    accept_lengths: list[Annotated[float, Field(ge=0, le=1)]] | None = Field(
        None,
        min_length=1,
        max_length=MAX_DRAFT_TOKENS,
        description="For measurements with model.weights dummy: probability that a draft is accepted if all drafts "
        "before it were, by its place, such as [0.8, 0.65, 0.5]; the last one holds for later places. null = drafts "
        "are compared with the model's draws.",
    )

    @property
    def uses_model(self) -> bool:
        """Whether a draft model runs behind each step."""
        return self.method in ("mtp", "eagle3")

    @property
    def most_drafts(self) -> int:
        """Most drafts of a sequence in a step; 0 without speculation."""
        return 0 if self.method == "off" else self.num_draft_tokens

    @property
    def rows_per_seq(self) -> int:
        """Most rows of a sequence in a step that generates: its last token, and its drafts."""
        return 1 + self.most_drafts
