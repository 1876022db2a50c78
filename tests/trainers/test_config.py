import dataclasses
import re
import subprocess
import sys

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from llm.config.command_line import parse_options
from llm.config.duration import Duration
from llm.config.options import common_options, fields
from llm.config.toml import read_toml, to_toml
from llm.errors import ConfigError
from llm.extensions.kfac.kfac_settings import choose_kfac_method
from llm.trainers.gpt import run_defaults
from llm.trainers.gpt.config import check_config
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.main import parse_args
from tests.support.package import MODULES, PACKAGE, name_of

PATHS = [field for field in fields(GPTConfig) if field.option.path]
ENOUGH = ["--dataset_name", "wikitext", "--model_name_or_path", "gpt2"]

GUIDE = """--low_cpu_mem_usage
  --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1
  --model_name_or_path EleutherAI/gpt-neo-125m
  --output_dir runs/gpt-neo-125m-pretraining --checkpointing_steps 1000 --resume_from_checkpoint
  --max_train_steps 10000 --per_device_train_batch_size 1 --per_device_eval_batch_size 1
  --gradient_accumulation_steps 8 --mixed_precision fp16"""


def complaints(config: GPTConfig) -> str:
    try:
        check_config(config)
    except ConfigError as error:
        return str(error)
    return ""


def test_the_guides_command_is_read_as_it_stands():
    config = parse_args(GUIDE.split())
    assert config.from_scratch is True
    assert config.model_name_or_path == "EleutherAI/gpt-neo-125m"
    assert config.save_interval == "1000 steps"
    assert config.resume_from_checkpoint is True
    assert config.gradient_accumulation_steps == 8
    assert config.mixed_precision == "fp16"


@pytest.mark.parametrize("plugin", ["FSDP", "DEEPSPEED"])
def test_a_plugin_in_the_configuration_of_accelerate_is_refused(plugin, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{plugin}", "true")
    with pytest.raises(ConfigError, match=rf"turns {plugin} on \(ACCELERATE_USE_{plugin}\): turn"):
        parse_args(GUIDE.split())
    monkeypatch.setenv(f"ACCELERATE_USE_{plugin}", "false")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert parse_args(ENOUGH).mixed_precision == "bf16"


@pytest.mark.parametrize("tracker", sorted(LOGGER_TYPE_TO_CLASS))
def test_every_tracker_of_the_installed_accelerate_is_allowed(tracker):
    assert not complaints(dataclasses.replace(parse_args(ENOUGH), report_to=(tracker,)))


ANCESTOR_DEFAULTS = {
    "dataset_name": None,
    "dataset_config_name": None,
    "train_file": None,
    "validation_file": None,
    "validation_split_percentage": 5,
    "model_name_or_path": None,
    "config_name": None,
    "tokenizer_name": None,
    "use_slow_tokenizer": False,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "mixed_precision": "no",
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "num_train_epochs": "3 epochs",
    "max_train_steps": "3 epochs",
    "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "linear",
    "num_warmup_steps": "0 steps",
    "output_dir": None,
    "seed": None,
    "model_type": None,
    "block_size": None,
    "preprocessing_num_workers": None,
    "overwrite_cache": False,
    "no_keep_linebreaks": False,
    "checkpointing_steps": None,
    "resume_from_checkpoint": False,
    "low_cpu_mem_usage": False,
    "kfac": False,
}


@pytest.mark.parametrize(("name", "default"), ANCESTOR_DEFAULTS.items())
def test_every_flag_of_the_original_program_keeps_its_name_and_default(name, default):
    on_cpu = run_defaults.choose_device_options(GPTConfig(), None, torch.device("cpu"))
    by_name = {name: field.name for field in fields(GPTConfig) for name in field.names}
    assert on_cpu.get(name, getattr(GPTConfig(), by_name[name])) == default


def test_kfac_flags_are_read_with_dashes_as_the_guide_writes_them():
    flags = ["--kfac", "--kfac-factor-update-steps", "5", "--kfac-damping", "0.01"]
    config = parse_args([*ENOUGH, *flags])
    assert config.kfac
    assert config.kfac_factor_update_steps == 5
    assert config.kfac_damping == 0.01


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        (["--kfac"], "ekfac"),
        (["--kfac", "--kfac-damping", "0.001"], "eigen"),
        (["--kfac", "--kfac-kl-clip", "0.001"], "eigen"),
        (["--kfac", "--kfac-library", "kfac-pytorch"], "eigen"),
    ],
)
def test_kfac_is_ekfac_unless_an_option_asks_for_another_method(flags, method):
    assert choose_kfac_method(parse_args([*ENOUGH, *flags])) == method


