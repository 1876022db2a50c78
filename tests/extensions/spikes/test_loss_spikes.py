"""Spikes of a finite loss: documents of garbage are named, and a run goes back and round them."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from llm.config.toml import read_toml
from llm.data.batch_plan import BatchPlan
from llm.data.corpus import Corpus, CorpusSource, Samples, TokenStream
from llm.data.formats.megatron import TokenFile
from llm.data.loader import TrainLoader
from llm.data.order import MixtureStage
from llm.errors import ConfigError, DivergedError
from llm.extensions.spikes.loss_spikes import LossSpikes
from llm.tools.inspect import main
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.main import parse_args
from tests.support.faults import Fault
from tests.support.recovery import curves, last_counts, last_hash, without_times
from tests.support.token_files import write_pair
from tests.support.training import Bench, Run

BLOCK = 32
OPTIONS = {
    "train_file": None,
    "block_size": BLOCK,
    "max_train_steps": 80,
    "learning_rate": 1e-2,
    "logging_steps": 5,
    "checkpointing_steps": 20,
    "async_checkpoint": False,
}


class SpikyBench(Bench):
    """Two sources of regular documents; the second has garbage in the given steps.

    A document is a window of the first epoch, so garbage is in no other step. Four samples make a
    step.

    Attributes:
        garbage: Number of the document in each of the steps, counted from 1.
        data: The options that name the sources.
    """

    def __init__(self, folder: Path, steps: tuple[int, ...]) -> None:
        super().__init__(folder, lines=2)
        documents = {"clean": [[5, 6, 7, 8] * 8] * 400, "dirty": [[5, 9, 10, 11] * 8] * 200}
        sources = [self._write(name, own) for name, own in documents.items()]
        samples = Samples(sources, block_size=BLOCK, seed=1)
        draw = np.random.default_rng(0)
        self.garbage = {}
        for step in steps:
            numbers, starts = samples.locate(np.arange(4 * step - 4, 4 * step))
            self.garbage[step] = int(starts[numbers == 1][0]) // BLOCK
            # Its first token, the last label of the window before it, is a regular one.
            noise = draw.integers(100, 300, BLOCK - 1).tolist()
            documents["dirty"][self.garbage[step]] = [5, *noise]
        self._write("dirty", documents["dirty"])
        words = [0.5, folder / "clean", 0.5, folder / "dirty"]
        self.data = {**OPTIONS, "train_data_path": words}

    def _write(self, name: str, documents: list[list[int]]) -> CorpusSource:
        prefix = write_pair(self.folder / name, documents)
        return CorpusSource(name, 0.5, TokenStream(TokenFile(prefix)))


def events(run: Run, kind: str) -> list[dict[str, object]]:
    lines = (run.folder / "events.jsonl").read_text().splitlines()
    found = [record for record in map(json.loads, lines) if record["event"] == kind]
    return [{name: value for name, value in record.items() if name != "time"} for record in found]


@pytest.fixture(scope="module")
def thrice(tmp_path_factory) -> SpikyBench:
    return SpikyBench(tmp_path_factory.mktemp("thrice"), (61, 66, 74))


@pytest.fixture(scope="module")
def warned(thrice) -> Run:
    return thrice.train_well("warned", **thrice.data)


def test_every_step_with_a_document_of_garbage_is_named(thrice, warned):
    spikes = events(warned, "spike")

    assert [spike["step"] for spike in spikes] == [61, 66, 74]
    for spike in spikes:
        step = spike["step"]
        assert spike["first_sample"] == 4 * step - 4
        assert spike["last_sample"] == 4 * step - 1
        assert spike["sources"] == {"clean": 2, "dirty": 2}
        assert spike["loss"] > spike["median"]
        assert spike["score"] > 6
        line = f"the loss spiked at step {step}: {spike['loss']:.4g}, "
        (said,) = [text for text in warned.output.splitlines() if line in text]
        assert "from clean 2, dirty 2" in said
        assert said.endswith(f"its text: {spike['inspect']}")


def test_the_command_of_a_spike_shows_the_garbage(thrice, warned, capsys):
    for spike in events(warned, "spike"):
        command, program, *words = shlex.split(spike["inspect"])
        assert (Path(command).name, program) == ("llm-trainers", "inspect")

        assert main(words) == 0

        number = thrice.garbage[spike["step"]]
        assert f"document {number}, tokens 0 to 31 of 32" in capsys.readouterr().out


def test_a_resumed_run_warns_as_one_that_was_not_stopped(thrice, warned):
    folder = shutil.copytree(warned.folder, thrice.folder / "resumed")
    shutil.rmtree(folder / "checkpoints" / "step_00000080")
    (folder / "events.jsonl").unlink()

    resumed = thrice.train_well("resumed", resume_from_checkpoint=True, **thrice.data)

    assert "at step 60" in resumed.output
    names = ("step", "loss", "median", "score")
    assert [[spike[name] for name in names] for spike in events(resumed, "spike")] == [
        [spike[name] for name in names] for spike in events(warned, "spike")
    ]


@pytest.fixture(scope="module")
def once(tmp_path_factory) -> SpikyBench:
    return SpikyBench(tmp_path_factory.mktemp("once"), (68,))


def test_a_run_that_stops_says_what_to_do_and_keeps_its_checkpoints(once):
    stopped = once.train("stopped", on_loss_spike="stop", **once.data)

    assert stopped.codes == [2]
    assert "error: The loss of step 68 spiked (--on_loss_spike stop)" in stopped.output
    assert "--step 68, and continue" in stopped.output
    assert "--skip_samples 268:272" in stopped.output
    assert stopped.read_json("status.json")["status"] == "failed"
    assert last_hash(stopped).startswith("step 60:")


TWO = {"ranks": 2, "per_device_train_batch_size": 2}
KINDS = {
    "one rank": {"report_to": "tensorboard"},
    "two ranks": {**TWO, "report_to": "tensorboard"},
    "ekfac": {"kfac": True, "kfac_method": "ekfac"},
    "eigen": {"kfac": True, "kfac_method": "eigen"},
    "soap on shards, an average, a z-loss, losses by source": {
        **TWO,
        **{"data_parallel_shard_size": 2, "optimizer": "soap", "ema_decay": 0.9},
        **{"z_loss": 1e-4, "log_source_losses": True},
    },
    "fp16": {"mixed_precision": "fp16"},
    "gossip": {**TWO, "data_parallel": "gossip", "optimizer": "adamw"},
    "diloco": {**TWO, "data_parallel": "diloco"},
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.extended if kind == "two ranks" else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_a_rewound_run_equals_one_that_was_told_what_to_leave_out(once, kind, capsys):
    options = {**once.data, **KINDS[kind]}
    told, ranks = f"told-{kind}", KINDS[kind].get("ranks", 1)
    stopped = once.train(told, on_loss_spike="stop", **options)
    assert stopped.codes == [2] * ranks

    rewound = once.train_well(f"rewound-{kind}", on_loss_spike="rewind", **options)

    # One logging interval before the spike, up to the end of the spike's interval.
    (rewind,) = events(rewound, "rewind")
    assert (rewind["step"], rewind["skip_samples"]) == (60, "248:280")
    assert "Going back to step 60 because of the spike at step 68" in rewound.output
    resumed = once.train_well(told, skip_samples="248:280", resume_from_checkpoint=True, **options)
    assert last_hash(rewound) == last_hash(resumed)
    assert last_hash(rewound).startswith("step 80:")
    assert without_times(rewound) == without_times(resumed)
    if "report_to" in KINDS[kind]:
        assert curves(rewound) == curves(resumed)
    assert [record["step"] for record in rewound.metrics] == [*range(5, 85, 5)]
    recorded = read_toml(GPTConfig, rewound.folder / "config.toml")
    assert recorded["skip_samples"] == "248:280"
    # What the steps were trained on in the end.
    assert main([str(rewound.folder), "--step", "63"]) == 0
    assert "\nsample 280, source " in capsys.readouterr().out


@pytest.mark.faults
@pytest.mark.parametrize(("what", "call"), [("SIGKILL", 75), ("SIGTERM", 68)])
def test_a_rewound_run_that_ends_continues_as_if_it_did_not(once, tmp_path, what, call):
    """A killed run finds the spike anew. A stop at the spike finds it before its interval ends."""
    options = {**once.data, "on_loss_spike": "rewind", "resume_from_checkpoint": True}
    straight = once.train_well(f"straight-{what}", **options)
    options["stage_checkpoints"] = tmp_path
    fault = Fault(at="llm.trainers.gpt.loop:Trainer.train_step", what=what, call=call)
    once.train(what, faults=[fault], **options)
    assert events(Run(once.folder / what, []), "rewind") == events(straight, "rewind")

    resumed = once.train_well(what, **options)

    assert last_hash(resumed) == last_hash(straight)
    assert last_counts(resumed) == last_counts(straight)
    assert without_times(resumed) == without_times(straight)


def test_a_run_goes_back_only_so_often(thrice):
    options = {**thrice.data, "on_loss_spike": "rewind", "max_rewinds": 1}
    run = thrice.train("often", **options)

    assert run.codes == [2]
    assert len(events(run, "rewind")) == 1
    assert run.output.count("error: The loss of step") == 1
    assert "The run has gone back 1 times already (--max_rewinds)." in run.output


def test_another_mixture_of_the_data_is_not_a_spike(tmp_path):
    """The loss jumps where the second stage begins, after 40 steps of 4 samples."""
    stream = TokenStream(TokenFile(write_pair(tmp_path / "text", [[1] * BLOCK] * 300)))
    sources = [CorpusSource(name, 0.5, stream) for name in ("easy", "hard")]
    stages = [MixtureStage(40 * 4 * BLOCK, (1.0, 0.0)), MixtureStage(None, (0.0, 1.0))]
    loader = TrainLoader(
        samples=Samples(sources, stages=stages, block_size=BLOCK, seed=1),
        batch_plan=BatchPlan(
            num_windows=600,
            micro_batch_size=4,
            world_size=1,
            global_batch_size=4,
            total_samples=600,
        ),
        rank=0,
        device=torch.device("cpu"),
    )
    corpus = Corpus(train=tuple(sources), validation=(), stages=tuple(stages))
    spikes = LossSpikes(corpus, folder=Path("runs/staged"), action="stop")

    def report(steps: range, loss: float) -> None:
        spikes.check_losses([(step, False, loss) for step in steps], loader)

    report(range(40), 2.0)
    report(range(40, 80), 5.0)
    with pytest.raises(DivergedError, match="The loss of step 81 spiked"):
        report(range(80, 81), 8.0)


def test_going_back_without_checkpoints_is_refused(thrice):
    with pytest.raises(ConfigError, match=r"--on_loss_spike rewind.*none are saved"):
        parse_args(thrice.command("refused", on_loss_spike="rewind"))
    for saves in ("checkpointing_steps", "checkpointing_tokens", "checkpointing_minutes"):
        parse_args(thrice.command("saves", on_loss_spike="rewind", **{saves: 1}))  # no error
    with pytest.raises(ConfigError, match="--max_rewinds needs --on_loss_spike rewind"):
        parse_args(thrice.command("refused", max_rewinds=2))
