"""What a run does and leaves behind: schedule of events, files, results, exit codes."""

import json
import math
import re
import shutil
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

from llm.checkpoint.run_folder import RunFolder
from llm.config.toml import read_toml
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.faults import Fault
from tests.support.ranks import run_ranks
from tests.support.training import NO_DROPOUT, Bench, Run

STEP = "llm.trainers.gpt.loop:Trainer.train_step"


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def test_epochs_evaluate_and_save_where_an_epoch_ends(bench):
    run = bench.train_well(
        "epochs", max_train_steps=None, num_train_epochs=2, checkpointing_steps="epoch",
        per_device_train_batch_size=100, block_size=16,
    )  # fmt: skip
    tokens = run.output.split("training data:")[1].split(" tokens")[0].split()[-1]
    windows = int(tokens.replace(",", "")) // 16
    steps = math.ceil(2 * windows / 100)
    first = math.ceil(windows / 100)
    assert [record["step"] for record in run.metrics if "loss" in record] == [*range(1, steps + 1)]
    assert run.metrics[-1]["samples"] == 2 * windows
    assert run.saved_steps == [first, steps]
    assert [r["step"] for r in run.metrics if "eval_loss" in r] == [first, steps]


def test_the_newest_and_the_best_checkpoints_are_kept(bench):
    run = bench.train_well(
        "best", max_train_steps=6, checkpointing_steps=1, keep_checkpoints=2, save_top_k=1,
        learning_rate=0.5,
    )  # fmt: skip
    losses = {r["step"]: r["eval_loss"] for r in run.metrics if "eval_loss" in r}
    best = min(losses, key=losses.__getitem__)
    assert set(losses) == {1, 2, 3, 4, 5, 6}
    assert run.saved_steps == sorted({best, 5, 6})
    assert (run.folder / "checkpoints" / "best").resolve().name == f"step_{best:08d}"


def test_permanent_checkpoints_are_saved_between_the_others(bench):
    options = {"checkpointing_steps": 3, "keep_checkpoints": 1}
    run = bench.train_well("permanent", max_train_steps=10, keep_every=4, **options)
    assert [event["step"] for event in run.events if event["event"] == "save"] == [
        3,
        4,
        6,
        8,
        9,
        10,
    ]
    assert run.saved_steps == [4, 8, 10]

    run = bench.train_well(
        "permanent", max_train_steps=13, keep_every=6, resume_from_checkpoint=True, **options
    )
    assert run.saved_steps == [4, 8, 12, 13]


