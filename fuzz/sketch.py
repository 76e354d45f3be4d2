"""Drawing lines: each is filled in at random, tried in eager PyTorch, and kept if that takes it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .program import Names, run

__all__ = ["Sketch"]

_LARGEST = 20_000
"""Tensors of more entries are not kept: programs are many and small."""


class Sketch:
    """A program while it is drawn, together with its values in eager PyTorch.

    Args:
        random: where all choices come from.
        names: what the lines see; `tensors` are those of them that new lines may use.
        is_exact: the program computes in float64, so that a comparison never hangs on rounding.
    """

    def __init__(self, random: random.Random, names: Names, *, is_exact: bool) -> None:
        self.random, self.names, self.is_exact = random, names, is_exact
        self.lines: list[str] = []
        self.tensors: list[str] = []
        self._count = 0

    def fresh(self, prefix: str = "a") -> str:
        """Return a name that is not taken."""
        self._count += 1
        return f"{prefix}{self._count}"

    def add(self, line: str) -> bool:
        """Run a line and keep it, unless eager PyTorch refuses it."""
        if run([line], self.names) is not None:
            return False
        self.lines.append(line)
        return True

    def bind(self, expression: str, prefix: str = "a") -> str | None:
        """Give a name to an expression; None where eager refuses it or it is too large."""
        name = self.fresh(prefix)
        if not self.add(f"{name} = {expression}"):
            return None
        value = self.names[name]
        if not isinstance(value, Tensor) or value.numel() > _LARGEST or not value.numel():
            self.lines.pop()
            return None
        self.tensors.append(name)
        return name

    def value(self, name: str) -> Tensor:
        """What a name stands for in eager PyTorch."""
        value: Tensor = self.names[name]
        return value

    def is_shared(self, name: str) -> bool:
        """Whether another tensor lies in the same memory."""
        places = [self.value(tensor).untyped_storage().data_ptr() for tensor in self.tensors]
        return places.count(self.value(name).untyped_storage().data_ptr()) > 1

    def named_in(self, text: str) -> list[str]:
        """Return the tensors that a line names."""
        return [name for name in re.findall(r"\w+", text) if name in self.tensors]

    def overlaps_itself(self, name: str) -> bool:
        """Whether entries of a tensor share a place: what a write leaves there is not defined."""
        value, places = self.value(name), torch.zeros((), dtype=torch.int64)
        for size, stride in zip(value.shape, value.stride(), strict=True):
            places = places.unsqueeze(-1) + stride * torch.arange(size)
        return bool(places.unique().numel() < value.numel())

    def pick(self, test: Callable[[Tensor], bool] = lambda _: True) -> str | None:
        """Return one of the tensors; the latest ones are likelier."""
        found = [name for name in self.tensors if test(self.value(name))]
        if not found:
            return None
        return found[-1] if self.random.random() < 0.4 else self.random.choice(found)

    def fill(self, templates: Sequence[str], a: str | None = None) -> str | None:
        """Fill in one template: {a} is a tensor, {b} another, {like} one of the shape of {a}.

        None where there is no tensor that fits.
        """
        a = a or self.pick(torch.is_floating_point)
        if a is None:
            return None
        value = self.value(a)
        fillers: dict[str, Callable[[], Any]] = {
            "a": lambda: a,
            "b": lambda: self.pick(torch.is_floating_point),
            "like": lambda: self.pick(lambda t: t.shape == value.shape and t.dtype == value.dtype),
            "d": lambda: self.random.randrange(-max(value.dim(), 1), max(value.dim(), 1)),
            "i": lambda: self.random.choice((-2, -1, 0, 1, 2)),
            "n": lambda: self.random.choice((1, 2, 3, value.shape[0] if value.dim() else 1)),
            "x": lambda: self.random.choice((0.5, -1.25, 2, 3.0, 0.1)),
            "shape": lambda: self._shape(value),
            "strided": lambda: self._strided(value),
            "order": lambda: self.random.sample(range(value.dim()), value.dim()),
            "last": lambda: value.shape[-1] if value.dim() else 1,
            "y": lambda: "{y}",
            "loss": lambda: self.pick(lambda t: not t.dim() and t.requires_grad),
        }
        parts = re.split(r"\{(\w+)\}", self.random.choice(templates))
        parts[1::2] = [fillers[key]() for key in parts[1::2]]
        return None if None in parts else "".join(map(str, parts))

    def _shape(self, value: Tensor) -> tuple[int, ...]:
        """Another shape of as many entries: axes merged, swapped, split or added."""
        shape = list(value.shape) or [1]
        match self.random.randrange(5):
            case 0:
                return (-1, shape[-1])
            case 1 if len(shape) > 1:
                shape[0], shape[1] = shape[1], shape[0]
            case 2:
                self.random.shuffle(shape)
            case 3:
                place = self.random.randrange(len(shape))
                parts = [p for p in range(1, shape[place] + 1) if shape[place] % p == 0] or [1]
                part = self.random.choice(parts)
                shape[place : place + 1] = [part, shape[place] // part]
            case _:
                shape.insert(self.random.randrange(len(shape) + 1), 1)
        return tuple(shape)

    def _strided(self, value: Tensor) -> str:
        """Size, stride and offset of some view of the same memory, often a rearranged one."""
        size, stride, offset = list(value.shape), list(value.stride()), value.storage_offset()
        if len(size) > 1 and self.random.random() < 0.7:
            order = self.random.sample(range(len(size)), len(size))
            if self.random.random() < 0.5:
                size = [size[place] for place in order]
            stride = [stride[place] for place in order]
        elif size and size[0] > 1:
            size[0] -= 1
            offset += self.random.choice((0, stride[0]))
        return f"{tuple(size)}, {tuple(stride)}, {offset}"
