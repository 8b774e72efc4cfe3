"""The base of all sections of the YAML, and the types that they share."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A frozen section of the YAML that refuses unknown keys, and `.inf` and `.nan`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