def test_flags_with_two_names_mean_the_same():
    assert parse_args([*ENOUGH, "--no_append_eos"]).append_eos is False
    assert parse_args([*ENOUGH, "--append_eod"]).append_eos is True
    assert parse_args([*ENOUGH, "--json_key", "body"]).text_column == "body"
    assert parse_args([*ENOUGH, "--low_cpu_mem_usage"]).from_scratch is True
    assert parse_args([*ENOUGH, "--from_scratch"]).from_scratch is True
    assert parse_args([*ENOUGH, "--from_scratch", "--no_low_cpu_mem_usage"]).from_scratch is False


UNSHARDED = {"unsharded_gradients": True, "data_parallel_shard_size": 2}
GATHERED = {"fp8_all_gather": True, "data_parallel_shard_size": 2, "mixed_precision": "fp8"}
TOKENS = {"dataset_name": None, "data_path": ("data/text_document",)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset_name": None}, ["--dataset_name or --train_file"]),
        ({"train_file": "a.txt"}, ["different sources of data"]),
        ({"dataset_name": None, "train_file": "a", "dataset_config_name": "b"}, ["--dataset_name"]),
        ({"model_name_or_path": None}, ["--model_name_or_path", "--tokenizer_name"]),
        ({"vocab_file": "vocab.json"}, ["--vocab_file needs --merges_file"]),
        (
            {"vocab_file": "v", "merges_file": "m", "tokenizer_name": "gpt2"},
            ["two tokenizers"],
        ),
        ({"global_batch_size": "8@1B"}, ["--global_batch_size 8@1B does not begin at token 0"]),
        ({"lr_batch_scaling": "sqrt"}, ["--lr_batch_scaling needs --global_batch_size"]),
        ({"global_batch_size": 8, "gradient_accumulation_steps": 2}, ["--global_batch_size"]),
        ({"min_learning_rate": 1.0}, ["--min_learning_rate 1 is above"]),
        (
            {"lr_scheduler_type": "constant", "warmup": Duration("5 steps")},
            ["--warmup 5 steps does not go with --lr_scheduler_type constant, which has none;"],
        ),
        ({"lr_scheduler_type": "polynomial", "num_constant_steps": 5}, ["--num_constant_steps"]),
        (
            {"decay": Duration("5 steps")},
            ["--decay 5 steps needs --lr_scheduler_type warmup_stable_decay"],
        ),
        ({"betas": (0.9,)}, ["--betas takes two numbers"]),
        ({"resume_from_checkpoint": True, "overwrite_output_dir": True}, ["give one of them"]),
        ({"train_file": "a\udcff", "dataset_name": None}, ["--train_file 'a\\udcff' is not UTF-8"]),
        (
            {"save_top_k": 3},
            ["--save_top_k needs --save_interval or --checkpointing_minutes; give one of them too"],
        ),
        ({"keep_checkpoints": 3}, ["--save_interval"]),
        (
            {"keep_every": 3, "save_interval": Duration("5 steps")},
            ["--keep_every needs --keep_checkpoints or --save_top_k; give one of them too"],
        ),
        ({"report_to": ("none", "wandb")}, ["none cannot be combined"]),
        ({"change_on_resume": ("sed",)}, ["'sed', which is not an option"]),
        ({"kfac_damping": 0.001}, ["--kfac_damping needs --kfac; give that too, or leave it out."]),
        ({"kfac_skip_layers": ("attn",)}, ["--kfac_skip_layers needs --kfac"]),
        ({"kfac_max_dim": 64}, ["--kfac_max_dim needs --kfac"]),
        (
            {"kfac": True, "kfac_method": "ekfac", "kfac_damping": 0.01, "kfac_kl_clip": 0.01},
            ["--kfac_damping is not for --kfac_method ekfac", "--kfac_kl_clip is not"],
        ),
        (
            {"kfac": True, "kfac_library": "kfac-pytorch", "kfac_max_dim": 64},
            ["--kfac_max_dim is for --kfac_library native"],
        ),
        (
            {
                "kfac": True,
                "kfac_library": "kfac-pytorch",
                "activation_checkpointing": "selective",
            },
            ["--activation_checkpointing selective does not go with --kfac_library kfac-pytorch"],
        ),
        (
            {"kfac": True, "kfac_method": "eigen", "optimizer": "soap", "nesterov": True},
            ["--optimizer soap does not go with --kfac", "--nesterov is for --kfac_method ekfac"],
        ),
        ({"nesterov": True}, ["--nesterov needs --optimizer soap or --kfac"]),
        ({"model_type": "gpt2"}, ["--model_type uses", "--model_name_or_path"]),
        ({"data_path": ("a",)}, ["--dataset_name and --data_path are different sources of data"]),
        (
            {**TOKENS, "train_data_path": ("a",)},
            ["--data_path and --train_data_path are"],
        ),
        ({**TOKENS, "valid_data_path": ("a",)}, ["--valid_data_path goes with --train_data_path"]),
        ({**TOKENS, "validation_file": "a.txt"}, ["--validation_file is text"]),
        ({**TOKENS, "text_column": "body"}, ["--text_column is for text"]),
        ({**TOKENS, "no_keep_linebreaks": True}, ["--no_keep_linebreaks is for text"]),
        ({**TOKENS, "overwrite_cache": True}, ["--overwrite_cache is for text"]),
        ({**TOKENS, "validation_split_percentage": 3}, ["token files are cut by --split"]),
        ({"split": "9,1,0"}, ["--split needs --data_path"]),
        ({"ignore_tokenizer_mismatch": True}, ["--ignore_tokenizer_mismatch is for token files"]),
        ({"eval_only": True, "dataset_name": None}, ["--eval_only needs data"]),
        ({"append_eos": False, "reset_position_ids": True}, ["leave --no_append_eos out"]),
        (
            {"unsharded_gradients": True},
            ["--unsharded_gradients needs --data_parallel_shard_size"],
        ),
        (
            {**UNSHARDED, "pipeline_parallel_size": 2},
            ["--unsharded_gradients changes nothing with --pipeline_parallel_size"],
        ),
        (
            {**UNSHARDED, "data_parallel": "gossip", "gossip_group": "nodes"},
            ["--unsharded_gradients does not go with --data_parallel gossip"],
        ),
        (
            {"fused_kernels": "all", "data_parallel_shard_size": 2, "kfac": True},
            ["not go with --data_parallel_shard_size;", "not go with --kfac;"],
        ),
        (
            {"fused_kernels": "all", "activation_checkpointing": "selective"},
            ["--fused_kernels all has been tried", "with --activation_checkpointing selective;"],
        ),
        (
            {"fused_kernels": "all", "mixed_precision": "fp8"},
            ["--fused_kernels all has been tried", "not go with --mixed_precision fp8;"],
        ),
        ({"fp8_all_gather": True}, ["--fp8_all_gather needs --data_parallel_shard_size"]),
        (
            {**GATHERED, "mixed_precision": "bf16"},
            ["is for the float8 layers of"],
        ),
        (
            {**GATHERED, "context_parallel_size": 2, "unsharded_gradients": True},
            ["not go with --context_parallel_size;", "not go with --unsharded_gradients;"],
        ),
        (
            {**GATHERED, "data_parallel": "gossip", "gossip_group": "nodes"},
            ["--fp8_all_gather has been tried", "not go with --data_parallel gossip;"],
        ),
        ({**GATHERED, "kfac": True}, ["--fp8_all_gather has been tried", "go with --kfac;"]),
        ({**GATHERED, "hyperball": True}, ["--fp8_all_gather has been tried", "--hyperball;"]),
        ({**GATHERED, "optimizer": "muon"}, ["not go with --optimizer muon;"]),
        ({"sequence_parallel": True}, ["--sequence_parallel needs --tensor_parallel_size"]),
        (
            {"sequence_parallel": True, "tensor_parallel_size": 2, "context_parallel_size": 2},
            ["--sequence_parallel does not go with --context_parallel_size"],
        ),
        (
            {"sequence_parallel": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            ["--sequence_parallel does not go with --pipeline_parallel_size"],
        ),
        (
            {"all_reduce_dtype": "bf16", "tensor_parallel_size": 2, "mixed_precision": "fp16"},
            ["not go with --tensor_parallel_size;", "not go with --mixed_precision fp16;"],
        ),
        (
            {"all_reduce_dtype": "bf16", "data_parallel": "diloco"},
            ["--all_reduce_dtype bf16 is for", "not go with --data_parallel diloco;"],
        ),
        ({"all_reduce_dtype": "bf16", "kfac": True}, ["not go with --kfac;"]),
        ({"append_eos": False, "reset_attention_mask": True}, ["leave --no_append_eos out"]),
    ],
)
def test_options_that_do_not_fit_together_are_refused(changes, words):
    base = GPTConfig(dataset_name="wikitext", model_name_or_path="gpt2")
    with pytest.raises(ConfigError) as caught:
        check_config(dataclasses.replace(base, **changes))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--timeout", "1e99"], "--timeout must be at most 604800, not 1e+99."),
        (["--per_device_eval_batch_size", "1" * 30], "must be at most 1000000, not 1111111"),
        (["--pad_vocab_to_multiple_of", "1" * 30], "must be at most 1000000, not 1111111"),
        (["--ema_tokens", "1" * 30], "must be at most 1e+15, not 1111111"),
        (["--kfac", "--kfac_damping", "1e308"], "must be at most 1e+30, not 1e+308"),
        (["--sample_prompt", "caf\udce9"], "--sample_prompt 'caf\\udce9' is not UTF-8 text"),
    ],
)
def test_values_that_no_run_can_have_are_refused(words, sentence):
    with pytest.raises(ConfigError) as caught:
        parse_args(["--train_file", "a.txt", "--model_name_or_path", "gpt2", *words])
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        TOKENS,
        {**TOKENS, "split": "100,0,0", "ignore_tokenizer_mismatch": True, "append_eos": False},
        {**TOKENS, "reset_position_ids": True, "append_eos": False},
        {"dataset_name": None, "train_data_path": ("a",), "valid_data_path": ("b",)},
        {"dataset_name": None, "valid_data_path": ("b",), "eval_only": True},
        {"reset_attention_mask": True},
    ],
)
def test_token_files_fit_together_as_the_guide_says(changes):
    base = GPTConfig(dataset_name="x", model_name_or_path="gpt2")

    assert complaints(dataclasses.replace(base, **changes)) == ""


