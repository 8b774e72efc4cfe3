"""What the checks share: the demo model's answer, and a tool whose arguments have few values."""

from typing import Literal

from pydantic import BaseModel, Field

MODEL = "demo"
KEY = "unused"
HELLO = "Hello"
ANSWER = "Hello! I am a small demo model served by Phalanx."
QUESTION = "How is the weather in Oslo?"
REPORT = "Rain, 7 degrees."


class Weather(BaseModel):
    """Return the weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)
