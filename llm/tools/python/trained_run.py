"""A run in its folder: its status, metrics and results, and its model."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.checkpoint.format import list_checkpoint_folders
from llm.errors import CheckpointError, ProgramError
from llm.runtime.files import read_json_lines
from llm.tools.python.child_process import run_program

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Metrics(list[dict[str, float]]):
    """The table of a run's log: for each reported step its values by name, with the key `step`."""

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a value of a name, and the values: such as `loss`."""
        rows = [row for row in self if name in row]
        return [int(row["step"]) for row in rows], [row[name] for row in rows]

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with the step as its index."""
        import pandas

        return pandas.DataFrame(list(self)).set_index("step") if self else pandas.DataFrame()


class Run:
    """A run, finished or not; the properties read its folder each time.

    Args:
        folder: The run's folder, its `output_dir`.

    Attributes:
        path: The folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}): {self.status or 'not started'}"

    @property
    def status(self) -> str | None:
        """The run's status: `running`, `finished`, `preempted` or `failed`; None before it starts.

        A run that was killed is still `running`.
        """
        status: str | None = self._read_json("status.json").get("status")
        return status

    @property
    def results(self) -> dict[str, Any]:
        """The results of a finished run, as in `all_results.json`; empty before that."""
        return self._read_json("all_results.json")

    @property
    def metrics(self) -> Metrics:
        """The values of each reported step, from all starts; NaN if one is not finite."""
        row_by_step: dict[int, dict[str, float]] = {}
        for line in filter(None, read_json_lines(self.path / "metrics.jsonl")):
            if "step" not in line:
                continue
            row = row_by_step.setdefault(line["step"], {"step": line["step"]})
            row |= {name: math.nan if value is None else value for name, value in line.items()}
        return Metrics(row_by_step[step] for step in sorted(row_by_step))

    def model(self, *, trust_remote_code: bool = False) -> "PreTrainedModel":
        """Load the model: of a finished run its export, otherwise the newest checkpoint.

        Args:
            trust_remote_code: Whether to run the Python code that comes with the model.

        Raises:
            CheckpointError: The run has neither.
            ProgramError: The checkpoint cannot be exported.
        """
        from transformers import AutoModelForCausalLM

        model: PreTrainedModel = self._load_part(
            AutoModelForCausalLM, trust_remote_code=trust_remote_code
        )
        return model

    def tokenizer(self, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
        """Load the tokenizer, as `model` does.

        Args:
            trust_remote_code: Whether to run the Python code that comes with the tokenizer.
        """
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = self._load_part(
            AutoTokenizer, trust_remote_code=trust_remote_code
        )
        return tokenizer

    def _load_part(self, auto_class: Any, *, trust_remote_code: bool) -> Any:
        """Load the model or the tokenizer by its class; a checkpoint is exported first."""
        if self.status == "finished":
            return auto_class.from_pretrained(self.path, trust_remote_code=trust_remote_code)
        if not list_checkpoint_folders(self.path / "checkpoints"):
            raise CheckpointError(f"{self.path} has no model: it has neither finished nor saved.")
        with tempfile.TemporaryDirectory() as temporary_folder:
            export = f"{temporary_folder}/model"
            arguments = [str(self.path), "--export", "latest", export]
            run_program("checkpoints", [*arguments, *["--trust_remote_code"] * trust_remote_code])
            return auto_class.from_pretrained(export, trust_remote_code=trust_remote_code)

    def _read_json(self, name: str) -> dict[str, Any]:
        """Return the contents of a file in the folder; empty if it does not exist."""
        try:
            values = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ProgramError(f"{self.path / name} cannot be read: {error}.") from error
        return values if isinstance(values, dict) else {}
