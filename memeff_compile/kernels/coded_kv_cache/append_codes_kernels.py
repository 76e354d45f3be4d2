# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Kernels that append tokens to a low-bit KV cache. The kernels write the latest tokens and the
first tokens exactly, and encode groups of other tokens.

Two programs per sequence and key-value head, one for keys and one for values, process the new
tokens in order. When the window (the memory for the latest tokens, which are stored exactly) is
full, a program encodes the oldest group of tokens. If several tokens are appended, as for a prompt,
another launch directly encodes the groups that contain only new tokens, with more programs. These
groups are never stored exactly. Programs read the cache's number of tokens from GPU memory. The
program that finishes last writes the new number, after all programs have read the old number.

The codes equal the codes of the reference implementation. Divisions are rounded to the nearest fp32
number, and a quotient halfway between two codes is rounded up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def parts_of(BITS, SHARES):
    """Return the number of column blocks: equal parts of the channels of a key or value.

    With 2 or 4 bits, a byte contains one code of each column block. If scales are per token, all
    codes of a token in one column block share a scale.
    """
    return SHARES if BITS >= 8 else 4 if BITS == 3 else 8 // BITS


@triton.constexpr_function
def bits_of(C, IS_VALUE):
    """Return how many bits the code of one element of the cached keys, or values, has."""
    return C.V_BITS if IS_VALUE else C.BITS


@triton.jit
def _over(x, step, IS_FAST: tl.constexpr):
    """Return x / step, rounded to the nearest fp32 number.

    With IS_FAST, the function computes the quotient with fused multiply-adds, without the branches
    that a division has.
    """
    if IS_FAST:
        # Scaling by powers of two keeps the following numbers away from the limits of fp32.
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
    """Return the codes of x as int32.

    With IS_PER_HEAD, codes are symmetric around zero, and the zero point `zero` is not used.
    """
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
    """Return a quantisation step rounded to the dtype of `ptr`, or 1 if the rounded step is 0."""
    step = step.to(ptr.dtype.element_ty)
    return tl.where(step.to(tl.float32) == 0.0, 1.0, step.to(tl.float32))


@triton.jit
def _between(x, is_left_out):
    """Return the smallest and the largest number of each column of `x`.

    Rows for which `is_left_out` is true are ignored. If all rows are, the result is 0 and 0.
    """
    low = tl.min(tl.where(is_left_out, float("inf"), x), axis=0)
    high = tl.max(tl.where(is_left_out, float("-inf"), x), axis=0)
    is_empty = low > high
    return tl.where(is_empty, 0.0, low), tl.where(is_empty, 0.0, high)


@triton.jit
def _scaled(low, high, most, scales_base, place):
    """Store the quantisation step and the zero point for numbers from `low` to `high`.

    Return both as they were rounded for storage.
    """
    kind: tl.constexpr = scales_base.dtype.element_ty
    step, zero = _steps(low, high, most, scales_base)
    tl.store(scales_base + 2 * place, step.to(kind))
    tl.store(scales_base + 2 * place + 1, zero.to(kind))
    return step, zero


@triton.jit
def _steps(low, high, most, scales_base):
    """Return the quantisation step and the zero point for numbers from `low` to `high`, rounded to
    the dtype of scales."""
    kind: tl.constexpr = scales_base.dtype.element_ty
    step = _stored(tl.div_rn(high - low, most), scales_base)
    return step, low.to(kind).to(tl.float32)


@triton.jit
def _load_rows(base, slot, column, row, step, IS_VALUE: tl.constexpr):
    """Load some channels of some tokens' keys or values, in fp32.

    A token's offset from `base` is `slot * row`, and a channel's is `column * step`. The result is
    (tokens, channels) for keys and (channels, tokens) for values.
    """
    if IS_VALUE:
        x = tl.load(base + slot[None, :] * row + column[:, None] * step)
    else:
        x = tl.load(base + slot[:, None] * row + column[None, :] * step)
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
    """Add the codes of one column block to the bytes that are being packed, and return these bytes.

    Column blocks are equal parts of the channels of a key or value (`parts_of`). With 3-bit codes,
    the highest bit of each code goes to a second tensor, which is also returned. The function
    stores 8-bit codes immediately.
    """
    BITS: tl.constexpr = bits_of(C, IS_VALUE)
    low, high = made
    token, column = at
    if BITS == 8:
        if IS_VALUE:
            offs = (PART * SHARE + column)[:, None] * C.GROUP + token[None, :]
        else:
            offs = token[:, None] * C.DEPTH + (PART * SHARE + column)[None, :]
        tl.store(codes_base + offs, code.to(tl.uint8))
    elif BITS == 3:
        low |= (code & 3) << (2 * PART)
        high |= (code >> 2) << ((2 * PART + 2) % 8)
    else:
        low |= code << (PART * BITS)
    return low, high


