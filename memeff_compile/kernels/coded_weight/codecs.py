"""The GPU implementation `triton` of compressed weights: it launches the kernels of all codecs.
This implementation needs a CUDA GPU of sm_80 or later.

A codec is a compressed format for weights: it replaces the exponents of a weight's elements by
short codes. The codecs `win4` and `tier` have codes only for some exponents. They store elements
with other exponents whole, in lists. When a weight is encoded, the lengths of these lists are
copied from the GPU to the CPU, which waits for them. If memory for the lists is already allocated,
the CPU gets the lengths later (`Outcome`), and does not wait for the GPU. When a weight is decoded
or multiplied, no value is copied from the GPU to the CPU. So a CUDA graph can capture these calls.
Matrix products sum without atomic operations, so the same inputs give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .._triton.compat import has_gluon
from .._triton.launch import launch_plain, start
from ..device import gpu, on_device, processors
from . import shapes
from .layout import (
    CHUNK,
    CODECS,
    GROUP,
    LANES,
    RANS_CHUNK,
    RUN,
    Format,
    Multiplied,
    frequencies,
    padded,
    sampled,
    tier_header,
)
from .reference import STREAM_TAIL, as_patterns, move, normalise, rans_table, with_signs


@dataclass(frozen=True)
class Room:
    """How much spare memory a compressed weight's tensors of variable length get at their end.

    These tensors are called lists (`layout.LISTS`). Their lengths depend on the weight's values.
    Later values of the weight may need longer lists.
    """

    share: float = 0.0  # spare elements, as a share of the elements that are used now
    least: int = 0  # the fewest spare elements

    def length(self, needed: int) -> int:
        """Return how many elements to allocate for a list, a coded tensor of variable length.

        `needed` is the number of elements that are used.
        """
        return needed + max(math.ceil(needed * self.share), self.least)


EXACT_FIT = Room()


@cache
def kernel_of(module: str, name: str) -> Any:
    return getattr(import_module(f".{module}", __package__), name)


@cache
def _settings(*given: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return two arguments of `launch_plain`: the launch options (warps, constants) as a
    dictionary, and the same values as a tuple.

    The tuple can be the key of a dictionary.
    """
    warps, *constants = given
    return {**dict(constants), "num_warps": warps}, given


def _run(
    module: str,  # of the kernel; it is loaded when it is needed
    kernel: str,  # its name there
    on: Tensor,  # whose GPU runs it
    grid: tuple[int, ...],
    *operands: Any,
    warps: int,
    **constants: Any,
) -> None:
    with on_device(on):
        start(kernel_of(module, kernel), grid, *operands, **constants, num_warps=warps)


def _run_often(
    module: str,
    kernel: str,
    grid: int,
    tensors: Sequence[Tensor],  # on one GPU; the dtype of each follows from the constants
    numbers: Sequence[int | float],  # after them; their values make no difference to the compiler
    warps: int,
    *constants: tuple[str, Any],
) -> None:
    """Run a kernel, as `_run` does, but with less host time, because a training step calls this
    function 1,000 times."""
    settings, name = _settings(warps, *constants)
    with on_device(tensors[0]):
        launch_plain(kernel_of(module, kernel), (grid,), tensors, numbers, settings, name)


class Step(NamedTuple):
    """The numbers of one step of `torch.optim.SGD` without momentum, such as the learning rate."""

    rate: float  # learning rate
    decay: float = 0.0  # weight decay


HEADING = 8
"""The heading of a spill buffer, in numbers of 16 bits: the lengths that the value's lists need."""


def sheltered(count: int) -> int:
    """Return the length of the buffer for a weight whose new codes do not fit, in 16-bit numbers.

    The weight has `count` elements. The buffer, called a spill buffer, receives the weight's new
    value if the value's codes do not fit into the weight's coded tensors.
    """
    return HEADING + padded(count)


