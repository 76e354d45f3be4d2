"""memeff::attention under masks that are tensors, on the CPU: against the formula, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.attention import (
    attention,
    attention_backward,
    attention_mask_tiles,
    reference,
)
from memeff_compile.kernels.attention.mask_tiles import EMPTY, FULL, PARTIAL, classify
from tests.support.dense_attention import MASKS, drawn_mask


def operands(queries: int = 70, keys: int = 90, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, queries, 8), *2 * [(2, 2, keys, 8)])
    drawn = [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]
    drawn[0][:, :, 1] *= 30.0
    return [each.requires_grad_() for each in drawn]


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend as products and a softmax do; zeros where no key counts at all."""
    k, v = (each.repeat_interleave(2, 1) for each in (k, v))
    score = q @ k.mT * q.shape[3] ** -0.5
    score = score.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else score + mask
    is_none = (score == -math.inf).all(-1, keepdim=True)
    return score.masked_fill(is_none, 0.0).softmax(-1).masked_fill(is_none, 0.0) @ v


def compare(found: Tensor, wanted: Tensor, leaves: list[Tensor], **budget: float) -> None:
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(7)).to(found.dtype)
    torch.testing.assert_close(found, wanted, **budget)
    pairs = (torch.autograd.grad(each, leaves, grad) for each in (found, wanted))
    torch.testing.assert_close(*pairs, **budget)


@pytest.mark.parametrize("is_classified", [True, False])
@pytest.mark.parametrize("kind", MASKS)
def test_every_mask_is_a_softmax_under_it(kind: str, is_classified: bool) -> None:
    """Also rows of the lowest number alone, whose gradients PyTorch's CPU kernel gets wrong."""
    mask = drawn_mask(kind, 2, 4, 70, 90)
    codes = attention_mask_tiles(mask) if is_classified else None
    leaves = operands()
    out, lse = attention(*leaves, None, None, None, mask, codes)
    assert lse.shape == ((2, 2, 4, 70) if mask.dtype.is_floating_point else (2, 4, 70))
    compare(out, formula(*leaves, mask), leaves, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [kind for kind in MASKS if "lowest" not in kind])
def test_every_mask_is_that_of_torch(kind: str) -> None:
    """Truth values and minus infinity: zeros for a query without keys, as its kernels give."""
    mask = drawn_mask(kind, 2, 4, 70, 90)
    leaves = operands(dtype=torch.float32)
    mask = mask.float() if mask.dtype.is_floating_point else mask
    wanted = F.scaled_dot_product_attention(*leaves, mask, enable_gqa=True)
    out, _ = attention(*leaves, None, None, None, mask)
    compare(out, wanted, leaves, rtol=1e-4, atol=1e-4)


def test_many_blocks_of_queries_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_SCORES", 16)
    for kind in MASKS:
        mask, leaves = drawn_mask(kind, 2, 4, 70, 90), operands()
        out, _ = attention(*leaves, None, None, None, mask)
        compare(out, formula(*leaves, mask), leaves, rtol=1e-9, atol=1e-9)


def test_a_softcap_goes_with_truth_values() -> None:
    mask, leaves = drawn_mask("random", 2, 4, 70, 90), operands()
    k, v = (each.repeat_interleave(2, 1) for each in leaves[1:])
    score = 3.0 * torch.tanh(leaves[0] @ k.mT * 8**-0.5 / 3.0)
    wanted = score.masked_fill(~mask, -math.inf).softmax(-1) @ v
    out, _ = attention(*leaves, None, None, None, mask, softcap=3.0)
    compare(out, wanted, leaves, rtol=1e-9, atol=1e-9)


def test_nan_and_infinity_in_a_mask_reach_their_rows_alone() -> None:
    leaves = operands(dtype=torch.float32)
    mask = torch.zeros(1, 1, 70, 90)
    mask[..., 5, 3], mask[..., 7, 4] = math.nan, math.inf
    out, _ = attention(*leaves, None, None, None, mask)
    is_bad = out.isnan().any(-1)
    assert bool(is_bad[:, :, [5, 7]].all())
    assert int(is_bad.sum()) == 2 * is_bad[:, :, 0].numel()


