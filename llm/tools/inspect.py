"""Shows the contents of token files, or the text of a run's step: `llm-trainers inspect`.

`llm-trainers inspect data/wiki_text_document` shows token files, and `--verify` their damage;
`llm-trainers inspect runs/wiki --step 1207` shows the training text of a step.

Exit codes: 0, shown, or verified without fault; 1, `--verify` reports faults; 2, a wrong option, or
files that are missing or (without `--verify`) too damaged to show.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llm.config.command_line import parse_options
from llm.config.options import missing_requirements, option, option_group
from llm.config.program import program
from llm.errors import ConfigError
from llm.runtime.world import ignore_ranks
from llm.tokenizers.options import TokenizerOptions

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

    from llm.data.formats.flat import AnyTokenFile
    from llm.data.formats.megatron import TokenFile
    from llm.data.formats.parts import TokenFileParts
    from llm.data.formats.sidecar import Sidecar
    from llm.trainers.gpt.step_samples import Passage, StepSamples

_MAX_LENGTH_DOCUMENTS = 1_000_000  # for the statistics of lengths
_MAX_END_DOCUMENTS = 1_000  # for the last tokens of documents


@option_group("Contents")
class InspectOptions:
    """Options of `llm-trainers inspect`."""

    path: str = option(
        "",
        "PREFIX of token files, or a nanoGPT file with its .bin; with step, a run's folder.",
        group="Token files",
        path=True,
    )
    verify: bool = option(False, "Read everything; exit with 1 on damage.", group="Token files")
    step: int | None = option(
        None,
        "Show the text of this step of a run, counted from 1.",
        group="A run's step",
        at_least=1,
    )
    rank: int | None = option(
        None,
        "Show only samples of this data-parallel rank.",
        group="A run's step",
        requires=("step",),
        at_least=0,
    )
    data_ranks: int | None = option(
        None,
        "Data-parallel ranks; by default as in this step.",
        group="A run's step",
        requires=("rank",),
        at_least=1,
    )
    documents: int = option(3, "Documents to show, from the first.", at_least=0)
    tokens: int = option(60, "Tokens to show per document.", at_least=0)
    tokenizer_name: str | None = option(
        None, "Tokenizer of the text; by default the one that made the files.", path=True
    )
    trust_remote_code: bool = option(
        False, "Run Python code that comes with a model, tokenizer or data set."
    )
    vocab_file: str | None = option(None, "GPT-2 style vocab.json, with merges_file.", path=True)
    merges_file: str | None = option(None, "GPT-2 style merges.txt, with vocab_file.", path=True)


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    ignore_ranks()
    options = parse_options(
        InspectOptions,
        argv,
        prog="llm-trainers inspect",
        description="Show or verify token files, or show the text of a run's step.",
        positional="path",
        example="data/web_text_document --documents 2 --tokenizer_name gpt2",
    )
    _check_options(options)
    exit_code = 0
    if options.step is not None:
        from llm.runtime.offline import forbid_downloads

        with forbid_downloads():
            lines = _describe_step(options, options.step)
    elif options.verify:
        from llm.prepare.verification import find_token_file_faults

        faults = find_token_file_faults(Path(options.path))
        lines, exit_code = (faults, 1) if faults else (["all checks passed"], 0)
    else:
        lines = _describe_tokens(options)
    sys.stdout.write("\n".join(lines) + "\n")
    return exit_code


def _check_options(options: InspectOptions) -> None:
    """Refuse options that cannot work together."""
    if not options.path:
        raise ConfigError("No token file is named: give its path, as in inspect data/wiki.")
    if problems := missing_requirements(options):
        raise ConfigError(" ".join(problems))
    if options.step is None and (Path(options.path) / "config.toml").is_file():
        raise ConfigError(
            f"{options.path} is the folder of a run: name one of its steps by --step."
        )
    if options.step is not None and options.verify:
        raise ConfigError("--verify is for token files and --step for a run; give one of them.")


def _describe_step(options: InspectOptions, step_number: int) -> list[str]:
    """Describe the documents that a step of a run was trained on."""
    from llm.runtime.logging import quiet_libraries
    from llm.trainers.gpt.step_samples import find_step_samples

    quiet_libraries()
    run = Path(options.path)
    step_samples = find_step_samples(
        run,
        step_number,
        rank=options.rank,
        data_ranks=options.data_ranks,
        trust_remote_code=options.trust_remote_code,
    )
    sample_note = ""
    if options.rank is not None:
        sample_note = f"; these are the samples of number {options.rank}"
    lines = [
        _format_row("run", str(run)),
        _format_row("step", f"{step_number:,} of {step_samples.total_steps:,}"),
        _format_row("samples", f"{step_samples.samples.size:,}"),
        _format_row("data ranks", f"{step_samples.data_ranks:,}{sample_note}"),
    ]
    return [*lines, *_describe_samples(step_samples, max_tokens=options.tokens)]


def _describe_samples(step_samples: "StepSamples", *, max_tokens: int) -> list[str]:
    """Describe the documents in each sample of a step, with the text of their first tokens."""
    from llm.trainers.gpt.step_samples import split_into_passages

    lines = []
    flat_sources = set()
    samples = zip(
        step_samples.samples.tolist(),
        step_samples.sources.tolist(),
        step_samples.starts.tolist(),
        strict=True,
    )
    for sample_index, source_index, start in samples:
        source = step_samples.corpus[source_index]
        lines += ["", f"sample {sample_index:,}, source {source.name}"]
        if not source.stream.file.num_documents:
            flat_sources.add(source.name)
        for passage in split_into_passages(source.stream, start, step_samples.num_tokens):
            lines += _describe_passage(passage, step_samples.tokenizer, max_tokens=max_tokens)
    if flat_sources:
        names = ", ".join(sorted(flat_sources))
        lines += ["", f"Flat token files do not say where documents begin: {names}."]
    return lines


def _describe_passage(
    passage: "Passage", tokenizer: "PreTrainedTokenizerBase", *, max_tokens: int
) -> list[str]:
    """Return the position of a passage in its document, and the text of its first tokens."""
    unit = "the file" if passage.document is None else f"document {passage.document:,}"
    end = passage.offset + passage.tokens.size
    ids = passage.tokens[:max_tokens].tolist()
    ellipsis = " ..." if passage.tokens.size > len(ids) else ""
    return [
        f"{unit}, tokens {passage.offset:,} to {end - 1:,} of {passage.length:,}",
        _quote_text(tokenizer, ids) + ellipsis,
    ]


def _describe_tokens(options: InspectOptions) -> list[str]:
    """Describe token files: the files, how they were made, and their first documents."""
    from llm.data.formats.flat import FlatTokenFile
    from llm.data.formats.sidecar import describe_token_files, open_described_files

    path = Path(options.path)
    file, sidecar = open_described_files(path.parent, describe_token_files(path))
    tokenizer, note = _load_decoder(options, sidecar) if options.documents else (None, None)
    lines = _describe_file(file)
    if sidecar is not None:
        lines += _describe_sidecar(sidecar)
    if not isinstance(file, FlatTokenFile) and file.num_documents:
        lines += _describe_documents(file, tokenizer)
    lines += _describe_contents(file, options, tokenizer)
    return [*lines, "", note] if note else lines


def _load_decoder(
    options: InspectOptions, sidecar: "Sidecar | None"
) -> tuple["PreTrainedTokenizerBase | None", str | None]:
    """Return the tokenizer that decodes the ids, or None, and a remark on it."""
    is_named = any((options.tokenizer_name, options.vocab_file, options.merges_file))
    if is_named:
        tokenizer_options = TokenizerOptions(
            tokenizer_name=options.tokenizer_name,
            vocab_file=options.vocab_file,
            merges_file=options.merges_file,
        )
    elif sidecar is not None:
        tokenizer_options = _parse_recorded_tokenizer(sidecar.tokenizer)
    else:
        return None, None
    from llm.runtime.logging import quiet_libraries
    from llm.tokenizers.load_tokenizer import load_tokenizer

    quiet_libraries()
    try:
        # Where the user has named no tokenizer, nothing is downloaded.
        tokenizer = load_tokenizer(
            tokenizer_options,
            local_files_only=not is_named,
            trust_remote_code=options.trust_remote_code,
        )
    except ConfigError as error:
        if is_named:
            raise
        return None, f"Not shown as text: {error}"
    return tokenizer, _describe_other_tokenizer(tokenizer, sidecar)


def _describe_other_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", sidecar: "Sidecar | None"
) -> str | None:
    """Return a remark if a tokenizer is not the one that made the token files."""
    from llm.tokenizers.load_tokenizer import compute_fingerprint

    if sidecar is None or compute_fingerprint(tokenizer) == sidecar.tokenizer_fingerprint:
        return None
    return (
        f"This tokenizer's fingerprint is {compute_fingerprint(tokenizer)}, but the files were "
        f"made with {sidecar.tokenizer_fingerprint}: the text may be wrong."
    )


def _parse_recorded_tokenizer(name: str) -> TokenizerOptions:
    """Return the options of the tokenizer that `prepare` has recorded under a name."""
    vocab_file, comma, merges_file = name.partition(", ")
    # `prepare` names the pair "vocab.json, merges.txt", but a path may contain a comma, too.
    if comma and not Path(name).exists():
        return TokenizerOptions(vocab_file=vocab_file, merges_file=merges_file)
    return TokenizerOptions(tokenizer_name=name)


def _format_row(name: str, value: str) -> str:
    return f"{name:<18}{value}"


def _describe_file(file: "AnyTokenFile") -> list[str]:
    """Return the lines about a token file: name, kind, counts and size."""
    from llm.data.formats.flat import FlatTokenFile
    from llm.data.formats.megatron import add_suffix
    from llm.data.formats.parts import TokenFileParts

    tokens = [
        _format_row("tokens", f"{file.num_tokens:,}"),
        _format_row("dtype", file.tokens.dtype.name),
    ]
    if isinstance(file, FlatTokenFile):
        return [
            _format_row("token file", str(file.path)),
            _format_row("kind", "flat .bin, as nanoGPT reads it"),
            _format_row("documents", "not known"),
            *tokens,
            _format_row("size", f"{file.tokens.nbytes:,} bytes"),
        ]
    kind = ".bin and .idx, as Megatron-LM and NeMo read them"
    prefixes = [file.prefix]
    if isinstance(file, TokenFileParts):
        prefixes = [part.prefix for part in file.parts]
        kind = f"{len(prefixes):,} parts, {prefixes[0].name} to {prefixes[-1].name}"
    index_bytes = sum(add_suffix(prefix, ".idx").stat().st_size for prefix in prefixes)
    return [
        _format_row("token file", str(file.prefix)),
        _format_row("kind", kind),
        _format_row("documents", f"{file.num_documents:,}"),
        _format_row("sequences", f"{file.num_sequences:,}"),
        *tokens,
        _format_row("size", f"{file.tokens.nbytes:,} bytes of .bin, {index_bytes:,} of .idx"),
    ]


def _describe_sidecar(sidecar: "Sidecar") -> list[str]:
    """Return the lines about the text of a token file, and how it was tokenized."""
    tokenizer = f"{sidecar.tokenizer} (fingerprint {sidecar.tokenizer_fingerprint})"
    end_note = "appended to each document" if sidecar.append_eos else "not appended"
    eos = "none" if sidecar.eos_token_id is None else f"{sidecar.eos_token_id}, {end_note}"
    text = f"{sidecar.text_bytes:,} bytes"
    if sidecar.tokens:
        text += f", {sidecar.text_bytes / sidecar.tokens:.3f} bytes per token"
    skipped = f"{sidecar.empty_documents:,} empty, {sidecar.skipped_documents:,} unreadable"
    return [
        _format_row("text", text),
        _format_row("left out", f"{skipped} documents"),
        _format_row("tokenizer", tokenizer),
        _format_row(
            "vocabulary", f"{sidecar.vocab_size:,}; largest id in use {sidecar.largest_token:,}"
        ),
        _format_row("end of text", eos),
        _format_row(
            "beginning of text", "prepended to each document" if sidecar.prepend_bos else "none"
        ),
        _format_row("sources", ", ".join(sidecar.sources)),
    ]


def _describe_documents(
    file: "TokenFile | TokenFileParts", tokenizer: "PreTrainedTokenizerBase | None"
) -> list[str]:
    """Return the lines about the lengths and the last tokens of the first documents."""
    import numpy as np

    num_measured = min(file.num_documents, _MAX_LENGTH_DOCUMENTS)
    starts = file.find_document_starts(0, num_measured + 1)
    lengths = np.diff(starts)
    length_summary = (
        f"min {lengths.min():,}, median {np.median(lengths):,.0f}, mean {lengths.mean():,.1f}, "
        f"max {lengths.max():,} tokens"
    )
    if num_measured < file.num_documents:
        length_summary += f" (of the first {num_measured:,})"
    rows = [_format_row("document length", length_summary)]
    has_tokens = lengths[:_MAX_END_DOCUMENTS] > 0
    end_offsets = starts[1 : _MAX_END_DOCUMENTS + 1][has_tokens]
    if end_offsets.size:
        rows.append(_format_row("documents end", _summarize_ends(file, end_offsets, tokenizer)))
    return rows


def _summarize_ends(
    file: "TokenFile | TokenFileParts",
    end_offsets: "npt.NDArray[np.int64]",
    tokenizer: "PreTrainedTokenizerBase | None",
) -> str:
    """Return with which tokens documents end.

    Args:
        file: The token file.
        end_offsets: The end of each document, an index of a token.
        tokenizer: Decodes a token; None to leave its text out.
    """
    import numpy as np

    last_tokens = np.unique(file.tokens.take(end_offsets - 1))
    if last_tokens.size == 1:
        text = _quote_text(tokenizer, last_tokens.tolist())
        summary = f"all with the token {last_tokens[0]} {text}".rstrip()
    else:
        summary = f"with {last_tokens.size:,} different tokens"
    if end_offsets.size < file.num_documents:
        summary += f" (of the first {end_offsets.size:,})"
    return summary


def _describe_contents(
    file: "AnyTokenFile", options: InspectOptions, tokenizer: "PreTrainedTokenizerBase | None"
) -> list[str]:
    """Describe the first documents, or the first tokens if documents are not known."""
    import numpy as np

    lines: list[str] = []
    for title, start, end in _list_token_ranges(file, options.documents):
        ids = np.asarray(file.tokens[start : min(end, start + options.tokens)]).tolist()
        ellipsis = " ..." if end - start > len(ids) else ""
        lines += ["", f"{title}, {end - start:,} tokens", " ".join(map(str, ids)) + ellipsis]
        if tokenizer is not None:
            lines.append(_quote_text(tokenizer, ids) + ellipsis)
    return lines


def _list_token_ranges(file: "AnyTokenFile", max_documents: int) -> list[tuple[str, int, int]]:
    """Return a title, the first token, and the end of each document to show, from the first."""
    from llm.data.formats.flat import FlatTokenFile

    if max_documents and not file.num_documents:
        return [("all documents", 0, file.num_tokens)]
    if isinstance(file, FlatTokenFile):
        return []
    return [
        (f"document {index:,}", file.document_start(index), file.document_start(index + 1))
        for index in range(min(max_documents, file.num_documents))
    ]


def _quote_text(tokenizer: "PreTrainedTokenizerBase | None", ids: list[int]) -> str:
    """Return the text of ids, with escapes for characters that control a terminal."""
    if tokenizer is None:
        return ""
    if ids and not 0 <= min(ids) <= max(ids) < len(tokenizer):
        return f"(ids beyond the tokenizer's {len(tokenizer):,})"
    return repr(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
