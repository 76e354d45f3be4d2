# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Kernels that append tokens to the caches of two layers, which share unit vectors (directions).

A direction is one unit vector for a token's keys, or values, in both layers. New tokens go to the
windows, in which each layer stores its latest tokens exactly. Complete groups of tokens are merged
across the two layers. One program per sequence and key-value head processes the keys and values of
both layers. The reason is that all four tensors together decide which rows (keys or values of a
token) stay unmerged. A shared direction is a weighted sum of a row of the lower layer and a row of
the upper layer. The two weights follow from three sums over the channels: of the squares in each
row, and of the products of both rows. So a program reads the rows twice, a few channels at a time.
The first time, the program computes the sums. The second time, the program computes and encodes the
direction. Programs read the cache's number of tokens from GPU memory. Of a launch's programs, the
one that ends last writes the new number of tokens.

Two other kernels merge the groups of a prompt. One kernel measures the distances between the rows
of both layers. Then plain PyTorch chooses the rows that stay unmerged, and the other kernel encodes
keys or values. The kernels for prompts read the key and value tensors that the model passes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .alignment_kernels import _centre, _centre_and_turn
from .append_codes_kernels import (
    _between,
    _codes,
    _load_rows,
    _put,
    _scaled,
    _steps,
    _store_bytes,
    bits_of,
    parts_of,
)


@triton.jit
def _angle(cosine):
    """Return the arc cosine with an error of at most 3e-8 (Abramowitz and Stegun 4.4.46)."""
    x = tl.abs(cosine)
    sum_of_powers = -0.0012624911 * x + 0.0066700901
    sum_of_powers = sum_of_powers * x - 0.0170881256
    sum_of_powers = sum_of_powers * x + 0.0308918810
    sum_of_powers = sum_of_powers * x - 0.0501743046
    sum_of_powers = sum_of_powers * x + 0.0889789874
    sum_of_powers = sum_of_powers * x - 0.2145988016
    sum_of_powers = sum_of_powers * x + 1.5707963050
    found = tl.sqrt(tl.maximum(1.0 - x, 0.0)) * sum_of_powers
    return tl.where(cosine < 0.0, 3.14159265358979 - found, found)


@triton.jit
def _sine(angle):
    """Return the sine of angles from 0 to pi, by a series with an error of at most 6e-8."""
    x = tl.minimum(angle, 3.14159265358979 - angle)
    y = x * x
    series = 1.0 - y / 110.0
    series = 1.0 - y / 72.0 * series
    series = 1.0 - y / 42.0 * series
    series = 1.0 - y / 20.0 * series
    series = 1.0 - y / 6.0 * series
    return x * series


