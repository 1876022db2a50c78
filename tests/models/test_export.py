import errno
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm.models import export
from tests.support.families import every_family
from tests.support.models import (
    export_to,
    moved_from_its_start,
    tiny_config,
    tiny_model,
)
from tests.support.tokenizers import tiny_tokenizer, tokenizer_with_two_templates


@pytest.mark.parametrize("multiple", [None, 128])
@every_family
def test_the_exported_weights_are_the_trained_ones(
    family: str, multiple: int | None, tmp_path: Path
) -> None:
    model = moved_from_its_start(tiny_model(tiny_config(family), pad_vocab_to_multiple_of=multiple))
    export_to(tmp_path, model)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)

    assert not any(report.values()), report
    weights = loaded.state_dict()
    assert list(weights) == list(model.state_dict())
    for name, trained in model.state_dict().items():
        assert torch.equal(weights[name], trained[: len(weights[name])]), name
    input_ids = torch.arange(20).view(2, 10)
    assert loaded.get_input_embeddings().weight.shape[0] == 320
    assert torch.equal(loaded(input_ids).logits, model(input_ids).logits[..., :320])
    tied = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert tied == model.config.tie_word_embeddings


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_autotokenizer_gives_the_ids_of_the_training(family, tmp_path, caplog):
    """The type qwen2 means a class that splits digits and composes letters."""
    text = "cafe\u0301 In 1789 the dog"
    export_to(tmp_path, tiny_model(tiny_config(family)))
    loaded = AutoTokenizer.from_pretrained(tmp_path)

    assert loaded(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]
    assert len(loaded) == len(tiny_tokenizer())
    assert not caplog.text


def test_a_tokenizer_that_autotokenizer_cannot_read_is_reported(tmp_path, caplog, monkeypatch):
    def refuse(*args: object, **options: object) -> None:
        raise ValueError("of another version")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    export_to(tmp_path, tiny_model(tiny_config("qwen2")))

    assert "AutoTokenizer may give other ids than in training" in caplog.text
    assert "because it cannot read it: of another version. Read the exported" in caplog.text


@pytest.mark.parametrize("limit", [3000, None])
def test_a_full_disk_is_an_error_of_the_system_whichever_library_meets_it(
    limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors has a kind of its own for it, and tokenizers raises a bare Exception."""
    resource = pytest.importorskip("resource")
    model, tokenizer = tiny_model(tiny_config("gpt2")), tiny_tokenizer()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit is None:
        refuse = Mock(side_effect=Exception("File too large (os error 27)"))
        monkeypatch.setattr(tokenizer, "save_pretrained", refuse)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            export_to(tmp_path, model, tokenizer=tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert not any(tmp_path.iterdir())


def test_the_configuration_is_the_original_one(tmp_path: Path) -> None:
    model = tiny_model(
        tiny_config("gpt2"),
        pad_vocab_to_multiple_of=128,
        attention_implementation="eager",
        activation_checkpointing="full",
    )
    export_to(tmp_path, model)
    written = json.loads((tmp_path / "config.json").read_text())

    assert (written["vocab_size"], written["use_cache"]) == (320, True)
    assert (written["dtype"], written["architectures"]) == ("float32", ["GPT2LMHeadModel"])
    assert not [key for key in written if "attn_implementation" in key]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_export_in_half_precision_is_the_rounded_model(
    name: export.ExportType, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = moved_from_its_start(tiny_model(tiny_config("gpt2"), pad_vocab_to_multiple_of=128))
    export_to(tmp_path, model, dtype=name)
    written = json.loads((tmp_path / "config.json").read_text())
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True
    )

    assert written["dtype"] == str(dtype).removeprefix("torch.")
    assert not any(report.values()), report
    for key, trained in model.state_dict().items():
        rounded = trained[: len(loaded.state_dict()[key])].to(dtype)
        assert torch.equal(loaded.state_dict()[key], rounded), key
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_every_chat_template_comes_along(tmp_path: Path) -> None:
    tokenizer = tokenizer_with_two_templates()
    for _ in range(2):  # the second export replaces the first
        export_to(tmp_path, tiny_model(tiny_config("gpt2")), tokenizer=tokenizer)

    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template


def test_a_large_model_is_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_SHARD_SIZE", "60KB")
    model = tiny_model(tiny_config("gpt2"))
    export_to(tmp_path, model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)

    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(loaded.transformer.wte.weight, model.transformer.wte.weight)


def test_a_second_export_replaces_the_first_and_leaves_other_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("metrics.jsonl", "model-before.safetensors"):
        (tmp_path / name).write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(export, "_SHARD_SIZE", "60KB")
        export_to(tmp_path, tiny_model(tiny_config("gpt2")))
    newer = tiny_model(tiny_config("gpt2"), seed=2)
    export_to(tmp_path, newer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)

    assert {file.name for file in tmp_path.glob("model*")} == {
        "model.safetensors", "model-before.safetensors"
    }  # fmt: skip
    assert torch.equal(loaded.transformer.wte.weight, newer.transformer.wte.weight)
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"
    assert (tmp_path / "model-before.safetensors").read_text() == "mine"


def test_an_export_that_dies_leaves_the_older_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = tiny_model(tiny_config("gpt2"))
    export_to(tmp_path, older)

    def die(*_: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type(tiny_tokenizer()), "save_pretrained", die)
        with pytest.raises(OSError, match="No space"):
            export_to(tmp_path, tiny_model(tiny_config("gpt2"), seed=2))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)

    assert torch.equal(loaded.transformer.wte.weight, older.transformer.wte.weight)
    assert not list(tmp_path.glob(".export-*"))


def test_leftovers_of_a_killed_export_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".export-killed").mkdir()
    export_to(tmp_path, tiny_model(tiny_config("gpt2")))

    assert not list(tmp_path.glob(".export-*"))
