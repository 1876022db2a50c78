"""Refuses libraries that are older than this package needs."""

import functools
import importlib.metadata

from llm.errors import ConfigError


@functools.cache  # a program may read options several times
def check_library_versions() -> None:
    """Compare the installed libraries with the requirements of the installed package.

    pip checks them once, but an environment may see the libraries of a module, which can be
    exchanged later. Nothing is imported. A package that runs without being installed has no
    requirements to compare with.

    Raises:
        ConfigError: A library is missing or too old.
    """
    from packaging.requirements import Requirement  # here, since --help needs none of it

    try:
        requirements = map(Requirement, importlib.metadata.requires("llm-trainers") or [])
    except importlib.metadata.PackageNotFoundError:
        return
    wrong = []
    for requirement in requirements:
        if requirement.marker is not None:  # of an extra
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        else:
            if requirement.specifier.contains(version, prereleases=True):
                continue
        wrong.append(f"{requirement} ({requirement.name} is {version})")
    if wrong:
        raise ConfigError(
            f"This environment lacks {', '.join(wrong)}: install it with pip, or load a module "
            "that has it."
        )
