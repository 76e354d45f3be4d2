"""The implementation `kept_logits` of divergences: matrix products whose logits are stored in 16
bits, and Triton kernels that read these logits.

For a block of rows, each row's logits of student and teacher form tiles of 256 classes (128 with a
bias). A logit is stored in fp16, as its difference from the maximum of its row's tile. The tile's
maximum and sum of exponentials are stored in fp32. So a stored logit has an error of at most 2^-12
times its distance from the maximum, which is negligible for likely classes. For comparison, a logit
that a model computes in bf16 has an error of up to 2^-9 times its size. On compute capability 9.0,
the kernel of the matrix product stores the logits itself, so fp32 products never leave the
multiprocessor. On other GPUs, cuBLAS writes fp32 products for a range of classes at a time. A
Triton kernel then reads these products from the L2 cache. The next kernel reads a row's logits of
student and teacher, and computes the row's sums in fp32. Then the kernel overwrites the student's
logits with their gradient. For 32-bit inputs, logits have 32 bits.

The memory of the teacher's logits is free again as soon as the gradient is computed. The gradients
of several blocks are stored next to each other (see `call.Slots`), so that one product adds their
contributions to the weight's gradient. Each such product rounds the weight's gradient once, as in
the op for cross entropy. If a single product covers all rows, the teacher's logits use the memory
of the weight's gradient, which is written last.

The CPU never waits for the GPU or reads a value from it, and the kernels sum without atomic
operations.

The following times are for an H200, with N = 8192 rows, a hidden size of 4096 and V = 128256
classes. A loss with its gradients takes at least the sum of the following three durations:

- Four products at 790e12 operations per second take 43.6 ms.
- Reading and writing logits and gradients, 14 N V bytes at 4.28e12 bytes per second, takes 3.4 ms.
- Reading and writing the weight's gradient three times takes 1.5 ms.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._head_loss.products import product_into
from .._head_loss.shapes import spans
from .._triton.compat import described
from .._triton.launch import run_kernel
from ..device import gpu
from . import kept_logits_kernels as kernels
from .call import (
    CHUNK,
    STRIP,
    ClassRequest,
    Found,
    Request,
    Slots,
    columns_of,
    lent_rows,
    shapes_for,
    slots_for,
    tile_of,
    wanted,
)


def run(given: Request, factors: Tensor | None, mask: Sequence[bool]) -> Found:
    """Compute the divergence of each row (token): one number per row.

    If `factors` (a number per row) is given, also compute the gradients of a sum over all rows:
    each row's divergence times its factor.
    """
    given = _readable(given)
    walk = _Divergence(given, factors, wanted(given, factors, mask))
    walk.all_rows()
    return Found(walk.rows, *walk.gradients())


def run_classes(given: ClassRequest, factors: Tensor | None, mask: Sequence[bool]) -> Found:
    """Compute, for each of N rows (tokens), the log-probabilities of k classes, as (N, k).

    `given.chosen` contains the classes' indices. If `given.is_normalised` is false, compute logits
    instead. If the gradient of these results is given as `factors`, also compute the gradients that
    `mask` requests, such as the weight's gradient.
    """
    given = _readable(given)
    walk = _Classes(given, factors, wanted(given, factors, mask))
    walk.all_rows()
    return Found(walk.found, *walk.gradients())


class _Walk(ABC):
    """The buffers of a divergence call, and its loop over blocks of rows (tokens)."""

    sides = 1

    def __init__(self, given: Request | ClassRequest, trains: tuple[bool, ...]) -> None:
        self.given = given
        hidden, weight = given.hidden, given.weight
        dtype, vocab, itemsize = hidden.dtype, given.vocab, hidden.itemsize
        self.of_hidden, self.of_weight, self.of_bias = trains
        self.tile = tile_of(given)
        # Whole tiles, so that every row starts at a multiple of 16 bytes.
        self.columns = columns_of(vocab, self.tile)
        self.tiles = self.columns // self.tile
        self.slots: Slots = slots_for(
            *(given.rows, self.columns, given.workspace, itemsize),
            sides=self.sides,
            trains=any(trains),
            lent=lent_rows(weight.shape, self.columns, self.tile, itemsize)
            if self.of_weight
            else 0,
        )
        self.grad_hidden = hidden.new_empty(hidden.shape) if self.of_hidden else None
        self.grad_weight = weight.new_empty(weight.shape) if self.of_weight else None
        self.grad_bias = hidden.new_zeros(vocab, dtype=torch.float32) if self.of_bias else None
        kept = torch.float32 if itemsize == 4 else torch.float16
        height = self.slots.rows
        self.kept = hidden.new_empty((self.slots.allocated, self.columns), dtype=kept)
        self.gradient = self.kept.view(dtype)[:, :vocab]
        self.shapes = shapes_for(hidden.device)
        self.strip: Tensor | None = None
        # for student and teacher, the maximum of each row and tile, and the sum of exponentials
        # relative to that maximum
        sums = (self.sides, 2, height, self.tiles)
        self.lent: Tensor | None = None
        if self.slots.is_lent and self.grad_weight is not None:
            flat, size = self.grad_weight.view(-1).view(kept), height * self.columns
            self.lent, rest = flat[:size].view(height, self.columns), flat[size:]
            rest = rest[: math.prod(sums) * 4 // rest.itemsize]
            self.sums = rest.view(torch.float32).view(sums)
        else:
            self.sums = hidden.new_empty(sums, dtype=torch.float32)

    def all_rows(self) -> None:
        """Process all rows (tokens), several blocks of rows at a time.

        First compute the logits' gradients of these blocks. Then `products` multiplies the
        gradients of all these blocks at once by the weight, and by the hidden states.
        """
        slots, rows = self.slots, self.given.rows
        for first in range(0, rows, slots.together):
            stop = min(first + slots.together, rows)
            for slot, (begin, end) in enumerate(spans(0, stop - first, slots.rows)):
                self.block(slot, slice(first + begin, first + end))
            if self.of_hidden or self.of_weight or self.of_bias:
                self.products(first, stop)

    @abstractmethod
    def block(self, slot: int, here: slice) -> None:
        """Compute the logits of the rows (tokens) in `here`, and the op's results for these rows.

        The results of the class `_Divergence` are one divergence per row, stored in `self.rows`.
        The results of the class `_Classes` are stored in `self.found`. They are log-probabilities
        or logits of the k classes that the caller chose for each row. The student's logits are
        stored in the buffer number `slot`. If gradients are requested, the gradient of the
        student's logits overwrites the logits there.
        """

    def student(self, slot: int, here: slice) -> Tensor:
        """Store the student's logits of the rows `here` in the buffer number `slot`, and return the
        stored logits.
        """
        height, given = self.slots.rows, self.given
        kept = self.kept[slot * height : slot * height + here.stop - here.start]
        self.keep(0, kept, given.hidden[here], given.weight, given.bias, given.scale)
        return kept

    def keep(
        self,
        side: int,
        out: Tensor,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: float,
    ) -> None:
        """Store logits in `out`.

        With a weight, `rows` are hidden states, otherwise logits that the caller passed."""
        vocab, plane = self.given.vocab, self.sums.stride(1)
        if weight is not None and self._is_tiled(rows, weight):
            self._keep_tiles(side, out, rows, weight, bias, scale)
            return
        for first, stop in spans(0, vocab, STRIP if weight is not None else vocab):
            strip = rows
            if weight is not None:
                if self.strip is None:
                    most = self.slots.rows * min(STRIP, vocab)
                    self.strip = rows.new_empty(most, dtype=torch.float32)
                strip = self.strip[: len(rows) * (stop - first)].view(len(rows), stop - first)
                product_into(rows, weight[first:stop].t(), strip)
            run_kernel(
                kernels._linear_divergence_kept_logits_keep_kernel,
                (len(rows), -(-(stop - first) // CHUNK)),
                *(strip, strip.stride(0), bias, out, out.stride(0), self.sums[side]),
                *(plane, self.tiles, first, stop, scale),
                CHUNK=CHUNK,
                TILE=self.tile,
                HAS_BIAS=bias is not None,
                num_warps=4,
            )

    def _keep_tiles(
        self,
        side: int,
        out: Tensor,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
    ) -> None:
        shapes = self.shapes
        run_kernel(
            kernels._linear_divergence_kept_logits_product_kernel,
            (shapes.programs,),
            described(rows, (shapes.rows, shapes.step)),
            described(weight, (self.tile, shapes.step)),
            described(out, (shapes.rows, self.tile // 4)),
            *(bias, self.sums[side], self.sums.stride(1), len(rows), *weight.shape, scale),
            BM=shapes.rows,
            BK=shapes.step,
            TILE=self.tile,
            HAS_BIAS=bias is not None,
            FLATTEN=shapes.flatten,
            UPCAST=shapes.is_interpreted,
            num_warps=shapes.warps,
            num_stages=shapes.stages,
        )

    def _is_tiled(self, rows: Tensor, weight: Tensor) -> bool:
        """Return whether to load tiles of both operands of a matrix product through descriptors.

        Descriptors must support both operands, and the GPU must be of a kind on which such loads
        were faster."""
        are_read = all(
            each.dtype in (torch.bfloat16, torch.float16)
            and each.is_contiguous()
            and each.data_ptr() % 16 == 0
            and each.shape[1] % 8 == 0
            for each in (rows, weight)
        )
        return are_read and (not rows.is_cuda or gpu(rows.device).is_hopper)

    def products(self, first: int, stop: int) -> None:
        """Multiply the logits' gradients of the rows (tokens) from `first` to `stop` by the weight,
        and by the hidden states.

        The first product is the gradient of these rows' hidden states. The second product is added
        to the weight's gradient. The method also adds the gradients' column sums to the bias's
        gradient."""
        gradient, given = self.gradient[: stop - first], self.given
        if self.grad_hidden is not None:
            torch.mm(gradient, given.weight, out=self.grad_hidden[first:stop])
        if self.grad_weight is not None:
            pair = gradient.t(), given.hidden[first:stop]
            if first == 0:
                torch.mm(*pair, out=self.grad_weight)
            else:
                torch.addmm(self.grad_weight, *pair, out=self.grad_weight)
        if self.grad_bias is not None:
            self.grad_bias += gradient.sum(0, dtype=torch.float32)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias."""
        of_bias = None
        if self.grad_bias is not None and self.given.bias is not None:
            of_bias = self.grad_bias.to(self.given.bias.dtype)
        return self.grad_hidden, self.grad_weight, of_bias


