"""Gossip and DiLoCo through the trainer: whole runs, kills, other numbers of ranks, bad input."""

import tomllib
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from llm.checkpoint.load import find_newest_checkpoint
from llm.errors import ConfigError, LLMError
from llm.extensions.decentralized.options import DecentralizedExtension
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.main import parse_args
from tests.support.faults import Fault
from tests.support.package import ROOT
from tests.support.recovery import check_same, kill_and_go_on, without_times
from tests.support.token_files import write_flat
from tests.support.training import Bench, Run

EXAMPLES = ROOT / "examples"
GOSSIP = {"data_parallel": "gossip"}
RING = {**GOSSIP, "optimizer": "accumadamw"}
DILOCO = {"data_parallel": "diloco", "inner_steps": 3}
MULOCO = {**DILOCO, "optimizer": "muon"}
STEP = "llm.trainers.gpt.loop:Trainer.train_step"
LOSS = "llm.models.loss:LanguageModelLoss.forward"
FORWARD = "llm.parallel.base:AcceleratedStrategy.forward_backward"


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def plain(bench) -> Run:
    return bench.train_well("plain", max_train_steps=8, eval_steps=4)


def saved_replicas(run: Run) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The model of a run's newest checkpoint, and the weights of each replica in it."""
    newest = find_newest_checkpoint(run.folder / "checkpoints")
    assert newest is not None
    found: dict[str, torch.Tensor] = {}
    for path in newest.path.glob("*.safetensors"):
        found.update(load_file(path))
    numbers = sorted({name.split("/")[1] for name in found if "/replica_" in name})
    return _under(found, "strategy/model/"), [
        _under(found, f"strategy/{number}/model/") for number in numbers
    ]


