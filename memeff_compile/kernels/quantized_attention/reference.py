"""The reference implementation: the arithmetic of the kernels in plain PyTorch, on any device.

The codes of queries and keys (quantised numbers) are integers in fp32. So fp32 sums of their
products are exact. Softmax weights and values are rounded to their number format, such as E4M3, and
multiplied in fp32. Softmax weights are computed for one tile of keys after another, with a running
maximum, as in the kernels. The order matters because the rounding depends on that maximum. This
implementation sums exactly within a tile. Tensor cores add an error, a thousandth as large as the
error from rounding weights and values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._triton.conditions import Conditions
from .._triton.key_tiles import depth_block
from .settings import (
    BLOCK,
    MOST_CODE,
    MOST_START,
    NARROWEST,
    QUERY_ROWS,
    VALUES,
    Settings,
    groups_of,
    sampled_queries,
)

LEAST = 1e-16  # of queries and keys that are all zeros: two scales multiply
LEAST_VALUE = 1e-30
NOTHING = -1e30
HUGE = 3e38
SAMPLE = 8
"""Every SAMPLE-th key is read for the keys' mean, which may be approximate."""

LEAST_SHARE = 0.6
"""The least share of the queries' energy in their mean for which keys are rounded with regard to
that mean."""

FINER = 3.0
"""The size of the queries' mean in the first of two channels, divided by its size in the second."""

MOST_EVENED = 3.0
"""The largest exponent of the power of two by which a channel of queries is divided."""

LEAST_ENERGY = 2.0**-16
"""The least energy of sampled keys without their mean, relative to that with it; a channel with
less is not evened."""

MOST_STEPS = 16
"""The most steps by which a key's code is moved."""

MOST_SCORE = 30.0
"""The largest score, in base 2, from which a weight for rounding errors of values is computed."""

MOST_REST = 16.0
"""The largest rounding error of a value, in steps of its scale: half a step of E4M3 at 448."""

BLOCK_SCORES = 1 << 22


@dataclass(frozen=True)
class Codes:
    """The codes of q, k and v, stored as fp32 numbers, with their scales and means.

    A number equals its code times its scale, plus the subtracted mean.
    """

    # (B, H, M, D) whole numbers, D padded to a power of two where heads are turned, and (B, H, M)
    # with the scale of attention, base 2
    q: Tensor
    q_scale: Tensor  # likewise
    k: Tensor  # (B, G, N, D) whole numbers, D likewise, and (B, G, N)
    k_scale: Tensor  # likewise
    v: Tensor  # (B, G, N, D) numbers of the format of values, and (B, G, D) twice
    v_scale: Tensor  # likewise
    v_mean: Tensor  # likewise
    # (B, H, blocks, N) scores of the queries' means with the keys, or None
    correction: Tensor | None
    shift: Tensor  # (B, H, M) the number that the keys' mean adds to every score of a query
    # (B, G, blocks + 1, D) the values' rounding errors, summed over all blocks up to each, in steps
    # of

    # their scale, or None
    rest: Tensor | None
    counts: Tensor  # (B, G, blocks + 1) the sum of the weights of the keys in `rest`
    is_start: bool = False  # whether sums of products start from the correction, in whole steps


