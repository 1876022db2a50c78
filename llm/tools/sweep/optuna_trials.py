"""Members that Optuna chooses, in a study that all commands of a sweep share.

The study is a journal, a file that Optuna appends to, which also works on network file systems. A
trial that was killed stays open in it, and the next command resumes its member.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.checkpoint.run_folder import describe_changes
from llm.config.command_line import option_name
from llm.config.options import fields, names_by_alias
from llm.config.shell import shell_line
from llm.errors import ConfigError
from llm.runtime.files import try_lock
from llm.tools.sweep.member_state import Outcome, read_outcome
from llm.tools.sweep.members import Member, member_name

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from llm.trainers.gpt.extensions import GPTConfig

_JOURNAL_NAME = "study.journal"
_LOCK_SECONDS = 60.0


def has_study(folder: Path) -> bool:
    """Return whether the folder of a sweep has a study."""
    return (folder / _JOURNAL_NAME).exists()


class Trials:
    """The trials of a study; each is a member of the sweep.

    Args:
        folder: Folder of the sweep.
        search: The option `search`, such as `["learning_rate=1e-4..1e-2:log"]`.
        config: The options of a member.
        num_ranks: Number of ranks of a member; None if unknown.
        num_trials: Number of trials of the study, over all commands.

    Raises:
        ConfigError: Optuna is missing, or the study searches elsewhere, or with other options.
    """

    def __init__(
        self,
        folder: Path,
        search: Sequence[str],
        config: "GPTConfig",
        *,
        num_ranks: int | None,
        num_trials: int,
    ) -> None:
        distributions = read_search(search)
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._num_trials = folder, num_trials
        self._distributions = distributions
        journal = JournalFileBackend(str(folder / _JOURNAL_NAME))
        self._study = optuna.create_study(
            storage=optuna.storages.JournalStorage(journal),
            study_name="sweep",
            sampler=optuna.samplers.TPESampler(constant_liar=True),
            load_if_exists=True,
        )
        self._states = optuna.trial.TrialState
        self._taken_numbers: set[int] = set()
        recorded_search = self._study.user_attrs.get("search")
        if recorded_search is None:
            self._study.set_user_attr("search", list(search))
        elif recorded_search != list(search):
            raise ConfigError(
                f"The study in {folder} searches {' '.join(recorded_search)}, not "
                f"{' '.join(search)}; name another --output_dir for another search."
            )
        self._config, self._num_ranks = config, num_ranks
        self._check_same_base()

    def _check_same_base(self) -> dict[str, Any]:
        """Return what all trials train; refuse other options than the study has recorded."""
        from llm.tools.sweep.training_values import training_values
        from llm.trainers.gpt.extensions import GPTConfig

        recorded_values = self._study.user_attrs.get("base")
        values = training_values(self._config, num_ranks=self._num_ranks, defaults=recorded_values)
        option_names = names_by_alias(GPTConfig)
        for name in self._distributions:
            values.pop(option_names.get(name, name), None)
        if recorded_values is not None and (changes := describe_changes(recorded_values, values)):
            raise ConfigError(
                f"The trials of the study in {self._folder} have other options: "
                f"{'; '.join(changes)}. Name another --output_dir for another study."
            )
        return values

    def members(self) -> list[Member]:
        """Return the members of all trials so far."""
        return [_make_member(trial.number, trial.params) for trial in self._read_trials()]

    def _read_trials(self) -> "list[FrozenTrial]":
        """Return the trials with all of their values, which a command that is killed may lack."""
        return [
            trial
            for trial in self._study.get_trials(deepcopy=False)
            if trial.params.keys() == self._distributions.keys()
        ]

    def next_member(self) -> Member | None:
        """Return the member of a killed trial or of a new one; None if there are enough trials.

        A trial that seems to run comes last: the claim of a command that was killed on another
        machine looks like the claim of a living one until `MemberRuns` has waited for heartbeats.

        Raises:
            ConfigError: Another command has begun the study with other options.
        """
        with self._hold_lock():
            values = self._check_same_base()  # again: another command may have begun the study
            if "base" not in self._study.user_attrs:
                self._study.set_user_attr("base", values)
            trials = self._read_trials()
            claimed_members: dict[int, Member] = {}
            for trial in trials:
                if trial.state != self._states.RUNNING or trial.number in self._taken_numbers:
                    continue
                member = _make_member(trial.number, trial.params)
                outcome = read_outcome(self._folder / member.name)
                if outcome.state in ("finished", "failed"):  # its command has not recorded it
                    self.record(member, outcome)
                elif outcome.state == "running":
                    claimed_members[trial.number] = member
                else:
                    self._taken_numbers.add(trial.number)
                    return member
            if len(trials) >= self._num_trials:
                for number, member in claimed_members.items():
                    self._taken_numbers.add(number)
                    return member
                return None
            new_trial = self._study.ask(self._distributions)
            self._taken_numbers.add(new_trial.number)
            return _make_member(new_trial.number, new_trial.params)

    def record(self, member: Member, outcome: Outcome) -> None:
        """Record how the trial of a member has ended; an interrupted one stays open."""
        number = int(member.name.partition(",")[0].partition("=")[2])
        if outcome.state == "finished" and outcome.loss is not None and math.isfinite(outcome.loss):
            self._study.tell(number, outcome.loss, skip_if_finished=True)
        elif outcome.state in ("finished", "failed"):
            self._study.tell(number, state=self._states.FAIL, skip_if_finished=True)

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Keep other commands from starting a trial, on file systems that have locks."""
        path = self._folder / ".study.lock"
        with path.open("a") as file:
            try:
                try_lock(file.fileno(), seconds=_LOCK_SECONDS)
            except BlockingIOError as error:
                raise ConfigError(
                    f"Another command of this study has locked {path} for {_LOCK_SECONDS:g} "
                    "seconds; end it."
                ) from error
            yield