def test_weights_and_prefixes_are_read_from_the_command_line_and_from_toml(tmp_path):
    model = ["--model_name_or_path", "gpt2"]
    config = parse_args([*model, "--data_path", "0.7", "data/wiki", "3", "data/code"])
    assert config.data_path == (0.7, "data/wiki", 3.0, "data/code")

    (tmp_path / "run.toml").write_text('data_path = [0.7, "data/wiki", 3, "data/code"]\n')
    assert (
        parse_args([*model, "--config", str(tmp_path / "run.toml")]).data_path == config.data_path
    )
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert parse_args(["--config", str(tmp_path / "again.toml")]) == config


def test_a_plain_global_batch_stays_a_number_in_toml(tmp_path):
    words = ["--train_file", "a.txt", "--model_name_or_path", "gpt2", "--global_batch_size"]
    for text, line in (("256", "256"), ("256@0,512@2B", '"256@0,512@2B"')):
        config = parse_args([*words, text])
        assert f"\nglobal_batch_size = {line}\n" in to_toml(config)
        (tmp_path / "run.toml").write_text(to_toml(config))
        assert parse_args(["--config", str(tmp_path / "run.toml")]) == config


@pytest.mark.parametrize("name", ["output_dir", "train_file", "resume_from_checkpoint"])
def test_an_empty_path_is_refused_rather_than_taken_for_none(name):
    with pytest.raises(ConfigError, match=f"--{name} is given an empty path"):
        parse_args([*ENOUGH, f"--{name}", ""])


