import io
import json
import math
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm.models.sampling import sample_text
from llm.tools.generate import main, make_printer
from tests.support.tokenizers import tiny_tokenizer
from tests.support.training import Bench


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of a padded vocabulary, with the checkpoints of its steps 2, 4 and 6."""
    bench = Bench(tmp_path_factory.mktemp("bench"), lines=60)
    return bench.train_well(
        max_train_steps=6,
        checkpointing_steps=2,
        keep_checkpoints=3,
        save_top_k=3,
        learning_rate=1e-2,
        pad_vocab_to_multiple_of=64,
    ).folder


@pytest.fixture
def unexported(trained, tmp_path):
    """A copy of the run without the model that it has left behind, as if it were under way."""
    folder = tmp_path / "unexported"
    shutil.copytree(trained, folder, symlinks=True)
    (folder / "model.safetensors").unlink()
    return folder


def write(capsys, *words: object) -> str:
    """What the program writes to its standard output."""
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_the_text_is_that_of_generate_with_the_same_seed(trained, capsys):
    text = write(capsys, trained, "--prompt", "The king", "--max_new_tokens", 20, "--seed", 3)

    model = AutoModelForCausalLM.from_pretrained(trained)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    expected = sample_text(model, tokenizer, prompt="The king", max_new_tokens=20, seed=3)
    assert text == expected + "\n"
    assert text.startswith("The king")


def test_a_checkpoint_writes_what_the_export_of_the_same_step_does(trained, capsys):
    # Were the rows drawn that pad the checkpoint's vocabulary, the draws would differ.
    words = ("--seed", 5, "--top_k", 0, "--max_new_tokens", 31)
    exported = write(capsys, trained, *words)
    assert write(capsys, trained, "--checkpoint", 6, *words) == exported
    assert write(capsys, trained, "--checkpoint", "latest", *words) == exported
    assert write(capsys, trained / "checkpoints" / "step_00000006", *words) == exported


def test_the_variables_of_a_job_step_change_nothing(trained, capsys, monkeypatch):
    words = ("--checkpoint", "latest", "--seed", 5, "--max_new_tokens", 9)
    alone = write(capsys, trained, *words)
    # Rank 1 of 4 would read a fourth of the checkpoint, and wait for the others.
    step = {"PROCID": "1", "LOCALID": "1", "STEP_NUM_TASKS": "4", "NTASKS": "4"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)

    assert write(capsys, trained, *words) == alone


def test_other_checkpoints_are_other_models(trained, capsys):
    words = ("--temperature", 0, "--prompt", "the", "--max_new_tokens", 20)
    texts = {write(capsys, trained, "--checkpoint", step, *words) for step in (2, 6)}
    assert len(texts) == 2


def test_a_checkpoint_may_be_named_best_or_by_its_folder(trained, capsys):
    best = trained / "checkpoints" / "best"
    words = ("--seed", 5, "--max_new_tokens", 10)
    assert write(capsys, trained, "--checkpoint", "best", *words) == write(
        capsys, trained, "--checkpoint", best.resolve(), *words
    )


def test_without_an_export_the_newest_valid_checkpoint_writes(unexported, capsys):
    (unexported / "checkpoints" / "step_00000006" / "state.json").unlink()

    assert main([str(unexported), "--seed", "5", "--max_new_tokens", "10"]) == 0

    said = capsys.readouterr().err
    assert "Skipping a checkpoint: " in said
    assert "The model after step 4" in said


def test_prompts_are_encoded_as_the_texts_of_the_training(tmp_path, capsys):
    """The tokenizer's template adds a token that no training text has."""
    bench = Bench(tmp_path, lines=60)
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save_pretrained(bench.model)
    run = bench.train_well(max_train_steps=2, checkpointing_steps=2).folder
    model = AutoModelForCausalLM.from_pretrained(run)
    start = torch.tensor([tiny_tokenizer().encode("The king")])
    expected = model.generate(start, max_new_tokens=8, do_sample=False)[0]

    for words in ([run], [run, "--checkpoint", "latest"]):
        words += ["--prompt", "The king", "--temperature", "0", "--max_new_tokens", "8"]
        text = tiny_tokenizer().decode(expected, skip_special_tokens=True)
        assert write(capsys, *words) == text + "\n"
    assert AutoTokenizer.from_pretrained(run).encode("The king") == start[0].tolist()