def read_search(search: Sequence[str]) -> "dict[str, BaseDistribution]":
    """Return the distribution of each option in the option `search`.

    Raises:
        ConfigError: An item has neither a range nor values, an option is repeated, or Optuna is
            missing.
    """
    _check_optuna()
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    from llm.trainers.gpt.extensions import GPTConfig

    float_options = {
        name for field in fields(GPTConfig) if float in field.members for name in field.names
    }
    distributions: dict[str, BaseDistribution] = {}
    for item in search:
        name, text = option_name(item), item.partition("=")[2]
        if name in distributions:
            raise ConfigError(f"--search {item} names {name} again; give each option once.")
        ends, _, scale = text.partition(":")
        low, _, high = ends.partition("..")
        is_log = scale == "log"
        try:
            if ".." not in text:
                choices = text.split(",")
                if "" in choices or not len(choices) == len(set(choices)) > 1:
                    raise ValueError("there are not several values")
                distributions[name] = CategoricalDistribution(choices)
                continue
            if scale not in ("", "log") or not float(low) < float(high):
                raise ValueError("the range is empty")
            if low.isdigit() and high.isdigit() and name not in float_options:
                distributions[name] = IntDistribution(int(low), int(high), log=is_log)
            else:
                distributions[name] = FloatDistribution(float(low), float(high), log=is_log)
        except ValueError as error:
            raise ConfigError(
                f"--search {item!a} expects an option with a range or values, as in "
                "learning_rate=1e-4..1e-2:log, num_layers=2..8 or optimizer=adamw,muon; a range "
                "with :log begins above 0."
            ) from error
    return distributions


def end_members(distributions: "Mapping[str, BaseDistribution]") -> list[Member]:
    """Return members at the ends of the ranges, for a check of the values before any trial."""
    values_by_option = {
        name: [*getattr(distribution, "choices", ())]
        or [getattr(distribution, end) for end in ("low", "high")]
        for name, distribution in distributions.items()
    }
    first_values = {name: values[0] for name, values in values_by_option.items()}
    combinations = [first_values]
    for name, values in values_by_option.items():
        combinations += [{**first_values, name: value} for value in values[1:]]
    members = []
    for combination in combinations:
        options = {name: str(value) for name, value in combination.items()}
        members.append(Member(name=member_name(options), options=options))
    return members


def _make_member(number: int, params: Mapping[str, Any]) -> Member:
    """Return the member of a trial, named by its number and its rounded values."""
    shown_options = {
        name: f"{value:.3g}" if isinstance(value, float) else str(value)
        for name, value in params.items()
    }
    return Member(
        name=member_name({"trial": str(number), **shown_options}),
        options={name: str(value) for name, value in params.items()},
    )


def _check_optuna() -> None:
    """Refuse a search without Optuna."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        install = shell_line(["python", "-m", "pip", "install", "optuna"])
        raise ConfigError(
            f"--sampler optuna needs the package {error.name}: run {install}; it is the extra "
            "`optuna`."
        ) from error
