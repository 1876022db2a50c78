"""Names of other trainers are answered with the option that does the same here."""

import dataclasses
import re
from pathlib import Path

import pytest

from llm.config import other_trainers
from llm.config.command_line import parse_options
from llm.config.options import fields
from llm.config.toml import read_toml
from llm.errors import ConfigError
from llm.prepare.options import PrepareConfig
from llm.prepare.train_tokenizer import TrainTokenizerOptions
from llm.tools.checkpoints import CheckpointsOptions
from llm.tools.fetch import FetchOptions
from llm.tools.generate import GenerateOptions
from llm.tools.jobs.options import JobOptions
from llm.tools.plan.options import PlanOptions
from llm.tools.report.report import ReportOptions
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.package import ROOT

TRAINER = {name for field in fields(GPTConfig) for name in (*field.names, *field.opposites)}
TABLES = ("HUGGING_FACE", "SHORT_NAMES", "MEGATRON", "NEMO", "NANOGPT")
PROGRAMS = (
    FetchOptions,
    GenerateOptions,
    JobOptions,
    PlanOptions,
    PrepareConfig,
    ReportOptions,
    TrainTokenizerOptions,
)


def refusal(*words: str, cls: type = GPTConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_options(cls, words, prog="program", description="")
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("max_steps", "max_train_steps"),
        ("save_steps", "checkpointing_steps"),
        ("lr", "learning_rate"),
        ("bf16", "mixed_precision bf16"),
        ("seq_length", "block_size"),
        ("clip-grad", "max_grad_norm"),
        ("adam_beta1", "betas BETA1 BETA2"),
        ("eval_strategy", "eval_steps N"),
        ("tensor-model-parallel-size", "tensor_parallel_size"),
        ("fsdp", "data_parallel_shard_size N"),
        ("model.optim.lr", "learning_rate"),
        ("trainer.gradient_clip_val", "max_grad_norm"),
        ("n_layer", "num_layers"),
        ("ffn-hidden-size", "config_overrides n_inner=N"),
        ("with_tracking", "report_to"),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_the_option_here(name, here):
    assert refusal(f"--{name}", "1") == f"--{name.replace('-', '_')} is --{here} here. See --help."


def test_every_unknown_name_of_a_command_is_answered_at_once():
    assert refusal("--max_steps", "9", "--seed", "1", "--bf16", "--lr=-1e-3", "--lr", "-2") == (
        "--max_steps is --max_train_steps here. --bf16 is --mixed_precision bf16 here. --lr is "
        "--learning_rate here. See --help."
    )


def test_what_has_no_counterpart_is_answered_with_the_reason():
    assert refusal("--warmup_ratio", "0.1") == (
        "--warmup_ratio is not an option: give steps or tokens to --warmup. See --help."
    )
    assert refusal("--deepspeed", "ds.json", "--load_best_model_at_end") == (
        "--deepspeed is not needed: --data_parallel_shard_size divides weights, gradients and "
        "optimizer over ranks. --load_best_model_at_end is not an option: --save_top_k 1 keeps the "
        "best checkpoint, and llm-trainers checkpoints RUN --export best DIR exports it. See "
        "--help."
    )
    assert "a package of your own adds code to the training loop" in refusal("--callbacks", "mine")
    assert "CUDA_VISIBLE_DEVICES= before the command hides" in refusal("--no_cuda")
    assert "llm-trainers --version" in refusal("--version")
    assert refusal("--use_fast_tokenizer", "true") == (
        "--use_fast_tokenizer is not needed: tokenizers are fast ones without "
        "--use_slow_tokenizer. See --help."
    )


@pytest.mark.parametrize(
    "name",
    [
        *("gradient_checkpointing", "fsdp", "deepspeed", "warmup_ratio", "eval_strategy", "optim"),
        *("torch_compile", "callbacks", "load_best_model_at_end", "resume_from_checkpoint"),
        *("compute_metrics", "report_to", "save_total_limit", "push_to_hub", "seed", "bf16"),
        *("max_steps", "warmup_steps", "adam_beta2", "save_steps", "early_stopping_patience"),
        *("streaming", "packing", "accelerate config"),
    ],
)
def test_the_page_has_the_name_of_hugging_faces_trainer(name):
    page = (ROOT / "docs/guides/migration.md").read_text(encoding="utf-8")
    section = page.split("\n## Hugging Face")[1].split("\n## ")[0]
    assert f"`{name}`" in section


def test_names_that_the_page_calls_the_same_are_options():
    page = (ROOT / "docs/guides/migration.md").read_text(encoding="utf-8")
    [sentence] = re.findall(r"^These names are the same: (.*?)\.\n", page, re.DOTALL | re.MULTILINE)
    names = re.findall(r"`(\w+)`", sentence)
    assert len(names) > 20
    assert set(names) <= TRAINER


def test_a_file_with_a_name_of_another_trainer_is_answered_alike(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("max-steps = 9\n")
    with pytest.raises(ConfigError, match=r"run.toml: max_steps is max_train_steps here\.$"):
        read_toml(GPTConfig, file)


def test_a_program_answers_with_its_own_options_only():
    assert refusal("--lr", "1", cls=PrepareConfig) == "There is no option --lr. See --help."
    assert "--max_length is --block_size here" in refusal("--max_length", "9")
    assert "--max_length is --max_new_tokens here" in refusal(
        "--max_length", "9", cls=GenerateOptions
    )
    assert "--out_dir is --run here" in refusal("--out_dir", "out", cls=GenerateOptions)
    assert "--out_dir is --output here" in refusal("--out_dir", "out", cls=CheckpointsOptions)
    assert "--num_workers is --workers here" in refusal("--num_workers", "9", cls=PrepareConfig)
    assert "--save_top_k" not in refusal("--metric_for_best_model", "loss", cls=JobOptions)


@pytest.mark.parametrize(
    "name",
    [
        *("fsdp", "no_cuda", "version", "grad_clip", "clip_grad", "eval_strategy"),
        *("train_iters", "eval_iters", "save_steps", "gradient_clipping", "max_seq_length"),
        *("sharding", "hub_token", "deepspeed_config", "save_only_model", "group_by_length"),
    ],
)
def test_a_name_that_only_looks_similar_is_not_suggested(name, monkeypatch):
    for table in (*TABLES, "REMARKS"):
        monkeypatch.setattr(other_trainers, table, {})
    assert refusal(f"--{name}") == f"There is no option --{name}. See --help."


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lerning_rate", "learning_rate"),
        ("max_train_step", "max_train_steps"),
        ("weigth_decay", "weight_decay"),
        ("checkpoint_steps", "checkpointing_steps"),
        ("ouput_dir", "output_dir"),
        ("mixed_precison", "mixed_precision"),
        ("resume_from_checkpoints", "resume_from_checkpoint"),
    ],
)
def test_a_mistyped_name_is_suggested(typed, meant):
    assert refusal(f"--{typed}") == (
        f"There is no option --{typed}; did you mean {meant}? See --help."
    )


