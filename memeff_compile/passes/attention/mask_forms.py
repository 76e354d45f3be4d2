"""Sort the conditions of a mask's formula by kind.

:func:`form_of` sorts the conditions into these kinds:

- bounds on the key's position relative to the query's;
- tables of visible keys;
- comparisons of sequence ids;
- other conditions, which are stored in the field `rest` of :class:`Form`.

A condition counts as a bound or a comparison only if this is proved for all sizes, including
symbolic ones. Otherwise the condition is put into `rest`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ... import compat
from . import mask_algebra as algebra
from .mask_algebra import TRUE, AtLeastZero, Axis, Formula, IsZero, Linear, Read, Size, axis


@dataclass(frozen=True)
class Ids:
    """The condition that two integers, for example ids of sequences, are equal.

    The first depends on batch and query index, the second on batch and key index."""

    query: Linear
    key: Linear


@dataclass(frozen=True)
class Form:
    """All conditions of a mask; a query attends to a key if all of them hold."""

    causal: Size | None = None  # o if the mask requires `key <= query + o`, else None
    window: Size | None = None  # w if the mask requires `key > query - w`, else None
    keys: Size | None = None  # n if the mask requires `key < n`, else None
    tables: tuple[Formula, ...] = ()  # conditions on the key, and on the row of the batch (padding)
    # equalities of a sum of the query's and a sum of the key's (packed sequences, chunks)
    ids: tuple[Ids, ...] = ()
    queries: tuple[Formula, ...] = ()  # conditions on the query, and on the row of the batch
    length: bool = False  # whether a tensor says how many keys there are (a static cache)
    shifted: bool = False  # whether a tensor says from which key on it is causal
    positions: bool = (
        False  # whether the mask compares sums read from tensors that are not functions of an index
    )
    rest: tuple[Formula, ...] = ()  # all other conditions
    empty: bool = False  # whether a query may attend to no key (true unless the contrary is proved)

    @property
    def is_plain(self) -> bool:
        """Return whether the mask depends on sizes only, and makes at least one key visible to
        every query."""
        return not (self.reads_data or self.positions or self.rest or self.empty)

    @property
    def reads_data(self) -> bool:
        """Return whether the mask depends on flags of keys or queries (such as padding), on ids
        (such as sequence ids), or on a length that a tensor contains."""
        return bool(self.tables or self.ids or self.queries or self.length or self.shifted)

    @property
    def is_packed(self) -> bool:
        """Return whether the mask separates several texts that are packed into one sequence."""
        return self.positions or bool(self.ids)

    @property
    def padding(self) -> bool:
        """Return whether the mask has conditions on keys alone or queries alone, such as padding.

        A condition that only limits the number of keys, such as the filled length of a cache, does
        not count."""
        return bool(self.queries) or any(not _is_length(part) for part in self.tables)

    @property
    def is_sayable(self) -> bool:
        """Return whether the arguments of memeff::attention can express the mask.

        The mask may have bounds on positions, a table of visible keys (one flag per key), and one
        condition on ids, but nothing else. A condition on ids requires that query and key have
        equal ids, such as sequence ids. All conditions on the query alone count as one condition on
        ids. A query that meets these conditions has the id 1, any other query the id 0. Every key
        has the id 1.
        """
        return (
            not (self.positions or self.shifted or self.rest)
            and len(self.ids) + bool(self.queries) <= 1
        )

    @property
    def conditions(self) -> list[str]:
        """Return the mask's conditions for a query to see a key, as text for the compilation
        report."""
        plain = self.causal is None or compat.statically_true(self.causal == 0)
        said = [
            (self.causal is not None, f"causal{'' if plain else ', shifted'}"),
            (self.keys is not None, "a number of keys"),
            (self.window is not None, "a sliding window"),
            (self.padding, "padding"),
            (self.length, "the filled length of a cache"),
            (self.shifted, "causal from a position that a tensor holds"),
            (self.is_packed, "positions or packed sequences"),
            (bool(self.rest), "something this pass does not read"),
        ]
        return [words for holds, words in said if holds]


def form_of(formula: Formula, shape: Sequence[Size]) -> Form:
    """Sort the conditions of a mask's formula by kind, and return them as a `Form`.

    The kinds are bounds on positions, conditions on the key or the query alone, conditions that
    query and key have equal ids (such as sequence ids), and the rest. The last two axes of the
    mask's shape are query and key."""
    formula = algebra.decided(formula, shape)
    if formula == TRUE:
        return Form()
    if formula == algebra.FALSE:
        return Form(keys=0, empty=True)
    form = Form()
    for part in formula.parts if isinstance(formula, algebra.All) else {formula}:
        form = _with_part(form, part, len(shape))
    form = _without_what_follows(form, shape[-2], shape[-1])
    return form if _leaves_every_query_a_key(formula, form, shape) else replace(form, empty=True)


