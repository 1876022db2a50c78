"""The numbers of task sets among the values of a run, for programs that compare runs."""

from collections.abc import Mapping

SET_SCORES = {"centered_accuracy": True, "answer_bits_per_byte": False}
"""Names of the numbers of a task set, and whether a higher one is better."""


def set_scores(values: Mapping[str, float]) -> dict[str, float]:
    """Return the number of each task set by its name, such as `core centered_accuracy`.

    Args:
        values: Values by their names in `metrics.jsonl` and `all_results.json`, which are
            task_SET/SCORE.
    """
    scores = {}
    for key, value in values.items():
        set_name, _, score = key.rpartition("/")
        if set_name.startswith("task_") and score in SET_SCORES:
            scores[f"{set_name.removeprefix('task_')} {score}"] = value
    return scores
