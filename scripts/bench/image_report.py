"""The page of `scripts.bench.gpu_images`: figures beside their targets, and the gaps of text streams."""

from collections.abc import Iterator

from scripts.bench.results import Found, markdown_table, origin_line

TARGETS = {
    "tower": ("at least 0.40", "0.55"),
    "one_image_each": ("at least 0.80", "0.95"),
    "same_image": ("at most 1.30", "-"),
}
STREAMS_TARGET = 1.5, 1.2  # p99 of the gap beside images, over that of the streams alone


def page(report: Found, _name: str) -> str:
    """All of the .md but its notes."""
    layers, side = report["load"]["layers"], report["load"]["side"]
    settings = ", ".join(report["load"]["settings"])
    return (
        "# Images\n\n"
        f"{origin_line(report)} {report['load']['model']} with a vision tower"
        f"{f', {layers} layers' if layers else ''}, random weights; without Ray and HTTP. "
        f"Images of {side:,} x {side:,} pixels{f'; settings {settings}' if settings else ''}.\n\n"
        "Targets, made for one H200: a **target** is a figure that the project set before the measurement, a **further "
        "target** a second, higher one.\n\n"
        + markdown_table(["measured", "", "target", "further target"], _ratios(report))
        + ("\n" + _streams(report["streams"]) if "streams" in report else "")
    )


def _ratios(report: Found) -> Iterator[list[str]]:
    """Return the rows of parts that are one ratio."""
    if tower := report.get("tower"):
        rate = f"{tower['rate_tflops_per_s']:,.0f} TFLOP/s"
        name = f"the tower alone, {tower['images']} images a call, as a share of {rate}"
        yield [name, f"{tower['share_of_rate']:.2f}", *TARGETS["tower"]]
    if found := report.get("one_image_each"):
        name = (
            f"requests with one image each ({found['in_flight']} in flight, {found['image_tokens']:,} + "
            f"{found['text_tokens']} / {found['output_tokens']} tokens) a second, over those of images and of equally "
            "long text one after the other"
        )
        yield [name, f"{found['of_sum_alone']:.2f}", *TARGETS["one_image_each"]]
    if found := report.get("same_image"):
        name = "first token of an image that was seen before, over text of equal length"
        yield [name, f"{found['of_text']:.2f}", *TARGETS["same_image"]]


def _streams(found: Found) -> str:
    """Return the part about the gaps of text streams."""
    target, further = STREAMS_TARGET
    rows = [
        [
            row["limit"],
            row["beside"],
            f"{row['p50_ms']:.1f}",
            f"{row['p99_ms']:.1f}",
            f"{row['p99_of_quiet']:.2f}",
            f"{row['first_token_ms']:.0f}" if "first_token_ms" in row else "-",
        ]
        for row in found["rows"]
    ]
    head = ["prompts beside decodes", "beside the streams", "p50", "p99", "p99 / nothing beside"]
    return (
        f"Gaps between the tokens of {found['streams']} streams of text, in ms, beside {found['per_second']:g} "
        f"requests a second for one token. A request has {found['prompt_tokens']:,} tokens: an image and text, or text "
        "alone, which costs what the prompt of the image costs without its encoder. Target: beside images p99 is at "
        f"most {target:g} times that of the streams alone, further target {further:g}.\n\n"
        + markdown_table([*head, "first token of the requests, p50"], rows)
    )
