"""Compute the values of fake tensors (which have no memory) from values that are known.

A model's control flow may depend on these values. For example, a vision-language model reads the
sizes of its images from a tensor and splits tensors by these sizes. If a result depends only on
known values, this module computes it. If a result depends on parameters, only its sizes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from .. import compat
from ..errors import ExplainError

MOST_BYTES = 1 << 26
"""A larger tensor's values are not computed."""


class Values:
    """The known values of some fake tensors.

    The model runs its ops on fake tensors. If the result of an op is known and has no axes, the
    model gets a real tensor with one number. If a known result has axes, the model gets a fake
    tensor, which has the known values in an attribute.
    """

    def __init__(self) -> None:
        # memory of values after an unknown write; kept alive so that it is not reused
        self._lost: dict[int, torch.Tensor] = {}
        self.are_read = False  # whether an op depended on any of them

    def know(self, fake: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store the values of a fake tensor, and of all tensors that share its memory."""
        vars(fake)["memeff_value"] = value
        return fake

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the known values of a tensor, or None."""
        if not compat.is_fake(tensor):
            return tensor
        value: torch.Tensor | None = vars(tensor).get("memeff_value")
        return None if value is None or _memory(value) in self._lost else value

    def run(
        self,
        op: Any,  # an overload of an operation
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Callable[[], Any],
        mode: Any,  # of the fake tensors
    ) -> Any:
        """Run an operation on fake tensors; if the values of all these tensors are known, also run
        the operation on the values.
        """
        self.are_read = self.are_read or compat.reads_values(op)
        if compat.is_item(op) and (number := self.of(args[0])) is not None:
            with compat.on_real_tensors():
                return number.item()
        given = tensors_of((args, kwargs))
        values = {id(tensor): self.of(tensor) for tensor in given}
        is_known = None not in values.values() and not compat.is_drawn(op)

        def on_values() -> Any:
            known = compat.pytree.tree_map(lambda x: values.get(id(x), x), (args, kwargs))
            with compat.on_real_tensors(), torch.no_grad():
                return op(*known[0], **known[1])

        def faked(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            with mode:
                fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            return self.know(fake, value)

        def known(fake: object) -> object:
            """Store the computed values of an operation's result in `fake`, the result's fake
            tensor, and return `fake`.

            The method `run` computed the values with its argument `op`, the operation. If the
            result has no axes and `op` writes to no argument, return a real tensor instead."""
            value = next(made)
            if not compat.is_fake(fake):
                return fake
            assert isinstance(fake, torch.Tensor)
            self.know(fake, value)
            return fake if fake.dim() or written else value

        if is_known and given and compat.reads_values(op):
            return compat.pytree.tree_map(faked, on_values())
        result = run()
        written = tensors_of(compat.written_to(op, args, kwargs))
        results = tensors_of(result)
        if is_known and (results or written) and sum(map(_bytes, results)) <= MOST_BYTES:
            with suppress(NotImplementedError):  # the CPU has no kernel of this dtype
                made = iter(tensors_of(on_values()))
                return compat.pytree.tree_map_only(torch.Tensor, known, result)
        for tensor in written:
            if not compat.is_fake(tensor):
                raise ExplainError(
                    f"{op} writes what depends on weights into a number whose value is known, "
                    "which explain cannot follow. Let the model make a new tensor there."
                )
            value = self.of(tensor)
            if value is not None and value.nbytes:
                self._lost[_memory(value)] = value
        return result


def tensors_of(values: object) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    return [x for x in compat.pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if all(type(size) is int for size in tensor.shape) else MOST_BYTES + 1


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
