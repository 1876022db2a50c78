"""Plans a run before it is queued: `python -m llm.plan CONFIG.toml --nodes 64`.

Exit codes: 0 planned, and it fits; 1 planned, and it does not; 2 an option that cannot be.
"""

import json
import signal
import sys
from collections.abc import Sequence

from llm.config.command_line import parse
from llm.errors import ConfigError, LLMError
from llm.plan.options import PlanOptions, check

_HELP = (
    "Plan a run: memory, traffic and time of a layout, without a device. The first word, if it is "
    "no option, is the run's TOML file."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--config")
    try:
        options = parse(PlanOptions, words, prog="python -m llm.plan", description=_HELP)
        check(options)
        lines, fits = _plan(options)
    except LLMError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if fits else 1


def _plan(options: PlanOptions) -> tuple[list[str], bool]:
    """The lines to print, and whether what they plan fits."""
    from llm.runtime.cpu import limit_spin_wait
    from llm.runtime.logging import quiet_libraries

    limit_spin_wait()
    quiet_libraries()
    from llm.plan import render as page
    from llm.plan.estimate import estimate
    from llm.plan.job import Job
    from llm.plan.plot import check_plot, draw
    from llm.plan.search import nearest, search

    if options.plot is not None:
        check_plot(options.plot)
    job = Job(options)
    found = search(job) if options.search else None
    if found == []:
        raise ConfigError("No layout divides this batch, these layers and these devices.")
    plan = found[0] if found else estimate(job, job.layout)
    near = None if plan.fits else nearest(found or search(job), job.layout)
    if options.plot is not None:
        draw((found or [plan])[: options.top], limit=job.usable, path=options.plot)
    if options.json:
        return [json.dumps(page.to_json(job, plan, near, found), indent=1)], plan.fits
    lines = page.text(job, plan, near)
    if found is not None:
        lines = [*page.table(job, found), "", "the first of them:", *lines]
    return lines, plan.fits


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `plan ... | head` ends without a word
    sys.exit(main())
