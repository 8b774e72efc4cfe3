"""The samples of one answer of /metrics, by name."""

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "phalanx:"


class Scrape:
    """Samples of Phalanx's metrics; names without their prefix."""

    def __init__(self, text: str):
        families = text_string_to_metric_families(text)
        found = [sample for family in families for sample in family.samples]
        self._samples = [sample for sample in found if sample.name.startswith(PREFIX)]

    def sum(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name that have these labels; 0 without samples."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == PREFIX + name and labels.items() <= sample.labels.items()
        )

    def values(self, name: str, label: str) -> list[str]:
        """The values of a label of a name, in order of appearance."""
        samples = (sample for sample in self._samples if sample.name == PREFIX + name)
        return list(dict.fromkeys(sample.labels[label] for sample in samples))
