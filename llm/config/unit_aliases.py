"""Aliases of a duration that take a number of one unit, such as `--max_train_steps 600`."""

from collections.abc import Mapping
from typing import Any

from llm.config.duration import Duration, Unit
from llm.config.options import Field, fields
from llm.errors import ConfigError


def join_unit_aliases(cls: type, values: dict[str, Any], *, location: str = "") -> dict[str, Any]:
    """Return options with a duration in place of the aliases that take a number of one unit.

    Args:
        cls: Option dataclass.
        values: Options by name or alias. An alias that is None sets the default.
        location: The TOML file, for messages; "" for the command line.

    Raises:
        ConfigError: Two names set one option to different durations.
    """
    joined_values = dict(values)
    for field in fields(cls):
        unit_by_alias = {alias: unit for unit, alias in field.option.units.items() if alias}
        duration_by_name = {
            alias: _make_duration(field, joined_values.pop(alias), unit, alias, location)
            for alias, unit in unit_by_alias.items()
            if alias in values
        }
        if duration_by_name:
            if field.name in values:
                duration_by_name[field.name] = values[field.name]
            joined_values[field.name] = _choose_duration(field, duration_by_name, location)
    return joined_values


def _make_duration(field: Field, value: Any, unit: Unit, alias: str, location: str) -> Duration:
    """Return the duration that a value of an alias sets: a number, the name of a unit, or None."""
    if value is None:
        default: Duration = field.default
        return default
    try:
        return Duration(f"1 {value}" if isinstance(value, str) else f"{value} {unit}")
    except ValueError:
        prefix = f"{location}: " if location else "--"
        raise ConfigError(f"{prefix}{alias} cannot be {value}.") from None


def _choose_duration(
    field: Field, duration_by_name: Mapping[str, Duration], location: str
) -> Duration:
    """Return the duration of an option that is set by several names."""
    setting_names = sorted(
        name for name, duration in duration_by_name.items() if duration != field.default
    )
    if len(setting_names) > 1 and field.option.yields in setting_names:
        setting_names.remove(field.option.yields)
    if len({duration_by_name[name] for name in setting_names}) > 1:
        prefix, dashes = (f"{location}: ", "") if location else ("", "--")
        flags = " and ".join(f"{dashes}{name}" for name in setting_names)
        raise ConfigError(f"{prefix}{flags} each set {field.name}; give one of them.")
    default: Duration = field.default
    return duration_by_name[setting_names[0]] if setting_names else default
