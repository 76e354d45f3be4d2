# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Appending to a coded cache: window, kept tokens and the groups that are due, in one launch.

Two programs per sequence and key-value head, one for keys and one for values, walk through the new
tokens. Whenever the window is full they code the oldest group. How many tokens there are is read on
the device. The last program to finish writes the new counts: all have read the old ones by then.

Codes equal the reference's: divisions are rounded to nearest, and halves go up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _over(x, step, IS_FAST: tl.constexpr):
    """Return x / step, rounded to nearest; with IS_FAST without branches, by fused products."""
    if IS_FAST:
        # Powers of two keep all that follows away from where numbers of 32 bits end.
        by = tl.where(step < 2.0**-40, 2.0**64, tl.where(step > 2.0**40, 2.0**-64, 1.0))
        step = step * by
        one = tl.full(step.shape, 1.0, tl.float32)
        inverse = tl.broadcast_to(tl.div_rn(one, step), x.shape)
        less = tl.broadcast_to(-step, x.shape)
        x = x * by
        found = x * inverse
        found = tl.fma(tl.fma(found, less, x), inverse, found)
        found = tl.fma(tl.fma(found, less, x), inverse, found)
    else:
        found = tl.div_rn(x, tl.broadcast_to(step, x.shape))
    return found


@triton.jit
def _codes(
    x, step, zero, BITS: tl.constexpr, IS_PER_HEAD: tl.constexpr, IS_FAST: tl.constexpr = False
):
    """Return the codes of x as int32; `zero` is not used with IS_PER_HEAD."""
    if IS_PER_HEAD:
        TOP: tl.constexpr = 1 << (BITS - 1)
        number = tl.floor(_over(x, step, IS_FAST) + 0.5)
        number = tl.clamp(number, 1.0 - TOP, TOP - 1.0) + TOP
    else:
        number = tl.floor(_over(x - zero, step, IS_FAST) + 0.5)
        number = tl.clamp(number, 0.0, (1 << BITS) - 1.0)
    return number.to(tl.int32)


@triton.jit
def _stored(step, ptr):
    """Round a step to the type that `ptr` points to; 1 where it vanishes."""
    step = step.to(ptr.dtype.element_ty)
    return tl.where(step.to(tl.float32) == 0.0, 1.0, step.to(tl.float32))


@triton.jit
def _between(x, is_left_out):
    """Return the least and the largest number of each column, 0 where all are left out."""
    low = tl.min(tl.where(is_left_out, float("inf"), x), axis=0)
    high = tl.max(tl.where(is_left_out, float("-inf"), x), axis=0)
    is_empty = low > high
    return tl.where(is_empty, 0.0, low), tl.where(is_empty, 0.0, high)


@triton.jit
def _scaled(low, high, most, scales_base, place):
    """Store the step and the zero of numbers between two; return them as they are stored."""
    kind: tl.constexpr = scales_base.dtype.element_ty
    step = _stored(tl.div_rn(high - low, most), scales_base)
    zero = low.to(kind).to(tl.float32)
    tl.store(scales_base + 2 * place, step.to(kind))
    tl.store(scales_base + 2 * place + 1, zero.to(kind))
    return step, zero


@triton.jit
def _load_window(base, slot, column, DEPTH: tl.constexpr, IS_VALUE: tl.constexpr):
    """Return (tokens, columns) of the window, (columns, tokens) of values, in fp32."""
    if IS_VALUE:
        x = tl.load(base + slot[None, :] * DEPTH + column[:, None])
    else:
        x = tl.load(base + slot[:, None] * DEPTH + column[None, :])
    return x.to(tl.float32)


@triton.jit
def _put(
    made,
    code,
    codes_base,
    at,
    PART: tl.constexpr,
    C: tl.constexpr,
    SHARE: tl.constexpr,
    IS_VALUE: tl.constexpr,
):
    """Return bytes, and bytes of high bits, with the codes of a part; store those of 8 bits."""
    low, high = made
    token, column = at
    if C.BITS == 8:
        if IS_VALUE:
            offs = (PART * SHARE + column)[:, None] * C.GROUP + token[None, :]
        else:
            offs = token[:, None] * C.DEPTH + (PART * SHARE + column)[None, :]
        tl.store(codes_base + offs, code.to(tl.uint8))
    elif C.BITS == 3:
        low |= (code & 3) << (2 * PART)
        high |= (code >> 2) << ((2 * PART + 2) % 8)
    else:
        low |= code << (PART * C.BITS)
    return low, high


