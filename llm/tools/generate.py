"""Generates text with a trained model: `llm-trainers generate runs/wiki --prompt "Once upon a"`.

The text goes to standard output token by token, everything else to standard error.

Exit codes: 0 success; 2 an option cannot work, a file cannot be read, or the model has diverged.
"""

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.checkpoint.format import MANIFEST
from llm.checkpoint.load import list_checkpoints, read_verified_checkpoint
from llm.config.command_line import parse_options
from llm.config.options import option, option_group
from llm.config.program import program
from llm.config.terminal import text_for
from llm.errors import ConfigError, DivergedError, one_line
from llm.runtime.files import read_json_lines
from llm.runtime.logging import quiet_libraries
from llm.runtime.offline import forbid_downloads
from llm.runtime.process_settings import limit_spin_wait
from llm.runtime.rng import draw_seed
from llm.runtime.world import device_of, ignore_ranks, world_from_environment
from llm.trainers.gpt.load_trained_model import (
    choose_checkpoint,
    load_trained_model,
    read_while_training,
)
from llm.trainers.gpt.recorded_config import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Model = tuple[PreTrainedModel, PreTrainedTokenizerBase]


_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6
"""Outside these bounds, logits divided by the temperature may not be finite."""


@option_group("Sampling")
class GenerateOptions:
    """The model, the prompt, and how to sample."""

    run: str = option(
        "",
        "Folder of a run (exported model, else newest checkpoint), a checkpoint, or any Hugging "
        "Face model.",
        group="Model",
        path=True,
    )
    checkpoint: str | None = option(
        None,
        "Checkpoint of the run: a step, latest, best, or its folder.",
        group="Model",
        path=True,
    )
    trust_remote_code: bool = option(
        False, "Run Python code that comes with a model, tokenizer or data set.", group="Model"
    )
    prompt: str = option("", "Beginning of the text; - reads standard input.", group="Text")
    max_new_tokens: int = option(200, "Maximum tokens of a text.", group="Text", at_least=1)
    num_samples: int = option(1, "Texts to write.", group="Text", at_least=1)
    temperature: float | None = option(
        None,
        "0 takes the likeliest token. By default from generation_config.json, else 1.",
        at_least=0,
        at_most=_MAX_TEMPERATURE,
    )
    top_k: int | None = option(
        None,
        "Sample from the k likeliest tokens (0: no limit); by default likewise, else 50.",
        at_least=0,
    )
    top_p: float | None = option(
        None,
        "Sample from the likeliest tokens of this total probability; by default likewise, else 1.",
        above=0,
        at_most=1,
    )
    seed: int | None = option(
        None, "Seed of the first text; by default drawn and printed.", at_least=0
    )


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    ignore_ranks()
    options = parse_options(
        GenerateOptions,
        argv,
        prog="llm-trainers generate",
        description="Generate text with a trained model.",
        positional="run",
    )
    if 0 < (options.temperature or 0) < _MIN_TEMPERATURE:
        raise ConfigError(
            f"--temperature {options.temperature} is too small to divide by; give 0 to always take "
            f"the likeliest token, or at least {_MIN_TEMPERATURE:g}."
        )
    try:
        with forbid_downloads():
            _generate_texts(options)
    except DivergedError as error:
        raise DivergedError(f"{error} {_describe_divergence(options)}") from error
    return 0


def _generate_texts(options: GenerateOptions) -> None:
    """Load the model, and write its texts to standard output."""
    prompt = _read_prompt() if options.prompt == "-" else options.prompt
    model, tokenizer = _open_model(options)
    from llm.models.sampling import sample_text

    model = model.to(device_of(world_from_environment()))
    max_new_tokens = _limit_new_tokens(options.max_new_tokens, prompt, model, tokenizer)
    seed = draw_seed() if options.seed is None else options.seed
    if options.seed is None and options.temperature != 0:
        _print_note(f"--seed {seed}")
    for index in range(options.num_samples):
        if options.num_samples > 1:
            title = f"--- text {index + 1} of {options.num_samples}, --seed {seed + index}"
            sys.stdout.write(f"{title}\n")
        sample_text(
            model,
            tokenizer,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            seed=seed + index,
            streamer=make_printer(tokenizer),
            **_choose_sampling_arguments(options),
        )


def _describe_divergence(options: GenerateOptions) -> str:
    """Name the step since which the run's loss is not finite, and suggest an earlier checkpoint."""
    run = Path(options.run)
    if (run / MANIFEST).is_file():
        run = run.resolve().parent.parent
    last_finite_step, first_bad_step = _find_divergence(run / "metrics.jsonl")
    if first_bad_step is None:
        return "Its training has diverged; use another model."
    # The update after the last finite loss may have made the weights infinite or NaN.
    earlier_checkpoints = [
        checkpoint.path
        for checkpoint in list_checkpoints(run / "checkpoints")
        if checkpoint.step < last_finite_step
    ]
    remedy = "no earlier checkpoint exists, so train again with a lower --learning_rate."
    if earlier_checkpoints:
        remedy = f"use an earlier checkpoint, such as {earlier_checkpoints[-1]}."
    return f"No loss of {run} has been finite since step {first_bad_step}; {remedy}"


def _find_divergence(metrics_path: Path) -> tuple[int, int | None]:
    """Return the step of the last finite training loss, and the first later step without one."""
    last_finite_step, first_bad_step = 0, None
    for record in filter(None, read_json_lines(metrics_path)):
        if type(record.get("step")) is not int:
            continue
        if record.get("loss") is not None:
            last_finite_step, first_bad_step = record["step"], None
        # Infinite losses and NaN are null in the file; a missing loss is another kind of record.
        has_bad_loss = None in (record.get("loss", 0.0), record.get("eval_loss", 0.0))
        if first_bad_step is None and has_bad_loss:
            first_bad_step = record["step"]
    return last_finite_step, first_bad_step