class _Divergence(_Walk):
    """Compute the divergence of each row (token) from the logits of student and teacher."""

    given: Request
    sides = 2

    def __init__(self, given: Request, factors: Tensor | None, trains: tuple[bool, ...]) -> None:
        super().__init__(given, trains)
        self.factors = None
        if factors is not None:
            self.factors = (factors.to(torch.float32) * given.scale).contiguous()
        self.rows = given.hidden.new_empty(given.rows, dtype=torch.float32)

    def block(self, slot: int, here: slice) -> None:
        given, height, rows = self.given, self.slots.rows, here.stop - here.start
        student = self.student(slot, here)
        # If the weight's gradient lends no memory, the slot after the student's, which is free
        # again afterwards.
        lent = self.kept[(slot + 1) * height :] if self.lent is None else self.lent
        teacher = lent[:rows]
        self.keep(
            *(1, teacher, given.teacher[here], given.teacher_weight, given.teacher_bias),
            given.teacher_scale,
        )
        coefficients = given.coefficients
        run_kernel(
            kernels._linear_divergence_kept_logits_gradient_kernel,
            (rows,),
            *(student, teacher, self.sums[0], self.sums[1]),
            *(self.gradient[slot * height :], given.vocab, self.columns),
            *(self.sums.stride(1), self.tiles),
            *(None if self.factors is None else self.factors[here], self.rows[here]),
            tuple(coefficients),
            HAS_MIXTURE=coefficients.has_mixture,
            HAS_CENTRE=coefficients.has_centre,
            HAS_GRADIENT=self.factors is not None,
            CHUNK=CHUNK,
            TILE=self.tile,
            PADDED=_power_of_two(self.tiles),
            num_warps=8,
        )