def codes(q: Tensor, k: Tensor, v: Tensor, given: Conditions, settings: Settings) -> Codes:
    """Return the codes (quantised numbers) of q, (B, H, M, D), and of k and v, (B, G, N, D).

    G is the number of key-value heads. Of the fields of `given`, this function reads only the scale
    of the scores and the mask of keys.
    """
    repeat = q.shape[1] // k.shape[1]
    q, k, v = q.float() * (given.scale * math.log2(math.e)), k.float(), v.float()
    k_mean, v_mean = means(k, v, given.key_mask, settings)
    whole = _shown(k, given.key_mask)[:, :, ::SAMPLE].square().sum(2)
    k, v = _shown(k - k_mean, given.key_mask), _shown(v - v_mean, given.key_mask)
    shift = (q * k_mean.repeat_interleave(repeat, 1)).sum(-1)
    q, mean, correction = _smooth_queries(q, k, repeat, settings)
    weight = _weights_of_none(given.key_mask, k)
    direction = torch.zeros_like(k_mean[:, :, 0])
    if settings.aligns:
        direction, of_mean = direction_of(q, k.shape[1])
        weight = weight * weights_of(of_mean, k)
    if settings.evens:
        evened = evened_by(q, k, whole, settings)
        over = evened.repeat_interleave(repeat, 1)[:, :, None]
        q, k, mean = q / over, k * evened[:, :, None], mean / over
        direction = direction / evened
    if settings.turns:
        together = settings.turned(depth_block(q.shape[3], NARROWEST))
        q, k, direction = (turned(each, *together) for each in (q, k, direction))
        q = q / math.prod(together)
    of_queries, of_keys = groups_of(settings.granularity, q, k)
    q_scale = _largest(q, of_queries) / settings.widest
    if settings.starts:  # sums can start from any score of the mean without overflow
        spread = (q.shape[3] / math.prod(settings.turned(q.shape[3]))) ** 0.5
        least = mean.norm(dim=3) * ((MOST_CODE + 1) * spread / MOST_START)
        least = least.repeat_interleave(BLOCK, 2)[:, :, : q.shape[2]]
        is_least, q_scale = q_scale < least, q_scale.maximum(least)
    k_scale = _largest(k, of_keys) / (settings.widest * settings.steps)
    kind = VALUES[settings.values]
    v_scale = _sizes(v.abs().amax(2), v.sum(2), LEAST_VALUE) / kind.top
    v = v / v_scale[:, :, None]
    v_codes = kind.rounded(v)
    steps = (k.abs().amax(3) / (k_scale * settings.widest)).ceil().clamp(1, settings.steps)
    steps = steps[..., None]
    coded = k / (k_scale[..., None] * steps)
    k_codes = _rounded(coded, settings)
    if settings.aligns:
        k_codes = _aligned(coded, k_codes, direction, settings)
    q_coded = q / q_scale[..., None]
    q_codes = _rounded(q_coded, settings)
    if settings.is_odd and settings.starts:  # rows far below their mean: even codes have a zero
        q_codes = torch.where(is_least[..., None], 2.0 * (0.5 * q_coded).round(), q_codes)
    return Codes(
        q_codes,
        q_scale,
        k_codes * steps,
        k_scale,
        v_codes,
        v_scale,
        v_mean[:, :, 0],
        correction,
        shift,
        _by_block((v - v_codes) * weight[..., None]) if settings.restores else None,
        _by_block(weight[..., None])[..., 0],
        settings.starts,
    )


def _rounded(x: Tensor, settings: Settings) -> Tensor:
    """Return numbers rounded to the nearest codes."""
    if not settings.is_odd:
        return x.round()
    return (2.0 * (0.5 * x - 0.5).round() + 1.0).clamp(-settings.limit, settings.limit)