def _with_part(form: Form, part: Formula, rank: int) -> Form:
    query, key = Axis(rank - 2), Axis(rank - 1)
    if isinstance(part, AtLeastZero):
        terms, constant = dict(part.sum.terms), part.sum.constant
        if terms == {query: 1, key: -1}:
            return _least(form, "causal", constant, part)
        if terms == {key: 1, query: -1}:
            return _least(form, "window", constant + 1, part)
        if terms == {key: -1}:
            return _least(form, "keys", constant + 1, part)
        if _is_shifted(part, query, key):
            return replace(form, shifted=True)
        if _is_length(part) and terms.get(key) == -1:
            form = replace(form, length=True)
    touched = algebra.axes_in(part)
    row = {Axis(0)} if rank > 2 else set()
    if touched <= {*row, key}:
        return replace(form, tables=(*form.tables, part))
    if touched <= {*row, query}:
        return replace(form, queries=(*form.queries, part))
    if touched <= {*row, query, key} and isinstance(part, IsZero):
        ids = _ids(part.sum, query, key)
        if ids is not None:
            return replace(form, ids=(*form.ids, ids))
    if key in touched and query in touched and isinstance(part, (IsZero, AtLeastZero)):
        return replace(form, positions=True)
    return replace(form, rest=(*form.rest, part))


def _is_length(part: Formula) -> bool:
    """Return whether a condition bounds an index from above or below, and the bound is a number
    that is read from a tensor.
    """
    if not isinstance(part, AtLeastZero):
        return False
    terms = part.sum.terms
    reads = [term for term in terms if isinstance(term, Read)]
    if len(reads) != 1 or len(terms) == 1:
        return False
    return not any(terms.get(own, 0) < 0 for own in algebra.axes_in(reads[0]))


def _is_shifted(part: AtLeastZero, query: Axis, key: Axis) -> bool:
    """Return whether a condition bounds the key's index from above by an element of a tensor.

    The upper bound is the sum of this element and a number. The bound may be on the key's index, or
    on the key's index minus the query's index."""
    terms = dict(part.sum.terms)
    reads = [term for term in terms if isinstance(term, Read)]
    if len(reads) != 1 or terms.pop(key, 0) != -1 or terms.pop(reads[0]) != 1:
        return False
    touched = algebra.axes_in(reads[0])
    return key not in touched and (terms == {query: 1} or (not terms and query in touched))


def _ids(total: Linear, query: Axis, key: Axis) -> Ids | None:
    """Split a sum into terms that depend on the query's index and terms that depend on the key's
    index.

    If a term depends on both indices, return None.
    """
    mine, theirs = Linear(total.constant), Linear()
    for term, times in total.terms.items():
        one = Linear(0, {term: times})
        touched = algebra.axes_in(one)
        if key not in touched:
            mine = mine + one
        elif query not in touched:
            theirs = theirs - one
        else:
            return None
    return Ids(mine, theirs)


def _least(form: Form, name: str, value: Size, part: Formula) -> Form:
    """Add a bound on the key's index to the mask's conditions (`Form`).

    The argument `name` is the bound's field in `Form`: `causal`, `window` or `keys`. If this field
    already contains a bound, keep only the smaller number, which is the stricter bound. If it is
    not known which bound is stricter, the new bound is added to the field `rest`, which contains
    other conditions.
    """
    before = getattr(form, name)
    if before is None or compat.statically_true(value <= before):
        changed: dict[str, Any] = {name: value}
        return replace(form, **changed)
    if compat.statically_true(value >= before):
        return form
    return replace(form, rest=(*form.rest, part))


def _without_what_follows(form: Form, queries: Size, keys: Size) -> Form:
    """Remove each bound on the key's index that another bound of the mask implies."""
    causal, bound = form.causal, form.keys
    if causal is not None and bound is not None:
        if compat.statically_true(bound >= queries + causal):
            return replace(form, keys=None)  # no query reaches that far
        if compat.statically_true(causal >= bound - 1):
            return replace(form, causal=None)  # the first query reaches the bound already
    return form