def test_codes_of_tiles() -> None:
    """Positions beyond the ends are ignored."""
    mask = torch.zeros(1, 1, 70, 200, dtype=torch.bool)
    mask[..., :64, :64], mask[..., 64:, 192:], mask[..., 0, 64] = True, True, True
    wanted = [[FULL, PARTIAL, EMPTY, EMPTY], [EMPTY, EMPTY, EMPTY, FULL]]
    assert classify(mask)[0, 0].tolist() == wanted
    for lowest in (-math.inf, torch.finfo(torch.bfloat16).min, torch.finfo(torch.float16).min):
        bias = torch.where(mask, 0.0, lowest)
        assert classify(bias)[0, 0].tolist() == wanted
        bias[..., 3, :] = lowest  # a row without visible keys attends to the hidden ones
        first = [PARTIAL, PARTIAL, EMPTY, EMPTY] if lowest == -math.inf else 4 * [PARTIAL]
        assert classify(bias)[0, 0].tolist() == [first, wanted[1]]


def test_opcheck() -> None:
    for kind in ("random", "blocks, lowest number, rows without keys", "keys alone"):
        mask, leaves = drawn_mask(kind, 2, 4, 9, 11), operands(9, 11)
        codes = attention_mask_tiles(mask)
        torch.library.opcheck(attention_mask_tiles, (mask,))
        tables = (None, None, None, mask, codes)
        torch.library.opcheck(attention, (*leaves, *tables))
        out, lse = (each.detach() for each in attention(*leaves, *tables))
        plain = [each.detach() for each in leaves]
        settings = (None, None, None, 0.0, "zeros")
        arguments = (torch.randn_like(out), *plain, out, lse, *tables, *settings)
        torch.library.opcheck(attention_backward, arguments)


def test_sizes_may_be_dynamic() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        codes = attention_mask_tiles(mask)
        return attention(q, k, v, None, None, None, mask, codes)[0] * 2

    compiled = torch.compile(step, backend="aot_eager", dynamic=True, fullgraph=True)
    for queries, keys in ((5, 90), (66, 70), (80, 80)):
        leaves, mask = operands(queries, keys), drawn_mask("random", 2, 4, queries, keys)
        compare(compiled(*leaves, mask), step(*leaves, mask), leaves)


def test_a_mask_has_a_byte_for_each_tile() -> None:
    codes = attention_mask_tiles(torch.ones(2, 4, 100, 200).bool())
    assert codes.nbytes == 2 * 4 * 2 * 4


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"mask": torch.ones(2, 4, 9, 11).int()}, "mask is int32"),
    "dimensions": ({"mask": torch.ones(9, 11).bool()}, "mask is bool with 2 dimensions"),
    "shape": ({"mask": torch.ones(2, 4, 9, 12).bool()}, r"mask is \(2, 4, 9, 12\); \(2, 4, 9, 11"),
    "heads": ({"mask": torch.ones(2, 2, 9, 11).bool()}, "or 1 in the place"),
    "codes alone": ({"mask_tiles": torch.ones(1, 1, 1, 1).byte()}, "without mask"),
    "codes": (
        {"mask": torch.ones(1, 1, 9, 11).bool(), "mask_tiles": torch.ones(1, 1, 2, 1).byte()},
        r"uint8 of \(1, 1, 1, 1\)",
    ),
    "another condition": ({"mask": torch.ones(1, 1, 9, 11).bool(), "ahead": 0}, "decides alone"),
    "mean": ({"mask": torch.ones(1, 1, 9, 11).bool(), "empty_rows": "mean"}, "decides alone"),
    "softcap": ({"mask": torch.ones(1, 1, 9, 11), "softcap": 2.0}, "under a softcap bool"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_words(name: str) -> None:
    changed, words = BAD[name]
    leaves = operands(9, 11, torch.float32)
    with pytest.raises(UnsupportedInputError, match=words):
        attention(*leaves, **changed)


def test_codes_of_what_is_no_mask_are_refused() -> None:
    for bad in (torch.ones(9, 11).bool(), torch.ones(1, 1, 9, 11).int()):
        with pytest.raises(UnsupportedInputError, match="attention_mask_tiles"):
            attention_mask_tiles(bad)


def test_a_mask_that_needs_a_gradient_is_refused() -> None:
    mask = torch.zeros(1, 1, 9, 11, requires_grad=True)
    with pytest.raises(UnsupportedInputError, match="needs a gradient"):
        attention(*operands(9, 11, torch.float32), None, None, None, mask)
