"""Refuses libraries that are older than this package needs."""

import functools

from llm.errors import ConfigError


@functools.cache  # a program may read options several times
def check_library_versions() -> None:
    """Compare the installed libraries with the requirements of the installed package.

    pip checks them once, at installation. An environment may also use the libraries of a module,
    and these can be replaced later. Nothing is imported. If the package runs without being
    installed, it has no requirements to compare with.

    Raises:
        ConfigError: A library is missing or too old.
    """
    import importlib.metadata  # imported here because --help does not need them

    from packaging.requirements import Requirement

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
