# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""A Gluon kernel that multiplies a matrix X by the weight and by the hidden states: one warp loads
operands, and eight warps multiply.

X times a factor per row (token) is the logits' gradient. A tile of the weight's gradient (dC) is a
sum over few rows. So loading and writing the tile takes as long as computing it. The loading warp
is several pipeline stages ahead of the other warps, and already loads operands of the next tile.
While a tile of dC is summed, the loading warp also loads the tile's sum over earlier blocks of rows
into shared memory. The new sum replaces the earlier sum there, and is then written to GPU memory.
"""

from __future__ import annotations

from .gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    seen_as,
    store_tile,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# After how many steps of a sum the previous tile's memory is free, and after how many the next old
# dC is loaded. The load has to come later, or both groups of warps wait for each other.
RELEASED: gl.constexpr = gl.constexpr(2)
SLOTS: gl.constexpr = gl.constexpr(2)
# Columns that are written at a time: 128 bytes of a row.
SLICE: gl.constexpr = gl.constexpr(64)
# How far above its scale the largest number of a slice in fp16 is, and the scales' bounds: as
# exponents of fp32, with its bias.
ABOVE: gl.constexpr = gl.constexpr(14)
LEAST: gl.constexpr = gl.constexpr(16)
MOST: gl.constexpr = gl.constexpr(238)


@gluon.jit
def _halves(tile):
    """Split the columns of a tile into two halves without moving data between threads."""
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1]
    return tile.reshape([rows, 2, columns // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _part(tile, index: gl.constexpr, PARTS: gl.constexpr):
    """Split the columns of a tile into two or four blocks, and return block number `index`."""
    halves = _halves(tile)
    if PARTS == 2:  # noqa: SIM108  (both have other types, and the compiler knows which)
        part = halves[index]
    else:
        part = _halves(halves[index // 2])[index % 2]
    return part


@gluon.jit
def _load_old(grad_weight_desc, bars, held, at, kept, C: gl.constexpr):
    """Load the old values of a tile of the weight's gradient (dC) as soon as the previous tile no
    longer uses the shared memory."""
    _, _, held_full, held_empty, _, _ = bars
    mbarrier.wait(held_empty, (kept & 1) ^ 1)
    mbarrier.expect(held_full, 2 * C.BM * C.BN)
    for index in gl.static_range(C.BN // SLICE):
        place = [at[0], at[1] + index * SLICE]
        load_tile(grad_weight_desc, place, held_full, held.index(index))


@gluon.jit
def _load(descs, counter_ptr, bars, buffers, sizes, C: gl.constexpr):
    """Take tiles of two gradients one by one, and tell the multiplying warps which tile is next.

    The gradients are those of the hidden states and of the weight. A tile of a gradient is a sum of
    products of smaller blocks of two matrices. This function runs in the loading warp, and loads
    these blocks.
    """
    x_by_column_desc, x_by_row_desc, scaled_desc, weight_desc, grad_weight_desc = descs
    full, empty, _, _, slot_full, slot_empty = bars
    left, right, held, slots = buffers
    hidden_tiles, tiles, depth_blocks, rows_here, row_blocks, hidden_steps, split_steps = sizes
    number: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    BYTES: gl.constexpr = 2 * C.BK * (C.BM + C.BN)
    step = 0
    taken = 0
    kept = 0
    tile = gl.to_tensor(0)
    while tile < tiles:
        tile = gl.atomic_add(counter_ptr, 1)
        slot = taken % SLOTS
        mbarrier.wait(slot_empty.index(slot), ((taken // SLOTS) & 1) ^ 1)
        slots.index(slot).store(gl.full([1], 0, gl.int32, number) + tile)
        barrier()
        mbarrier.arrive(slot_full.index(slot), count=1)
        taken += 1
        if tile < tiles:
            is_hidden = tile < hidden_tiles
            place = gl.where(is_hidden, tile, tile - hidden_tiles)
            column = place % depth_blocks * C.BN
            block = place // depth_blocks
            first = 0
            steps = gl.cdiv(rows_here, C.BK)
            if is_hidden:
                first = block // row_blocks * split_steps
                block = block % row_blocks
                steps = gl.minimum(split_steps, hidden_steps - first)
            block *= C.BM
            for k in range(steps):
                stage = step % C.STAGES
                mbarrier.wait(empty.index(stage), ((step // C.STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), BYTES)
                if is_hidden:
                    at = (first + k) * C.BK
                    load_tile(x_by_row_desc, [block, at], full.index(stage), left.index(stage))
                    load_tile(weight_desc, [at, column], full.index(stage), right.index(stage))
                else:
                    turned = seen_as(
                        left.index(stage), gl.bfloat16, [C.BK, C.BM], x_by_column_desc.layout
                    )
                    load_tile(x_by_column_desc, [k * C.BK, block], full.index(stage), turned)
                    load_tile(
                        scaled_desc, [k * C.BK, column], full.index(stage), right.index(stage)
                    )
                step += 1
                if C.ADD:  # noqa: SIM102  (one is known to the compiler, one is not)
                    if k == gl.minimum(C.STAGES + RELEASED, steps - 1) and not is_hidden:
                        _load_old(grad_weight_desc, bars, held, (block, column), kept, C)
                        kept += 1
            if C.ADD:  # noqa: SIM102
                # The last block may have no rows, and has to write dC in bf16 anyway.
                if steps == 0 and not is_hidden:
                    _load_old(grad_weight_desc, bars, held, (block, column), kept, C)
                    kept += 1


@gluon.jit
def _sum(
    operands,
    bars,
    step,
    steps,
    is_releasing,
    IS_HIDDEN: gl.constexpr,
    MMA: gl.constexpr,
    C: gl.constexpr,
):
    """Return one tile of a matrix product: a sum of products of the two matrices' tiles.

    During the sum, the function releases the shared memory from which the previous tile was
    written.
    """
    x_by_column_desc, left, right = operands
    full, empty, _, held_empty, _, _ = bars
    acc = gl.zeros([C.BM, C.BN], gl.float32, MMA)
    for k in range(steps):
        stage = step % C.STAGES
        mbarrier.wait(full.index(stage), (step // C.STAGES) & 1)
        if IS_HIDDEN:
            x = left.index(stage)
        else:
            x = seen_as(left.index(stage), gl.bfloat16, [C.BK, C.BM], x_by_column_desc.layout)
            x = x.permute((1, 0))
        acc = warpgroup_mma(x, right.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        barrier()
        mbarrier.arrive(empty.index((step + C.STAGES - 1) % C.STAGES), count=1, pred=k > 0)
        step += 1
        if is_releasing and k == gl.minimum(RELEASED, steps - 1):
            tma.store_wait(0)
            barrier()
            if C.ADD:
                mbarrier.arrive(held_empty, count=1)
    if is_releasing and steps <= 0:
        tma.store_wait(0)
        barrier()
        if C.ADD:
            mbarrier.arrive(held_empty, count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(empty.index((step + C.STAGES - 1) % C.STAGES), count=1, pred=steps > 0)
    return acc, step


@gluon.jit
def _write_rows(part, outs, at, rows_here, limits, split, is_last, C: gl.constexpr):
    """Store some columns of a tile of the hidden states' gradient (dE) as a partial sum.

    The program with the last partial sum waits for the other partial sums, and adds them to its
    own. The logits' gradients, from which the sums are computed, still lack one factor per row (the
    row's scale). So this program multiplies each row of the total by this factor, and writes the
    result.
    """
    grad_hidden_ptr, parts_ptr, order_ptr, row_scale_ptr = outs
    block, first = at
    _, first_row, piece_rows, depth = limits
    layout: gl.constexpr = part.type.layout
    rows = block + gl.arange(0, part.shape[0], layout=gl.SliceLayout(1, layout))
    columns = first + gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, layout))
    is_row = rows < rows_here
    mask = is_row[:, None] & (columns < depth)[None, :]
    here = rows.to(gl.int64)[:, None] * depth + columns[None, :]
    plane = gl.to_tensor(piece_rows).to(gl.int64) * depth
    if C.HAS_PARTS:
        if is_last:
            for other in range(split):
                part += gl.load(parts_ptr + other * plane + here, mask=mask, other=0.0)
        else:
            gl.store(parts_ptr + split * plane + here, part, mask=mask)
    scale = gl.load(row_scale_ptr + rows, mask=is_row, other=0.0)
    out = first_row + rows
    if C.HAS_KEPT:
        out = gl.load(order_ptr + out, mask=is_row, other=0)
    place = out.to(gl.int64)[:, None] * depth + columns[None, :]
    values = (part * scale[:, None]).to(grad_hidden_ptr.dtype.element_ty)
    gl.store(grad_hidden_ptr + place, values, mask=mask & is_last)


@gluon.jit
def _scale_at(scales, block, column, layout: gl.constexpr, C: gl.constexpr):
    """Return pointers to the scales of one slice (range of columns) of a tile of the weight's
    gradient (dC), and a mask.

    dC is summed over several blocks of tokens. Until the last block, dC is stored in fp16, divided
    by these scales. There is one pointer per class, to the scale of the class's numbers in the
    slice. The mask is false after the last class. `column` is the index of the slice's first
    column.
    """
    scales_ptr, width = scales
    rows = block + gl.arange(0, C.BM, layout=gl.SliceLayout(1, layout))
    return scales_ptr + gl.to_tensor(column // SLICE).to(gl.int64) * width + rows, rows < width


@gluon.jit
def _old_scales(scales, block, column, C: gl.constexpr):
    """Load the scales of the four slices (ranges of columns) of a tile of the weight's gradient
    (dC).

    dC is summed over several blocks of tokens. The sums over earlier blocks are stored in fp16,
    divided by these scales. The kernel loads the scales before the tile's matrix products. If the
    tile has only two slices, return each of their scales twice.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.BN, 16])
    parts: gl.constexpr = C.BN // SLICE
    tile = gl.zeros([C.BM, C.BN], gl.float32, mma)
    layout: gl.constexpr = _part(tile, 0, parts).type.layout
    place, mask = _scale_at(scales, block, column, layout, C)
    first = gl.load(place, mask=mask, other=0)
    place, mask = _scale_at(scales, block, column + SLICE, layout, C)
    second = gl.load(place, mask=mask, other=0)
    third = first
    fourth = second
    if parts == 4:
        place, mask = _scale_at(scales, block, column + 2 * SLICE, layout, C)
        third = gl.load(place, mask=mask, other=0)
        place, mask = _scale_at(scales, block, column + 3 * SLICE, layout, C)
        fourth = gl.load(place, mask=mask, other=0)
    return first, second, third, fourth


