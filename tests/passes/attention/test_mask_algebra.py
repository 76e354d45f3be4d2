"""The reader of masks against the masks themselves: its formula must hold in every cell.

Random compositions of the mask algebra are written as functions, captured, read, and compared with
the tensor that eager computes. A reader with a wrong rule must fail here, which is tested, too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from memeff_compile import compat
from memeff_compile.options import Options
from memeff_compile.passes.attention import mask_algebra as algebra
from memeff_compile.passes.attention import mask_reader
from memeff_compile.passes.attention.mask_algebra import Axis, Read
from memeff_compile.passes.attention.mask_forms import Form, form_of
from memeff_compile.passes.attention.mask_reader import MaskReader
from memeff_compile.passes.graph.graph_info import GraphInfo, ambient_region
from tests.support.captured_graphs import capture

B, Q, K = 2, 5, 7
SHAPE = (B, 1, Q, K)
Index = tuple[int, ...]


# --- evaluating the reader's formulas ---------------------------------------------------------------


class Values:
    """Evaluates formulas cell by cell; reads of nodes are looked up in eager's values."""

    def __init__(self, values: Mapping[Node, Any]) -> None:
        self.values = values

    def sum_at(self, total: algebra.Linear, index: Index) -> int:
        value = int(total.constant)
        for term, times in total.terms.items():
            found = index[term.place] if isinstance(term, Axis) else self.read(term, index)
            value += times * int(found)
        return value

    def read(self, read: Read, index: Index) -> Any:
        return self.values[read.node][tuple(self.sum_at(at, index) for at in read.at)].item()

    def holds(self, formula: algebra.Formula, index: Index) -> bool:
        match formula:
            case algebra.Fixed(value):
                return value
            case algebra.AtLeastZero(total):
                return self.sum_at(total, index) >= 0
            case algebra.IsZero(total):
                return self.sum_at(total, index) == 0
            case algebra.Flag(read):
                return bool(self.read(read, index))
            case algebra.Not(part):
                return not self.holds(part, index)
            case algebra.All(parts):
                return all(self.holds(part, index) for part in parts)
            case algebra.Some(parts):
                return any(self.holds(part, index) for part in parts)
        raise AssertionError(formula)

    def at(self, scalar: algebra.Scalar, index: Index) -> Any:
        match scalar:
            case algebra.Linear():
                return self.sum_at(scalar, index)
            case algebra.Unknown(read):
                return self.read(read, index)
            case algebra.Cases(cases):
                (value,) = [v for condition, v in cases if self.holds(condition, index)]
                return value
        return self.holds(scalar, index)


def cells(shape: Sequence[int]) -> list[Index]:
    return list(itertools.product(*map(range, shape)))


def interpreted(gm: GraphModule, inputs: Sequence[Tensor]) -> dict[Node, Any]:
    """Return the value of every node of a graph."""
    values: dict[Node, Any] = {}

    class Keep(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    Keep(gm).run(*inputs)
    return values


@dataclass(frozen=True)
class Captured:
    """A captured function, and eager's value of each of its nodes."""

    gm: GraphModule
    values: Mapping[Node, Any]

    def assert_read_right(self) -> list[algebra.Scalar]:
        """Read the results; compare every cell of every node on the way."""
        reader = MaskReader(GraphInfo(self.gm, Options(), ambient_region()))
        outputs = self.gm.graph.output_node().args[0]
        scalars = [reader.read(output).scalar for output in outputs]
        evaluated = Values(self.values)
        for node, value in reader._values.items():
            assert tuple(value.shape) == tuple(self.values[node].shape), node
            for index in cells(value.shape):
                expected = self.values[node][index].item()
                assert evaluated.at(value.scalar, index) == expected, (node, index)
        return scalars


def captured(function: Callable[..., Any], *inputs: Tensor) -> Captured:
    return _captured(capture(function, *inputs), inputs)


def traced(function: Callable[..., Any], *inputs: Tensor) -> Captured:
    """Capture without Dynamo, in a hundredth of its time: ATen's spellings only."""
    gm = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*inputs)
    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
        if node.op == "call_function":  # it writes `add.Tensor(x, 1)`, which no schema has
            node.target = getattr(node.target, "overloadpacket", node.target)
    return _captured(gm, inputs)


def _captured(gm: GraphModule, inputs: Sequence[Tensor]) -> Captured:
    shapes = {tuple(i.shape): i for i in inputs}
    given = [
        shapes[tuple(compat.example_value(n).shape)]
        for n in gm.graph.nodes
        if n.op == "placeholder"
    ]
    return Captured(gm, interpreted(gm, given))


def assert_read_right(function: Callable[..., Tensor], *inputs: Tensor) -> algebra.Scalar:
    """Capture a function, read its result, and compare every cell of every node on the way."""
    (scalar,) = captured(function, *inputs).assert_read_right()
    return scalar


