"""Training on a mixture in stages: any ranks, stops and kills at the borders, losses by source."""

import json
import re
from pathlib import Path

import pytest

from llm.config.toml import read_toml
from llm.errors import ConfigError, LLMError
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.faults import Fault
from tests.support.recovery import check_same, kill_and_go_on, weights_hash, without_times
from tests.support.token_files import random_documents, write_pair
from tests.support.training import NO_DROPOUT, Bench, Run

BORDER, LATER = 2_000, 3_500
"""Tokens: the borders lie within the eighth and the fourteenth of 20 steps of 256 tokens."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("bench"), lines=2, **NO_DROPOUT)
    for seed, (name, first_id) in enumerate([("web", 1), ("code", 150), ("math", 60)]):
        write_pair(bench.folder / name, random_documents(100, seed=seed, first_id=first_id))
    return bench


Blend = list[float | str]


def stages_file(bench: Bench, *stages: tuple[int | None, Blend], head: str = "") -> Path:
    """A TOML file with stages, whose sources are named in the bench's folder."""
    tables = []
    for until, blend in stages:
        words = [str(bench.folder / word) if isinstance(word, str) else word for word in blend]
        until_line = "" if until is None else f'until = "{until}"\n'
        tables.append(f"[[data_stage]]\n{until_line}data_path = {json.dumps(words)}\n")
    file = bench.folder / f"{len(list(bench.folder.glob('*.toml')))}.toml"
    file.write_text(head + "\n".join(tables))
    return file


def three_stages(bench: Bench) -> Path:
    return stages_file(
        bench,
        (BORDER, [0.75, "web", 0.25, "code"]),
        (LATER, [0.5, "code", 0.5, "math"]),
        (None, [0.2, "math", 0.8, "web"]),
    )


OPTIONS = {"train_file": None, "split": "9,1", "log_source_losses": True}


@pytest.fixture(scope="module")
def staged(bench) -> Run:
    return bench.train_well(
        "staged", config=three_stages(bench), per_device_train_batch_size=8, **OPTIONS
    )


def source_losses(run: Run) -> list[dict[str, float]]:
    losses = [{k: v for k, v in row.items() if k.startswith("loss/")} for row in run.metrics]
    return [row for row in losses if row]


def test_stages_are_logged_with_their_borders_and_shares(staged):
    for line in (
        "data stage 1 from sample 0: web 75.00%, code 25.00%",
        "data stage 2 from sample 62: code 50.00%, math 50.00%",
        "data stage 3 from sample 109: web 80.00%, math 20.00%",
        r"training data web: 90 documents, [\d,]+ tokens",
        r"source web will serve 88 samples \(55.00%\), [\d.]+ epochs of its data",
        r"source code served 39 samples \(24.38%\)",
    ):
        assert re.search(line, staged.output), line


def test_each_report_has_the_loss_of_the_sources_of_its_stage(staged):
    rows = source_losses(staged)
    assert [sorted(row) for row in rows] == [
        *[["loss/code", "loss/web"]] * 7,
        ["loss/code", "loss/math", "loss/web"],
        *[["loss/code", "loss/math"]] * 5,
        ["loss/code", "loss/math", "loss/web"],
        *[["loss/math", "loss/web"]] * 6,
    ]
    assert re.search(r"nan steps: +0 \| loss/web: [\d.]+E\+00 \| loss/code: ", staged.output)


def test_the_losses_of_the_sources_weighted_by_tokens_are_the_loss(bench, staged):
    samples = bench.read(config=three_stages(bench), **OPTIONS).samples
    before = [0, 0, 0]
    for row in (row for row in staged.metrics if "loss" in row):
        served = samples.samples_per_source(row["samples"])
        counts = [now - then for now, then in zip(served, before, strict=True)]
        parts = [
            count * row.get(f"loss/{name}", 0.0)
            for name, count in zip(("web", "code", "math"), counts, strict=True)
        ]
        assert sum(parts) / sum(counts) == pytest.approx(row["loss"], rel=1e-13)
        before = served


def test_logging_the_losses_of_sources_changes_no_weight(bench, staged):
    plain = bench.train_well(
        "plain",
        config=three_stages(bench),
        per_device_train_batch_size=8,
        **{**OPTIONS, "log_source_losses": None},
    )
    assert weights_hash(plain.folder) == weights_hash(staged.folder)
    assert plain.losses == pytest.approx(staged.losses, rel=1e-6)
    assert source_losses(plain) == []


def test_a_single_stage_is_the_blend_of_the_flag(bench):
    blend = [0.75, "web", 0.25, "code"]
    options = {**OPTIONS, "max_train_steps": 4}
    one = bench.train_well("one", config=stages_file(bench, (None, blend)), **options)
    words = [str(bench.folder / word) if isinstance(word, str) else word for word in blend]

    flat = bench.train_well("flat", data_path=words, **options)

    assert without_times(one) == without_times(flat)


def test_the_recorded_configuration_has_the_stages(bench, staged):
    config = GPTConfig(**read_toml(GPTConfig, staged.folder / "config.toml"))
    assert [stage.until for stage in config.data_stage] == [BORDER, LATER, None]
    assert config.data_stage[2].data_path[2:] == (0.8, str(bench.folder / "web"))