@triton.jit
def _store_bytes(
    made, codes_base, at, C: tl.constexpr, SHARE: tl.constexpr, IS_VALUE: tl.constexpr
):
    """Store bytes of packed codes: the codes of some channels of some tokens' keys or values.

    The channels of a key or value are split into equal parts, the column blocks (`parts_of`). A
    column is a channel of such a block. A group is the tokens that are encoded together. `at`
    contains the indices of the tokens in their group, and the indices of the columns in a block. A
    byte contains the codes that have the same column index in all blocks. The function `_put` has
    packed the bytes. If codes have 8 bits, `_put` has already stored them.

    With 3-bit codes, the third (highest) bits of two tokens share a byte. For keys, the two tokens
    are neighbours. For values, token i of the first half of the given tokens shares a byte with
    token i of the second half.
    """
    BITS: tl.constexpr = bits_of(C, IS_VALUE)
    low, high = made
    token, column = at
    if BITS != 8:
        if IS_VALUE:
            offs = column[:, None] * C.GROUP + token[None, :]
        else:
            offs = token[:, None] * SHARE + column[None, :]
        tl.store(codes_base + offs, low.to(tl.uint8))
    if BITS == 3:
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
def _loaded(rows, token, column, C: tl.constexpr, IS_VALUE: tl.constexpr):
    """Load the keys, or the values, of some tokens, with one tensor per column block.

    Column blocks are equal parts of the channels of a key or value (`parts_of`). From each block,
    the function loads only some columns. `column` contains the indices of these columns in a block.
    """
    base, start, row, step = rows
    slot = (start + token) % C.WINDOW
    COUNT: tl.constexpr = parts_of(bits_of(C, IS_VALUE), C.DEPTH // C.CHANNELS)
    SHARE: tl.constexpr = C.DEPTH // COUNT
    found = ()
    for part in tl.static_range(COUNT):
        x = _load_rows(base, slot, part * SHARE + column, row, step, IS_VALUE)
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
    """Quantise keys, or values, with given quantisation steps, and store the codes.

    A group is the tokens that are encoded together. Column blocks are equal parts of the channels
    (`parts_of`). `token` contains the indices of the given tokens in their group, and `column` the
    indices of the given columns in each block.
    """
    BITS: tl.constexpr = bits_of(C, IS_VALUE)
    COUNT: tl.constexpr = parts_of(BITS, C.DEPTH // C.CHANNELS)
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
        code = _codes(x, step, zero, BITS, IS_PER_HEAD, C.IS_FAST)
        made = _put(made, code, codes_base, (token, column), part, C, SHARE, IS_VALUE)
    _store_bytes(made, codes_base, (token, column), C, SHARE, IS_VALUE)


@triton.jit
def _code_keys(
    rows,  # of the group: their memory, the first one's slot, strides of rows and columns
    codes_base,
    scales_base,
    left_out,  # this many first tokens are ignored in scales
    piece,
    C: tl.constexpr,
):
    """Encode the keys of a group of tokens with one scale per channel.

    The channels are divided into equal column blocks (`parts_of`). If PIECES programs share the
    group, a program encodes 1 / PIECES of the columns of each block. `piece` is the program's
    index.
    """
    COUNT: tl.constexpr = parts_of(C.BITS, C.DEPTH // C.CHANNELS)
    SHARE: tl.constexpr = C.DEPTH // COUNT
    SOME: tl.constexpr = SHARE // C.PIECES
    most = tl.full((SOME,), (1 << C.BITS) - 1.0, tl.float32)
    token = tl.arange(0, C.GROUP)
    column = piece * SOME + tl.arange(0, SOME)
    parts = _loaded(rows, token, column, C, False)
    is_left_out = (token < left_out)[:, None]
    steps = ()
    zeros = ()
    for part in tl.static_range(COUNT):
        low, high = _between(parts[part], is_left_out)
        step, zero = _scaled(low, high, most, scales_base, part * SHARE + column)
        steps = steps + (step,)  # noqa: RUF005
        zeros = zeros + (zero,)  # noqa: RUF005
    _pack(parts, codes_base, token, column, steps, zeros, C, False, False)


@triton.jit
def _code_tokens(rows, codes_base, scales_base, piece, C: tl.constexpr, IS_VALUE: tl.constexpr):
    """Encode the keys, or the values, of a group of tokens with scales per token.

    `CHANNELS` channels of a token share a scale. If PIECES programs share the group, a program
    encodes 1 / PIECES of the tokens. `piece` is the program's index.
    """
    BITS: tl.constexpr = bits_of(C, IS_VALUE)
    COUNT: tl.constexpr = parts_of(BITS, C.DEPTH // C.CHANNELS)
    SHARE: tl.constexpr = C.DEPTH // COUNT
    SHARES: tl.constexpr = C.DEPTH // C.CHANNELS
    SOME: tl.constexpr = C.GROUP // C.PIECES
    AXIS: tl.constexpr = 0 if IS_VALUE else 1
    kind: tl.constexpr = scales_base.dtype.element_ty
    TOP: tl.constexpr = ((1 << (BITS - 1)) if C.IS_PER_HEAD else (1 << BITS)) - 1.0
    most = tl.full((SOME,), TOP, tl.float32)
    token = piece * SOME + tl.arange(0, SOME)
    if BITS == 3 and IS_VALUE:  # some tokens of either half, whose high bits share bytes
        some = tl.arange(0, SOME)
        token = some // (SOME // 2) * (C.GROUP // 2) + piece * (SOME // 2) + some % (SOME // 2)
    column = tl.arange(0, SHARE)
    parts = _loaded(rows, token, column, C, IS_VALUE)
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
def _code_group(
    rows, room, pair, coded, first, piece, groups, C: tl.constexpr, IS_VALUE: tl.constexpr
):
    """Encode the keys, or the values, of the group of tokens that starts at the position `coded`.

    If PIECES is 1, a program encodes the whole group. Otherwise, PIECES programs share the group,
    and the program with the index `piece` encodes one share.
    """
    SHARES: tl.constexpr = C.DEPTH // C.CHANNELS if IS_VALUE else 1
    BLOCK: tl.constexpr = C.GROUP * C.DEPTH * bits_of(C, IS_VALUE) // 8
    SCALES: tl.constexpr = (
        C.GROUP if C.IS_PER_HEAD else 2 * (C.GROUP * SHARES if IS_VALUE else C.DEPTH)
    )
    block = pair * groups + tl.minimum(coded // C.GROUP, groups - 1)
    codes, scales = room[0] + block * BLOCK, room[1] + block * SCALES
    if IS_VALUE or C.IS_PER_HEAD:
        _code_tokens(rows, codes, scales, piece, C, IS_VALUE)
    else:
        _code_keys(rows, codes, scales, first + C.KEPT - coded, piece, C)


@triton.jit
def _keep(x, position, is_token, first, kept, C: tl.constexpr):
    """Copy those new tokens that are among the first KEPT tokens of the sequence to the memory for
    tokens that are stored exactly, not as codes."""
    if C.KEPT > 0:
        row = (position - first)[:, None]
        place = row * C.DEPTH + tl.arange(0, C.DEPTH)[None, :]
        tl.store(kept + place, x, mask=is_token & (row >= 0) & (row < C.KEPT))


@triton.jit
def _base(source, pair, kv_heads):
    """Return the pointer to the new keys, or the new values, of one sequence and head."""
    return source[0] + pair // kv_heads * source[1] + pair % kv_heads * source[2]


@triton.jit
def _behind(length, coded, new, C: tl.constexpr):
    """Return how many tokens will be stored as codes after the new tokens are appended."""
    return coded + tl.maximum(length + new - coded - (C.WINDOW - C.GROUP), 0) // C.GROUP * C.GROUP


@triton.jit
def _walk(source, room, at, piece, sizes, C: tl.constexpr, IS_VALUE: tl.constexpr):
    """Write the new keys, or the new values, of one sequence and head.

    When the window of latest tokens is full, the function encodes the group of its oldest tokens.
    If another launch encodes this group, the function skips it.

    Return the new number of tokens in the cache, and the new number of tokens stored as codes.
    """
    length, coded, first = at
    kv_heads, groups, new, limit = sizes
    pair = tl.program_id(0).to(tl.int64)
    window, kept = room[2] + pair * (C.WINDOW * C.DEPTH), room[3] + pair * (C.KEPT * C.DEPTH)
    base = _base(source, pair, kv_heads)
    depth = tl.arange(0, C.DEPTH)
    tokens = tl.arange(0, C.TOKENS)
    done = length * 0
    before = length
    behind = _behind(length, coded, new, C)
    if length + new > limit:
        # The user must notice an overflow: attention returns nan until the cache is reset.
        nothing = tl.full((C.DEPTH,), float("nan"), tl.float32)
        last = (length + C.WINDOW - 1) % C.WINDOW
        tl.store(window + last * C.DEPTH + depth, nothing.to(room[2].dtype.element_ty))
        done += new
    while done < new:
        if C.TOKENS > 1 and coded >= before:
            # `_code_new_groups` has coded the tokens that follow; the last ones stay in the window.
            done = tl.maximum(done, new - C.WINDOW)
            length = before + done
            coded = behind
        count = tl.minimum(tl.minimum(new - done, coded + C.WINDOW - length), C.TOKENS)
        is_token = (tokens < tl.where(piece == 0, count, 0))[:, None]
        position = length + tokens
        x = tl.load(
            base + (done + tokens)[:, None] * source[3] + depth[None, :] * source[4],
            mask=is_token,
        )
        tl.store(
            window + (position % C.WINDOW)[:, None] * C.DEPTH + depth[None, :], x, mask=is_token
        )
        _keep(x, position, is_token, first, kept, C)
        done += count
        length += count
        if length - coded == C.WINDOW:
            tl.debug_barrier()  # the tokens just written are read by other threads
            if C.CODES_VALUES or not IS_VALUE:
                rows = (window, coded, C.DEPTH, 1)
                _code_group(rows, room, pair, coded, first, piece, groups, C, IS_VALUE)
            coded += C.GROUP
            tl.debug_barrier()  # the slots are free for the next tokens
    return length, coded


@triton.jit
def _code_new_groups(source, room, at, sizes, C: tl.constexpr, IS_VALUE: tl.constexpr):
    """Encode the keys, or the values, of some groups of GROUP new tokens.

    The cache also stores the first KEPT tokens of a sequence exactly. If some tokens of the encoded
    groups are among these first tokens, the function also copies them.
    """
    length, coded, first = at
    kv_heads, groups, new, limit = sizes
    pair = tl.program_id(0).to(tl.int64)
    kept = room[3] + pair * (C.KEPT * C.DEPTH)
    token = tl.arange(0, C.GROUP)
    depth = tl.arange(0, C.DEPTH)
    part = tl.program_id(1) // 2
    behind = _behind(length, coded, new, C)
    start = coded + (tl.cdiv(length - coded, C.GROUP) + part // C.PIECES) * C.GROUP
    while (start < behind) & (length + new <= limit):
        base = _base(source, pair, kv_heads) + (start - length) * source[3]
        rows = (base, 0, source[3], source[4])
        if C.CODES_VALUES or not IS_VALUE:
            _code_group(rows, room, pair, start, first, part % C.PIECES, groups, C, IS_VALUE)
        if start < first + C.KEPT:
            place = base + token[:, None] * source[3] + depth[None, :] * source[4]
            is_token = (token % C.PIECES == part % C.PIECES)[:, None]
            _keep(tl.load(place, is_token), start + token, is_token, first, kept, C)
        start += tl.num_programs(1) // (2 * C.PIECES) * C.GROUP


@triton.jit
def _begin(pool, C: tl.constexpr):
    """Return the number of tokens in the cache, the number of these that are stored as codes, and
    the position in the cache of this sequence's first token after padding.

    The first KEPT tokens of each sequence are stored exactly. If KEPT is 0, the cache stores no
    positions of first tokens. The function then returns 0 as the position, also for a sequence with
    padding.
    """
    length = tl.load(pool.counts)
    coded = tl.load(pool.counts + 1)
    first = length * 0
    if C.KEPT > 0:
        first += tl.load(pool.places + tl.program_id(0).to(tl.int64) * C.KEPT)
    return length, coded, first


@triton.jit
def _coded_kv_cache_append_codes_groups_kernel(
    k,  # as of `_coded_kv_cache_append_codes_rows_kernel`, which comes next and writes the rest
    v,
    pool,
    sizes,
    C: tl.constexpr,
):
    at = _begin(pool, C)
    if tl.program_id(1) % 2 == 0:
        room = (pool.k_codes, pool.k_scales, pool.k_window, pool.k_kept)
        _code_new_groups(k, room, at, sizes, C, False)
    else:
        rooms = (pool.v_codes, pool.v_scales, pool.v_window, pool.v_kept)
        _code_new_groups(v, rooms, at, sizes, C, True)


@triton.jit
def _coded_kv_cache_append_codes_rows_kernel(
    k,  # (B, KV_HEADS, new, D), as v `key_tiles.Cells`
    v,
    pool,  # `layout.Pool`
    sizes,  # key-value heads, groups, new tokens, limit
    C: tl.constexpr,
    # TOKENS: written at once, at most a group
    # PIECES: programs that share a group; one unless TOKENS is 1
    # IS_FAST: divides by fused products, which the interpreter rounds twice
):
    at = _begin(pool, C)
    piece = tl.program_id(1) // 2
    if tl.program_id(1) % 2 == 0:
        room = (pool.k_codes, pool.k_scales, pool.k_window, pool.k_kept)
        length, coded = _walk(k, room, at, piece, sizes, C, False)
    else:
        rooms = (pool.v_codes, pool.v_scales, pool.v_window, pool.v_kept)
        length, coded = _walk(v, rooms, at, piece, sizes, C, True)
    tl.debug_barrier()  # every thread has read the counts
    arrived = tl.atomic_add(pool.counts + 2, 1)
    if arrived == tl.num_programs(0) * (2 * C.PIECES) - 1:
        tl.store(pool.counts, length)
        tl.store(pool.counts + 1, coded)
        tl.store(pool.counts + 2, 0)
