"""Draw the pictures of the guides as SVG, for light and for dark pages: `make pages`.

`make pages` writes the diagrams. `python docs/pictures.py` also plots the memory of four layouts by
the code of `llm-trainers plan --plot`, which needs the extra `report`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from llm.parallel.dims import ParallelDims

IMAGES = Path(__file__).parent / "images"
FOREGROUNDS = {"light": "#333333", "dark": "#dddddd"}
BLUE, ORANGE, GREEN, RED = "#2f6fca", "#e07b39", "#23865a", "#c8323c"
WIDTH = 600


class Drawing:
    """An SVG picture without a background, 600 units wide."""

    def __init__(self, title: str, height: int, foreground: str) -> None:
        self.foreground = foreground
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" font-family="system-ui, sans-serif" '
            'font-size="16">',
            f"<title>{escape(title)}</title>",
        ]

    def rectangle(
        self, x: float, y: float, width: float, height: float, *, fill: str, opacity: float = 1
    ) -> None:
        """Draw a rectangle with rounded corners; with the fill "none", only its border."""
        stroke = f'stroke="{self.foreground}" stroke-opacity="0.5"' if fill == "none" else ""
        self._lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill}" fill-opacity="{opacity:g}" {stroke}/>'.replace(" />", "/>")
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        color: str | None = None,
        anchor: str = "middle",
        style: str = "",
    ) -> None:
        """Write a line of text whose baseline is at y.

        Args:
            x: The point that `anchor` puts at the start, the middle or the end of the text.
            y: The baseline.
            text: The text.
            color: Its color instead of the foreground.
            anchor: "start", "middle" or "end".
            style: Further attributes of SVG.
        """
        self._lines.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" '
            f'fill="{color or self.foreground}" {style}>{escape(text)}</text>'.replace(" >", ">")
        )

    def path(self, path: str, *, color: str | None = None, style: str = "") -> None:
        """Draw a line along a path of SVG."""
        self._lines.append(
            f'<path d="{path}" fill="none" stroke="{color or self.foreground}" '
            f'stroke-width="2" {style}/>'.replace(" />", "/>")
        )

    def arrow(self, x: float, y: float, length: float) -> None:
        """Draw an arrow to the right that begins at a point."""
        end = x + length
        self.path(f"M{x:g} {y:g}H{end:g}M{end - 6:g} {y - 5:g}L{end:g} {y:g}L{end - 6:g} {y + 5:g}")

    def svg(self) -> str:
        """Return the file."""
        return "\n".join([*self._lines, "</svg>", ""])


def draw_ranks(foreground: str) -> str:
    """Draw which ranks of two nodes share a layer, a model, and a gradient."""
    dims = ParallelDims(replicate=2, shard=4, tensor=2)
    drawing = Drawing("Ranks of --tensor_parallel_size 2 x shards 4 x replicas 2", 330, foreground)
    for node in range(2):
        top = 2 + 128 * node
        drawing.rectangle(2, top, 566, 112, fill="none")
        drawing.text(14, top + 20, f"node {node}, replica {node}", anchor="start")
        drawing.path(f"M16 {top + 96}V{top + 102}H554V{top + 96}", color=ORANGE)
    for rank in range(dims.world_size):
        position = dims.coordinates(rank)
        x = 16 + 138 * position["shard"] + 63 * position["tensor"]
        y = 30 + 128 * position["replicate"]
        shade = 0.15 + 0.17 * position["shard"]
        drawing.rectangle(x, y, 60, 46, fill=BLUE, opacity=shade)
        drawing.text(x + 30, y + 20, f"rank {rank}", style='font-size="14"')
        drawing.text(x + 30, y + 38, f"shard {position['shard']}", style='font-size="13"')
        if position["tensor"] == 0:
            drawing.path(f"M{x} {y + 52}V{y + 58}H{x + 123}V{y + 52}", color=BLUE)
    drawing.path("M572 58H584V186H572", color=GREEN)
    for index, (color, text) in enumerate(
        [
            (BLUE, "tensor 2: neighbors exchange activations in each layer"),
            (ORANGE, "shard 4: a node exchanges the weights of each layer"),
            (GREEN, "replicate 2: nodes exchange gradients once per step"),
        ]
    ):
        y = 268 + 24 * index
        drawing.path(f"M16 {y}H46", color=color, style='stroke-linecap="round"')
        drawing.text(56, y + 5, text, anchor="start")
    return drawing.svg()


def draw_data(foreground: str) -> str:
    """Draw the way from a text to a model, with the program of each step."""
    drawing = Drawing("Text, token files, run, and model", 124, foreground)
    boxes = (
        ("text", "JSON Lines,", "CSV, Parquet", "tokenizer"),
        ("token files", ".bin and .idx,", "made once", "prepare"),
        ("run folder", "checkpoints,", "log, metrics", "train"),
        ("model", "Hugging Face", "folder", "generate"),
    )
    for index, (title, first_line, second_line, program) in enumerate(boxes):
        x = 2 + 157 * index
        center = x + 62.5
        drawing.rectangle(x, 2, 125, 84, fill=BLUE, opacity=0.15)
        drawing.text(center, 26, title, style='font-weight="bold" font-size="18"')
        drawing.text(center, 50, first_line)
        drawing.text(center, 69, second_line)
        drawing.text(center, 110, program, style='font-family="monospace"')
        if index < len(boxes) - 1:
            drawing.arrow(x + 130, 44, 22)
    return drawing.svg()


@dataclass(frozen=True)
class _Span:
    """A part of a timeline."""

    text: str
    length: float
    color: str
    opacity: float = 1


def draw_requeue(foreground: str) -> str:
    """Draw a job that is requeued at its time limit, and one that crashes."""
    drawing = Drawing("Timeline of a requeued job, and of a crash", 240, foreground)

    def draw_job(y: float, title: str, spans: list[_Span]) -> None:
        drawing.text(0, y - 26, title, anchor="start", style='font-weight="bold"')
        x = 0.0
        for span in spans:
            color = foreground if span.text == "queue" else span.color
            drawing.rectangle(x, y, span.length - 2, 34, fill=color, opacity=span.opacity)
            on_dark = span.opacity > 0.5
            drawing.text(
                x + span.length / 2 - 1, y + 22, span.text, color="#ffffff" if on_dark else None
            )
            x += span.length

    queue = _Span("queue", 66, "", 0.15)
    save = _Span("save", 44, GREEN)
    draw_job(
        44,
        "At the time limit: nothing is lost",
        [
            *(queue, _Span("steps 1 to 600", 174, BLUE), save, queue),
            *(_Span("steps 601 to 900", 174, BLUE), _Span("export", 74, GREEN)),
        ],
    )
    drawing.path("M240 38V26M240 82V92", color=ORANGE)
    drawing.text(240, 106, "signal, 5 minutes before the limit")
    draw_job(
        174,
        "After a crash: the steps since the last checkpoint are repeated",
        [
            *(queue, _Span("steps 1 to 400", 124, BLUE), _Span("lost", 50, RED)),
            *(replace(queue, length=58), _Span("again", 50, BLUE, 0.35)),
            *(_Span("steps 501 to 900", 176, BLUE), _Span("export", 74, GREEN)),
        ],
    )
    drawing.path("M189 168V214M239 168V214", color=ORANGE)
    drawing.text(186, 230, "last checkpoint", anchor="end")
    drawing.text(243, 230, "crash", anchor="start")
    return drawing.svg()


DIAGRAMS: dict[str, Callable[[str], str]] = {
    "data": draw_data,
    "ranks-of-nodes": draw_ranks,
    "requeue": draw_requeue,
}


def diagrams() -> dict[Path, str]:
    """Return the diagrams by their files."""
    return {
        IMAGES / f"{name}-{scheme}.svg": draw(foreground)
        for name, draw in DIAGRAMS.items()
        for scheme, foreground in FOREGROUNDS.items()
    }


def plot_memory() -> None:
    """Plot the memory of a GPT of 7.5B on 32 GPUs in four layouts."""
    from matplotlib import rc_context

    from llm.tools.plan import render
    from llm.tools.plan.estimate import estimate
    from llm.tools.plan.job import Job
    from llm.tools.plan.options import PlanOptions

    options = PlanOptions(
        model_size="7.5B",
        nodes=4,
        gpus_per_node=8,
        device="h100-80gb",
        mixed_precision="bf16",
        activation_checkpointing="full",
        per_device_train_batch_size=1,
        global_batch_size=128,
    )
    job = Job(options)
    layouts = [
        ParallelDims(replicate=32),
        ParallelDims(replicate=4, shard=8),
        ParallelDims(shard=32),
        ParallelDims(shard=8, tensor=4),
    ]
    estimates = [estimate(job, dims) for dims in layouts]
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # the date in the files
    for scheme, foreground in FOREGROUNDS.items():
        names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
        style: dict[str, Any] = {
            **dict.fromkeys(names, foreground),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "font.size": 13,
            "legend.fontsize": 11,
            "legend.columnspacing": 1.2,
            "savefig.transparent": True,
            "svg.fonttype": "none",
            "svg.hashsalt": "memory",
        }
        with rc_context(style):
            render.plot_memory(
                estimates,
                usable_bytes=job.usable_bytes,
                path=str(IMAGES / f"memory-{scheme}.svg"),
            )


def main() -> None:
    """Write all pictures."""
    for path, svg in diagrams().items():
        path.write_text(svg, encoding="utf-8")
    plot_memory()


if __name__ == "__main__":
    main()
