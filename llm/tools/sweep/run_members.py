"""Runs the members of a sweep: one in each slot at a time, until all of them have ended."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from llm.checkpoint.run_folder import IN_USE, OWNER_CLAIM_NAME, RunFolder
from llm.config.shell import shell_line
from llm.runtime.claims import HEARTBEAT_TIMEOUT_SECONDS, Claim
from llm.runtime.signals import CALLER_VARIABLE, EXIT_PREEMPTED, Interruption
from llm.tools.sweep.member_state import (
    CLAIM_NAME,
    LOG_NAME,
    START_MARK,
    Outcome,
    last_error,
    read_outcome,
    read_stopped_outcome,
)
from llm.tools.sweep.members import Base, Member
from llm.tools.sweep.optuna_trials import Trials
from llm.tools.sweep.slots import Slot

_POLL_SECONDS = 0.2
_SIGNALLED_EXIT_CODES = {
    EXIT_PREEMPTED,
    *(-number for number in Interruption.signals),
    *(128 + number for number in Interruption.signals),
}
"""Exit codes of a trainer or a launcher that a signal has stopped."""


@dataclasses.dataclass(kw_only=True)
class _Start:
    """A start of a member that has not ended.

    Attributes:
        member: The member.
        claim: The claim to it.
        process: The trainer or its launcher.
        former_status: Its `status.json` before the start.
        started_at: The time of the start in seconds.
        num_signals: Number of signals that have been passed on.
    """

    member: Member
    claim: Claim
    process: subprocess.Popen[bytes]
    former_status: bytes
    started_at: float
    num_signals: int = 0


class MemberRuns:
    """The runs of a sweep's members by this command; other commands may run members, too.

    Args:
        base: The options and the folder that members share.
        members: The members; a parent precedes its branches.
        slots: The slots.
        nproc_per_node: Processes of a member on each node, or `auto`.
        trials: The source of further members, as long as it has some.

    Attributes:
        outcomes: How far each member is, by name.
    """

    def __init__(
        self,
        base: Base,
        members: Sequence[Member],
        *,
        slots: Sequence[Slot],
        nproc_per_node: int | str,
        trials: Trials | None = None,
    ) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._base = base
        self._nproc_per_node = nproc_per_node
        self._trials = trials
        self._pending: list[Member] = []
        self._claims: dict[str, Claim] = {}
        self._owner_claims: dict[str, Claim] = {}  # of its run, which are only observed
        self._log_bytes: dict[str, int] = {}
        for member in members:
            self._add_member(member)
        self._free_slots = list(slots)
        self._start_by_slot: dict[Slot, _Start] = {}
        self._contested_at: dict[str, float] = {}
        self._num_signals = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has asked this command to stop."""
        return self._num_signals > 0

    def _add_member(self, member: Member) -> None:
        """Add a member, which will run unless it has finished."""
        folder = self._base.folder / member.name
        self.outcomes[member.name] = read_outcome(folder)
        if self.outcomes[member.name].state != "finished":
            self._pending.append(member)
            self._claims[member.name] = Claim(folder, CLAIM_NAME)
            self._owner_claims[member.name] = Claim(folder, OWNER_CLAIM_NAME)
            # A log that has grown belongs to a start by another command.
            self._log_bytes[member.name] = self._count_log_bytes(member)

    def run(self) -> None:
        """Run the members that have not finished; after a signal, they save and end."""
        handlers = {
            number: signal.signal(number, self._record_signal)
            for number in Interruption.signals
            if signal.getsignal(number) != signal.SIG_IGN
        }
        try:
            self._ask_for_members()
            while self._start_by_slot or (self._pending and not self.is_stopped):
                self._start_members()
                time.sleep(_POLL_SECONDS)
                self._forward_signals()
                self._end_members()
                self._ask_for_members()
        finally:
            for start in self._start_by_slot.values():  # after an error
                _terminate_trainer(start.process)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _record_signal(self, signal_number: int, frame: FrameType | None) -> None:
        self._num_signals += 1

    def _forward_signals(self) -> None:
        """Pass signals on to the members as SIGTERM; at the first one they save and end."""
        for start in self._start_by_slot.values():
            while start.num_signals < self._num_signals:
                start.num_signals += 1
                _terminate_trainer(start.process)

    def _ask_for_members(self) -> None:
        """Add trials for the free slots, as long as the study has some."""
        while self._trials is not None and not self.is_stopped:
            if len(self._pending) >= len(self._free_slots):
                return
            member = self._trials.next_member()
            if member is None:
                return
            self._add_member(member)

    def _start_members(self) -> None:
        """Start members in the free slots."""
        for member in list(self._pending):
            if self.is_stopped or not self._free_slots:
                return
            if member.parent is not None and not self._is_parent_finished(member):
                continue
            if not self._try_acquire(member):
                continue
            folder, claim = self._base.folder / member.name, self._claims[member.name]
            outcome = read_stopped_outcome(folder)
            has_run = self._count_log_bytes(member) != self._log_bytes[member.name]
            # By another command, or by a job, which does not write to the log.
            if outcome.state == "finished" or (has_run and outcome.state == "failed"):
                claim.release()
                self._leave_out(member, outcome)
            else:
                self._pending.remove(member)
                slot = self._free_slots.pop(0)
                self._start_by_slot[slot] = self._start_member(member, claim, slot)

    def _try_acquire(self, member: Member) -> bool:
        """Acquire the claim to a member; it is left out if another command or job runs it."""
        folder, claim = self._base.folder / member.name, self._claims[member.name]
        folder.mkdir(parents=True, exist_ok=True)
        owner_claim = self._owner_claims[member.name]
        has_lock_holder = RunFolder(folder).has_lock_holder()
        if has_lock_holder or owner_claim.may_be_held():
            # A run without a command is a job, or has lost its command and is about to end.
            claim.may_be_held()  # looks for a command
            waited = time.monotonic() - self._contested_at.get(member.name, time.monotonic())
            is_alive = has_lock_holder or owner_claim.has_rival
            if is_alive and waited > HEARTBEAT_TIMEOUT_SECONDS and not claim.has_rival:
                sentence = _describe_lock(RunFolder(folder)) if has_lock_holder else ""
                self._leave_out(member, Outcome(state="running", sentence=sentence))
            else:
                self._wait_for_rival(member, claim)
            return False
        if not claim.try_acquire():
            self._wait_for_rival(member, claim)
            return False
        return True

    def _wait_for_rival(self, member: Member, claim: Claim) -> None:
        """Leave out a member that another command is known to run; otherwise wait."""
        if claim.has_rival:
            self._leave_out(member, Outcome(state="running"))
        elif member.name not in self._contested_at:
            self._contested_at[member.name] = time.monotonic()
            _print_line(
                f"{member.name} seems to run elsewhere; waiting up to "
                f"{HEARTBEAT_TIMEOUT_SECONDS:g} seconds for its end or a sign of life"
            )

    def _is_parent_finished(self, member: Member) -> bool:
        """Return whether a member can branch; it is left out if its parent will not finish here."""
        assert member.parent is not None
        if self.outcomes[member.parent].state == "finished":
            return True
        unfinished_names = {pending.name for pending in self._pending}
        unfinished_names |= {start.member.name for start in self._start_by_slot.values()}
        if member.parent not in unfinished_names:
            sentence = f"It branches from {member.parent}, which has not finished."
            self._leave_out(member, Outcome(state="waiting", sentence=sentence))
        return False

    def _leave_out(self, member: Member, outcome: Outcome) -> None:
        """Record the outcome of a member that this command does not start."""
        self._pending.remove(member)
        self.outcomes[member.name] = outcome

    def _start_member(self, member: Member, claim: Claim, slot: Slot) -> _Start:
        """Start a member in a slot; its output goes to its log."""
        command = slot.command(
            self._base.trainer_arguments(member), nproc_per_node=self._nproc_per_node
        )
        folder = self._base.folder / member.name
        former_status = _read_status(folder)
        environ = dict(os.environ)
        if not slot.hosts:  # the trainer ends if this process dies
            environ[CALLER_VARIABLE] = str(os.getpid())
        with (folder / LOG_NAME).open("ab") as log:
            start_time = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"\n{START_MARK}{start_time}: {shell_line(command)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,  # Ctrl-C reaches it once, through this process
            )
        position = list(self.outcomes).index(member.name) + 1
        _print_line(
            f"{position} of {len(self.outcomes)}: {member.name} starts, log {folder / LOG_NAME}"
        )
        return _Start(
            member=member,
            claim=claim,
            process=process,
            former_status=former_status,
            started_at=time.monotonic(),
        )

    def _end_members(self) -> None:
        """Record the outcomes of the members that have ended, and free their slots."""
        for slot, start in list(self._start_by_slot.items()):
            if start.process.poll() is None:
                continue
            outcome = self._read_end(start)
            start.claim.release()
            if self._trials is not None:
                self._trials.record(start.member, outcome)
            self.outcomes[start.member.name] = outcome
            del self._start_by_slot[slot]
            self._free_slots.append(slot)
            minutes = (time.monotonic() - start.started_at) / 60
            _print_line(
                f"{start.member.name} {describe_outcome(outcome)}, after {minutes:.1f} minutes"
            )

    def _read_end(self, start: _Start) -> Outcome:
        """Return the outcome of a start that has ended."""
        folder = self._base.folder / start.member.name
        outcome = read_stopped_outcome(folder)
        if outcome.state == "finished":
            return outcome
        if not start.claim.is_held():  # another command runs it, because this one was stopped
            return Outcome(state="running")
        status = _read_status(folder)
        has_new_status = status != start.former_status
        exit_code = start.process.returncode
        # A scheduler that ends a job may signal the member and its launcher before this process.
        is_signalled = exit_code in _SIGNALLED_EXIT_CODES
        if self.is_stopped or is_signalled or (b'"preempted"' in status and has_new_status):
            return dataclasses.replace(outcome, state="interrupted")
        sentence = last_error(folder / LOG_NAME)
        if IN_USE in sentence:  # a job has started it after this command had looked
            return Outcome(state="running", sentence=sentence)
        if not sentence and outcome.state == "failed" and has_new_status:
            sentence = outcome.sentence
        return Outcome(state="failed", sentence=sentence or _describe_exit(exit_code))

    def _count_log_bytes(self, member: Member) -> int:
        try:
            return (self._base.folder / member.name / LOG_NAME).stat().st_size
        except FileNotFoundError:
            return 0


def describe_outcome(outcome: Outcome) -> str:
    """Return the state of a member, and its loss if it has finished."""
    if outcome.loss is None:
        return outcome.state
    kind = "validation loss" if outcome.is_validated else "training loss"
    return f"{outcome.state}, {kind} {outcome.loss:.4f}"


def _describe_lock(folder: RunFolder) -> str:
    """Return a sentence about the lock of a run without a command."""
    return (
        f"{folder.lock_path} is locked by {folder.read_lock_owner()}; if that process or its node "
        "is dead, delete the file."
    )


def _describe_exit(exit_code: int) -> str:
    """Return a sentence about a trainer that has ended without one."""
    if exit_code == -signal.SIGKILL:
        return "It was killed, perhaps because the machine had no memory left."
    return f"It ended with exit code {exit_code}."


def _read_status(folder: Path) -> bytes:
    """Return the contents of a run's `status.json`; empty if it does not exist."""
    try:
        return (folder / "status.json").read_bytes()
    except FileNotFoundError:
        return b""


def _terminate_trainer(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to a trainer, or to its launcher and the ranks on this machine."""
    with suppress(ProcessLookupError):  # it has ended meanwhile
        os.killpg(process.pid, signal.SIGTERM)


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
