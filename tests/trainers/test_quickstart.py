import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from llm.config.toml import read_toml
from llm.trainers.gpt.config import check_config
from llm.trainers.gpt.extensions import GPTConfig

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
QUICKSTART = EXAMPLES / "quickstart.toml"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(EXAMPLES / "tokenizer")


def test_the_script_makes_the_tokenizer_that_ships(tmp_path: Path) -> None:
    script = EXAMPLES / "make_tokenizer.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=120)

    made = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    shipped = json.loads((EXAMPLES / "tokenizer/tokenizer.json").read_text(encoding="utf-8"))
    assert made["model"]["vocab"] == shipped["model"]["vocab"]
    assert made["model"]["merges"] == shipped["model"]["merges"]
    assert made["added_tokens"] == shipped["added_tokens"]


def test_the_tokenizer_gives_every_text_back(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "ROMEO:\nWhat , lady 'tis\t\n\n  \u00e9 \u2603"

    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_model_has_an_embedding_row_for_every_token(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    config = AutoConfig.from_pretrained(EXAMPLES / "gpt-tiny")

    assert config.vocab_size == len(tokenizer) == 2048
    assert config.eos_token_id == config.bos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.model_max_length == config.n_positions == 128


def test_the_quick_start_is_a_configuration_that_the_trainer_accepts() -> None:
    config = GPTConfig(**read_toml(GPTConfig, QUICKSTART))

    check_config(config)

    assert config.block_size == 128
    assert config.sample_prompt == "ROMEO:\n"


def test_the_quick_start_names_only_files_that_ship() -> None:
    settings = tomllib.loads(QUICKSTART.read_text(encoding="utf-8"))

    for key in ("model_name_or_path", "tokenizer_name", "train_file"):
        assert (ROOT / settings[key]).exists(), f"{key} = {settings[key]}"


def test_a_second_quick_start_resumes_the_first() -> None:
    settings = tomllib.loads(QUICKSTART.read_text(encoding="utf-8"))

    assert settings["resume_from_checkpoint"] is True
    assert "overwrite_output_dir" not in settings
