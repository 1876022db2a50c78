"""Options of measurements and reports."""

from llm.config.options import option, option_group


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
        "Peak of one device, in TFLOP/s, for the utilization (MFU) in the log; by default the "
        "maker's figure for half precision, or the rate of matrix products that is measured at "
        "the start.",
        above=0,
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
    return problems