class _Classes(_Walk):
    """Compute log-probabilities, or logits, of k chosen classes for each row (token)."""

    given: ClassRequest

    def __init__(
        self, given: ClassRequest, factors: Tensor | None, trains: tuple[bool, ...]
    ) -> None:
        super().__init__(given, trains)
        self.factors = None if factors is None else factors.to(torch.float32).contiguous()
        self.index = given.chosen.contiguous()
        self.found = given.hidden.new_empty(given.chosen.shape, dtype=torch.float32)

    def block(self, slot: int, here: slice) -> None:
        given, height, rows = self.given, self.slots.rows, here.stop - here.start
        student, count = self.student(slot, here), given.chosen.shape[1]
        shared = (self.sums[0], self.index[here], self.found[here])
        sizes = (given.vocab, self.columns, self.sums.stride(1), self.tiles, count)
        how = {
            "NORMALISED": given.is_normalised,
            "TILE": self.tile,
            "PADDED": _power_of_two(self.tiles),
            "WIDTH": max(16, _power_of_two(count)),
        }
        run_kernel(
            kernels._linear_divergence_kept_logits_pick_kernel,
            (rows,),
            *(student, *shared, *sizes),
            **how,
            num_warps=4,
        )
        if self.factors is None:
            return
        gradient = self.gradient[slot * height :]
        run_kernel(
            kernels._linear_divergence_kept_logits_spread_kernel,
            (rows,),
            *(student, *shared, self.factors[here], gradient, *sizes, given.scale),
            **how,
            CHUNK=CHUNK,
            num_warps=8,
        )
        run_kernel(
            kernels._linear_divergence_kept_logits_place_kernel,
            (rows,),
            *(*shared, self.factors[here], gradient, *sizes, given.scale),
            **how,
            num_warps=4,
        )


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _readable(given: Any) -> Any:
    """Return a call's operands in a memory layout that Triton kernels and cuBLAS can read.

    Operands with other strides are copied here, once per call of the divergence op.
    """
    hidden, bias = given.hidden, given.bias
    given = given._replace(
        hidden=hidden if 1 in hidden.stride() else hidden.contiguous(),
        bias=None if bias is None else bias.contiguous(),
    )
    if not isinstance(given, Request):
        return given
    teacher, teacher_bias = given.teacher, given.teacher_bias
    return given._replace(
        teacher=teacher if teacher.stride(1) == 1 else teacher.contiguous(),
        teacher_bias=None if teacher_bias is None else teacher_bias.contiguous(),
    )
