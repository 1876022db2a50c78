"""Tasks of EleutherAI's lm-evaluation-harness on the model that trains (`--eval_tasks`).

lm-eval turns a task's data into requests and the answers into results; the strategy computes the
answers, in any layout. The module needs the extra `tasks`, and is imported if a run has tasks.
"""

import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from lm_eval import evaluator
from lm_eval.api import task as lm_eval_task
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS, DEFAULT_OTHER_SEED
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.models.utils_hf import stop_sequences_criteria
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llm.errors import ConfigError, one_line
from llm.extensions.tasks.answers import Prompt, ScoredText, continue_prompts, score_texts
from llm.extensions.tasks.task_files import find_task_files, has_hub_data, read_settings
from llm.extensions.tasks.task_sets import TaskSet, read_set
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.dims import ParallelDims
from llm.runtime.agreement import on_rank0
from llm.tokenizers.prompts import encode_prompt

ScoreTexts = Callable[[Sequence[ScoredText]], list[tuple[float, bool]]]
ContinuePrompts = Callable[[Sequence[Prompt]], list[str]]


class Tasks:
    """Tasks with checked data and requests; every rank makes one.

    Args:
        names: YAML files of lm-eval, names of its tasks, and sets.
        tokenizer: The run's tokenizer.
        model_config: The model's configuration.
        layout: How the ranks divide the model.
        limit: Number of documents of each task, the first ones; None for all.

    Attributes:
        sets: The sets among them, by the names of their results.

    Raises:
        ConfigError: A name is unknown, a file is not a task, its data cannot be read or do not fit
            the model, or the layout cannot generate the text that it asks for.
    """

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        model_config: PreTrainedConfig,
        layout: ParallelDims,
        *,
        limit: int | None = None,
    ) -> None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        lm_eval_task.tqdm = partial(tqdm, disable=True)  # no option can change this
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                "--eval_tasks needs a tokenizer with an end-of-text token, which begins every text."
            )
        self._tokenizer = tokenizer
        # Context and sequence parallelism cut every text into pieces of equal length.
        self._length_multiple = layout.tensor * (2 * layout.context if layout.context > 1 else 1)
        num_positions = resolve_max_length(model_config, tokenizer)
        self._max_length = num_positions - num_positions % self._length_multiple
        self._limit = limit
        self._loaded_tasks: dict[str, Any] = {"tasks": {}, "groups": {}}
        self.sets: dict[str, TaskSet] = {}
        # The files of lm-eval are thousands, so one rank looks through them.
        task_files = on_rank0(lambda: find_task_files(names))
        for name in names:
            self._add_tasks(name, task_files, layout)
        self._check_set_names()

    def _add_tasks(self, name: str, task_files: Mapping[str, str], layout: ParallelDims) -> None:
        """Load the tasks of a file or a set, check them, and add them to the others."""
        path = Path(task_files[name])
        task_set = read_set(path, task_files) if "set" in read_settings(path) else None
        loaded = _load_tasks(name, path) if task_set is None else _load_set(name, task_set)
        self._check_tasks(name, loaded["tasks"], layout)
        self._try_tasks(name, loaded, task_set)
        if task_set is not None:
            self.sets[self._result_name(task_set.name)] = task_set
        for kind, objects in self._loaded_tasks.items():
            objects.update(loaded[kind])

    def _check_set_names(self) -> None:
        """Refuse a set with the name of a task or a group, because results have only names."""
        task_names = {name for objects in self._loaded_tasks.values() for name in objects}
        for task_set in self.sets.values():
            if task_set.name in task_names:
                raise ConfigError(
                    f"--eval_tasks has a set and a task of the name {task_set.name}: give the set "
                    "another name."
                )

    def _result_name(self, name: str) -> str:
        """Return the name of the results of a task or a set; it tells if documents are left out."""
        return name if self._limit is None else f"{name}_first_{self._limit}"

    def _check_tasks(self, name: str, tasks: Mapping[str, Any], layout: ParallelDims) -> None:
        """Refuse tasks that another name has too, or that generate text with a divided model."""
        for task_name, task in tasks.items():
            if task_name in self._loaded_tasks["tasks"]:
                raise ConfigError(f"--eval_tasks names the task {task_name} twice.")
            if task.get_config("output_type") == "generate_until" and not layout.is_replicated:
                raise ConfigError(
                    f"--eval_tasks {name}: the task {task_name} generates text, so each rank must "
                    f"hold the whole model, but they divide it ({layout.describe()}); leave it "
                    "out."
                )

    def _try_tasks(self, name: str, loaded: dict[str, Any], task_set: TaskSet | None) -> None:
        """Create all requests and compute all results once, with dummy answers.

        Raises:
            ConfigError: That fails, or a task has no results.
        """
        try:
            results = self._evaluate_tasks(
                loaded,
                [] if task_set is None else [task_set],
                score_texts=lambda texts: [(-1.0, False)] * len(texts),
                continue_prompts=lambda prompts: [""] * len(prompts),
            )
        except Exception as error:  # templates, metrics and users' functions may raise anything
            reason = one_line(error)
            raise ConfigError(
                f"--eval_tasks {name} does not fit the model or its data: {reason}."
            ) from error
        for task_name, task in loaded["tasks"].items() if task_set is None else ():
            if not results[self._result_name(task_name)]:  # lm-eval skips unknown metrics
                metrics = [str(metric.get("metric")) for metric in task.config.metric_list or ()]
                raise ConfigError(
                    f"--eval_tasks {name}: the task {task_name} has no results by its metrics "
                    f"({', '.join(metrics) or 'none'}); name some that lm-eval knows."
                )

    def run(
        self,
        strategy: AcceleratedStrategy,
        model: PreTrainedModel,
        *,
        batch_size: int,
        seed: int,
        on_batch: Callable[[], None],
    ) -> dict[str, dict[str, float]]:
        """Run the tasks on the model; every rank calls it.

        Args:
            strategy: The prepared model.
            model: The model, which generates text in layouts with all of it on each rank.
            batch_size: Texts that a rank scores at once.
            seed: Keys the draws of tasks that sample.
            on_batch: Called after each batch.

        Returns:
            The values of the metrics by task, group or set, the same on all ranks.
        """
        score_on_model = partial(
            score_texts,
            strategy,
            batch_size=batch_size,
            length_multiple=self._length_multiple,
            on_batch=on_batch,
        )
        continue_with_model = partial(
            continue_prompts,
            strategy,
            model,
            tokenizer=self._tokenizer,
            seed=seed,
            on_batch=on_batch,
        )
        # Compiled blocks would recompile for every length.
        with strategy.averaged(), torch.compiler.set_stance("force_eager"):
            return self._evaluate_tasks(
                self._loaded_tasks,
                self.sets.values(),
                score_texts=score_on_model,
                continue_prompts=continue_with_model,
            )

    def _evaluate_tasks(
        self,
        loaded: dict[str, Any],
        task_sets: Iterable[TaskSet],
        *,
        score_texts: ScoreTexts,
        continue_prompts: ContinuePrompts,
    ) -> dict[str, dict[str, float]]:
        """Return the values of the metrics by task, group or set.

        Args:
            loaded: The tasks and groups, as `_load_tasks` returns them.
            task_sets: Sets of these tasks; their tasks have no results of their own.
            score_texts: Returns the log-probabilities of texts.
            continue_prompts: Returns the continuations of prompts.
        """
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(DEFAULT_OTHER_SEED)  # each time the same examples
        harness_model = _HarnessModel(
            self._tokenizer, self._max_length, score_texts, continue_prompts
        )
        # Standard errors of some metrics would fork processes.
        evaluation = evaluator.evaluate(
            harness_model, loaded, limit=self._limit, bootstrap_iters=0, log_samples=False
        )
        results = {name: _metric_values(metrics) for name, metrics in evaluation["results"].items()}
        for task_set in task_sets:
            set_results = task_set.compute_results(results, loaded["tasks"])
            for member in task_set.members:
                del results[task_set.task_name(member)]
            results[task_set.name] = set_results
        return {self._result_name(name): metrics for name, metrics in results.items()}


