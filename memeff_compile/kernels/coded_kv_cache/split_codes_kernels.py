# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""The two kernels of the attention implementation `codes`, for a KV cache with low-bit codes. Each
program of the first kernel attends to a share of the cache. The second kernel combines the partial
results.

The cache stores the keys and values of most tokens as codes. Tokens are encoded in groups of
consecutive tokens. The loop over the groups processes the codes of one or a few groups in each
step. Program i of n processes steps i, i + n, i + 2n and so on. After the codes, the program
processes tiles of the latest tokens and of the first tokens, which are stored exactly. Of these
tiles, too, each of the n programs processes every n-th. Scores have tokens as rows and query heads
as columns, so that keys and values are the left operands of the matrix products. The kernel reads
these left operands as bytes and unpacks them in registers. The smallest tile of a matrix product
has eight columns, so eight query heads fill it. If the query heads fill at most half of a tile, two
groups of tokens share the tile (HALVES). The first half of the columns has the queries for one
group, the second half has the queries for the next group. A matrix product multiplies the codes of
one group by all columns, and the kernel uses only this group's half of the result. At the end, each
half of the columns is a partial result of its own. Codes are not decoded. The query is multiplied
by the keys' scales, and the softmax weight by the values' scales. For each group of codes, the
kernel sums the query times the keys' zero points over the channels, and adds this sum to the
scores. The zero points of values are multiplied by the softmax weights. In registers, a program
sums these products over its groups, separately for each place in a group. It sums the softmax
weights in the same way. Only at the end does the program add up the sums of all places. So each
step of the loop over groups has only two kinds of reductions across threads. One is the sum of the
query times the keys' zero points, the other is the maximum of the scores. The sums run in a fixed
order.

With PACKED, the kernel unpacks four bytes at a time with 32-bit instructions into numbers that are
exact but very small. In bf16, an unpacked number is a code times a power of two, which can be as
small as 2 ** -133. So in bf16, queries and softmax weights are multiplied by 2 ** 64. Their
products with unpacked keys and values are multiplied by 2 ** 69. Triton's interpreter cannot run
the 32-bit instructions of PACKED, so under the interpreter PACKED is off. The interpreter also
cannot multiply bf16, so UPCAST widens operands to fp32 there.

In variable names, tokens are the tokens of one group, and rows are the query heads of one key-value
head. A part is the block of channels that one product covers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._triton.products_kernels import dot
from .._triton.split_softmax_kernels import of_shares, step

# Codes are loaded as numbers of 16 bits, two bytes each, and two of these become two bf16 numbers
# by masking all bits except one code of each. As bf16 numbers, whole numbers n below 256 are n * 2
# ** -133: those below 128 have no exponent, and the least exponent is the next bit. In half
# precision they are n * 2 ** -24. A code that lies n bits up from the last counts 2 ** n times.


@triton.constexpr_function
def _moved(name, source, right):
    """Return the assembly instruction that shifts an operand right by `right` bits into a
    register."""
    return f"{'shr' if right >= 0 else 'shl'}.b32 {name}, ${source}, {abs(right)}; "


@triton.constexpr_function
def _take_two(BITS, PART, BYTE):
    """Return assembly code that converts packed codes of one block of channels to numbers.

    For codes of fewer than 8 bits, a byte has one code from each channel block. PART is the number
    of the block whose codes are converted. The first operand of the assembly code contains two
    16-bit words. The codes are those in byte BYTE (0 or 1) of each word. For 3-bit codes, these
    bytes have only the low two bits, and the third bits come from a second operand. For 3-bit codes
    of the fourth block, both operands are first shifted. The shift moves the fourth block's bits to
    the positions from which the third block's bits are read.
    """
    place, is_last = (2, 1) if (BITS, PART) == (3, 3) else (PART, 0)
    width = 2 if BITS == 3 else BITS
    keep, high = ((1 << width) - 1) << (width * place), 4 << (2 * place)
    low = _moved("t", 1, 8 * BYTE + 2 * is_last)
    if BITS != 3:
        return "{ .reg .b32 t; " + low + f"and.b32 $0, t, 0x{keep:04x}{keep:04x}; }}"
    taken = f"and.b32 t, t, 0x{keep:04x}{keep:04x}; "
    both = f"lop3.b32 $0, u, 0x{high:04x}{high:04x}, t, 0xEA; }}"
    return "{ .reg .b32 t, u; " + low + _moved("u", 2, 8 * BYTE - 6 * is_last) + taken + both


# The high bits of the second of two tokens, put where those of the first are.
_SECOND = tl.constexpr("shr.b32 $0, $1, 1;")