def _under(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("ranks", "options", "said"),
    [
        (
            2,
            RING,
            "gossip: 2 replicas x 1 rank, averaged in each step (ring, overlap), optimizer "
            "accumadamw with moments every 2 steps",
        ),
        pytest.param(
            4,
            {**RING, "gossip_order": "blocking"},
            "gossip: 4 replicas x 1 rank, averaged in each step (ring, blocking), optimizer "
            "accumadamw with moments every 4 steps",
            marks=pytest.mark.layouts,
        ),
        (
            2,
            DILOCO,
            "diloco: 2 replicas x 1 rank, inner optimizer adamw, an outer step every 3 steps "
            "(learning rate 0.7, momentum 0.9)",
        ),
    ],
    ids=["ring of 2", "blocking ring of 4", "diloco"],
)
def test_ranks_train_separate_weights_and_export_the_mean(bench, ranks, options, said):
    options = {**options, "per_device_train_batch_size": 8 // ranks, "checkpointing_steps": 10}
    run = bench.train_well(f"mean-{ranks}-{options['data_parallel']}", ranks=ranks, **options)

    assert f"{said}\n" in run.output
    # The text's entropy leaves much to learn in 20 steps from ln 256 nats a token.
    assert run.losses[-1] < run.losses[0] - 0.7
    last = run.metrics[-1]
    assert last["step"] == 20
    assert 1e-5 < last["eval_consensus_distance"] < 0.1
    model, replicas = saved_replicas(run)
    assert len(replicas) == ranks
    exported = load_file(run.folder / "model.safetensors")
    for name, tensor in model.items():
        if name not in replicas[0]:
            continue  # a buffer, or frozen
        of_ranks = torch.stack([weights[name] for weights in replicas])
        assert not torch.equal(of_ranks[0], of_ranks[1])
        torch.testing.assert_close(tensor, of_ranks.mean(dim=0), rtol=0, atol=5e-7)
        assert torch.equal(exported[name], tensor)


def test_the_mean_is_what_is_evaluated(bench):
    run = bench.train_well("evaluated", ranks=2, max_train_steps=8, **RING)
    again = bench.train_well(
        "evaluated-again", model_name_or_path=run.folder, eval_only=True, tokenizer_name=bench.model
    )
    loss = again.read_json("eval_results.json")["loss"]
    assert loss == pytest.approx(run.metrics[-1]["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(4, RING, marks=pytest.mark.layouts),
        pytest.param(2, {**RING, "topology": "alternating-exp-ring"}, marks=pytest.mark.extended),
        pytest.param(2, DILOCO, marks=pytest.mark.layouts),
        pytest.param(2, MULOCO, marks=pytest.mark.extended),
        pytest.param(4, MULOCO, marks=pytest.mark.layouts),
        pytest.param(2, {**DILOCO, "optimizer": "soap"}, marks=pytest.mark.layouts),
    ],
    ids=["ring", "alternating-exp-ring", "diloco", "muon inside", "4 with muon", "soap inside"],
)
def test_a_killed_run_resumes_bit_for_bit_on_every_rank(bench, ranks, options):
    """Dropout is on; a logging interval, a block of moments and an inner phase are open."""
    name = f"{options.get('topology', options['data_parallel'])}-{options.get('optimizer')}-{ranks}"
    options = {
        **options,
        "ranks": ranks,
        "per_device_train_batch_size": 8 // ranks,
        "max_train_steps": 12,
        "checkpointing_steps": 5,
        "logging_steps": 3,
        "eval_steps": 4,
        "report_to": "tensorboard",
    }
    straight = bench.train_well(f"straight-{name}", **options)
    kill = Fault(at=FORWARD, what="SIGKILL", call=9, rank=ranks - 1)
    resumed = kill_and_go_on(bench, f"killed-{name}", [kill], together=True, **options)
    check_same(resumed, straight)


@pytest.mark.faults
def test_a_signal_to_one_of_four_ranks_stops_all_after_the_same_step(bench):
    options = {**RING, "ranks": 4, "per_device_train_batch_size": 2, "max_train_steps": 12}
    ask = Fault(at=FORWARD, what="SIGTERM", call=5, rank=2)
    stopped = bench.train("asked", faults=[ask], checkpointing_steps=100, **options)
    assert stopped.codes == [75, 75, 75, 75], stopped.output
    # The vote that begins after step 5 takes two turns.
    assert stopped.read_json("status.json")["step"] == 7


@pytest.mark.parametrize(
    ("options", "first"),
    [
        pytest.param(RING, 2, marks=pytest.mark.extended),
        pytest.param(RING, 4, marks=pytest.mark.layouts),
        pytest.param(DILOCO, 4, marks=pytest.mark.layouts),
        pytest.param({**DILOCO, "optimizer": "soap"}, 2, marks=pytest.mark.extended),
    ],
    ids=["gossip", "gossip of 4", "diloco of 4", "soap inside diloco"],
)
def test_a_run_resumes_under_another_world_size(bench, options, first):
    name = f"grows-{options['data_parallel']}-{options.get('optimizer')}-{first}"
    # The schedule has no end, and so a run may become longer.
    sizes = {"global_batch_size": 8, "checkpointing_steps": 4, "log_source_losses": True}
    options = {**options, **sizes}
    saved = {}
    for steps, ranks in ((4, 4), (8, 2), (12, 1), (16, 2))[first == 2 :]:
        run = bench.train_well(
            name,
            ranks=ranks,
            max_train_steps=steps,
            per_device_train_batch_size=8 // ranks,
            resume_from_checkpoint=True,
            **options,
        )
        assert len(saved_replicas(run)[1]) == ranks
        saved[steps] = run.output
    assert first == 2 or "holds 4 replicas of the model and this run has 2" in saved[8]
    assert "holds 2 replicas of the model and this run has 1" in saved[12]
    source = "the first replica" if options.get("optimizer") == "soap" else "weights and moments"
    assert f"{source}." in saved[12]
    assert "holds 1 replica of the model and this run has 2" in saved[16]
    losses = run.losses
    assert len(losses) == 16
    assert losses[-1] < losses[0] - 0.5


def test_a_step_skipped_by_one_rank_is_reported_and_the_others_continue(bench):
    options = {"global_batch_size": 8, "checkpointing_steps": 4, **RING}
    undefined = Fault(at=LOSS, what="nan", call=3, rank=1)
    run = bench.train_well("skip", ranks=2, faults=[undefined], max_train_steps=4, **options)
    assert "step 3 was skipped" in run.output
    assert [record["skipped_steps"] for record in run.metrics] == [0, 0, 1, 1]
    assert run.losses[2] == pytest.approx(run.losses[1], abs=0.5)  # that of the other rank

    options = {**options, "max_train_steps": 8, "resume_from_checkpoint": True}
    run = bench.train_well("skip", per_device_train_batch_size=8, **options)
    newest = find_newest_checkpoint(run.folder / "checkpoints")
    assert newest is not None
    saved: dict[str, torch.Tensor] = {}
    for path in newest.path.glob("*.safetensors"):
        saved.update(load_file(path))
    steps = {float(tensor) for name, tensor in saved.items() if name.endswith("/step")}
    # One rank had taken 4 steps and the other 3; 3.5 would never fill a block of 2.
    assert steps == {8.0}


@pytest.mark.parametrize(
    "options", [GOSSIP, pytest.param(DILOCO, marks=pytest.mark.extended)], ids=["gossip", "diloco"]
)
def test_one_rank_is_a_plain_run_bit_for_bit(bench, plain, options):
    name = f"alone-{options['data_parallel']}"
    alone = bench.train_well(name, max_train_steps=8, eval_steps=4, **options)
    assert without_times(alone) == without_times(plain)
    weights = "model.safetensors"
    assert (alone.folder / weights).read_bytes() == (plain.folder / weights).read_bytes()


def test_all_reduce_with_accumadamw_of_one_step_follows_adamw(bench, plain):
    blocks = bench.train_well(
        "blocks", max_train_steps=8, optimizer="accumadamw", moment_update_steps=1
    )
    assert blocks.losses == pytest.approx(plain.losses, rel=1e-5)
    other = bench.train_well(
        "longer", max_train_steps=8, optimizer="accumadamw", moment_update_steps=4
    )
    assert other.losses != pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"topology": "exp"}, "--topology needs --data_parallel gossip; give that too"),
        ({"gossip_order": "blocking"}, "--gossip_order needs --data_parallel gossip"),
        ({"gossip_group": "nodes", **DILOCO}, "--gossip_group needs --data_parallel gossip"),
        ({"inner_steps": 4, **RING}, "--inner_steps needs --data_parallel diloco"),
        ({"outer_momentum": 0.5}, "--outer_momentum needs --data_parallel diloco"),
        ({"moment_update_steps": 4}, "--moment_update_steps needs --optimizer accumadamw"),
        (
            {"moment_update_steps": 4, "optimizer": "adamw", **GOSSIP},
            "--moment_update_steps needs --optimizer",
        ),
        ({"kfac": True, **RING}, "--kfac needs the gradients of all ranks.*gossip"),
        ({"kfac": True, **DILOCO}, "--kfac needs the gradients of all ranks.*diloco"),
        ({"topology": "star", **RING}, "complete, exp, ring, alternating-exp-ring"),
    ],
)
def test_options_that_do_not_fit_the_mode_are_refused(bench, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_args(bench.command("refused", **options))


def test_gossip_trains_by_adamw_unless_another_optimizer_is_named(bench):
    run = bench.train_well("default", ranks=2, max_train_steps=2, **GOSSIP)
    assert "averaged in each step (ring, overlap), optimizer adamw\n" in run.output


@pytest.mark.extended
def test_an_older_run_of_gossip_resumes_with_accumadamw(bench):
    """Its checkpoints record blocks of moments, and no optimizer."""
    options = {"ranks": 2, "checkpointing_steps": 2, "moment_update_steps": 2, **GOSSIP}
    options |= {"resume_from_checkpoint": True}
    bench.train_well("older", max_train_steps=2, **options)
    resumed = bench.train_well("older", max_train_steps=4, **options)
    assert "optimizer accumadamw with moments every 2 steps\n" in resumed.output
    del options["moment_update_steps"]
    with pytest.raises(LLMError, match="moment_update_steps was 2 and is None"):
        bench.read("older", max_train_steps=6, **options)


@pytest.mark.parametrize(("optimizer", "accum_steps"), [(None, 4), ("accumadamw", 4)])
def test_the_blocks_of_moments_are_those_of_the_checkpoint(optimizer, accum_steps):
    start = SimpleNamespace(metadata={"accum_steps": 4, "fixed": GOSSIP}, path="step_00000008")
    extension = DecentralizedExtension(GPTConfig(optimizer=optimizer, **GOSSIP))
    extension.prepare_run(SimpleNamespace(start=start))
    layout = extension.make_layout(ranks=2, ranks_per_node=2, start=start)
    assert layout.accum_steps == accum_steps


def test_adamw_does_not_continue_the_moments_of_accumadamw():
    start = SimpleNamespace(metadata={"accum_steps": 4, "fixed": GOSSIP}, path="step_00000008")
    extension = DecentralizedExtension(GPTConfig(optimizer="adamw", **GOSSIP))
    with pytest.raises(LLMError, match="holds the moments of accumadamw, not of --optimizer adamw"):
        extension.prepare_run(SimpleNamespace(start=start))


def test_an_invalid_number_of_ranks_is_refused_with_the_valid_ones(bench):
    with pytest.raises(ConfigError, match=r"--topology exp.*power of two.*2, 4"):
        bench.read(ranks=3, topology="exp", **RING)


def test_gossip_cannot_resume_an_all_reduce_run(bench):
    options = {"ranks": 2, "max_train_steps": 2, "checkpointing_steps": 1}
    reduced = bench.train_well("reduced", **options)
    again = {**options, "resume_from_checkpoint": True, **RING}
    with pytest.raises(LLMError, match="data_parallel was 'allreduce' and is 'gossip'"):
        bench.read("reduced", **again)
    with pytest.raises(LLMError, match="start another run from its weights with --init_from"):
        bench.read("reduced", change_on_resume="data_parallel", **again)
    fresh = bench.train_well("taken", init_from=bench.folder / "reduced", **{**options, **RING})
    assert fresh.losses[0] < reduced.losses[0] - 0.1


@pytest.mark.parametrize("name", ["gpt2-small", "gpt2-small-decentralized"])
def test_the_examples_of_gpt2_small_are_the_same_model_and_batch(name):
    config = parse_args(["--config", str(EXAMPLES / f"{name}.toml")])
    plain = tomllib.loads((EXAMPLES / "gpt2-small.toml").read_text())
    changed = {"data_parallel", "topology", "output_dir"}
    ours = tomllib.loads((EXAMPLES / f"{name}.toml").read_text())
    assert {k: v for k, v in ours.items() if k not in changed} == {
        k: v for k, v in plain.items() if k not in changed
    }
    assert (config.global_batch_size, config.warmup) == (480, "2000 steps")
    gossip = name.endswith("decentralized")
    assert config.data_parallel == ("gossip" if gossip else "allreduce")


def test_the_decentralized_example_runs_at_toy_size(bench, tmp_path):
    tokens = tmp_path / "tokens.bin"
    write_flat(tokens, [number * 7 % 255 for number in range(2000)])
    run = bench.train_well(
        "toy",
        ranks=4,
        environment={"LOCAL_WORLD_SIZE": "2"},
        config=EXAMPLES / "gpt2-small-decentralized.toml",
        model_name_or_path=None,
        train_file=None,
        tokenizer_name=bench.model,
        config_overrides="n_layer=1,n_head=2,n_embd=16,n_positions=32,vocab_size=256",
        train_data_path=tokens,
        valid_data_path=tokens,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        global_batch_size=8,
        max_train_steps=6,
        num_warmup_steps=2,
        lr_scheduler_type="cosine",
        mixed_precision="no",
        torch_compile=False,
        checkpointing_steps=3,
        eval_steps=3,
    )
    assert run.metrics[-1]["eval_consensus_distance"] > 0
    assert len(run.losses) == 6
