"""The heat maps of a report have the loads of the experts that the run has recorded."""

import base64
import io
import json

import numpy as np
import pytest
from matplotlib.image import imread

from llm.tools.report.expert_loads import collect_expert_loads, make_snapshot_maps, make_time_map
from llm.tools.report.report import main

ORANGE, BLUE = [226, 92, 32], [46, 116, 226]


def record(step: int, *loads: list[float]) -> dict[str, object]:
    return {"event": "experts", "step": step, "layers": [*range(len(loads))], "loads": [*loads]}


def pixels(heat_map) -> np.ndarray:
    data = base64.b64decode(heat_map.image.removeprefix("data:image/png;base64,"))
    return (255 * imread(io.BytesIO(data), format="png")).round().astype(int)


def test_a_map_is_orange_above_the_mean_load_and_blue_below_it():
    [heat_map] = make_snapshot_maps(
        collect_expert_loads([record(20, [4.0, 0.0, 1.0, 2.0], [9.0, 0.5, 1, 1])])
    )
    colors = pixels(heat_map)
    assert colors[0, 0].tolist() == [*ORANGE, 255]
    assert colors[0, 1].tolist() == [*BLUE, 255]
    assert colors[..., 3].tolist() == [[255, 255, 0, 128], [255, 128, 0, 0]]
    assert (heat_map.title, heat_map.remark) == ("Step 20", "largest 9.00x")
    assert [heat_map.top, heat_map.bottom, heat_map.left, heat_map.right] == [
        *("layer 0", "1"),
        *("expert 0", "3"),
    ]


def test_a_layer_with_fewer_experts_has_no_color_where_it_has_none():
    [heat_map] = make_snapshot_maps(collect_expert_loads([record(20, [4.0, 0.0, 0.0], [0.0, 2.0])]))
    assert pixels(heat_map)[..., 3].tolist() == [[255, 255, 255], [255, 128, 0]]


def test_the_map_over_time_has_a_column_for_each_record():
    records = collect_expert_loads([record(step, [4.0, 0.0], [1.0, 1.0]) for step in (10, 20, 30)])
    heat_map = make_time_map(records)
    assert pixels(heat_map)[..., 3].tolist() == [[255] * 3, [0] * 3]
    assert (heat_map.left, heat_map.right) == ("step 10", "30")


def test_long_runs_have_six_maps_and_thousand_columns_of_the_largest_loads():
    lines = [record(step, [1.0 + (step == 1001), 0.0]) for step in range(1, 1502)]
    records = collect_expert_loads(lines)
    titles = [heat_map.title for heat_map in make_snapshot_maps(records)]
    assert titles == ["Step 1", "Step 301", "Step 601", "Step 901", "Step 1,201", "Step 1,501"]
    colors = pixels(make_time_map(records))
    assert colors.shape == (1, 751, 4)
    assert colors[0, :, 3].nonzero()[0].tolist() == [500]


def test_records_that_a_resume_took_back_are_left_out():
    lines = [
        *({"event": "start", "step": 0}, record(10, [1, 1]), record(20, [1, 1])),
        *({"event": "start", "step": 10}, record(15, [1, 1])),
        *(record(25, [1, 1]), {"event": "rewind", "step": 20}),
    ]
    assert [each.step for each in collect_expert_loads(lines)] == [10, 15]


@pytest.mark.parametrize(
    "values",
    [
        {"loads": [[1.0, "many"]]},
        {"loads": [[1.0, float("nan")]]},
        {"loads": [[1.0, -1.0]]},
        {"loads": [[True, 1.0]]},
        {"loads": [[]]},
        {"loads": []},
        {"loads": 1.0},
        {"loads": [[1.0] * 100_000]},
        {"layers": [0, 1]},
        {"layers": ["0"]},
        {"layers": None},
        {"step": None},
        {"step": -1},
    ],
)
def test_records_of_another_kind_than_a_run_writes_are_left_out(values):
    odd = record(20, [1.0, 1.0]) | values
    assert [each.step for each in collect_expert_loads([record(10, [1, 1]), odd])] == [10]


@pytest.mark.parametrize("recorded", [True, False])
def test_only_a_page_of_a_run_with_such_records_has_maps(tmp_path, recorded):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text("")
    line = {"step": 10, "loss": 2.0, "moe_max_load": 2.0, "moe_max_load/0": 2.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    if recorded:
        (folder / "events.jsonl").write_text(json.dumps(record(10, [2.0, 0.0])) + "\n")
    assert main([str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert ("Load of each expert" in page) == recorded
    assert page.count('<img src="data:image/png;base64,') == (2 if recorded else 0)
    assert "Largest load of an expert" in page
    assert "moe max load/0" not in page


def test_images_have_the_loads_of_each_run_in_the_colors_of_the_page(tmp_path, capsys):
    for name, loads in {"a": [[4.0, 0.0], [1.0, 1.0]], "b": None, "c": [[0.0, 4.0]]}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.toml").write_text("")
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 10, "loss": 2.0}) + "\n")
        if loads:
            (folder / "events.jsonl").write_text(json.dumps(record(10, *loads)) + "\n")
    runs = [str(tmp_path / name) for name in "abc"]
    images = tmp_path / "png"
    assert main([*runs, "--png", str(images)]) == 0
    assert sorted(path.name for path in images.glob("experts*")) == [
        "experts-1.png",
        "experts-3.png",
    ]
    assert str(images / "experts-3.png") in capsys.readouterr().out

    assert main([runs[0], "--png", str(images)]) == 0
    colors = (255 * imread(images / "experts.png")).round().astype(int)[..., :3]
    for color in (ORANGE, BLUE):  # half of a row of two, and of a row of one, in a 7-inch figure
        assert (colors == color).all(-1).sum() > 10_000
