"""Options of `llm-trainers evidence`."""

from typing import Literal

from llm.config.options import option, option_group

PartName = Literal["preflight", "losses", "resume", "layouts", "speed"]


@option_group("Evidence")
class EvidenceOptions:
    """The file to write, and the time for it."""

    output: str = option("evidence.json", "File to write, which must not exist.", path=True)
    minutes: float = option(20.0, "Minutes for all parts together.", above=0, at_most=1440)
    parts: tuple[PartName, ...] = option(
        ("preflight", "losses", "resume", "layouts", "speed"), "Parts to run."
    )
    site: str | None = option(
        None,
        "Name of the cluster; by default from SLURM_CLUSTER_NAME, NERSC_HOST or LMOD_SYSTEM_NAME.",
    )
