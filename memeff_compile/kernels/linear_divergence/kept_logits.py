"""The engine `kept_logits`: products by cuBLAS, and two Triton passes over the logits.

For a block of rows, each side's products come strip by strip in fp32. The first pass keeps them as
fp16 relative to the maximum of 2048 columns, with that maximum and the sum of exponentials in fp32.
So a kept logit is exact to 2^-12 of its distance from the maximum: a likely class has no visible
error, where bf16 logits, as a model computes them, have one of 2^-9 of their size. The second pass
reads both sides of a row, computes its sums in fp32, and writes the gradient over the student's
logits. Inputs of 32 bits are kept in 32 bits.

The teacher's logits need room only until the gradient is made. `call.SLOTS` says how the gradients
of four blocks come to lie next to each other, so that the weight's gradient is summed in few steps;
each step rounds it once, as the op of the loss does.

No call waits for the GPU or reads a value on the host, and no sum uses atomics.

Expected time on an H200 at 8192 x 4096 x 128256, one number with gradients: four products at 790e12
take 43.6 ms; 6 bytes per logit of each side go through the L2 cache, 2 are written and read, and
the gradient is written and read twice: 14 NV bytes at 4.28e12 are 3.4 ms, and the weight's gradient
is read and written three times, 1.5 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._triton.compat import described
from .._triton.launch import run_kernel
from ..device import gpu, processors
from . import kept_logits_kernels as kernels
from .call import CHUNK, STRIP, TILE, Found, Request, Slots, slots_for, spans, wanted


def run(given: Request, factors: Tensor | None, mask: Sequence[bool]) -> Found:
    """Compute a number per row, and the gradients of the rows' sum weighted by `factors`."""
    walk = _Walk(given, factors, mask)
    slots, rows = walk.slots, given.rows
    for first in range(0, rows, slots.together):
        stop = min(first + slots.together, rows)
        for slot, (begin, end) in enumerate(spans(stop - first, slots.rows)):
            walk.statistics(slot, first + begin, first + end)
        walk.products(first, stop)
    return walk.found()


