# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of the gradient filters, which drop unlikely classes from a loss's gradients.

For each group of rows (128 tokens on a GPU), the kernels find the classes that a filter keeps, and
compute gradients only for these classes. The module `filtered` launches the kernels.

Rows (tokens) are sorted by an estimate of their probability mass in unlikely classes. A group
consists of TILE consecutive rows, and a block consists of at most 16 groups. One pass over all
classes computes the rows' largest logits and sums of exponentials, and a score for each class and
group. The score is the sum or the maximum of the class's probabilities in the group's rows. For
each of LEVELS thresholds, the pass also computes the probability mass that each row would lose if
classes of lower score were dropped. The pass stores no logits. For each block of rows, every class
then gets one 16-bit word. Each bit of the word tells whether the filter keeps the class in one of
the block's groups. Classes are sorted by these words, so that in nearly every tile the filter keeps
either all classes or none. For the tiles that the filter keeps, the logits are computed again,
CAPACITY tiles at a time, and their gradients are stored. The stored gradients still lack one factor
per row, by which the last kernel multiplies its results.

With UPCAST, operands are widened to fp32, because Triton's interpreter cannot multiply bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._head_loss.logits_kernels import (
    FAR,
    LN2,
    count_rows,
    halves_of,
    logits_of,
    quarter_of,
)
from .._triton.products_kernels import dot

# The number of bits of a word: one for each group of TILE rows in a block of rows.
GROUPS = tl.constexpr(16)
# The upper bound of scores, and the score of a class that is the target of one of the rows.
LARGEST = tl.constexpr(3.0e38)
KEPT = tl.constexpr(1.0e30)
# The kept elements of a row are multiplied by less than this.
MOST = tl.constexpr(256.0)


@triton.jit
def _finite(value):
    return (value == value) & (tl.abs(value) < float("inf"))


