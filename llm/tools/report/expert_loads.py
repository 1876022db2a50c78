"""The load of experts over time: reads the records of a run, and draws them as heat maps."""

import base64
import dataclasses
import io
import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from llm.tools.report.run_files import is_count

MAX_SNAPSHOTS = 6
"""Maximum maps of all experts; with more records, they are evenly spread over the run."""
_MAX_COLUMNS = 1000
"""Maximum columns of the map over time; with more records, a column is the largest of several."""
_MAX_EXPERTS = 1 << 16
"""Maximum experts of a record, in all layers."""

_SATURATED_LOAD = 4.0
"""Relative load from which the color of a map does not change."""
_ABOVE, _BELOW = (226, 92, 32), (46, 116, 226)
"""Colors above and below the mean load, visible on light and on dark paper."""

_CELL = 24
_MAP_HEIGHT = 180


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLoads:
    """A record of the load of every expert, relative to the mean of its layer.

    Attributes:
        step: Optimizer steps done.
        layers: Numbers of the layers.
        loads: [layers, experts], float64; NaN where a layer has fewer experts than others.
    """

    step: int
    layers: tuple[int, ...]
    loads: npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeatMap:
    """A picture with a cell for each load, and its labels.

    Attributes:
        title: Title of the picture.
        remark: The largest load in words.
        colors: A color for each cell, transparent at the mean load, [rows, columns, 4].
        height: Height in pixels of the page.
        top: Label of the first row.
        bottom: Label of the last row.
        left: Label of the first column.
        right: Label of the last column.
    """

    title: str
    remark: str
    colors: npt.NDArray[np.uint8]
    height: int
    top: str
    bottom: str
    left: str
    right: str

    @property
    def image(self) -> str:
        """A PNG image of a pixel for each cell, as a data URL."""
        from matplotlib.image import imsave

        file = io.BytesIO()
        imsave(file, self.colors, format="png")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def collect_expert_loads(lines: Sequence[dict[str, Any]]) -> list[ExpertLoads]:
    """Return the records in the lines of events.jsonl, without those that a resume took back.

    Records of another size than the last one, and those that are not tables of loads, are left out.
    """
    records: list[ExpertLoads] = []
    for line in lines:
        step = line.get("step")
        if not is_count(step):
            continue
        if line.get("event") in ("start", "rewind"):
            records = [record for record in records if record.step <= step]
        elif line.get("event") == "experts":
            record = _read_record(step, line.get("layers"), line.get("loads"))
            if record is not None:
                records.append(record)
    return [
        record
        for record in records
        if record.layers == records[-1].layers and record.loads.shape == records[-1].loads.shape
    ]


def make_snapshot_maps(records: Sequence[ExpertLoads]) -> list[HeatMap]:
    """Return maps of all experts at some steps: a row for each layer, a column for each expert."""
    num_snapshots = min(MAX_SNAPSHOTS, len(records))
    record_indices = np.linspace(0, len(records) - 1, num_snapshots).round().astype(int)
    maps = []
    for record in (records[index] for index in record_indices):
        _, num_experts = record.loads.shape
        heat_map = _make_map(
            record.loads,
            title=f"Step {record.step:,}",
            layers=record.layers,
            columns=("expert 0", str(num_experts - 1)),
        )
        maps.append(heat_map)
    return maps


def make_time_map(records: Sequence[ExpertLoads]) -> HeatMap:
    """Return a map of the largest load of each layer: a column for each record."""
    # [layers, records]
    max_loads = np.stack([np.nanmax(record.loads, axis=1) for record in records], axis=1)
    records_per_column = math.ceil(len(records) / _MAX_COLUMNS)
    padding = -len(records) % records_per_column
    padded = np.pad(max_loads, ((0, 0), (0, padding)), mode="edge")
    return _make_map(
        padded.reshape(len(padded), -1, records_per_column).max(axis=2),
        title="Largest load of each layer",
        layers=records[-1].layers,
        columns=(f"step {records[0].step:,}", f"{records[-1].step:,}"),
    )


def _read_record(step: int, layers: Any, table: Any) -> ExpertLoads | None:
    """Return a record; None if its values are of another kind than a run writes."""
    if not isinstance(layers, list) or not all(map(is_count, layers)):
        return None
    if not _is_load_table(table) or len(layers) != len(table):
        return None
    max_experts = max(map(len, table))
    loads = np.full((len(table), max_experts), math.nan)
    for row_index, row in enumerate(table):
        loads[row_index, : len(row)] = row
    return ExpertLoads(step=step, layers=tuple(layers), loads=loads)


def _is_load_table(table: Any) -> TypeGuard[list[list[float]]]:
    """Return whether a value is a list of loads for each layer, with at least one layer."""
    if not isinstance(table, list) or not table:
        return False
    if not all(isinstance(row, list) and row for row in table):
        return False
    if sum(map(len, table)) > _MAX_EXPERTS:
        return False
    return all(type(load) in (int, float) and 0 <= load < 1e9 for row in table for load in row)


def _make_map(
    loads: npt.NDArray[np.float64], *, title: str, layers: Sequence[int], columns: tuple[str, str]
) -> HeatMap:
    """Return the map of a table of loads.

    Args:
        loads: [layers, columns]; NaN where there is no expert.
        title: Title of the map.
        layers: Number of the layer of each row.
        columns: Labels of the first and the last column.
    """
    return HeatMap(
        title=title,
        remark=f"largest {np.nanmax(loads):.2f}x",
        colors=_color_loads(loads),
        height=min(_CELL * len(loads), max(_MAP_HEIGHT, 3 * len(loads))),
        top=f"layer {layers[0]}",
        bottom=str(layers[-1]) if len(layers) > 1 else "",
        left=columns[0],
        right=columns[1] if loads.shape[1] > 1 else "",
    )


def _color_loads(loads: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Return the color of each load, [rows, columns, 4]: half and twice the mean are as strong."""
    loads = np.nan_to_num(loads, nan=1.0)
    is_below_mean = loads < 1
    strength_above = np.log2(loads.clip(1, _SATURATED_LOAD)) / math.log2(_SATURATED_LOAD)
    opacity = np.where(is_below_mean, 1 - loads, strength_above)
    colors = np.empty((*loads.shape, 4), dtype=np.uint8)
    colors[..., :3] = np.where(is_below_mean[..., None], _BELOW, _ABOVE)
    colors[..., 3] = (255 * opacity).round()
    return colors
