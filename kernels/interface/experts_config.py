"""Where experts live: the `experts` section of the YAML."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class ExpertsConfig(BaseModel):
    """Where experts live: which rank holds which, and how many copies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rebalance: Literal["off", "auto"] | Annotated[int, Field(ge=1)] = Field(
        "off",
        description="Move experts between ranks while they serve, by their load. auto = if the busiest rank gets less "
        "work by it; a number = look every so many steps or later. Takes memory for one more layer of experts.",
    )

    redundant_slots: int = Field(
        0,
        ge=0,
        description="Slots of each rank beside its share of the experts, for copies of experts with many tokens. Each "
        "takes the memory of one expert in every layer; from about 16 ranks on one slot evens out skewed routing.",
    )
    map: str | None = Field(
        None,
        min_length=1,
        description="File of a saved map of experts, relative to the YAML's folder and on every node; for another "
        "number of ranks a map is planned from its loads. null = experts in their order.",
    )
    copies: Literal["auto", "one", "all"] = Field(
        "auto",
        description="Which copy of an expert tokens take: one = the same for all, so that fewer weights are read; all "
        "= all in turn, so that the ranks get equal rows; auto = one in steps without prompts, all in steps with.",
    )

    @property
    def mapped(self) -> bool:
        """Whether a rank may hold other experts than its range of them."""
        return bool(self.redundant_slots) or self.map is not None or self.rebalance != "off"

    @field_validator("rebalance", mode="before")
    @classmethod
    def _yaml_words(cls, value: object) -> object:
        """Turn a boolean back into a word, because YAML 1.1 reads a bare `off` as a boolean."""
        return "off" if value is False else value