class _Walk:
    """The buffers of a call, and the work on its blocks of rows."""

    def __init__(self, given: Request, factors: Tensor | None, mask: Sequence[bool]) -> None:
        self.given = given = _readable(given)
        hidden, weight = given.hidden, given.weight
        dtype, vocab = hidden.dtype, given.vocab
        itemsize = hidden.itemsize
        self.slots: Slots = slots_for(given.rows, vocab, given.workspace, itemsize)
        self.factors = None
        if factors is not None:
            self.factors = (factors.to(torch.float32) * given.scale).contiguous()
        self.of_hidden, self.of_weight, self.of_bias = wanted(given, factors, mask)
        self.rows = hidden.new_empty(given.rows, dtype=torch.float32)
        self.grad_hidden = hidden.new_empty(hidden.shape) if self.of_hidden else None
        self.grad_weight = weight.new_empty(weight.shape) if self.of_weight else None
        self.grad_bias = hidden.new_zeros(vocab, dtype=torch.float32) if self.of_bias else None
        kept = torch.float32 if itemsize == 4 else torch.float16
        height, self.tiles = self.slots.rows, -(-vocab // TILE)
        self.columns = self.tiles * TILE  # so that every row starts at a multiple of 16 bytes
        self.kept = hidden.new_empty((height * self.slots.blocks, self.columns), dtype=kept)
        self.gradient = self.kept.view(dtype)[:, :vocab]
        self.teacher: Tensor | None = None
        if self.slots.is_lent and self.grad_weight is not None:
            lent = self.grad_weight.view(-1)[: height * self.columns]
            self.teacher = lent.view(kept).view(height, self.columns)
        self.shapes = shapes_for(hidden.device)
        self.strip: Tensor | None = None
        # of each side: the maximum of a row and tile, and the sum of exponentials relative to it
        self.sums = hidden.new_empty((2, 2, height, self.tiles), dtype=torch.float32)

    def statistics(self, slot: int, first: int, stop: int) -> None:
        """Compute the logits of some rows, their results and their gradient, into a slot."""
        given, height = self.given, self.slots.rows
        here, rows = slice(first, stop), stop - first
        student = self.kept[slot * height : slot * height + rows]
        teacher = self.teacher
        if teacher is None:
            teacher = self.kept[(slot + 1) * height :]
        teacher = teacher[:rows]
        self._keep(0, student, given.hidden[here], given.weight, given.bias, given.scale)
        self._keep(
            *(1, teacher, given.teacher[here], given.teacher_weight, given.teacher_bias),
            given.teacher_scale,
        )
        coefficients = given.coefficients
        gradient = self.gradient[slot * height : slot * height + rows]
        run_kernel(
            kernels._linear_divergence_kept_logits_gradient_kernel,
            (rows,),
            *(student, teacher, self.sums[0], self.sums[1], gradient, given.vocab),
            *(self.columns, self.columns, self.sums.stride(1), self.tiles),
            *(None if self.factors is None else self.factors[here], self.rows[here]),
            tuple(coefficients),
            HAS_MIXTURE=coefficients.has_mixture,
            HAS_CENTRE=coefficients.has_centre,
            HAS_GRADIENT=self.factors is not None,
            CHUNK=CHUNK,
            TILE=TILE,
            PADDED=_power_of_two(self.tiles),
            num_warps=8,
        )

    def _keep(
        self,
        side: int,
        out: Tensor,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: float,
    ) -> None:
        vocab, plane = self.given.vocab, self.sums.stride(1)
        if weight is not None and bias is None and self._is_tiled(rows, weight):
            run_tiled(self.shapes, rows, weight, bias, out, self.sums[side], scale)
            return
        width = STRIP if weight is not None else vocab
        for first, stop in spans(vocab, width):
            strip = rows
            if weight is not None:
                if self.strip is None:
                    height = self.slots.rows
                    self.strip = rows.new_empty(height * min(STRIP, vocab), dtype=torch.float32)
                strip = self.strip[: len(rows) * (stop - first)].view(len(rows), stop - first)
                _product(rows, weight[first:stop].t(), strip)
            run_kernel(
                kernels._linear_divergence_kept_logits_keep_kernel,
                (len(rows), -(-(stop - first) // CHUNK)),
                *(strip, strip.stride(0), bias, out, out.stride(0), self.sums[side]),
                *(plane, self.tiles, first, stop, scale),
                CHUNK=CHUNK,
                TILE=TILE,
                HAS_BIAS=bias is not None,
                num_warps=4,
            )

    def _is_tiled(self, rows: Tensor, weight: Tensor) -> bool:
        return (
            rows.dtype in (torch.bfloat16, torch.float16)
            and rows.dtype == weight.dtype
            and all(
                each.is_contiguous() and each.data_ptr() % 16 == 0 and each.shape[1] % 8 == 0
                for each in (rows, weight)
            )
            and (not rows.is_cuda or gpu(rows.device).is_hopper)
        )

    def products(self, first: int, stop: int) -> None:
        """Multiply the gradients of some blocks of rows by the weight and by the hidden states."""
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

    def found(self) -> Found:
        """Return the results."""
        of_bias = None
        if self.grad_bias is not None and self.given.bias is not None:
            of_bias = self.grad_bias.to(self.given.bias.dtype)
        return Found(self.rows, self.grad_hidden, self.grad_weight, of_bias)


class Shapes(NamedTuple):
    rows: int
    step: int
    warps: int
    stages: int
    flatten: bool
    programs: int
    is_interpreted: bool = False


def shapes_for(device: torch.device) -> Shapes:
    if device.type != "cuda":
        return Shapes(32, 16, 4, 1, False, 2, True)
    return Shapes(128, 64, 8, 3, True, processors(device))


def run_tiled(
    shapes: Shapes,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    sums: Tensor,
    scale: float,
) -> None:
    run_kernel(
        kernels._linear_divergence_kept_logits_product_kernel,
        (shapes.programs,),
        described(rows, (shapes.rows, shapes.step)),
        described(weight, (TILE, shapes.step)),
        described(out, (shapes.rows, TILE // 4)),
        *(bias, sums, sums.stride(0), len(rows), *weight.shape, scale),
        BM=shapes.rows,
        BK=shapes.step,
        TILE=TILE,
        HAS_BIAS=bias is not None,
        FLATTEN=shapes.flatten,
        UPCAST=shapes.is_interpreted,
        num_warps=shapes.warps,
        num_stages=shapes.stages,
    )


def scale_into(gradient: Tensor, by: Tensor, out: Tensor) -> None:
    """Write `gradient * by` to `out`, which may be `gradient`, in fp32 and rounded once."""
    count = gradient.numel()
    block = 4096
    run_kernel(
        kernels._linear_divergence_kept_logits_scale_kernel,
        (-(-count // block),),
        *(gradient, by, out, count),
        BLOCK=block,
        num_warps=8,
    )


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write left @ right into fp32 `out` without rounding to 16 bits.

    On other devices, products of 16-bit inputs have no fp32 output, so the inputs are widened
    first, for tests under the interpreter.
    """
    if left.dtype == torch.float32 or not left.is_cuda:
        torch.mm(left.float(), right.float(), out=out)
    else:
        torch.mm(left, right, out_dtype=torch.float32, out=out)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _readable(given: Request) -> Request:
    """Return operands that kernels and cuBLAS can read; copies are made here, once per call."""
    hidden, teacher = given.hidden, given.teacher
    bias, teacher_bias = given.bias, given.teacher_bias
    return given._replace(
        hidden=hidden if 1 in hidden.stride() else hidden.contiguous(),
        teacher=teacher if teacher.stride(1) == 1 else teacher.contiguous(),
        bias=None if bias is None else bias.contiguous(),
        teacher_bias=None if teacher_bias is None else teacher_bias.contiguous(),
    )
