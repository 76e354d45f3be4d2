"""Stand-ins for tensors, without memory: Triton can compile kernels for them but cannot run the
kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class _Typed:
    """The properties of a tensor that Triton reads to compile a kernel for it."""

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
    """Return an object that stands in for a tensor while Triton compiles a kernel.

    The object has no memory, so the kernel cannot run on it. When Triton asks for the object's
    address, the object returns the tensor's offset in its storage, in bytes.
    """
    return _Typed(tensor)


def is_typed(argument: Any) -> bool:
    """Return whether a kernel argument is an object that `typed` made in place of a tensor.

    Triton can compile kernels for this object, but cannot run them."""
    return isinstance(argument, _Typed)
