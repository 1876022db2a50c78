"""The training loop. Read this file first."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Literal

from llm.checkpoint.format import Stateful, TrainState
from llm.checkpoint.save import Saver
from llm.config.duration import Duration
from llm.data.loader import StepBatch, TrainLoader
from llm.errors import ConfigError, DivergedError
from llm.metrics.energy import EnergyCounter
from llm.metrics.meter import Meter
from llm.metrics.rank_times import RankTimes
from llm.metrics.reporter import MetricsReporter
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.health import Health
from llm.runtime.logging import event
from llm.runtime.rng import seed_step
from llm.runtime.signals import Interruption, SaveTimer, StopRequest
from llm.trainers.gpt.commands import inspect_command
from llm.trainers.gpt.config import extension_name
from llm.trainers.gpt.idle_weights import log_idle_weights
from llm.trainers.gpt.seams import ExtraWeights, LoopExtension, Periodic, evaluate_weights
from llm.trainers.gpt.training_run import TrainingRun, make_checkpoint_metadata

logger = logging.getLogger("llm")


class Trainer:
    """Trains a prepared model to the last step of the batch plan.

    Args:
        run: The run.
        strategy: Forward, backward and optimizer step, on any layout.
        health: Receives a heartbeat after each step and before long operations.
        interruption: Says after each step whether training should stop.
        reporter: Reports metrics.
        rank_times: Compares the times of the ranks; None with one rank.
        evaluate: Evaluates on all ranks; None without validation data.
        sample: Logs a text sample after a step, or without a step at the end; all ranks call it.
        model_files: Contents of the files of model and tokenizer for every checkpoint, by path in
            it; empty except on rank 0.
        extensions: Extensions that take part, in calling order.

    Attributes:
        run: The run; after a restart, with the checkpoint and the skipped samples of the restart.
        state: Counters of the run, which a checkpoint restores through `parts`.
        loader: The samples of each step.
        metadata: Information about the run in every checkpoint.
        results: The last evaluation in this start.
    """

    def __init__(
        self,
        run: TrainingRun,
        strategy: AcceleratedStrategy,
        *,
        health: Health,
        interruption: Interruption,
        reporter: MetricsReporter,
        rank_times: RankTimes | None,
        evaluate: Callable[[], dict[str, float]] | None,
        sample: Callable[[int | None], None],
        model_files: Mapping[str, bytes],
        extensions: Sequence[LoopExtension],
    ) -> None:
        self.run, self.config, self.seed = run, run.config, run.seed
        self.strategy = strategy
        self.batch_plan, self.schedule = run.batch_plan, run.schedule
        self.loader = TrainLoader(
            samples=run.samples,
            batch_plan=run.batch_plan,
            rank=strategy.data_rank,
            device=strategy.device,
            document_boundaries=run.document_boundaries,
            with_sources=run.config.log_source_losses,
            skipped=run.skipped,
        )
        self.health, self.interruption, self.reporter = health, interruption, reporter
        self.evaluate, self.sample = evaluate, sample
        self.extensions = extensions
        self.state = TrainState()
        self.meter = Meter(strategy.device, strategy.sum_names, rank=strategy.rank)
        self.rank_times = rank_times
        self.energy = EnergyCounter(strategy.device, world_size=strategy.world_size)
        self.metadata = make_checkpoint_metadata(run)
        self.saver = Saver(
            run.config,
            run.folder.checkpoints,
            parts=self.parts,
            metadata=self.metadata,
            rank=strategy.rank,
            world_size=strategy.world_size,
            owner_ranks=strategy.owner_ranks,
            extra_files=model_files,
            blocking_paths=strategy.copied_first(),
            flush_metrics=reporter.flush,
        )
        save_minutes = run.config.checkpointing_minutes
        self.saves_checkpoints = run.config.save_interval is not None or save_minutes is not None
        self.save_timer = SaveTimer(save_minutes if strategy.rank == 0 else None)
        self.is_stoppable = self.is_stopped = self.is_save_overdue = False
        self.last_saved_step: int | None = None
        self.eval_interval = run.config.eval_interval or Duration("1 epoch")
        self.results: dict[str, float] = {}
        self.train_loss: float | None = None
        self.last_eval_step, self.last_eval_seconds = 0, 0.0

    @property
    def parts(self) -> dict[str, Stateful]:
        """The parts of a checkpoint, by name."""
        parts: dict[str, Stateful] = {
            "strategy": self.strategy,
            "train": self.state,
            "meter": self.meter,
        }
        parts |= self.strategy.run_optimizer.parts()
        return parts | {
            extension.part: extension for extension in self.extensions if extension.part is not None
        }

    @property
    def exported_weights(self) -> ExtraWeights | None:
        """The weights to export instead of the last ones; None to export these."""
        extra_weights = (extension.weights for extension in self.extensions)
        return next((weights for weights in extra_weights if weights and weights.is_exported), None)

    def fit(self) -> Literal["finished", "preempted"]:
        """Train to the last step or a request to stop, then save everything."""
        state = self.state
        self.reporter.start(step=state.step, tokens=state.tokens, seconds=state.seconds)
        self.count_energy()
        self.last_eval_step, self.last_eval_seconds = state.step, state.seconds
        if state.step:
            self.evaluate_on_resume()
        waiting_since = time.perf_counter()
        # Also closed if a step raises, to end the thread that reads ahead.
        with closing(self.loader.read_steps(state.step)) as batches:
            for batch in batches:
                self.add_data_wait(time.perf_counter() - waiting_since)
                for extension in self.extensions:
                    extension.before_step(state.step)
                self.train_step(batch)
                for extension in self.extensions:
                    extension.after_step(state.step, batch)
                if self.after_step() == "preempted":
                    break
                waiting_since = time.perf_counter()
        for extension in self.extensions:
            extension.close()
        self.finish_saving()
        self.count_energy()
        is_finished = state.step == self.batch_plan.total_steps and not self.is_stopped
        return "finished" if is_finished else "preempted"

    def add_data_wait(self, seconds: float) -> None:
        """Count the time that this rank has waited for a batch."""
        self.reporter.add_data_wait(seconds)
        if self.rank_times is not None:
            self.rank_times.add_data_wait(seconds)

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is complete."""
        self.health.heartbeat(step=self.state.step, phase="save")
        with self.reporter.wall_time.spent_on("saving"):
            self.saver.finish(is_final=True)
        if self.rank_times is not None:
            self.compare_saves(self.rank_times)

    def evaluate_on_resume(self) -> None:
        """Evaluate at the checkpoint's step if the previous start stopped before it could."""
        self.report_steps()  # raises again if too many steps before the checkpoint were skipped
        state = self.state
        # A new branch leaves the checkpoint of its parent as it is.
        is_save_step = self.run.resume_from is not None and self.is_save_step()
        is_evaluation_due = self.is_due(self.eval_interval, includes_last_step=True)
        is_evaluation_due = is_evaluation_due or (is_save_step and self.config.save_top_k > 0)
        eval_loss = None
        with self.reporter.paused("evaluation"):
            with self.stoppable():  # on a request to stop, the first step ends the run
                if self.evaluate and is_evaluation_due and state.evaluated_at != state.step:
                    eval_loss = self.run_evaluation()
                for periodic in self.find_due_periodic_work():
                    if state.last_periodic_steps.get(periodic.name) != state.step:
                        self.run_periodic(periodic)
            if is_save_step and eval_loss is not None:  # it was saved at once, without the loss
                with self.reporter.wall_time.spent_on("saving"):
                    self.save_checkpoint(eval_loss)
        self.health.heartbeat(step=state.step, phase="start")

    def train_step(self, batch: StepBatch) -> None:
        """Take one optimizer step.

        Nothing here reads from the device: the host queues the kernels of a step while the device
        still computes the previous one.
        """
        strategy, step = self.strategy, self.state.step
        # Dropout depends only on (seed, step, rank), so a resumed step draws the same masks.
        seed_step(seed=self.seed, step=step, rank=strategy.rng_rank)
        learning_rate = self.schedule(step)
        strategy.set_learning_rate(learning_rate)
        # The loss is the sum over tokens divided by the tokens of the whole step on all ranks, so
        # micro-batches, ranks and a short last window do not change the mean.
        sums = strategy.forward_backward(batch.micro_batches, num_tokens=batch.num_tokens)
        for extension in self.extensions:
            if extension.before_update is not None:
                extension.before_update()
        self.saver.before_update()
        # All ranks skip the step if any gradient is not finite. Norm and flag stay on the device:
        # reading them here would wait for the whole step.
        grad_norm, skipped = strategy.optimizer_step(self.config.max_grad_norm)
        self.state.advance(samples=batch.num_samples, tokens=batch.num_tokens)
        self.meter.add(step, sums, batch.num_tokens, grad_norm=grad_norm, skipped=skipped)
        self.reporter.advance_bar(self.state.step)

    def after_step(self) -> Literal["training", "preempted"]:
        """Log, evaluate and save if due after a step, and act on a request to stop."""
        config, step = self.config, self.state.step
        is_final = step == self.batch_plan.total_steps
        self.health.heartbeat(step=step, phase="step")
        if step == 1:
            log_idle_weights(self.strategy)
        should_stop, is_save_due = self.check_requests()
        if is_final or step % config.logging_steps == 0:
            self.log_interval()
        should_save = should_stop or is_save_due or self.is_save_step()
        should_evaluate = self.is_due(self.eval_interval, includes_last_step=True)
        should_evaluate = should_evaluate or (should_save and config.save_top_k > 0)
        self.state.seconds = self.reporter.seconds()
        with self.reporter.paused("evaluation"):
            eval_loss = None
            # On a request to stop, there may be only seconds left; evaluate after resuming.
            if not should_stop:
                eval_loss = self.evaluate_and_sample(should_evaluate=should_evaluate)
            should_stop = should_stop or self.is_stopped
            if should_save or should_stop:
                with self.reporter.wall_time.spent_on("saving"):
                    self.save_checkpoint(eval_loss)
            self.health.heartbeat(step=step, phase="step")
        return "preempted" if should_stop else "training"

    def is_save_step(self) -> bool:
        """Return whether the options ask for a checkpoint of this step, apart from the timer."""
        if self.saves_checkpoints and self.state.step == self.batch_plan.total_steps:
            return True
        intervals = (self.config.save_interval, self.config.keep_every)
        return any(self.is_due(interval, includes_last_step=False) for interval in intervals)

    def evaluate_and_sample(self, *, should_evaluate: bool) -> float | None:
        """Do what is due after a step besides saving, and return the validation loss, if any."""
        eval_loss = None
        with self.stoppable():
            if self.evaluate and should_evaluate:
                eval_loss = self.run_evaluation()
            for periodic in self.find_due_periodic_work():
                self.run_periodic(periodic)
            if self.is_due(self.config.sample_steps, includes_last_step=False):
                self.sample(self.state.step)
        return eval_loss

    def save_checkpoint(self, eval_loss: float | None) -> None:
        """Report the steps so far, and start to save a checkpoint of this step."""
        step = self.state.step
        self.health.heartbeat(step=step, phase="save")
        # All-reduce before the state is copied, so that any number of ranks can resume.
        self.meter.all_reduce(self.strategy.reduce_sum)
        self.report_steps()  # a resumed run does not report the saved steps again
        self.save_timer.restart()
        self.saver.save(step=step, eval_loss=eval_loss)
        self.last_saved_step = step

    def check_requests(self) -> tuple[bool, bool]:
        """Return whether to stop and whether the save timer is due, the same on all ranks.

        Raises:
            NotFiniteError: The last save has found a state that is not finite.
        """
        # A signal may reach only one rank, and clocks differ, so all ranks act on the same answer.
        # The answer arrives some calls later, because waiting for it would stall the step.
        flags = [
            self.interruption.reason is not None,
            self.save_timer.is_due(),
            self.saver.is_state_refused,
        ]
        should_stop, is_save_due, is_state_refused = self.strategy.reduce_flags(flags)
        if is_state_refused:
            self.saver.finish()
        is_save_due, self.is_save_overdue = is_save_due or self.is_save_overdue, False
        step, saved_step = self.state.step, self.last_saved_step
        if saved_step is not None and step - saved_step <= self.strategy.answer_delay:
            is_save_due = False  # the timer was due before that save
        return should_stop and step < self.batch_plan.total_steps, is_save_due

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let a request to stop end an evaluation inside the context."""
        self.is_stoppable = True
        try:
            yield
        except StopRequest:
            self.is_stopped = True
        finally:
            self.is_stoppable = False

    def continue_or_stop_evaluation(self) -> None:
        """Report that an evaluation is alive, or end it; all ranks call this equally often.

        Raises:
            StopRequest: The run is asked to stop, and can resume before the evaluation.
        """
        self.health.keep_alive()
        if self.is_stoppable:
            flags = [self.interruption.reason is not None, False, False]
            should_stop, is_save_due, _ = self.strategy.reduce_flags(flags)
            self.is_save_overdue = self.is_save_overdue or is_save_due
            if should_stop:
                raise StopRequest

    def is_due(self, interval: int | Duration | None, *, includes_last_step: bool) -> bool:
        """Return whether an interval ends with the last step.

        Args:
            interval: A number of steps, or a duration; None never ends.
            includes_last_step: Whether the end of training also ends it.
        """
        step = self.state.step
        if includes_last_step and step == self.batch_plan.total_steps:
            return True
        if isinstance(interval, Duration):
            return self.batch_plan.is_interval_end(step, interval, block_size=self.run.block_size)
        return interval is not None and step % interval == 0

    def log_interval(self) -> None:
        """Report the logging interval that ends with this step."""
        self.meter.all_reduce(self.strategy.reduce_sum)
        values = self.meter.read()  # only here does the host wait for the device
        self.train_loss = values["loss"]
        extension_metrics = [_read_metrics(extension) for extension in self.extensions]
        state = self.state
        self.report_steps()
        rank_times = {} if self.rank_times is None else self.compare_ranks(self.rank_times)
        self.count_energy()
        self.reporter.log_training(
            values,
            extension_values=[metrics for metrics, _ in extension_metrics],
            step=state.step,
            samples=state.samples,
            tokens=state.tokens,
            learning_rate=self.schedule(state.step - 1),
            loss_scale=float(self.strategy.loss_scale()),
            global_batch_size=self.batch_plan.phase(state.step - 1).global_batch_size,
            optimizer=self.strategy.run_optimizer.metrics(),
            columns=[column for _, column in extension_metrics if column],
            rank_times=rank_times,
        )

    def count_energy(self) -> None:
        """Account for the energy that the devices of all ranks have used; every rank calls it."""
        self.reporter.wall_time.start_joules = self.energy.total_joules()

    def compare_ranks(self, rank_times: RankTimes) -> dict[str, float]:
        """Name slow ranks, and return the numbers of the interval for `metrics.jsonl`."""
        step = self.state.step
        metrics = rank_times.compare_interval(
            seconds_per_step=self.reporter.seconds_per_step(step), step=step
        )
        return metrics | self.compare_saves(rank_times)

    def compare_saves(self, rank_times: RankTimes) -> dict[str, float]:
        """Name ranks that save slowly, and return the numbers of the last save."""
        write_times = self.saver.write_times
        saves = [write_times.popleft() for _ in range(len(write_times))]
        return rank_times.compare_saves(saves, step=self.state.step)

    def report_steps(self) -> None:
        """Log skipped steps, and pass the loss of each step to extensions.

        Raises:
            DivergedError: Too many steps in a row were skipped, or an extension gives up.
            RestartError: An extension asks to go back to a checkpoint.
        """
        steps = self.meter.pop_steps()
        try:
            self.report_skipped(steps)
            for extension in self.extensions:
                extension.check_losses(steps, self.loader)
        except DivergedError:
            self.saver.finish()  # a running save is valid, and may be the checkpoint to resume from
            raise

    def report_skipped(self, steps: Sequence[tuple[int, bool, float]]) -> None:
        """Log skipped steps with their samples, and count those in a row.

        Args:
            steps: The result of `Meter.pop_steps`.

        Raises:
            DivergedError: Too many steps in a row were skipped.
        """
        state = self.state
        for step, is_skipped, _ in steps:
            state.skipped_in_a_row = state.skipped_in_a_row + 1 if is_skipped else 0
            if is_skipped:
                self.log_skipped_step(step)
        if state.skipped_in_a_row >= self.config.max_skipped_steps:
            raise DivergedError(
                f"The last {state.skipped_in_a_row} steps were skipped because loss or gradient "
                "was not finite (--max_skipped_steps); resume from an earlier checkpoint with a "
                "lower --learning_rate or other data. Earlier checkpoints are untouched."
            )

    def log_skipped_step(self, step: int) -> None:
        """Log the samples of a skipped step, and the command that shows their text."""
        first_sample, end_sample = self.loader.sample_range(step, step + 1)
        command = inspect_command(self.run.folder.path, step + 1)
        logger.info(
            f"step {step + 1} was skipped: its gradient is not finite (samples "
            f"{first_sample:,} to {end_sample - 1:,}); its text: {command}",
            extra=event(
                "skip",
                step=step + 1,
                first_sample=first_sample,
                last_sample=end_sample - 1,
                inspect=command,
            ),
        )

    def run_evaluation(self) -> float:
        """Evaluate, report the results, and return the validation loss."""
        self.health.heartbeat(step=self.state.step, phase="evaluation")
        self.results = self.evaluate_weights()
        self.reporter.log_evaluation(
            self.results, step=self.state.step, training_columns=self.pop_train_stats()
        )
        self.state.evaluated_at = self.state.step
        loss = self.results["loss"]
        best_loss = self.state.best_loss
        self.state.best_loss = loss if best_loss is None else min(best_loss, loss)
        return loss

    def find_due_periodic_work(self) -> list[Periodic]:
        """Return the work of extensions that is due after this step."""
        return [
            work
            for work in (extension.periodic for extension in self.extensions)
            if work is not None and self.is_due(work.interval_steps, includes_last_step=True)
        ]

    def run_periodic(self, periodic: Periodic) -> None:
        """Do the work of an extension, and report its values."""
        self.health.heartbeat(step=self.state.step, phase="evaluation")
        if values := periodic.run(self.state.step):
            self.reporter.write_extension_values(values, step=self.state.step)
        self.state.last_periodic_steps[periodic.name] = self.state.step

    def evaluate_weights(self) -> dict[str, float]:
        """Return the results of an evaluation, including extensions' results."""
        assert self.evaluate is not None
        is_final = self.state.step == self.batch_plan.total_steps
        return evaluate_weights(self.evaluate, self.extensions, is_final=is_final)

    def pop_train_stats(self) -> list[str]:
        """Return columns for the log: the last loss, and the time since the last call of this."""
        columns = [] if self.train_loss is None else [f"train loss: {self.train_loss:.6g}"]
        state = self.state
        num_steps = state.step - self.last_eval_step
        seconds = state.seconds - self.last_eval_seconds
        if num_steps:
            columns.append(f"train time: {seconds:.1f} s")
            columns.append(f"ms per step: {1000 * seconds / num_steps:.1f}")
        self.last_eval_step, self.last_eval_seconds = state.step, state.seconds
        return [*columns, f"total train time: {state.seconds:.1f} s"]


def _read_metrics(extension: LoopExtension) -> tuple[Mapping[str, float], str]:
    """Return the metrics of an extension.

    Raises:
        ConfigError: They are not a dictionary and a column.
    """
    match extension.metrics():
        case (Mapping() as values, str() as column):
            return values, column
        case result:
            raise ConfigError(
                f"The extension {extension_name(type(extension))} returns a value of the "
                f"type {type(result).__name__} from metrics; let it return a dictionary of values "
                "and a string, the column for the log."
            )