def direction_of(q: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the sum and the mean of the sampled queries, (B, G, D) each.

    Queries are sampled in blocks at equal distances. Each of the G key-value heads has a sum and a
    mean over its query heads. Both results are zero if the mean has only a small share of the
    queries' energy (sum of squares).
    """
    seen = _sampled(q, groups)
    found, count = seen.sum(2), seen.shape[2]
    is_shared = found.square().sum(2) > LEAST_SHARE * count * seen.square().sum((2, 3))
    found = torch.where(is_shared[..., None], found, torch.zeros_like(found))
    return found, found / count


def _sampled(q: Tensor, groups: int) -> Tensor:
    """Return a sample of the queries of each key-value head, (B, G, samples, D).

    The sample consists of blocks of QUERY_ROWS queries at equal distances, at most MOST_SAMPLES
    blocks per query head.
    """
    stride = sampled_queries(q.shape[2])[0]
    place = torch.arange(q.shape[2], device=q.device)
    seen = q[:, :, place // QUERY_ROWS % stride == 0]
    return seen.reshape(q.shape[0], groups, -1, q.shape[3])


def turned(x: Tensor, far: int, near: int) -> Tensor:
    """Return each row of `x` (..., D), such as a query, after Hadamard transforms of its channels.

    D is padded to a power of two. A transform combines `far` * `near` channels: `far` groups, at
    equal distances, of `near` neighbouring channels. So a row is transformed in several independent
    sets of channels, or in one. The transform's elements are 1 and -1, not normalised. The
    transform spreads a large number in one channel over many channels, so that quantisation steps
    become finer. Both queries and keys are transformed. The scores of queries and keys are then
    larger by the factor `far` * `near`.
    """
    wide = depth_block(x.shape[-1], NARROWEST)
    x = torch.nn.functional.pad(x, (0, wide - x.shape[-1])).unflatten(-1, (far, -1, near))
    x = torch.einsum("fg,...gwn,nm->...fwm", _signs(far, x), x, _signs(near, x))
    return x.flatten(-3)


def _signs(size: int, like: Tensor) -> Tensor:
    signs = like.new_ones(1, 1)
    while signs.shape[0] < size:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return signs


def evened_by(q: Tensor, k: Tensor, whole: Tensor, settings: Settings) -> Tensor:
    """Return a number per channel, (B, G, D), by which queries are divided and keys are multiplied.

    Scores do not change. Queries and keys get about the same energy (sum of squares) in each
    channel, up to one factor for all channels. Because the energies are equal, a few channels with
    large numbers no longer make the quantisation steps of all channels coarser. The numbers are
    scaled to the geometric mean 1, then clamped. The result is rounded to powers of the square root
    of two.

    The keys' energy is estimated from sampled keys. `whole` is the energy of these keys, including
    their mean. The queries' energy is estimated from sampled queries. If the mean of each block of
    queries was subtracted from `q`, the queries' energy is the sum over all queries instead. The
    result has one number per channel of each of the G key-value heads.
    """
    is_smooth = "q" in settings.smooth
    seen = q.reshape(*k.shape[:2], -1, q.shape[3]) if is_smooth else _sampled(q, k.shape[1])
    ours = seen.square().sum(2)
    theirs = k[:, :, ::SAMPLE].square().sum(2)
    is_known = (ours > 0) & (ours < HUGE) & (theirs > LEAST_ENERGY * whole) & (theirs < HUGE)
    power = torch.where(is_known, (ours.log2() - theirs.log2()) / 4, 0.0)
    power -= power.sum(2, keepdim=True) / is_known.sum(2, keepdim=True).clamp_min(1)
    power = (power.clamp(-MOST_EVENED, MOST_EVENED) * 2.0).round() * 0.5
    return torch.exp2(torch.where(is_known, power, 0.0))


def weights_of(mean: Tensor, k: Tensor) -> Tensor:
    """Return the keys' softmax weights (B, G, N) for the query `mean` (B, G, D), up to a factor.

    `mean` is the mean of a sample of the queries. There are G key-value heads with N keys each.
    """
    score = torch.matmul(k, mean[..., None])[..., 0]
    return torch.exp2(score.nan_to_num(0.0).clamp(-MOST_SCORE, MOST_SCORE))


def _aligned(x: Tensor, codes: Tensor, direction: Tensor, settings: Settings) -> Tensor:
    """Return the keys' codes, changed so that their error is nearly orthogonal to `direction`.

    `direction` is the sum of a sample of the queries, (B, G, D), for G key-value heads. Its
    channels are scaled and Hadamard transformed like those of the queries. If queries have a large
    common mean, the rounding error of a key affects all queries in the same way. The function
    removes most of this error by integer changes in two channels. The first is the channel where
    `direction` is largest, the second a channel where `direction` is about a third as large.
    """
    size = direction.abs()
    largest = size.amax(2, keepdim=True)
    first = size.argmax(2, keepdim=True)
    away = (size.maximum(largest * 1e-6) * FINER / largest.clamp_min(1e-30)).clamp_min(1e-30)
    away = away.log2().abs().scatter(2, first, math.inf)
    step_size = 1 + settings.is_odd
    left = torch.matmul(x - codes, direction[..., None])[..., 0] / step_size
    codes = codes.clone()
    for place in (first, away.argmin(2, keepdim=True)):
        step = direction.gather(2, place)
        is_shared = (largest > 0) & (step != 0)
        steps = (left / torch.where(is_shared, step, 1.0)).round()
        left = left - torch.where(is_shared, steps * step, 0.0)
        steps = torch.where(is_shared & (steps.abs() <= MOST_STEPS), steps, 0.0)
        at = place[:, :, None].expand(*codes.shape[:3], 1)
        codes.scatter_add_(3, at, step_size * steps[..., None])
    return codes.clamp(-settings.limit, settings.limit)


def _by_block(rest: Tensor) -> Tensor:
    """Return the sums of `rest` over the first 0, 1, 2 and so on blocks of keys.

    `rest` contains D numbers per key, for example the rounding errors of the key's value. Its shape
    is (B, G, N, D) for the batch size B, G key-value heads and N keys. The shape of the result is
    (B, G, blocks + 1, D).
    """
    missing = -rest.shape[2] % BLOCK
    rest = torch.nn.functional.pad(rest, (0, 0, 0, missing))
    sums = rest.unflatten(2, (-1, BLOCK)).sum(3).cumsum(2)
    return torch.nn.functional.pad(sums, (0, 0, 1, 0))


def _weights_of_none(key_mask: Tensor | None, k: Tensor) -> Tensor:
    """Return 1 for each key that `key_mask` does not exclude, and 0 for each other key.

    The result is (B, G, N), for the batch size B, G key-value heads and N keys.
    """
    found = k.new_ones(k.shape[:3])
    return found if key_mask is None else found * key_mask[:, None]


def means(
    k: Tensor, v: Tensor, key_mask: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Return the means that are subtracted from keys and values, (B, G, 1, D) each.

    There is one mean for each of the G key-value heads. If the settings do not subtract a mean,
    that mean is zero.
    """
    sampled = slice(None, None, SAMPLE)
    k_mean = _mean(k[:, :, sampled], None if key_mask is None else key_mask[:, sampled])
    v_mean = _mean(v, key_mask)
    if "k" not in settings.smooth:
        k_mean = torch.zeros_like(k_mean)
    return k_mean, v_mean if "v" in settings.smooth else torch.zeros_like(v_mean)


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    count = x.shape[2] if mask is None else mask.sum(1).clamp_min(1)[:, None, None, None]
    return _shown(x, mask).sum(2, keepdim=True) / count


def _shown(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)


def _smooth_queries(
    q: Tensor, k: Tensor, repeat: int, settings: Settings
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Subtract from each query the mean of its block of queries.

    Return the differences, the means, and the scores of the means with the keys.
    """
    if "q" not in settings.smooth:
        return q, q[:, :, :0], None
    starts = range(0, q.shape[2], BLOCK)
    mean = torch.stack([q[:, :, start : start + BLOCK].mean(2) for start in starts], 2)
    q = q - mean.repeat_interleave(BLOCK, 2)[:, :, : q.shape[2]]
    return q, mean, correction_of(mean, k, repeat)


def correction_of(mean: Tensor, k: Tensor, repeat: int) -> Tensor:
    """Return the scores of the means of queries (B, H, blocks, D) with the keys (B, G, N, D)."""
    batch, heads, blocks, depth = mean.shape
    grouped = mean.reshape(batch, heads // repeat, repeat * blocks, depth)
    return torch.matmul(grouped, k.transpose(2, 3)).view(batch, heads, blocks, k.shape[2])


def _largest(x: Tensor, groups: Tensor) -> Tensor:
    """Return, for each row of (B, H, L, D), the largest absolute value in the group of rows that
    shares the row's scale."""
    size = _sizes(x.abs().amax(3), x.sum(3), LEAST)
    found = size.new_zeros((*size.shape[:2], int(groups.max()) + 1))
    index = groups.expand(size.shape)
    return found.scatter_reduce(2, index, size, "amax").gather(2, index)


def _sizes(size: Tensor, total: Tensor, least: float) -> Tensor:
    """Return safe divisors: `size`, raised to at least `least`.

    `size` contains the largest absolute value of each group of numbers, and `total` contains the
    group's sum. If the sum is not finite, the divisor is nan.
    """
    return size.clamp_min(least) + total * 0.0


def attend(
    q: Tensor, k: Tensor, v: Tensor, given: Conditions, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Return attention over the keys that no mask excludes, and the scores' log-sum-exp.

    The first result has the shape (B, H, M, D): sequences, heads, queries, head dimension. The
    result's memory has the order (B, M, H, D).

    The second result is the log-sum-exp of each query's scores as a natural logarithm, (B, H, M) in
    fp32. If the caller does not request the log-sum-exp, the second result is (B, H, 0).
    """
    batch, heads, queries, depth = q.shape
    out = q.new_zeros((batch, queries, heads, depth)).transpose(1, 2)
    lse = q.new_full((batch, heads, queries), -math.inf, dtype=torch.float32)
    wanted = lse if settings.with_lse else lse[:, :, :0].clone()
    if not q.numel() or not k.numel():
        return out, wanted
    made = codes(q, k, v, given, settings)
    size = max(BLOCK, BLOCK_SCORES // max(1, batch * heads * BLOCK) // BLOCK * BLOCK)
    for first in range(0, queries, size):
        stop = min(first + size, queries)
        found, sums = _attend_block(made, given, settings, first, stop)
        out[:, :, first:stop] = found.to(q.dtype)
        lse[:, :, first:stop] = sums
    return out, wanted


def _attend_block(
    made: Codes, given: Conditions, settings: Settings, first: int, stop: int
) -> tuple[Tensor, Tensor]:
    kind = VALUES[settings.values]
    batch, heads, rows = made.q_scale[:, :, first:stop].shape
    groups, keys, depth = made.v.shape[1:]
    repeat = heads // groups
    largest = made.q.new_full((batch, heads, rows, 1), NOTHING)
    total = torch.zeros_like(largest)
    acc = made.q.new_zeros((batch, heads, rows, depth))
    low, high = given.keys_of(first, stop, made.q.shape[2], keys)
    for start in range(low // BLOCK * BLOCK, high, BLOCK):
        end = min(start + BLOCK, keys)
        score = _scores(made, repeat, first, stop, start, end)
        counts = given.counts(first, stop, start, end, made.q.device)
        score = score.masked_fill(~counts[:, None], -math.inf)
        higher = torch.maximum(largest, score.amax(-1, keepdim=True) - kind.offset)
        weight = torch.exp2(score - higher)
        shrink = torch.exp2(largest - higher)
        total = total * shrink + weight.sum(-1, keepdim=True)
        weight = kind.rounded(weight).reshape(batch, groups, repeat * rows, end - start)
        product = torch.matmul(weight, made.v[:, :, start:end]).view(batch, heads, rows, depth)
        acc = acc * shrink + product
        largest = higher
    is_empty = total == 0.0
    share = acc / total.masked_fill(is_empty, 1.0)
    if made.rest is not None:
        share = share + _mean_rest(made, given, first, stop).repeat_interleave(repeat, 1)
    share = share.view(batch, groups, repeat, rows, depth)
    out = share * made.v_scale[:, :, None, None] + made.v_mean[:, :, None, None]
    out = out.view(batch, heads, rows, depth).masked_fill(is_empty, 0.0)
    lse = (largest + total.log2())[..., 0] + made.shift[:, :, first:stop]
    return out, (lse * math.log(2.0)).masked_fill(is_empty[..., 0], -math.inf)


def _mean_rest(made: Codes, given: Conditions, first: int, stop: int) -> Tensor:
    """Return, per channel, the mean rounding error of the values that each query may attend to.

    In the mean, a value usually has the weight 1. The queries may have a large common mean that is
    not subtracted from them. Then a value's weight is the softmax weight of its key for that common
    mean. The queries of a tile of QUERY_ROWS queries share a mean error. The mean is over whole
    blocks of keys. A block counts if a causal mask or a sliding window allows one of its keys for
    any query of the tile. The queries are those from `first` up to, not including, `stop`. The
    result has the shape (B, G, queries, D), for G key-value heads and the head dimension D.

    The softmax weights of a query sum to 1, so an error that all values share appears unchanged in
    attention's output.
    """
    assert made.rest is not None
    queries, keys = made.q.shape[2], made.k.shape[2]
    found = []
    for start in range(first, stop, QUERY_ROWS):
        end = min(start + QUERY_ROWS, stop)
        low, high = given.keys_of(start, end, queries, keys)
        low, high = low // BLOCK, max(low // BLOCK, -(-high // BLOCK))
        rest = made.rest[:, :, high] - made.rest[:, :, low]
        count = made.counts[:, :, high] - made.counts[:, :, low]
        mean = (rest / count.clamp_min(LEAST_VALUE)[..., None]).clamp(-MOST_REST, MOST_REST)
        found.append(mean[:, :, None].expand(-1, -1, end - start, -1))
    return torch.cat(found, 2)


def _scores(made: Codes, repeat: int, first: int, stop: int, start: int, end: int) -> Tensor:
    """Return scores of the queries `first:stop` and the keys `start:end`, (B, H, queries, keys).

    A softmax weight is 2 to the power of a score, up to a factor per query.
    """
    q = made.q[:, :, first:stop]
    batch, heads, rows, depth = q.shape
    q = q.reshape(batch, heads // repeat, repeat * rows, depth)
    found = torch.matmul(q, made.k[:, :, start:end].transpose(2, 3))
    found = found.view(batch, heads, rows, end - start)
    key_scale = made.k_scale[:, :, start:end].repeat_interleave(repeat, 1)
    scale = made.q_scale[:, :, first:stop, None] * key_scale[:, :, None]
    if made.correction is None:
        return found * scale
    block = torch.arange(first, stop, device=q.device) // BLOCK
    correction = made.correction[:, :, block, start:end]
    if made.is_start:
        return (found + (correction / scale).round()) * scale
    return found * scale + correction
