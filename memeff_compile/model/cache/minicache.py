"""The settings for merging layers of a KV cache.

The settings determine which layers share the directions (unit vectors) of their keys and values,
and how a shared direction is computed.

Paper: MiniCache, arXiv 2405.14366.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from torch import Tensor

from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.coded_kv_cache import READINGS, RULES, SCALES

ALIGNMENTS = ("heads", "none")
"""The ways to make the rows of two layers similar before they are merged."""

ALIKE = 0.5
"""If the mean cosine between the rows of two layers is below this, they are merged only if `force`
is set."""


ALIGNED_T = 0.7
"""Where on the arc the direction of two aligned rows lies if keys are merged too: real models then
lose least with more of the upper layer's.
"""


_WHY = {"align": " There is no map over all heads together: each head would read the codes of all."}
"""More about settings that are refused."""


class Measured(Protocol):
    """An object, such as a `FidelityReport`, with the measured similarity of a model's layers.

    For pairs of layers, the object contains the similarity of the two layers' keys, and of their
    values."""

    @property
    def pairs(self) -> list[dict[str, Any]]:
        """Return a dictionary for each measured pair of layers, such as each pair of adjacent ones.

        The dictionary contains the numbers of the `layers`, and the `mean` cosine between their
        keys and between their values. The entry `aligned` contains the mean cosines after means
        are subtracted, heads are matched, and the later layer's keys and values are rotated.
        """

    @property
    def maps(self) -> Mapping[tuple[int, int], tuple[Tensor, Tensor]]:
        """Return the tensors (maps) that make keys and values of each pair's two layers similar.

        These tensors are fitted to the inputs on which the similarity of layers was measured. A
        pair has two tensors:

        - (H, 2, D, D): the rotations of the upper layer's keys and values;
        - (H,): for each head of the upper layer, the number of the lower layer's matching head.
        """


@dataclass(frozen=True)
class MiniCache:
    """The settings with which a `KVCache` merges pairs of layers.

    For each merged token, the two layers of a pair share one direction (unit vector) of their keys
    and one of their values. With `values_only`, they share only the direction of their values.
    `fidelity_report` measures how much accuracy the merge costs. Two layers form a pair if they are
    consecutive among the layers that attend to all tokens. A layer with a sliding window that lies
    between the two layers stays exact.

    Args:
        start_layer: layers before this one are not merged; by default, this is the middle layer.
            The first pair starts at `start_layer`, or at the next layer that attends to all tokens.
        end_layer: this layer and later layers are not merged; by default, layers up to the last one
            are merged. Merging the last layer may cost more accuracy than any other.
            `fidelity_report` shows the cost.
        align: `heads` takes three steps before the merge. Each layer's mean is subtracted from
            its keys and values. The heads of the two layers are paired. The upper layer's vectors
            are rotated towards the lower layer's. The rotations are fitted to the first tokens that
            the cache gets. `none` merges the layers as the MiniCache paper does: without
            subtracting means, without pairing heads, and without rotating vectors.
        rule: how the shared direction is computed from the directions of the two layers' vectors.
            `slerp` takes a point on the arc between these two directions, and `average` their
            weighted mean. `max_norm` takes the direction of the longer vector.
        t: the position on the arc for `slerp`, or the weight of the upper layer for `average`.
            The value 0 gives the lower layer's direction, the value 1 the upper layer's. The
            default is 0.7 if keys and values are merged with `align="heads"`, otherwise 0.5.
        gamma: which tokens stay unmerged. A token's distance is the distance between its vectors in
            the two layers. A token stays unmerged if its distance is near the largest distance
            (with `reading="similar"`, the smallest). Near means a difference of at most `gamma`
            times the range of all distances. A larger number keeps more tokens unmerged. With 1, as
            many tokens stay unmerged as fit into the memory that `retained` reserves.
        retained: the memory for unmerged tokens, as a share of `max_cache_len`. If the memory is
            too small for all such tokens, those that differ most between the layers stay unmerged
            (with `reading="similar"`, those that differ least).
        reading: which tokens stay unmerged. With `distinct`, these are the tokens that differ
            most between the layers. With `similar`, these are the tokens that differ least. The
            MiniCache paper intends `distinct`, but its inequality for this choice can be read as
            `similar`.
        scale: the length that a merged vector gets. `norm` restores the vector's original length.
            `projection` uses the length at which the merged vector is closest to the original
            vector.
        values_only: merge only values. Each layer then stores low-bit codes of its own keys. The
            values of all tokens are merged, except those of the first tokens and of the latest
            tokens. `gamma`, `retained` and `reading` then have no effect.
        fidelity: the result of `fidelity_report` for the model. Without a fidelity report, creating
            a cache with merged layers shows a warning. Without a fidelity report, merging the keys
            of two layers that are not adjacent raises an error.
            With a fidelity report, creating the cache raises an error if it would merge keys or
            values that are not similar. They are similar if the mean cosine between the two layers'
            aligned vectors is at least 0.5. With `align="none"`, the vectors are compared without
            alignment. The report's rotations are used if the cache's first tokens are too few to
            fit rotations.
        force: merge the layers even if the report is missing or shows that they are not similar,
            and without a warning.

    Raises:
        UnsupportedInputError: A setting is not supported; the message says why.

    Example:
        cache = memeff_compile.KVCache(config, 32768, bits=4, merge=MiniCache(start_layer=24))
    """

    start_layer: int | None = None
    end_layer: int | None = None
    rule: str = "slerp"
    t: float | None = None
    gamma: float = 0.05
    retained: float = 0.01
    reading: str = "distinct"
    scale: str = "norm"
    align: str = "heads"
    values_only: bool = False
    fidelity: Measured | None = field(default=None, repr=False, compare=False)
    force: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        words = {"rule": RULES, "reading": READINGS, "scale": SCALES, "align": ALIGNMENTS}
        for name, given in vars(self).items():
            if name in ("fidelity", "force"):
                continue
            if name in words:
                is_right, needed = given in words[name], ", ".join(map(repr, words[name]))
            elif name == "t" and given is None:
                continue
            elif name == "values_only":
                is_right, needed = isinstance(given, bool), "True or False"
            elif name in ("t", "gamma", "retained"):
                is_right = isinstance(given, (int, float)) and 0 <= given <= 1
                needed = "a number from 0 to 1"
            else:
                is_right = given is None or (isinstance(given, int) and given >= 0)
                needed = "the number of a layer, from 0,"
            if not is_right:
                said = f"MiniCache: {name} is {given!r}; {needed} is needed."
                raise UnsupportedInputError(f"{said}{_WHY.get(name, '')}")

        if self.values_only and self.align == "none":
            raise UnsupportedInputError(
                "MiniCache: values alone are merged aligned; give align='heads', or leave "
                "values_only out."
            )

    def position(self) -> float:
        """Return `t`: where a merged key or value direction lies between two layers' directions.

        Two merged layers share one direction (unit vector) of a token's keys, and one of its
        values. If `t` is 0, the shared direction is the lower layer's own direction. If `t` is 1,
        it is the upper layer's. With `rule="max_norm"`, `t` has no effect. If `t` is None, return
        the default: 0.7 if keys and values are merged with `align="heads"`, otherwise 0.5.
        """
        is_even = self.align == "none" or self.values_only
        return (0.5 if is_even else ALIGNED_T) if self.t is None else self.t

    def common(self, pair: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
        """Return the rotations and the pairing of heads that make two layers' keys and values
        similar, or None.

        The first tensor rotates the upper layer's keys and values towards the lower layer's. The
        second has, for each head of the upper layer, the number of the lower layer's matching head.
        The two tensors come from `fidelity`, the result of `fidelity_report`. Return None if
        `fidelity` is None, or has no entry for the pair."""
        return None if self.fidelity is None else self.fidelity.maps.get(pair)

    def capacity(self, tokens: int) -> int:
        """Return how many tokens may stay unmerged when two layers of a KV cache are merged.

        Two merged layers share directions (unit vectors) of a token's keys and of its values. For a
        token that stays unmerged, each layer stores its own key and value. `tokens` is the length
        of the cache. Tokens can be merged when they leave the memory for the latest tokens. The
        result does not count the latest tokens, or a sequence's first `keep_first` tokens. With the
        default settings, 328 unmerged tokens fit into a cache with a length of 32768. With the
        setting `values_only` of `MiniCache`, only values are merged, and the result has no effect.
        """
        return math.ceil(self.retained * tokens)


_EXPECTED = {
    "heads": "aligned layers from half on cost 5 to 9 % of perplexity with 4 bits, and from a "
    "quarter on with 3 bits 8 to 16 %; codes of 3 bits alone, 4.5 times smaller, cost 1 to 2 %",
    "values": "values merged from half on cost up to 3 % of perplexity with 4 bits, and in all "
    "layers, with keys of 3 bits and values of 2, 1 to 17 %; codes of 3 bits alone cost 1 to 2 %",
    "none": "no neighbouring layers are alike as they are, and answers get much worse; use "
    "align='heads'",
}


def require_alike(merge: MiniCache, pairs: Sequence[tuple[int, int]]) -> None:
    """Raise an error if the keys or values to merge are not similar in the two layers of a pair.

    If their similarity was not measured, warn the user. If in this case the cache would merge the
    keys of layers that are not adjacent, raise an error.
    """
    if merge.force:
        return
    if merge.fidelity is None:
        far = [(lower, upper) for lower, upper in pairs if upper - lower > 1]
        if far and not merge.values_only:
            raise UnsupportedInputError(
                f"MiniCache: other layers lie between the layers {_named(far)}, which are merged, "
                "and the keys of such layers differ too much: in Gemma 3 270M with 4 bits, merging "
                "keys and values of layers 11 and 17 raises perplexity by 70 %, and merging only "
                "values by 1.1 %. Set values_only=True, give the result of "
                "fidelity_report(model, ids), or merge in any case with MiniCache(force=True)."
            )
        warnings.warn(
            "KVCache merges layers of a model that was not measured. In the real models that were, "
            f"{_EXPECTED['values' if merge.values_only else merge.align]}. See what it does with "
            "report = memeff_compile.fidelity_report(model, ids, merge=...), then give "
            "MiniCache(fidelity=report); MiniCache(force=True) merges without this warning.",
            UserWarning,
            stacklevel=5,
        )
        return
    measured = {tuple(pair["layers"]): pair for pair in merge.fidelity.pairs}
    missing = [pair for pair in pairs if pair not in measured]
    if missing:
        raise UnsupportedInputError(
            f"MiniCache: fidelity has no figures of layers {_named(missing)}, which are merged; a "
            "report of this model is needed. Call fidelity_report(model, ids) again."
        )
    is_aligned = merge.align != "none"
    for kind in ("values",) if merge.values_only else ("keys", "values"):
        means = {
            p: measured[p]["aligned"][kind] if is_aligned else measured[p][kind]["mean"]
            for p in pairs
        }
        unlike = {p: mean for p, mean in means.items() if not mean >= ALIKE}
        if unlike:
            said = "aligned " if is_aligned else ""
            raise UnsupportedInputError(
                f"MiniCache: the {said}{kind} of layers {_named(unlike)}, which are merged, have "
                f"mean cosines down to {min(unlike.values()):.2f}, and {ALIKE} at least is needed: "
                "rows would come back wrong by half and more. Leave merge out, merge other layers "
                "(start_layer, end_layer), or give MiniCache(force=True)."
            )


def _named(pairs: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{lower}-{upper}" for lower, upper in pairs)


def pairs_of(kinds: Sequence[object], start: int, end: int | None = None) -> list[tuple[int, int]]:
    """Return pairs of neighbouring layers with equal entries in `kinds`, from `start` up to `end`.

    Layers with the entry None do not count: two layers are neighbours if only layers with the entry
    None lie between them. Each layer belongs to at most one pair. The layer `end` and later layers
    belong to no pair.
    """
    found: list[tuple[int, int]] = []
    for lower, upper in consecutive(kinds, start, end):
        if not found or found[-1][1] < lower:
            found.append((lower, upper))
    return found


def rotary_of(config: Any, layers: int) -> Sequence[int]:  # noqa: ANN401
    """Return for each layer whether its keys have a rotary embedding; a layer without one is never
    merged with a layer that has one."""
    return getattr(config.get_text_config(decoder=True), "no_rope_layers", None) or [1] * layers


def consecutive(
    kinds: Sequence[object], start: int = 0, end: int | None = None
) -> list[tuple[int, int]]:
    """Return every pair of neighbouring layers with equal entries in `kinds`; a layer may be in two
    pairs.

    Layers with the entry None do not count: two layers are neighbours if only layers with the entry
    None lie between them."""
    places = [place for place in range(len(kinds))[start:end] if kinds[place] is not None]
    return [(lower, upper) for lower, upper in pairwise(places) if kinds[lower] == kinds[upper]]
