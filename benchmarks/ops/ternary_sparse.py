# ruff: noqa: ANN001, ANN202  (arguments of device code are pointers and scalars of Triton's own)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The possible gain from zeros in activations: one token, packed weights laid out column by column.

    python benchmarks/ops/ternary_sparse.py

Rows of packed weights hold sixteen columns in a word, so a zero saves no time there. This prototype
has the weights column by column, four rows to a byte, lists the columns whose code is no zero, and
reads only these. It is timed against the op of the package for several shares of zeros, in CUDA
graphs over rotated weights: the whole, and its product alone as if the list came for free. Results
are equal bit by bit. A GPU is needed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import RESULTS, registry
from benchmarks import rows as records
from benchmarks.ops.ternary import copies_of, rested
from benchmarks.timing import Repeated
from memeff_compile.kernels._triton.launch import start as start_kernel
from memeff_compile.kernels.ternary_linear import (
    Quantizer,
    reference,
    ternary_linear,
    ternary_linear_quantize,
)
from memeff_compile.kernels.ternary_linear.tiles_kernels import _ternary_parts_kernel

SHAPES = [(14336, 4096), (8640, 3200), (28672, 8192)]
ZEROS = [0.0, 0.5, 0.84, 0.95]


@triton.jit
def _list_kernel(codes_ptr, place_ptr, code_ptr, count_ptr, columns, width, COLUMNS: tl.constexpr):
    """List the columns whose code is no zero, in their order."""
    k = tl.arange(0, COLUMNS)
    at = ((k // 4) % 4) * width + (k // 16) * 4 + k % 4
    code = tl.load(codes_ptr + at, mask=k < columns, other=0)
    is_on = (code != 0).to(tl.int32)
    place = tl.cumsum(is_on, axis=0) - 1
    tl.store(place_ptr + place, k, mask=is_on != 0)
    tl.store(code_ptr + place, code, mask=is_on != 0)
    tl.store(count_ptr, tl.sum(is_on, axis=0))


@triton.jit
def _sparse_kernel(
    place_ptr,
    code_ptr,
    count_ptr,
    turned_ptr,  # (K, N / 4) uint8
    part_ptr,  # (SPLITS, N) int32
    rows,
    BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Add up the listed columns of this program's share."""
    byte = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    count = tl.load(count_ptr)
    sums = tl.zeros((BYTES, 4), tl.int32)
    for start in tl.range(tl.program_id(1) * COLUMNS, count, SPLITS * COLUMNS, num_stages=3):
        at = start + tl.arange(0, COLUMNS)
        k = tl.load(place_ptr + at, mask=at < count, other=0)
        code = tl.load(code_ptr + at, mask=at < count, other=0).to(tl.int32)
        held = tl.load(turned_ptr + k[:, None] * (rows // 4) + byte[None, :]).to(tl.int32)
        field = 2 * tl.arange(0, 4)
        sums += tl.sum(
            ((held[:, :, None] >> field[None, None, :]) & 3) * code[:, None, None], axis=0
        )
    row = byte[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(part_ptr + tl.program_id(1) * rows + row, sums)


class Lists:
    """Buffers of the prototype, and its two launches."""

    def __init__(self, columns: int, rows: int, bytes_: int, many: int, splits: int) -> None:
        self.columns, self.rows = columns, rows
        self.bytes, self.many, self.splits = bytes_, many, splits
        self.place = torch.zeros(columns, dtype=torch.int32, device="cuda")
        self.code = torch.zeros(columns, dtype=torch.int8, device="cuda")
        self.count = torch.zeros((), dtype=torch.int32, device="cuda")
        self.part = torch.zeros(splits, rows, dtype=torch.int32, device="cuda")

    def fill(self, codes: Tensor) -> None:
        """List the columns of a token."""
        _list_kernel[(1,)](
            codes,
            self.place,
            self.code,
            self.count,
            self.columns,
            codes.shape[2],
            COLUMNS=triton.next_power_of_2(self.columns),
            num_warps=16,
        )

    def product(self, turned: Tensor, scale: Tensor, sums: Tensor, weight_scale: Tensor) -> Tensor:
        """Multiply the listed columns."""
        _sparse_kernel[(self.rows // 4 // self.bytes, self.splits)](
            self.place,
            self.code,
            self.count,
            turned,
            self.part,
            self.rows,
            BYTES=self.bytes,
            COLUMNS=self.many,
            SPLITS=self.splits,
            num_warps=4,
        )
        out = torch.empty(1, self.rows, dtype=torch.bfloat16, device="cuda")
        start_kernel(
            _ternary_parts_kernel,
            (1, triton.cdiv(self.rows, 256)),
            self.part,
            scale,
            sums,
            weight_scale,
            weight_scale,
            out,
            out,
            1,
            self.rows,
            SPLITS=self.splits,
            ROWS=256,
            HAS_BIAS=False,
            HAS_ADDED=False,
            IS_STEP=False,
            WEIGHT_IS_STEP=False,
            num_warps=4,
            enable_fp_fusion=False,
        )
        return out


def turned_of(packed: Tensor, columns: int) -> Tensor:
    """Return packed weights column by column, four rows to a byte."""
    codes = (reference.unpack_codes(packed, columns) + 1).to(torch.uint8).t().contiguous()
    first, second, third, last = codes.view(columns, -1, 4).unbind(-1)
    return first | second << 2 | third << 4 | last << 6


def draw(columns: int, zeros: float) -> Tensor:
    """Return a token of which a share becomes zero once it is quantised."""
    x = torch.randn(1, columns, device="cuda").clamp(-3, 3).abs() + 0.1
    return x.mul_(torch.rand_like(x) >= zeros).to(torch.bfloat16)


def linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Return the result of the package's op."""
    return ternary_linear(x, [packed], [scale], [None], x.dtype)[0]


def measure(columns: int, rows: int, zeros: float, options: argparse.Namespace) -> None:
    """Write a row for one shape and share of zeros."""
    x, scale = draw(columns, zeros), torch.full((), 40.0, device="cuda")
    packed = registry.draw_packed(columns, rows, "cuda")
    turned = turned_of(packed, columns)
    wanted = linear(x, packed, scale)
    codes, by_token, sums = ternary_linear_quantize(x, *Quantizer().arguments())
    held = copies_of(packed)
    dense = Repeated([partial(linear, x, w, scale) for w in held])
    best: dict[str, list[Repeated]] = {}
    found: dict[str, float] = {}
    wide = copies_of(turned)
    for bytes_, many, splits in itertools.product((32,), (16, 32), (16, 32)):
        if rows // 4 % bytes_:
            continue
        lists = Lists(columns, rows, bytes_, many, splits)
        lists.fill(codes)
        assert torch.equal(lists.product(turned, by_token, sums, scale), wanted)

        def whole(w: Tensor, lists: Lists = lists) -> Tensor:
            codes, by_token, sums = ternary_linear_quantize(x, *Quantizer().arguments())
            lists.fill(codes)
            return lists.product(w, by_token, sums, scale)

        def alone(w: Tensor, lists: Lists = lists) -> Tensor:
            return lists.product(w, by_token, sums, scale)

        for name, call in (("whole", whole), ("product alone", alone)):
            graph = Repeated([partial(call, w) for w in wide])
            us = min(graph.microseconds() for _ in range(3))
            if us < found.get(name, float("inf")):
                found[name], best[name] = us, [graph]
    shown = {name: sorted(rested(best[name][0]) for _ in range(5))[2] for name in found}
    row = {
        "kind": "ternary linear, zeros",
        "columns": columns,
        "rows": rows,
        "zeros": round(float((codes == 0).float().mean()), 3),
        "us": round(sorted(rested(dense) for _ in range(5))[2], 2),
        "us_listed": round(shown["whole"], 2),
        "us_listed_product_alone": round(shown["product alone"], 2),
    }
    records.write(options.out, row)


def main() -> None:
    """Measure every shape and share of zeros."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "nvidia-h200/ternary.jsonl")
    options = parser.parse_args()
    torch.manual_seed(0)
    for (columns, rows), zeros in itertools.product(SHAPES, ZEROS):
        measure(columns, rows, zeros, options)


if __name__ == "__main__":
    main()
