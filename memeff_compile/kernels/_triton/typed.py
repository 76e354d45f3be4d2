"""Stand-ins for tensors without memory, for which Triton compiles kernels but runs none."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class _Typed:
    """The properties of a tensor without memory that Triton reads to compile a kernel for it."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self._strides = tensor.stride()
        self._place = int(tensor.storage_offset()) * tensor.element_size()

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return self._place

    def ptr_range(self) -> int:
        return 0


def typed(tensor: Tensor) -> Any:
    """Return what Triton compiles a kernel for in place of a tensor that has no memory.

    The kernel cannot run with it. Memory is assumed to start at a multiple of 16 bytes.
    """
    return _Typed(tensor)


def is_typed(argument: Any) -> bool:
    """Return whether an argument is a result of `typed`."""
    return isinstance(argument, _Typed)
