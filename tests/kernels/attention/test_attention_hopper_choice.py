"""Which calls with padding or packed documents use attention's Gluon kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch._subclasses import FakeTensorMode

from memeff_compile.kernels._triton import compat
from memeff_compile.kernels._triton.conditions import Conditions
from memeff_compile.kernels.attention import hopper, hopper_gradients, tiles
from memeff_compile.kernels.attention.call import Call
from memeff_compile.kernels.device import gpu_of, planned_for

pytest.importorskip("triton")
RELEASE = compat.release

Sizes = tuple[int, int, int, int]  # sequences, heads, key heads, length


def call_of(
    sizes: Sizes,
    depth: int,
    *,
    masks: str = "key_mask",
    dtype: torch.dtype = torch.bfloat16,
    queries: int | None = None,
    **settings: Any,
) -> Call:
    batch, heads, groups, length = sizes
    lengths = (queries or length, length, length)
    told = {"ahead": 0, "behind": None, "scale": 0.1, "softcap": 0.0, "mean": False} | settings
    with FakeTensorMode():
        q, k, v = (
            torch.empty(batch, each, many, depth, dtype=dtype, device="cuda").transpose(1, 2)
            for each, many in zip(lengths, (heads, groups, groups), strict=True)
        )
        shown = torch.ones(batch, length, dtype=torch.bool, device="cuda")
        ids = [torch.zeros(batch, each, dtype=torch.int64, device="cuda") for each in lengths[:2]]
    found: list[Any] = [shown if "key_mask" in masks else None]
    found += ids if "ids" in masks else [None, None]
    return tiles._call(q, k, v, Conditions(*found, **told))


def choices(call: Call) -> tuple[bool, bool]:
    """Return whether the forward and the backward pass of a call use the Gluon kernels."""
    return hopper.is_faster(call), hopper_gradients.is_faster(call, call.q, call.q)


@pytest.fixture(autouse=True)
def pinned_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose as with a Triton with which these kernels were timed."""
    monkeypatch.setattr(compat, "release", lambda: (3, 6))


@pytest.mark.parametrize("masks", ["key_mask", "ids"])
@pytest.mark.parametrize(
    ("sizes", "depth", "settings"),
    [
        ((8, 32, 8, 2048), 128, {}),
        ((4, 32, 8, 2048), 128, {}),
        ((1, 32, 8, 8192), 128, {}),
        ((1, 32, 8, 32768), 128, {}),
        ((4, 32, 8, 4096), 128, {"dtype": torch.float16}),
        ((8, 16, 8, 4096), 128, {}),
        ((4, 32, 32, 4096), 96, {}),
        ((4, 32, 8, 4096), 128, {"behind": 1023}),
    ],
)
def test_calls_like_the_measured_ones_use_them(
    masks: str, sizes: Sizes, depth: int, settings: dict[str, Any]
) -> None:
    assert choices(call_of(sizes, depth, masks=masks, **settings)) == (True, True)


@pytest.mark.parametrize("masks", ["key_mask", "ids"])
@pytest.mark.parametrize("sizes", [(4, 32, 8, 4096), (8, 16, 4, 4096)])
def test_heads_of_64_use_them_in_the_forward_pass_alone(sizes: Sizes, masks: str) -> None:
    assert choices(call_of(sizes, 64, masks=masks)) == (True, False)


@pytest.mark.parametrize("masks", ["key_mask", "ids", "key_mask and ids"])
@pytest.mark.parametrize("settings", [{}, {"ahead": None}, {"behind": 1023}], ids=str)
def test_masks_and_ids_together_and_calls_without_a_causal_mask_use_them(
    masks: str, settings: dict[str, Any]
) -> None:
    for sizes in ((4, 32, 8, 4096), (8, 16, 8, 4096)):
        assert choices(call_of(sizes, 128, masks=masks, **settings)) == (True, True)


