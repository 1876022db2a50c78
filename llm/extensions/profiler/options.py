"""The extension of the profiler."""

from typing import TYPE_CHECKING

from llm.config.options import option, option_group
from llm.errors import ConfigError
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import Extension, LoopExtension

if TYPE_CHECKING:
    from llm.trainers.gpt.seams import LoopContext


@option_group("Profiler", extension=True)
class ProfilerOptions(CoreConfig):
    """Which steps are profiled."""

    profile: str | None = option(
        None,
        "Steps to profile, as START:STOP, for a trace and a table of times.",
        one_shot=True,
    )


class ProfilerExtension(Extension[ProfilerOptions]):
    """Profiles the steps."""

    def find_problems(self) -> list[str]:
        """Return a sentence if the steps are not two growing numbers, or are not trained."""
        options = self.options
        try:
            step_range = parse_step_range(options)
        except ConfigError as error:
            return [str(error)]
        length = options.max_duration
        if step_range is not None and length.unit == "steps" and step_range.stop > length.value:
            return [f"--profile {options.profile} ends after the last step of the {length}."]
        return []

    def make_loop_extension(self, context: "LoopContext") -> LoopExtension | None:
        """Return the profiler of a training."""
        step_range = parse_step_range(self.options)
        if step_range is None or self.options.eval_only:
            return None
        from llm.extensions.profiler.step_profiler import StepProfiler

        return StepProfiler(
            step_range,
            folder=context.run.folder.path / "profile",
            rank=context.strategy.rank,
            device=context.strategy.device,
            paused=context.paused,
        )


def parse_step_range(options: ProfilerOptions) -> range | None:
    """Return the steps to profile, counted from 0; None without `profile`.

    Raises:
        ConfigError: The option is not two growing numbers.
    """
    if options.profile is None:
        return None
    start, colon, stop = options.profile.partition(":")
    if not (colon and start.isdigit() and stop.isdigit() and int(start) < int(stop)):
        raise ConfigError(
            f"--profile {options.profile} is not START:STOP, two growing numbers of steps such as "
            "10:13, which profiles steps 11 to 13."
        )
    return range(int(start), int(stop))
