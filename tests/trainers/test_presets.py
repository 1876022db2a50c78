"""`--preset NAME`: what it sets, what overrides it, and what a run records of it."""

import json
from pathlib import Path

import pytest

from llm.config.toml import to_toml
from llm.errors import ConfigError
from llm.models.configuration import load_config
from llm.models.shapes import count_parameters
from llm.tools.plan import plan
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.main import parse_args
from tests.support.models import tiny_config
from tests.support.recovery import check_resume
from tests.support.tokenizers import tiny_tokenizer
from tests.support.training import Bench

ENOUGH = ("--train_file", "a.txt", "--model_name_or_path", "gpt2")
ADVICE = "advice: the default --learning_rate is for fine-tuning"


def read(*words: str) -> GPTConfig:
    return parse_args([*ENOUGH, *words])


def test_the_preset_of_pretraining_sets_the_usual_values():
    config = read("--preset", "pretrain")
    assert (config.learning_rate, config.lr_scheduler_type) == (3e-4, "cosine")
    assert (config.warmup, config.weight_decay) == ("2000 steps", 0.1)
    assert (config.betas, config.max_grad_norm) == ((0.9, 0.95), 1.0)
    assert read().learning_rate == GPTConfig.learning_rate == 5e-5


def test_a_file_overrides_the_preset_and_the_command_line_the_file(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("preset = 'pretrain'\nlearning_rate = 6e-4\nnum_warmup_steps = 10\n")

    config = read("--config", str(file), "--num_warmup_steps", "20")

    assert config.learning_rate == 6e-4
    assert config.warmup == "20 steps"
    assert config.weight_decay == 0.1


def test_a_warmup_in_tokens_is_in_place_of_that_of_the_preset():
    config = read("--preset", "pretrain", "--num_warmup_tokens", "10M")
    assert config.warmup == "10000000 tokens"


def test_what_a_run_records_is_read_back_without_the_preset(tmp_path: Path):
    config = read("--preset", "pretrain", "--num_warmup_tokens", "10M", "--betas", "0.9", "0.9")
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config).replace("weight_decay = 0.1", "weight_decay = 0.2"))

    again = parse_args(["--config", str(file)])

    assert again.preset == "pretrain"
    assert again.warmup == "10000000 tokens"
    assert (again.betas, again.weight_decay) == ((0.9, 0.9), 0.2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--preset", "x"), "There is no --preset x; choose from: compute_optimal, pretrain."),
        (
            ("--preset", "pretrain", "--branch_from", "runs/a", "--output_dir", "runs/b"),
            "--preset pretrain does not go with --branch_from",
        ),
        (
            ("--preset", "pretrain", "--optimizer", "sgd"),
            "--preset pretrain sets --betas; give another value, or no preset.",
        ),
        (
            ("--preset", "pretrain", "--lr_scheduler_type", "constant"),
            "--warmup 2000 steps does not go with --lr_scheduler_type constant, which has none; "
            "choose constant_with_warmup. --preset pretrain sets --warmup; give another value, or "
            "no preset.",
        ),
    ],
)
def test_a_preset_that_cannot_be_used_is_refused_by_name(words, message):
    with pytest.raises(ConfigError) as caught:
        read(*words)
    assert message in str(caught.value)


def read_optimal(*words: str) -> GPTConfig:
    enough = ("--train_file", "a.txt", "--tokenizer_name", "gpt2", "--preset", "compute_optimal")
    return parse_args([*enough, *words])


def test_a_compute_optimal_run_follows_from_the_size_of_its_model():
    config = read_optimal("--model_size", "124M")
    assert config.max_duration == "20 tokens per parameter"
    assert config.global_batch_size == 256  # of 1,024 tokens; the rule has 243
    assert (config.learning_rate, config.weight_decay) == (0.00304, 0.155)
    assert (config.lr_scheduler_type, config.warmup) == ("linear", "248879616 tokens")