@gluon.jit
def _add_to(part, held, old, scales, at, C: gl.constexpr):
    """Write some columns of the weight's gradient (dC) to shared memory, after adding the old
    values that are there.

    dC is summed over several blocks of tokens. Until the last block, dC is stored in fp16. Each
    slice (range of columns) of each class has its own scale, a power of two. Divided by this scale,
    the slice's largest number just fits into the range of fp16. Numbers smaller than 2^-28 times
    the slice's largest number have fewer than the eleven significant bits of fp16. The error of
    such numbers is smaller than the rounding error of the largest number.
    """
    layout: gl.constexpr = part.type.layout
    if C.HAS_SCALES:
        sums = seen_as(held, gl.float16, [part.shape[0], part.shape[1]], held.layout)
        if C.ADD:
            scale = (old.to(gl.int32) << 23).to(gl.float32, bitcast=True)
            part += sums.load(layout).to(gl.float32) * scale[:, None]
        if not C.LAST:
            peak = gl.max(gl.abs(part), axis=1).to(gl.int32, bitcast=True) >> 23
            power = gl.minimum(gl.maximum(peak - ABOVE, LEAST), MOST)
            place, mask = _scale_at(scales, at[0], at[1], layout, C)
            gl.store(place, power.to(gl.uint8), mask=mask)
            inverse = ((254 - power) << 23).to(gl.float32, bitcast=True)
            sums.store((part * inverse[:, None]).to(gl.float16))
    elif C.ADD:
        part += held.load(layout).to(gl.float32)
    if C.LAST or not C.HAS_SCALES:
        held.store(part.to(gl.bfloat16))


