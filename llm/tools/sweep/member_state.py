"""How far a member of a sweep is, read from its run folder."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from llm.checkpoint.run_folder import IN_USE, OWNER_CLAIM_NAME, RunFolder
from llm.metrics.set_scores import set_score_title
from llm.runtime.claims import EXPIRY_SECONDS, HEARTBEAT_TIMEOUT_SECONDS, read_live_claim_age
from llm.tools.report.run_files import read_metrics, read_numbers, read_table

LOG_NAME = "sweep.log"
"""File in a member's folder with the output of all its starts."""
CLAIM_NAME = ".sweep"
"""Name of the claim in a member's folder of the command that runs the member."""
START_MARK = "--- started "
"""The beginning of the line in the log before the output of a start."""

State = Literal["finished", "failed", "interrupted", "running", "waiting"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How far a member is.

    Attributes:
        state: `finished`; `failed`; `interrupted`: a repeated command resumes it; `running`: a
            command or a job runs it now; `waiting`: it has not started.
        sentence: Why it failed or was interrupted; "" if unknown.
        loss: Final validation loss of a finished run, or its last training loss if it has no
            validation; NaN if it is not finite, None before the end.
        is_validated: Whether `loss` is a validation loss.
        set_scores: The numbers of task sets of a finished run, by their titles.
    """

    state: State
    sentence: str = ""
    loss: float | None = None
    is_validated: bool = False
    set_scores: Mapping[str, float] = dataclasses.field(default_factory=dict)


def read_outcome(folder: Path) -> Outcome:
    """Return how far a member is; its folder need not exist."""
    outcome = read_stopped_outcome(folder)
    if outcome.state == "finished":
        return outcome
    if RunFolder(folder).has_lock_holder():
        return Outcome(state="running")
    age_by_path = read_live_claim_age(folder, CLAIM_NAME) | read_live_claim_age(
        folder, OWNER_CLAIM_NAME
    )
    if not age_by_path:
        return outcome
    age = min(age_by_path.values())
    sentence = ""
    if age > HEARTBEAT_TIMEOUT_SECONDS:
        paths = " and ".join(map(str, sorted(age_by_path)))
        sentence = (
            f"Its last sign of life is {age:.0f} seconds old. If its process or its node is dead, "
            f"delete {paths}, or wait until it is {EXPIRY_SECONDS:g} seconds old."
        )
    return Outcome(state="running", sentence=sentence)


def read_stopped_outcome(folder: Path) -> Outcome:
    """Return how far a member is that no command runs now; its folder need not exist."""
    status = read_table(folder / "status.json", json.loads) or {}
    if status.get("status") == "finished":
        return _finished_outcome(folder)
    if status.get("status") == "failed":
        return Outcome(state="failed", sentence=str(status.get("reason") or ""))
    if status.get("status") == "preempted":
        reason = status.get("reason")
        return Outcome(state="interrupted", sentence=f"It was stopped by {reason}, and saved.")
    if status:
        return Outcome(state="interrupted", sentence="It was killed.")
    error = last_error(folder / LOG_NAME)
    if error and IN_USE not in error:  # the trainer has refused its options or inputs
        return Outcome(state="failed", sentence=error)
    is_started = (folder / LOG_NAME).exists()
    return Outcome(state="interrupted" if is_started else "waiting")


def _finished_outcome(folder: Path) -> Outcome:
    """Return the outcome of a finished run, with its loss."""
    results = read_numbers(folder / "all_results.json")
    titles = {key: set_score_title(key) for key in results}
    set_scores = {title: results[key] for key, title in titles.items() if title is not None}
    if "eval_loss" in results:
        loss = results["eval_loss"]
        return Outcome(state="finished", loss=loss, is_validated=True, set_scores=set_scores)
    rows, _ = read_metrics(folder / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    loss = losses[-1] if losses else math.nan
    return Outcome(state="finished", loss=loss, set_scores=set_scores)


def last_error(log_path: Path) -> str:
    """Return the first error of the last start in a member's log; "" if there is none."""
    try:
        text = log_path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    last_start = text.rpartition(f"\n{START_MARK}")[2]
    error = re.search(r"^(?:\[rank \d+\] )?error: (.*)$", last_start, flags=re.MULTILINE)
    return error[1] if error is not None else ""