def _load_set(name: str, task_set: TaskSet) -> dict[str, Any]:
    """Load the tasks of a set, and their data."""
    tasks: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = task_set.write_task_files(Path(folder))
        for member, file in zip(task_set.members, files, strict=True):
            subject = f"{name}: the task {member.name}"
            loaded = _load_tasks(name, Path(file), subject=subject, fetched_as=task_set.set_name)
            tasks |= loaded["tasks"]
    return {"tasks": tasks, "groups": {}}


def _load_tasks(
    name: str, path: Path, *, subject: str | None = None, fetched_as: str | None = None
) -> dict[str, Any]:
    """Load the tasks of a YAML file, and their data.

    Args:
        name: The value of `--eval_tasks`.
        path: The file.
        subject: What a message is about; by default `name`.
        fetched_as: Name of the file that `llm-trainers fetch` writes; by default the task's.

    Raises:
        ConfigError: The file is not that of a task, or its data cannot be read.
    """
    shows_progress_bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        loaded: dict[str, Any] = TaskManager(include_defaults=False).load([str(path)])
    except Exception as error:  # YAML, lm-eval and datasets raise dozens of types
        settings = read_settings(path)
        raise ConfigError(
            _describe_load_error(
                error,
                name,
                subject=subject or name,
                settings=settings,
                fetched_as=fetched_as or settings.get("task"),
            )
        ) from error
    finally:
        if shows_progress_bars:
            datasets.enable_progress_bars()
    return loaded


