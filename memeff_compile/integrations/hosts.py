"""Import the framework of an integration, or raise an error that names the required version."""

from __future__ import annotations

import re
from importlib import import_module
from types import ModuleType


def host(name: str, least: str | None = None) -> ModuleType:
    """Import a framework and return its module.

    Args:
        name: The name of the framework's module, which is also its name for pip.
        least: The oldest version that works.

    Raises:
        ImportError: The framework is not installed, fails to import, or is older than `least`.
    """
    wanted = f"{name}>={least}" if least else name
    remedy = f"Install it by `pip install '{wanted}'`."
    try:
        module = import_module(name)
    except ImportError as error:
        said = f"memeff_compile.integrations.{name} needs {wanted}, which does not import: {error}."
        raise ImportError(f"{said} {remedy}", name=name) from error
    found = str(getattr(module, "__version__", least or ""))
    if least and _numbers(found) < _numbers(least):
        said = f"memeff_compile.integrations.{name} needs {wanted}; this environment has {found}."
        raise ImportError(f"{said} {remedy}", name=name)
    return module


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
