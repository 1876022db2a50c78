"""Options of measurements and reports."""

from llm.config.options import option, option_group
from llm.errors import ConfigError


@option_group("Logging")
class LoggingOptions:
    """Logging: what, how often, and where."""

    logging_steps: int = option(10, "Steps between two lines of the log.", at_least=1)
    report_to: tuple[str, ...] = option(
        ("tensorboard",),
        "Accelerate trackers that receive the metrics (tensorboard, wandb, ...), or none.",
    )
    project_name: str | None = option(
        None,
        "Project of the run in the trackers besides tensorboard; by default $WANDB_PROJECT for "
        "wandb, else llm.",
    )
    log_source_losses: bool = option(
        False, "Log the training loss of each source of the data by itself."
    )
    device_peak_tflops: float | None = option(
        None,
        "Peak of one device, in TFLOP/s, for the utilisation (MFU) in the log; by default the "
        "maker's figure for half precision, or the rate of matrix products that is measured at "
        "the start.",
        above=0,
    )
    profile: str | None = option(
        None,
        "START:STOP profiles these steps: a trace and a table of where their time went in the "
        "run's folder.",
        one_shot=True,
    )


def logging_problems(options: LoggingOptions) -> list[str]:
    """Return what cannot work about the options, one sentence each."""
    problems = []
    if "none" in options.report_to and len(options.report_to) > 1:
        problems.append("--report_to none stands alone.")
    if options.project_name is not None and not {*options.report_to} - {"none", "tensorboard"}:
        problems.append(
            "--project_name is for trackers such as wandb, and --report_to names none of them; "
            "add one, or leave it out."
        )
    try:
        profiled_steps(options)
    except ConfigError as error:
        problems.append(str(error))
    return problems


def profiled_steps(options: LoggingOptions) -> tuple[int, int] | None:
    """Return (start, stop) to profile the steps start + 1 to stop; None without `profile`.

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
    return int(start), int(stop)
