"""Tasks of EleutherAI's lm-evaluation-harness on the model that trains (`--eval_tasks`).

lm-eval turns a task's data into requests and the answers into results; the strategy computes the
answers, in any layout. The module needs the extra `tasks`, and is imported if a run has tasks.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
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
from llm.extensions.tasks.answers import Prompt, ScoredText, generate, score
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.dims import ParallelDims
from llm.tokenizers.prompts import encode_prompt

Score = Callable[[Sequence[ScoredText]], list[tuple[float, bool]]]
Generate = Callable[[Sequence[Prompt]], list[str]]


class Tasks:
    """Tasks with checked data and requests; every rank makes one.

    Args:
        files: YAML files of lm-eval.
        tokenizer: The run's tokenizer.
        model_config: The model's configuration.
        layout: How the ranks divide the model.

    Raises:
        ConfigError: A file is not a task, its data cannot be read or do not fit the model, or the
            layout cannot generate the text that it asks for.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        model_config: PreTrainedConfig,
        layout: ParallelDims,
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
        self._loaded_tasks: dict[str, Any] = {"tasks": {}, "groups": {}}
        for file in files:
            loaded = _load_tasks(file)
            self._check_tasks(file, loaded["tasks"], layout)
            self._try_tasks(file, loaded)
            for kind, objects in self._loaded_tasks.items():
                objects.update(loaded[kind])

    def _check_tasks(self, file: str, tasks: Mapping[str, Any], layout: ParallelDims) -> None:
        """Refuse tasks that another file has too, or that generate text with a divided model."""
        for name, task in tasks.items():
            if name in self._loaded_tasks["tasks"]:
                raise ConfigError(f"--eval_tasks names the task {name} twice.")
            if task.get_config("output_type") == "generate_until" and not layout.is_replicated:
                raise ConfigError(
                    f"--eval_tasks {file}: the task {name} generates text, so each rank must "
                    f"hold the whole model, but they divide it ({layout.describe()}); leave it "
                    "out."
                )

    def _try_tasks(self, file: str, loaded: dict[str, Any]) -> None:
        """Create all requests and compute all results once, with dummy answers.

        Raises:
            ConfigError: That fails, or a task has no results.
        """
        try:
            results = self._evaluate_tasks(
                loaded,
                score=lambda texts: [(-1.0, False)] * len(texts),
                generate=lambda prompts: [""] * len(prompts),
            )
        except Exception as error:  # templates, metrics and users' functions may raise anything
            reason = one_line(error)
            raise ConfigError(
                f"--eval_tasks {file} does not fit the model or its data: {reason}."
            ) from error
        _check_results(file, loaded["tasks"], results)

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
            The values of the metrics by task or group, the same on all ranks.
        """
        score_texts = partial(
            score,
            strategy,
            batch_size=batch_size,
            length_multiple=self._length_multiple,
            on_batch=on_batch,
        )
        continue_texts = partial(
            generate, strategy, model, tokenizer=self._tokenizer, seed=seed, on_batch=on_batch
        )
        # Compiled blocks would recompile for every length.
        with strategy.averaged(), torch.compiler.set_stance("force_eager"):
            return self._evaluate_tasks(
                self._loaded_tasks, score=score_texts, generate=continue_texts
            )

    def _evaluate_tasks(
        self, loaded: dict[str, Any], *, score: Score, generate: Generate
    ) -> dict[str, dict[str, float]]:
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(DEFAULT_OTHER_SEED)  # each time the same examples
        answers = _Answers(self._tokenizer, self._max_length, score, generate)
        # Standard errors of some metrics would fork processes.
        results = evaluator.evaluate(answers, loaded, bootstrap_iters=0, log_samples=False)
        return {name: _metric_values(metrics) for name, metrics in results["results"].items()}


def _load_tasks(file: str) -> dict[str, Any]:
    """Load the tasks of a YAML file, and their data."""
    if not Path(file).is_file():
        raise ConfigError(f"--eval_tasks {file} is not a file; name the YAML file of a task.")
    shows_progress_bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        loaded: dict[str, Any] = TaskManager(include_defaults=False).load([file])
    except Exception as error:  # YAML, lm-eval and datasets raise dozens of types
        reason = one_line(error)
        if isinstance(error, AttributeError | KeyError | TypeError):  # about lm-eval's variables
            reason = "a key that it needs is missing, or has a value of the wrong kind"
        raise ConfigError(
            f"--eval_tasks {file} cannot be loaded as a task of lm-eval: {reason} "
            "(a task without access to the Hub has dataset_path: json and its data_files)."
        ) from error
    finally:
        if shows_progress_bars:
            datasets.enable_progress_bars()
    return loaded


def _check_results(
    file: str, tasks: Mapping[str, Any], results: Mapping[str, Mapping[str, float]]
) -> None:
    """Refuse tasks without results, because lm-eval skips metrics that it does not know.

    Args:
        file: The YAML file of the tasks, for the message.
        tasks: lm-eval's tasks by name.
        results: Values of the metrics by task.

    Raises:
        ConfigError: A task has no results.
    """
    for name, task in tasks.items():
        if not results.get(name):
            metrics = [str(metric.get("metric")) for metric in task.get_config("metric_list") or ()]
            raise ConfigError(
                f"--eval_tasks {file}: the task {name} has no results by its metrics "
                f"({', '.join(metrics) or 'none'}); name some that lm-eval knows."
            )


def _metric_values(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a task by name; lm-eval calls them METRIC,FILTER."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in metrics.items()
        if "," in key and isinstance(value, int | float)
    }


class _Answers(TemplateLM):  # type: ignore[misc]
    """The model for lm-eval; it turns requests into tokens like lm-eval's class `HFLM`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        score: Score,
        generate: Generate,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._score, self._generate = score, generate

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
        return self._score(texts)

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
        texts = self._generate(prompts)
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
