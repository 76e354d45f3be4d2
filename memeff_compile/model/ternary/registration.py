"""Registers packed ternary models behind transformers' own quantizers, whenever it loads them.

`from_pretrained` finds a quantizer in a table alone, and importing us does not import transformers:
the table is filled now if it is there, and otherwise as soon as it is.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_QUANTIZERS = "transformers.quantizers.auto"


class _BesideQuantizers(MetaPathFinder):
    """Finds that one module as others do, and adds to what runs when it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _QUANTIZERS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (each.find_spec(fullname, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register() -> None:
    with suppress(ImportError):  # of a transformers that is older than what we need
        import_module("memeff_compile.model.ternary.pretrained")


if _QUANTIZERS in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _BesideQuantizers())
