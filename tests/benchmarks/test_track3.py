"""The program of track 3, at toy size on a CPU."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.track3 import (
    RECIPES,
    TOY,
    Shape,
    Tokens,
    Track3Model,
    Track3Options,
    Track3Run,
    is_significant,
    rate_at,
    report,
)
from llm.errors import ConfigError, DataError

pytestmark = pytest.mark.benchmarks


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Files of 700, 3,000 and 400 tokens, for batches of 128."""
    folder = tmp_path_factory.mktemp("fineweb")
    random = np.random.default_rng(0)
    for name, number in (("train_000001", 700), ("train_000002", 3000), ("val_000000", 400)):
        header = np.zeros(256, dtype=np.int32)
        header[:3] = 20240520, 1, number
        tokens = np.minimum(random.geometric(0.2, number), 63).astype(np.uint16)
        (folder / f"fineweb_{name}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    return folder


def run_of(folder: Path, **changes) -> Track3Run:
    options = Track3Options(
        **{"method": "muon-hyperball", "steps": 12, "micro_batch_size": 4, **changes},
        device="cpu",
        toy=True,
    )
    return Track3Run(options, 0, folder)


def state_of(run: Track3Run) -> dict[str, torch.Tensor]:
    state = run._state()
    moments = {f"{n}/{k}": t for n, its in state["optimizer"].items() for k, t in its.items()}
    return {**state["model"], **moments, **state["parts"].get("hyperball", {})}


@pytest.mark.parametrize("method", sorted(RECIPES))
def test_a_run_in_parts_is_one_run_bit_for_bit(data, tmp_path, method):
    tokens = Tokens(data, TOY)
    whole = run_of(tmp_path / "whole", method=method)
    assert whole.train(tokens, deadline=float("inf"))
    for _ in range(20):
        part = run_of(tmp_path / "parts", method=method)
        if part._step == 12:
            break
        part._train_step(*tokens.batch(part._step))
        part._step += 1
        part.train(tokens, deadline=0.0)
    assert part.losses[12] == whole.losses[12]
    expected = state_of(whole)
    assert len(expected) > 50
    for name, tensor in state_of(part).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_run_goes_down_and_matrices_keep_their_norms(data, tmp_path):
    run = run_of(tmp_path)
    norms = {n: p.norm().item() for n, p in run._model.named_parameters() if ".mlp." in n}
    run.train(Tokens(data, TOY), deadline=float("inf"))
    assert run.losses[12] < run.losses[0] - 0.5
    for name, parameter in run._model.named_parameters():
        if ".mlp." in name and parameter.ndim == 2:
            assert parameter.norm().item() == pytest.approx(norms[name], rel=1e-6)


def test_a_folder_of_other_settings_is_refused(data, tmp_path):
    run_of(tmp_path).train(Tokens(data, TOY), deadline=0.0)
    with pytest.raises(ConfigError, match="from a run with steps 12, and this one has 13"):
        run_of(tmp_path, steps=13)


def test_a_batch_that_does_not_fit_begins_in_the_next_file(data):
    tokens = Tokens(data, TOY)
    first = np.fromfile(data / "fineweb_train_000001.bin", dtype=np.uint16)[512:].astype(np.int64)
    second = np.fromfile(data / "fineweb_train_000002.bin", dtype=np.uint16)[512:].astype(np.int64)
    # 128 x 5 + 1 tokens are the last that fit into 700.
    for step, expected in ((0, first[:129]), (4, first[512:641]), (5, second[:129])):
        inputs, labels = tokens.batch(step)
        assert inputs.shape == labels.shape == (8, 16)
        assert inputs.flatten().tolist() == expected[:-1].tolist()
        assert labels.flatten().tolist() == expected[1:].tolist()
    with pytest.raises(DataError, match="tokens for 28 steps only"):
        tokens.batch(28)


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "does not begin as"), (8, "fewer tokens than"), (1500, "fewer tokens than")],
)
def test_a_file_of_an_unfinished_download_is_refused(data, tmp_path, size, words):
    for path in data.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "fineweb_train_000002.bin"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=rf"fineweb_train_000002\.bin .*{words}"):
        Tokens(tmp_path, TOY)


def test_the_model_has_the_parameters_of_the_track():
    with torch.device("meta"):
        model = Track3Model(Shape(), seed=0, is_on_spheres=False)
    number = sum(p.numel() for p in model.parameters())
    # 12 x (12 width^2 + 9 width + 2 width) for biases and gains, both ends, their norms and a bias.
    blocks = 12 * (12 * 768**2 + 11 * 768)
    assert number == blocks + 2 * 50304 * 768 + 50304 + 2 * 768


def test_no_token_sees_a_later_one():
    model = Track3Model(TOY, seed=0, is_on_spheres=True).float()
    ids = torch.randint(64, (1, 17), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 64
    labels = torch.full((1, 16), -100)  # not counted
    labels[0, :8] = ids[0, 1:9]
    assert model(ids[:, :-1], labels) == model(changed[:, :-1], labels)
    labels[0, 8] = ids[0, 9]
    assert model(ids[:, :-1], labels) != model(changed[:, :-1], labels)


def test_the_report_has_the_mean_of_all_seeds_and_continues(data, tmp_path):
    options = Track3Options(
        **{"data": str(data), "run": str(tmp_path), "device": "cpu", "toy": True},
        **{"method": "muon", "steps": 4, "seeds": 2, "micro_batch_size": 8},
    )
    stopped = report(dataclasses.replace(options, minutes=1e-9), tmp_path)
    assert "| 4 |" not in stopped
    text = report(options, tmp_path)
    assert "muon, 2 runs, at toy size, which is not the track's." in text
    assert "| 0 | 2 | 4.15" in text  # ln 64, because the head begins at zero
    assert "| 4 | 2 | " in text


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([3.2759], True), ([3.2770], False), ([3.2770] * 4, True), ([3.2790] * 15, False)],
)
def test_the_rule_asks_for_a_margin_that_shrinks_with_the_root_of_the_runs(losses, expected):
    assert is_significant(losses) is expected


@pytest.mark.parametrize(("step", "rate"), [(0, 0.2), (4, 1.0), (30, 1.0), (80, 0.5), (99, 0.025)])
def test_rates_rise_stay_and_fall_on_straight_lines(step, rate):
    group = {"peak": 1.0, "cooldown": 0.4}
    assert rate_at(group, step, steps=100, warmup_steps=5) == pytest.approx(rate)
