"""Branches: what they take from their parent, bit for bit, their cooldowns, what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from llm.checkpoint.format import Checkpoint
from llm.checkpoint.load import list_checkpoints
from llm.errors import CheckpointError, LLMError
from llm.tools.checkpoints import main as checkpoints
from llm.trainers.gpt.branch import make_branch
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.faults import Fault
from tests.support.recovery import (
    check_same,
    kill_and_go_on,
    last_counts,
    last_hash,
    weights_hash,
    without_times,
)
from tests.support.training import FROM_PARENT, Bench, Run

PARENT = {"max_train_steps": 8, "checkpointing_steps": 2, "eval_steps": 4}
STEP_TOKENS = 4 * 32


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def parent(bench) -> Run:
    """A run with dropout and a constant rate of 0.001."""
    return bench.train_well("parent", **PARENT)


@pytest.fixture(scope="module")
def cooled(bench, parent) -> Run:
    options = {"cooldown_tokens": 6 * STEP_TOKENS, "cooldown_shape": "sqrt", **FROM_PARENT}
    return bench.train_well("cooled", branch_from=parent.folder / "4", **options)


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """The time of change and the content of every file."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def after(run: Run, step: int) -> list[dict]:
    return [record for record in without_times(run) if record["step"] > step]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.layouts)])
def test_a_branch_continues_as_its_parent_bit_for_bit(bench, parent, ranks):
    if ranks > 1:
        parent = bench.train_well(f"parent-{ranks}", ranks=ranks, **PARENT)
    before = files(parent.folder)

    branch = bench.train_well(
        f"branch-{ranks}", ranks=ranks, branch_from=parent.folder / "4", **FROM_PARENT
    )

    assert [record["step"] for record in after(parent, 4)] == [5, 6, 7, 8, 8]
    assert without_times(branch) == after(parent, 4)
    assert last_hash(branch) == last_hash(parent)
    assert last_counts(branch) == last_counts(parent)
    assert weights_hash(branch.folder) == weights_hash(parent.folder)
    assert files(parent.folder) == before


def test_a_branch_neither_scores_nor_copies_the_checkpoint_of_its_parent(bench, parent):
    options = {"save_top_k": 1, **FROM_PARENT}
    branch = bench.train_well("scored", branch_from=parent.folder / "6", **options)

    assert [record["step"] for record in without_times(branch)] == [7, 8, 8]
    saved_steps = [saved.step for saved in list_checkpoints(branch.folder / "checkpoints")]
    assert saved_steps == [8]


def test_a_cooldown_starts_with_the_parents_next_step_and_falls_to_zero(parent, cooled):
    first, next_of_parent = after(cooled, 4)[0], after(parent, 4)[0]
    assert first == next_of_parent
    rates = [record["learning_rate"] for record in cooled.metrics if "loss" in record]
    # 1 - sqrt(k / 6) of 0.001
    literals = [1e-3, 5.917517e-4, 4.226497e-4, 2.928932e-4, 1.835034e-4, 8.712907e-5]
    assert rates == pytest.approx(literals, rel=1e-6)
    assert cooled.metrics[-1]["step"] == 10
    assert cooled.metrics[-1]["tokens"] == 10 * STEP_TOKENS


def test_a_cooldown_ends_as_a_run_that_decays_there_from_the_start(bench, parent):
    minimum = {"min_learning_rate": 1e-4}
    branch = bench.train_well(
        "linear", branch_from=parent.folder / "2", cooldown_tokens=4 * STEP_TOKENS,
        **{**FROM_PARENT, **minimum},
    )  # fmt: skip
    decay = {"lr_scheduler_type": "warmup_stable_decay", "num_decay_steps": 4, **minimum}
    straight = bench.train_well("straight", **{**PARENT, "max_train_steps": 6, **decay})

    assert branch.losses == straight.losses[2:]
    assert last_hash(branch) == last_hash(straight)


