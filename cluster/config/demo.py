"""The places of the demo's configuration and of the example experiments, in a checkout and in an installed package."""

from pathlib import Path

DEMO = Path(__file__).parents[1] / "share" / "local.yaml"
EXAMPLES = DEMO.parent / "experiments"
