"""Adds packed ternary models to transformers' quantizers, whenever these are imported.

`from_pretrained` finds a quantizer only in a table, and importing memeff_compile does not import
transformers. So the table is extended now if it exists, and otherwise as soon as it does.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module, reload
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_QUANTIZERS = "transformers.quantizers.auto"


class _BesideQuantizers(MetaPathFinder):
    """Import finder for that one module, which also runs the registration when it is loaded."""

    is_asking = False  # another finder, which may ask all of them in turn

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _QUANTIZERS or self.is_asking:
            return None
        self.is_asking = True
        try:
            finds = (getattr(f, "find_spec", None) for f in sys.meta_path if f is not self)
            found = (find(fullname, path, target) for find in finds if find is not None)
            spec = next(filter(None, found), None)
        finally:
            self.is_asking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _register()

            spec.loader.exec_module = exec_module
        return spec


def _register() -> None:
    name = "memeff_compile.model.ternary.pretrained"
    with suppress(ImportError):  # of a transformers that is too old
        if name in sys.modules:  # transformers was loaded again
            reload(sys.modules[name])
        else:
            import_module(name)


if _QUANTIZERS in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _BesideQuantizers())
