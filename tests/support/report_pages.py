"""Made-up run folders for `llm-trainers report`, and a reader of its pages."""

import html.parser
import json
import shutil

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def report(step: int, **values: object) -> dict[str, object]:
    """A line of metrics.jsonl: 100 tokens and half a second a step."""
    return {
        "step": step,
        "loss": 8.0 - step / 100,
        "learning_rate": 1e-3,
        "grad_norm": 1.5,
        "loss_scale": 1.0,
        "skipped_steps": 0,
        "nan_steps": 0,
        "tokens_per_second": 200.0,
        "ms_per_step": 500.0,
        "data_wait": 0.25,
        "samples": step,
        "tokens": 100 * step,
        "seconds": step / 2,
        **values,
    }


def evaluation(loss: float) -> dict[str, float]:
    return {"eval_loss": loss, "eval_perplexity": 2.718**loss}


def write_run(folder, records, *, end="", events=(), config="", **status):
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + end)
    (folder / "config.toml").write_text(config)
    if events:
        timed = [{"time": "2026-11-20T10:00:00+0000", **event} for event in events]
        (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timed))
    if status:
        (folder / "status.json").write_text(json.dumps(status))
    return folder


class Reader(html.parser.HTMLParser):
    """Reads a page strictly: every element is closed; and collects what it refers to."""

    VOID = frozenset({"meta", "input", "br", "link", "img"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.description: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        self.links += [value for name, value in attrs if name in ("src", "href", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.description.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.description).split())


class Undrawn:
    """In the place of the charts, which take most of the time that a page takes."""

    def __init__(self, runs, panels, loss_panels, *, x):
        pass

    def embed(self):
        return "", {}
