"""The place of the demo's configuration in a checkout and in an installed package."""

from pathlib import Path

DEMO = Path(__file__).parents[1] / "share" / "local.yaml"
