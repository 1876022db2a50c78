"""The last numbers of a run in Prometheus' text format, for the node exporter's textfile collector.

See https://prometheus.io/docs/instrumenting/exposition_formats and
https://github.com/prometheus/node_exporter#textfile-collector.
"""

import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from llm.errors import ConfigError, one_line
from llm.runtime.files import write_whole

_FIRST_LINE = "# Written by llm-trainers.\n"
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID")

logger = logging.getLogger("llm")


def check_metrics_file(path: Path) -> None:
    """Refuse a metrics file that cannot be written, or that another program has written.

    Raises:
        ConfigError: Names the path and the reason.
    """
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(
            f"--metrics_file {path}: {folder} is not a folder on the host of rank 0; create it, or "
            "name a file in another one."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--metrics_file {path}: {folder} cannot be written to (you lack the permission, or "
            "the file system is read-only); name a file in another folder."
        )
    try:
        is_of_run = path.read_text(encoding="utf-8").startswith(_FIRST_LINE)
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        is_of_run = False
    if not is_of_run:
        raise ConfigError(
            f"--metrics_file {path} exists and was not written by a run, which would replace it; "
            "move it away, or name another file."
        )


class PrometheusFile:
    """A file with the last value of each metric of a run.

    Args:
        path: The file.
        output_dir: Folder of the run, for the labels.
    """

    def __init__(self, path: Path, *, output_dir: Path) -> None:
        self._path = path
        folder = output_dir.resolve()
        self._labels = {"run": folder.name, "output_dir": str(folder)}
        job_ids = [os.environ[name] for name in _JOB_VARIABLES if name in os.environ]
        if job_ids:
            self._labels["job_id"] = job_ids[0]
        self._values: dict[str, float] = {}
        self._has_failed = False

    def update(self, values: Mapping[str, float]) -> None:
        """Replace values by name, and rewrite the file; warn once if that fails."""
        self._values |= values
        try:
            write_whole(self._path, self._format_metrics(), survives_power_cut=False)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    f"--metrics_file {self._path} cannot be written ({one_line(error)}). Training "
                    "continues, and the next report tries again."
                )

    def _format_metrics(self) -> str:
        """Return the values in the format of Prometheus; the `web` of `loss/web` is a label."""
        samples_by_metric: dict[str, list[str]] = {}
        for name, value in self._values.items():
            metric, _, part = name.partition("/")
            labels = self._labels | ({"part": part} if part else {})
            label_text = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
            metric = "llm_" + re.sub("[^a-zA-Z0-9_]", "_", metric)
            sample = f"{metric}{{{label_text}}} {_format_value(value)}\n"
            samples_by_metric.setdefault(metric, []).append(sample)
        metric_blocks = [
            f"# TYPE {metric} gauge\n{''.join(samples)}"
            for metric, samples in samples_by_metric.items()
        ]
        return _FIRST_LINE + "".join(metric_blocks)


def _escape(text: str) -> str:
    """Return the value of a label without characters that would end it."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _format_value(value: float) -> str:
    if math.isfinite(value):
        return str(value)
    return "NaN" if math.isnan(value) else f"{value:+}".replace("inf", "Inf")
