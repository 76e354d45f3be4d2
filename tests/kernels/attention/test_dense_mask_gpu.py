"""memeff::attention on a GPU under mask tensors: float64, CUDA graphs, no host waits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.attention import attention, attention_mask_tiles
from memeff_compile.kernels.attention.mask_tiles import classify
from tests.support.dense_attention import MASKS, drawn_mask, largest

pytestmark = pytest.mark.gpu

BUDGET = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def operands(queries: int, keys: int, depth: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    like = {"device": "cuda", "dtype": dtype, "generator": generator}
    shapes = ((2, 8, queries, depth), *2 * [(2, 2, keys, depth)])
    return [torch.randn(shape, **like).requires_grad_() for shape in shapes]


def ours(leaves: list[Tensor], mask: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    out, lse = attention(*leaves, None, None, None, mask, attention_mask_tiles(mask))
    return (out.detach(), lse, *torch.autograd.grad(out, leaves, grad))


def exactly(leaves: list[Tensor], mask: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return out and the gradients in float64, from products and a softmax."""
    exact = [each.detach().double().requires_grad_() for each in leaves]
    k, v = (each.repeat_interleave(4, 1) for each in exact[1:])
    score = exact[0] @ k.mT * exact[0].shape[3] ** -0.5
    if mask.dtype == torch.bool:
        score = score.masked_fill(~mask, -math.inf)
    else:  # next to the lowest number of fp32 a score vanishes in fp32, as in float64 next to 1e300
        score = score + torch.where(mask < -1e30, 1e260 * mask.double(), mask.double())
    is_none = (score == -math.inf).all(-1, keepdim=True)
    out = score.masked_fill(is_none, 0.0).softmax(-1).masked_fill(is_none, 0.0) @ v
    return (out.detach(), *torch.autograd.grad(out, exact, grad.double()))


@pytest.mark.parametrize(
    ("depth", "dtype", "sizes"),
    [
        (64, torch.bfloat16, (512, 640)),
        (128, torch.float16, (300, 700)),
        (256, torch.bfloat16, (320, 320)),
        (80, torch.bfloat16, (1, 333)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", MASKS)
def test_every_mask_is_a_softmax_under_it(
    kind: str, depth: int, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    mask = drawn_mask(kind, 2, 8, *sizes)
    assert torch.equal(attention_mask_tiles(mask.cuda()).cpu(), classify(mask))
    mask, leaves = mask.cuda(), operands(*sizes, depth, dtype)
    grad = torch.randn_like(leaves[0])
    found, wanted = ours(leaves, mask, grad), exactly(leaves, mask, grad)
    for name, mine, theirs in zip("oqkv", (found[0], *found[2:]), wanted, strict=True):
        difference = largest(mine.double() - theirs)
        assert difference <= BUDGET[dtype] * max(1.0, largest(theirs)), (name, difference)


@pytest.mark.parametrize("kind", ["random", "numbers"])
def test_a_captured_call_follows_its_mask(kind: str) -> None:
    mask, leaves = drawn_mask(kind, 2, 8, 640, 640).cuda(), operands(640, 640, 64, torch.bfloat16)
    grad = torch.randn_like(leaves[0])
    ours(leaves, mask, grad)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        ours(leaves, mask, grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours(leaves, mask, grad)
    for seed in range(3):
        shown = drawn_mask("blocks of each head", 2, 8, 640, 640, seed).cuda()[:, :1]
        other = shown if kind == "random" else torch.where(shown, 0.0, -math.inf)[:1]
        mask.copy_(other.expand_as(mask))
        graph.replay()
        assert all(map(torch.equal, captured, ours(leaves, mask, grad)))


def test_nothing_waits_for_the_gpu_and_bits_are_the_same() -> None:
    for kind in ("random", "numbers"):
        mask = drawn_mask(kind, 2, 8, 300, 700).cuda()
        leaves = operands(300, 700, 64, torch.bfloat16)
        grad = torch.randn_like(leaves[0])
        first = ours(leaves, mask, grad)
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = ours(leaves, mask, grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(map(torch.equal, first, again))


def test_a_mask_of_more_than_32_bits_of_places() -> None:
    """1 x 4 x 32768 x 32768: the last rows of the last head, against float64."""
    length = 32768
    mask = torch.zeros(1, 4, length, length, dtype=torch.bool, device="cuda")
    mask[..., -300:, -500:] = True
    mask[..., :64] = True
    like = {"device": "cuda", "dtype": torch.bfloat16}
    leaves = [torch.randn(1, n, length, 64, **like).requires_grad_() for n in (4, 4, 4)]
    grad = torch.zeros_like(leaves[0])
    grad[:, -1, -200:] = torch.randn(200, 64, **like)
    found = ours(leaves, mask, grad)
    exact = [
        leaves[0].detach()[0, -1, -200:].double().requires_grad_(),
        *(each.detach()[0, -1].double().requires_grad_() for each in leaves[1:]),
    ]
    score = (exact[0] @ exact[1].mT / 8).masked_fill(~mask[0, -1, -200:], -math.inf)
    wanted = score.softmax(-1) @ exact[2]
    gradients = torch.autograd.grad(wanted, exact, grad[0, -1, -200:].double())
    mine = (found[0][0, -1, -200:], found[2][0, -1, -200:], *(each[0, -1] for each in found[3:]))
    for name, one, other in zip("oqkv", mine, (wanted, *gradients), strict=True):
        assert largest(one.double() - other) <= 3e-2 * max(1.0, largest(other)), name