@triton.jit
def _two(raw, ASM: tl.constexpr, kind: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,r", [raw], kind.value, is_pure=True, pack=2)


@triton.jit
def _two_high(raw, high, ASM: tl.constexpr, kind: tl.constexpr):
    both = [raw, high]
    return tl.inline_asm_elementwise(ASM, "=r,r,r", both, kind.value, is_pure=True, pack=2)


@triton.jit
def _code_of(raw, high, PLACE: tl.constexpr, BITS: tl.constexpr, kind: tl.constexpr):
    """Return the codes at one bit position of 16-bit words, converted to a given dtype."""
    if BITS == 3:
        HIGH_PLACE: tl.constexpr = PLACE // 8 * 8 + (PLACE + 2) % 8
        code = ((raw >> PLACE) & 3) | (((high >> HIGH_PLACE) & 1) << 2)
    else:
        code = (raw >> PLACE) & ((1 << BITS) - 1)
    return code.to(kind)


@triton.jit
def _numbers(
    raw,
    high,
    PART: tl.constexpr,
    C: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    kind: tl.constexpr,
):
    """Unpack the codes of one block of channels to numbers, (ROWS, COLUMNS): first the codes in
    even bytes, then the codes in odd bytes.

    `raw` contains 16-bit words of packed codes. PART is the number of the channel block. For 3-bit
    codes, `high` contains the third bits. On a GPU (`C.PACKED`), 32-bit instructions unpack several
    codes at a time. The numbers are then the codes times a very small power of two.
    """
    if not C.PACKED:
        even = _code_of(raw, high, PART * (2 if BITS == 3 else BITS), BITS, kind)
        odd = _code_of(raw, high, PART * (2 if BITS == 3 else BITS) + 8, BITS, kind)
    elif BITS == 3:
        even = _two_high(raw, high, _take_two(BITS, PART, 0), kind)
        odd = _two_high(raw, high, _take_two(BITS, PART, 1), kind)
    else:
        even = _two(raw, _take_two(BITS, PART, 0), kind)
        odd = _two(raw, _take_two(BITS, PART, 1), kind)
    return tl.permute(tl.join(even, odd), (0, 2, 1)).reshape((ROWS, COLUMNS))


@triton.jit
def _all_numbers(
    raw, high, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, kind: tl.constexpr
):
    """Unpack the codes of keys to numbers, (ROWS, COLUMNS), one block of channels after another.

    `raw` contains 16-bit words of packed codes. A byte has one code from each channel block. For
    3-bit codes, `high` contains the third bits.
    """
    PARTS: tl.constexpr = 8 // C.BITS if C.BITS != 3 else 4
    WIDTH: tl.constexpr = COLUMNS // PARTS
    first = _numbers(raw, high, 0, C, C.BITS, ROWS, WIDTH, kind)
    found = first
    if PARTS == 2:
        second = _numbers(raw, high, 1, C, C.BITS, ROWS, WIDTH, kind)
        both = tl.join(first, second)  # (ROWS, WIDTH, 2)
        found = tl.permute(both, (0, 2, 1)).reshape((ROWS, COLUMNS))
    if PARTS == 4:
        second = _numbers(raw, high, 1, C, C.BITS, ROWS, WIDTH, kind)
        third = _numbers(raw, high, 2, C, C.BITS, ROWS, WIDTH, kind)
        fourth = _numbers(raw, high, 3, C, C.BITS, ROWS, WIDTH, kind)
        four = tl.join(tl.join(first, third), tl.join(second, fourth))  # (ROWS, WIDTH, 2, 2)
        found = tl.permute(four, (0, 2, 3, 1)).reshape((ROWS, COLUMNS))
    return found


@triton.jit
def _side_by_side(tiles, HALVES: tl.constexpr):
    """Join one or two tiles along their columns."""
    if HALVES == 1:
        found = tiles[0]
    else:
        both = tl.permute(tl.join(tiles[0], tiles[1]), (0, 2, 1))
        found = both.reshape((both.shape[0], 2 * both.shape[2]))
    return found


_NARROW_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_NARROW_FP16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


@triton.jit
def _narrow(x, PACKED: tl.constexpr, kind: tl.constexpr):
    """Return x converted to a dtype; with PACKED, two numbers are converted at a time."""
    if not PACKED:
        found = x.to(kind)
    elif kind == tl.bfloat16:
        found = tl.inline_asm_elementwise(
            _NARROW_BF16, "=r,r,r", [x], tl.bfloat16, is_pure=True, pack=2
        )
    else:
        found = tl.inline_asm_elementwise(
            _NARROW_FP16, "=r,r,r", [x], tl.float16, is_pure=True, pack=2
        )
    return found


@triton.jit
def _pair_of(base, place):
    """Return two neighbouring numbers in fp32; 16-bit numbers are read with one load.

    One load has four bytes, because Triton does not prefetch smaller loads. Waiting for a smaller
    load takes longer than the rest of a loop iteration.
    """
    kind: tl.constexpr = base.dtype.element_ty
    if kind == tl.bfloat16:
        both = tl.load(base.to(tl.pointer_type(tl.uint32)) + place)
        first = (both << 16).to(tl.float32, bitcast=True)
        second = (both & 0xFFFF0000).to(tl.float32, bitcast=True)
    elif kind == tl.float16:
        both = tl.load(base.to(tl.pointer_type(tl.uint32)) + place)
        first = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        first = tl.load(base + 2 * place).to(tl.float32)
        second = tl.load(base + 2 * place + 1).to(tl.float32)
    return first, second


@triton.jit
def _seen(mask, batch, position, is_seen, mask_count):
    """Return which positions of the cache the attention mask does not hide."""
    mask_ptr, stride_batch, stride_key = mask
    found = tl.load(
        mask_ptr + batch * stride_batch + position.to(tl.int64) * stride_key,
        mask=is_seen & (position < mask_count),
        other=0,
    )
    return is_seen & (found != 0)


@triton.jit
def _gain(PART: tl.constexpr, C: tl.constexpr):
    """Return the factor by which the unpacked codes of one channel block of values are too large.

    A byte can have codes from several channel blocks, each at its own bits. PART is the number of
    the block. With the constant PACKED (on GPUs), unpacking does not move a code to the lowest
    bits. So the factor is 1 for the first block, and a larger power of two for a later block. The
    caller divides the sums of products by this factor. Without PACKED, and for 8-bit codes, the
    factor is 1.
    """
    AS_IT_LIES: tl.constexpr = C.PACKED and C.V_BITS != 8
    PLACE: tl.constexpr = 2 if C.V_BITS == 3 and PART == 3 else PART
    return (2 ** (PLACE * (4 if C.V_BITS == 4 else 2))) * 1.0 if AS_IT_LIES else 1.0


@triton.jit
def _choose(vectors, half, HALVES: tl.constexpr):
    """Return the vector (one number per token) for each column of a tile, as (tokens, columns).

    If the tile's columns are divided into halves, each half has its own vector. Otherwise the
    result is the only vector, as (tokens, 1).
    """
    if HALVES == 1:
        found = vectors[0][:, None]
    else:
        found = tl.where((half == 0)[None, :], vectors[0][:, None], vectors[1][:, None])
    return found


@triton.jit
def _of_both(high, IS_VALUE: tl.constexpr, PACKED: tl.constexpr):
    """Return two copies of `high`, one after the other. The second copy is shifted right by one
    bit.

    `high` contains the third bits of 3-bit codes of keys, or of values. Each of its bytes contains
    the third bits of two tokens, for four channels each. Decoding reads the same bit positions of
    both copies. There, the first copy has bits of the first token, and the second copy has bits of
    the second token.
    """
    if PACKED:
        second = tl.inline_asm_elementwise(
            _SECOND, "=r,r", [high], dtype=tl.uint16, is_pure=True, pack=2
        )
    else:
        second = high >> 1
    both = tl.join(high, second)
    if IS_VALUE:
        found = tl.permute(both, (0, 2, 1)).reshape((high.shape[0], 2 * high.shape[1]))
    else:
        found = tl.permute(both, (2, 0, 1)).reshape((2 * high.shape[0], high.shape[1]))
    return found


@triton.jit
def _attend_exact(
    bases,
    place,  # (TILE,) rows of the tile
    is_seen,  # (TILE,)
    q,  # (D, ROWS)
    scale,
    sums,
    C: tl.constexpr,
):
    """Compute the attention over one tile of tokens, and add it to the partial result.

    These tokens are stored exactly, not as codes.
    """
    PARTS: tl.constexpr = C.DEPTH // C.WIDTH
    LANES: tl.constexpr = C.ROWS // C.HALVES
    k_base, v_base = bases
    largest, total, accs = sums
    depth = tl.arange(0, C.DEPTH)
    width = tl.arange(0, C.WIDTH)
    offs = place.to(tl.int64) * C.DEPTH
    k = tl.load(k_base + offs[:, None] + depth[None, :], mask=is_seen[:, None], other=0.0)
    score = tl.zeros((k.shape[0], q.shape[1]), dtype=tl.float32)
    score = dot(k, q, score, C.UPCAST) * scale
    is_mine = tl.arange(0, q.shape[1]) < LANES
    score = tl.where(is_seen[:, None] & is_mine[None, :], score, float("-inf"))
    weight, shrink, higher = step(score, largest, 0)
    total = total * shrink + tl.sum(weight, axis=0)
    weight = weight.to(q.dtype)
    new = ()
    for part in tl.static_range(PARTS):
        v = tl.load(
            v_base + offs[None, :] + (part * C.WIDTH + width)[:, None],
            mask=is_seen[None, :],
            other=0.0,
        )
        new = new + (dot(v, weight, accs[part] * shrink[None, :], C.UPCAST),)  # noqa: RUF005
    return higher, total, new


@triton.jit
def _coded_kv_cache_split_codes_attention_kernel(
    q,  # (B, KV_HEADS * REPEAT, 1, D), and strides of its first, second and last axis
    pool,  # `layout.Pool`
    # (B, KV_HEADS, norm_count, 2) of key and value, with HAS_NORMS; of values, (B, KV_HEADS,
    # norm_count), with HAS_VALUE_NORMS
    norms_ptr,
    # of layers that are aligned: means (B, KV_HEADS, KINDS, D) with IS_ALIGNED; in the upper one,
    # with IS_TURNED, slots (B, KV_HEADS) int32 and, unless each layer has its own keys, turned
    # queries (B, KV_HEADS * REPEAT, D) fp32
    maps,
    mask,  # (B, mask_count) bytes and its strides, with HAS_MASK
    out_ptr,  # (B, KV_HEADS * REPEAT, D), with IS_ALONE
    share_ptr,  # (B, KV_HEADS, REPEAT, shares, D) fp32, otherwise
    stat_ptr,  # (2, B, KV_HEADS, REPEAT, shares) fp32: largest score in base 2, sum of weights
    scale,  # of the scores, in base 2
    sizes,  # stat_count: B * KV_HEADS * REPEAT * shares
    C: tl.constexpr,  # CHANNELS: of a value that share a scale
    # V_BITS: of a value's code; BITS: of a key's
    # WIDTH: channels of values per part
    # AT_ONCE: times HALVES groups per turn
    # HALVES: groups side by side in the columns of a tile
    # KINDS: 2, or 1 if only values are merged
):
    q_ptr, stride_q_batch, stride_q_head, stride_q_depth = q
    mask_ptr, stride_mask_batch, stride_mask_key = mask
    means_ptr, turned_ptr, slots_ptr = maps
    kv_heads, groups, norm_count, mask_count, splits, stat_count = sizes
    PARTS: tl.constexpr = C.DEPTH // C.WIDTH
    # Factors of queries and weights, and of their products. PACKED numbers are very small. A
    # weight's product with a scale uses the range of half precision, which cannot overflow there: a
    # scale is at most 2 ** 17 / (2 ** BITS - 1).
    kind: tl.constexpr = q_ptr.dtype.element_ty
    IS_WIDE: tl.constexpr = C.PACKED and kind == tl.bfloat16
    SMALL: tl.constexpr = 2.0 ** (-133 if IS_WIDE else -24) if C.PACKED else 1.0
    RAISE: tl.constexpr = 2.0**64 if IS_WIDE else 1.0
    V_RAISE: tl.constexpr = 2.0**64 if IS_WIDE else 2.0 ** (C.V_BITS - 2)
    K_LOWER: tl.constexpr = 1.0 / (SMALL * RAISE)
    V_LOWER: tl.constexpr = 1.0 / (SMALL * V_RAISE)
    # channels of keys whose codes share bytes
    K_WIDTH: tl.constexpr = C.DEPTH // (4 if C.BITS == 3 else 8 // C.BITS)
    TOP: tl.constexpr = 1 << (C.BITS - 1)
    V_TOP: tl.constexpr = 1 << (C.V_BITS - 1)
    LANES: tl.constexpr = C.ROWS // C.HALVES
    pair = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    shared = pair  # of the tensors that two layers share
    if C.IS_TURNED:
        shared = batch * kv_heads + tl.load(slots_ptr + pair)
    of_keys = shared
    if C.KINDS == 1:
        of_keys = pair
    length = tl.load(pool.counts)
    coded = tl.load(pool.counts + 1)
    tiles = tl.minimum(coded // C.GROUP, groups).to(tl.int32)
    first = 0
    if C.KEPT > 0:
        first = tl.load(pool.places + of_keys * C.KEPT)
    rows = tl.arange(0, C.ROWS)
    lanes = tl.arange(0, LANES)
    half = rows // LANES
    depth = tl.arange(0, C.DEPTH)
    width = tl.arange(0, C.WIDTH)
    tokens = tl.arange(0, C.GROUP)  # in the order of their codes in memory, as channels of keys
    tokens = tokens % (C.GROUP // 2) * 2 + tokens // (C.GROUP // 2)
    q_base = q_ptr + kv_head * C.REPEAT * stride_q_head + batch * stride_q_batch
    largest = tl.full((C.ROWS,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((C.GROUP, C.ROWS), dtype=tl.float32)
    accs = ()
    others = ()  # those of the second half: only that half of the columns is used there
    zeros = ()
    # Channels of keys in the order in which their codes come: a part's even ones, then its odd.
    inside = depth % K_WIDTH
    come = depth - inside + inside % (K_WIDTH // 2) * 2 + inside // (K_WIDTH // 2)
    # A key's code of a part counts as often as `_take_two` says; its query is that much smaller.
    gains = tl.full((C.DEPTH,), 1.0 / RAISE, dtype=tl.float32)
    if C.PACKED and C.BITS == 4:
        gains *= tl.where(depth < K_WIDTH, 1.0, 16.0)
    if C.PACKED and C.BITS < 4:
        gains *= tl.where(depth < K_WIDTH, 1.0, tl.where(depth < 2 * K_WIDTH, 4.0, 16.0))
    if C.PACKED and C.BITS == 2:
        gains *= tl.where(depth < 3 * K_WIDTH, 1.0, 4.0)
    if C.IS_TURNED and C.KINDS == 2:
        query_offs = (pair * C.REPEAT + lanes[None, :]) * C.DEPTH + come[:, None]
        query_ptrs = turned_ptr + query_offs
    else:
        query_ptrs = q_base + lanes[None, :] * stride_q_head + come[:, None] * stride_q_depth
    whole_query = tl.load(query_ptrs, mask=(lanes < C.REPEAT)[None, :], other=0.0).to(tl.float32)
    if C.IS_ALIGNED and C.KINDS == 2:
        # The scores of the mean key, which every merged key has.
        head = rows % LANES
        own_query = tl.load(
            q_base + head[None, :] * stride_q_head + depth[:, None] * stride_q_depth,
            mask=(head < C.REPEAT)[None, :],
            other=0.0,
        ).to(tl.float32)
        k_mean = tl.load(means_ptr + pair * (2 * C.DEPTH) + depth).to(tl.float32)
        of_mean = tl.sum(own_query * k_mean[:, None], axis=0) * scale
    query = whole_query / gains[:, None]
    for _ in tl.static_range(PARTS):
        accs = accs + (tl.zeros((C.WIDTH, C.ROWS), dtype=tl.float32),)  # noqa: RUF005
        others = others + (tl.zeros((C.WIDTH, C.ROWS), dtype=tl.float32),)  # noqa: RUF005
    for _ in tl.static_range(C.DEPTH // C.CHANNELS):
        zeros = zeros + (tl.zeros((C.GROUP, C.ROWS), dtype=tl.float32),)  # noqa: RUF005

    # Offsets of bytes within a block: keys token by token, values channel by channel.
    k_half = tl.arange(0, K_WIDTH // 2)
    v_half = tl.arange(0, C.GROUP // 2)
    k_place = tokens[:, None] * (K_WIDTH // 2) + k_half[None, :]
    v_place = width[:, None] * (C.GROUP // 2) + v_half[None, :]
    BEHIND: tl.constexpr = C.GROUP * C.DEPTH // 8  # the low bits of a block of 3 bits
    if C.BITS == 3:
        k_pair = tl.arange(0, C.GROUP // 2)
        k_high = BEHIND + k_pair[:, None] * (K_WIDTH // 2) + k_half[None, :]
    if C.V_BITS == 3:
        v_pair = tl.arange(0, C.GROUP // 4)
        v_high = BEHIND + width[:, None] * (C.GROUP // 4) + v_pair[None, :]
    K_PLACES: tl.constexpr = C.GROUP * C.DEPTH * C.BITS // 16
    V_PLACES: tl.constexpr = C.GROUP * C.DEPTH * C.V_BITS // 16
    k_base = pool.k_codes.to(tl.pointer_type(tl.uint16)) + of_keys * groups * K_PLACES
    v_base = pool.v_codes.to(tl.pointer_type(tl.uint16)) + shared * groups * V_PLACES
    K_SCALES: tl.constexpr = C.GROUP if C.IS_PER_HEAD else 2 * C.DEPTH
    V_SCALES: tl.constexpr = C.GROUP if C.IS_PER_HEAD else 2 * C.GROUP * (C.DEPTH // C.CHANNELS)
    ks_base = pool.k_scales + of_keys * groups * K_SCALES
    vs_base = pool.v_scales + shared * groups * V_SCALES
    wide_zero = pair * 0  # makes addresses 64-bit numbers

    for turn in tl.range(split, tl.cdiv(tiles, C.AT_ONCE * C.HALVES), splits, num_stages=C.STAGES):
        scores = ()
        v_norms = ()
        best = tl.full((C.GROUP, C.ROWS), float("-inf"), dtype=tl.float32)
        for at in tl.static_range(C.AT_ONCE):
            tile = (turn * C.AT_ONCE + at) * C.HALVES
            none = tl.zeros((C.GROUP, C.ROWS), dtype=tl.float32)
            biases = ()
            queries = ()
            k_steps = ()
            k_norms = ()
            more = ()
            for side in tl.static_range(C.HALVES):
                block = wide_zero + tl.minimum(tile + side, tiles - 1)
                if C.IS_PER_HEAD:
                    scaled = _narrow(query, C.PACKED, kind)
                    bias = -TOP * whole_query
                    step = tl.load(ks_base + block * K_SCALES + tokens).to(tl.float32)
                    k_steps = k_steps + (step,)  # noqa: RUF005
                else:
                    step, zero = _pair_of(ks_base + block * K_SCALES, come)
                    scaled = _narrow(query * step[:, None], C.PACKED, kind)
                    bias = whole_query * zero[:, None]
                queries = queries + (scaled,)  # noqa: RUF005
                biases = biases + (bias,)  # noqa: RUF005
                if C.HAS_NORMS:
                    place = block * C.GROUP + tokens
                    k_norm, v_norm = _pair_of(norms_ptr + pair * norm_count * 2, place)
                    k_norms = k_norms + (k_norm,)  # noqa: RUF005
                    more = more + (v_norm,)  # noqa: RUF005
                if C.HAS_VALUE_NORMS:
                    first_norm = norms_ptr + pair * norm_count + block * C.GROUP
                    if C.TOGETHER:
                        even, odd = _pair_of(first_norm, tl.arange(0, C.GROUP // 2))
                        v_norm = tl.permute(tl.join(even, odd), (1, 0)).reshape((C.GROUP,))
                    else:
                        v_norm = tl.load(first_norm + tokens).to(tl.float32)
                    more = more + (v_norm,)  # noqa: RUF005
            scaled = _side_by_side(queries, C.HALVES)
            score = none
            for side in tl.static_range(C.HALVES):
                block = wide_zero + tl.minimum(tile + side, tiles - 1)
                k_raw = tl.load(k_base + block * K_PLACES + k_place)
                k_more = k_raw
                if C.BITS == 3:
                    k_more = _of_both(tl.load(k_base + block * K_PLACES + k_high), False, C.PACKED)
                numbers = _all_numbers(k_raw, k_more, C, C.GROUP, C.DEPTH, kind)
                found = dot(numbers, scaled, none, C.UPCAST)
                score = found if side == 0 else tl.where((half == 0)[None, :], score, found)
            bias = tl.sum(_side_by_side(biases, C.HALVES), axis=0)
            # By fma, not a sum: otherwise Triton would delay the product until the zeros are added.
            score = tl.fma(
                score,
                tl.full((C.GROUP, C.ROWS), K_LOWER, tl.float32) * scale,
                tl.broadcast_to((bias * scale)[None, :], (C.GROUP, C.ROWS)),
            )
            if C.IS_PER_HEAD:
                score *= _choose(k_steps, half, C.HALVES)
            position = (tile + half)[None, :] * C.GROUP + tokens[:, None]
            is_seen = position < tiles * C.GROUP
            if C.HAS_NORMS:
                k_norm = _choose(k_norms, half, C.HALVES)
                score *= k_norm
                if C.IS_ALIGNED:
                    score += of_mean[None, :]
                is_seen = is_seen & (k_norm >= 0.0)  # a key with a negative norm is stored exactly
            elif C.KEPT > 0:
                is_seen = is_seen & ((position < first) | (position >= first + C.KEPT))
            if C.HAS_NORMS or C.HAS_VALUE_NORMS:
                v_norms = v_norms + (more,)  # noqa: RUF005
            if C.HAS_MASK:
                seen = tl.load(
                    mask_ptr + batch * stride_mask_batch + (wide_zero + position) * stride_mask_key,
                    mask=is_seen & (position < mask_count),
                    other=0,
                )
                is_seen = is_seen & (seen != 0)
            score = tl.where(is_seen, score, float("-inf"))
            best = tl.maximum(best, score)
            scores = scores + (score,)  # noqa: RUF005
        higher = tl.maximum(largest, tl.max(best, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(largest - base)
        largest = higher
        sums = sums * shrink[None, :]
        new_accs = ()
        new_others = ()
        new_zeros = ()
        for part in tl.static_range(PARTS):
            new_accs = new_accs + (accs[part] * shrink[None, :],)  # noqa: RUF005
            if C.HALVES == 2:
                new_others = new_others + (others[part] * shrink[None, :],)  # noqa: RUF005
        for share in tl.static_range(C.DEPTH // C.CHANNELS):
            new_zeros = new_zeros + (zeros[share] * shrink[None, :],)  # noqa: RUF005
        accs = new_accs
        if C.HALVES == 2:
            others = new_others
        zeros = new_zeros
        for at in tl.static_range(C.AT_ONCE):
            tile = (turn * C.AT_ONCE + at) * C.HALVES
            weight = tl.exp2(scores[at] - base[None, :])
            sums += weight
            if C.HAS_NORMS or C.HAS_VALUE_NORMS:
                weight *= _choose(v_norms[at], half, C.HALVES)
            scaled_of = ()
            new_zeros = ()
            for share in tl.static_range(C.DEPTH // C.CHANNELS):
                steps = ()
                pairs = ()
                for side in tl.static_range(C.HALVES):
                    block = wide_zero + tl.minimum(tile + side, tiles - 1)
                    if C.IS_PER_HEAD:
                        step = tl.load(vs_base + block * V_SCALES + tokens).to(tl.float32)
                        steps = steps + (step,)  # noqa: RUF005
                    else:
                        step, zero = _pair_of(vs_base + block * V_SCALES, share * C.GROUP + tokens)
                        steps = steps + (step,)  # noqa: RUF005
                        pairs = pairs + (zero,)  # noqa: RUF005
                step = _choose(steps, half, C.HALVES)
                scaled = _narrow(weight * (step * V_RAISE), C.PACKED, kind)
                if C.IS_PER_HEAD:
                    taken = (-V_TOP / V_RAISE) * scaled.to(tl.float32)
                else:
                    taken = weight * _choose(pairs, half, C.HALVES)
                scaled_of = scaled_of + (scaled,)  # noqa: RUF005
                new_zeros = new_zeros + (zeros[share] + taken,)  # noqa: RUF005
            zeros = new_zeros
            for side in tl.static_range(C.HALVES):
                block = wide_zero + tl.minimum(tile + side, tiles - 1)
                v_raw = tl.load(v_base + block * V_PLACES + v_place)
                v_more = v_raw
                if C.V_BITS == 3:
                    v_more = _of_both(tl.load(v_base + block * V_PLACES + v_high), True, C.PACKED)
                new_accs = ()
                for part in tl.static_range(PARTS):
                    if C.V_BITS == 8 and part > 0:
                        v_raw = tl.load(
                            v_base + block * V_PLACES + v_place + part * C.WIDTH * (C.GROUP // 2)
                        )
                    scaled = scaled_of[part * C.WIDTH // C.CHANNELS]
                    numbers = _numbers(
                        v_raw,
                        v_more,
                        0 if C.V_BITS == 8 else part,
                        C,
                        C.V_BITS,
                        C.WIDTH,
                        C.GROUP,
                        kind,
                    )
                    acc = accs[part] if side == 0 else others[part]  # type: ignore[var-annotated]
                    new_accs = new_accs + (dot(numbers, scaled, acc, C.UPCAST),)  # noqa: RUF005
                if side == 0:
                    accs = new_accs
                else:
                    others = new_accs

    total = tl.sum(sums, axis=0)
    whole = ()
    for part in tl.static_range(PARTS):
        acc = accs[part]
        if C.HALVES == 2:
            acc = tl.where((half == 0)[None, :], acc, others[part])
        zero = tl.sum(zeros[part * C.WIDTH // C.CHANNELS], axis=0)
        whole = whole + (acc * (V_LOWER / _gain(part, C)) + zero[None, :],)  # noqa: RUF005
    if C.IS_ALIGNED and not C.IS_TURNED:
        v_mean_ptr = means_ptr + (pair * C.KINDS + C.KINDS - 1) * C.DEPTH
        moved = ()
        for part in tl.static_range(PARTS):
            v_mean = tl.load(v_mean_ptr + part * C.WIDTH + width).to(tl.float32)
            moved = moved + (whole[part] + total[None, :] * v_mean[:, None],)  # noqa: RUF005
        whole = moved
    # Each half of the columns is a separate share.
    row_of = pair * C.REPEAT + rows % LANES
    share_of = split * C.HALVES + half
    shares = splits * C.HALVES
    if C.IS_TURNED:
        # The sum of merged values is rotated back when all shares are complete, so these shares are
        # separate.
        shares += splits
        is_row = rows % LANES < C.REPEAT
        merged = (largest, total, whole)
        _store_share(merged, share_ptr, stat_ptr, row_of * shares + share_of, is_row, stat_count, C)
        largest = tl.full((C.ROWS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((C.ROWS,), dtype=tl.float32)
        nothing = ()
        for _ in tl.static_range(PARTS):
            nothing = nothing + (tl.zeros((C.WIDTH, C.ROWS), dtype=tl.float32),)  # noqa: RUF005
        whole = nothing
    state = (largest, total, whole)
    # Tokens that are not in codes belong to the first half.
    is_row = rows < C.REPEAT
    whole_q = tl.load(
        q_base + rows[None, :] * stride_q_head + depth[:, None] * stride_q_depth,
        mask=is_row[None, :],
        other=0.0,
    )
    TILES: tl.constexpr = (C.WINDOW + C.WINDOW_TILE - 1) // C.WINDOW_TILE
    for tile in tl.range(split, TILES, splits, num_stages=1):
        slot = tile * C.WINDOW_TILE + tl.arange(0, C.WINDOW_TILE)
        position = coded + (slot + C.WINDOW - coded % C.WINDOW) % C.WINDOW
        is_seen = (position < length) & (slot < C.WINDOW)
        if C.HAS_MASK:
            is_seen = _seen(mask, batch, position, is_seen, mask_count)
        window = pair * (C.WINDOW * C.DEPTH)
        windows = (pool.k_window + window, pool.v_window + window)
        state = _attend_exact(windows, slot, is_seen, whole_q, scale, state, C)
    if C.KEPT > 0:
        turn = (split + splits - TILES % splits) % splits
        for tile in tl.range(turn, (C.KEPT + C.KEPT_TILE - 1) // C.KEPT_TILE, splits, num_stages=1):
            row = tile * C.KEPT_TILE + tl.arange(0, C.KEPT_TILE)
            position = tl.load(pool.places + of_keys * C.KEPT + row, mask=row < C.KEPT, other=-1)
            is_seen = (position >= 0) & (position < coded)
            if C.HAS_MASK:
                is_seen = _seen(mask, batch, position, is_seen, mask_count)
            kept = pair * (C.KEPT * C.DEPTH)
            both = (pool.k_kept + kept, pool.v_kept + kept)
            state = _attend_exact(both, row, is_seen, whole_q, scale, state, C)
    largest, total, accs = state
    if C.IS_ALONE:
        is_row = rows % LANES < C.REPEAT
        for part in tl.static_range(PARTS):
            channel = (part * C.WIDTH + width)[:, None]
            tl.store(
                out_ptr + row_of[None, :] * C.DEPTH + channel,
                (accs[part] / tl.where(total == 0.0, 1.0, total)[None, :]).to(
                    out_ptr.dtype.element_ty
                ),
                mask=is_row[None, :],
            )
    else:
        is_row = rows % LANES < C.REPEAT
        if C.IS_TURNED:
            is_row = rows < C.REPEAT
            share_of = splits * C.HALVES + split + rows * 0
        _store_share(state, share_ptr, stat_ptr, row_of * shares + share_of, is_row, stat_count, C)


@triton.jit
def _store_share(state, share_ptr, stat_ptr, place, is_row, stat_count, C: tl.constexpr):
    """Store a program's weighted sums, its largest score and its sum of softmax weights."""
    largest, total, accs = state
    width = tl.arange(0, C.WIDTH)
    is_there = is_row & (largest != float("-inf"))
    for part in tl.static_range(C.DEPTH // C.WIDTH):
        tl.store(
            share_ptr + place[None, :] * C.DEPTH + (part * C.WIDTH + width)[:, None],
            accs[part],
            mask=is_there[None, :],
        )
    tl.store(stat_ptr + place, largest, mask=is_row)
    tl.store(stat_ptr + stat_count + place, total, mask=is_row)


@triton.jit
def _coded_kv_cache_split_codes_turn_kernel(
    q,  # (B, HEADS, 1, D), and strides of its first, second and last axis
    turns_ptr,  # (B, KV_HEADS, 2, D, D)
    turned_ptr,  # (B, HEADS, D) fp32
    sizes,  # HEADS, and query heads per key-value head
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,  # query heads that one program rotates by the same map
):
    """Rotate the queries of the upper one of two layers that share the directions of their keys.

    The directions are unit vectors. Before the keys of the two layers were merged, rotation
    matrices made the upper layer's keys similar to the lower layer's keys. The kernel rotates the
    upper layer's queries by the same matrices.
    """
    q_ptr, stride_q_batch, stride_q_head, stride_q_depth = q
    heads, repeat = sizes
    first = tl.program_id(0).to(tl.int64) * AT_ONCE
    depth = tl.arange(0, DEPTH)
    channel = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    turn_ptr = turns_ptr + (first // repeat) * (2 * DEPTH * DEPTH)
    turn = tl.load(turn_ptr + depth[:, None] * DEPTH + channel[None, :]).to(tl.float32)
    for at in tl.static_range(AT_ONCE):
        row = first + at
        base = q_ptr + (row // heads) * stride_q_batch + (row % heads) * stride_q_head
        query = tl.load(base + depth * stride_q_depth).to(tl.float32)
        tl.store(turned_ptr + row * DEPTH + channel, tl.sum(query[:, None] * turn, axis=0))


@triton.jit
def _coded_kv_cache_split_codes_combine_turned_kernel(
    share_ptr,  # (rows, merged + exact, D) fp32: of merged tokens, then of those that are not
    stat_ptr,  # (2, rows, merged + exact) fp32
    out_ptr,  # (rows, D)
    means_ptr,  # (B, KV_HEADS, KINDS, D)
    turns_ptr,  # (B, KV_HEADS, KINDS, D, D)
    sizes,  # numbers of shares of either kind, query heads per key-value head, rows times shares
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    MERGED_BLOCK: tl.constexpr,
    EXACT_BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,  # rows that one program rotates by the same map
    KINDS: tl.constexpr,  # of which the last are values
):
    """Combine partial attention results of the upper of two layers that share unit vectors of
    values.

    The two layers share one unit vector for the values of a merged token. Before merging, a linear
    map (a mean and a rotation) made the upper layer's values similar to the lower layer's values.
    In the part that comes from merged tokens, also invert this map. Other tokens are stored
    exactly.
    """
    merged, exact, repeat, stat_count = sizes
    first = tl.program_id(0).to(tl.int64) * AT_ONCE
    depth = tl.arange(0, DEPTH)
    channel = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    share = tl.arange(0, MERGED_BLOCK)
    other = tl.arange(0, EXACT_BLOCK)
    low = float("-inf")
    map_of = (first // repeat + 1) * KINDS - 1
    turn_ptr = turns_ptr + map_of * (DEPTH * DEPTH)
    turn = tl.load(turn_ptr + channel[:, None] * DEPTH + depth[None, :]).to(tl.float32)
    mean = tl.load(means_ptr + map_of * DEPTH + channel).to(tl.float32)
    for at in tl.static_range(AT_ONCE):
        row = first + at
        place = row * (merged + exact) + share
        other_place = row * (merged + exact) + merged + other
        largest = tl.load(stat_ptr + place, mask=share < merged, other=low)
        other_largest = tl.load(stat_ptr + other_place, mask=other < exact, other=low)
        base = tl.maximum(tl.max(largest, axis=0), tl.max(other_largest, axis=0))
        base = tl.where(base == low, 0.0, base)
        weight = tl.exp2(largest - base)
        other_weight = tl.exp2(other_largest - base)
        total = tl.load(stat_ptr + stat_count + place, mask=share < merged, other=0.0)
        other_total = tl.load(stat_ptr + stat_count + other_place, mask=other < exact, other=0.0)
        of_merged = tl.sum(weight * total, axis=0)
        whole = of_merged + tl.sum(other_weight * other_total, axis=0)
        # Shares without tokens were never written.
        values = tl.load(
            share_ptr + place[:, None] * DEPTH + depth[None, :],
            mask=(largest != low)[:, None],
            other=0.0,
        )
        values = tl.sum(values * weight[:, None], axis=0)
        result = tl.sum(turn * values[None, :], axis=1)
        result += of_merged * mean
        values = tl.load(
            share_ptr + other_place[:, None] * DEPTH + channel[None, :],
            mask=(other_largest != low)[:, None],
            other=0.0,
        )
        result += tl.sum(values * other_weight[:, None], axis=0)
        result = result / tl.where(whole == 0.0, 1.0, whole)
        tl.store(out_ptr + row * DEPTH + channel, result.to(out_ptr.dtype.element_ty))


@triton.jit
def _coded_kv_cache_split_codes_combine_kernel(
    share_ptr,  # (rows, splits, D) fp32
    stat_ptr,  # (2, rows, splits) fp32
    out_ptr,  # (rows, D)
    splits,
    stat_count,
    DEPTH: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLIT_BLOCK)
    depth = tl.arange(0, DEPTH)
    place = row * splits + split
    largest = tl.load(stat_ptr + place, mask=split < splits, other=float("-inf"))
    total = tl.load(stat_ptr + stat_count + place, mask=split < splits, other=0.0)
    is_there = largest != float("-inf")  # the other shares were never written
    share = tl.load(
        share_ptr + place[:, None] * DEPTH + depth[None, :], mask=is_there[:, None], other=0.0
    )
    result = of_shares(largest, total, share)
    tl.store(out_ptr + row * DEPTH + depth, result.to(out_ptr.dtype.element_ty))
