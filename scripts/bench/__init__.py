"""Measurements. Run them from the repository's folder: python -m scripts.bench.NAME --help"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
