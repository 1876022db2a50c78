"""Options of logging and metrics."""

from llm.config.options import option, option_group

_TRACKERS = (
    *("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio"),
    "wandb",
)
"""Names of Accelerate's trackers, in its newest release."""


@option_group("Logging")
class LoggingOptions:
    """Contents, frequency and targets of the log."""

    logging_steps: int = option(10, "Steps between lines of the log.", at_least=1)
    report_to: tuple[str, ...] = option(
        ("tensorboard",), "Trackers of the metrics (tensorboard, wandb, ...), or none."
    )
    project_name: str | None = option(
        None, "Project in trackers; by default $WANDB_PROJECT for wandb, else llm."
    )
    metrics_file: str | None = option(
        None,
        "File for Prometheus' textfile collector with the log's last numbers, such as "
        "DIR/run.prom.",
        path=True,
    )
    log_source_losses: bool = option(False, "Log the training loss of each data source.")
    device_peak_tflops: float | None = option(
        None,
        "Peak TFLOP/s of one device, for the MFU; by default the maker's half-precision figure, or "
        "measured.",
        above=0,
    )


def find_logging_problems(options: LoggingOptions) -> list[str]:
    """Return faults of the logging options, one sentence each."""
    problems = []
    if options.metrics_file is not None and not options.metrics_file.endswith(".prom"):
        problems.append(
            f"--metrics_file {options.metrics_file} must end in .prom: the node exporter reads no "
            "other files."
        )
    problems += [
        f"--report_to {name} is not a tracker; choose from {', '.join(_TRACKERS)} and none."
        for name in options.report_to
        if name not in (*_TRACKERS, "none")
    ]
    if "none" in options.report_to and len(options.report_to) > 1:
        problems.append("--report_to none cannot be combined with trackers.")
    if options.project_name is not None and not {*options.report_to} - {"none", "tensorboard"}:
        problems.append(
            "--project_name is for trackers such as wandb, and --report_to names none of them; "
            "add one, or leave it out."
        )
    return problems