def test_a_branch_of_a_run_in_its_cooldown_continues_that(bench, cooled):
    options = {**FROM_PARENT, "max_train_steps": 20}  # as if the parent had been made longer since
    again = bench.train_well("again", branch_from=cooled.folder / "8", **options)
    assert without_times(again) == after(cooled, 8)
    assert last_hash(again) == last_hash(cooled)
    assert "--max_duration does not make the run longer" in again.output


def test_a_branch_is_resumed_without_its_parent(bench, parent, cooled):
    moved = bench.folder / "cut"
    shutil.copytree(cooled.folder, moved)
    shutil.rmtree(moved / "checkpoints" / "step_00000010")
    recorded = moved / "config.toml"
    text = recorded.read_text(encoding="utf-8")
    assert f"parent/checkpoints/step_{4:08d}" in text
    recorded.write_text(text.replace("parent/checkpoints", "gone/checkpoints"), encoding="utf-8")
    for manifest in moved.glob("checkpoints/*/manifest.json"):
        assert "parent/checkpoints" in manifest.read_text(encoding="utf-8")

    assert "not from --branch_from" in refusal(
        bench, "cut", config=recorded, resume_from_checkpoint=True
    )

    recorded.write_text(text, encoding="utf-8")
    aside = parent.folder.rename(bench.folder / "aside")
    resumed = bench.train_well("cut", config=recorded, resume_from_checkpoint=True, **FROM_PARENT)
    aside.rename(parent.folder)
    assert last_hash(resumed) == last_hash(cooled)
    assert without_times(resumed) == without_times(cooled)


def test_the_list_of_checkpoints_names_the_parent_of_a_branch(parent, cooled, capsys):
    assert checkpoints([str(cooled.folder)]) == 0
    path = parent.folder / "checkpoints" / "step_00000004"
    assert f"a branch of {path}, with a cooldown after step 4\n" in capsys.readouterr().out
    assert checkpoints([str(parent.folder)]) == 0
    assert "a branch of" not in capsys.readouterr().out


def test_the_log_says_in_what_a_branch_differs(bench, parent):
    options = {**FROM_PARENT, "learning_rate": 5e-4, "change_on_resume": "learning_rate"}
    branch = bench.train_well("slower", branch_from=f"{parent.folder}/6", **options)
    assert "learning_rate was 0.001 and is 0.0005" in branch.output
    events = (branch.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    kinds = {line["event"]: line for line in map(json.loads, events)}
    assert kinds["branch"]["step"] == kinds["start"]["step"] == 6


@pytest.mark.faults
def test_a_killed_branch_starts_again_from_its_parent_then_from_itself(bench):
    options = {"report_to": "tensorboard", "logging_steps": 3}
    parent = bench.train_well("split", ranks=2, **PARENT, **options)
    options = {
        **FROM_PARENT, "branch_from": parent.folder / "4", "cooldown_tokens": 20 * STEP_TOKENS,
    }  # fmt: skip
    straight = bench.train_well("whole", ranks=2, **options)
    step = "llm.trainers.gpt.loop:Trainer.train_step"
    # Steps 5 and 10: before the first checkpoint, and when that of step 6 is whole.
    kills = [Fault(at=step, what="SIGKILL", call=call, rank=1, amount=0.01) for call in (1, 6)]

    run = kill_and_go_on(bench, "killed", kills, together=True, **options)

    assert "Branched from" not in run.output  # the last start resumed the branch itself
    check_same(run, straight)


def refusal(bench: Bench, name: str = "refused", **options) -> str:
    """The sentence with which a start is refused, which writes nothing."""
    before = files(bench.folder)
    try:
        bench.read(name, **{**FROM_PARENT, **options})
    except LLMError as error:
        assert files(bench.folder) == before
        return str(error)
    raise AssertionError("It is not refused.")


COOLDOWN = {"cooldown_tokens": "1K"}


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("nowhere", {}, "is not a run: it has no config.toml"),
        ("parent/5", {}, "parent/5 names no checkpoint of"),
        ("parent/five", {}, "which has the steps 2, 4, 6, 8; name one of them."),
        ("parent/4", {"output_dir": None}, "--branch_from needs --output_dir"),
        ("parent/4", {"seed": 2, "block_size": 16}, "block_size was 32 and is 16; seed was 1 and"),
        ("parent/4", {"global_batch_size": 8}, "global_batch_size was 4 and is 8"),
        ("parent/4", {"max_train_tokens": "2K"}, "was '8 steps' and is '2000 tokens'"),
        ("parent", {}, "has all 8 steps done: give --cooldown_tokens"),
        ("parent/4", {"cooldown_tokens": 96}, "96 is less than one step of 128 tokens"),
        (
            "parent/4",
            {**COOLDOWN, "max_train_tokens": "2K"},
            "and --max_duration sets another one",
        ),
        ("cosine/2", COOLDOWN, "--lr_scheduler_type cosine has 0.0005"),
        ("cooled/8", COOLDOWN, "is in a cooldown already"),
        (None, COOLDOWN, "--cooldown_tokens needs --branch_from"),
    ],
)
def test_a_branch_that_cannot_be_is_refused(bench, parent, cooled, source, options, said):
    if source == "cosine/2" and not (bench.folder / "cosine").exists():
        cosine = {"max_train_steps": 4, "lr_scheduler_type": "cosine", "checkpointing_steps": 2}
        bench.train_well("cosine", **cosine)
    if source is not None:
        options = {"branch_from": bench.folder / source, **options}
    assert said in refusal(bench, **options)