def _leaves_every_query_a_key(formula: Formula, form: Form, shape: Sequence[Size]) -> bool:
    """Return whether it can be proved that every query attends to at least one key."""
    if form.rest or form.positions or form.reads_data:
        return _sees_a_neighbour(formula, form, shape)
    queries, keys = shape[-2], shape[-1]
    bound = keys if form.keys is None else form.keys
    proofs: list[Any] = [bound >= 1, keys >= 1]
    if form.causal is not None:
        proofs.append(form.causal >= 0)
    if form.window is not None:
        # The last query's window begins within the keys, and reaches the query's last key.
        proofs.append(queries - form.window <= bound - 1)
        proofs.append(form.window >= 1)
        if form.causal is not None:
            proofs.append(form.causal + form.window >= 1)
    return all(compat.statically_true(proof) for proof in proofs)


def _sees_a_neighbour(formula: Formula, form: Form, shape: Sequence[Size]) -> bool:
    """Return whether all queries provably see the key at their own index, or all see the last key
    within the causal bound.

    `form.causal` is the bound: how far the index of a visible key may exceed the query's index.
    """
    rank = len(shape)
    for shift in {0, form.causal} if isinstance(form.causal, int) else (0, form.causal):
        if shift is None:
            continue
        is_there = [shift >= 0, shape[-2] + shift <= shape[-1]]
        by = {**algebra.same_axes(rank), rank - 1: axis(rank - 2) + shift}
        seen = algebra.decided(algebra.substituted(formula, by), shape) == TRUE
        if seen and all(map(compat.statically_true, is_there)):
            return True
    return False


def key_table(form: Form, rank: int) -> Formula:
    """Return the formula that says which keys of each sequence are visible, or TRUE if no tensor
    restricts the keys.
    """
    if form.keys is None:
        return algebra.both(*form.tables)
    bound = algebra.at_least_zero(-axis(rank - 1) + (form.keys - 1))
    return algebra.both(bound, *form.tables)


def by_index(formula: Formula, positions: Mapping[Read, Linear], rank: int) -> Formula:
    """Replace comparisons of position ids by comparisons of token indices.

    The comparisons are replaced only if the formula also requires equal sequence ids of query and
    key. The keys of the dictionary `positions` are elements of tensors of sequence ids (`Read`).
    The dictionary's value for such an element is the position id of the same token. Where two
    neighbouring tokens have equal sequence ids, the position id increases by one. The last two of
    the formula's `rank` axes are query and key.

    Example: `ids[q] == ids[k] and P[k] <= P[q]` becomes `ids[q] == ids[k] and k <= q`.
    """
    if not isinstance(formula, algebra.All):
        return formula
    query, key = axis(rank - 2), axis(rank - 1)
    swaps = [
        (positions[one], positions[other])
        for part in formula.parts
        if isinstance(part, IsZero)
        for one, other in _pairs(part.sum)
        if one in positions
        and other in positions
        and algebra.substituted(one, {**algebra.same_axes(rank), rank - 2: key}) == other
        and (one.at[-1:], other.at[-1:]) == ((query,), (key,))
    ]
    found: list[Formula] = []
    for part in formula.parts:
        for mine, theirs in swaps:
            part = _swapped(part, mine - theirs, query - key)
        found.append(part)
    return algebra.both(*found)


def _pairs(total: Linear) -> list[tuple[Read, Read]]:
    """If `total` is one tensor element (`Read`) minus another, return the two in both orders.

    Otherwise return an empty list. `total` is a sum of axis indices, sizes and tensor elements."""
    terms = list(total.terms.items())
    if total.constant != 0 or len(terms) != 2 or {times for _, times in terms} != {1, -1}:
        return []
    one, other = (term for term, _ in terms)
    if not isinstance(one, Read) or not isinstance(other, Read):
        return []
    return [(one, other), (other, one)]


def _swapped(part: Formula, difference: Linear, by: Linear) -> Formula:
    """In a comparison, replace the difference of two positions by the formula `by`, even if the
    difference is multiplied by a number.
    """
    if not isinstance(part, (AtLeastZero, IsZero)) or len(difference.terms) != 2:
        return part
    (term, sign), _ = difference.terms.items()
    times = part.sum.terms.get(term, 0) * sign
    if not times:
        return part
    total = part.sum - difference.times(times) + by.times(times)
    if set(difference.terms) & set(total.terms):
        return part
    return algebra.at_least_zero(total) if isinstance(part, AtLeastZero) else algebra.is_zero(total)
