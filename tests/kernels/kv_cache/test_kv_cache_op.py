"""The ops of kv_cache on the CPU: writes, reads, refusals, allocations."""

from __future__ import annotations

import math

import pytest
import sympy
import torch
from torch import Tensor

from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels._triton.gpus import gpu_of
from memeff_compile.kernels._triton.key_tiles import depth_block
from memeff_compile.kernels.kv_cache import (
    ENGINES,
    bytes_after,
    bytes_before,
    engine_for,
    kv_cache_append,
    kv_cache_attention,
    kv_cache_last,
    supports,
    supports_append,
)
from memeff_compile.kernels.kv_cache.shapes import (
    MAX_SPLITS,
    programs_per_processor,
    rows_for,
    shapes_for,
    splits_for,
)
from tests.support.live_bytes import LiveBytes

BUDGET = {
    torch.float64: 1e-12,
    torch.float32: 3e-6,
    torch.float16: 2**-9,
    torch.bfloat16: 2**-6,
}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def draw(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    queries: int = 1,
    keys: int = 40,
    depth: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    cache = (batch, kv_heads, keys, depth)
    q, k, v = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((batch, heads, queries, depth), cache, cache)
    )
    return q, k, v


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, last: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Softmax attention in float64 over visible keys; zeros if there are none."""
    repeat = q.shape[1] // k.shape[1]
    q, k, v = (t.double().nan_to_num() for t in (q, k, v))
    seen = torch.arange(k.shape[2]) <= last[:, None, :, None]
    seen = seen if mask is None else seen & mask
    score = q @ k.repeat_interleave(repeat, 1).transpose(2, 3) * scale
    weight = score.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num()
    return weight @ v.repeat_interleave(repeat, 1)


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
@pytest.mark.parametrize("heads", [2, 6], ids=["one head each", "three heads each"])
@pytest.mark.parametrize(
    "last",
    [
        torch.tensor([[30]]),
        torch.tensor([[5], [39]], dtype=torch.int32),
        torch.tensor([[10, 11, 12]]),
        torch.tensor([[0, -1, 70], [3, 2, 1]]),
    ],
    ids=["one position", "per sequence", "per query", "per both"],
)
@pytest.mark.parametrize("is_masked", [False, True], ids=["no mask", "mask"])
def test_attention_equals_a_float64_softmax(
    dtype: torch.dtype, heads: int, last: Tensor, is_masked: bool
) -> None:
    queries = last.shape[1]
    q, k, v = draw(heads=heads, queries=queries, dtype=dtype)
    mask = None
    if is_masked:
        mask = torch.rand(2, 1, queries, 40, generator=torch.Generator().manual_seed(1)) < 0.4
    for scale in (None, 0.7):
        found = kv_cache_attention(q, k, v, last, mask, scale)
        factor = q.shape[3] ** -0.5 if scale is None else scale
        expected = by_hand(q, k, v, last, mask, factor)
        assert float((found.double() - expected).abs().max()) <= BUDGET[dtype]
        assert found.dtype == dtype
        assert found.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("filled", [1, 7, 40])
def test_only_filled_keys_are_read(filled: int) -> None:
    """Keys beyond are nan; 0 * nan would show."""
    q, k, v = draw()
    k[:, :, filled:], v[:, :, filled:] = math.nan, math.nan
    last = torch.tensor([[filled - 1]])
    found = kv_cache_attention(q, k, v, last)
    assert float((found - by_hand(q, k, v, last, None, 0.25)).abs().max()) <= 1e-6


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    q, k, v = draw(queries=2)
    assert kv_cache_attention(q, k, v, torch.tensor([[-1]])).count_nonzero() == 0
    mask = torch.ones(1, 1, 2, 40, dtype=torch.bool)
    mask[:, :, 1] = False
    found = kv_cache_attention(q, k, v, torch.tensor([[39]]), mask)
    assert found[:, :, 1].count_nonzero() == 0
    assert found[:, :, 0].count_nonzero() > 0


@pytest.mark.parametrize("size", [{"batch": 0}, {"queries": 0}, {"keys": 0}], ids=str)
def test_empty_tensors_are_served(size: dict[str, int]) -> None:
    q, k, v = draw(**size)
    found = kv_cache_attention(q, k, v, torch.zeros(1, 1, dtype=torch.int64))
    assert found.shape == q.shape
    assert found.count_nonzero() == 0


def test_a_gradient_is_refused_with_a_sentence() -> None:
    q, k, v = draw()
    found = kv_cache_attention(q.requires_grad_(), k, v, torch.tensor([[3]]))
    with pytest.raises(UnsupportedInputError, match=r"under torch\.no_grad"):
        found.sum().backward()


@pytest.mark.parametrize("queries", [1, 3])
def test_last_names_the_last_key_of_each_query(queries: int) -> None:
    mask = torch.zeros(2, 1, queries, 9, dtype=torch.bool)
    mask[0, 0, :, 2], mask[0, 0, 0, 5] = True, True
    expected = [[5] + [2] * (queries - 1), [-1] * queries]
    assert kv_cache_last(mask).tolist() == expected


# --- append ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [[3], [4, 5, 6], [0, 9, 2], []], ids=str)
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
def test_append_writes_in_place_and_nowhere_else(positions: list[int], index: torch.dtype) -> None:
    _, k_cache, v_cache = draw(keys=10)
    _, k, v = draw(keys=len(positions))
    expected = k_cache.clone(), v_cache.clone()
    expected[0][:, :, positions], expected[1][:, :, positions] = k, v
    pointers = k_cache.data_ptr(), v_cache.data_ptr()
    kv_cache_append(k_cache, v_cache, k, v, torch.tensor(positions, dtype=index))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])
    assert (k_cache.data_ptr(), v_cache.data_ptr()) == pointers


def test_append_outside_the_cache_is_refused_as_in_eager() -> None:
    _, k_cache, v_cache = draw(keys=4)
    _, k, v = draw(keys=1)
    with pytest.raises(IndexError):
        kv_cache_append(k_cache, v_cache, k, v, torch.tensor([4]))


# --- the ops as PyTorch sees them -----------------------------------------------------------------


def test_opcheck_passes() -> None:
    q, k, v = draw(queries=2)
    last = torch.tensor([[3, 4]])
    torch.library.opcheck(kv_cache_attention, (q, k, v, last), test_utils=CHECKS)
    mask = torch.ones(1, 1, 2, 40, dtype=torch.bool)
    torch.library.opcheck(kv_cache_attention, (q, k, v, last, mask, 0.5), test_utils=CHECKS)
    torch.library.opcheck(kv_cache_last, (mask,), test_utils=CHECKS)
    new = draw(keys=2)
    operands = (k, v, new[1], new[2], torch.tensor([7, 8]))
    torch.library.opcheck(kv_cache_append, operands, test_utils=CHECKS)


GOOD_LAST = torch.zeros(1, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q": torch.ones(2, 4, 1, 16).half()}, "q has dtype float16 and k_cache float32"),
        ({"q": torch.ones(2, 3, 1, 16)}, "q has 3 heads and k_cache and v_cache 2"),
        ({"q": torch.ones(2, 4, 1, 8)}, "batch and depth need to be the same"),
        ({"q": torch.ones(4, 1, 16)}, "q has 3 dimensions"),
        ({"v_cache": torch.ones(2, 2, 41, 16)}, "they need the same shape"),
        ({"v_cache": torch.ones(2, 2, 40, 16).to(torch.int8)}, "v_cache has dtype int8"),
        ({"k_cache": torch.ones(2, 2, 40, 16).to_sparse()}, "stored as torch.sparse_coo"),
        ({"k_cache": torch.ones(2, 2, 40, 16, device="meta")}, "q is on cpu and k_cache on meta"),
        ({"last": torch.zeros(1, 1)}, "last is float32 with 2 dimensions"),
        ({"last": torch.zeros(1).long()}, "last is int64 with 1 dimensions"),
        ({"last": torch.zeros(3, 1).long()}, "last is (3, 1); (1 or 2, 1 or 1)"),
        ({"mask": torch.ones(1, 1, 1, 40)}, "mask is float32"),
        ({"mask": torch.ones(1, 4, 1, 40).bool()}, "mask is (1, 4, 1, 40)"),
        ({"mask": torch.ones(1, 1, 1, 39).bool()}, "mask is (1, 1, 1, 39)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_refused_with_a_sentence(changes: dict[str, Tensor], sentence: str) -> None:
    q, k, v = draw()
    given = {"q": q, "k_cache": k, "v_cache": v, "last": GOOD_LAST, "mask": None, **changes}
    found = supports(**given)  # type: ignore[arg-type]
    assert found is not None
    assert sentence in found
    with pytest.raises(UnsupportedInputError, match="kv_cache_attention: "):
        kv_cache_attention(*given.values())
    assert supports(q, k, v, GOOD_LAST) is None


def test_too_deep_heads_are_refused() -> None:
    deep = draw(depth=257)
    assert "1 to 256 is served" in str(supports(*deep, GOOD_LAST))


@pytest.mark.parametrize(
    ("k", "positions", "sentence"),
    [
        (torch.ones(2, 2, 1, 16), torch.tensor([1.0]), "positions is float32"),
        (torch.ones(2, 2, 1, 16), torch.tensor(1), "positions is int64 with 0 dimensions"),
        (torch.ones(2, 2, 1, 16).half(), torch.tensor([1]), "k has dtype float16"),
        (torch.ones(2, 1, 1, 16), torch.tensor([1]), "k is (2, 1, 1, 16); (2, 2, 1, 16) is"),
        (torch.ones(2, 2, 16), torch.tensor([1]), "k and its cache need"),
    ],
    ids=["dtype of positions", "rank of positions", "dtype", "shape", "rank"],
)
def test_a_bad_append_is_refused_with_a_sentence(
    k: Tensor, positions: Tensor, sentence: str
) -> None:
    _, k_cache, v_cache = draw()
    before = k_cache.clone()
    found = supports_append(k_cache, v_cache, k, k, positions)
    assert found is not None
    assert sentence in found
    with pytest.raises(UnsupportedInputError, match="kv_cache_append: "):
        kv_cache_append(k_cache, v_cache, k, k, positions)
    assert torch.equal(k_cache, before)


def test_engines_are_named() -> None:
    assert set(ENGINES) == {"split", "reference"}
    assert engine_for(torch.device("cpu"), torch.bfloat16) == "reference"


def test_shapes_follow_from_static_sizes() -> None:
    assert splits_for(8, 32768, 128, 132) == 16  # one wave of 128 programs
    assert splits_for(128, 32768, 128, 132) == 1
    assert splits_for(160, 8192, 128, 132) == 4  # one each would leave a second wave of 28
    assert splits_for(4096, 4096, 128, 132) == 1
    assert splits_for(1, 100, 128, 132) == 1
    assert splits_for(1, 1 << 20, 128, 132) == MAX_SPLITS
    assert rows_for(1, 2) == 16
    assert rows_for(100, 2) == 32


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("depth", [16, 64, 96, 128, 256])
def test_tiles_fit_the_shared_memory(
    depth: int, itemsize: int, capability: tuple[int, int]
) -> None:
    limit = {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99) << 10
    gpu = gpu_of(capability)
    shapes = shapes_for(depth, itemsize, 16, gpu)
    together = programs_per_processor(shapes, depth, itemsize, gpu)
    assert shapes.keys >= 16
    assert together * shapes.stages * shapes.keys * 2 * depth_block(depth) * itemsize <= limit


# --- memory ---------------------------------------------------------------------------------------


def test_formula_before_is_what_repeating_allocates() -> None:
    _, k, v = draw(keys=200, heads=4)
    b, h, n, d = sympy.symbols("B H N D", positive=True, integer=True)
    formula = bytes_before(b, h, n, d, dtype=torch.float32)
    with LiveBytes() as seen:
        held = [t[:, :, None].expand(2, 2, 2, 200, 16).reshape(2, 4, 200, 16) for t in (k, v)]
    assert int(formula.subs({b: 2, h: 4, n: 200, d: 16})) == seen.peak
    assert len(held) == 2


def test_formula_after_counts_the_shares() -> None:
    assert bytes_after(16, 32, 1, 128, splits=1) == 0
    assert bytes_after(16, 32, 1, 128, splits=5) == 4 * 5 * 16 * 32 * 130


def test_nothing_as_large_as_the_cache_is_allocated() -> None:
    q, k, v = draw(keys=20000, depth=64)
    with LiveBytes() as seen:
        kv_cache_attention(q, k, v, torch.tensor([[19999]]))
    assert seen.peak < k.numel()