def assert_near(run: Run, straight: Run) -> None:
    assert run.losses == pytest.approx(straight.losses, rel=1e-5)
    for ours, theirs in zip(source_losses(run), source_losses(straight), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_stops_around_a_border_and_other_ranks_change_no_loss(bench, staged):
    """From two ranks to one before the step with the border, and back to two after it."""
    options = {**OPTIONS, "global_batch_size": 8, "change_on_resume": "max_train_steps"}
    for end, ranks in ((7, 2), (8, 1), (20, 2)):
        bench.train_well(
            "moved",
            ranks=ranks,
            config=three_stages(bench),
            max_train_steps=end,
            checkpointing_steps=10,
            resume_from_checkpoint=True,
            per_device_train_batch_size=2,
            **options,
        )
    assert_near(Run(bench.folder / "moved", []), staged)


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_around_the_borders_change_no_bit(bench, ranks):
    """In the steps before, at and after both borders; the interval of a report is open."""
    options = {**OPTIONS, "report_to": "tensorboard", "checkpointing_steps": 1, "logging_steps": 3}
    options |= {"config": three_stages(bench), "per_device_train_batch_size": 8 // ranks}
    straight = bench.train_well(f"straight-{ranks}", ranks=ranks, **options)
    step = "llm.trainers.gpt.loop:Trainer.train_step"
    # Each start goes on after the last checkpoint that is whole: kills in about the steps 7 to 15.
    kills = [Fault(at=step, what="SIGKILL", call=call, rank=0) for call in (8, 2, 2, 4, 2)]

    run = kill_and_go_on(bench, f"killed-{ranks}", kills, together=True, ranks=ranks, **options)

    check_same(run, straight)


LAYOUTS = {
    "PP2": {"pipeline_parallel_size": 2},
    "FSDP2": {"data_parallel_shard_size": 2},
    "TP2": {"tensor_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
    "DP2": {},
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.extended if name == "PP2" else pytest.mark.layouts)
        for name in LAYOUTS
    ],
)
def test_every_layout_logs_the_same_losses_of_the_sources(bench, staged, layout):
    data_ranks = 2 if layout in ("FSDP2", "DP2") else 1
    run = bench.train_well(
        layout,
        ranks=2,
        config=three_stages(bench),
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4 // data_ranks,
        **LAYOUTS[layout],
        **OPTIONS,
    )
    assert_near(run, staged)


@pytest.mark.layouts
@pytest.mark.parametrize("way", ["gossip", "diloco"])
def test_replicas_log_the_mean_over_the_tokens_of_all_of_them(bench, way):
    options = {"config": three_stages(bench), "per_device_train_batch_size": 4, **OPTIONS}
    with_sources = bench.train_well(f"{way}-sources", ranks=2, data_parallel=way, **options)
    options["log_source_losses"] = None
    plain = bench.train_well(f"{way}-plain", ranks=2, data_parallel=way, **options)
    assert with_sources.losses == pytest.approx(plain.losses, rel=1e-6)
    assert len(source_losses(with_sources)) == 20


def test_bad_stages_are_refused_in_a_sentence_each(bench):
    write_pair(bench.folder / "short", [[5] * 20])
    web = [1.0, "web"]
    for stages, words in (
        ([(2000, web), (1000, web), (None, web)], "data_stage 2 ends at 1,000 tokens"),
        ([(31, web), (None, web)], "data_stage 1 ends at 31 tokens, before its first sample of"),
        (
            [(None, [0, "web", 0, "code"])],
            "data_stage 1: data_path gives every source the weight 0",
        ),
        ([(None, [1, "nowhere"])], "no token file"),
        ([(BORDER, web), (None, [*web, 0.1, "short"])], "The source short has 20 tokens, too few"),
    ):
        with pytest.raises(LLMError, match=re.escape(words)):
            bench.read(config=stages_file(bench, *stages), **{**OPTIONS, "split": "1"})


def test_a_run_that_would_use_a_source_up_is_refused_before_it_begins(bench):
    two = [(BORDER, [1.0, "web"]), (None, [1.0, "code"])]
    config = stages_file(bench, *two, head="max_epochs = 1\n")
    said = "--max_epochs is 1 for the source code, which has 75 samples, .* would take 98 "
    with pytest.raises(ConfigError, match=said):
        bench.read(ranks=2, config=config, **{**OPTIONS, "split": "1"})


def test_samples_that_are_left_out_count_as_used_up(bench):
    two = [(BORDER, [1.0, "web"]), (None, [1.0, "code"])]
    options = {**OPTIONS, "split": "1", "per_device_train_batch_size": 8}
    options["config"] = stages_file(bench, *two, head="max_epochs = 1.4\n")
    assert bench.read(**options).batch_plan.total_samples == 160  # 98 of code, of which 105 may be
    with pytest.raises(LLMError, match=r"the source code, .* would take 106 "):
        bench.read(**options, skip_samples="100:108")


def test_a_resume_with_other_stages_is_refused_unless_it_is_allowed(bench):
    blend = [1.0, "web"]
    options = {**OPTIONS, "max_train_steps": 2, "checkpointing_steps": 2}
    bench.train_well("grows", config=stages_file(bench, (None, blend)), **options)
    more = stages_file(bench, (BORDER, blend), (None, [1.0, "code"]))
    options |= {"resume_from_checkpoint": True, "max_train_steps": 17}

    with pytest.raises(LLMError, match=r"data_stage was \[{"):
        bench.read("grows", config=more, change_on_resume="max_train_steps", **options)

    allowed = ["max_train_steps", "data_stage"]
    grown = bench.train_well("grows", config=more, change_on_resume=allowed, **options)
    assert len(grown.losses) == 17
    assert "loss/code" in grown.metrics[-1]


def test_a_stage_that_the_run_never_reaches_is_warned_of(bench):
    run = bench.train_well("brief", config=three_stages(bench), max_train_steps=2, **OPTIONS)
    assert "data_stage 3 begins after the last of 8 samples" in run.output
