"""When tasks run during training and in an evaluation, and what is logged of them."""

import logging

from llm.extensions.tasks.tasks import Tasks
from llm.metrics.reporter import task_values
from llm.runtime.logging import event
from llm.trainers.gpt.seams import LoopContext, LoopExtension, Periodic

logger = logging.getLogger("llm")


class TaskRuns(LoopExtension):
    """Runs tasks on the model.

    Args:
        tasks: The tasks.
        context: The model, and what was read for the run.
        interval: Steps between two runs; None for one at the end of training.
        batch_size: Texts that a rank scores at once.
    """

    def __init__(
        self, tasks: Tasks, context: LoopContext, *, interval: int | None, batch_size: int
    ) -> None:
        self._tasks, self._context, self._batch_size = tasks, context, batch_size
        self._results: dict[str, dict[str, float]] | None = None
        self.periodic = Periodic("tasks", interval, self._report_tasks)

    def describe(self) -> list[str]:
        """Return a line for each set: its tasks, those that it leaves out, and its number."""
        return [
            f"task set {name}: {task_set.description}, {task_set.score}"
            for name, task_set in self._tasks.sets.items()
        ]

    def _report_tasks(self, step: int) -> dict[str, float]:
        """Run the tasks after a step, and log their results."""
        self._results = self._run_tasks()
        for task, metrics in self._results.items():
            task_set = self._tasks.sets.get(task)
            shown_names = metrics if task_set is None else [task_set.score]
            columns = [f"{name}: {metrics[name]:.6g}" for name in shown_names]
            line = " | ".join([f"task {task} at step {step}", *columns])
            logger.info(line, extra=event("task", step=step, task=task, **metrics))
        return task_values(self._results)

    def task_results(self) -> dict[str, dict[str, float]]:
        """Return the results of the last run, which may be this one."""
        if self._results is None:  # an evaluation, or a resume of a run that was finished
            self._results = self._run_tasks()
        return self._results

    def _run_tasks(self) -> dict[str, dict[str, float]]:
        return self._tasks.run(
            self._context.strategy,
            self._context.model,
            batch_size=self._batch_size,
            seed=self._context.run.seed,
            on_batch=self._context.keep_alive,
        )
