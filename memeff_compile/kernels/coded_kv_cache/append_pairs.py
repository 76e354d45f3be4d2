"""The launchers that append to pairs of layers on CUDA, sm_80 or later: a kernel each, no sync."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from memeff_compile.kernels._triton.device import on_device
from memeff_compile.kernels.coded_kv_cache.layout import PLAIN, channel_group
from memeff_compile.kernels.coded_kv_cache.merging import RULES
from memeff_compile.kernels.coded_kv_cache.pair_reference import Merging


def append_lower(
    k_window: Tensor, v_window: Tensor, counts: Tensor, k: Tensor, v: Tensor, limit: int
) -> None:
    """Write tokens of the lower layer into its window; beyond `limit` there is no number there.

    Args:
        k_window, v_window: (B, H, W, D).
        counts: of the layer.
        k, v: (B, H, T, D), any strides.
        limit: tokens that the cache holds.
    """
    from memeff_compile.kernels.coded_kv_cache import append_pairs_kernels as kernels

    batch, heads, window, depth = k_window.shape
    new = k.shape[2]
    with on_device(k):
        kernels._coded_kv_cache_append_lower_kernel[(batch * heads,)](
            k,
            *k.stride(),
            v,
            *v.stride(),
            k_window,
            v_window,
            counts,
            heads,
            new,
            limit,
            DEPTH=depth,
            WINDOW=window,
            TOKENS=1 << (new - 1).bit_length(),
            num_warps=1 if new == 1 else 4,
        )


def append_pair(
    shared: Sequence[Tensor],
    lower: Sequence[Tensor],
    upper: Sequence[Tensor],
    lower_new: tuple[Tensor, Tensor] | None,
    upper_new: tuple[Tensor, Tensor],
    bits: int,
    recent: int,
    limit: int,
    settings: Merging,
) -> None:
    """Write tokens of both layers, or of the upper, and merge what is due.

    Beyond `limit`, or where the two layers have not come as far, nothing is written, and attention
    returns not-a-number until a reset.

    Args:
        shared, lower, upper: the tensors of a pair.
        lower_new: keys and values of the lower layer, or None where they are in its window.
        upper_new: (B, H, T, D) each, any strides.
        bits: of a code, or PLAIN.
        recent: tokens at the end that are never merged.
        limit: tokens that the cache holds.
        settings: how rows are merged.
    """
    from memeff_compile.kernels.coded_kv_cache import append_pairs_kernels as kernels

    k, v = upper_new
    lower_k, lower_v = upper_new if lower_new is None else lower_new
    batch, heads, window, depth = upper[0].shape
    group, new = window - recent, k.shape[2]
    with on_device(k):
        kernels._coded_kv_cache_append_pair_kernel[(batch * heads,)](
            lower_k,
            *lower_k.stride(),
            lower_v,
            *lower_v.stride(),
            k,
            *k.stride(),
            v,
            *v.stride(),
            *shared,
            *lower,
            *upper,
            heads,
            shared[0].shape[2],
            new,
            limit,
            float(settings.t),
            float(settings.gamma),
            DEPTH=depth,
            BITS=bits,
            GROUP=group,
            CHANNELS=depth // 2 if bits == PLAIN else channel_group(depth, "kivi"),
            WINDOW=window,
            KEPT=shared[4].shape[2],
            KEEP_FIRST=settings.keep_first,
            TOKENS=min(group, 1 << (new - 1).bit_length()),
            RULE=RULES.index(settings.rule),
            IS_PROJECTED=settings.scale == "projection",
            KEEPS_NEAREST=settings.reading == "similar",
            KEEPS_ALL=settings.gamma >= 1,
            HAS_LOWER=lower_new is not None,
            num_warps=8,
        )
