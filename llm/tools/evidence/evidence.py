"""Checks a machine and writes one file that you can send: `llm-trainers evidence`.

Start it alone, or like a training, with one process per device under torchrun, srun or mpiexec. It
trains small models in separate processes, so that a crash or a hang ends one check only.

Exit codes: 0 every check has passed; 1 a check has failed or was not run; 2 an option, the file or
the launcher cannot work. The code is rank 0's: a launcher stops all ranks once one has failed, so
the others end with 0 and do not cut rank 0 short.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm.config.command_line import parse_options
from llm.config.program import program
from llm.errors import ConfigError, ParallelError, one_line
from llm.runtime.process_settings import raise_file_limit
from llm.runtime.world import World, set_torchrun_variables, world_from_environment
from llm.tools.evidence.checks import Check, Checks
from llm.tools.evidence.evidence_file import (
    EvidenceFile,
    Result,
    personal_words,
    secret_words,
    work_folder,
)
from llm.tools.evidence.machine import describe_job, site_name
from llm.tools.evidence.options import EvidenceOptions, PartName
from llm.tools.evidence.rank_programs import RankPrograms, describe_failure
from llm.tools.evidence.trainings import CheckFailed
from llm.tools.jobs.sites import known_sites
from llm.tools.plan.card_names import device_of_card
from llm.tools.preflight import Board, open_board

_SHARES: dict[PartName, float] = {
    "preflight": 0.1,
    "losses": 0.2,
    "resume": 0.15,
    "layouts": 0.35,
    "speed": 0.2,
}
"""Shares of the time. The next parts get the time that a part does not use."""
_MIN_CHECK_SECONDS = 5.0
"""Less time is not enough to start a program."""
_FULL_CHECK_SECONDS = 90.0
"""A check gets this if there is time, and otherwise half of the remaining time of its part."""
_MACHINE_SECONDS = 120.0
_CONNECT_SECONDS, _REFUSAL_SECONDS = 60.0, 5.0
_DESCRIBE_MACHINE = "from llm.tools.evidence.machine import print_process; print_process()"


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    options = parse_options(
        EvidenceOptions,
        argv,
        prog="llm-trainers evidence",
        description="Check what a machine computes, and write one file to send.",
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to stop the programs, too
    set_torchrun_variables()
    raise_file_limit()
    world = world_from_environment()
    deadline = time.monotonic() + 60 * options.minutes
    try:
        board = None
        if world.world_size > 1:
            board = open_board(world, timeout=_CONNECT_SECONDS, program_name="evidence")
        if world.is_main:
            return _collect_evidence(options, world, board, deadline)
        assert board is not None
        return _serve_rank0(world, board, deadline)
    except RuntimeError as error:  # of the store
        raise ParallelError(
            f"Rank {world.rank} does not reach rank 0: {one_line(error)}."
        ) from error


def _serve_rank0(world: World, board: Board, deadline: float) -> int:
    """Start what rank 0 posts; return the exit code of this rank."""
    posted_folder = board.get_global("folder", time.monotonic() + _CONNECT_SECONDS)
    if not posted_folder:  # rank 0 refuses the options, and says why, or is not there
        board.set("refused", True)
        return 2 if posted_folder is None else 0
    folder = Path(posted_folder)
    board.set("folder_seen", folder.is_dir())
    board.set("personal_words", personal_words())
    RankPrograms(world, board, folder).serve(deadline=deadline + 2 * _MACHINE_SECONDS)
    return 0


def _collect_evidence(
    options: EvidenceOptions, world: World, board: Board | None, deadline: float
) -> int:
    """Run all checks on rank 0 and write the file; return the exit code."""
    path = Path(options.output)
    folder = work_folder(path).absolute()
    try:
        evidence_file = EvidenceFile(
            path,
            options={"minutes": options.minutes, "parts": options.parts},
            site=options.site or site_name(os.environ),
        )
        _make_folder(folder, path)
    except ConfigError:
        if board is not None:
            board.set_global("folder", "")
            board.set("refused", True)
            board.wait("refused", time.monotonic() + _REFUSAL_SECONDS)
        raise
    programs = RankPrograms(world, board, folder)
    try:
        words = personal_words() + secret_words()
        if board is not None:
            words += _meet_ranks(board, world, folder, path)
        evidence_file.personal_words = words
        all_passed = _run_parts(options, programs, evidence_file, deadline)
        sys.stdout.write("\n".join(evidence_file.summary()) + "\n")
        sys.stdout.write(f"Everything is in {path}; read it before you send it.\n")
        programs.finish()
    except ConfigError:  # the site has other devices
        path.unlink()
        programs.finish()
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if all_passed else 1


def _make_folder(folder: Path, path: Path) -> None:
    """Make the folder of the trainings; an empty file is removed if that fails."""
    try:
        folder.mkdir()
    except OSError as error:
        path.unlink()
        raise ConfigError(
            f"The folder for the trainings, {path}.work, cannot be made: {one_line(error)}; remove "
            "it if no other run uses it, or name another --output."
        ) from error


def _meet_ranks(board: Board, world: World, folder: Path, path: Path) -> list[str]:
    """Wait for all ranks; return the names of their users and hosts."""
    board.set("folder_seen", True)
    board.set("personal_words", personal_words())
    board.set_global("folder", str(folder))
    board.wait("personal_words", time.monotonic() + _CONNECT_SECONDS)
    words_by_rank = board.get_all("personal_words")
    blind_ranks = [rank for rank, is_seen in board.get_all("folder_seen").items() if not is_seen]
    missing_ranks = [rank for rank in range(world.world_size) if rank not in words_by_rank]
    if missing_ranks or blind_ranks:
        path.unlink()
    if missing_ranks:
        raise ParallelError(
            f"Rank {missing_ranks[0]} has not answered within {_CONNECT_SECONDS:.0f} s; "
            "llm-trainers preflight, started in the same way, names its host."
        )
    if blind_ranks:
        raise ParallelError(
            f"Rank {blind_ranks[0]} does not see the folder of --output; name a file on a file "
            "system that all nodes share."
        )
    return [word for words in words_by_rank.values() for word in words]


def _run_parts(
    options: EvidenceOptions, programs: RankPrograms, evidence_file: EvidenceFile, deadline: float
) -> bool:
    """Run the checks of all parts; return whether every one has passed."""
    start = time.monotonic()
    machine_seconds = min(_MACHINE_SECONDS, deadline - start)
    job = _check_machine(programs, evidence_file, seconds=machine_seconds, site_name=options.site)
    checks = Checks(programs, job)
    parts = list(dict.fromkeys(options.parts))
    seconds_per_share = (deadline - start) / sum(_SHARES[part] for part in parts or _SHARES)
    part_end = start
    for part in parts:
        part_end += _SHARES[part] * seconds_per_share
        for check in checks.make_checks(part):
            _run_check(evidence_file, part, check, part_end=part_end)
    return evidence_file.finish()


def _record_check(
    evidence_file: EvidenceFile,
    part: str,
    check_name: str,
    figures: Mapping[str, Any],
    *,
    seconds: float,
    error: Exception | None,
) -> None:
    """Record a check that has run, with the reason of a failure as a further figure; print it."""
    if error is not None:
        reason = str(error)
        if not isinstance(error, CheckFailed):
            reason = f"{type(error).__name__}: {one_line(error)}"
        figures = {**figures, "reason": reason}
    result: Result = "passed" if error is None else "failed"
    evidence_file.add(part, check_name, result, seconds=seconds, **figures)
    sys.stdout.write(f"{part}: {check_name} {result} after {seconds:.0f} s\n")
    sys.stdout.flush()


def _check_machine(
    programs: RankPrograms, evidence_file: EvidenceFile, *, seconds: float, site_name: str | None
) -> Mapping[str, Any]:
    """Return the description of the machine, as in `describe_job`, and record it as a check.

    If a rank fails, the next checks get the description of a CPU.

    Raises:
        ConfigError: The site that the user names has other devices.
    """
    check_start = time.monotonic()
    job: Mapping[str, Any] = {
        "ranks": programs.world.world_size,
        "nodes": 1,
        "device": "cpu",
        "card": "unknown",
        "memory_gib": None,
        "default_precision": "no",
    }
    failure = None
    try:
        job = _describe_machine(programs, seconds)
        evidence_file.set_machine(job)
        _check_site(site_name, job)
    except CheckFailed as error:
        failure = error
    check_seconds = time.monotonic() - check_start
    _record_check(
        evidence_file, "machine", "versions and devices", {}, seconds=check_seconds, error=failure
    )
    return job


def _check_site(site_name: str | None, job: Mapping[str, Any]) -> None:
    """Refuse the name of a known site for a machine with other devices."""
    site = known_sites().get(site_name or "")
    cards = job["card"] if isinstance(job["card"], list) else [job["card"]]
    devices = {"cpu"} if job["device"] == "cpu" else set(map(device_of_card, cards))
    if site is None or site.device is None or None in devices:
        return
    site_devices = {site.device, *(queue.device for queue in site.queues if queue.device)}
    # Nodes may differ in the memory of their cards: some of Perlmutter's A100 have 80 GB.
    site_models = {device.partition("-")[0] for device in site_devices}
    if not {device.partition("-")[0] for device in devices if device} <= site_models:
        raise ConfigError(
            f"--site {site_name} has {' and '.join(sorted(site_devices))}, and this machine "
            f"{', '.join(cards)}: start evidence on a node of the site, or leave --site out."
        )


def _run_check(evidence_file: EvidenceFile, part: str, check: Check, *, part_end: float) -> None:
    """Run a check if there is time before the end of its part, and record its result."""
    check_start = time.monotonic()
    remaining = part_end - check_start
    if remaining < _MIN_CHECK_SECONDS:
        evidence_file.add(part, check.name, "not run", seconds=0, reason="no time was left")
        sys.stdout.write(f"{part}: {check.name} not run, because no time was left\n")
        return
    figures: Mapping[str, Any] = {}
    failure: Exception | None = None
    try:
        figures = check.run(max(min(remaining, _FULL_CHECK_SECONDS), remaining / 2))
    except CheckFailed as error:
        figures, failure = error.figures, error
    except Exception as error:  # recorded, so that the next checks run
        failure = error
    check_seconds = time.monotonic() - check_start
    _record_check(evidence_file, part, check.name, figures, seconds=check_seconds, error=failure)


def _describe_machine(programs: RankPrograms, seconds: float) -> dict[str, Any]:
    """Ask every rank for its device and versions."""
    outcomes = programs.run(["-c", _DESCRIBE_MACHINE], seconds=seconds)
    failure = describe_failure(outcomes, seconds=seconds)
    if failure is not None:
        raise CheckFailed(failure)
    try:
        descriptions = [_last_json_line(outcome.output) for outcome in outcomes]
    except (ValueError, IndexError) as error:
        raise CheckFailed("a rank has printed no description of itself.") from error
    return describe_job(descriptions)


def _last_json_line(output: str) -> Any:
    """Return the value of the last line that is a JSON object; a library may print others.

    Raises:
        IndexError: No line begins like a JSON object.
        ValueError: The line is not JSON.
    """
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
