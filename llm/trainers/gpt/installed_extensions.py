"""The extensions of installed packages, which declare them by an entry point.

A package names each extension in the entry-point group `llm_trainers.extensions`, as
`NAME = "MODULE:CLASS"`. The module is imported at the start of every program that reads the
options of a run, also for `--help`, so it must not import numpy or torch.
`docs/extend.md` builds a package.
"""

import dataclasses
import os
import sys
import types
import typing
from typing import TYPE_CHECKING, Any

from llm.config.options import Option, Package, fields
from llm.errors import ConfigError, one_line
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import Extension, list_option_classes

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "llm_trainers.extensions"
"""The entry-point group of extensions."""

_METADATA_SUFFIXES = (".dist-info", ".egg-info")


def load_installed_extensions() -> tuple[type[Extension[Any]], ...]:
    """Return the extensions of installed packages, by the names of the packages.

    Raises:
        ConfigError: A package is broken, or one of its options has the name of a core option.
            `fields` refuses other conflicts of names.
    """
    if not _is_group_on_path():
        return ()
    extensions: list[type[Extension[Any]]] = []
    for package, entry_point in _list_entry_points():
        extensions.append(_load_extension(entry_point, package))
        if not _have_separate_options(extensions):
            raise ConfigError(
                f"The extension {entry_point.value} of the installed package {package} shares its "
                "class of options with another extension; uninstall the package."
            )
    return tuple(extensions)


def _list_entry_points() -> list[tuple[Package, "EntryPoint"]]:
    """Return the packages with extensions and their entry points, by the names of the packages."""
    # Imported here, because it takes longer than the search of all folders.
    import importlib.metadata

    entry_points = [
        (Package(entry_point.dist.name, entry_point.dist.version), entry_point)
        for entry_point in importlib.metadata.entry_points(group=GROUP)
        if entry_point.dist is not None
    ]
    return sorted(entry_points, key=lambda item: (item[0].name.lower(), item[1].name))


def _have_separate_options(extensions: list[type[Extension[Any]]]) -> bool:
    """Return whether a configuration can inherit from the option classes of all extensions."""
    try:
        type("Options", (*list_option_classes(extensions), CoreConfig), {})
    except TypeError:
        return False
    return True


def _is_group_on_path() -> bool:
    """Return whether the metadata of an installed package contain the entry-point group.

    `importlib.metadata` finds them too. It takes 30 ms, and this takes 1.5 ms.
    """
    for folder in sys.path:
        try:
            names = os.listdir(folder or os.curdir)
        except OSError:  # a zip archive, or a folder that does not exist
            continue
        for name in names:
            if name.endswith(_METADATA_SUFFIXES) and _names_group(os.path.join(folder, name)):
                return True
    return False


def _names_group(metadata_folder: str) -> bool:
    """Return whether the entry points of a package contain the group."""
    try:
        with open(os.path.join(metadata_folder, "entry_points.txt"), "rb") as file:
            return GROUP.encode() in file.read()
    except OSError:  # the package has no entry points
        return False


def _load_extension(entry_point: "EntryPoint", package: Package) -> type[Extension[Any]]:
    """Return an extension of a package, with its options marked as the package's.

    Raises:
        ConfigError: It cannot be loaded or used.
    """
    location = f"The extension {entry_point.value} of the installed package {package}"
    remedy = "update the package, or uninstall it."
    try:
        extension: Any = entry_point.load()
        problem = _find_extension_problem(extension)
        if problem is None:
            _mark_options(extension, package)
            fields(list_option_classes([extension])[0])
    except Exception as error:  # whatever the code of the package raises
        raise ConfigError(f"{location} cannot be loaded ({one_line(error)}); {remedy}") from error
    if problem is not None:
        raise ConfigError(f"{location} {problem}; {remedy}")
    loaded: type[Extension[Any]] = extension
    return loaded


def _find_extension_problem(extension: Any) -> str | None:
    """Return the end of a sentence about what is wrong with an extension, or None."""
    bases = vars(extension).get("__orig_bases__", ()) if isinstance(extension, type) else ()
    if not any(typing.get_origin(base) is Extension for base in bases):
        return "is not a class with the base Extension[OPTIONS]"
    [options_class] = list_option_classes([extension]) or [CoreConfig]
    if not (isinstance(options_class, type) and issubclass(options_class, CoreConfig)):
        return "has a class of options without the base CoreConfig"
    local_fields = _local_fields(options_class)
    if not local_fields:
        return "declares no options, so that no run could ask for it"
    for field in local_fields:
        declaration = field.metadata.get("option")
        if not (isinstance(declaration, Option) and declaration.extension):
            return f"has {field.name} without @option_group(..., extension=True) and option(...)"
    return None


def _local_fields(options_class: type[CoreConfig]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a class of options that the core does not have."""
    core_fields = dataclasses.fields(CoreConfig)
    return [field for field in dataclasses.fields(options_class) if field not in core_fields]


def _mark_options(extension: type[Extension[Any]], package: Package) -> None:
    """Let an extension and its options name their package."""
    extension.package = package
    for field in _local_fields(list_option_classes([extension])[0]):
        declaration = dataclasses.replace(field.metadata["option"], package=package)
        field.metadata = types.MappingProxyType({"option": declaration})