@triton.jit
def _store_bytes(
    made, codes_base, at, C: tl.constexpr, SHARE: tl.constexpr, IS_VALUE: tl.constexpr
):
    """Store bytes that have the codes of all parts, of some tokens and columns of each part.

    Of 3 bits the high ones of two tokens share a byte: neighbours of keys, of values those in the
    two halves of `token`.
    """
    low, high = made
    token, column = at
    if C.BITS != 8:
        if IS_VALUE:
            offs = column[:, None] * C.GROUP + token[None, :]
        else:
            offs = token[:, None] * SHARE + column[None, :]
        tl.store(codes_base + offs, low.to(tl.uint8))
    if C.BITS == 3:
        PAIRS: tl.constexpr = token.shape[0] // 2
        behind = codes_base + C.GROUP * SHARE
        second = tl.arange(0, 2)
        if IS_VALUE:
            both = high.reshape((column.shape[0], 2, PAIRS)) << second[None, :, None]
            both = tl.sum(both, axis=1)
            pair = tl.min(token.reshape((2, PAIRS)), axis=0)
            offs = column[:, None] * (C.GROUP // 2) + pair[None, :]
        else:
            both = high.reshape((PAIRS, 2, column.shape[0])) << second[None, :, None]
            both = tl.sum(both, axis=1)
            pair = tl.min(token.reshape((PAIRS, 2)), axis=1) // 2
            offs = pair[:, None] * SHARE + column[None, :]
        tl.store(behind + offs, both.to(tl.uint8))


@triton.jit
def _loaded(window_base, slot, column, C: tl.constexpr, IS_VALUE: tl.constexpr):
    """Return the columns of each part of some tokens, as many parts as a byte has codes."""
    COUNT: tl.constexpr = (
        C.DEPTH // C.CHANNELS if C.BITS == 8 else (4 if C.BITS == 3 else 8 // C.BITS)
    )
    SHARE: tl.constexpr = C.DEPTH // COUNT
    found = ()
    for part in tl.static_range(COUNT):
        x = _load_window(window_base, slot, part * SHARE + column, C.DEPTH, IS_VALUE)
        found = found + (x,)  # noqa: RUF005
    return found


@triton.jit
def _pack(
    parts,  # of the group's numbers, as `_loaded` returns them
    codes_base,
    token,
    column,
    steps,  # of columns for keys, one tensor per part; of tokens otherwise, one per share
    zeros,
    C: tl.constexpr,
    IS_VALUE: tl.constexpr,
    IS_PER_HEAD: tl.constexpr,
):
    """Code some tokens and columns of a group with steps that are known, and store the bytes."""
    COUNT: tl.constexpr = (
        C.DEPTH // C.CHANNELS if C.BITS == 8 else (4 if C.BITS == 3 else 8 // C.BITS)
    )
    SHARE: tl.constexpr = C.DEPTH // COUNT
    none = tl.zeros(parts[0].shape, dtype=tl.int32)
    made = (none, none)
    for part in tl.static_range(COUNT):
        x = parts[part]
        if IS_VALUE:
            step = steps[part * SHARE // C.CHANNELS][None, :]
            zero = zeros[part * SHARE // C.CHANNELS][None, :]
        elif IS_PER_HEAD:
            step, zero = steps[0][:, None], zeros[0][:, None]
        else:
            step, zero = steps[part][None, :], zeros[part][None, :]
        code = _codes(x, step, zero, C.BITS, IS_PER_HEAD, C.IS_FAST)
        made = _put(made, code, codes_base, (token, column), part, C, SHARE, IS_VALUE)
    _store_bytes(made, codes_base, (token, column), C, SHARE, IS_VALUE)


@triton.jit
def _code_keys(
    window_base,
    codes_base,
    scales_base,
    coded,
    first_coded,  # tokens before it have no say in scales
    piece,
    C: tl.constexpr,
):
    """Code a group of keys, or a piece of each part's columns, with scales of its channels."""
    COUNT: tl.constexpr = (
        C.DEPTH // C.CHANNELS if C.BITS == 8 else (4 if C.BITS == 3 else 8 // C.BITS)
    )
    SHARE: tl.constexpr = C.DEPTH // COUNT
    SOME: tl.constexpr = SHARE // C.PIECES
    most = tl.full((SOME,), (1 << C.BITS) - 1.0, tl.float32)
    token = tl.arange(0, C.GROUP)
    column = piece * SOME + tl.arange(0, SOME)
    oldest = coded + token
    parts = _loaded(window_base, oldest % C.WINDOW, column, C, False)
    is_left_out = (oldest < first_coded)[:, None]
    steps = ()
    zeros = ()
    for part in tl.static_range(COUNT):
        low, high = _between(parts[part], is_left_out)
        step, zero = _scaled(low, high, most, scales_base, part * SHARE + column)
        steps = steps + (step,)  # noqa: RUF005
        zeros = zeros + (zero,)  # noqa: RUF005
    _pack(parts, codes_base, token, column, steps, zeros, C, False, False)


@triton.jit
def _code_tokens(
    window_base, codes_base, scales_base, coded, piece, C: tl.constexpr, IS_VALUE: tl.constexpr
):
    """Code a group, or a piece of its tokens, with scales of its tokens."""
    COUNT: tl.constexpr = (
        C.DEPTH // C.CHANNELS if C.BITS == 8 else (4 if C.BITS == 3 else 8 // C.BITS)
    )
    SHARE: tl.constexpr = C.DEPTH // COUNT
    SHARES: tl.constexpr = C.DEPTH // C.CHANNELS
    SOME: tl.constexpr = C.GROUP // C.PIECES
    AXIS: tl.constexpr = 0 if IS_VALUE else 1
    kind: tl.constexpr = scales_base.dtype.element_ty
    TOP: tl.constexpr = ((1 << (C.BITS - 1)) if C.IS_PER_HEAD else (1 << C.BITS)) - 1.0
    most = tl.full((SOME,), TOP, tl.float32)
    token = piece * SOME + tl.arange(0, SOME)
    if C.BITS == 3 and IS_VALUE:  # a piece of either half, whose high bits share bytes
        some = tl.arange(0, SOME)
        token = some // (SOME // 2) * (C.GROUP // 2) + piece * (SOME // 2) + some % (SOME // 2)
    column = tl.arange(0, SHARE)
    slot = (coded + token) % C.WINDOW
    parts = _loaded(window_base, slot, column, C, IS_VALUE)
    steps = ()
    zeros = ()
    for share in tl.static_range(SHARES):
        one = parts[share * (COUNT // SHARES)]
        low = tl.abs(one) if C.IS_PER_HEAD else one
        high = low
        for part in tl.static_range(COUNT // SHARES):
            x = parts[share * (COUNT // SHARES) + part]
            x = tl.abs(x) if C.IS_PER_HEAD else x
            low = tl.minimum(low, x)
            high = tl.maximum(high, x)
        if C.IS_PER_HEAD:
            step = _stored(tl.div_rn(tl.max(high, axis=AXIS), most), scales_base)
            zero = step
            tl.store(scales_base + token, step.to(kind))
        else:
            least, largest = tl.min(low, axis=AXIS), tl.max(high, axis=AXIS)
            step, zero = _scaled(least, largest, most, scales_base, share * C.GROUP + token)
        steps = steps + (step,)  # noqa: RUF005
        zeros = zeros + (zero,)  # noqa: RUF005
    _pack(parts, codes_base, token, column, steps, zeros, C, IS_VALUE, C.IS_PER_HEAD)


@triton.jit
def _walk(source, room, at, piece, sizes, C: tl.constexpr, IS_VALUE: tl.constexpr):
    """Write the new keys, or values, of one sequence and head; return the counts behind them."""
    codes_ptr, scales_ptr, window_ptr, kept_ptr = room
    x_ptr, stride_x_batch, stride_x_head, stride_x_token, stride_x_depth = source
    length, coded, first = at
    kv_heads, groups, new, limit = sizes
    pair = tl.program_id(0).to(tl.int64)
    SHARES: tl.constexpr = C.DEPTH // C.CHANNELS if IS_VALUE else 1
    BLOCK: tl.constexpr = C.GROUP * C.DEPTH * C.BITS // 8
    SCALES: tl.constexpr = (
        C.GROUP if C.IS_PER_HEAD else 2 * (C.GROUP * SHARES if IS_VALUE else C.DEPTH)
    )
    window = window_ptr + pair * (C.WINDOW * C.DEPTH)
    source_base = x_ptr + (pair // kv_heads) * stride_x_batch + (pair % kv_heads) * stride_x_head
    depth = tl.arange(0, C.DEPTH)
    tokens = tl.arange(0, C.TOKENS)
    done = length * 0
    if length + new > limit:
        # Nothing may be lost in silence: what attention returns is no number until a reset.
        nothing = tl.full((C.DEPTH,), float("nan"), tl.float32)
        last = (length + C.WINDOW - 1) % C.WINDOW
        tl.store(window + last * C.DEPTH + depth, nothing.to(window_ptr.dtype.element_ty))
        done += new
    while done < new:
        count = tl.minimum(tl.minimum(new - done, coded + C.WINDOW - length), C.TOKENS)
        is_token = ((tokens < count) & (piece == 0))[:, None]
        position = length + tokens
        x = tl.load(
            source_base
            + (done + tokens)[:, None] * stride_x_token
            + depth[None, :] * stride_x_depth,
            mask=is_token,
        )
        tl.store(
            window + (position % C.WINDOW)[:, None] * C.DEPTH + depth[None, :], x, mask=is_token
        )
        if C.KEPT > 0:
            row = (position - first)[:, None]
            place = pair * (C.KEPT * C.DEPTH) + row * C.DEPTH + depth[None, :]
            tl.store(kept_ptr + place, x, mask=is_token & (row >= 0) & (row < C.KEPT))
        done += count
        length += count
        if length - coded == C.WINDOW:
            tl.debug_barrier()  # the tokens just written are read by other threads
            block = pair * groups + tl.minimum(coded // C.GROUP, groups - 1)
            codes = codes_ptr + block * BLOCK
            scales = scales_ptr + block * SCALES
            if IS_VALUE or C.IS_PER_HEAD:
                _code_tokens(window, codes, scales, coded, piece, C, IS_VALUE)
            else:
                _code_keys(window, codes, scales, coded, first + C.KEPT, piece, C)
            coded += C.GROUP
            tl.debug_barrier()  # the slots are free for the next tokens
    return length, coded


@triton.jit
def _coded_kv_cache_append_kernel(
    k,  # (B, KV_HEADS, new, D), as v `key_tiles.Cells`
    v,
    pool,  # `layout.Pool`
    sizes,  # key-value heads, groups, new tokens, limit
    C: tl.constexpr,
    # TOKENS: written at once, at most a group
    # PIECES: programs that share a group; one unless TOKENS is
    # IS_FAST: divides by fused products, which the interpreter rounds twice
):
    length = tl.load(pool.counts)
    coded = tl.load(pool.counts + 1)
    first = length * 0
    if C.KEPT > 0:
        first += tl.load(pool.places + tl.program_id(0).to(tl.int64) * C.KEPT)
    piece = tl.program_id(1) // 2
    if tl.program_id(1) % 2 == 0:
        room = (pool.k_codes, pool.k_scales, pool.k_window, pool.k_kept)
        length, coded = _walk(k, room, (length, coded, first), piece, sizes, C, False)
    else:
        rooms = (pool.v_codes, pool.v_scales, pool.v_window, pool.v_kept)
        length, coded = _walk(v, rooms, (length, coded, first), piece, sizes, C, True)
    tl.debug_barrier()  # every thread has read the counts
    arrived = tl.atomic_add(pool.counts + 2, 1)
    if arrived == tl.num_programs(0) * (2 * C.PIECES) - 1:
        tl.store(pool.counts, length)
        tl.store(pool.counts + 1, coded)
        tl.store(pool.counts + 2, 0)
