"""The extension of the tasks of lm-eval, for training and for `llm-trainers fetch`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llm.config.options import option, option_group
from llm.errors import ConfigError
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import Extension, Fetch, FetchDataset, LoopExtension

if TYPE_CHECKING:
    from llm.extensions.tasks.tasks import Tasks
    from llm.trainers.gpt.seams import LoopContext, Run


@option_group("Fetch")
class FetchTasksOptions:
    """What `llm-trainers fetch` takes of the tasks."""

    eval_tasks: tuple[str, ...] = option(
        (),
        "Tasks of lm-eval: names, YAML files, or sets (core, easy).",
        path=True,
        aliases=("tasks",),
    )


@option_group("Tasks of lm-eval", extension=True)
class TasksOptions(CoreConfig):
    """The tasks, and when they run."""

    eval_tasks: tuple[str, ...] = option(
        (),
        "lm-eval tasks to run, such as arc_easy, YAML files, or the sets core and easy. Needs the "
        "extra tasks.",
        path=True,
        widens_trust=True,
    )
    eval_tasks_steps: int | None = option(
        None,
        "Steps between runs of eval_tasks, which also run at the end.",
        at_least=1,
        requires=("eval_tasks",),
    )
    eval_tasks_limit: int | None = option(
        None,
        "Documents of each task to use, from the first; by default all.",
        at_least=1,
        requires=("eval_tasks",),
    )


def _fetch_tasks(
    options: TasksOptions, folder: Path, fetch_dataset: FetchDataset
) -> dict[str, Any]:
    """Download the data of the tasks; return the option with the YAML files that read them."""
    from llm.extensions.tasks.fetch_tasks import fetch_tasks

    return {"eval_tasks": fetch_tasks(options.eval_tasks, folder, fetch_dataset)}


class TasksExtension(Extension[TasksOptions]):
    """Runs the tasks on a run's model."""

    fetch: ClassVar[Fetch] = Fetch(options=FetchTasksOptions, download=_fetch_tasks)

    _tasks: "Tasks | None" = None

    def prepare_run(self, run: "Run") -> None:
        """Read the tasks with their data, if there are any.

        Raises:
            ConfigError: lm-eval is missing, or as for `Tasks`.
        """
        if not self.options.eval_tasks:
            return
        try:
            from llm.extensions.tasks.tasks import Tasks  # an extra; its import takes seconds
        except ImportError as error:
            raise ConfigError(
                f"--eval_tasks needs the package {error.name}: pip install 'llm-trainers[tasks]'."
            ) from error
        self._tasks = Tasks(
            self.options.eval_tasks,
            run.tokenizer,
            run.model_config,
            run.dims,
            limit=self.options.eval_tasks_limit,
        )

    def make_loop_extension(self, context: "LoopContext") -> LoopExtension | None:
        """Return the runner of the tasks during training; None without tasks."""
        tasks = self._tasks
        if tasks is None:
            return None
        from llm.extensions.tasks.task_runs import TaskRuns  # here, because it imports lm-eval

        return TaskRuns(
            tasks,
            context,
            interval=self.options.eval_tasks_steps,
            batch_size=self.options.per_device_eval_batch_size,
        )
