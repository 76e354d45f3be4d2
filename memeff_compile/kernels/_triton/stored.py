"""Save compiled Triton kernels with PyTorch's cache artifacts, and load them in another process.

`torch.compiler.save_cache_artifacts` saves the kernels that Inductor generates, but not the kernels
that this package launches. So this module adds each kernel that the package launches to PyTorch's
artifacts, at the kernel's first launch. PyTorch writes loaded artifacts to files in Inductor's
cache folder even if this package is not imported. Then `unpack` moves the kernels from there to
Triton's cache.
"""

from __future__ import annotations

import base64
import logging
import threading
import zlib
from typing import Any

from ... import compat as torch_compat
from . import compat

log = logging.getLogger(__name__)

_recorded: set[str] = set()
_unpacked: set[str] = set()
_unpacking = threading.Lock()


def record(compiled: Any) -> None:
    """Add a compiled kernel to PyTorch's cache artifacts, at its first launch."""
    key = getattr(compiled, "hash", None)
    if key is None or key in _recorded:
        return
    _recorded.add(key)
    try:
        files = compat.files_of(key)
        if files:
            coded = {name: _text_of(data) for name, data in files.items()}
            torch_compat.record_artifact(key, {"kernel": key, "files": coded})
    except Exception:  # another process compiles the kernel again
        log.debug("memeff_compile: a kernel is not saved", exc_info=True)


def unpack() -> None:
    """Move kernels from loaded artifacts to Triton's cache, where Triton finds them."""
    with _unpacking:
        for name, read in torch_compat.loaded_artifacts().items():
            if name in _unpacked:
                continue
            _unpacked.add(name)
            try:
                if compat.is_kept(name):
                    continue
                stored = read()
                files = {file: _data_of(text) for file, text in stored["files"].items()}
                compat.keep_files(stored["kernel"], files)
            except Exception:  # Triton compiles the kernel
                log.debug("memeff_compile: a stored kernel is not used", exc_info=True)


def _text_of(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def _data_of(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