def test_temperature_0_always_takes_the_likeliest_token(trained, capsys):
    words = ("--temperature", 0, "--prompt", "the", "--max_new_tokens", 10)
    greedy = write(capsys, trained, *words, "--seed", 1)
    assert write(capsys, trained, *words, "--seed", 2) == greedy
    assert write(
        capsys, trained, "--top_k", 1, "--prompt", "the", "--max_new_tokens", 10
    ) == greedy  # fmt: skip


def test_the_second_sample_is_the_first_of_the_next_seed(trained, capsys):
    words = ("--prompt", "a", "--max_new_tokens", 10)
    first = write(capsys, trained, *words, "--seed", 7)
    second = write(capsys, trained, *words, "--seed", 8)
    assert first != second
    assert write(capsys, trained, *words, "--seed", 7, "--num_samples", 2) == (
        f"--- text 1 of 2, --seed 7\n{first}--- text 2 of 2, --seed 8\n{second}"
    )


def test_a_random_seed_is_printed_and_reproduces_the_text(trained, capsys):
    assert main([str(trained), "--max_new_tokens", "10"]) == 0
    captured = capsys.readouterr()
    seed = captured.err.split("--seed ")[1].split()[0]
    assert write(capsys, trained, "--max_new_tokens", 10, "--seed", seed) == captured.out


def test_the_prompt_may_come_from_the_standard_input(trained, capsys, monkeypatch):
    words = ("--seed", 3, "--max_new_tokens", 10)
    given = write(capsys, trained, "--prompt", "two\nlines", *words)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines\n")))
    assert write(capsys, trained, "--prompt", "-", *words) == given


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"], ids=["UTF-8", "C locale"])
def test_a_standard_input_that_is_not_utf8_is_refused(errors, trained, capsys, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main([str(trained), "--prompt", "-"]) == 2
    assert "--prompt -: standard input is not UTF-8 text" in capsys.readouterr().err


def test_a_prompt_is_kept_whole_where_the_positions_end_sooner(trained, capsys):
    prompt = "the king said " * 3
    assert main([str(trained), "--prompt", prompt, "--max_new_tokens", "5000"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(prompt)
    assert "tokens are written instead of 5,000." in captured.err


def test_a_prompt_beyond_the_positions_loses_its_beginning_and_says_so(trained, capsys):
    assert main([str(trained), "--prompt", "the king said " * 40, "--max_new_tokens", "5"]) == 0
    assert "and the beginning of the prompt is left out." in capsys.readouterr().err


def test_a_character_of_several_tokens_is_written_once_it_is_whole(monkeypatch):
    tokenizer = tiny_tokenizer()
    text = "the caf\u00e9 \u72d0 on"
    printer, pieces = make_printer(tokenizer), []
    monkeypatch.setattr(sys.stdout, "write", pieces.append)

    for token in tokenizer(text, return_tensors="pt")["input_ids"][0]:
        printer.put(token)
    printer.end()

    assert "".join(pieces) == text + "\n"
    assert pieces[:4] == ["the", " ", "c", "a"]  # the first are the prompt, which waits
    assert {"\u00e9", "\u72d0"} <= set(pieces)


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, r"\x1b[2J"), (False, "\x1b[2J")])
def test_a_terminal_gets_no_control_characters_of_a_token(monkeypatch, is_terminal, shown):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    printer, pieces = make_printer(StubTokenizer()), []
    monkeypatch.setattr(sys.stdout, "write", pieces.append)

    for token in torch.tensor([[0], [1]]):
        printer.put(token)
    printer.end()

    assert "".join(pieces) == f"{shown}\n"