class Outcome:
    """The result of encoding a new value into a weight's coded tensors: whether the codes fitted.

    A list is a coded tensor whose needed length depends on the weight's values. An example is the
    list of elements whose exponents have no code. The codes fit if each list of the weight is long
    enough. The CPU knows the result only after the GPU has run the kernels.
    """

    def __init__(
        self,
        needed: Tensor,  # lengths that lists need, int32 on the weight's device
        rooms: Sequence[int],  # those they have
        refuge: Tensor | None = None,  # where a kernel writes them too, if any
    ) -> None:
        """Store the needed and the available lengths of the weight's tensors of variable length.

        These tensors are the weight's lists, such as the list of elements whose exponents have no
        code. Their needed lengths depend on the weight's values. A spill buffer is memory for a
        value whose codes do not fit. Also store `refuge`, the spill buffer, if there is one. GPU
        kernels write the needed lengths to its header. If a list is too short, the kernels also
        write the weight's new value to the spill buffer.
        """
        self._needed, self._rooms, self._refuge = needed, rooms, refuge
        self._event: torch.cuda.Event | None = None

    def shelter(self, value: Tensor, refuge: Tensor) -> None:
        """Start a kernel that copies a new value to `refuge` if the weight's tensors are too short.

        The lengths that some tensors of a compressed weight need depend on the weight's value. An
        example is the list of elements whose exponents have no code. As soon as this method
        returns, the caller may free the value.

        `value` is the weight's new value, contiguous in bf16. `refuge` is a spill buffer: an int16
        tensor in pinned memory. The buffer has space for a header in addition to the value.
        """
        rooms = (*self._rooms, 0, 0)[:3]
        tensors = (value.view(-1).view(torch.int16), self._needed, refuge)
        numbers, grid = (*rooms, value.numel()), processors(value.device)
        sizes = (4, ("COUNT", len(self._rooms)), ("BLOCK", 1024))
        _run_often(
            "pair_kernels", "_coded_weight_pair_shelter_kernel", grid, tensors, numbers, *sizes
        )
        self._refuge = refuge

    def fetch(self) -> None:
        """Start an asynchronous copy to the CPU of the lengths that a weight's tensors need.

        The lengths that some tensors of a compressed weight need depend on the weight's value. An
        example is the list of elements whose exponents have no code. If one of these tensors is too
        short for a weight's new value, the whole value is written to CPU memory, the spill buffer.
        If there is a spill buffer, GPU kernels write the needed lengths to its header. Then this
        method copies nothing.
        """
        with on_device(self._needed):
            if self._needed.is_cuda:
                self._event = torch.cuda.Event()
            if self._refuge is None:
                self._needed = self._needed.to("cpu", non_blocking=True)
            if self._event is not None:
                self._event.record()

    def fits(self) -> bool:
        """Wait for the GPU, and return whether a weight's tensors are long enough for its value.

        The lengths that some tensors of a compressed weight need depend on the weight's value. An
        example is the list of elements whose exponents have no code.
        """
        if self._event is not None:
            self._event.synchronize()
        elif self._needed.is_cuda:  # the spill buffer may not be written yet
            torch.cuda.synchronize(self._needed.device)
        needed = self._needed
        if self._refuge is not None:
            needed = self._refuge[:HEADING].view(torch.int32)
        return all(need <= room for need, room in zip(needed.tolist(), self._rooms, strict=False))


def make_refuge(count: int, device: torch.device) -> Tensor | None:
    """Return a spill buffer: CPU memory for `count` 16-bit numbers, which GPU kernels can write to.

    A spill buffer receives a weight's new value if the value's codes do not fit into the weight's
    coded tensors. The spill buffer has dtype int16 and is pinned. Return None if no pinned memory
    is available, or if a trial shows that the GPU does not write to it.
    """
    try:
        refuge = torch.zeros(count, dtype=torch.int16, pin_memory=True)
        trial = torch.ones(64, dtype=torch.bfloat16, device=device)
        outcome = Outcome(torch.ones(1, dtype=torch.int32, device=device), [0])
        outcome.shelter(trial, refuge)
        outcome.fetch()
        fits = outcome.fits()
    except (RuntimeError, ValueError):
        return None
    kept = refuge[HEADING : HEADING + 64]
    return None if fits or bool((kept != trial.cpu().view(torch.int16)).any()) else refuge