def test_other_values_follow_from_those_that_the_user_names():
    config = read_optimal("--model_size", "124M", "--tokens_per_parameter", "40")
    assert (config.global_batch_size, config.learning_rate) == (320, 0.00377)

    larger_batch = read_optimal("--model_size", "124M", "--global_batch_size", "512")
    assert (larger_batch.learning_rate, larger_batch.weight_decay) == (0.00304, 0.31)
    smaller_batch = read_optimal("--model_size", "124M", "--global_batch_size", "32")
    assert smaller_batch.learning_rate == pytest.approx(0.0015, rel=0.01)
    halved_rate = read_optimal("--model_size", "124M", "--learning_rate", "1.52e-3")
    assert halved_rate.weight_decay == pytest.approx(0.31, rel=0.01)


def test_the_size_is_that_of_the_named_model(tmp_path: Path):
    tiny_config("llama").save_pretrained(tmp_path)
    config = read_optimal("--model_name_or_path", str(tmp_path), "--block_size", "16")
    same = read_optimal("--config_name", f"{tmp_path}/config.json", "--block_size", "16")
    assert config.warmup == same.warmup
    num_parameters = count_parameters(tiny_config("llama").to_dict()).total
    assert config.warmup == f"{num_parameters * 2} tokens"

    wider = read_optimal(
        *("--model_name_or_path", str(tmp_path), "--block_size", "16"),
        *("--config_overrides", "tie_word_embeddings=true,vocab_size=1000"),
    )
    assert wider.warmup != config.warmup
    assert read_optimal("--model_size", "124M", "--config_overrides", "n_inner=none")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        # Without num_key_value_heads, a Llama has one for each head.
        ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}, ()),
        ({"model_type": "llama", "num_attention_heads": 4}, ("--model_size", "60M")),
        ({"model_type": "llama"}, ("--config_overrides", "num_attention_heads=4,hidden_size=64")),
        ({"model_type": "gpt2", "hidden_size": 64, "num_hidden_layers": 2}, ()),
    ],
)
def test_a_config_with_few_fields_is_completed_as_by_transformers(tmp_path: Path, fields, words):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_optimal("--config_name", str(tmp_path), *words)

    num_parameters = count_parameters(load_config(config).to_dict()).total
    assert config.warmup == f"{min(2 * num_parameters, 375_000_000)} tokens"


def test_muon_has_the_batch_of_its_own_rule_and_the_rates_of_the_user():
    config = read_optimal(
        *("--model_size", "124M", "--optimizer", "muon"),
        *("--learning_rate", "0.02", "--weight_decay", "0.01"),
    )
    assert (config.global_batch_size, config.learning_rate) == (640, 0.02)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--preset compute_optimal needs the size of the model; give --model_size."),
        (("--model_name_or_path", "gpt2"), "fetch it with llm-trainers fetch, or give --model_typ"),
        (("--model_type", "bloom"), "has been tried with gpt2, gpt_neox, llama, "),
        (
            ("--model_size", "124M", "--max_train_steps", "10"),
            "needs the length in tokens, and --max_duration 10 steps is in steps",
        ),
        (
            ("--model_size", "124M", "--max_duration", "0 tokens"),
            "--max_duration must be greater than 0, not 0 tokens.",
        ),
        (
            ("--model_size", "124M", "--config_overrides", "vocab_size=abc"),
            "vocab_size is 'abc', which is not a positive whole number; change config.json or",
        ),
        (
            ("--model_size", "124M", "--config_overrides", "n_positions=0"),
            "n_positions is 0, which is not a positive whole number",
        ),
        (
            ("--model_size", "124M", "--config_overrides", "n_inner=abc"),
            "n_inner is 'abc', which is not a positive whole number",
        ),
        (
            ("--model_type", "llama", "--config_overrides", "head_dim=abc"),
            "head_dim is 'abc', which is not a positive whole number",
        ),
        (("--model_size", "0M"), "0M is not a number of parameters such as 60M or 1.3B."),
        (
            ("--model_size", "124M", "--global_batch_size", "8@0,16@1M"),
            "--global_batch_size 8@0,16@1M grows; give a number",
        ),
        (
            ("--model_size", "124M", "--optimizer", "muon", "--learning_rate", "0.02"),
            "computes weight_decay for AdamW and one model, not for --optimizer muon; set weight_d",
        ),
        (
            ("--model_size", "124M", "--mup", "--mup_base_width", "256", "--weight_decay", "0"),
            "computes learning_rate for models without --mup; set it to the value of the base mode",
        ),
    ],
)
def test_a_rule_that_does_not_apply_is_refused_by_name(words, message):
    with pytest.raises(ConfigError) as caught:
        read_optimal(*words)
    assert message in str(caught.value)