@pytest.mark.parametrize(
    ("masks", "settings", "expected"),
    [
        ("key_mask and ids", {}, (True, False)),
        ("key_mask", {"ahead": None}, (True, True)),
        ("key_mask", {"ahead": None, "dtype": torch.float16}, (True, True)),
        ("ids", {"ahead": None}, (True, False)),
        ("ids", {"ahead": None, "dtype": torch.float16}, (False, False)),
        ("key_mask and ids", {"ahead": None}, (False, False)),
        ("key_mask and ids", {"dtype": torch.float16}, (False, False)),
        ("key_mask and ids", {"behind": 1023}, (False, False)),
    ],
    ids=str,
)
def test_heads_of_64_use_them_where_they_were_faster(
    masks: str, settings: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    assert choices(call_of((16, 16, 16, 2048), 64, masks=masks, **settings)) == expected


@pytest.mark.parametrize("masks", ["key_mask", "ids"])
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": torch.float16, "depth": 64},
        {"ahead": None, "behind": 2000},
        {"ahead": 1},
        {"ahead": -1},
        {"behind": 1022},
        {"behind": 1023, "depth": 64},
        {"queries": 2048},
        {"mean": True},
        {"softcap": 30.0},
        {"scale": -0.1},
        {"scale": 0.0},
        {"depth": 80},
        {"depth": 256},
        {"masks": "key_mask and ids", "ahead": 1},
        {"masks": "key_mask and ids", "behind": 1022},
        {"sizes": (8, 8, 8, 4096)},  # few heads
        {"sizes": (1, 16, 8, 32768)},  # long
        {"sizes": (1, 32, 8, 16384), "depth": 64},
        {"sizes": (128, 32, 8, 2048)},  # many positions
        {"sizes": (2, 32, 8, 2048)},  # small
        {"sizes": (64, 32, 8, 1024)},  # short
        {"sizes": (1, 32, 8, 8192), "depth": 64},
        {"sizes": (2, 32, 8, 4096), "depth": 64},
    ],
    ids=str,
)
def test_other_calls_use_triton(masks: str, settings: dict[str, Any]) -> None:
    told: dict[str, Any] = {"sizes": (4, 32, 8, 4096), "depth": 128, "masks": masks} | settings
    assert choices(call_of(**told)) == (False, False)


def test_heads_of_64_without_masks_use_them_in_the_backward_pass() -> None:
    assert choices(call_of((4, 32, 8, 4096), 64, masks="none")) == (False, True)


def test_few_tiles_of_keys_use_triton_in_the_backward_pass() -> None:
    assert choices(call_of((1, 32, 4, 8192), 128)) == (True, False)


def test_strides_that_no_descriptor_has_use_triton() -> None:
    call, row = call_of((4, 32, 8, 4096), 128), 32 * 128 + 4  # not a multiple of 16 bytes
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    with FakeTensorMode():
        grad = torch.empty_strided(call.q.shape, (4096 * row, 128, row, 1), **like)
        expanded = torch.empty_strided(call.q.shape, (0, 128, 4096, 1), **like)
    for each in (grad, expanded):
        assert not hopper_gradients.is_faster(call, each, call.q)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_other_gpus_use_triton(capability: tuple[int, int]) -> None:
    call = call_of((4, 32, 8, 4096), 128)
    with planned_for(torch.device("cuda", 0), gpu_of(capability)):
        assert choices(call) == (False, False)


@pytest.mark.parametrize(
    ("masks", "depth", "expected"),
    [
        ("key_mask", 128, (False, False)),
        ("ids", 64, (False, False)),
        ("key_mask", 64, (False, False)),
        ("none", 64, (False, False)),
        ("none", 128, (True, True)),
    ],
)
def test_kernels_that_triton_3_9_spills_are_not_used(
    masks: str, depth: int, expected: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "release", lambda: (3, 9))
    assert choices(call_of((4, 32, 8, 4096), depth, masks=masks)) == expected


def test_the_release_is_the_installed_one() -> None:
    import triton

    assert RELEASE() == Version(triton.__version__).release[:2]


def test_versions_of_triton_without_the_needed_gluon_use_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "has_gluon", lambda: False)
    assert choices(call_of((4, 32, 8, 4096), 128)) == (False, False)