def _describe_load_error(
    error: Exception,
    name: str,
    *,
    subject: str,
    settings: Mapping[str, Any],
    fetched_as: str | None,
) -> str:
    """Return a sentence on a task that lm-eval cannot load, with a remedy; for `_load_tasks`."""
    reason = one_line(error)
    if isinstance(error, AttributeError | KeyError | TypeError):  # about lm-eval's variables
        reason = "a key that it needs is missing, or has a value of the wrong kind"
    elif has_hub_data(settings):
        return (
            f"--eval_tasks {subject} cannot be loaded: {reason}. Run llm-trainers fetch inputs "
            f"--tasks {name} on a machine with a connection to the Hub, and use --eval_tasks "
            f"inputs/tasks/{fetched_as}.yaml here; or write a YAML file with dataset_path: "
            "json and data_files."
        )
    return (
        f"--eval_tasks {subject} cannot be loaded as a task of lm-eval: {reason} "
        "(a task without access to the Hub has dataset_path: json and its data_files)."
    )


def _metric_values(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a task by name; lm-eval calls them METRIC,FILTER."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in metrics.items()
        if "," in key and isinstance(value, int | float)
    }


class _HarnessModel(TemplateLM):  # type: ignore[misc]
    """The model for lm-eval; it turns requests into tokens like lm-eval's class `HFLM`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        score_texts: ScoreTexts,
        continue_prompts: ContinuePrompts,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._score_texts, self._continue_prompts = score_texts, continue_prompts

    @property
    def eot_token_id(self) -> int:
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        # What comes before a training text: its template, or the end of another one.
        template: list[int] = self.tokenizer.encode("")
        return template[0] if template else self.eot_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unused: Any
    ) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return encode_prompt(self.tokenizer, string, add_special_tokens=add_special_tokens)

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **unused: Any
    ) -> list[tuple[float, bool]]:
        texts = []
        for _, context, continuation in requests:
            if not context or not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"a request has {len(context)} tokens of context and {len(continuation)} to "
                    f"score; each needs one, and {self.max_length} can be scored"
                )
            tokens = (context + continuation)[-(self.max_length + 1) :]
            texts.append(ScoredText(tokens, len(continuation)))
        return self._score_texts(texts)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = True
    ) -> list[float]:
        windows, request_indices = [], []
        for request_index, request in enumerate(requests):
            request_windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in request_windows:
                windows.append((None, *make_disjoint_window(window)))
                request_indices.append(request_index)
        scores = self._loglikelihood_tokens(windows)
        request_log_probs = [0.0] * len(requests)
        for request_index, (log_prob, _) in zip(request_indices, scores, strict=True):
            request_log_probs[request_index] += log_prob
        return request_log_probs

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        prompts, stops_by_prompt = [], []
        for request in requests:
            prompt, stop_sequences = self._make_prompt(*request.args)
            prompts.append(prompt)
            stops_by_prompt.append(stop_sequences)
        texts = self._continue_prompts(prompts)
        return [
            postprocess_generated_text(text, stop_sequences, None)
            for text, stop_sequences in zip(texts, stops_by_prompt, strict=True)
        ]

    def _make_prompt(
        self, context: str, generation_arguments: dict[str, Any]
    ) -> tuple[Prompt, list[str]]:
        """Return the prompt of a request, and the texts that end its continuation.

        Args:
            context: The text to continue.
            generation_arguments: lm-eval's `generation_kwargs` of the task.
        """
        generation: dict[str, Any] = normalize_gen_kwargs(
            generation_arguments, DEFAULT_MAX_GEN_TOKS
        )
        max_new_tokens = generation.pop("max_gen_toks")
        if max_new_tokens >= self.max_length:
            raise ValueError(
                f"max_gen_toks is {max_new_tokens}, and the model has {self.max_length} positions"
            )
        tokens = self.tok_encode(context)[max_new_tokens - self.max_length :]
        if not tokens:
            raise ValueError("a prompt is empty")

        eos_text = self.tokenizer.decode(self.eot_token_id)
        stop_sequences: list[str] = handle_stop_sequences(generation.pop("until"), eos=eos_text)
        generation["stopping_criteria"] = stop_sequences_criteria(
            self.tokenizer, stop_sequences, len(tokens), 1
        )
        if not generation["do_sample"]:
            generation.pop("temperature", None)
        return Prompt(tokens, max_new_tokens, generation), stop_sequences
