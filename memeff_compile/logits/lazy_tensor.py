# ruff: noqa: ANN401  (the protocols of PyTorch take and return anything)
"""The base class of tensors whose values are computed on first use.

A wrapper subclass has a shape, a dtype, a device and a node in the autograd graph, but no memory.
Functions that access memory without PyTorch's dispatcher would therefore find no values: pickling,
numpy, raw pointers, storages and shared memory. `LazyTensor` makes each of these functions use a
plain tensor instead:

- A function that only reads uses the tensor that `_values` returns.
- A function that may also write uses the tensor that `_memory` returns.

A function that can use neither of the two plain tensors raises an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor

from memeff_compile import compat
from memeff_compile.errors import UnsupportedInputError

if TYPE_CHECKING:
    from typing import Self


# A tensor's class cannot have abstract methods, since its metaclass is PyTorch's.
_OF_SUBCLASS = "each subclass of LazyTensor defines this"
_NO_DATA = (
    "a {} was assigned to the .data of another tensor, or another one to its .data. It is computed "
    "when it is read and has no memory to share. Copy the values, tensor.copy_(logits), or "
    'compile with options={{"memeff.logits": "eager"}}.'
)


class LazyTensor(torch.Tensor):
    """A tensor that computes its values on demand; subclasses define how the values are computed.

    Tensor classes have a metaclass of PyTorch, so Python's abc module cannot check that a subclass
    defines every method.
    """

    _device: torch.device

    @classmethod
    def _make(
        cls,
        size: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        strides: Sequence[int] | None = None,
        offset: int | None = None,
    ) -> Self:
        made = compat.make_without_memory(
            cls, size, dtype=dtype, device=device, strides=strides, storage_offset=offset
        )
        assert isinstance(made, cls)
        made._device = device
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # annotated as a function of torch's own
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(cls, func, args, kwargs or {})

    @classmethod
    def _run(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one ATen operation that has a lazy tensor among its arguments."""
        raise NotImplementedError(_OF_SUBCLASS)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the device on which the values are computed."""
        return self._device

    def refuse_memory(self) -> NoReturn:
        """Raise an error if code assigns the tensor, which has no memory, to the `.data` of a plain
        tensor."""
        raise UnsupportedInputError(_NO_DATA.format(type(self).__name__))

    def _values(self) -> Tensor:
        """Return the values as a plain tensor without autograd, which callers may only read."""
        raise NotImplementedError(_OF_SUBCLASS)

    def _memory(self) -> Tensor:
        """Return the values as a plain tensor to which callers may write."""
        raise NotImplementedError(_OF_SUBCLASS)

    def _peek(self) -> Tensor | None:
        """Return the plain values if they are already computed, otherwise None."""
        raise NotImplementedError(_OF_SUBCLASS)

    def _stand_in(self, *, shared: bool = True) -> Tensor:
        """Return a plain tensor with the same values, a leaf of the autograd graph if `self` is a
        leaf.

        If an operation is not allowed on the returned tensor, PyTorch raises its usual error. An
        example is `numpy()` on a tensor that requires a gradient.
        """
        plain = (self._memory() if shared else self._values()).detach()
        if not self.requires_grad:
            return plain
        try:
            is_leaf = self.is_leaf
        except RuntimeError:  # one of several views that a write has made stale
            is_leaf = False
        with torch.enable_grad():
            plain.requires_grad_()
            # `view_as` would give a dimension of one entry another stride.
            return plain if is_leaf else plain.as_strided(plain.shape, plain.stride())

    def _apart(self) -> Tensor:
        return self._stand_in(shared=False)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the values as text if they are already computed; printing alone does not compute
        them."""
        values = self._peek()
        if values is not None:
            return f"{type(self).__name__}({values!r})"
        grad = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else ""
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}'{grad}; values not computed yet, any use computes them)"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self) if self.dim() else self._values().item(), spec)

    def __copy__(self) -> Tensor:
        return copy.copy(self._stand_in())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            plain = self._apart()
            memo.setdefault(id(memo), []).append(plain)  # the copies are noted by address
            memo[id(self)] = plain.__deepcopy__(memo)
        return cast("Tensor", memo[id(self)])

    def apply_(self, function: Callable[[Any], Any]) -> LazyTensor:
        self._stand_in().apply_(function)
        return self

    def share_memory_(self) -> LazyTensor:
        self._memory().share_memory_()
        return self

    def is_shared(self) -> bool:
        values = self._peek()
        return self.is_cuda if values is None else values.is_shared()

    def is_pinned(self, *args: Any, **kwargs: Any) -> bool:
        values = self._peek()
        return values is not None and values.is_pinned(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # On a CPU the attribute has to be missing, without computing the values.
        tensor = self._stand_in() if self.is_cuda else torch.empty(0, device=self.device)
        interface: dict[str, Any] = tensor.__cuda_array_interface__
        return interface


def _sent(to: str, name: str) -> Callable[..., Any]:
    """Return a method that first calls the method named `to`, which returns a plain tensor.

    Then it calls the method `name` of this plain tensor."""

    def method(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, to)(), name)(*args, **kwargs)

    return method


_SENT = {
    "_values": "tolist",
    "_apart": "__reduce_ex__ pin_memory",
    "_stand_in": "numpy __dlpack__",
    "_memory": "data_ptr untyped_storage _typed_storage storage",
}
for _to, _names in _SENT.items():
    for _name in _names.split():
        setattr(LazyTensor, _name, _sent(_to, _name))

MEMORY_METHODS = (
    *" ".join(_SENT.values()).split(),
    *"__deepcopy__ __dlpack_device__ __repr__ apply_ is_pinned is_shared share_memory_".split(),
)
"""Methods of `torch.Tensor` that bypass the dispatcher; `LazyTensor` overrides them."""


@compat.untraced
def _dispatch(
    cls: type[LazyTensor], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    if func in compat.ABOUT_MEMORY:
        return compat.ABOUT_MEMORY[func](*args)
    return cls._run(func, args, kwargs)
