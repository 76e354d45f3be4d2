"""Describe batched matrix products (`@`, bmm, baddbmm, and einsum of two tensors) in one
canonical form.

Each axis of a tensor has a letter, as in einsum. Two examples:

- The product `q @ k.transpose(-1, -2)` has the letters "abyz,abzx->abyx".
- The product `torch.einsum("bhid,bhjd->bhij", q, k)` has the letters "bhid,bhjd->bhij".

The product sums over the letter that both operands have and the result does not have. If an operand
lacks a letter of the result, the operand is broadcast along the letter's axis. An operand that has
size one on the letter's axis is broadcast, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import ascii_letters
from typing import Any

from torch.fx import Node

from ... import compat
from .canonical import aten, read_one
from .graph_info import same_shape


@dataclass(frozen=True)
class Factor:
    """One operand of a matrix product, and the einsum letter of each of its axes."""

    node: Node
    letters: str


@dataclass(frozen=True)
class Product:
    """The matrix product `alpha * left @ right + beta * added`, however the graph writes it."""

    left: Factor
    right: Factor
    letters: str  # the einsum letters of the result's axes
    summed: str  # the letter that is summed over
    added: Node | None = None
    alpha: Any = 1
    beta: Any = 1


_OPERANDS = {
    aten.matmul.default: ("self", "other"),
    aten.bmm.default: ("self", "mat2"),
    aten.baddbmm.default: ("batch1", "batch2"),
}
_RANKS = (3, 4)


def product_of(node: Any) -> Product | None:
    """If a node is a product of two tensors with three or four axes, return its description,
    otherwise None.
    """
    call = read_one(node)
    if call is None:
        return None
    given = call.args
    if call.op is aten.einsum.default:
        return _of_einsum(node, given["equation"], given["tensors"])
    if call.op not in _OPERANDS:
        return None
    left, right = (given[name] for name in _OPERANDS[call.op])
    ranks = [_rank(each) for each in (left, right)]
    if not set(ranks) <= set(_RANKS):
        return None
    batch = ascii_letters[: max(ranks) - 2]
    pairs = zip((left, right), ranks, ("yz", "zx"), strict=True)
    one, other = (Factor(each, batch[max(ranks) - rank :] + pair) for each, rank, pair in pairs)
    product = Product(one, other, f"{batch}yx", "z")
    if call.op is not aten.baddbmm.default:
        return product
    return replace(product, added=given["self"], alpha=given["alpha"], beta=given["beta"])


def _rank(node: Any) -> int:
    value = compat.example_value(node) if isinstance(node, Node) else None
    return 0 if value is None else value.dim()


def _of_einsum(node: Node, equation: str, tensors: Sequence[Any]) -> Product | None:
    ranks = [_rank(each) for each in tensors]
    if len(ranks) != 2 or not set(ranks) <= set(_RANKS) or _rank(node) not in _RANKS:
        return None
    (left, right), result = spelled_out(equation.replace(" ", ""), ranks)
    if any(len(set(letters)) != len(letters) for letters in (left, right, result)):
        return None
    summed = (set(left) | set(right)) - set(result)
    if len(summed) != 1 or not summed <= set(left) & set(right):
        return None
    one, other = Factor(tensors[0], left), Factor(tensors[1], right)
    (letter,) = summed
    sizes = [[compat.example_value(f.node).shape[f.letters.index(letter)]] for f in (one, other)]
    return Product(one, other, result, letter) if same_shape(*sizes) else None


def spelled_out(equation: str, dims: Sequence[int]) -> tuple[list[str], str]:
    """Return einsum's inputs and output with explicit letters for an ellipsis and for an omitted
    output."""
    inputs, arrow, output = equation.partition("->")
    operands = inputs.split(",")
    unused = "".join(letter for letter in ascii_letters if letter not in equation)
    counts = [
        dim - len(each.replace("...", "")) if "..." in each else 0
        for each, dim in zip(operands, dims, strict=True)
    ]
    # Operands with fewer axes have the last ones, as in broadcasting.
    shared = [unused[len(unused) - count :] for count in (*counts, max(counts))]
    if not arrow:
        once = [letter for letter in set(inputs) - {".", ","} if inputs.count(letter) == 1]
        output = "..." + "".join(sorted(once))
    every = zip((*operands, output), shared, strict=True)
    *spelled, result = [each.replace("...", more) for each, more in every]
    return spelled, result
