"""Draw the speed of other programs relative to this one as bars, from the reports in results/.

python -m benchmarks.speed_bars

Writes docs/images/speed-light.svg and speed-dark.svg, transparent, for pages of both colors.
"""

import re
import sys
from collections.abc import Iterator
from html import escape

from benchmarks.training import ROOT

IMAGES = ROOT / "docs" / "images"
FOREGROUNDS = {"light": "#333333", "dark": "#dddddd"}
_RESULTS = ROOT / "benchmarks" / "results"
_FASTER, _SLOWER = "#2f6fca", "#b8561a"
_WIDTH, _LEFT, _UNIT = 600, 160, 290
"""Width of the picture, begin of the bars, and length of a ratio of 1."""

Ratios = dict[str, float]
"""Speed of this trainer relative to other programs, by their names."""


def read_ratios(section: str) -> Ratios:
    """Return the ratios of a section's tables, which begin with a row of this trainer.

    They are in the column `llm is`; a table without it has only the speeds.
    """
    ratios: Ratios = {}
    speed = 0.0
    for line in section.splitlines():
        program, speed_text, ratio, *_ = [*map(str.strip, line.strip("|").split("|")), "", ""]
        if program == "llm":
            speed = _read_number(speed_text)
        elif speed and line.startswith("|") and not program.startswith("llm, "):
            is_ratio = re.fullmatch(r"\d\.\d\d", ratio) is not None
            value = float(ratio) if is_ratio else speed / _read_number(speed_text)
            ratios.setdefault(program, value)
        elif not line.startswith("|"):
            speed = 0.0
    return ratios


def _read_number(cell: str) -> float:
    return float(cell.split()[0].replace(",", ""))


def read_sections() -> Iterator[tuple[str, Ratios]]:
    """Yield the title and the ratios of each model of the newest reports."""
    gpu_report = _newest_report("gpu")
    section = gpu_report.partition("\n## GPT-2 124M")[2].partition("\n## ")[0]
    yield "GPT-2 124M on an H200, bf16, one run of 6 seconds", read_ratios(section)
    for section in _newest_report("train").split("\n## ")[1:]:
        title, _, tables = section.partition("\n")
        if re.match(r"[A-C]: ", title):
            layers, width, *_ = title[3:].split(", ")
            yield f"{layers}, {width} on two cores of a CPU, float32", read_ratios(tables)


def _newest_report(subject: str) -> str:
    path = max(_RESULTS.glob(f"20??-??-??-{subject}.md"))
    return path.read_text(encoding="utf-8")


def draw(foreground: str) -> str:
    """Return the bars as SVG without a background.

    Args:
        foreground: Color of the text.
    """
    lines: list[str] = []
    y = 6
    for title, ratios in read_sections():
        y += 22
        lines.append(f'<text x="0" y="{y}" font-weight="bold">{escape(title)}</text>')
        top = y + 8
        for program, ratio in ratios.items():
            y += 24
            color = _FASTER if ratio >= 1 else _SLOWER
            length = round(_UNIT * ratio)
            lines += [
                f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">{escape(program)}</text>',
                f'<rect x="{_LEFT}" y="{y - 14}" width="{length}" height="18" fill="{color}"/>',
                f'<text x="{_LEFT + 8}" y="{y}" fill="#ffffff">{ratio:.2f}</text>',
            ]
        one = _LEFT + _UNIT
        lines.append(f'<path d="M{one} {top}V{y + 6}" stroke="{foreground}" fill="none"/>')
        y += 14
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" '
            f'width="{_WIDTH}" height="{y}" font-family="system-ui, sans-serif" font-size="15" '
            f'fill="{foreground}">',
            "<title>Speed of llm-trainers relative to other programs</title>",
            *lines,
            "</svg>\n",
        ]
    )


def main() -> int:
    """Write both pictures."""
    for scheme, foreground in FOREGROUNDS.items():
        (IMAGES / f"speed-{scheme}.svg").write_text(draw(foreground), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
