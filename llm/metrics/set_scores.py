"""The numbers of task sets among the values of a run, for programs that compare runs."""

SET_SCORES = {"centered_accuracy": True, "answer_bits_per_byte": False}
"""Names of the numbers of a task set, and whether a higher one is better."""


def set_score_title(key: str) -> str | None:
    """Return the title of a task set's number, such as `core: centered accuracy`.

    Args:
        key: Name of a value in `metrics.jsonl` or `all_results.json`. The number of a set has the
            name task_SET/SCORE; other values have None.
    """
    task, _, score = key.rpartition("/")
    if not task.startswith("task_") or score not in SET_SCORES:
        return None
    return f"{task.removeprefix('task_')}: {score.replace('_', ' ')}"
