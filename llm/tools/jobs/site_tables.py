"""The sites as text, for `llm-trainers jobs --list_sites`."""

from collections.abc import Mapping

from llm.tools.jobs.sites import FACTS, Site
from llm.tools.report.cell_text import align_columns


def site_table(sites: Mapping[str, Site]) -> list[str]:
    """Return a line for each site: scheduler, device, who ran it, and the date of its facts."""
    rows = [("site", "scheduler", "node", "run there by", "facts of")]
    for name, site in sites.items():
        device = "-" if site.device is None else f"{site.gpus_per_node} {site.device}"
        rows.append((name, "/".join(site.schedulers), device, site.ran, site.date or "-"))
    return align_columns(rows)


def site_description(name: str, site: Site) -> list[str]:
    """Return lines with everything that is known about a site, and what is not."""
    facts = {
        "run there by": site.ran,
        "facts of": site.date,
        "device": site.device,
        "node": site.gpu,
        "launcher": site.launcher,
        **{fact: getattr(site, fact) for fact in FACTS},
    }
    lines = [f"{name}: {site.title or name}"]
    lines += [f"  {fact}: {value}" for fact, value in facts.items() if value is not None]
    for queue in site.queues:
        suffix = ", can be ended at any time" if queue.preemptable else ""
        node = site.for_queue(queue.name)
        devices = f"{node.gpus_per_node} {node.device or 'devices'} per node"
        lines.append(f"  queue {queue.name}: {queue.limits}, {devices}{suffix}")
    lines += [f"  note: {note}" for note in site.notes]
    if site.unknown_facts:
        lines.append(f"  not found in the sources: {', '.join(site.unknown_facts)}")
    return [*lines, *(f"  source: {address}" for address in site.source)]