@pytest.mark.parametrize("table", TABLES)
def test_every_answer_is_an_option_with_a_value_that_it_takes(table):
    for name, here in getattr(other_trainers, table).items():
        option, *values = here.split()
        assert option in TRAINER, name
        assert name not in TRAINER, name
        fixed = [value for value in values if not value.isupper()]
        if fixed:
            field = next(f for f in fields(GPTConfig) if option in f.names)
            made = parse_options(GPTConfig, [f"--{option}", *fixed], prog="", description="")
            value = getattr(made, field.name)
            assert fixed[0] in (value if field.is_list else (value,)), name


def test_every_answer_of_the_other_programs_is_an_option_of_one_of_them():
    known = [{name for field in fields(cls) for name in field.names} for cls in PROGRAMS]
    for name, here in {**other_trainers.PROGRAMS, **other_trainers.GENERATE}.items():
        assert any(here in names and name not in names for names in known), name


def test_every_remark_is_made_by_the_trainer():
    for name in other_trainers.REMARKS:
        assert other_trainers.describe_counterpart(name, TRAINER, dashes="--"), name


@dataclasses.dataclass(kw_only=True)
class Empty:
    pass


def test_a_remark_without_an_option_is_made_by_every_program():
    assert "is an option of llm-trainers alone" in refusal("--version", cls=Empty)