def test_a_branch_is_refused_a_folder_that_holds_another_run(bench, parent, cooled):
    for step, name, options, said in (
        (4, "cooled", {}, "cooled holds a run already"),
        (4, "parent", {}, "is in --output_dir"),
        (4, "parent", {"overwrite_output_dir": True}, "which this run would replace"),
        (4, "parent", {"resume_from_checkpoint": True}, "belongs to a run that is not a branch"),
        (6, "cooled", {"resume_from_checkpoint": True, **COOLDOWN}, "cooldown_tokens was 768"),
        (6, "cooled", {"resume_from_checkpoint": True, "cooldown_tokens": 768,
                       "cooldown_shape": "sqrt"}, "step_00000004, not from --branch_from"),
    ):  # fmt: skip
        assert said in refusal(bench, name, branch_from=parent.folder / str(step), **options)


def test_a_branch_on_text_that_has_changed_is_refused(bench, parent, tmp_path):
    text = bench.text.read_text(encoding="utf-8")
    cache = {"data_cache_dir": tmp_path}  # or the refusal would have written to the bench
    try:
        bench.text.write_text(text[: len(text) // 2], encoding="utf-8")
        said = refusal(bench, branch_from=parent.folder / "4", **cache)
    finally:
        bench.text.write_text(text, encoding="utf-8")
    assert "The training data have changed since" in said
    assert "change_on_resume and the option's name." in said  # a branch has a folder of its own


def test_a_branch_records_the_step_at_which_its_rate_begins_to_fall():
    def start(step: int, tokens: int | None, branch: dict | None) -> Checkpoint:
        metadata = {"fixed": {"cooldown_tokens": tokens}, "branch": branch}
        path = Path(f"/runs/a/checkpoints/step_{step:08d}")
        return Checkpoint(
            path=path, step=step, saved_time="", world_size=1, metadata=metadata, files={}
        )

    def cooldown_from(parent: Checkpoint, tokens: int | None) -> int | None:
        branch = make_branch(GPTConfig(cooldown_tokens=tokens), None, parent)
        assert branch is not None
        return branch.cooldown_from

    older = {"parent": "/runs/b/checkpoints/step_00000010", "step": 10, "cooldown_from": 10}
    assert cooldown_from(start(20, None, None), None) is None
    assert cooldown_from(start(20, None, None), 500) == 20
    assert cooldown_from(start(20, 500, older), 500) == 10
    with pytest.raises(CheckpointError, match="900 begins at a stable rate"):
        cooldown_from(start(20, 500, older), 900)
    assert make_branch(GPTConfig(), start(20, None, None), None) is None
    resumed = make_branch(GPTConfig(cooldown_tokens=500), start(20, 500, older), None)
    assert resumed is not None
    assert (resumed.step, resumed.cooldown_from) == (10, 10)
