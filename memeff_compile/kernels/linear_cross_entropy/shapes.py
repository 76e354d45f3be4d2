"""All sizes that this folder chooses: blocks of rows and classes, tiles, and launches.

The letters for axes, such as N for rows and V for classes, are explained in `_head_loss.shapes`. A
temporary tensor is R x V for a block of R rows, or N x W for a block of W classes. A temporary
tensor is N x V only if the limit of temporary memory is large enough. The caller sets this limit,
in bytes, with the op's argument `workspace`. With a `workspace` of 0, the functions of this module
choose the limit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import sympy
import torch

from .._head_loss.shapes import MIB
from ..device import DEFAULT_PROCESSORS, processors
from ..sizes import Size

# The narrowest block of classes. A smaller workspace is exceeded rather than refused.
MIN_WIDTH = 64
# With a workspace of at most this many bytes (the minimal mode), only vectors and one narrow block
# get memory of their own; sums and blocks use the memory of the weight's gradient if that is large
# enough.
MINIMAL_BYTES = 8 * MIB
SPARE_BYTES = 4 * MIB
# The widest block of G inside the weight gradient, as a share of the budget outside it.
INSIDE_WIDTH = 3072


def is_minimal(workspace: int) -> bool:
    """Return whether a limit of temporary memory requires the minimal mode of the fused loss op.

    The minimal mode is the mode with the least temporary memory. `workspace` is the limit in bytes.
    With a `workspace` of 0, the op chooses the limit itself, and the result is false.
    """
    return 0 < workspace <= MINIMAL_BYTES


def _round_down(value: int, step: int) -> int:
    return max(step, value // step * step)


def _half_vocab(vocab: int) -> int:
    """Return the most classes that a block may have: half of the vocabulary (V classes).

    So no buffer is N x V for N rows (tokens).
    """
    return max(MIN_WIDTH, -(-vocab // (2 * MIN_WIDTH)) * MIN_WIDTH)


# On a CPU a block should stay in the cache between the product and the passes over it; elsewhere it
# should be large enough to hide the launches.
REFERENCE_AUTO_BYTES = {"cpu": 8 * MIB}
REFERENCE_AUTO_BYTES_ELSEWHERE = 64 * MIB
REFERENCE_AUTO_COLUMNS = 256
# The fewest rows of a block: the weight is read once per block.
REFERENCE_MIN_ROWS = 64


def reference_bytes_per_logit(
    itemsize: int,  # bytes of one input element: 2 and 4 compute in fp32, 8 in fp64
    has_softcap: bool,  # the backward pass then also keeps the slope
    with_gradient: bool,  # backward; 16-bit inputs then also need the rounded gradient
    with_entropy: bool = False,  # both passes then keep a second block
) -> int:
    """Return the bytes that the implementation `reference` needs per logit of a block."""
    wide = max(itemsize, 4)
    if not with_gradient:
        return wide * (1 + with_entropy)
    return wide * (1 + has_softcap + with_entropy) + (2 if itemsize == 2 else 0)


def reference_columns(
    rows: int, vocab: int, workspace: int, bytes_per_logit: int, device_type: str
) -> int:
    """Choose for how many classes the implementation `reference` computes logits at a time.

    For these classes and all rows, buffers with `bytes_per_logit` bytes per logit should fit in
    `workspace` bytes. With a workspace of 0, the function chooses the memory limit itself."""
    automatic = REFERENCE_AUTO_BYTES.get(device_type, REFERENCE_AUTO_BYTES_ELSEWHERE)
    budget = workspace or max(automatic, REFERENCE_AUTO_COLUMNS * bytes_per_logit * rows)
    width = budget // (bytes_per_logit * max(rows, 1))
    return min(_round_down(width, MIN_WIDTH), _half_vocab(vocab))


def reference_rows(
    rows: Size, vocab: int, bytes_per_logit: int, workspace: int, device_type: str
) -> sympy.Expr:
    """Return the number of rows (tokens) whose fp32 or fp64 logits exist at once: at most half of
    all rows, rounded up.

    `workspace` is the limit of temporary memory in bytes. With a workspace of 0, the function
    chooses the memory limit itself."""
    budget = workspace or REFERENCE_AUTO_BYTES.get(device_type, REFERENCE_AUTO_BYTES_ELSEWHERE)
    fitting = max(budget // (bytes_per_logit * vocab), 1 if workspace else REFERENCE_MIN_ROWS)
    return sympy.Min(fitting, sympy.ceiling(sympy.sympify(rows) / 2))


# `library`, automatic workspace: at least 64 MiB and at least 16 KiB per row. 16 KiB per row is a
# strip of 2048 fp32 products (8 KiB) next to a gradient block of 4096 columns in bf16 (8 KiB),
# about 6 % of the bf16 logits of a 128k vocabulary. Measured on an H200, forward + backward: strip
# 1024 / 2048 / 4096 with that block take 61.4 / 59.8 / 60.1 ms at N, D, V = 16384, 2048, 128256 and
# 70.9 / 69.5 / 68.5 ms at 8192, 2304, 256000; strips of 256 take 72 and 87 ms. Narrower blocks lose
# twice: the fp32 sum of the hidden gradient is read and written once per block (8ND bytes), and a
# short product leaves multiprocessors idle. Rows: piece-widths.jsonl of the results.
LIBRARY_AUTO_BYTES = 64 * MIB
LIBRARY_AUTO_BYTES_PER_ROW = 16 * 1024
# For an output projection with a LoRA adapter: the fewest rows of a block, because the weight is
# read once per block, and the most bytes of a block.
LIBRARY_MIN_ROWS, LIBRARY_MAX_BYTES = 128, 544 * MIB
# Numbers per row that are stored between strips; the most columns that a program processes at once,
# and the program's warps.
LIBRARY_STATE = 5
LIBRARY_MAX_BLOCK = 2048
LIBRARY_WARPS = 4
# Cost per row, on an H200, of one wave of a weight-gradient product and of one pass over the fp32
# hidden gradient. Only their ratio matters.
_SECONDS_PER_WAVE = 2 * 128 * 256 * 132 / 790e12
_SECONDS_PER_BYTE = 1 / 4.28e12


class Widths(NamedTuple):
    """How many classes' fp32 logits (`strip`) and logit gradients (`block`) exist at one time."""

    strip: int
    block: int


