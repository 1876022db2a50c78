"""The Weights & Biases run of a run's folder; a resumed run continues it."""

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any

from llm.checkpoint.run_folder import RunFolder
from llm.runtime.files import write_whole
from llm.trainers.gpt.config import CoreConfig

DEFAULT_PROJECT = "llm"


def wandb_arguments(config: CoreConfig, run: RunFolder) -> tuple[str, dict[str, Any]]:
    """Return the project of a run in its trackers, and the other arguments of `wandb.init`.

    The project is `project_name`. With W&B it is by default the project of the run in the folder,
    else `WANDB_PROJECT`, and W&B writes into the run's folder.
    """
    if "wandb" not in config.report_to:
        return config.project_name or DEFAULT_PROJECT, {}
    former: dict[str, str] = {}
    if not config.overwrite_output_dir:
        with contextlib.suppress(OSError, ValueError):  # missing, or cut short by a kill
            former = json.loads(run.wandb.read_text(encoding="utf-8"))
    default = former.get("project") or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT
    project = config.project_name or default
    arguments: dict[str, Any] = {"dir": str(run.path)}
    if former.get("project") == project:
        arguments |= {"id": former["id"], "resume": "allow"}
    return project, arguments


def remember_wandb(run: RunFolder, trackers: Sequence[Any]) -> None:
    """Write the id of the W&B run into the run's folder, for a resume; rank 0 calls it.

    Args:
        run: The run's folder.
        trackers: Accelerate's open trackers.
    """
    for tracker in trackers:
        if tracker.name == "wandb":
            run.wandb.parent.mkdir(exist_ok=True)
            record = {"project": tracker.run_name, "id": tracker.run.id}
            write_whole(run.wandb, json.dumps(record) + "\n")