def _empty(like: Tensor, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(count, dtype=dtype, device=like.device)


def histogram(patterns: Tensor, every: int = 1) -> Tensor:
    """Return how often each of the 256 exponents occurs in a weight, as int32.

    `patterns` contains the weight's elements as 16-bit patterns. The function counts only every
    n-th run of 16,384 consecutive elements, where n is `every`.
    """
    counts = torch.zeros(256, dtype=torch.int32, device=patterns.device)
    grid, sizes = (
        -(-patterns.numel() // (RUN * every)),
        (4, ("BLOCKS", RUN // 1024), ("BLOCK", 1024)),
    )
    tensors = (patterns, counts)
    _run_often(
        "pair_kernels", "_coded_weight_pair_histogram_kernel", grid, tensors, [every], *sizes
    )
    return counts


def encode(weight: Tensor, form: Format, room: Room = EXACT_FIT) -> list[Tensor]:
    """Return the tensors that encode a nonempty bf16 weight, in the order of `form.parts`.

    `room` says how much spare memory these tensors get. If the format is lossless, `encode_soon`
    can encode later values of the weight into the same tensors, as long as the codes fit.
    """
    whole = as_patterns(weight)
    if form.is_lossless:
        return _encode(whole, form, room)
    patterns, norms = normalise(whole, form)
    *parts, _ = _encode(patterns, form, room)  # without the fields of all mantissa bits
    return [*with_signs(parts, form, whole, patterns), norms]


def _encode(patterns: Tensor, form: Format, room: Room) -> list[Tensor]:
    """Return the tensors that encode the given bit patterns exactly.

    For a lossy format, the caller has already rounded the weights with `normalise`.
    """
    if form.codec == "win4":
        counts, header = histogram(patterns, sampled(patterns.numel())), _empty(patterns, 1)
        # The window is chosen without waiting for the GPU.
        _run_often("win4_kernels", "_coded_weight_win4_window_kernel", 1, (counts, header), (), 4)
        return _encode_win4(patterns, header, room)
    found = histogram(patterns).tolist()
    if form.codec == "rans":
        return _encode_rans(patterns, found, room)
    header = torch.tensor(tier_header(found), dtype=torch.int32, device=patterns.device)
    return _encode_tier(patterns, header, room)


def encode_soon(
    parts: Sequence[Tensor],
    weight: Tensor,
    form: Format,
    refuge: Tensor | None = None,  # spill buffer for `Outcome.shelter`
    counts: Tensor | None = None,  # the result of `step`, if that made the weight
) -> Outcome | bool:
    """Encode a new value of a weight into the weight's coded tensors, `parts`.

    A codec is a compressed format. The codecs `win4` and `tier` keep the old value's exponent
    windows (ranges of exponents that have a code).

    For the codec `rans`, return whether the codes fitted into `parts`. The codecs `win4` and `tier`
    do not make the CPU wait for the GPU, and return an `Outcome`. Its method `fits` waits for the
    GPU, and returns whether the codes fitted. If the codes did not fit, the tensors are invalid.
    Then only the spill buffer contains the weight, if there is one. A spill buffer is memory for a
    weight's new value whose codes did not fit.
    """
    patterns = as_patterns(weight) if counts is None else weight
    if form.codec == "rans":
        return move(_encode_rans(patterns, histogram(patterns).tolist(), EXACT_FIT), parts)
    if form.codec == "win4":
        counts = _code_win4(patterns, parts) if counts is None else counts
        return _list_win4(patterns, parts, counts, refuge)
    found = _encode_tier_again(patterns, parts)
    if refuge is not None:
        found.shelter(weight, refuge)
    return found


def _patch_lists(starts: Tensor, total: int, room: Room) -> list[Tensor]:
    length = room.length(total)
    return [starts, *(starts.new_zeros(length, dtype=torch.int16) for _ in range(2))]


def _code_win4(patterns: Tensor, parts: Sequence[Tensor], by: Step | None = None) -> Tensor:
    """Write the exponent codes, signs and mantissas of a weight. If `by`, an optimizer step, is
    given, first update the weight.

    A patch is a nonzero element of the weight whose exponent has no code. Return how many patches
    each chunk (8192 weights) has, and which groups of 256 weights have patches. The function
    `_list_win4` needs these numbers. If `by` is None, the lists of patches in `parts` are not read.
    """
    chunks = patterns.numel() // CHUNK
    counts = _empty(patterns, 2 * chunks)
    rates, steps = moves(by)
    warps = shapes.WIN4_ENCODE_WARPS if by is None else shapes.WIN4_STEP_WARPS
    tensors, constants = (patterns, *parts, counts), (*steps, ("PATCHES", shapes.PATCHES))
    _run_often(
        "win4_kernels",
        "_coded_weight_win4_encode_kernel",
        chunks,
        tensors,
        rates,
        warps,
        *constants,
    )
    return counts


def _list_win4(
    patterns: Tensor, parts: Sequence[Tensor], counts: Tensor, refuge: Tensor | None = None
) -> Outcome:
    header, _, *lists, _ = parts
    starts, room, chunks = lists[0], lists[1].numel(), patterns.numel() // CHUNK
    each = -(-chunks // shapes.LISTS_PROGRAMS)
    tensors = (patterns, header, counts, *lists, counts if refuge is None else refuge)
    sizes = (1, ("BLOCK", shapes.STARTS_BLOCK), ("REFUGE", refuge is not None))
    numbers, grid = (room, chunks, each), -(-chunks // each)
    _run_often("win4_kernels", "_coded_weight_win4_lists_kernel", grid, tensors, numbers, *sizes)
    return Outcome(starts if refuge is not None else starts[-1:], [room], refuge)


def _encode_win4(patterns: Tensor, header: Tensor, room: Room) -> list[Tensor]:
    size = patterns.numel()
    codes, signs = _empty(patterns, size // 8), _empty(patterns, size // 4)
    starts = _empty(patterns, size // CHUNK + 1)
    counts = _code_win4(patterns, [header, codes, starts, patterns, patterns, signs])
    total = int(counts[: size // CHUNK].sum())
    parts = [header, codes, *_patch_lists(starts, total, room), signs]
    _list_win4(patterns, parts, counts)
    return parts


def _count_tier(patterns: Tensor, header: Tensor) -> Tensor:
    """Return where each chunk of weights begins in the bit streams and in the list of patches
    (elements whose exponents have no code).
    """
    chunks = patterns.numel() // CHUNK
    counts = torch.empty((chunks, 3), dtype=torch.int32, device=patterns.device)
    tensors = (patterns, header, counts)
    _run_often(
        "tier_kernels", "_coded_weight_tier_count_kernel", chunks, tensors, (), 4, ("BLOCK", 1024)
    )
    # PyTorch sums in parallel along the last dimension, and serially along the first.
    return F.pad(counts.t().contiguous().cumsum(1, dtype=torch.int32), (1, 0)).t()


def _write_tier_patches(patterns: Tensor, header: Tensor, lists: Sequence[Tensor]) -> None:
    """Write the positions and values of a weight's patches (elements whose exponents have no code)
    to `lists`.

    The first tensor of `lists` already contains the index at which the patches of each chunk (8192
    weights) start.
    """
    room, grid = lists[1].numel(), lists[0].numel() - 1
    if room:
        tensors, sizes = (patterns, header, *lists), (4, ("BLOCK", 1024))
        _run_often(
            "pair_kernels", "_coded_weight_pair_patches_kernel", grid, tensors, [room], *sizes
        )


def _write_tier(patterns: Tensor, parts: Sequence[Tensor]) -> None:
    """Write a weight's exponent codes, signs and mantissas to `parts`, for the codec `tier`.

    The codec `tier`, a compressed format, codes exponents in 2, 4 or 8 bits. The codes are split
    into three tensors of `parts`. The tensor `first` has the first 2 bits of each code. The tensors
    `second` and `third` have the further bits of longer codes. Before the call, `second` and
    `third` must contain only zeros, because the kernel only sets bits. `stream_starts` must already
    contain the index at which each chunk (8192 weights) starts in `second` and `third`.
    """
    header, first, second, third, stream_starts, *_, signs = parts
    rooms, words = (second.numel(), third.numel()), patterns.view(torch.int32)
    tensors = (words, header, first, second, third, stream_starts, signs)
    grid, warps = patterns.numel() // CHUNK, shapes.TIER_ENCODE_WARPS
    _run_often("tier_kernels", "_coded_weight_tier_encode_kernel", grid, tensors, rooms, warps)


def _encode_tier(patterns: Tensor, header: Tensor, room: Room) -> list[Tensor]:
    size = patterns.numel()
    starts = _count_tier(patterns, header)
    *in_streams, patched = starts[-1].tolist()
    streams = (starts.new_zeros(room.length(count) + STREAM_TAIL) for count in in_streams)
    parts = [
        header,
        _empty(patterns, size // 16),
        *streams,
        starts[:, :2].contiguous(),
        *_patch_lists(starts[:, 2].contiguous(), patched, room),
        _empty(patterns, size // 4),
    ]
    _write_tier(patterns, parts)
    _write_tier_patches(patterns, header, parts[5:8])
    return parts


def _encode_tier_again(patterns: Tensor, parts: Sequence[Tensor]) -> Outcome:
    header, _, second, third, stream_starts, *lists, _ = parts
    starts = _count_tier(patterns, header)
    stream_starts.copy_(starts[:, :2])
    lists[0].copy_(starts[:, 2])
    second.zero_()
    third.zero_()
    _write_tier(patterns, parts)
    _write_tier_patches(patterns, header, lists)
    rooms = [second.numel() - STREAM_TAIL, third.numel() - STREAM_TAIL, lists[1].numel()]
    return Outcome(starts[-1].contiguous(), rooms)


def _encode_rans(patterns: Tensor, histogram: Sequence[int], room: Room) -> list[Tensor]:
    size = patterns.numel()
    chunks, warps = size // RANS_CHUNK, shapes.RANS_WARPS
    slots = frequencies(histogram)
    before = [sum(slots[:exponent]) for exponent in range(256)]
    table = torch.tensor([slots, before], dtype=torch.int32, device=patterns.device)
    counts, states = _empty(patterns, chunks), _empty(patterns, chunks * LANES)

    def launch(words: Tensor, starts: Tensor, *, count: bool) -> None:
        tensors = (patterns, table, words, starts, states, counts)
        grid, how = -(-chunks // warps), (warps, ("COUNT", count), ("WARPS", warps))
        _run_often(
            "rans_kernels", "_coded_weight_rans_encode_kernel", grid, tensors, [chunks], *how
        )

    launch(patterns, counts, count=True)
    starts = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    words = patterns.new_zeros(room.length(int(starts[-1])))
    launch(words, starts, count=False)
    signs, operand = _empty(patterns, size // 4), patterns.view(torch.int32)
    tensors, grid = (operand, signs), size // CHUNK
    _run_often(
        "pair_kernels", "_coded_weight_pair_signs_kernel", grid, tensors, (), 4, ("BLOCK", 512)
    )
    header = torch.tensor(rans_table(histogram), dtype=torch.int32, device=patterns.device)
    return [header, words, starts, states, signs]


def decode(parts: Sequence[Tensor], form: Format, shape: Sequence[int]) -> Tensor:
    """Return the decoded bf16 weight.

    The memory of the result may be slightly larger than the weight.
    """
    count = math.prod(shape)
    if count == padded(count):
        out = torch.empty(tuple(shape), dtype=torch.bfloat16, device=parts[0].device)
        decode_flat(parts, form, out)
        return out
    words = _empty(parts[0], padded(count), torch.int16)
    decode_flat(parts, form, words)
    return words[:count].view(torch.bfloat16).view(*shape)


def steps(form: Format, gradient: Tensor) -> bool:
    """Return whether `step` can apply an optimizer step with this gradient to a compressed weight.

    The answer depends on the weight's format, and on the gradient's dtype, size and memory layout.
    `step` overwrites the gradient with the updated weight.
    """
    return (
        form.is_lossless
        and gradient.dtype == torch.bfloat16
        and gradient.is_contiguous()
        and gradient.numel() == padded(gradient.numel())
        and gradient.data_ptr() % 16 == 0
    )


def step(parts: Sequence[Tensor], form: Format, gradient: Tensor, by: Step) -> Tensor | None:
    """Overwrite a gradient with the updated weight, in the memory of the gradient.

    The updated weight equals, bit for bit, the weight that `torch.optim.SGD` computes from the
    decoded weight on the same GPU. Afterwards the coded tensors contain no valid weight until
    `encode_soon` has encoded the updated weight into them. Pass this function's result to
    `encode_soon` as its argument `counts`. For the codec (compressed format) `win4`, the result
    counts the updated weight's patches (elements whose exponents have no code). For other codecs,
    the result is None. The codec must be lossless. The function `steps`, which checks the
    gradient's dtype, size and memory layout, must have returned True. If memory runs out, this
    function raises an error and has changed no coded tensor.
    """
    if form.codec == "win4":
        return _code_win4(gradient, parts, by)
    decode_flat(parts, form, gradient, by)
    return None


_Constants: TypeAlias = tuple[tuple[str, Any], ...]


def moves(by: Step | None) -> tuple[tuple[float, ...], _Constants]:
    """Return the kernel arguments that describe an optimizer step: two numbers and compile-time
    constants.

    The numbers are the negative learning rate and the weight decay. The constants say whether there
    is a step, and whether its weight decay is not 0.
    """
    if by is None:
        return (0.0, 0.0), (("STEP", False), ("HAS_DECAY", False))
    return (-float(by.rate), float(by.decay)), (("STEP", True), ("HAS_DECAY", by.decay != 0))


def _decoding(codec: str) -> tuple[int, int, _Constants]:
    """Return how many weights one program of the decoding kernel handles, its number of warps, and
    its compile-time constants."""
    patches = ("PATCHES", shapes.PATCHES)
    if codec == "win4":
        words = shapes.WIN4_DECODE_WORDS
        return 8 * words, shapes.WIN4_DECODE_WARPS, (("WORDS", words), patches)
    if codec == "tier":
        return CHUNK, shapes.TIER_DECODE_WARPS, (patches,)
    return RANS_CHUNK * shapes.RANS_WARPS, shapes.RANS_WARPS, (("WARPS", shapes.RANS_WARPS),)


def decode_flat(parts: Sequence[Tensor], form: Format, out: Tensor, by: Step | None = None) -> None:
    """Write the decoded bit patterns of a weight, followed by zeros, to the buffer `out`.

    The buffer contains 16-bit numbers. Their number is the weight's size, rounded up to a multiple
    of 16,384 (`padded`). For the codecs (compressed formats) `tier` and `rans` with an optimizer
    step `by`, the caller passes a gradient in the buffer. This function overwrites the gradient
    with the updated weight. For the codec `win4`, this function ignores `by`: `_code_win4` updates
    and encodes in one kernel.
    """
    size, warps, fields = _decoding(form.codec)
    kind = (("FIELD", form.mantissa + 1), ("BLOCK", form.block), ("PACKED", out.is_cuda))
    fields = (*kind, *fields)
    numbers: tuple[float, ...] = ()
    if form.codec != "win4":
        numbers, steps = moves(by)
        fields += steps
    if form.codec == "rans":
        numbers += (out.numel() // RANS_CHUNK,)
    norms = parts[-1:] if form.is_lossless else ()  # which are not read then
    tensors, grid = (*parts, *norms, out), -(-out.numel() // size)
    _run_often(*_DECODERS[form.codec], grid, tensors, numbers, warps, *fields)


_DECODERS = {
    codec: (f"{codec}_kernels", f"_coded_weight_{codec}_decode_kernel") for codec in CODECS
}


def fuses(
    form: Format,  # of the weight
    tokens: int,  # m
    shape: Sequence[int],  # (N, K) of the weight
    device: torch.device | None = None,  # the weight's device; for one token any
    *,
    # a gradient is needed: products then equal those of a dense layer bit for bit
    trains: bool = False,
) -> bool:
    """Return whether, for a given number of tokens, one kernel decodes and multiplies the weight.

    Otherwise the weight is decoded first.
    """
    if trains or form.family != "win4" or len(shape) != 2 or shape[1] % GROUP:
        return False
    if tokens <= 1:
        return tokens == 1
    return device is not None and setting_of(tokens, shape, device, form) is not None


WIN4 = Format("win4")


class _Product(NamedTuple):
    """The operands of a product with a compressed weight.

    `x` contains the tokens, and `parts` the weight's coded tensors. The weight's shape is (N, K),
    for N outputs and K inputs. `bias` is (N,), or None without a bias. `form` is the format in
    which the weight is compressed.
    """

    x: Tensor
    parts: Sequence[Tensor]
    bias: Tensor | None
    shape: Sequence[int]
    form: Format

    def operand(self, out: Tensor) -> Multiplied:
        """Return the argument that describes the weight for a kernel that multiplies by it.

        The argument includes `out`, to which the kernel writes the product.
        """
        norms = self.parts[-1:] if self.form.is_lossless else ()  # which are not read then
        bias = out if self.bias is None else self.bias
        return Multiplied._make((*self.parts, *norms, bias, out, self.shape[0]))


def _given(
    x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, shape: Sequence[int], form: Format
) -> _Product:
    bias = None if bias is None else bias.expand(shape[0]).contiguous()
    return _Product(x, parts, bias, shape, form)


def product(
    x: Tensor,  # (M, K) bf16
    parts: Sequence[Tensor],  # parts of the weight, of a format that `fuses` allows
    bias: Tensor | None,  # (N,) bf16 or None
    shape: Sequence[int],  # (N, K), K a multiple of 256
    form: Format = WIN4,
    *,
    setting: Setting | None = None,  # tile, by default the choice of `shapes`
) -> Tensor:
    """Return x @ W.T, (M, N) bf16, for a weight W with 4-bit exponent codes (codec `win4`).

    The kernel that multiplies also decodes the weight. The kernel sums in fp32.
    """
    given = _given(_aligned(x), parts, bias, shape, form)
    setting = setting or setting_of(x.shape[0], shape, x.device, form)
    if isinstance(setting, shapes.RowTile):
        return _one_row([given], [setting])[0]
    if isinstance(setting, shapes.WideTile):
        return _wide(given, setting)
    assert setting is not None, "`fuses` says where there is none"
    return _few([given], setting)[0]


Setting: TypeAlias = shapes.RowTile | shapes.MatrixTile | shapes.WideTile
"""The kernel that multiplies, and its tile."""


def setting_of(
    tokens: int, shape: Sequence[int], device: torch.device, form: Format = WIN4
) -> Setting | None:
    """Return the tile sizes of a kernel that decodes and multiplies a weight, or None if another
    kernel must decode the weight first."""
    (rows, columns), count = shape, processors(device)
    has_matrix = device.type == "cuda" and has_gluon()
    if tokens == 1 and (form.is_lossless or not has_matrix):
        return _row_tile(rows, count, form)
    if not has_matrix:
        return None
    if tokens == 1 and shapes.fits_halves(form.block, columns, form.mantissa):
        return shapes.halves_tile(rows, columns, form.mantissa, count)
    if tokens <= shapes.MAX_FUSED_TOKENS:
        return shapes.matrix_tile(tokens, rows, columns, count, is_lossless=form.is_lossless)
    is_wide = tokens <= shapes.MAX_WIDE_TOKENS and gpu(device).is_hopper
    return shapes.wide_tile(tokens, rows, columns, count) if is_wide else None


def _row_tile(rows: int, processors: int, form: Format) -> shapes.RowTile:
    find = shapes.row_tile if form.is_lossless else shapes.narrow_row_tile
    return find(rows, processors)


def _one_row(several: Sequence[_Product], tiles: Sequence[shapes.RowTile]) -> list[Tensor]:
    """Multiply one token by one, two or three compressed weight matrices in one launch.

    `several` contains one product for each weight. All of these products have the same input `x`,
    whose only row is the token.
    """
    x, count, form = several[0].x, len(several), several[0].form
    outs = [x.new_empty((1, each.shape[0])) for each in several]
    found = [_multiplied(*each) for each in zip(several, outs, tiles, strict=True)]
    constants: dict[str, Any] = {
        "PATCHES": shapes.PATCHES,
        "PACKED": tiles[0].packed and x.is_cuda,
        "FIELD": form.mantissa + 1,
        "BLOCK": form.block,
    }
    if count == 1:
        kernel, constants["TILE"] = "_coded_weight_row_win4_kernel", found[0][1]
    else:
        kernel, constants["COUNT"] = "_coded_weight_row_win4_several_kernel", count
        found += found[-1:] * (MAX_TOGETHER - count)  # a missing third weight is not read
        constants |= {f"TILE_{place}": each for place, (_, each) in enumerate(found)}
    words = (x.view(torch.int32), *(operand for operand, _ in found), x.shape[1] // 8)
    grid = (sum(-(-out.numel() // tile.rows) for out, tile in zip(outs, tiles, strict=True)),)
    _run("row_kernels", kernel, x, grid, *words, **constants, warps=tiles[0].warps)
    return outs


def _multiplied(
    given: _Product, out: Tensor, tile: shapes.RowTile
) -> tuple[Multiplied, tuple[int, ...]]:
    """Return the kernel arguments that describe a weight, and the compile-time constants of the
    weight's tile. The kernel multiplies the weight by one token."""
    (rows, columns), bias = given.shape, given.bias
    is_even = rows % tile.rows == 0 and columns % (8 * tile.words) == 0
    return given.operand(out), tile.constants(columns, has_bias=bias is not None, is_even=is_even)


MAX_TOGETHER = 3
"""Weights that one launch multiplies with one token."""


def products(
    x: Tensor,  # (1, K) bf16
    parts: Sequence[Sequence[Tensor]],  # parts of each weight, of one format; two or three of them
    biases: Sequence[Tensor | None],  # (N,) bf16 or None, of each
    sizes: Sequence[Sequence[int]],  # (N, K) of each, one K
    form: Format = WIN4,
) -> list[Tensor]:
    """Multiply one token by several weights with 4-bit exponent codes (codec `win4`).

    Return (1, N) bf16 for each weight. If possible, one launch multiplies by all weights. The
    function `product` multiplies by a single weight. Here, each weight uses the same tiles as in
    `product`, so the results equal those of `product` bit for bit.
    """
    x, weights = _aligned(x), list(zip(parts, biases, sizes, strict=True))
    tiles = [setting_of(1, shape, x.device, form) for shape in sizes]
    rows = [tile for tile in tiles if isinstance(tile, shapes.RowTile)]
    given = [_given(x, *each, form) for each in weights]
    if 2 <= len(weights) <= MAX_TOGETHER and len({tile and tile.warps for tile in tiles}) == 1:
        if len(rows) == len(tiles):
            return _one_row(given, rows)
        if isinstance(tiles[0], shapes.MatrixTile) and len(set(tiles)) == 1:
            return _few(given, tiles[0])
    return [product(x, *each, form) for each in weights]


def _aligned(x: Tensor) -> Tensor:
    """Return x, or a copy of x if its memory cannot be read as 32-bit words."""
    flat = x.contiguous().view(-1)  # a single row may have any stride
    flat = flat.clone() if flat.storage_offset() % 2 or flat.data_ptr() % 4 else flat
    return flat.view(x.shape)


_MATRIX_KERNELS = ("_coded_weight_matrix_win4_kernel", "_coded_weight_matrix_win4_several_kernel")
_TOKEN_KERNELS = ("_coded_weight_token_win4_kernel", "_coded_weight_token_win4_several_kernel")
"""The kernels for one weight and for several."""


def _few(several: Sequence[_Product], setting: shapes.MatrixTile) -> list[Tensor]:
    """Multiply a few tokens by one, two or three compressed weight matrices in one launch.

    `several` contains one product for each weight. All of these products have the same input `x`,
    whose rows are the tokens.
    """
    x, count, form = several[0].x, len(several), several[0].form
    tokens, groups = x.shape[0], x.shape[1] // GROUP
    outs = [x.new_empty((tokens, each.shape[0])) for each in several]
    is_even = groups % setting.warps == 0
    operands = [each.operand(out) for each, out in zip(several, outs, strict=True)]
    tiles = [
        (each.bias is not None, is_even and each.shape[0] % setting.rows == 0) for each in several
    ]
    constants: dict[str, Any] = {
        "ROWS": setting.rows,
        "TOKENS": setting.tokens,
        "CHUNKS": shapes.chunks_touched(setting.rows, x.shape[1]),
        "WARPS": setting.warps,
        "HAS_ALL": is_even and tokens % setting.tokens == 0,
        "GROUPS": groups if setting.is_early else 0,
        "PATCHES": setting.patches,
        "FIELD": form.mantissa + 1,
        "BLOCK": form.block,
    }
    if count == 1:
        constants["TILE"] = tiles[0]
    else:
        constants["COUNT"] = count
        operands += operands[-1:] * (MAX_TOGETHER - count)  # a missing third weight is not read
        tiles += tiles[-1:] * (MAX_TOGETHER - count)
        constants |= {f"TILE_{place}": each for place, each in enumerate(tiles)}
    programs = sum(-(-each.shape[0] // setting.rows) for each in several)
    grid = (programs, -(-tokens // setting.tokens))
    module, kernels = "matrix_kernels", _MATRIX_KERNELS
    sizes: tuple[int, ...] = (tokens, groups)
    if tokens == 1 and shapes.fits_halves(form.block, x.shape[1], form.mantissa):
        module, kernels, sizes = "token_kernels", _TOKEN_KERNELS, (groups,)
        constants["GROUPS"] = groups
    given = (x, *operands, *sizes)
    kernel = kernels[count > 1]
    _run(module, kernel, x, grid, *given, **constants, warps=setting.warps)
    return outs


def _add(shares: Tensor, out: Tensor) -> Tensor:
    """Add the programs' partial sums, (splits, M, columns), and write the totals to the last
    columns of the output, (M, N).
    """
    size, block = shares[0].numel(), shapes.SUM_BLOCK
    grid, sizes = (-(-size // block),), {"SPLITS": shares.shape[0], "BLOCK": block}
    operands = (shares, out, size, shares.shape[2], out.shape[1])
    _run("win4_kernels", "_coded_weight_win4_sum_kernel", out, grid, *operands, **sizes, warps=4)
    return out


def _wide(given: _Product, setting: shapes.WideTile) -> Tensor:
    from .._triton.gluon import tiles_of

    x, parts, bias, (rows, columns), form = given
    tokens, groups = x.shape[0], columns // GROUP
    header, codes, *lists, signs = parts if form.is_lossless else parts[:-1]
    ordered, turned = _ordered(x)
    splits = -(-groups // -(-groups // setting.splits))  # each has columns
    tiles = -(-rows // setting.rows)
    whole = tiles if splits == 1 else min(setting.whole, tiles)
    out = x.new_empty((tokens, rows))
    shares = turned.view(torch.float32)  # which is not written to
    if whole < tiles:
        size = (splits, tokens, rows - whole * setting.rows)
        shares = x.new_empty(size, dtype=torch.float32)
    by_row = []
    for words, width in ((codes, columns // 8), (signs, columns // (4 if form.is_lossless else 8))):
        bits = 8 * words.element_size()
        swizzle = 2 * bits if bits > 8 else 0  # a row of a tile has sixteen numbers
        part = words[: rows * width].view(rows, width)
        by_row.append(tiles_of(part, setting.rows, 16, bits=bits, swizzle=swizzle))
    _run(
        *("matrix_kernels", "_coded_weight_matrix_win4_wide_kernel", x),
        (whole + (tiles - whole) * splits, -(-tokens // setting.tokens)),
        *(tiles_of(ordered, setting.tokens, 64), *by_row, turned, header, *lists, parts[-1]),
        *(x if bias is None else bias, out, shares),
        *(tokens, rows, groups, turned.shape[1], whole, splits),
        HAS_BIAS=bias is not None,
        ROWS=setting.rows,
        TOKENS=setting.tokens,
        NOTED=setting.noted,
        X_STAGES=setting.x_stages,
        STAGES=setting.stages,
        WARPS=setting.warps,
        FIELD=form.mantissa + 1,
        BLOCK=form.block,
        warps=setting.warps,
    )
    return out if whole == tiles else _add(shares, out)


def _ordered(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x with its columns in the order in which the kernel
    `_coded_weight_matrix_win4_wide_kernel` reads them, and the transpose of x.

    The transpose is padded to a multiple of sixteen tokens; the padding contains arbitrary values.
    """
    tokens, columns = x.shape
    groups, stride, width = columns // GROUP, -(-tokens // 16) * 16, shapes.ORDERED_TOKENS
    ordered, turned = torch.empty_like(x), x.new_empty((columns, stride))
    words = (x.view(torch.int32), ordered.view(torch.int32), turned.view(torch.int16))
    operands, grid = (*words, tokens, groups, stride), (groups, -(-tokens // width))
    _run(
        "win4_kernels", "_coded_weight_win4_order_kernel", x, grid, *operands, TOKENS=width, warps=8
    )
    return ordered, turned