@lru_cache(maxsize=1024)
def library_widths(
    rows: int, depth: int, vocab: int, workspace: int, itemsize: int, processors: int
) -> Widths:
    """Choose the widths of two buffers: a strip of fp32 logits and a block of logit gradients.

    A width is a number of classes. The two buffers fit in `workspace` bytes, unless these
    bytes are too few for 64 classes. With a workspace of 0, the function chooses the memory limit
    itself.

    - 16-bit inputs need two buffers. The strip (4 bytes per element) gets half of the workspace.
      The block has the input dtype (2 bytes per element).
    - For fp32 inputs, the gradients overwrite the logits, so strip and block are one buffer.

    The chosen block may be narrower than the widest block that fits, but it has at least half of
    that width. The block gets the width with the least predicted time. Few multiprocessors are then
    idle at the end of the product for the weight's gradient.
    """
    budget = workspace or max(LIBRARY_AUTO_BYTES, LIBRARY_AUTO_BYTES_PER_ROW * rows)
    per_row = budget // max(rows, 1)
    widest = _half_vocab(vocab)
    if itemsize == 4:
        width = _whole_waves(min(per_row // 4, widest), depth, vocab, processors)
        return Widths(width, width)
    strip = per_row // 8
    strip = min(_round_down(strip, 256 if strip >= 256 else MIN_WIDTH), widest)
    limit = max(strip, min((per_row - 4 * strip) // 2, widest))
    return Widths(strip, max(strip, _whole_waves(limit, depth, vocab, processors)))


def _whole_waves(limit: int, depth: int, vocab: int, processors: int) -> int:
    """Return the width of a block of classes for which `_block_seconds` predicts the least time.

    `limit` is the widest block that is allowed. The function compares widths above limit / 2. If
    `limit` is below 256, the result is `limit` rounded down to a multiple of 64, but at least 64.
    """
    if limit < 256:
        return _round_down(limit, MIN_WIDTH)
    step = 128 * -(-limit // (128 * 64))  # at most 64 candidates
    candidates = range(_round_down(limit, step), limit // 2, -step)
    return min(
        candidates or (limit,),
        key=lambda width: -(-vocab // width) * _block_seconds(width, depth, processors),
    )


def _block_seconds(width: int, depth: int, processors: int) -> float:
    """Estimate a part of the backward pass's time for a block of classes, in seconds per token.

    The estimate covers the two steps whose time per class depends on the block's width. One step is
    the product for the weight's gradient, in tiles of 128 x 256. The other step reads and writes
    the hidden states' gradient, to which the block's contribution is added. The function does not
    count the products for the logits and for this contribution. Their time per class does not
    depend on the width.
    """
    tiles = min(-(-depth // 128) * -(-width // 256), -(-depth // 256) * -(-width // 128))
    return -(-tiles // processors) * _SECONDS_PER_WAVE + 8 * depth * _SECONDS_PER_BYTE


def library_rows(rows: Size, vocab: Size, workspace: int, itemsize: int) -> sympy.Expr:
    """Return how many rows (tokens) a block has, for an output projection with a LoRA adapter.

    For a scalar loss with a frozen weight, the op computes the logits of one block of rows at a
    time. A block needs memory for fp32 products and, for 16-bit inputs, for the logits' gradient G.
    By default, a block takes three sixteenths of the bytes that all logits would take in the
    weight's dtype, up to 544 MiB.
    """
    n, per_logit = sympy.sympify(rows), 4 if itemsize == 4 else 4 + itemsize
    share = sympy.Rational(3, 16) * itemsize * n * vocab
    budget = workspace or sympy.Max(LIBRARY_AUTO_BYTES, sympy.Min(share, LIBRARY_MAX_BYTES))
    fitting = sympy.floor(budget / (per_logit * vocab))
    least = 1 if workspace else LIBRARY_MIN_ROWS
    return sympy.Min(sympy.Max(fitting, least), sympy.ceiling(n / 2))


def library_block(width: int) -> int:
    """Return how many columns of logits, at most 2048, a program processes at once.

    The programs are those of the Triton kernels of the implementation `library`. The result is at
    least 128. `width` is the number of columns of a strip (a range of classes). If `width` is less
    than the result, the kernels mask the columns after the end of the strip.
    """
    return min(LIBRARY_MAX_BLOCK, max(128, 1 << (width - 1).bit_length()))


# Forward: bytes of statistics, and of gathered rows, for one group of rows.
FORWARD_BYTES = int(7.5 * MIB)

# Backward by blocks of classes, automatic workspace. 13.5 KiB per row is a block of 6912 columns in
# 16 bits.
HOPPER_AUTO_BYTES = 64 * MIB
HOPPER_AUTO_BYTES_PER_ROW = 13824
# The narrowest of these blocks; a smaller workspace is exceeded rather than refused.
HOPPER_MIN_WIDTH = 256
# Blocks of rows, automatic workspace: as few as fit into AUTO_BYTES together with all other
# buffers. Each block reads and writes dC once, and around the sum of each of its tiles it takes the
# time of five steps of the sum: 12.1, 12.7 and 14.0 ms in one, two and four blocks of 2048 x 5120 x
# 131072 on an H200 (`nvidia-h200/gradients-in-forward.jsonl`).
AUTO_BYTES = 640 * MIB

# The most programs that share a sum, the most rows of a block in which they do, and the most bytes
# of partial sums; the work around the sum of a tile takes as long as TILE_STEPS of the sum's steps.
MOST_SPLITS = 4
PARTS_BYTES = 32 * MIB
TALLEST_SPLIT = 2048
TILE_STEPS = 3
# Columns of dE and dC that are written at a time; sums of dC have a scale for each class and slice.
SLICE = 64
# Columns and rows of X that a program of the bias's gradient reads at a time.
SUMMED_COLUMNS, SUMMED_ROWS = 128, 64


class Shapes(NamedTuple):
    """Tiles, warps and pipeline stages of the kernels on one kind of GPU.

    `rows` x `columns` is the shape of an output tile, and `step` the number of terms that one loop
    iteration adds. `programs` is how many programs run at a time: one per multiprocessor.
    """

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    flatten: bool
    programs: int
    is_interpreted: bool = False

    def constants(self, columns: int) -> dict[str, Any]:
        """Return the compile-time constants and launch options of a kernel with tiles of `columns`
        columns."""
        return {
            "BM": self.rows,
            "BN": columns,
            "BK": self.step,
            "UPCAST": self.is_interpreted,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }

    def gradient_columns(self, *, is_plain: bool) -> int:
        """Return the number of columns of a tile of the logits' gradient G.

        There are fewer columns if a softcap, a bias or the sum of each row's logits needs
        registers."""
        return self.columns if is_plain else self.rows


@lru_cache(maxsize=64)
def shapes_for(device: torch.device) -> Shapes:
    """Return the tile shapes for a GPU, or small shapes for Triton's interpreter without a GPU."""
    if device.type != "cuda":
        return Shapes(32, 64, 16, 4, 1, False, 2, is_interpreted=True)
    return shapes_for_programs(processors(device))


def shapes_for_programs(programs: int) -> Shapes:
    """Return the tile shapes that were chosen by measurements on GPUs of compute capability 9.0."""
    return Shapes(128, 256, 64, 8, 3, True, programs)


def product_tile(depth: int, shapes: Shapes) -> tuple[int, int]:
    """Return the rows and columns of a tile of the gradients of hidden states (dE) and weight (dC).

    Of two possible tile shapes, the function returns the shape with fewer unused columns."""
    rows, columns = shapes.rows, shapes.columns
    is_turned = 0 < depth % columns <= rows
    return (columns, rows) if is_turned else (rows, columns)


def forward_rows(rows: int, bytes_per_row: int, shapes: Shapes) -> int:
    """Return how many rows (tokens) a block of the forward pass has.

    The number is a multiple of `shapes.rows`, the rows of one tile of logits. All blocks have about
    the same number of rows."""
    tiles = -(-rows // shapes.rows)
    count = -(-tiles // max(1, FORWARD_BYTES // bytes_per_row // shapes.rows))
    return -(-tiles // count) * shapes.rows


@lru_cache(maxsize=1024)
def hopper_columns(rows: int, depth: int, vocab: int, workspace: int, shapes: Shapes) -> int:
    """Choose how many columns of the logits' gradient G the backward pass computes at once.

    The function considers widths within the workspace and up to half the vocabulary. The result is
    the width whose launches leave the fewest multiprocessors idle at their ends. With a workspace
    of 0, the function chooses the memory limit itself.
    """
    step = shapes.columns
    budget = workspace or max(HOPPER_AUTO_BYTES, HOPPER_AUTO_BYTES_PER_ROW * rows)
    limit = budget // (2 * max(rows, 1))
    limit = min(max(limit // step * step, HOPPER_MIN_WIDTH, step), -(-vocab // (2 * step)) * step)
    coarse = step * -(-limit // (step * 64))
    candidates = range(limit, max(limit // 2, step - 1), -coarse)
    return min(candidates, key=lambda width: _units(rows, depth, vocab, width, shapes))


def _units(rows: int, depth: int, vocab: int, width: int, shapes: Shapes) -> float:
    """Predict the time of a backward pass that processes `width` classes at a time.

    The unit is the time in which a program adds one term to every sum of an output tile.
    """
    whole, rest = divmod(vocab, width)
    units = whole * _block_units(rows, depth, width, shapes)
    return units + (_block_units(rows, depth, rest, shapes) if rest else 0)


def _block_units(rows: int, depth: int, width: int, shapes: Shapes) -> float:
    row_blocks = -(-rows // shapes.rows)
    depth_blocks = -(-depth // shapes.columns)
    # The epilogue of a tile of G costs about as much as 256 terms of its sum.
    logits = -(-row_blocks * -(-width // shapes.columns) // shapes.programs) * (depth + 256)
    weight_tiles = -(-width // shapes.rows) * depth_blocks
    hidden_tiles = row_blocks * depth_blocks
    last = 0
    for program in {0, weight_tiles % shapes.programs}:
        mine = -(-(weight_tiles - program) // shapes.programs)
        both = -(-(weight_tiles + hidden_tiles - program) // shapes.programs)
        last = max(last, mine * rows + (both - mine) * width)
    # Two launches, and the hidden gradient read and written once more.
    return logits + last + 200


class Room(NamedTuple):
    """The rows of the weight's gradient that a backward pass uses as temporary memory.

    Each class (vocabulary entry) has one row of the weight's gradient. The temporary memory starts
    at the row number `first_column` and ends with the last row. Only a pass with the minimal
    workspace, at most `MINIMAL_BYTES`, uses this memory.

    The pass computes one block of classes at a time. Example: take 8 rows (tokens) and 4 features.
    A column of the logits' gradient G then takes twice the bytes of a row of the weight's gradient.
    For each of its classes, a block needs memory for one column of G and one row of the weight's
    gradient. This column and this row together take as many bytes as three rows of the weight's
    gradient. So the memory of n rows of the weight's gradient suffices for a block of at most n / 3
    classes. Here, n is the number of classes whose rows are not yet computed.
    """

    first_column: int
    width: int  # columns of G at a time
    spare_width: int  # columns of G outside, for the last of them
    rows: int
    depth: int
    vocab: int
    step: int

    def retreating_width(self, first: int) -> int:
        """Return how many classes the block that starts with the class `first` can have.

        The backward pass computes the weight's gradient in blocks of classes. A block writes one
        row of this gradient for each of its classes. Until then, the memory of the rows from
        `first` on is free. At the end of this memory, the block stores its columns of the logits'
        gradient G: one column per class. So the memory must hold the block's rows and, after them,
        the block's columns of G. The result is rounded down to a multiple of the field `step`, the
        width of an output tile. Return 0 if fewer than `step` classes fit.
        """
        width = int((self.vocab - first) * self.depth / (self.depth + self.rows))
        return width // self.step * self.step


def room_inside(
    rows: int, depth: int, vocab: int, shapes: Shapes, *, needs_hidden: bool
) -> Room | None:
    """Return the plan of a backward pass whose large buffers use the weight gradient's memory, or
    None if that memory is too small."""
    step = shapes.columns
    sums = 2 * rows if needs_hidden else 0  # columns whose memory holds the hidden gradient's sums
    half = vocab // 2 // step * step
    width = min((half - sums) * depth // rows // step * step, INSIDE_WIDTH // step * step)
    if width < step:
        return None
    taken = sums + -(-rows * width // depth)
    first = (vocab - taken) // step * step
    spare = max(SPARE_BYTES // (2 * rows) // step * step, step)
    return Room(first, width, spare, rows, depth, vocab, step)


def slices_of(depth: int, shapes: Shapes) -> int:
    """Return how many slices of SLICE features the weight's gradient has, when its features are
    padded to whole tiles."""
    columns = product_tile(depth, shapes)[1]
    return -(-depth // columns) * columns // SLICE


@lru_cache(maxsize=1024)
def hopper_rows(
    rows: int,
    depth: int,
    vocab: int,
    workspace: int,  # the bytes of X; 0 is automatic
    shapes: Shapes,
) -> int:
    """Return how many rows (tokens) a block has if `hopper` computes gradients by blocks of rows.

    `hopper` is an implementation of the fused loss. The number is a multiple of `shapes.rows`, the
    rows of one tile of logits. All blocks have about the same number of rows.

    A block that is taller than a tile of the hidden states' gradient (dE) consists of whole tiles
    of dE. Otherwise each block would end with a tile that is partly empty but takes as long as a
    full tile.

    The number of rows is the same for all GPUs, because ranks may have different GPUs. A second
    reason is that estimates of the op's memory, which use this number, may be for a GPU of another
    machine.
    """
    tile, shapes = shapes.rows, shapes._replace(programs=DEFAULT_PROCESSORS)
    product, _ = product_tile(depth, shapes)
    tiles, width = -(-rows // tile), -(-vocab // shapes.columns) * shapes.columns
    fitting = (workspace or AUTO_BYTES) // (2 * width) // tile
    fitting = min(max(fitting, 1), tiles)
    for count in range(-(-tiles // fitting), tiles):
        height = -(-tiles // count) * tile
        if count > 1 and height > product:
            height = -(-height // product) * product
        is_fitting = height <= fitting * tile
        if not workspace:
            is_fitting = walk_bytes(rows, height, depth, vocab, shapes) <= AUTO_BYTES
        if is_fitting:
            return height
    return tile


def walk_bytes(rows: int, height: int, depth: int, vocab: int, shapes: Shapes) -> int:
    """Return the bytes of the buffers that the implementation `hopper` needs for a block of rows.

    The buffers contain:

    - X (the logits' gradient up to a factor per row);
    - two fp32 statistics for each row in each tile of X (the number of tiles is computed for the
      smallest tile width);
    - a copy of the block's hidden states, in which each row is multiplied by the factor that turns
      the same row of X into the logits' gradient;
    - partial sums of the hidden states' gradient (dE);
    - if there are several blocks, the scale factors of the sums of the weight's gradient (dC): one
      byte for each class and each slice of SLICE features.
    """
    width = -(-vocab // shapes.columns) * shapes.columns
    needs = (splits_of(height, depth, vocab, shapes, needs_weight=x) for x in (False, True))
    of_row = 2 * width + 8 * (width // shapes.rows) + 2 * depth + 4 * (max(needs) - 1) * depth
    return height * of_row + (slices_of(depth, shapes) * width if height < rows else 0)


@lru_cache(maxsize=1024)
def splits_of(rows: int, depth: int, vocab: int, shapes: Shapes, *, needs_weight: bool) -> int:
    """Return over how many programs the sum for a tile of the hidden states' gradient is divided.

    A tile of the hidden states' gradient (dE) is a long sum over the vocabulary. A block of few
    rows (tokens) has few such tiles. With one program per tile, a few programs would still compute
    dE after all other programs have finished the weight's gradient (dC).
    """
    if rows > TALLEST_SPLIT:
        return 1
    tile = product_tile(depth, shapes)
    columns = -(-depth // tile[1])
    hidden_tiles = -(-rows // tile[0]) * columns
    hidden_steps = -(-vocab // shapes.step)
    weight_tiles = -(-vocab // tile[0]) * columns if needs_weight else 0
    # The work around the sum of a tile takes as long as TILE_STEPS of the sum's steps.
    weight_steps = weight_tiles * (-(-rows // shapes.step) + TILE_STEPS)

    def time(splits: int) -> float:
        longest = -(-hidden_tiles * splits // shapes.programs) * -(-hidden_steps // splits)
        all_steps = hidden_tiles * (hidden_steps + splits * TILE_STEPS) + weight_steps
        return max(longest, all_steps / shapes.programs)

    fitting = [n for n in range(1, MOST_SPLITS + 1) if 4 * (n - 1) * rows * depth <= PARTS_BYTES]
    return min(fitting, key=time)


# If classes are split over ranks: the number of rows for which the logits of the likeliest classes
# are computed at a time.
ROWS_AT_A_TIME = 512
# Rows and tiles of statistics that a program merges at a time; tiles of rows whose tiles of G are
# computed next to each other.
ROWS = 8
TILES = 128
GROUP = 16
