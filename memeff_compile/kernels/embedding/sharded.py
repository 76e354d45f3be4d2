"""Look up embeddings in tables that DTensor splits over ranks: each rank looks up its own rows.

The pass `fuse_embedding_gradient` rewrites such lookups. Before the rewrite, the lookup is
`x = embedding(ids, W)`, where W has the placement Shard(0). The result x is a DTensor with the
placement Partial. So the ranks' local tensors must still be added up.

After the rewrite: `x = over_ranks(memeff.embedding(W_r, ids, -1, first_row), W, ids)`, where W_r is
the rank's shard of W. The shard starts at row `first_row` of W, and -1 means that no id is padding.
`over_ranks` makes a DTensor of the ranks' local results. The placements of W and `ids` determine
the placement of this DTensor, which is again Partial.

DTensor computes the V x D gradient of all rows of W on every rank, and then keeps only the rank's
own rows. With these ops, a rank computes only the gradient of its own rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compat


class Layout(NamedTuple):
    """The DTensor placements of an embedding lookup's result, and how the table's rows and the ids
    are split over ranks."""

    placements: tuple[Any, ...]  # of the rows
    summed: int | None  # the dimension of the mesh whose ranks have other ids, if there is one
    is_by_rows: bool  # ranks hold some rows each


def layout_of(table: Any, ids: Any) -> Layout | None:
    """Return how the result of an embedding lookup is laid out over the ranks.

    All ranks get the same layout. Return None if DTensor would first send ids or rows of the
    embedding table between ranks. The table is a DTensor. The ids are a DTensor, or a plain tensor
    that is equal on all ranks.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = table.device_mesh
    of_ids, of_mesh = (Replicate(),) * mesh.ndim, mesh
    if hasattr(ids, "placements"):
        of_ids, of_mesh = ids.placements, ids.device_mesh
    if of_mesh != mesh:
        return None
    found, cut, summed = list[Any](), list[int](), list[int]()
    for dim, (held, asked) in enumerate(zip(table.placements, of_ids, strict=True)):
        if held.is_replicate() and (asked.is_replicate() or type(asked) is Shard):
            found.append(asked)
            summed += [] if asked.is_replicate() else [dim]
        elif type(held) is Shard and asked.is_replicate():
            found.append(Partial() if held.dim == 0 else Shard(ids.dim()))
            cut.append(held.dim)
        else:
            return None
    if len(cut) > 1 or len(summed) > 1:
        return None
    return Layout(tuple(found), next(iter(summed), None), 0 in cut)


def first_row_of(table: Any) -> int:
    """Return the id of the first row of this rank's shard."""
    return compat.offset_of_part(table)[0]


def parts_of(table: Any) -> tuple[int, int]:
    """Return the number of shards along the rows and along the columns of a table."""
    parts = [1, 1]
    for dim, place in enumerate(getattr(table, "placements", ())):
        if place.is_shard():
            parts[place.dim] *= table.device_mesh.size(dim)
    return parts[0], parts[1]


class _OverRanks(torch.autograd.Function):
    """An autograd function like DTensor.from_local, but with a correct second derivative.

    The second derivative of PyTorch's function ignores the rows that other ranks looked up in the
    embedding table.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mesh: Any, placements: Any, shape: Any, stride: Any) -> Any:
        from torch.distributed.tensor import DTensor

        ctx.placements = placements
        ctx.set_materialize_grads(False)
        said = {"run_check": False, "shape": shape, "stride": stride}
        return DTensor.from_local(rows, mesh, placements, **said)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is not None:
            grad = grad.redistribute(placements=_without_sums(ctx.placements))
            # If ranks hold some rows each, their results are partial sums.
            grad = grad.to_local(grad_placements=ctx.placements)
        return grad, None, None, None, None


def over_ranks(rows: Tensor, table: Any, ids: Any) -> Any:
    """Return a DTensor whose local tensor on this rank is `rows`."""
    found = layout_of(table, ids)
    assert found is not None, "the check admits only layouts that are known"
    shape = torch.Size((*ids.shape, table.shape[1]))
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    given = (rows, table.device_mesh, found.placements, shape, tuple(strides))
    return _OverRanks.apply(*given)  # type: ignore[no-untyped-call]


def added_up(rows: Any) -> Any:
    """Add the ranks' local tensors element by element where the placement is Partial, and return
    the sum on every rank.

    Other placements do not change.
    """
    return rows.redistribute(placements=_without_sums(rows.placements))


def _without_sums(placements: Any) -> list[Any]:
    from torch.distributed.tensor import Replicate

    return [Replicate() if place.is_partial() else place for place in placements]
