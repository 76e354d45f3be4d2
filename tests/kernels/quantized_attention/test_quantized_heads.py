"""Heads in few bits: the numbers of a per-head cache, with a gradient that passes through."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.coded_kv_cache import quantized_heads, reference


def drawn(dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(2, 3, 8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0, 3] = 0
    x[1, 2, 5, 0] = 50.0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("is_value", [False, True], ids=["key", "value"])
def test_heads_become_what_a_per_head_cache_holds(
    bits: int, dtype: torch.dtype, is_value: bool
) -> None:
    x = drawn(dtype)
    codes, scales = reference.encode(x[:, :, None], bits, "per_head", is_value=is_value)
    held = reference.decode(codes, scales, bits, x.shape[-1], is_value=is_value)
    assert torch.equal(quantized_heads(x, bits), held.to(dtype))


def test_a_second_rounding_changes_nothing() -> None:
    once = quantized_heads(drawn(), 4)
    torch.testing.assert_close(quantized_heads(once, 4), once, rtol=1e-6, atol=0)


def test_first_tokens_keep_their_own_bits() -> None:
    x = drawn()
    found = quantized_heads(x, 3, first=2, first_bits=4)
    assert torch.equal(found[:, :, :2], quantized_heads(x[:, :, :2], 4))
    assert torch.equal(found[:, :, 2:], quantized_heads(x[:, :, 2:], 3))
    longer = quantized_heads(x, 3, first=99)
    assert torch.equal(longer, quantized_heads(x, 4))


def test_the_gradient_passes_through_as_it_is() -> None:
    x, weight = drawn().requires_grad_(), torch.randn(2, 3, 8, 16)
    out = quantized_heads(x, 3, first=1)
    (out * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weight)
    with torch.no_grad():
        torch.testing.assert_close(out, quantized_heads(x, 3, first=1), rtol=0, atol=1e-5)


def test_unknown_bits_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedInputError, match="bits is 5; one of 8, 4, 3, 2 is needed"):
        quantized_heads(drawn(), 5)
    with pytest.raises(UnsupportedInputError, match="first_bits is 16"):
        quantized_heads(drawn(), 4, first=1, first_bits=16)