def test_a_compute_optimal_run_logs_its_values_and_resumes_exactly(tmp_path: Path):
    run = check_resume(
        Bench(tmp_path),
        "optimal",
        preset="compute_optimal",
        global_batch_size=4,
        max_train_tokens=768,
        max_train_steps=None,
        learning_rate=None,
        lr_scheduler_type=None,
        num_warmup_steps=None,
        checkpointing_steps=3,
    )
    assert "preset compute_optimal: learning_rate " in run.output
    assert "compute_optimal counted" not in run.output
    assert "lr_scheduler_type linear, warmup 77 tokens, weight_decay " in run.output


def test_a_tokenizer_that_enlarges_the_counted_model_is_a_warning(tmp_path: Path):
    bench, num_tokens = Bench(tmp_path), len(tiny_tokenizer())
    run = bench.train_well(
        "enlarged",
        model_name_or_path=None,
        model_type="gpt2",
        tokenizer_name=bench.model,
        config_overrides="vocab_size=100,n_positions=32,n_layer=1,n_embd=8,n_head=1",
        preset="compute_optimal",
        global_batch_size=4,
        max_train_tokens=256,
        max_train_steps=None,
        learning_rate=None,
        lr_scheduler_type=None,
    )
    trained = 8 * (num_tokens + 32) + 12 * 8**2 + 13 * 8 + 2 * 8
    assert f"model: gpt2, {trained:,} parameters" in run.output
    assert (
        f"--preset compute_optimal counted {trained - 8 * (num_tokens - 100):,} parameters, with "
        f"the model's vocabulary of 100 tokens; the tokenizer has {num_tokens}, so {trained:,} are "
        f"trained. To count them, add vocab_size={num_tokens} to --config_overrides.\n"
    ) in run.output


def test_a_plan_has_the_options_of_the_preset(monkeypatch, capsys):
    monkeypatch.setattr(plan, "_run_plan", lambda options: ([str(options.betas)], True))
    assert plan.main(["--model_size", "124M", "--preset", "pretrain"]) == 0
    assert capsys.readouterr().out == "(0.9, 0.95)\n"


def test_a_run_with_a_preset_logs_its_values_and_resumes_exactly(tmp_path: Path):
    run = check_resume(
        Bench(tmp_path),
        "preset",
        preset="pretrain",
        learning_rate=None,
        lr_scheduler_type=None,
        num_warmup_steps=3,
        max_train_steps=6,
        checkpointing_steps=3,
    )
    assert (
        "preset pretrain: learning_rate 0.0003, lr_scheduler_type cosine, weight_decay 0.1, "
        "betas 0.9 0.95, max_grad_norm 1.0\n"
    ) in run.output
    assert ADVICE not in run.output


def test_random_weights_with_the_default_rate_get_one_line_of_advice(tmp_path: Path):
    bench = Bench(tmp_path)
    fresh = bench.train_well("fresh", learning_rate=None, max_train_steps=1)
    assert fresh.output.count(ADVICE) == 1

    tuned = bench.train_well(
        "tuned", learning_rate=None, max_train_steps=1, model_name_or_path=fresh.folder
    )
    assert ADVICE not in tuned.output