class StubTokenizer:
    def decode(self, ids: list[int], **options: bool) -> str:
        return "\x1b[2J"


def test_a_model_that_asks_for_beams_streams_all_the_same(trained, tmp_path, capsys):
    folder = tmp_path / "beams"
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("checkpoints", ".*"))
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "num_beams": 3}))
    words = ("--seed", 3, "--max_new_tokens", 10)
    assert write(capsys, folder, *words) == write(capsys, trained, *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "No model is named"),
        (["{}", "{}"], "error: '{}' has no option before it"),
        ([""], "error: RUN is given an empty path"),
        (["{}/nowhere"], "error: RUN {}/nowhere is not a folder"),
        (["{}/tensorboard"], "is not a folder"),
        (["{}/checkpoints"], "error: RUN {}/checkpoints holds neither a run"),
        (["{}", "--checkpoint", "5"], "--checkpoint 5 names no checkpoint of"),
        (["{}/checkpoints/step_00000002", "--checkpoint", "4"], "is a checkpoint already"),
        (["{}", "--top_p", "0"], "--top_p must be greater than 0"),
        (["{}", "--temperature", "-1"], "--temperature must be at least 0"),
        (["{}", "--temperature", "1e-39"], "--temperature 1e-39 is too small to divide by; give 0"),
        (["{}", "--temperature", "1e39"], "--temperature must be at most 1000000"),
        (["{}", "--prompt", "caf\udce9"], "--prompt 'caf\\udce9' is not UTF-8 text; convert it"),
        (["{}", "--promt", "x"], "did you mean prompt?"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(trained, capsys, words, said):
    assert main([word.format(trained) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said.format(trained) in captured.err
    assert captured.err.startswith("error: ")


def test_damaged_weights_of_an_export_are_reported(trained, tmp_path, capsys):
    folder = tmp_path / "damaged"
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("checkpoints", ".*"))
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert main([str(folder)]) == 2
    assert f"The model in {folder} cannot be loaded" in capsys.readouterr().err


@pytest.fixture
def diverged(trained, tmp_path):
    """A copy of the run as if its loss had not been finite from step 5 on."""
    folder = tmp_path / "diverged"
    shutil.copytree(trained, folder, symlinks=True)
    losses = [2.0, 1.5, 1.25, 1.0, None, None]
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    rows[-1]["eval_loss"] = None
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def overwrite_weights(run, value: float) -> None:
    weights = load_file(run / "model.safetensors")
    weights["transformer.wte.weight"][:] = value
    save_file(weights, run / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("words", [[], ["--temperature", "0"]], ids=["drawn", "likeliest"])
def test_non_finite_weights_name_the_step_and_an_earlier_checkpoint(diverged, capsys, words):
    overwrite_weights(diverged, math.nan)
    assert main([str(diverged), "--prompt", "The king", "--seed", "1", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    checkpoint = diverged / "checkpoints" / "step_00000002"
    assert captured.err.endswith(
        "error: The model cannot write: its weights are not finite. "
        f"No loss of {diverged} has been finite since step 5; use an earlier checkpoint, such as "
        f"{checkpoint}.\n"
    )
    assert main([str(checkpoint), "--max_new_tokens", "3"]) == 0

    shutil.rmtree(diverged / "checkpoints")
    assert main([str(diverged), *words]) == 2
    assert "no earlier checkpoint exists, so train again" in capsys.readouterr().err


def test_finite_weights_with_non_finite_logits_are_reported(diverged, capsys):
    overwrite_weights(diverged, 1e30)
    (diverged / "metrics.jsonl").unlink()
    assert main([str(diverged), "--temperature", "0"]) == 2
    assert capsys.readouterr().err.endswith(
        "error: The model cannot write: its logits are not finite, although its weights are. "
        "Its training has diverged; use another model.\n"
    )