# --- random masks -----------------------------------------------------------------------------------


def axis_of(place: int, shift: int, spelling: int) -> Tensor:
    size = (Q, K)[place]
    line = torch.arange(size) + shift if spelling % 2 else torch.arange(shift, size + shift)
    if spelling % 3 == 0:
        return line[None, None, :, None] if place == 0 else line[None, None, None, :]
    if spelling % 3 == 1:
        return line.view(1, 1, -1, 1) if place == 0 else line.view(1, 1, 1, -1)
    line = line.unsqueeze(0).unsqueeze(0)
    return line.unsqueeze(3) if place == 0 else line.unsqueeze(2)


COMPARISONS = (torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne)


def random_mask(seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of a table of flags and a table of sequence ids that builds a mask."""

    chance = random.Random(seed)
    drawn = [chance.randrange(5040) for _ in range(400)]  # Dynamo would make inputs of draws

    def build(flags: Tensor, sequences: Tensor) -> Tensor:
        left = list(drawn)

        def below(end: int) -> int:
            return left.pop() % end

        def atom() -> Tensor:
            kind = below(9)
            shift, spelling = below(8) - 3, below(6)
            q, k = axis_of(0, shift, spelling), axis_of(1, 0, spelling + 1)
            if kind < 4:
                return COMPARISONS[below(6)](k, q)
            if kind == 4:
                return k < below(K + 2)
            if kind == 5:
                rows = torch.arange(B)[:, None, None, None]
                return flags[rows, torch.arange(K)[None, None, None, :]]
            if kind == 6:
                rows = torch.arange(B)[:, None, None, None]
                q0, k0 = axis_of(0, 0, spelling), axis_of(1, 0, spelling)
                return sequences[rows, q0] == sequences[rows, k0]
            if kind == 7:
                square = torch.ones(Q, K, dtype=torch.bool)
                return square.tril(shift) if spelling % 2 else square.triu(shift)[None, None]
            positions = torch.arange(Q).unsqueeze(0)
            step = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
            ids = torch.cumsum(step != 1, -1)
            return ids[:, None, :, None] == 0

        def formula(depth: int) -> Tensor:
            if depth == 0:
                return atom()
            kind = below(6)
            if kind < 3:
                return formula(depth - 1) & formula(depth - 1)
            if kind == 3:
                return formula(depth - 1) | atom()
            if kind == 4:
                return ~formula(depth - 1)
            return torch.where(atom(), formula(depth - 1), formula(depth - 1))

        mask = formula(below(4)).expand(B, 1, Q, K)
        kind = below(7)
        low = torch.finfo(torch.float32).min
        if kind == 0:
            return torch.where(mask, torch.zeros(()), low)
        if kind == 1:
            return torch.zeros(B, 1, Q, K).masked_fill(~mask, float("-inf"))
        if kind == 2:
            return (1.0 - mask.to(torch.float32)) * low
        if kind == 3:
            return torch.where(mask, 0.0, low) + torch.where(formula(1), 0.0, low)
        return mask

    return build


def tables() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    flags = torch.rand(B, K, generator=generator) < 0.6
    sequences = torch.randint(0, 3, (B, K + 1), generator=generator)
    return flags, sequences


def several(seeds: Sequence[int]) -> Captured:
    masks = [random_mask(seed) for seed in seeds]
    return traced(lambda *given: tuple(mask(*given) for mask in masks), *tables())


@pytest.fixture(scope="module")
def random_masks() -> list[Captured]:
    return [several(range(start, start + 20)) for start in (0, 20)]


def test_random_masks_are_what_the_reader_says(random_masks: list[Captured]) -> None:
    """And a reader that gave up everywhere would be right about everything, so it must not."""
    scalars = [scalar for masks in random_masks for scalar in masks.assert_read_right()]
    assert len(scalars) == 40
    gave_up = [
        scalar
        for scalar in scalars
        if isinstance(scalar, (algebra.Flag, algebra.Unknown))
        and scalar.read.node.op != "placeholder"
    ]
    assert len(gave_up) <= 4


@pytest.mark.slow
def test_many_random_masks_are_what_the_reader_says() -> None:
    for start in range(1000, 1500, 25):
        several(range(start, start + 25)).assert_read_right()


# --- wrong rules are found --------------------------------------------------------------------------

aten = torch.ops.aten

MUTATIONS: dict[str, tuple[Any, Any]] = {
    "le read as lt": (aten.le, mask_reader._RULES[aten.lt]),
    "ge read as le": (aten.ge, mask_reader._RULES[aten.le]),
    "eq read as true": (aten.eq, lambda given: mask_reader.Value(given.shape, algebra.TRUE)),
    "and read as or": (aten.__and__, mask_reader._RULES[aten.bitwise_or]),
    "not left out": (aten.bitwise_not, mask_reader._Operands.value),
    "triu read as tril": (aten.triu, mask_reader._triangle(1)),
    "sums read as differences": (aten.add, mask_reader._sum_of(-1)),
    "running sums read as zero": (
        aten.cumsum,
        lambda given: mask_reader.Value(given.shape, algebra.Linear()),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_rule_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch, random_masks: list[Captured]
) -> None:
    op, rule = MUTATIONS[name]
    monkeypatch.setitem(mask_reader._RULES, op, rule)
    wrong = random_masks
    if name == "running sums read as zero":
        wrong = [captured(lambda f: torch.cumsum(f, -1) == 1, tables()[0])]
    with pytest.raises(AssertionError):
        read_all(wrong)


def read_all(masks: Sequence[Captured]) -> None:
    for one in masks:
        one.assert_read_right()


# --- forms ------------------------------------------------------------------------------------------


def materialised(form: Form, queries: int, keys: int) -> Tensor:
    """Return the mask that a form without tables stands for."""
    q, k = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if form.causal is not None:
        mask &= k <= q + form.causal
    if form.window is not None:
        mask &= k > q - form.window
    if form.keys is not None:
        mask &= k < form.keys
    return mask


def conjunction(offset: int | None, window: int | None, keys: int | None) -> algebra.Formula:
    q, k = algebra.axis(0), algebra.axis(1)
    parts = []
    if offset is not None:
        parts.append(algebra.at_least_zero(q - k + offset))
    if window is not None:
        parts.append(algebra.at_least_zero(k - q + window - 1))
    if keys is not None:
        parts.append(algebra.at_least_zero(-k + keys - 1))
    return algebra.both(*parts)


def test_every_small_form_is_what_it_was_made_of() -> None:
    offsets = [None, *range(-2, 5)]
    bounds = [None, 1, 2, 3, 5]
    for queries, keys in itertools.product((1, 2, 3), (1, 2, 4)):
        whole = Form(), Form(causal=0), Form(keys=1)
        for offset, window, bound in itertools.product(offsets, bounds, bounds):
            form = form_of(conjunction(offset, window, bound), (queries, keys))
            expected = materialised(Form(offset, window, bound), queries, keys)
            if form.empty:
                continue
            assert not form.rest
            assert torch.equal(materialised(form, queries, keys), expected)
            if form in whole:
                assert bool(expected.any(-1).all()), "a query without keys is no plain form"


@pytest.mark.parametrize(
    ("offset", "window", "keys", "expected"),
    [
        (0, None, None, Form(causal=0)),
        (3, None, None, Form()),  # 4 keys: the first query reaches them all
        (0, 4, None, Form(causal=0)),  # a window as wide as the sequence
        (0, 3, None, Form(causal=0, window=3)),
        (None, None, 4, Form()),
        (None, None, 2, Form(keys=2)),
        (0, None, 4, Form(causal=0)),
        (1, None, 2, Form(keys=2)),
        (-1, None, None, Form(causal=-1, empty=True)),
        (None, None, 0, Form(keys=0, empty=True)),
    ],
)
def test_forms_of_four_by_four(
    offset: int | None, window: int | None, keys: int | None, expected: Form
) -> None:
    assert form_of(conjunction(offset, window, keys), (4, 4)) == expected


def test_a_mask_written_to_is_read_as_it_is_and_not_as_it_was_computed() -> None:
    def build(flags: Tensor, sequences: Tensor) -> Tensor:
        mask = torch.ones(Q, K, dtype=torch.bool)
        mask[2:] = False
        return mask

    scalar = assert_read_right(build, *tables())
    assert isinstance(scalar, algebra.Flag)


def test_lengths_that_change_between_two_reads_do_not_cancel() -> None:
    def build(flags: Tensor, sequences: Tensor) -> Tensor:
        length = sequences.sum(0)[0] * 1
        before = torch.arange(K) + length
        length.add_(1)
        return before < torch.arange(K) + length

    gm = capture(build, *tables())
    reader = MaskReader(GraphInfo(gm, Options(), ambient_region()))
    scalar = reader.read(gm.graph.output_node().args[0][0]).scalar
    assert scalar not in (algebra.TRUE, algebra.FALSE)


def test_formulas_that_grow_too_large_are_given_up_and_not_wrong() -> None:
    def build(flags: Tensor, sequences: Tensor) -> Tensor:
        k = torch.arange(K)
        mask = k == 0
        for number in range(algebra.MOST_PARTS + 5):
            mask = mask | (sequences[0, 0] + k == number)
        return mask

    assert_read_right(build, *tables())
