"""A pytest plugin: models share the code of equal layers, from two layers on, in every test.

`pytest -p tests.support.layers_shared tests/integrations` compares models, frameworks and loops with
eager PyTorch as always, but with `memeff.regions="on"`. Tests that count graphs or compare
a report's text with `memeff.regions="off"` fail with it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memeff_compile.options import Options
from memeff_compile.passes.graph import repeated_layers


def pytest_configure(config: pytest.Config) -> None:
    """Replace the default of an option, and the least number of layers."""
    repeated_layers.LEAST = 2
    parse = Options.parse

    def shared(mode: str | None = None, options: Any = None) -> Options:
        found = parse(mode, options)
        inner = "aot_eager" if found.inner == "eager" else found.inner
        return dataclasses.replace(found, regions="on", inner=inner)

    Options.parse = shared  # type: ignore[method-assign,assignment]