def test_all_errors_come_in_one_message():
    with pytest.raises(ConfigError) as caught:
        check_config(GPTConfig())
    assert "--dataset_name" in str(caught.value)
    assert "--model_name_or_path" in str(caught.value)
    assert "--tokenizer_name" in str(caught.value)


ORDERS = {
    "overwrite_output_dir": True,
    "resume_from_checkpoint": "runs/old/checkpoints/step_00000100",
    "change_on_resume": ("learning_rate",),
    "overwrite_cache": True,
    "eval_only": True,
    "profile": "10:13",
    "push_to_hub": True,
    "hub_model_id": "me/mine",
    "exit_after": 5.0,
}


def test_only_options_for_one_start_are_not_recorded_with_the_run(tmp_path):
    given = GPTConfig(
        train_file="a.txt", init_from="runs/old", ignore_tokenizer_mismatch=True, **ORDERS
    )
    (tmp_path / "config.toml").write_text(to_toml(given))
    again = GPTConfig(**read_toml(GPTConfig, tmp_path / "config.toml"))
    defaults = {name: getattr(GPTConfig(), name) for name in ORDERS}
    assert again == dataclasses.replace(given, **defaults)


def test_what_an_option_requires_is_an_option_that_can_be_given():
    declared = {field.name: field for field in fields(GPTConfig)}
    for field in declared.values():
        for need in field.option.requires:
            name, _, value = need.partition("=")
            assert value == "" or value in declared[name].choices
            assert value != declared[name].default


