"""Lists, verifies and exports the checkpoints of a run: `python -m llm.checkpoints runs/wiki`.

Exit codes: 0 success; 1 `--verify` has detected damage; 2 an option cannot work, or a file cannot
be read or written.
"""

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from llm.checkpoint.format import REPLACED, Checkpoint, checkpoint_folders, read_manifest, step_of
from llm.checkpoint.retention import BEST, leftovers
from llm.config.command_line import parse
from llm.config.options import option
from llm.errors import CheckpointError, ConfigError, LLMError
from llm.trainers.gpt.trained_model import (
    choose_checkpoint,
    follow_best,
    load_trained,
    read_config,
)

_COLUMNS = "{:>10}  {:>15}  {:>9}  {:<16}  {:>5}  {}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointsOptions:
    """The run, and the action on its checkpoints."""

    run: str = option(
        "",
        "The run's folder (--output_dir of its training), or its checkpoints folder. The option's "
        "name can be left out.",
        group="Checkpoints",
    )
    verify: bool = option(
        False,
        "Read every byte and compare it with its checksum; exit with 1 if anything is damaged.",
        group="Checkpoints",
    )
    export: tuple[str, ...] = option(
        (),
        "STEP DIR: write the model of a checkpoint, and the tokenizer, as a Hugging Face folder. "
        "STEP is a number, latest or best.",
        group="Checkpoints",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A folder with the name of a checkpoint.

    Attributes:
        path: The folder.
        checkpoint: Its manifest; None if that cannot be read.
        problem: Why it is not valid, or None.
    """

    path: Path
    checkpoint: Checkpoint | None
    problem: str | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    try:
        options = parse(
            CheckpointsOptions,
            sys.argv[1:] if argv is None else argv,
            prog="python -m llm.checkpoints",
            description="Show a run's checkpoints, verify them, or export a model from one.",
            positional="run",
        )
        run, folder = _places(options)
        if options.export:
            lines, code = [_export(run, folder, options.export)], 0
        else:
            lines, code = _show(folder, verify=options.verify)
    except LLMError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or 'A file'} cannot be used: {error.strerror}.\n")
        return 2
    sys.stdout.write("\n".join(lines) + "\n")
    return code


def _places(options: CheckpointsOptions) -> tuple[Path, Path]:
    """Return the run's folder and that of its checkpoints, which need not exist."""
    if not options.run:
        raise ConfigError(
            "No run is named: give its folder first, as in llm.checkpoints runs/wiki --verify."
        )
    if options.verify and options.export:
        raise ConfigError("--export verifies what it exports; leave out --verify.")
    if options.export and len(options.export) != 2:
        raise ConfigError(
            f"--export expects a step and a folder, as in --export latest DIR, not "
            f"'{' '.join(options.export)}'."
        )
    path = Path(options.run)
    if not path.is_dir():
        raise ConfigError(f"--run {path} is no folder; name that of a run.")
    if (path / "checkpoints").is_dir() or (path / "config.toml").is_file():
        return path, path / "checkpoints"
    if path.resolve().name == "checkpoints" or checkpoint_folders(path):
        return path.resolve().parent, path
    raise ConfigError(f"--run {path} holds no run: neither config.toml nor checkpoints.")


def _show(folder: Path, *, verify: bool) -> tuple[list[str], int]:
    """Return the lines of the list, and the exit code."""
    entries = [_look_at(path, verify=verify) for path in checkpoint_folders(folder)]
    unfinished = leftovers(folder)
    if not entries and not unfinished:
        return [f"{folder} holds no checkpoint."], 0
    valid = [entry.path for entry in entries if entry.problem is None]
    latest = valid[-1] if valid else None
    best, remark = follow_best(folder)
    lines = [_COLUMNS.format("step", "validation loss", "size", "saved", "ranks", "state")]
    for entry in entries:
        marks = [name for name, path in (("latest", latest), (BEST, best)) if path == entry.path]
        lines.append(_row(entry, marks))
    for path in unfinished:
        lines.append(
            f"{path.name}, {_bytes(_size(path))}: of a save or removal that is under way or was "
            "cut short; the next save clears it away."
        )
    lines.append(f"latest, from which training resumes: {latest.name if latest else 'none'}")
    lines.append(f"best, of the lowest validation loss: {remark}")
    damaged = len(entries) - len(valid)
    if verify:
        verdict = f"{damaged} of {len(entries)} damaged" if damaged else "no damage"
        lines.append(f"Every byte was read: {verdict}.")
        return lines, 1 if damaged else 0
    lines.append("Only names and sizes were compared; --verify reads every byte.")
    return lines, 0


def _look_at(path: Path, *, verify: bool) -> Entry:
    try:
        checkpoint = read_manifest(path)
    except CheckpointError as error:
        # The row has the name already, and that it is not valid.
        problem = str(error).rstrip(".")
        for said in (f"{path}/", f"{path} ", "is damaged: ", "is no checkpoint: "):
            problem = problem.removeprefix(said)
        return Entry(path=path, checkpoint=None, problem=problem)
    read = checkpoint.files if verify else ()
    return Entry(path=path, checkpoint=checkpoint, problem=checkpoint.problem(read=read))


def _row(entry: Entry, marks: list[str]) -> str:
    checkpoint = entry.checkpoint
    loss = None if checkpoint is None else checkpoint.metadata.get("eval_loss")
    state = "valid" if entry.problem is None else f"not valid: {entry.problem}"
    if entry.path.name.endswith(REPLACED):
        state += " (saved before another of this step)"
    return _COLUMNS.format(
        str(step_of(entry.path)),
        "-" if loss is None else f"{loss:.4f}",
        _bytes(_size(entry.path)),
        "-" if checkpoint is None else checkpoint.saved_at[:16].replace("T", " "),
        "-" if checkpoint is None else checkpoint.world_size,
        ", ".join([state, *marks]),
    )


def _size(folder: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):  # a running training may remove it
        for path in folder.iterdir():
            total += path.lstat().st_size
    return total


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _export(run: Path, folder: Path, words: tuple[str, ...]) -> str:
    """Write a Hugging Face folder, after every file that it needs has been verified."""
    step, target = words[0], Path(words[1])
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"--export {step} {target}: {target} is not empty; name a new folder.")
    config = read_config(run)
    chosen = choose_checkpoint(folder, step, option="--export")
    from llm.runtime.cpu import limit_spin_wait
    from llm.runtime.logging import quiet_libraries

    limit_spin_wait()
    quiet_libraries()
    from llm.models.export import export_model, write_model_card
    from llm.models.mup import scales_of

    model, tokenizer = load_trained(config, chosen)
    loss = chosen.metadata.get("eval_loss")
    try:
        export_model(
            config=model.config,
            state_dict={name: tensor.detach() for name, tensor in model.state_dict().items()},
            folder=target,
            tokenizer=tokenizer,
            generation_config=model.generation_config,
            trust_remote_code=config.trust_remote_code,
            attention_factor=scales_of(config, model.config).attention,
        )
        card = {"name": run.resolve().name, "architecture": model.config.model_type}
        known = {} if loss is None else {"eval loss": loss}
        write_model_card(target, {**card, "steps": chosen.step, **known, "seed": config.seed})
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}.") from error
    return f"{chosen.path} is exported: AutoModelForCausalLM.from_pretrained('{target}') loads it."


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends without a traceback
    sys.exit(main())