@triton.jit
def _gradient_filter_sample_kernel(
    weight_ptr,  # (V, D) contiguous
    target_ptr,  # (N,) original rows, any integers
    sample_ptr,  # (S, D) out
    class_ptr,  # (S,) int32 out
    rows,
    vocab,
    depth,
    likely,  # S's first classes are targets, the others are spread over the vocabulary
    spread,
    BLOCK: tl.constexpr,
):
    """Copy the rows of the weight for a sample of classes."""
    place = tl.program_id(0).to(tl.int64)
    source = tl.where(place < likely, place * rows // likely, 0)
    target = tl.load(target_ptr + source).to(tl.int64)
    target = tl.minimum(tl.maximum(target, 0), vocab - 1)
    column = tl.where(place < likely, target, (place - likely) * vocab // spread)
    tl.store(class_ptr + place, column.to(tl.int32))
    for start in range(0, depth, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        values = tl.load(weight_ptr + column * depth + offs, mask=offs < depth, other=0.0)
        tl.store(sample_ptr + place * depth + offs, values, mask=offs < depth)


@triton.jit
def _gradient_filter_estimate_kernel(
    products_ptr,  # (n, S) contiguous: of some rows with the sample's classes
    hidden_ptr,  # (N, D), original rows
    stride_hidden_row,
    weight_ptr,
    bias_ptr,  # (V,) or None
    class_ptr,  # (S,) int32
    target_ptr,  # (N,) int32, compact
    place_ptr,  # (N,) int32: compact row of each original row, or -1
    base_ptr,  # (N,) fp32, compact: in: the log-sum-exp in base 2 if HAS_LSE; else out: an estimate
    light_ptr,  # (N,) fp32 out, compact: logarithm of the mass in unlikely classes
    first_row,  # original
    vocab,
    depth,
    likely,
    spread,
    scale,
    softcap,
    C: tl.constexpr,
):
    """Estimate a row's log-sum-exp, and its probability mass in unlikely classes, from a sample of
    classes."""
    local = tl.program_id(0)
    row = first_row + local
    compact = tl.load(place_ptr + row)
    if compact >= 0:
        cap = (scale, softcap)
        offs = tl.arange(0, C.SAMPLE)
        is_class = offs < likely + spread
        column = tl.load(class_ptr + offs, mask=is_class, other=0)
        column = tl.where(is_class, column, vocab)
        s = tl.load(
            products_ptr + local.to(tl.int64) * (likely + spread) + offs, mask=is_class, other=0.0
        )
        z2, _slope = logits_of(s.to(tl.float32)[None, :], column, bias_ptr, vocab, cap, C)
        z2 = tl.sum(z2, axis=0)
        is_spread = offs >= likely
        peak = tl.max(tl.where(is_spread, z2, float("-inf")), axis=0)
        peak = tl.where(_finite(peak), peak, 0.0)
        mass = tl.sum(tl.where(is_spread, tl.exp2(z2 - peak), 0.0), axis=0)
        tail = peak + tl.log2(mass * (vocab / spread.to(tl.float32)))
        if C.HAS_LSE:
            base = tl.load(base_ptr + compact)
        else:
            target = tl.load(target_ptr + compact)
            has_target = (target >= 0) & (target < vocab)
            multiplied = tl.where(has_target, depth, 0)
            sums = tl.zeros((C.BLOCK,), tl.float32)
            for start in range(0, depth, C.BLOCK):
                at = start + tl.arange(0, C.BLOCK)
                mask = at < multiplied
                there = hidden_ptr + row.to(tl.int64) * stride_hidden_row + at
                e = tl.load(there, mask=mask, other=0.0)
                c = tl.load(weight_ptr + target.to(tl.int64) * depth + at, mask=mask, other=0.0)
                sums += e.to(tl.float32) * c.to(tl.float32)
            own = tl.zeros((1,), tl.float32) + tl.sum(sums, axis=0)
            its = tl.zeros((1,), tl.int32) + tl.where(has_target, target, vocab)
            own2, _slope = logits_of(own[:, None], its, bias_ptr, vocab, cap, C)
            likeliest = tl.max(tl.where(is_spread, float("-inf"), z2), axis=0)
            highest = tl.maximum(tl.sum(tl.sum(own2, axis=1), axis=0), likeliest)
            larger = tl.maximum(highest, tail)
            base = larger + tl.log2(tl.exp2(highest - larger) + tl.exp2(tail - larger))
            base = tl.where(_finite(base), base, 0.0)
            known = base
            if not C.SUMS:
                # No probability may be underestimated: a logit is at most the log-sum-exp.
                known = tl.where(_finite(highest), highest, 0.0)
            tl.store(base_ptr + compact, known)
        light = tail - base
        # Rows of nan come last among the rows that are not ignored.
        tl.store(light_ptr + compact, tl.where(_finite(light), light, LARGEST))


@triton.jit
def _level(index, highest, C: tl.constexpr):
    """Return levels: thresholds for the sum or the maximum of a class's probabilities.

    The sum or the maximum, over a group of rows (tokens), is the class's score. For each group, the
    gradient filter chooses one level, and drops classes with a lower score from the loss's
    gradients. `index` selects levels. The last level is higher than the score of every class, so
    this level drops all classes.
    """
    level = highest * tl.exp2(index.to(tl.float32) * (-C.STEP))
    return tl.where(index < C.LEVELS - 1, level, float("inf"))


@triton.jit
def _gradient_filter_score_kernel(
    hidden_desc,  # (R, D), ranked rows, zero after the last, block TILE x BK
    weight_desc,  # (V, D), block BN x BK
    bias_ptr,  # (V,) or None
    target_ptr,  # (N,) int32, ranked, no class for a row without a target
    kept_ptr,
    again_ptr,  # (1,) int32: whether a base was too far off, or None
    base_ptr,  # (N,) fp32, ranked: near the log-sum-exp, in base 2
    share_ptr,  # (N,) fp32, ranked: factor of the row's probabilities, or None
    of_bias_ptr,  # (2, N) fp32, ranked: factors of p and of 1(target), or None
    score_ptr,  # (groups, V) fp32 out
    part_ptr,  # (groups, chunks, LEVELS, TILE) fp32 out
    stats_ptr,  # (2, chunks, R) fp32 out: maximum, sum of exp2(z2 - base)
    target_logit_ptr,  # (R,) fp32 out, base 2
    bias_part_ptr,  # (groups, V) fp32 out, or None
    first_row,
    piece_rows,  # R
    vocab,
    depth,
    all_rows,
    tiles_here,  # of a chunk
    highest,  # of the levels
    scale,
    softcap,
    C: tl.constexpr,  # SUMS: score by the sum over rows, else by the most; WHOLE: targets may drop
):
    """Compute the scores by which the gradient filter drops classes in a group of rows (tokens).

    A class's score is the sum (filter `mass`) or the maximum (other filters) of its probabilities
    in the group's rows. For the filter `published`, a row's target counts with 1 - p instead of its
    probability p. A level is a score threshold below which classes are dropped. For each row and
    level, the kernel also sums the probabilities of the classes with a score below the threshold. A
    program processes one group and some tiles of classes. A tile contains all rows of the group, so
    the scores of its classes are known while its logits are in registers. The filters `mass` and
    `block` always keep the classes that are targets of the group's rows.
    """
    group = tl.program_id(0)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    rows_here = count_rows(kept_ptr, first_row, piece_rows, C)
    is_needed = group * C.TILE < rows_here
    if C.HAS_AGAIN:
        is_needed = is_needed & (tl.load(again_ptr) > 0)
    if is_needed:
        WIDE: tl.constexpr = C.BN // 4
        rows = group * C.TILE + tl.arange(0, C.TILE)
        is_row = rows < rows_here
        base = tl.load(base_ptr + first_row + rows, mask=is_row, other=0.0)
        target = tl.load(target_ptr + first_row + rows, mask=is_row, other=-1)
        if C.HAS_SHARE:
            share = tl.load(share_ptr + first_row + rows, mask=is_row, other=0.0)
        if C.NEEDS_BIAS:
            of_p = tl.load(of_bias_ptr + first_row + rows, mask=is_row, other=0.0)
            of_target = tl.load(of_bias_ptr + all_rows + first_row + rows, mask=is_row, other=0.0)
        levels = _level(tl.arange(0, C.LEVELS), highest, C)
        is_ragged = (group + 1) * C.TILE > rows_here
        sums = tl.zeros((C.TILE, C.LEVELS), tl.float32)
        peak = tl.full((C.TILE,), float("-inf"), tl.float32)
        mass = tl.zeros((C.TILE,), tl.float32)
        stop = tl.minimum((chunk + 1) * tiles_here, tl.cdiv(vocab, C.BN))
        for tile in tl.range(chunk * tiles_here, stop, flatten=C.FLATTEN):
            acc = tl.zeros((C.TILE, C.BN), dtype=tl.float32)
            for k in range(0, depth, C.BK):
                e = hidden_desc.load([group * C.TILE, k])
                c = weight_desc.load([tile * C.BN, k])
                acc = dot(e, c.T, acc, C.UPCAST)
            for quarter in tl.static_range(4):
                first = tile * C.BN + quarter * WIDE
                offs = tl.arange(0, WIDE)
                columns = first + offs
                part = quarter_of(acc, quarter, C.TILE, C.BN)
                z2, slope = logits_of(part, columns, bias_ptr, vocab, (scale, softcap), C)
                # tl.max passes over NaN; the sum keeps it.
                peak = tl.maximum(peak, tl.max(z2, axis=1))
                x = tl.exp2(z2 - base[:, None])
                mass += tl.sum(x, axis=1)
                local = target - first
                has_target = tl.max(((local >= 0) & (local < WIDE)).to(tl.int32), axis=0) > 0
                if C.HAS_SOFTCAP:
                    slope = slope / scale
                    x *= slope
                if is_ragged:  # rows that do not exist have logits of zero
                    x = tl.where(is_row[:, None], x, 0.0)
                if C.NEEDS_BIAS:
                    g = x * of_p[:, None]
                    is_own = offs[None, :] == local[:, None]
                    own = tl.zeros_like(g) + of_target[:, None]
                    if C.HAS_SOFTCAP:
                        own *= slope
                    g = (g - tl.where(is_own, own, 0.0)) * scale
                    there = bias_part_ptr + group.to(tl.int64) * vocab + columns
                    tl.store(there, tl.sum(g, axis=0), mask=columns < vocab)
                if C.HAS_SHARE:
                    x *= share[:, None]
                seen = x
                if has_target:
                    is_here = offs[None, :] == local[:, None]
                    z2_target = tl.sum(tl.where(is_here, z2, 0.0), axis=1)
                    is_in = is_row & (local >= 0) & (local < WIDE)
                    tl.store(target_logit_ptr + rows, z2_target, mask=is_in)
                    seen = tl.where(is_here, tl.abs(x - 1.0) if C.WHOLE else KEPT, x)
                    x = tl.where(is_here, 0.0, x)
                if C.SUMS:
                    score = tl.sum(seen, axis=0)
                else:
                    seen = tl.where(seen == seen, seen, LARGEST)
                    score = tl.max(seen, axis=0)
                # A class with nan is kept: its score becomes the largest, which is below the last
                # level.
                score = tl.where(score < LARGEST, score, LARGEST)
                there = score_ptr + group.to(tl.int64) * vocab + columns
                tl.store(there, score, mask=columns < vocab)
                is_under = (score[:, None] < levels[None, :]).to(hidden_desc.dtype)
                # The product of zeros and ones with probabilities rounds only the probabilities.
                sums = dot(x.to(hidden_desc.dtype), is_under, sums, C.UPCAST)
        there = chunk.to(tl.int64) * piece_rows + rows
        tl.store(stats_ptr + there, peak, mask=is_row)
        tl.store(stats_ptr + chunks.to(tl.int64) * piece_rows + there, mass, mask=is_row)
        out = (group * chunks + chunk).to(tl.int64) * (C.LEVELS * C.TILE)
        place = tl.arange(0, C.LEVELS)[None, :] * C.TILE + tl.arange(0, C.TILE)[:, None]
        tl.store(part_ptr + out + place, sums)


@triton.jit
def _gradient_filter_check_kernel(
    stats_ptr,  # (2, chunks, R) fp32
    base_ptr,  # (N,) fp32, ranked, in and, where it is too far off, out
    again_ptr,  # (1,) int32 out
    kept_ptr,
    first_row,
    piece_rows,
    chunks,
    C: tl.constexpr,
):
    """Correct each row's (token's) estimated log-sum-exp or largest logit if it is too far off.

    The estimate is called the row's base. With the base, the gradient filters `mass` and `block`
    find the row's unlikely classes. For `mass`, the base estimates the row's log-sum-exp. For
    `block`, the base estimates the row's largest logit. If the base is too far from the row's
    largest logit, the kernel replaces the base by this logit, and stores 1 in `again_ptr`.
    """
    rows = tl.program_id(0) * C.ROWS + tl.arange(0, C.ROWS)
    is_row = rows < count_rows(kept_ptr, first_row, piece_rows, C)
    base = tl.load(base_ptr + first_row + rows, mask=is_row, other=0.0)
    peak = tl.full((C.ROWS,), float("-inf"), tl.float32)
    for chunk in range(0, chunks):
        there = stats_ptr + tl.cast(chunk, tl.int64) * piece_rows + rows
        peak = tl.maximum(peak, tl.load(there, mask=is_row, other=float("-inf")))
    is_far = is_row & (tl.abs(peak - base) > FAR)
    # A row of -inf alone keeps a base of 0: its sum is 0 and its loss nan, as in eager.
    nearer = tl.where(_finite(peak), peak, 0.0)
    tl.store(base_ptr + first_row + rows, nearer, mask=is_far)
    if tl.max(is_far.to(tl.int32), axis=0) > 0:
        tl.store(again_ptr, 1)


@triton.jit
def _gradient_filter_level_kernel(
    part_ptr,  # (groups, chunks, LEVELS, TILE) fp32
    stats_ptr,  # (2, chunks, R) fp32
    base_ptr,  # (N,) fp32, ranked
    target_logit_ptr,  # (R,) fp32
    target_ptr,  # (N,) int32, ranked
    order_ptr,  # (N,) int32: original row of each ranked row
    kept_ptr,
    # (N,) fp32, original: factors of losses; if HAS_LSE, (2, N), ranked: of p and of 1(target)
    factor_ptr,
    level_ptr,  # (groups,) fp32 out: the least score of a class that is kept
    scale_ptr,  # (R,) fp32 out: factor of the row's elements
    at_target_ptr,  # (R,) fp32 out: the row's element at its target
    nll_ptr,  # (N,) fp32 out, original rows, or None
    dropped_ptr,  # (N,) fp32 out, original rows
    first_row,
    piece_rows,
    all_rows,
    chunks,
    vocab,
    highest,
    limit,  # the mass that a row may lose
    scale,
    softcap,
    # HAS_LSE: the base is the log-sum-exp; RESTORE: distribute lost mass over the kept classes
    C: tl.constexpr,
):
    """Choose the level of a group of rows (tokens): the score below which classes are dropped.

    A class's score is the sum or the maximum of its probabilities in the group's rows. The gradient
    filter drops classes of low score from the gradients. The kernel chooses the highest level at
    which no row loses more probability mass than `limit`. For the filter `mass`, `limit` is the
    setting tau, less a margin for rounding. For the other filters, `limit` is infinite, and the
    level is the setting eps.

    The lost mass is distributed over the row's kept classes (without the target), in proportion to
    their probabilities. The module `filtered` says why. The kernel also computes, for each row, the
    factor by which its gradients are multiplied. For a scalar loss, it computes the rows' losses.
    """
    group = tl.program_id(0)
    rows_here = count_rows(kept_ptr, first_row, piece_rows, C)
    index = tl.arange(0, C.LEVELS)
    rows = group * C.TILE + tl.arange(0, C.TILE)
    is_row = rows < rows_here
    if group * C.TILE >= rows_here:
        tl.store(level_ptr + group, float("inf"))
    else:
        sums = tl.zeros((C.LEVELS, C.TILE), tl.float32)
        mass = tl.zeros((C.TILE,), tl.float32)
        place = index[:, None] * C.TILE + tl.arange(0, C.TILE)[None, :]
        plane = tl.cast(chunks, tl.int64) * piece_rows
        for chunk in range(0, chunks):
            at = (group * chunks + chunk).to(tl.int64) * (C.LEVELS * C.TILE)
            sums += tl.load(part_ptr + at + place)
            there = stats_ptr + plane + tl.cast(chunk, tl.int64) * piece_rows + rows
            mass += tl.load(there, mask=is_row, other=0.0)
        if C.HAS_LSE:
            mass = mass * 0.0 + 1.0
        mass = tl.where(is_row, mass, 1.0)
        lost = sums / mass[None, :]
        # A lost mass of nan is over the limit.
        is_over = tl.where((lost <= limit) | (is_row[None, :] == 0), 0, 1)
        fits = tl.max(is_over, axis=1) == 0
        chosen = tl.min(tl.where(fits, index, C.LEVELS), axis=0)
        level = tl.sum(tl.where(index == chosen, _level(index, highest, C), 0.0), axis=0)
        # If no level is within the limit, every class is kept.
        tl.store(level_ptr + group, tl.where(chosen < C.LEVELS, level, -1.0))
        lost_here = tl.sum(tl.where(index[:, None] == chosen, lost, 0.0), axis=0)
        rest = tl.sum(tl.where(index[:, None] == C.LEVELS - 1, lost, 0.0), axis=0)
        restore = tl.full((C.TILE,), 1.0, tl.float32)
        if C.RESTORE:
            # The mass is not restored in rows of nan, or if little mass is kept.
            stays = rest - lost_here
            is_some = stays * MOST > rest
            restore = tl.where(is_some, rest / tl.where(is_some, stays, 1.0), 1.0)
        source = tl.load(order_ptr + first_row + rows, mask=is_row, other=0)
        tl.store(dropped_ptr + source, lost_here, mask=is_row)
        target = tl.load(target_ptr + first_row + rows, mask=is_row, other=-1)
        has_target = is_row & (target >= 0) & (target < vocab)
        base = tl.load(base_ptr + first_row + rows, mask=is_row, other=0.0)
        z2_target = tl.load(target_logit_ptr + rows, mask=has_target, other=0.0)
        slope = tl.full((C.TILE,), 1.0, tl.float32)
        if C.HAS_SOFTCAP:
            ratio = z2_target * LN2 / softcap
            slope = 1.0 - ratio * ratio
        if C.HAS_LSE:
            of_p = tl.load(factor_ptr + first_row + rows, mask=is_row, other=0.0)
            there = factor_ptr + all_rows + first_row + rows
            of_target = tl.load(there, mask=is_row, other=0.0)
            factor = _larger(of_p, of_target)
            own = of_p * tl.exp2(z2_target - base) - of_target
            own = tl.where(factor == 0.0, 0.0, own / tl.where(factor == 0.0, 1.0, factor))
        else:
            # (base - z_t) + log(mass), not lse - z_t: no cancellation for a confident target.
            nll2 = (base - z2_target) + tl.log2(mass)
            # A target outside the vocabulary gives nan, which cannot pass for a loss.
            nll = tl.where(has_target, nll2 * LN2, tl.where(target < 0, 0.0, float("nan")))
            tl.store(nll_ptr + source, nll, mask=is_row)
            factor = tl.load(factor_ptr + source, mask=is_row, other=0.0) / mass
            own = (tl.exp2(-nll2) - 1.0) * mass
        tl.store(scale_ptr + rows, factor * scale * restore, mask=is_row)
        tl.store(at_target_ptr + rows, own * slope / restore, mask=is_row)


@triton.jit
def _larger(of_p, of_target):
    """Return the larger magnitude of two numbers, with the sign of the first number."""
    size = tl.maximum(tl.abs(of_p), tl.abs(of_target))
    return tl.where(of_p < 0.0, -size, size)


@triton.jit
def _gradient_filter_share_kernel(
    values_ptr,  # (5, N) fp32, compact, of `hopper`
    rank_ptr,  # (N,) int64: compact row of each ranked row
    kept_ptr,
    base_ptr,  # (N,) fp32 out, ranked
    share_ptr,  # (N,) fp32 out, ranked: factor of p over the larger of both factors
    factor_ptr,  # (2, N) fp32 out, ranked: of p and of 1(target)
    rows,
    BLOCK: tl.constexpr,
):
    """Write each row's (token's) log-sum-exp and gradient factors in the order of `rank_ptr`.

    One factor multiplies the softmax p. The other is subtracted at the target class. A gradient
    filter drops unlikely classes from gradients. The filters `mass` and `block` sort the rows by
    their estimated probability mass in such classes. For the filter `published`, the rows keep
    their order.
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = offs < tl.load(kept_ptr)
    source = tl.load(rank_ptr + offs, mask=is_row, other=0)
    of_p = tl.load(values_ptr + rows + source, mask=is_row, other=0.0)
    of_target = tl.load(values_ptr + 2 * rows + source, mask=is_row, other=0.0)
    larger = _larger(of_p, of_target)
    # A row without a gradient loses no mass; a row of nan stays nan.
    share = tl.where(larger == 0.0, 0.0, of_p / tl.where(larger == 0.0, 1.0, larger))
    tl.store(base_ptr + offs, tl.load(values_ptr + source, mask=is_row, other=0.0), mask=is_row)
    tl.store(share_ptr + offs, share, mask=is_row)
    tl.store(factor_ptr + offs, of_p, mask=is_row)
    tl.store(factor_ptr + rows + offs, of_target, mask=is_row)


@triton.jit
def _gradient_filter_word_kernel(
    score_ptr,  # (groups, V) fp32
    level_ptr,  # (groups,) fp32
    word_ptr,  # (V,) int16 out
    groups,
    vocab,
    BLOCK: tl.constexpr,
):
    """Write one word per class, with a set bit for each group of rows (tokens) in which the
    gradient filter keeps the class.

    The filter drops unlikely classes from gradients. The filter keeps classes with a score of at
    least the group's level (its threshold). The score is the sum or the maximum of the class's
    probabilities in the group's rows. The first group of rows has the highest bit of the word.
    After sorting by these words, classes that are kept in the same groups are next to each other.
    With this order of bits, more tiles consist only of kept classes than if the first group had the
    lowest bit.
    """
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.zeros((BLOCK,), tl.int32)
    for group in range(groups):
        level = tl.load(level_ptr + group)
        there = score_ptr + tl.cast(group, tl.int64) * vocab + columns
        score = tl.load(there, mask=columns < vocab, other=0.0)
        # A group without rows has an infinite level, and scores that no kernel has written.
        counts = tl.where(level < float("inf"), (score >= level).to(tl.int32), 0)
        word |= counts << (GROUPS - 1 - group)
    tl.store(word_ptr + columns, word.to(tl.int16), mask=columns < vocab)


@triton.jit
def _either(one, other):
    return one | other


@triton.jit
def _gradient_filter_tile_kernel(
    word_ptr,  # (V,) int16, sorted
    tile_word_ptr,  # (T,) int32 out
    vocab,
    TILE: tl.constexpr,
):
    """Write one word per tile of classes, with a set bit for each group of rows (tokens) in which
    the gradient filter keeps a class of the tile.

    The filter drops unlikely classes from gradients. If a group's bit is 0, later kernels skip the
    tile for this group.
    """
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    words = tl.load(word_ptr + places, mask=places < vocab, other=0).to(tl.int32) & 0xFFFF
    tl.store(tile_word_ptr + tl.program_id(0), tl.reduce(words, 0, _either))


@triton.jit
def _bits(words):
    count = words & 1
    for bit in tl.static_range(1, GROUPS):
        count += (words >> bit) & 1
    return count


@triton.jit
def _gradient_filter_list_kernel(
    tile_word_ptr,  # (T,) int32
    active_ptr,  # (1,) int32 out: how many tiles have a kept class
    group_start_ptr,  # (passes, starts) int32 out: where a group's slots start
    slot_tile_ptr,  # (passes, slots) int32 out: the tile of each slot
    pass_tile_ptr,  # (passes, 4) int32 out: the first tile of a pass, and the one after its last
    tile_start_ptr,  # (T + 1,) int32 out: where a tile's list starts
    tile_slot_ptr,  # (groups * T,) int32 out: its slots, in their pass
    tile_group_ptr,  # (groups * T,) int32 out: and their groups
    tiles,  # T
    capacity,  # tiles of a pass; its last tile of classes may exceed it, by less than the groups
    slots,
    starts,  # stride of group_start
    BLOCK: tl.constexpr,
):
    """List the kept tiles of classes of each group of rows (tokens), and the groups that keep each
    tile.

    The gradient filter drops unlikely classes. A group of rows keeps a tile if the filter keeps at
    least one of the tile's classes for the group. The product with the weight uses the first list,
    in which the tiles of a group are adjacent. The product with the hidden states uses the second
    list. The kernels process the tiles of classes in several passes. A program lists, for one pass,
    the tiles of one group of rows.
    """
    group = tl.program_id(0)
    groups = tl.num_programs(0)
    own_pass = tl.program_id(1)
    start = 0
    first_tile = 0
    stop_tile = 0
    total = 0
    for at in range(0, tiles, BLOCK):
        offs = at + tl.arange(0, BLOCK)
        words = tl.load(tile_word_ptr + offs, mask=offs < tiles, other=0)
        count = _bits(words)
        upto = total + tl.cumsum(count, axis=0)
        its_pass = (tl.maximum(upto, 1) - 1) // capacity
        is_own = its_pass == own_pass
        start += tl.sum(tl.where(is_own, _bits(words >> (GROUPS - group)), 0), axis=0)
        first_tile += tl.sum(((its_pass < own_pass) & (offs < tiles)).to(tl.int32), axis=0)
        stop_tile += tl.sum(((its_pass <= own_pass) & (offs < tiles)).to(tl.int32), axis=0)
        total += tl.sum(count, axis=0)
    slot = start
    listed = 0
    for at in range(0, tiles, BLOCK):
        offs = at + tl.arange(0, BLOCK)
        words = tl.load(tile_word_ptr + offs, mask=offs < tiles, other=0)
        count = _bits(words)
        upto = listed + tl.cumsum(count, axis=0)
        is_own = (tl.maximum(upto, 1) - 1) // capacity == own_pass
        counts = tl.where(is_own, (words >> (GROUPS - 1 - group)) & 1, 0)
        here = slot + tl.cumsum(counts, axis=0) - counts
        place = upto - count + _bits(words >> (GROUPS - group))
        tl.store(slot_tile_ptr + own_pass * slots + here, offs, mask=counts > 0)
        tl.store(tile_slot_ptr + place, here, mask=counts > 0)
        tl.store(tile_group_ptr + place, offs * 0 + group, mask=counts > 0)
        is_first = offs < tl.where(group + own_pass == 0, tiles, 0)
        tl.store(tile_start_ptr + offs, upto - count, mask=is_first)
        slot += tl.sum(counts, axis=0)
        listed += tl.sum(count, axis=0)
    tl.store(group_start_ptr + own_pass * starts + group, start)
    if group == groups - 1:
        tl.store(group_start_ptr + own_pass * starts + groups, slot)
    if group == 0:
        tl.store(pass_tile_ptr + 4 * own_pass, first_tile)
        tl.store(pass_tile_ptr + 4 * own_pass + 1, stop_tile)
        if own_pass == 0:
            tl.store(tile_start_ptr + tiles, total)
            tl.store(active_ptr, total)


@triton.jit
def _gradient_filter_fill_kernel(
    hidden_desc,  # (R, D), ranked rows, zero after the last, block TILE x BK
    weight_ptr,  # (V, D) contiguous
    bias_ptr,
    packed_ptr,  # (slots * TILE, TILE) out: rows of a group by classes of a tile
    slot_column_ptr,  # (slots * TILE,) int32 out: these classes; V for one that is dropped
    word_ptr,  # (V,) int16, sorted
    column_order_ptr,  # (V,) int64
    pass_tile_ptr,  # (2,) of this pass
    tile_start_ptr,
    slot_tile_ptr,  # (slots,) of this pass
    tile_slot_ptr,
    tile_group_ptr,
    base_ptr,  # (N,) fp32, ranked
    share_ptr,  # (N,) fp32, ranked, or None
    at_target_ptr,  # (R,) fp32
    target_ptr,  # (N,) int32, ranked
    kept_ptr,
    first_row,
    piece_rows,
    vocab,
    depth,
    scale,
    softcap,
    C: tl.constexpr,
):
    """Compute the logits of some tiles again, and store the gradients of these logits.

    The gradient filter drops unlikely classes in each group of rows (tokens). The filters `mass`
    and `block` first sort the rows by their estimated probability mass in such classes. The filter
    `published` keeps the rows' order. A group consists of TILE rows that are consecutive in the
    resulting order. A tile has the rows of one group and some classes. The stored gradients of
    dropped classes are zero. If the constant WHOLE is set, the filter keeps or drops tiles as a
    whole, and no element of a kept tile is zeroed.

    Each row has a factor by which its gradients must still be multiplied. This kernel leaves the
    factor out. For the weight's gradient, another kernel multiplies a copy of the hidden states by
    the factor. For the hidden states' gradient, a later kernel multiplies the result by the factor.
    """
    rows_here = count_rows(kept_ptr, first_row, piece_rows, C)
    local = tl.arange(0, C.TILE)
    # Programs for all groups of a tile run together, so the tile's rows of the weight stay in the
    # L2 cache.
    first = tl.load(tile_start_ptr + tl.load(pass_tile_ptr))
    stop = tl.load(tile_start_ptr + tl.load(pass_tile_ptr + 1))
    for at in range(first + tl.program_id(0), stop, tl.num_programs(0)):
        slot = tl.load(tile_slot_ptr + at)
        group = tl.load(tile_group_ptr + at)
        places = tl.load(slot_tile_ptr + slot) * C.TILE + local
        is_column = places < vocab
        words = tl.load(word_ptr + places, mask=is_column, other=0).to(tl.int32)
        if not C.WHOLE:
            is_column = is_column & (((words >> (GROUPS - 1 - group)) & 1) > 0)
        column = tl.load(column_order_ptr + places, mask=is_column, other=0)
        weight_rows = weight_ptr + column[:, None] * depth
        acc = tl.zeros((C.TILE, C.TILE), dtype=tl.float32)
        for k in range(0, depth, C.BK):
            offs = k + tl.arange(0, C.BK)
            e = hidden_desc.load([group * C.TILE, k])
            c = tl.load(weight_rows + offs[None, :], mask=(offs < depth)[None, :], other=0.0)
            acc = dot(e, c.T, acc, C.UPCAST)
        rows = group * C.TILE + local
        is_row = rows < rows_here
        base = tl.load(base_ptr + first_row + rows, mask=is_row, other=0.0)
        target = tl.load(target_ptr + first_row + rows, mask=is_row, other=-1)
        own = tl.load(at_target_ptr + rows, mask=is_row, other=0.0)
        columns = tl.where(is_column, column.to(tl.int32), vocab)
        z2, slope = logits_of(acc, columns, bias_ptr, vocab, (scale, softcap), C)
        x = tl.exp2(z2 - base[:, None])
        if C.HAS_SOFTCAP:
            x *= slope / scale
        if C.HAS_SHARE:
            share = tl.load(share_ptr + first_row + rows, mask=is_row, other=0.0)
            x *= share[:, None]
        is_own = (target[:, None] == columns[None, :]) & (target >= 0)[:, None]
        x = tl.where(is_own, own[:, None], x)
        if (group + 1) * C.TILE > rows_here:
            x = tl.where(is_row[:, None], x, 0.0)
        start = slot.to(tl.int64) * C.TILE
        out = packed_ptr + (start + local)[:, None] * C.TILE + local[None, :]
        tl.store(out, x.to(packed_ptr.dtype.element_ty))
        tl.store(slot_column_ptr + start + local, columns)


@triton.jit
def _part(tile, index: tl.constexpr, C: tl.constexpr):
    """Split a tile's columns into PARTS equal shares, and return the share with index `index`."""
    part = halves_of(tile, C.TILE, C.BN)[index * 2 // C.PARTS]
    if C.PARTS == 4:
        part = halves_of(part, C.TILE, C.BN // 2)[index % 2]
    return part


@triton.jit
def _gradient_filter_products_kernel(
    packed_by_row_desc,  # (slots * TILE, TILE), block TILE x BK
    packed_by_step_desc,  # (slots * TILE, TILE), block BK x TILE
    ranked_desc,  # (R, D) rows times their scale, block BK x BN
    weight_ptr,  # (V, D) contiguous
    grad_weight_ptr,  # (V, D) contiguous, in and out, or None
    sums_ptr,  # (splits, R, D) fp32 in and out, ranked, or None
    slot_column_ptr,
    column_order_ptr,
    group_start_ptr,  # (groups + 1,) of this pass
    pass_tile_ptr,  # (2,) of this pass
    tile_start_ptr,
    tile_slot_ptr,
    tile_group_ptr,
    counter_ptr,  # (1,) int32, 0 at first
    first_row,  # of the block; dC is written in the first one
    number,  # of the pass; sums of dE are written in the first one
    groups,
    splits,  # shares of a group's slots, each of which has its own sum of dE
    piece_rows,
    vocab,
    depth,
    C: tl.constexpr,
):
    """Compute the gradients of the hidden states (dE) and of the weight (dC) from the logits'
    gradients.

    The gradient filter drops unlikely classes in each group of rows (tokens). A packed tile
    contains the logits' gradients for the rows of one group and TILE classes. Only tiles with at
    least one class that the filter keeps are stored. The product of the packed tiles with the
    weight is dE. Their product with the hidden states is dC. The tiles of dE are computed first,
    because they take longest. Programs that run at the same time compute tiles of dE for
    neighbouring groups of rows. These tiles need the same rows of the weight, which therefore stay
    in the L2 cache. One program computes all of a tile, so the order in which programs take tiles
    does not change the results.
    """
    depth_blocks = tl.cdiv(depth, C.BN)
    hidden_items = 0
    if C.NEEDS_HIDDEN:
        hidden_items = splits * groups * depth_blocks
        # A later pass without tiles has no summands.
        is_some = (number == 0) | (tl.load(group_start_ptr + groups) > 0)
        hidden_items = tl.where(is_some, hidden_items, 0)
    items = hidden_items
    first_tile = tl.load(pass_tile_ptr)
    if C.NEEDS_WEIGHT:
        items += (tl.load(pass_tile_ptr + 1) - first_tile) * depth_blocks
    STEPS: tl.constexpr = C.TILE // C.BK
    WIDE: tl.constexpr = C.BN // C.PARTS
    item = tl.atomic_add(counter_ptr, 1)
    while item < items:
        if item < hidden_items:
            if C.NEEDS_HIDDEN:
                first_column = (item % depth_blocks) * C.BN
                offs_d = first_column + tl.arange(0, C.BN)
                rest = item // depth_blocks
                group = groups - 1 - rest % groups
                split = rest // groups
                begin = tl.load(group_start_ptr + group)
                end = tl.load(group_start_ptr + group + 1)
                share = tl.cdiv(end - begin, splits)
                start = tl.minimum(begin + split * share, end)
                stop = tl.minimum(start + share, end)
                if (stop > start) | (number == 0):
                    acc = tl.zeros((C.TILE, C.BN), dtype=tl.float32)
                    for step in range(start * STEPS, stop * STEPS):
                        k = step % STEPS * C.BK
                        g = packed_by_row_desc.load([step // STEPS * C.TILE, k])
                        column = tl.load(slot_column_ptr + step * C.BK + tl.arange(0, C.BK))
                        mask = (column < vocab)[:, None] & (offs_d < depth)[None, :]
                        place = column.to(tl.int64)[:, None] * depth + offs_d[None, :]
                        c = tl.load(weight_ptr + place, mask=mask, other=0.0)
                        acc = dot(g, c, acc, C.UPCAST)
                    rows = split * piece_rows + group * C.TILE + tl.arange(0, C.TILE)
                    for index in tl.static_range(C.PARTS):
                        part = _part(acc, index, C)
                        columns = first_column + index * WIDE + tl.arange(0, WIDE)
                        mask = (columns < depth)[None, :]
                        place = sums_ptr + rows.to(tl.int64)[:, None] * depth + columns[None, :]
                        if number > 0:
                            part += tl.load(place, mask=mask, other=0.0)
                        tl.store(place, part, mask=mask)
        else:
            if C.NEEDS_WEIGHT:
                tile = first_tile + (item - hidden_items) // depth_blocks
                first_column = (item - hidden_items) % depth_blocks * C.BN
                start = tl.load(tile_start_ptr + tile)
                stop = tl.load(tile_start_ptr + tile + 1)
                if (stop > start) | (first_row == 0):
                    acc = tl.zeros((C.TILE, C.BN), dtype=tl.float32)
                    for step in range(start * STEPS, stop * STEPS):
                        slot = tl.load(tile_slot_ptr + step // STEPS)
                        group = tl.load(tile_group_ptr + step // STEPS)
                        k = step % STEPS * C.BK
                        g = packed_by_step_desc.load([slot * C.TILE + k, 0])
                        e = ranked_desc.load([group * C.TILE + k, first_column])
                        acc = dot(g.T, e, acc, C.UPCAST)
                    places = tile * C.TILE + tl.arange(0, C.TILE)
                    is_column = places < vocab
                    column = tl.load(column_order_ptr + places, mask=is_column, other=0)
                    for index in tl.static_range(C.PARTS):
                        part = _part(acc, index, C)
                        columns = first_column + index * WIDE + tl.arange(0, WIDE)
                        mask = is_column[:, None] & (columns < depth)[None, :]
                        out_ptrs = grad_weight_ptr + column[:, None] * depth + columns[None, :]
                        if first_row > 0:
                            part += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
                        tl.store(out_ptrs, part.to(out_ptrs.dtype.element_ty), mask=mask)
        item = tl.atomic_add(counter_ptr, 1)


@triton.jit
def _gradient_filter_rows_kernel(
    sums_ptr,  # (splits, R, D) fp32, ranked
    grad_hidden_ptr,  # (N, D) contiguous out, original rows
    order_ptr,  # (N,) int32
    kept_ptr,
    scale_ptr,  # (R,) fp32
    first_row,
    piece_rows,
    splits,
    depth,
    C: tl.constexpr,
):
    """Add the partial sums of the hidden states' gradient (dE) in a fixed order.

    The kernel multiplies each row of the sum by the row's factor in `scale_ptr`, and writes the row
    to its original position.
    """
    place = tl.program_id(0)
    if place < count_rows(kept_ptr, first_row, piece_rows, C):
        scale = tl.load(scale_ptr + place)
        out = tl.load(order_ptr + first_row + place).to(tl.int64) * depth
        for start in range(0, depth, C.BLOCK):
            offs = start + tl.arange(0, C.BLOCK)
            inside = offs < depth
            sums = tl.zeros((C.BLOCK,), tl.float32)
            for split in range(splits):
                here = (split * piece_rows + place).to(tl.int64) * depth + offs
                sums += tl.load(sums_ptr + here, mask=inside, other=0.0)
            values = (sums * scale).to(grad_hidden_ptr.dtype.element_ty)
            tl.store(grad_hidden_ptr + out + offs, values, mask=inside)