def test_every_option_that_names_files_is_declared_as_a_path():
    named = [f.name for f in fields(GPTConfig) if f.name.endswith(("_file", "_path", "_dir"))]
    assert set(named) - {"overwrite_output_dir"} <= {f.name for f in PATHS}
    assert all(str in field.members for field in PATHS)


def test_every_option_is_read_somewhere():
    # The programs beside the trainer have options of the same names.
    rooms = (
        "models",
        "tokenizers",
        "data",
        "optim",
        "parallel",
        "checkpoint",
        "metrics",
        "trainers",
        "extensions",
    )
    readers = [path for path in MODULES if name_of(path).startswith(rooms)]
    readers = [path for path in readers if '__name__ == "__main__"' not in path.read_text()]
    source = "\n".join(path.read_text(encoding="utf-8") for path in readers)
    source = re.sub(r"^ *from .*", "", source, flags=re.MULTILINE)
    read = set(re.findall(r"(?:config|options)\.(\w+)", source))
    for path in PACKAGE.glob("extensions/*/options.py"):
        read |= set(re.findall(r"self\.(\w+)", path.read_text(encoding="utf-8")))
    assert {field.name for field in fields(GPTConfig)} - read == set()


def help_of(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_options(GPTConfig, words, prog="gpt", description="")
    assert ended.value.code == 0
    return capsys.readouterr().out


def flags_of(text: str) -> set[str]:
    listed = [line[2:].split("  ")[0] for line in text.splitlines() if line.startswith("  --")]
    return set(re.findall(r"--(\w+)", " ".join(listed)))


def test_help_shows_what_most_runs_set_and_help_all_every_option(capsys):
    names = {field.name for field in fields(GPTConfig)}
    shown, everything = help_of(capsys, "--help"), help_of(capsys, "--help", "all")
    assert names <= flags_of(everything)
    assert names & flags_of(shown) == {*common_options(GPTConfig)}
    assert len(common_options(GPTConfig)) == 33
    assert shown.index("--model_name_or_path") < shown.index("--learning_rate")


def test_help_on_a_subject_shows_its_options_and_names_the_other_subjects(capsys):
    shown = help_of(capsys, "--help=kfac")
    assert help_of(capsys, "-h", "K-FAC") == shown
    assert "--kfac_damping" in shown
    assert "--train_file" not in shown
    with pytest.raises(ConfigError, match=r"--help pizza: .* model, speed, tokenizer") as caught:
        parse_options(GPTConfig, ["--help", "pizza"], prog="gpt", description="")
    topics = str(caught.value).rpartition(": ")[2].rstrip(".").split(", ")
    assert len(topics) == len({*topics})
    with pytest.raises(ConfigError, match="There is no option --hkfac"):
        parse_options(GPTConfig, ["-hkfac"], prog="gpt", description="")


def test_help_and_refusals_import_no_torch():
    for argv in (["--help"], ["--nonsense"]):
        program = (
            "import sys\n"
            "from llm.trainers.gpt.main import main\n"
            "try:\n"
            f"    main({argv!r})\n"
            "except SystemExit:\n"
            "    pass\n"
            "heavy = {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_none_empties_a_list_of_the_file_and_stands_alone(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('data_path = ["a"]\nlearning_rate = 0.1\n')
    words = ["--config", str(file), "--data_path"]
    assert parse_options(GPTConfig, [*words, "none"], prog="gpt", description="").data_path == ()
    with pytest.raises(ConfigError, match="--data_path none stands alone"):
        parse_options(GPTConfig, [*words, "none", "b"], prog="gpt", description="")
