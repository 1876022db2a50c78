"""The training loop. The page to read first."""

import logging
import time
from collections.abc import Callable
from contextlib import closing
from typing import Literal

from llm.checkpoint.format import Stateful, TrainState
from llm.checkpoint.save import Saver
from llm.data.loader import StepBatch, TrainLoader
from llm.errors import DivergedError
from llm.metrics.meter import Meter
from llm.metrics.options import profiled_steps
from llm.metrics.profiler import StepProfiler
from llm.metrics.tracker import Tracker
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.health import Health
from llm.runtime.logging import event
from llm.runtime.rng import seed_step
from llm.runtime.signals import Interruption, SaveTimer
from llm.trainers.gpt.config import GPTConfig
from llm.trainers.gpt.inputs import TrainSetup
from llm.trainers.gpt.resume import fixed_options, logged_options

logger = logging.getLogger("llm")

Every = int | Literal["epoch"] | None
"""How often something happens: a number of steps, at the end of each epoch, or never."""


class Trainer:
    """Trains a prepared model to the last step of the batch plan.

    Args:
        config: The options.
        setup: The run's folder, seed, samples, batch plan and schedule.
        strategy: Forward, backward and optimizer step, on any layout.
        health: Receives a heartbeat after each step and before what takes long.
        tracker: Reports metrics.
        evaluate: Evaluates on all ranks; None without validation data.
        sample: Logs a sample of the model after a step, or without a step at the end; all ranks
            call it.

    Attributes:
        state: Counters of the run, which a checkpoint restores through `parts`.
        results: The last evaluation of this start.
    """

    def __init__(
        self,
        config: GPTConfig,
        setup: TrainSetup,
        strategy: AcceleratedStrategy,
        *,
        health: Health,
        tracker: Tracker,
        evaluate: Callable[[], dict[str, float]] | None,
        sample: Callable[[int | None], None],
    ) -> None:
        self.config, self.seed = config, setup.seed
        self.strategy = strategy
        self.plan, self.schedule = setup.plan, setup.schedule
        self.loader = TrainLoader(
            samples=setup.samples,
            plan=setup.plan,
            rank=strategy.data_rank,
            device=strategy.device,
            ends=setup.ends,
        )
        self.health, self.tracker = health, tracker
        self.evaluate = evaluate
        self.sample = sample
        self.state = TrainState()
        self.meter = Meter(strategy.device, rank=strategy.rank)
        self.saver = Saver(
            config,
            setup.run.checkpoints,
            parts=self.parts,
            metadata={
                "fixed": fixed_options(config),
                "logged": logged_options(config),
                "global_batch_size": setup.plan.global_batch_size,
                "data": setup.data_digest,
                **setup.replicas.metadata(),
            },
            rank=strategy.rank,
            world_size=strategy.world_size,
            owner_ranks=strategy.owner_ranks,
        )
        self.profiler = StepProfiler(
            profiled_steps(config),
            folder=setup.run.path / "profile",
            rank=strategy.rank,
            device=strategy.device,
        )
        self.interruption = Interruption(
            after=None if config.exit_after is None else 60 * config.exit_after
        )
        minutes = config.checkpointing_minutes
        self.saves_checkpoints = config.checkpointing_steps is not None or minutes is not None
        self.save_timer = SaveTimer(minutes if strategy.rank == 0 else None)
        self.saved_at: int | None = None
        self.eval_every: Every = "epoch" if config.eval_steps is None else config.eval_steps
        self.results: dict[str, float] = {}
        self.train_loss: float | None = None
        self.last_eval_mark = (0, 0.0)

    @property
    def parts(self) -> dict[str, Stateful]:
        """Everything that a checkpoint holds, by name."""
        parts: dict[str, Stateful] = {
            "strategy": self.strategy,
            "train": self.state,
            "meter": self.meter,
        }
        if self.strategy.second_order is not None:
            parts["kfac"] = self.strategy.second_order
        return parts

    def fit(self) -> Literal["finished", "preempted"]:
        """Train to the last step, or until a request to stop; then everything is saved."""
        state = self.state
        self.tracker.start(step=state.step, tokens=state.tokens, seconds=state.seconds)
        self.last_eval_mark = state.step, state.seconds
        if state.step:
            self.evaluate_on_resume()
        if self.config.z_loss:
            self.strategy.pop_z_loss()  # of the pass in which DDP has ordered its buckets
        waiting_since = time.perf_counter()
        # Closed also if a step raises, which ends the thread that reads ahead.
        with closing(self.loader.steps(state.step)) as batches:
            for batch in batches:
                self.tracker.waited_for_data(time.perf_counter() - waiting_since)
                self.profiler.begin_step(state.step)
                self.train_step(batch)
                if self.profiler.end_step(state.step):
                    with self.tracker.paused():
                        self.profiler.write()
                if self.after_step() == "preempted":
                    break
                waiting_since = time.perf_counter()
        self.profiler.close()
        self.health.heartbeat(step=state.step, phase="save")
        self.saver.finish(last=True)
        return "finished" if state.step == self.plan.total_steps else "preempted"

    def evaluate_on_resume(self) -> None:
        """Make the evaluation of the checkpoint's step, if the stop that saved it left no time."""
        self.report_skipped()  # a run that gave up gives up again, whatever it is started with
        due = self.is_due(self.eval_every, or_last=True)
        if self.evaluate and due and self.state.evaluated_at != self.state.step:
            with self.tracker.paused():
                self.run_evaluation()
            self.health.heartbeat(step=self.state.step, phase="start")

    def train_step(self, batch: StepBatch) -> None:
        """Take one optimizer step.

        Nothing here reads from the device: the host queues the kernels of a step while the device
        still computes the one before.
        """
        strategy, step = self.strategy, self.state.step
        # Dropout depends on (seed, step, rank) alone, so a resumed step draws the same masks.
        seed_step(seed=self.seed, step=step, rank=strategy.rng_rank)
        learning_rate = self.schedule(step)
        strategy.set_learning_rate(learning_rate)
        # The loss is the sum over tokens divided by the tokens of the whole step, on all ranks:
        # neither micro-batches nor ranks nor a short last window change the mean.
        loss_sum = strategy.forward_backward(batch.micro_batches, num_tokens=batch.num_tokens)
        if strategy.second_order is not None:
            # K-FAC, before clipping: the norm is that of the preconditioned gradient.
            strategy.second_order.precondition(learning_rate=learning_rate)
        # Skipped on all ranks if the gradient of any is not finite. Norm and flag stay on the
        # device: reading them here would wait for the whole step.
        grad_norm, skipped = strategy.optimizer_step(self.config.max_grad_norm)
        self.state.advance(samples=batch.num_samples, tokens=batch.num_tokens)
        self.meter.add(
            step,
            loss_sum,
            batch.num_tokens,
            grad_norm=grad_norm,
            skipped=skipped,
            z_loss_sum=strategy.pop_z_loss() if self.config.z_loss else None,
        )
        self.tracker.step_done(self.state.step)

    def after_step(self) -> Literal["training", "preempted"]:
        """Log, evaluate and save what is due after a step, and act on a request to stop."""
        config, step = self.config, self.state.step
        last = step == self.plan.total_steps
        self.health.heartbeat(step=step, phase="step")
        stop, overdue = self.check_requests()
        if last or step % config.logging_steps == 0:
            self.log()
        saving = stop or overdue or (last and self.saves_checkpoints)
        saving = saving or self.is_due(config.checkpointing_steps, or_last=False)
        # A signal may leave seconds only: its evaluation is made when the run resumes.
        evaluating = self.is_due(self.eval_every, or_last=True) and not stop
        self.state.seconds = self.tracker.seconds()
        with self.tracker.paused():
            loss = None
            if self.evaluate and (evaluating or (saving and config.save_top_k)):
                loss = self.run_evaluation()
            if self.is_due(config.sample_steps, or_last=False):
                self.sample(step)
            if saving:
                self.health.heartbeat(step=step, phase="save")
                # All-reduced before the state is copied, so that any number of ranks can resume.
                self.meter.all_reduce(self.strategy.reduce_sum)
                self.report_skipped()  # a resumed run does not report the saved steps again
                self.save_timer.restart()
                self.saver.save(step=step, eval_loss=loss)
                self.saved_at = step
            self.health.heartbeat(step=step, phase="step")
        return "preempted" if stop else "training"

    def check_requests(self) -> tuple[bool, bool]:
        """Return whether to stop and whether the save timer is due, the same on all ranks."""
        # A signal may reach one rank only, and clocks differ, so all ranks act on the same answer
        # of an all-reduce. It arrives some calls later, since waiting for it would stall the step.
        asked = [self.interruption.reason is not None, self.save_timer.is_due()]
        stop, overdue = self.strategy.any_rank(asked)
        step = self.state.step
        if self.saved_at is not None and step - self.saved_at <= self.strategy.answer_delay:
            overdue = False  # the timer asked before that save
        return stop and step < self.plan.total_steps, overdue

    def is_due(self, every: Every, *, or_last: bool) -> bool:
        """Return whether what happens `every` so often is due after this step."""
        step = self.state.step
        if or_last and step == self.plan.total_steps:
            return True
        if every == "epoch":
            return self.plan.ends_epoch(step)
        return every is not None and step % every == 0

    def log(self) -> None:
        """Report the logging interval that ends with this step."""
        self.meter.all_reduce(self.strategy.reduce_sum)
        values = self.meter.read()  # the one point at which the host waits for the device
        self.train_loss = values["loss"]
        state = self.state
        self.report_skipped()
        second_order = self.strategy.second_order
        self.tracker.log_training(
            values,
            step=state.step,
            samples=state.samples,
            tokens=state.tokens,
            learning_rate=self.schedule(state.step - 1),
            loss_scale=float(self.strategy.loss_scale()),
            global_batch_size=self.plan.global_batch_size,
            kfac={} if second_order is None else second_order.metrics(),
            with_z_loss=self.config.z_loss > 0,
        )

    def report_skipped(self) -> None:
        """Log the skipped steps with their samples, and give up after too many in a row.

        Raises:
            DivergedError: Too many steps in a row were skipped.
        """
        state = self.state
        for step, skipped in self.meter.pop_steps():
            state.skipped_in_a_row = state.skipped_in_a_row + 1 if skipped else 0
            if not skipped:
                continue
            first, stop = self.plan.step_samples(step)
            logger.info(
                f"step {step + 1} was skipped: its gradient is not finite (samples {first:,} to "
                f"{stop - 1:,})",
                extra=event("skip", step=step + 1, first_sample=first, last_sample=stop - 1),
            )
        if state.skipped_in_a_row >= self.config.max_skipped_steps:
            self.saver.finish()  # a save under way is sound, and may be the one to resume from
            raise DivergedError(
                f"The last {state.skipped_in_a_row} steps were skipped since loss or gradient "
                "was not finite (--max_skipped_steps); go on from an earlier checkpoint with a "
                "lower --learning_rate or other data. What was saved before is untouched."
            )

    def run_evaluation(self) -> float:
        """Evaluate, report, and return the validation loss."""
        assert self.evaluate is not None
        self.health.heartbeat(step=self.state.step, phase="evaluation")
        self.results = self.evaluate()
        self.tracker.log_evaluation(
            self.results, step=self.state.step, training=self.format_train_stats()
        )
        self.state.evaluated_at = self.state.step
        loss = self.results["loss"]
        best = self.state.best_loss
        self.state.best_loss = loss if best is None else min(best, loss)
        return loss

    def format_train_stats(self) -> list[str]:
        """Return the last logged loss, and the time since the last evaluation or this start."""
        words = [] if self.train_loss is None else [f"train loss: {self.train_loss:.6g}"]
        steps = self.state.step - self.last_eval_mark[0]
        seconds = self.state.seconds - self.last_eval_mark[1]
        if steps:
            words.append(f"train time: {seconds:.1f} s")
            words.append(f"ms per step: {1000 * seconds / steps:.1f}")
        self.last_eval_mark = self.state.step, self.state.seconds
        return [*words, f"total train time: {self.state.seconds:.1f} s"]