@triton.jit
def _measure(lower, upper, slot, DEPTH: tl.constexpr, SHARE: tl.constexpr, GROUP: tl.constexpr):
    """Return the cosine of two layers' keys, or values, for each token of a group, and both norms.

    The memory at `lower` and at `upper` contains the keys, or values, of one head in the two
    layers, one row per token. `slot` contains the tokens' row numbers.
    """
    column = tl.arange(0, SHARE)
    first = tl.zeros((GROUP,), dtype=tl.float32)
    second = tl.zeros((GROUP,), dtype=tl.float32)
    both = tl.zeros((GROUP,), dtype=tl.float32)
    for part in tl.static_range(DEPTH // SHARE):
        x = _load_rows(lower, slot, part * SHARE + column, DEPTH, 1, False)
        y = _load_rows(upper, slot, part * SHARE + column, DEPTH, 1, False)
        first += tl.sum(x * x, axis=1)
        second += tl.sum(y * y, axis=1)
        both += tl.sum(x * y, axis=1)
    m = tl.sqrt(first)
    n = tl.sqrt(second)
    cosine = both / (tl.maximum(m, 1e-12) * tl.maximum(n, 1e-12))
    return tl.clamp(cosine, -1.0, 1.0), m, n


@triton.jit
def _factors(cosine, m, n, t, RULE: tl.constexpr):
    """Return the weights with which a token's keys in two layers add up to one unit vector.

    Values are treated likewise. The unit vector is the direction that the cache stores for both
    layers. The first weight multiplies the lower layer's key or value, the second the upper
    layer's. `m` and `n` are the norms of the lower layer's and of the upper layer's vector.
    """
    per_m = 1.0 / tl.maximum(m, 1e-12)
    per_n = 1.0 / tl.maximum(n, 1e-12)
    if RULE == 2:
        a = tl.where(m >= n, per_m, 0.0)
        b = tl.where(m >= n, 0.0, per_n)
    else:
        a = tl.zeros_like(cosine) + (1.0 - t)
        b = tl.zeros_like(cosine) + t
        if RULE == 0:
            angle = _angle(cosine)
            sine = _sine(angle)
            is_flat = sine < 1e-4
            per_sine = 1.0 / tl.maximum(sine, 1e-4)
            a = tl.where(is_flat, a, _sine((1.0 - t) * angle) * per_sine)
            b = tl.where(is_flat, b, _sine(t * angle) * per_sine)
        size = tl.sqrt(tl.maximum(a * a + b * b + 2.0 * a * b * cosine, 0.0))
        per_size = 1.0 / tl.maximum(size, 1e-12)
        a *= per_size * per_m
        b *= per_size * per_n
    return a, b


@triton.jit
def _direction(lower, upper, slot, column, a, b, DEPTH: tl.constexpr, IS_VALUE: tl.constexpr):
    """Return some channels of the unit vectors that replace the keys, or the values, of two layers.

    For a merged token's keys in two layers, the cache stores one unit vector, the direction: `a`
    times the lower layer's key plus `b` times the upper layer's key. Values are treated likewise.
    `column` contains the indices of the channels. The result is (tokens, channels) for keys and
    (channels, tokens) for values.
    """
    x = _load_rows(lower, slot, column, DEPTH, 1, IS_VALUE)
    y = _load_rows(upper, slot, column, DEPTH, 1, IS_VALUE)
    return x * a[None, :] + y * b[None, :] if IS_VALUE else x * a[:, None] + y * b[:, None]


@triton.jit
def _code_directions(
    pair,
    made,
    # of the group's first token: of either layer, where keys and values alternate; or, with one
    # norm, twice the place for how much longer the upper layer's value is
    norms,
    slot,
    found,  # as `_measure` returns it
    t,
    left,
    C: tl.constexpr,
    IS_VALUE: tl.constexpr,
):
    """Merge two layers' keys, or values, of one group of tokens, and encode the result.

    The two layers share one direction (unit vector) for a token's keys, and one for its values. The
    function encodes the directions. It also stores the lengths (norms) of the keys or values. The
    constant C.NORMS is the number of norms that the function stores per token. With 2, the function
    stores both layers' norms. With 1, the function multiplies the codes' scales (quantization
    steps and zero points) by the lower layer's norm. The function then stores only the upper
    layer's norm divided by the lower layer's norm.
    """
    lower, upper = pair
    codes_base, scales_base = made
    lower_norms, upper_norms = norms
    cosine, m, n = found
    is_left_out, is_kept = left
    BITS: tl.constexpr = bits_of(C, IS_VALUE)
    COUNT: tl.constexpr = parts_of(BITS, C.DEPTH // C.CHANNELS)
    SHARE: tl.constexpr = C.DEPTH // COUNT
    TURNED: tl.constexpr = IS_VALUE and BITS != 16
    AXIS: tl.constexpr = 0 if TURNED else 1
    kind: tl.constexpr = codes_base.dtype.element_ty
    token = tl.arange(0, C.GROUP)
    column = tl.arange(0, SHARE)
    a, b = _factors(cosine, m, n, t, C.RULE)
    steps = ()
    zeros = ()
    if BITS < 16 and IS_VALUE:
        most = tl.full((C.GROUP,), (1 << BITS) - 1.0, tl.float32)
        for share in tl.static_range(C.DEPTH // C.CHANNELS):
            some = share * C.CHANNELS + tl.arange(0, C.CHANNELS)
            e = _direction(lower, upper, slot, some, a, b, C.DEPTH, True)
            low, high = tl.min(e, axis=0), tl.max(e, axis=0)
            if C.NORMS == 2:
                step, zero = _scaled(low, high, most, scales_base, share * C.GROUP + token)
            else:
                step, zero = _steps(low, high, most, scales_base)
            steps = steps + (step,)  # noqa: RUF005
            zeros = zeros + (zero,)  # noqa: RUF005
    elif BITS < 16:
        most = tl.full((SHARE,), (1 << BITS) - 1.0, tl.float32)
        for part in tl.static_range(COUNT):
            e = _direction(lower, upper, slot, part * SHARE + column, a, b, C.DEPTH, False)
            low, high = _between(e, is_left_out[:, None])
            step, zero = _scaled(low, high, most, scales_base, part * SHARE + column)
            steps = steps + (step,)  # noqa: RUF005
            zeros = zeros + (zero,)  # noqa: RUF005
    square = tl.zeros((C.GROUP,), dtype=tl.float32)
    first = tl.zeros((C.GROUP,), dtype=tl.float32)
    second = tl.zeros((C.GROUP,), dtype=tl.float32)
    none = tl.zeros((SHARE, C.GROUP) if TURNED else (C.GROUP, SHARE), dtype=tl.int32)
    packed = (none, none)
    for part in tl.static_range(COUNT):
        at = part * SHARE + column
        e = _direction(lower, upper, slot, at, a, b, C.DEPTH, TURNED)
        if BITS == 16:
            plain = e.to(kind)
            decoded = plain.to(tl.float32)
            tl.store(codes_base + token[:, None] * C.DEPTH + at[None, :], plain)
        else:
            if IS_VALUE:
                step = steps[part * SHARE // C.CHANNELS][None, :]
                zero = zeros[part * SHARE // C.CHANNELS][None, :]
            else:
                step = steps[part][None, :]
                zero = zeros[part][None, :]
            code = _codes(e, step, zero, BITS, False)
            decoded = code.to(tl.float32) * step + zero
            packed = _put(packed, code, codes_base, (token, column), part, C, SHARE, TURNED)
        square += tl.sum(decoded * decoded, axis=AXIS)
        if C.IS_PROJECTED:
            x = _load_rows(lower, slot, at, C.DEPTH, 1, TURNED)
            first += tl.sum(x * decoded, axis=AXIS)
            y = _load_rows(upper, slot, at, C.DEPTH, 1, TURNED)
            second += tl.sum(y * decoded, axis=AXIS)
    if BITS != 16:
        _store_bytes(packed, codes_base, (token, column), C, SHARE, TURNED)
    if C.IS_PROJECTED:
        lower_norm = tl.maximum(first / tl.maximum(square, 1e-24), 0.0)
        upper_norm = tl.maximum(second / tl.maximum(square, 1e-24), 0.0)
    else:
        length = tl.maximum(tl.sqrt(square), 1e-12)
        lower_norm = m / length
        upper_norm = n / length
    lower_norm = tl.minimum(lower_norm, 65504.0)  # the largest float16
    upper_norm = tl.minimum(upper_norm, 65504.0)
    if not IS_VALUE:
        lower_norm = tl.where(is_kept, -1.0, lower_norm)
        upper_norm = tl.where(is_kept, -1.0, upper_norm)
    if C.NORMS == 2:
        tl.store(lower_norms + 2 * token, lower_norm.to(lower_norms.dtype.element_ty))
        tl.store(upper_norms + 2 * token, upper_norm.to(upper_norms.dtype.element_ty))
    else:
        # The scales contain the lower layer's lengths; a norm is the ratio of the upper layer's
        # length to the lower layer's.
        lower_norm = tl.maximum(lower_norm, 1e-3 * upper_norm)
        for share in tl.static_range(C.DEPTH // C.CHANNELS):
            place = scales_base + 2 * (share * C.GROUP + token)
            tl.store(place, (steps[share] * lower_norm).to(place.dtype.element_ty))
            tl.store(place + 1, (zeros[share] * lower_norm).to(place.dtype.element_ty))
        longer = tl.minimum(upper_norm / tl.maximum(lower_norm, 1e-30), 65504.0)
        tl.store(upper_norms + token, longer.to(upper_norms.dtype.element_ty))


@triton.jit
def _keep_rows(window, kept, slot, row, is_kept, DEPTH: tl.constexpr, SHARE: tl.constexpr):
    """Copy keys or values from a window of latest tokens to memory where they are stored exactly.

    Keys and values of other tokens are encoded, or merged with those of another layer. The function
    copies only the tokens for which `is_kept` is true.
    """
    for part in tl.static_range(DEPTH // SHARE):
        column = part * SHARE + tl.arange(0, SHARE)
        x = tl.load(window + slot[:, None] * DEPTH + column[None, :])
        offs = row.to(tl.int64)[:, None] * DEPTH + column[None, :]
        tl.store(kept + offs, x, mask=is_kept[:, None])


@triton.jit
def _write(x, window, at, DEPTH: tl.constexpr, WINDOW: tl.constexpr):
    """Write new keys, or values, of one sequence and head to the window of latest tokens."""
    x_ptr, stride_batch, stride_head, stride_token, stride_depth = x
    pair, kv_heads, done, position, is_token = at
    base = x_ptr + (pair // kv_heads) * stride_batch + (pair % kv_heads) * stride_head
    depth = tl.arange(0, DEPTH)
    token = tl.arange(0, position.shape[0])
    x = tl.load(
        base + (done + token)[:, None] * stride_token + depth[None, :] * stride_depth,
        mask=is_token[:, None],
    )
    tl.store(
        window + (position % WINDOW)[:, None] * DEPTH + depth[None, :], x, mask=is_token[:, None]
    )


@triton.jit
def _spoil(window, length, DEPTH: tl.constexpr, WINDOW: tl.constexpr):
    """Write nan for the last token in a window, so that the user notices an error.

    A window is the memory for a layer's latest tokens. Either the KV cache overflowed, or the two
    layers that share merged keys or values have different numbers of tokens.
    """
    depth = tl.arange(0, DEPTH)
    nothing = tl.full((DEPTH,), float("nan"), tl.float32)
    last = (length + WINDOW - 1) % WINDOW
    tl.store(window + last * DEPTH + depth, nothing.to(window.dtype.element_ty))


@triton.jit
def _coded_kv_cache_append_pairs_lower_kernel(
    k,  # (B, KV_HEADS, new, D), as v `key_tiles.Cells`
    v,
    k_window_ptr,  # (B, KV_HEADS, WINDOW, D)
    v_window_ptr,
    counts_ptr,  # (3,) int64
    sizes,
    DEPTH: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,  # at least `new`
):
    kv_heads, new, limit = sizes
    pair = tl.program_id(0).to(tl.int64)
    length = tl.load(counts_ptr)
    k_window = k_window_ptr + pair * (WINDOW * DEPTH)
    v_window = v_window_ptr + pair * (WINDOW * DEPTH)
    token = tl.arange(0, TOKENS)
    if length + new > limit:
        _spoil(k_window, length, DEPTH, WINDOW)
        _spoil(v_window, length, DEPTH, WINDOW)
    else:
        zero = length * 0
        _write(k, k_window, (pair, kv_heads, zero, length + token, token < new), DEPTH, WINDOW)
        _write(v, v_window, (pair, kv_heads, zero, length + token, token < new), DEPTH, WINDOW)
        length += new
    tl.debug_barrier()  # every thread has read the counts
    arrived = tl.atomic_add(counts_ptr + 2, 1)
    if arrived == tl.num_programs(0) - 1:
        tl.store(counts_ptr, length)
        tl.store(counts_ptr + 2, 0)


@triton.jit
def _coded_kv_cache_append_pairs_merge_kernel(
    lower_k_new,  # (B, KV_HEADS, new, D), as the others `key_tiles.Cells`; with HAS_LOWER
    lower_v_new,
    k,
    v,
    shared,  # `layout.Shared`
    lower,  # `layout.Own`, as upper
    upper,
    maps,  # `layout.Maps`, with IS_ALIGNED
    scratch_ptr,  # (B, KV_HEADS, 4, GROUP, D) fp32, with IS_ALIGNED
    sizes,  # key-value heads, groups, new tokens, limit
    t,
    gamma,
    C: tl.constexpr,
    # TOKENS: written at once, at most a group
):
    kv_heads, groups, new, limit = sizes
    BLOCK: tl.constexpr = C.GROUP * C.DEPTH if C.BITS == 16 else C.GROUP * C.DEPTH * C.BITS // 8
    K_SCALES: tl.constexpr = 0 if C.BITS == 16 else 2 * C.DEPTH
    V_SCALES: tl.constexpr = 0 if C.BITS == 16 else 2 * C.GROUP * (C.DEPTH // C.CHANNELS)
    SHARE: tl.constexpr = C.DEPTH // 2
    mine = tl.program_id(0).to(tl.int64)  # sequence and head of the upper layer
    pair = mine  # of the lower layer, and of the shared tensors
    if C.IS_ALIGNED:
        pair = mine // kv_heads * kv_heads + tl.load(maps.slots + mine)
    length = tl.load(upper.counts)
    coded = tl.load(upper.counts + 1)
    lower_length = tl.load(lower.counts)
    row_base = pair * (C.WINDOW * C.DEPTH)
    upper_base = mine * (C.WINDOW * C.DEPTH)
    lower_k = lower.k_window + row_base
    lower_v = lower.v_window + row_base
    upper_k = upper.k_window + upper_base
    upper_v = upper.v_window + upper_base
    windows = (lower_k, lower_v, upper_k, upper_v)
    token = tl.arange(0, C.TOKENS)
    member = tl.arange(0, C.GROUP)
    done = length * 0
    ahead = done
    if not C.HAS_LOWER:
        ahead += new
    if (length + new > limit) | (lower_length != length + ahead):
        for window in tl.static_range(4):
            _spoil(windows[window], length, C.DEPTH, C.WINDOW)
        done += new
    while done < new:
        count = tl.minimum(tl.minimum(new - done, coded + C.WINDOW - length), C.TOKENS)
        is_token = token < count
        position = length + token
        at = (pair, kv_heads, done, position, is_token)
        if C.HAS_LOWER:
            _write(lower_k_new, lower_k, at, C.DEPTH, C.WINDOW)
            _write(lower_v_new, lower_v, at, C.DEPTH, C.WINDOW)
        at = (mine, kv_heads, done, position, is_token)
        _write(k, upper_k, at, C.DEPTH, C.WINDOW)
        _write(v, upper_v, at, C.DEPTH, C.WINDOW)
        done += count
        length += count
        lower_length = length
        if length - coded == C.WINDOW:
            tl.debug_barrier()  # the tokens just written are read by other threads
            place = (coded + member).to(tl.int32)
            slot = place % C.WINDOW
            rows = windows
            row_of = slot
            if C.IS_ALIGNED:
                ROWS: tl.constexpr = C.GROUP * C.DEPTH
                base = scratch_ptr + mine * (4 * ROWS)
                rows = (base, base + ROWS, base + 2 * ROWS, base + 3 * ROWS)
                row_of = member
                for kind in tl.static_range(2):
                    mean_ptr = maps.lower_means + (pair * 2 + kind) * C.DEPTH
                    _centre(windows[kind], slot, C.DEPTH, mean_ptr, rows[kind], C, SHARE)
                    mean_ptr = maps.upper_means + (mine * 2 + kind) * C.DEPTH
                    turn_ptr = maps.turns + (mine * 2 + kind) * (C.DEPTH * C.DEPTH)
                    map_of = (mean_ptr, turn_ptr)
                    _centre_and_turn(
                        windows[2 + kind], slot, C.DEPTH, map_of, rows[2 + kind], C, SHARE
                    )
                tl.debug_barrier()  # other threads read the rows just written
            k_cosine, k_m, k_n = _measure(rows[0], rows[2], row_of, C.DEPTH, SHARE, C.GROUP)
            v_cosine, v_m, v_n = _measure(rows[1], rows[3], row_of, C.DEPTH, SHARE, C.GROUP)
            # The larger of two angles has the smaller cosine.
            apart = _angle(tl.minimum(k_cosine, v_cosine)) * 0.318309886183791
            behind = place - tl.load(shared.starts + pair)
            is_pinned = (behind >= 0) & (behind < C.KEEP_FIRST)
            counted = behind >= C.KEEP_FIRST
            bound = tl.load(shared.bound + pair)
            held = tl.load(shared.kept_count + pair)
            if C.KEEPS_ALL:
                bound = tl.full((), float("inf") if C.KEEPS_NEAREST else float("-inf"), tl.float32)
            else:
                high = tl.max(tl.where(counted, apart, float("-inf")), axis=0)
                low = tl.min(tl.where(counted, apart, float("inf")), axis=0)
                spread = gamma * (high - low)
                found = low + spread if C.KEEPS_NEAREST else high - spread
                bound = tl.where((bound != bound) & (low <= high), found, bound)
            tl.store(shared.bound + pair, bound)
            order = -apart if C.KEEPS_NEAREST else apart
            is_beyond = apart < bound if C.KEEPS_NEAREST else apart > bound
            is_beyond = counted & is_beyond
            order = tl.where(is_beyond, order, float("-inf"))
            is_ahead = (order[None, :] > order[:, None]) | (
                (order[None, :] == order[:, None]) & (member[None, :] < member[:, None])
            )
            rank = tl.sum((is_ahead & is_beyond[None, :]).to(tl.int32), axis=1)
            chosen = is_beyond & (rank < C.KEPT - C.KEEP_FIRST - held)
            is_kept = is_pinned | chosen
            row = tl.where(is_pinned, behind, C.KEEP_FIRST + held + rank)
            taken = tl.sum(chosen.to(tl.int32), axis=0)
            more = tl.load(shared.left_over + pair) + tl.sum(is_beyond.to(tl.int32), axis=0) - taken
            tl.debug_barrier()  # every thread has read the counts of this head
            tl.store(shared.kept_count + pair, held + taken)
            tl.store(shared.left_over + pair, more)
            tl.store(shared.places + pair * C.KEPT + row, place, mask=is_kept)
            kept = (lower.k_kept, lower.v_kept, upper.k_kept, upper.v_kept)
            for window in tl.static_range(4):
                kept_ptr = kept[window] + (pair if window < 2 else mine) * (C.KEPT * C.DEPTH)
                _keep_rows(windows[window], kept_ptr, slot, row, is_kept, C.DEPTH, SHARE)
            tile = tl.minimum(coded // C.GROUP, groups - 1)
            block = pair * groups + tile
            is_left_out = is_kept | (behind < 0)
            made = (shared.k_codes + block * BLOCK, shared.k_scales + block * K_SCALES)
            upper_block = mine * groups + tile
            norms = (lower.norms + block * (2 * C.GROUP), upper.norms + upper_block * (2 * C.GROUP))
            left, angles = (is_left_out, is_kept), (k_cosine, k_m, k_n)
            keys = (rows[0], rows[2])
            _code_directions(keys, made, norms, row_of, angles, t, left, C, False)
            made = (shared.v_codes + block * BLOCK, shared.v_scales + block * V_SCALES)
            norms, angles = (norms[0] + 1, norms[1] + 1), (v_cosine, v_m, v_n)
            values = (rows[1], rows[3])
            _code_directions(values, made, norms, row_of, angles, t, left, C, True)
            coded += C.GROUP
            tl.debug_barrier()  # the slots are free for the next tokens
    tl.debug_barrier()  # every thread has read the counts
    arrived = tl.atomic_add(upper.counts + 2, 1)
    if arrived == tl.num_programs(0) - 1:
        tl.store(upper.counts, length)
        tl.store(upper.counts + 1, coded)
        tl.store(upper.counts + 2, 0)
        tl.store(lower.counts, lower_length)
        tl.store(lower.counts + 1, coded)


@triton.jit
def _coded_kv_cache_append_pairs_measure_kernel(
    lower_k_ptr,  # (B, KV_HEADS, count, D), consecutive tokens are `k_rows` times D apart
    upper_k_ptr,
    stride_k_batch,
    stride_k_head,
    k_rows,
    lower_v_ptr,
    upper_v_ptr,
    stride_v_batch,
    stride_v_head,
    v_rows,
    apart_ptr,  # (B, KV_HEADS, count) fp32
    kv_heads,
    count,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    batch = pair // kv_heads
    head = pair % kv_heads
    place = tl.program_id(1).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    k_base = batch * stride_k_batch + head * stride_k_head
    v_base = batch * stride_v_batch + head * stride_v_head
    SHARE: tl.constexpr = DEPTH // 2
    k_cosine, _, _ = _measure(
        lower_k_ptr + k_base, upper_k_ptr + k_base, place * k_rows, DEPTH, SHARE, GROUP
    )
    v_cosine, _, _ = _measure(
        lower_v_ptr + v_base, upper_v_ptr + v_base, place * v_rows, DEPTH, SHARE, GROUP
    )
    # The larger of two angles has the smaller cosine.
    apart = _angle(tl.minimum(k_cosine, v_cosine)) * 0.318309886183791
    tl.store(apart_ptr + pair * count + place, apart)


@triton.jit
def _coded_kv_cache_append_pairs_code_kernel(
    lower_ptr,  # (B, KV_HEADS, count, D): keys or values
    upper_ptr,
    stride_batch,
    stride_head,
    rows,
    codes_ptr,  # (B, KV_HEADS, groups, BLOCK)
    scales_ptr,
    is_kept_ptr,  # (B, KV_HEADS, count) bytes
    starts_ptr,  # (B, KV_HEADS) int32
    lower_norms_ptr,  # (B, KV_HEADS, groups * GROUP, 2)
    upper_norms_ptr,
    heads_ptr,  # (B, KV_HEADS) int32, the upper layer's head of each slot, with IS_ALIGNED
    sizes,
    t,
    C: tl.constexpr,
):
    kv_heads, groups, count, earlier = sizes
    BLOCK: tl.constexpr = C.GROUP * C.DEPTH if C.BITS == 16 else C.GROUP * C.DEPTH * C.BITS // 8
    SCALES: tl.constexpr = (
        0 if C.BITS == 16 else 2 * C.GROUP * (C.DEPTH // C.CHANNELS) if C.IS_VALUE else 2 * C.DEPTH
    )
    pair = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1).to(tl.int64)
    place = tile * C.GROUP + tl.arange(0, C.GROUP)
    base = (pair // kv_heads) * stride_batch + (pair % kv_heads) * stride_head
    lower = lower_ptr + base
    upper = upper_ptr + base
    slot = place * rows
    cosine, m, n = _measure(lower, upper, slot, C.DEPTH, C.DEPTH // 2, C.GROUP)
    is_kept = tl.load(is_kept_ptr + pair * count + place) != 0
    is_left_out = is_kept | (earlier * C.GROUP + place < tl.load(starts_ptr + pair))
    tile += earlier
    block = pair * groups + tile
    VALUE: tl.constexpr = 1 if C.IS_VALUE else 0
    made = (codes_ptr + block * BLOCK, scales_ptr + block * SCALES)
    upper_block = block
    if C.IS_ALIGNED:
        upper_block = (pair // kv_heads * kv_heads + tl.load(heads_ptr + pair)) * groups + tile
    norms = (
        lower_norms_ptr + block * (2 * C.GROUP) + VALUE,
        upper_norms_ptr + upper_block * (2 * C.GROUP) + VALUE,
    )
    left = (is_left_out, is_kept)
    found = (cosine, m, n)
    _code_directions((lower, upper), made, norms, slot, found, t, left, C, C.IS_VALUE)