def _read_prompt() -> str:
    try:
        # In the C locale, sys.stdin would accept other bytes.
        return io.TextIOWrapper(sys.stdin.buffer, "utf-8").read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompt -: standard input is not UTF-8 text: {error}.") from error


def _open_model(options: GenerateOptions) -> "Model":
    """Load the model that the options name, and its tokenizer."""
    if not options.run:
        raise ConfigError(
            "No model is named: give the folder of a run first, as in llm-trainers generate "
            "runs/wiki."
        )
    path = Path(options.run)
    if not path.is_dir():
        raise ConfigError(f"RUN {path} is not a folder; name the folder of a run or of a model.")
    limit_spin_wait()
    if (path / MANIFEST).is_file():
        if options.checkpoint is not None:
            raise ConfigError(f"RUN {path} is a checkpoint already; leave out --checkpoint.")
        return _open_checkpoint(path.resolve().parent.parent, str(path), options)
    if options.checkpoint is None and _holds_model(path):
        return _open_export(path, trust_remote_code=options.trust_remote_code)
    if not ((path / "config.toml").is_file() or (path / "checkpoints").is_dir()):
        raise ConfigError(
            f"RUN {path} holds neither a run (config.toml, checkpoints) nor a model "
            "(config.json and weights)."
        )
    return _open_checkpoint(path, options.checkpoint or "latest", options)


def _holds_model(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    from llm.models.configuration import has_weights

    return has_weights(str(folder))


def _open_checkpoint(run: Path, name: str, options: GenerateOptions) -> "Model":
    """Load the model of a run's checkpoint: a step, `latest`, `best`, or a folder."""
    config = read_config(run, trust_remote_code=options.trust_remote_code)
    quiet_libraries()

    def read_model() -> "Model":
        if (Path(name) / MANIFEST).is_file():
            checkpoint = read_verified_checkpoint(Path(name))
        else:
            checkpoint = choose_checkpoint(run / "checkpoints", name, option="--checkpoint")
        _print_note(f"The model after step {checkpoint.step:,}, from {checkpoint.path}.")
        return load_trained_model(config, checkpoint)

    return read_while_training(run / "checkpoints", read_model)


def _open_export(folder: Path, *, trust_remote_code: bool) -> "Model":
    """Load a model and its tokenizer from a folder that `from_pretrained` can load."""
    quiet_libraries()
    from llm.tokenizers.load_tokenizer import load_tokenizer
    from llm.tokenizers.options import TokenizerOptions

    tokenizer = load_tokenizer(
        TokenizerOptions(tokenizer_name=str(folder)), trust_remote_code=trust_remote_code
    )
    from transformers import AutoModelForCausalLM

    from llm.models.configuration import load_config
    from llm.models.options import ModelOptions

    config = load_config(
        ModelOptions(model_name_or_path=str(folder), trust_remote_code=trust_remote_code)
    )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the library and the model's code may raise anything
        raise ConfigError(f"The model in {folder} cannot be loaded: {one_line(error)}.") from error
    _print_note(f"The exported model in {folder}.")
    return model, tokenizer


def _limit_new_tokens(
    max_new_tokens: int, prompt: str, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"
) -> int:
    """Return the number of tokens to generate, limited by the model's positions."""
    from llm.models.configuration import max_positions
    from llm.tokenizers.prompts import encode_prompt

    num_positions = max_positions(model.config)
    prompt_positions = max(1, len(encode_prompt(tokenizer, prompt))) if prompt else 1
    if num_positions is None or prompt_positions + max_new_tokens <= num_positions:
        return max_new_tokens
    num_tokens = max(1, num_positions - prompt_positions)
    note = (
        f"The model has {num_positions:,} positions, and the prompt takes {prompt_positions:,}: "
        f"at most {num_tokens:,} tokens are written instead of {max_new_tokens:,}"
    )
    if prompt_positions >= num_positions:
        note += ", and the beginning of the prompt is left out"
    _print_note(f"{note}.")
    return num_tokens


def _choose_sampling_arguments(options: GenerateOptions) -> dict[str, Any]:
    """Return the arguments of the model's `generate`; without an option, the model's default."""
    arguments: dict[str, Any] = {"num_beams": 1}  # several beams have no text before they end
    if options.temperature == 0:
        return {**arguments, "do_sample": False}
    for name in ("temperature", "top_k", "top_p"):
        value = getattr(options, name)
        if value is not None:
            arguments[name] = value
    return arguments


def make_printer(tokenizer: "PreTrainedTokenizerBase") -> Any:
    """Create a streamer that prints each token as soon as its characters are complete.

    The library's `TextStreamer` delays words until they end, and loses spaces after a line break
    with tokenizers that mark the beginnings of words.
    """
    from transformers.generation.streamers import BaseStreamer

    class Printer(BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self._ids: list[int] = []
            self._num_written = 0

        def put(self, value: Any) -> None:
            is_prompt = not self._ids
            self._ids += value.flatten().tolist()
            if is_prompt:  # printed with the first token
                return
            text = tokenizer.decode(self._ids, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # an incomplete character
                self._write_text(text)

        def end(self) -> None:
            self._write_text(tokenizer.decode(self._ids, skip_special_tokens=True))
            sys.stdout.write("\n")
            sys.stdout.flush()

        def _write_text(self, text: str) -> None:
            sys.stdout.write(text_for(sys.stdout, text[self._num_written :]))
            sys.stdout.flush()
            self._num_written = len(text)

    return Printer()


def _print_note(text: str) -> None:
    sys.stderr.write(text_for(sys.stderr, f"{text}\n"))
    sys.stderr.flush()
