"""Settings of a schedule (`--lr_scheduler_kwargs`): pairs as num_cycles=3, or JSON."""

import json
from typing import Any

from llm.errors import ConfigError

_SCHEDULER_KWARGS = {
    "cosine": "num_cycles",
    "cosine_with_restarts": "num_cycles",
    "polynomial": "power",
}
"""The setting that a schedule has, by `lr_scheduler_type`."""


def scheduler_kwargs(text: str | None, *, kind: str) -> dict[str, float]:
    """Return the settings of a schedule.

    Args:
        text: The value of `lr_scheduler_kwargs`.
        kind: The value of `lr_scheduler_type`.

    Raises:
        ConfigError: The text cannot be read, or the schedule does not have the setting.
    """
    if text is None:
        return {}
    try:
        pairs = [pair.partition("=")[::2] for pair in text.split(",")]
        is_json = text.lstrip().startswith("{")
        values: dict[str, Any] = (
            json.loads(text) if is_json else {k.strip(): json.loads(v) for k, v in pairs}
        )
    except ValueError:
        raise ConfigError(
            f"--lr_scheduler_kwargs expects num_cycles=3 or '{{\"num_cycles\": 3}}', not {text!r}."
        ) from None
    if not is_json and len(values) < len(pairs):
        raise ConfigError(f"--lr_scheduler_kwargs {text} sets a name twice; give it once.")
    known = _SCHEDULER_KWARGS.get(kind)
    for name, value in values.items():
        if name != known:
            raise ConfigError(
                f"--lr_scheduler_kwargs sets {name}, which --lr_scheduler_type {kind} does not "
                f"have; " + (f"it has {known}." if known else "leave it out.")
            )
        if type(value) not in (int, float) or not 0 < value <= 1e6:
            raise ConfigError(
                f"--lr_scheduler_kwargs {name} must be a number above 0 and at most 1e6, not "
                f"{value!r}."
            )
    return values