def test_metrics_results_and_card_say_what_was_trained(bench):
    run = bench.train_well(
        "facts", max_train_steps=4, eval_steps=2, eval_metrics="accuracy", report_to="tensorboard",
        pad_vocab_to_multiple_of=100,
    )  # fmt: skip
    record = run.metrics[-1]
    for name in (
        "loss", "learning_rate", "grad_norm", "loss_scale", "skipped_steps", "nan_steps",
        "tokens_per_second", "samples", "tokens", "seconds", "eval_loss", "eval_accuracy",
    ):  # fmt: skip
        assert name in record
    results = run.read_json("all_results.json")
    assert results["eval_loss"] == record["eval_loss"]
    assert results["perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    assert 0 <= results["eval_accuracy"] <= 1
    assert results["tokens"] == 4 * 4 * 32
    assert "padded vocabulary: 320 + 80 = 400\n" in run.output
    windows = re.search(r"validation data: .* tokens, (\d+) windows", run.output)[1]
    assert f"samples: 16 in training, {windows} in validation, 0 in test\n" in run.output
    assert re.search(r"^initialized in \d+\.\d s$", run.output, re.MULTILINE)
    card = ModelCard.load(run.folder / "README.md", ignore_metadata_errors=False)
    assert card.data.pipeline_tag == "text-generation"
    evaluated = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert evaluated["loss"] == results["eval_loss"]
    assert "| block size | 32 |" in card.text

    board = EventAccumulator(str(run.folder / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [event.step for event in board.Scalars("eval/loss")] == [2, 4]
    assert board.Scalars("train/loss")[-1].value == pytest.approx(record["loss"])


def test_an_evaluation_is_one_log_line_that_includes_the_training_loss(bench):
    run = bench.train_well("said", max_train_steps=5, eval_steps=3, logging_steps=2)
    lines = [line for line in run.output.splitlines() if "validation at step" in line]
    said = [dict(part.split(": ") for part in line.split(" | ")[1:]) for line in lines]
    losses = {record["step"]: record["loss"] for record in run.metrics if "loss" in record}
    assert [float(values["train loss"]) for values in said] == [
        pytest.approx(losses[2], rel=1e-5),  # that of the last interval that was logged
        pytest.approx(losses[5], rel=1e-5),
    ]
    times = [float(values["train time"].removesuffix(" s")) for values in said]
    totals = [float(values["total train time"].removesuffix(" s")) for values in said]
    assert totals == pytest.approx([times[0], times[0] + times[1]], abs=0.11)
    assert float(said[1]["ms per step"]) == pytest.approx(1000 * times[1] / 2, abs=26)
    assert totals[1] == pytest.approx(run.metrics[-1]["seconds"], abs=0.1)


def test_the_written_configuration_runs_the_same_thing_again(bench):
    first = bench.train_well("origin", max_train_steps=3, weight_decay=0.1, betas=[0.8, 0.9])
    config = first.folder / "config.toml"
    assert read_toml(GPTConfig, config)["betas"] == (0.8, 0.9)
    names = {*read_toml(GPTConfig, config), "max_train_steps"} - {"output_dir"}
    again = bench.train_well("copy", **dict.fromkeys(names), config=config)
    assert again.losses == first.losses


def test_bytes_are_those_of_the_rows_that_validate(bench, tmp_path):
    rows = ["rain " * 20] * 10 + ["the king walked into the house"] * 90
    (tmp_path / "rows.txt").write_text("\n".join(rows) + "\n")
    run = bench.train_well(
        "split", train_file=tmp_path / "rows.txt", validation_split_percentage=10, max_train_steps=1
    )
    text = "".join(row + "\n" for row in rows[:10])
    tokenizer = AutoTokenizer.from_pretrained(bench.model)
    tokens = sum(len(tokenizer(row + "\n")["input_ids"]) for row in rows[:10])
    results = run.read_json("all_results.json")
    expected = results["eval_loss"] * tokens / math.log(2) / len(text)
    assert results["eval_bits_per_byte"] == pytest.approx(expected, rel=1e-6)


def test_without_validation_nothing_is_evaluated(bench):
    run = bench.train_well("novalid", max_train_steps=2, validation_split_percentage=0)
    assert "eval_loss" not in run.read_json("all_results.json")
    assert "no validation data: the loss is not evaluated\n" in run.output


def test_training_continues_pretrained_weights_unless_from_scratch(bench):
    first = bench.train_well("pretrained", learning_rate=0.01)
    options = {"model_name_or_path": first.folder, "max_train_steps": 1}
    onward = bench.train_well("onward", **options)
    afresh = bench.train_well("afresh", from_scratch=True, **options)
    assert onward.losses[0] < first.losses[0] - 1
    assert afresh.losses[0] == pytest.approx(first.losses[0], abs=0.2)
    for run, initial in ((onward, f"from {first.folder}"), (afresh, "random, seed 1")):
        assert f"weights: {initial}\n" in run.output
        assert f"| initial weights | {initial} |" in (run.folder / "README.md").read_text()


def test_a_resumed_run_knows_its_initial_weights(bench):
    saving = {"checkpointing_steps": 2, "resume_from_checkpoint": True}
    first = bench.train_well("weights", max_train_steps=2)
    options = {"model_name_or_path": first.folder, **saving}
    bench.train_well("resumed", max_train_steps=2, **options)
    resumed = bench.train_well("resumed", max_train_steps=4, **options)
    assert f"weights: from {resumed.folder}/checkpoints/step_00000002\n" in resumed.output
    card = (resumed.folder / "README.md").read_text()
    assert f"| initial weights | from {first.folder} |" in card
    assert "holds no weights: the model is trained from scratch" in first.output


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_compiled_model_has_the_same_losses(tmp_path, family):
    bench = Bench(tmp_path, family=family, **(NO_DROPOUT if family == "gpt2" else {}))
    plain = bench.train_well("plain", max_train_steps=3)
    compiled = bench.train_well("compiled", max_train_steps=3, torch_compile=True, timeout=400)
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-4)


def test_a_second_start_tokenizes_no_text(bench, tmp_path):
    text = shutil.copy(bench.text, tmp_path / "text.txt")
    first = bench.train_well("cold", train_file=text, max_train_steps=1)
    second = bench.train_well("warm", train_file=text, max_train_steps=1)
    assert "tokenizing" in first.output
    assert "tokenizing" not in second.output
    assert "using the cached tokens" in second.output
    assert second.losses == first.losses


GOLDEN = [
    5.76604, 5.80389, 5.72069, 5.60875, 5.48650, 5.33865, 5.24515, 5.09467, 4.99286, 4.89784,
    4.76134, 4.71799, 4.57212, 4.56287, 4.49945, 4.42144, 4.36775, 4.32050, 4.38428, 4.34185,
]  # fmt: skip


def test_the_losses_match_the_recorded_golden_curve(tmp_path):
    """20 steps of a tiny GPT; a change that must not move the loss leaves these numbers alone.

    Tolerance 1e-4 relative: other processors round matrix products differently.
    """
    bench = Bench(tmp_path, **NO_DROPOUT)
    run = bench.train_well("golden", weight_decay=0.1, lr_scheduler_type="cosine",
                           num_warmup_steps=4, learning_rate=3e-3)  # fmt: skip
    assert run.losses == pytest.approx(GOLDEN, rel=1e-4)


LONG = {"max_train_steps": 16, "checkpointing_steps": 1000, "logging_steps": 8}


@pytest.fixture(scope="module")
def straight(bench) -> Run:
    return bench.train_well("straight", **LONG)


@pytest.mark.parametrize(
    "name",
    [
        "SIGTERM",
        *(
            pytest.param(name, marks=pytest.mark.extended)
            for name in ("SIGINT", "SIGUSR1", "SIGHUP")
        ),
    ],
)
def test_a_signal_saves_with_exit_code_75_and_the_run_resumes_exactly(bench, straight, name):
    stopped = bench.train(name, faults=[Fault(at=STEP, what=name, call=10)], **LONG)

    assert stopped.codes == [75], stopped.output
    status = stopped.read_json("status.json")
    assert (status["status"], status["reason"]) == ("preempted", name)
    resumed = bench.train_well(name, resume_from_checkpoint=True, **LONG)
    assert resumed.losses == straight.losses
    assert resumed.read_json("status.json")["status"] == "finished"
    lines = (resumed.folder / "events.jsonl").read_text().splitlines()
    events = [(line["event"], line["step"]) for line in map(json.loads, lines)]
    step = status["step"]
    assert 10 <= step < 16
    assert [event for event in events if event[0] != "evaluation"] == [
        *(("start", 0), ("save", step), ("stop", step)),
        *(("start", step), ("resume", step), ("save", 16), ("stop", 16)),
    ]
    assert ("evaluation", 16) in events


@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
        # accelerate's way to start several processes, on a machine without GPUs as well
        pytest.param(
            ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines",
             "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["torchrun", "accelerate launch"],
)  # fmt: skip
def test_both_launchers_start_two_ranks_that_train_together(bench, launcher):
    name = f"launched-{launcher[0]}"
    command = [*launcher, "-m", "llm.trainers.gpt", *bench.command(name, max_train_steps=3)]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert "world: 2 ranks" in done.stdout
    assert Run(bench.folder / name, []).metrics[-1]["samples"] == 3 * 2 * 4


def test_a_failed_run_gives_its_reason_in_one_sentence_and_in_its_status(bench):
    folder = bench.folder / "fails"
    folder.mkdir()
    RunFolder(folder).write_status("failed")
    (folder / "checkpoints").write_text("a file where a folder must be")
    run = bench.train(
        "fails", max_train_steps=4, checkpointing_steps=2, resume_from_checkpoint=True
    )
    assert run.codes == [2]
    assert "The checkpoint of step 2 could not be written" in run.output
    assert "Training continues." in run.output
    assert "error: The checkpoint of step 4 could not be written" in run.output
    status = run.read_json("status.json")
    assert status["status"] == "failed"
    assert "CheckpointError" in status["reason"]
    assert [record["step"] for record in run.metrics] == [1, 2, 3, 4]


def test_an_unexpected_error_is_logged_with_its_traceback_and_code_1(bench):
    run = run_ranks(_break_down, 1, bench.command("breaks", max_train_steps=2))
    assert run[0].value == 1
    folder = bench.folder / "breaks"
    assert "RuntimeError: the roof fell in" in (folder / "log.txt").read_text()
    assert json.loads((folder / "status.json").read_text())["reason"] == (
        "RuntimeError: the roof fell in"
    )


def _break_down(argv: list[str]) -> int:
    from llm.trainers.gpt import loop, main

    def fall(self: object, batch: object) -> None:
        raise RuntimeError("the roof fell in")

    loop.Trainer.train_step = fall
    return main.main(argv)
