"""The file of the hosts that failed the pre-flight, which job scripts with spare nodes leave out.

It has the short name of a host on each line. Every rank may add to it.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any


def short_name(host: str) -> str:
    """Return the name of a host without its domain."""
    return host.partition(".")[0]


def add_bad_nodes(path: str, hosts: Iterable[str]) -> list[str]:
    """Add hosts to the file; return the new ones."""
    file = Path(path)
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    listed_hosts = text.split()
    new_hosts = sorted({short_name(host) for host in hosts}.difference(listed_hosts))
    with file.open("a", encoding="utf-8") as stream:
        if new_hosts and text and not text.endswith("\n"):  # a person has edited it
            stream.write("\n")
        stream.write("".join(f"{host}\n" for host in new_hosts))
    return new_hosts


def minority(hosts: Iterable[str], all_hosts: Collection[str]) -> set[str]:
    """Return the hosts if they are at most half of all; a fault of more is not theirs."""
    short_hosts = {short_name(host) for host in hosts}
    num_hosts = len({short_name(host) for host in all_hosts})
    return short_hosts if 2 * len(short_hosts) <= num_hosts else set()


def hosts_without_devices(descriptions: Mapping[int, Any]) -> set[str]:
    """Return hosts that lack a device that others have, or where ranks share one.

    Args:
        descriptions: The description of each rank.
    """
    has_accelerators = any(entry["device"] != "cpu" for entry in descriptions.values())
    hosts = set()
    seen_devices = set()
    for entry in descriptions.values():
        if has_accelerators and entry["device"] == "cpu":
            hosts.add(entry["host"])
        if entry["id"] is not None:
            if entry["id"] in seen_devices:
                hosts.add(entry["host"])
            seen_devices.add(entry["id"])
    return hosts
