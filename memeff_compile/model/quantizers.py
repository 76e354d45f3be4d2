"""Register this package's quantizer as soon as transformers loads its own quantizers.

The transformers library keeps a table of quantizers, in which `from_pretrained` looks them up. That
table needs an entry for this package, but importing this package must not import transformers. So
this module adds the entry immediately if transformers is already imported, otherwise as soon as
transformers creates the table.
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
_modules: list[str] = []  # modules that add to the table


class _BesideQuantizers(MetaPathFinder):
    """An import finder that adds this package's quantizers to transformers' table of quantizers.

    Right after Python has imported the table, the finder imports the modules of this package that
    add entries to it."""

    is_asking = False  # another finder, which may in turn ask all finders

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
    with suppress(ImportError):  # if transformers is too old
        if name in sys.modules:  # transformers was loaded again
            reload(sys.modules[name])
        else:
            import_module(name)


def load_with_quantizers(name: str) -> None:
    """Import the module `name`, which adds an entry to transformers' table of quantizers.

    Import it now if the table exists, otherwise as soon as transformers creates the table."""
    _modules.append(name)
    if _QUANTIZERS in sys.modules:
        _load(name)
    elif not any(isinstance(finder, _BesideQuantizers) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BesideQuantizers())
