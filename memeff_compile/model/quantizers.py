"""Loads a system's quantizer for transformers as soon as transformers loads its own.

`from_pretrained` finds a quantizer in a table, and importing this package does not import
transformers: the table is filled at once if it exists, and otherwise when it is made.
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
_modules: list[str] = []  # those that fill the table


class _BesideQuantizers(MetaPathFinder):
    """Finds that one module as others do, and adds to what runs when it is loaded."""

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
                for name in _modules:
                    _load(name)

            spec.loader.exec_module = exec_module
        return spec


def _load(name: str) -> None:
    with suppress(ImportError):  # of a transformers that is older than the one needed
        if name in sys.modules:  # transformers was loaded again
            reload(sys.modules[name])
        else:
            import_module(name)


def load_with_quantizers(name: str) -> None:
    """Import a module that fills transformers' table, now or when transformers makes the table."""
    _modules.append(name)
    if _QUANTIZERS in sys.modules:
        _load(name)
    elif not any(isinstance(finder, _BesideQuantizers) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BesideQuantizers())