@gluon.jit
def _multiply(descs, outs, counter_ptr, bars, buffers, sizes, limits, C: gl.constexpr):
    """Sum the products of the loaded tiles, and write the gradients of hidden states and weight."""
    x_by_column_desc, grad_weight_desc, scales_ptr, width = descs
    splits, _, _, _ = limits
    _, _, held_full, _, slot_full, slot_empty = bars
    left, right, held, slots = buffers
    operands = (x_by_column_desc, left, right)
    hidden_tiles, tiles, depth_blocks, rows_here, row_blocks, hidden_steps, split_steps = sizes
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.BN, 16])
    number: gl.constexpr = gl.BlockedLayout([1], [32], [C.WARPS], [0])
    step = 0
    taken = 0
    kept = 0
    is_releasing = False
    tile = gl.to_tensor(0)
    while tile < tiles:
        slot = taken % SLOTS
        mbarrier.wait(slot_full.index(slot), (taken // SLOTS) & 1)
        tile = gl.max(slots.index(slot).load(number), 0)
        barrier()
        mbarrier.arrive(slot_empty.index(slot), count=1)
        taken += 1
        if tile < hidden_tiles:
            if C.NEEDS_HIDDEN:
                block = tile // depth_blocks
                split = block // row_blocks
                todo = gl.minimum(split_steps, hidden_steps - split * split_steps)
                acc, step = _sum(operands, bars, step, todo, is_releasing, True, mma, C)
                is_releasing = False
                is_last = split == splits - 1
                flag_ptr = counter_ptr + 1 + tile % (row_blocks * depth_blocks)
                if C.HAS_PARTS and is_last:
                    while gl.atomic_add(flag_ptr, 0, sem="acquire") < split:
                        pass
                for index in gl.static_range(4):
                    top = block % row_blocks * C.BM
                    at = (top, tile % depth_blocks * C.BN + index * (C.BN // 4))
                    part = _part(acc, index, 4)
                    _write_rows(part, outs, at, rows_here, limits, split, is_last, C)
                if C.HAS_PARTS and not is_last:
                    barrier()
                    gl.atomic_add(flag_ptr, 1, sem="release")
        elif tile < tiles:  # noqa: SIM102
            if C.NEEDS_WEIGHT:
                steps = gl.cdiv(rows_here, C.BK)
                block = (tile - hidden_tiles) // depth_blocks * C.BM
                column = (tile - hidden_tiles) % depth_blocks * C.BN
                scales = (scales_ptr, width)
                old = (None, None, None, None)
                if C.HAS_SCALES and C.ADD:
                    old = _old_scales(scales, block, column, C)
                acc, step = _sum(operands, bars, step, steps, is_releasing, False, mma, C)
                if C.ADD:
                    mbarrier.wait(held_full, kept & 1)
                    kept += 1
                for index in gl.static_range(C.BN // SLICE):
                    part = _part(acc, index, C.BN // SLICE)
                    here = held.index(index)
                    first = column + index * SLICE
                    _add_to(part, here, old[index], scales, (block, first), C)
                    fence_async_shared()
                    barrier()
                    store_tile(grad_weight_desc, [block, first], here)
                is_releasing = True
    tma.store_wait(0)


@gluon.jit
def _linear_cross_entropy_hopper_specialized_products_kernel(
    x_by_column_desc,  # (R, W), block BK x BM
    x_by_row_desc,  # (R, W), block BM x BK
    scaled_desc,  # (R, D) rows times their scale, block BK x BN
    weight_desc,  # (V, D), block BK x BN
    grad_weight_desc,  # (V, D) in and out, block BM x SLICE
    grad_hidden_ptr,  # (N, D) contiguous out, original rows, or None
    scales_ptr,  # (D / SLICE, W) uint8 in and out: exponents of the sums' scales, or None
    parts_ptr,  # (S - 1, R, D) fp32: sums over shares of the vocabulary, or None
    order_ptr,
    kept_ptr,
    row_scale_ptr,  # (R,) fp32
    # (1 + tiles of dE,) int32, 0 at first: how many tiles are taken, and how many partial sums of
    # each tile are stored
    counter_ptr,
    first_row,
    piece_rows,
    width,
    vocab,
    depth,
    splits,  # S, programs that share the sum of a tile of dE
    # ADD: to grad_weight; LAST: no later block adds to it; MAY_REST: do not write it in blocks
    # without rows
    C: gl.constexpr,
):
    """Write the hidden states' gradient (dE) for a block of rows, and add the block's contribution
    to the weight's gradient (dC), in one launch.

    The tiles of dE come first, because there are few of them, and each is a long sum over the
    vocabulary. A program that has finished a tile takes the next tile that no program has taken.
    The order in which programs take tiles does not change the results, as
    `_linear_cross_entropy_hopper_products_kernel` explains.
    """
    rows_here = piece_rows
    if C.HAS_KEPT:
        rows_here = gl.minimum(piece_rows, gl.maximum(gl.load(kept_ptr) - first_row, 0))
    depth_blocks = gl.cdiv(depth, C.BN)
    row_blocks = gl.cdiv(rows_here, C.BM)
    hidden_steps = gl.cdiv(width, C.BK)
    split_steps = gl.cdiv(hidden_steps, splits)
    hidden_tiles = 0
    if C.NEEDS_HIDDEN:
        hidden_tiles = splits * row_blocks * depth_blocks
    tiles = hidden_tiles
    if C.NEEDS_WEIGHT:
        weight_tiles = gl.cdiv(vocab, C.BM) * depth_blocks
        if C.MAY_REST:
            weight_tiles = gl.where(rows_here > 0, weight_tiles, 0)
        tiles += weight_tiles
    sizes = (hidden_tiles, tiles, depth_blocks, rows_here, row_blocks, hidden_steps, split_steps)

    left = gl.allocate_shared_memory(gl.bfloat16, [C.STAGES, C.BM, C.BK], x_by_row_desc.layout)
    right = gl.allocate_shared_memory(gl.bfloat16, [C.STAGES, C.BK, C.BN], weight_desc.layout)
    held = gl.allocate_shared_memory(
        gl.bfloat16, [C.BN // SLICE, C.BM, SLICE], grad_weight_desc.layout
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], plain)
    full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    slot_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    slot_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(C.STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(slot_full.index(slot), count=1)
        mbarrier.init(slot_empty.index(slot), count=1)
    # Initialise only barriers that are used: Triton reuses the memory of an idle barrier (here for
    # the number of the tile just taken), and its initialisation may still arrive there.
    held_full = full
    held_empty = full
    if C.ADD:
        held_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        held_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(held_full, count=1)
        mbarrier.init(held_empty, count=1)
    fence_async_shared()
    bars = (full, empty, held_full, held_empty, slot_full, slot_empty)
    buffers = (left, right, held, slots)
    descs = (x_by_column_desc, x_by_row_desc, scaled_desc, weight_desc, grad_weight_desc)
    outs = (grad_hidden_ptr, parts_ptr, order_ptr, row_scale_ptr)
    limits = (splits, first_row, piece_rows, depth)
    tiles_of = (x_by_column_desc, grad_weight_desc, scales_ptr, width)
    gl.warp_specialize(
        [
            (_multiply, (tiles_of, outs, counter_ptr, bars, buffers, sizes, limits, C)),
            (_load, (descs, counter_ptr, bars, buffers, sizes, C)),
        ],
        [1],
        [40],
    )
