"""The example configurations and experiments, in a checkout and in an installed package: their folders and names."""

from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "share"
EXPERIMENTS = CONFIGS / "experiments"
DEMO = CONFIGS / "local.yaml"


def names(folder: Path) -> list[str]:
    """Return the names of a folder's examples."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def find(file: Path, folder: Path) -> Path:
    """Return the file, or the example that it names, such as `gpu-bench` or `gpu-bench.yaml`, if there is no such file.

    A path that is neither is returned, too; a bare name raises ValueError with the names of the examples.
    """
    if file.exists() or len(file.parts) != 1 or file.suffix not in ("", ".yaml"):
        return file
    if file.stem not in names(folder):
        raise ValueError(
            f"no such file, and no example; the examples are {', '.join(names(folder))}"
        )
    return folder / f"{file.stem}.yaml"
