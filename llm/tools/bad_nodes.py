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
    """Add hosts to the list of bad nodes in a file; return the new ones."""
    list_path = Path(path)
    text = list_path.read_text(encoding="utf-8") if list_path.exists() else ""
    new_hosts = sorted({short_name(host) for host in hosts}.difference(text.split()))
    with list_path.open("a", encoding="utf-8") as list_file:
        if new_hosts and text and not text.endswith("\n"):  # a person has edited it
            list_file.write("\n")
        list_file.write("".join(f"{host}\n" for host in new_hosts))
    return new_hosts


def keep_minority(hosts: Iterable[str], all_hosts: Collection[str]) -> set[str]:
    """Return the hosts if they are at most half of all; a fault of more is not theirs."""
    short_hosts = {short_name(host) for host in hosts}
    num_hosts = len({short_name(host) for host in all_hosts})
    return short_hosts if 2 * len(short_hosts) <= num_hosts else set()


def find_hosts_without_devices(descriptions: Mapping[int, Any]) -> set[str]:
    """Return hosts that lack a device that others have, or where ranks share one."""
    has_accelerators = any(rank["device"] != "cpu" for rank in descriptions.values())
    bad_hosts = set()
    used_devices = set()
    for rank in descriptions.values():
        if has_accelerators and rank["device"] == "cpu":
            bad_hosts.add(rank["host"])
        if rank["id"] is not None:
            if rank["id"] in used_devices:
                bad_hosts.add(rank["host"])
            used_devices.add(rank["id"])
    return bad_hosts
