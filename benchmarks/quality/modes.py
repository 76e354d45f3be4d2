"""Every lossy mode of the package, each with a name and a constructor."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from memeff_compile import MiniCache

Merged = functools.partial(MiniCache, force=True)  # the loss is the measured quantity
MANTISSAS = (7, 3, 1, 0)
LEVELS = ("8b", "8b+f16", "4b")
COMPILED = ("8b", "4b")
CALIBRATED = "8b, calibrated"


@dataclass(frozen=True, eq=False)
class Mode:
    """One lossy mode; of `cache`, `level` and `mantissa` one is given.

    Attributes:
        name: in rows.
        cache: settings of `KVCache`.
        level: of attention; `CALIBRATED`: the calls that `calibrate_attention` keeps in `8b`.
        compiled: through the backend, at any length, instead of the op put into the model.
        mantissa: bits of the weights that are kept.
        reported: whether merging starts from a report of the other text.
        share: of attentions, those with the worst scores in `4b`, that run in `8b` instead; of a
            compiled mode, the share that `calibrate_attention` gets.
        in_pieces: through transformers' own cache, as a `KVCache` is read.
    """

    name: str
    cache: dict[str, Any] | None = None
    level: str | None = None
    compiled: bool = False
    mantissa: int | None = None
    share: float | None = None
    reported: bool = False
    in_pieces: bool = False

    @property
    def is_exact(self) -> bool:
        """Return whether only rounding tells the mode from the exact model."""
        return (
            self.cache in (None, {"bits": 16})
            and self.level is None
            and self.mantissa in (None, max(MANTISSAS))
        )


def modes(layers: int) -> list[Mode]:
    """Return every mode for a model of so many layers, and two that are exact.

    The cache of 16 bits shows the effect of rounding, weights with all bits the bits of a lossless
    code.
    """
    half, late = layers // 2, 3 * layers // 4 // 2 * 2
    found = [Mode(f"cache, {bits} bits", cache={"bits": bits}) for bits in (16, 8, 4, 3, 2)]
    found += [
        Mode(f"cache, {bits} bits, groups of 32", cache={"bits": bits, "group": 32})
        for bits in (4, 3)
    ]
    per_head = {"bits": 4, "scheme": "per_head"}
    found.append(Mode("cache, 4 bits, per_head", cache=per_head))
    for where, start in (("half", half), ("three quarters", late)):
        for rule, t in (("slerp", 0.5), ("slerp", 0.6), ("max_norm", 0.5)):
            shown = rule if rule == "max_norm" else f"{rule}, t {t}"
            merge = Merged(start_layer=start, rule=rule, t=t, align="none")
            settings = {"bits": 16, "merge": merge}
            found.append(Mode(f"cache, merged from {where} on, {shown}", cache=settings))
    for where, start in (("half", half), ("a quarter", layers // 4)):
        for bits in (16, 4, 3):
            settings = {"bits": bits, "merge": Merged(start_layer=start)}
            found.append(Mode(f"cache, aligned from {where} on, {bits} bits", cache=settings))
    for t in (0.5, 0.6, 0.8):
        for where, start, bits in (("half", half, 4), ("a quarter", layers // 4, 3)):
            settings = {"bits": bits, "merge": Merged(start_layer=start, t=t)}
            shown = f"cache, aligned at t {t} from {where} on, {bits} bits"
            found.append(Mode(shown, cache=settings))
    for gamma, retained, shown in ((0.0, 0.01, "no rows"), (1.0, 0.05, "a twentieth of the rows")):
        merge = Merged(start_layer=half, gamma=gamma, retained=retained)
        shown = f"cache, aligned from half on, {shown} kept, 4 bits"
        found.append(Mode(shown, cache={"bits": 4, "merge": merge}))
    few = Merged(start_layer=2, end_layer=2 + layers // 2 // 2 * 2)
    shown = "cache, aligned from layer 2, half of the layers, 4 bits"
    found.append(Mode(shown, cache={"bits": 4, "merge": few}))
    few = Merged(start_layer=2, end_layer=2 + (layers + 2) // 3 * 2, retained=0.002)
    shown = "cache, aligned from layer 2, two thirds of the layers, few rows kept, 3 bits"
    found.append(Mode(shown, cache={"bits": 3, "merge": few}))
    few = Merged(start_layer=layers // 3, retained=0.002)
    shown = "cache, aligned from a third on, few rows kept, 3 bits"
    found.append(Mode(shown, cache={"bits": 3, "merge": few}))
    two = {"bits": 3, "value_bits": 2}
    found.append(Mode("cache, 3 bits, values of 2 bits", cache=two))
    for where, start in (("merged", 0), ("merged from layer 2 on", 2)):
        settings = {**two, "merge": Merged(start_layer=start, values_only=True)}
        found.append(Mode(f"cache, 3 bits, values of 2 bits, {where}", cache=settings))
    for where, start in (("a quarter", layers // 4), ("half", half)):
        wide = {**two, "group": 128, "merge": Merged(start_layer=start, values_only=True)}
        shown = f"cache, 3 bits, values of 2 bits, groups of 128, merged from {where} on"
        found.append(Mode(shown, cache=wide))
    for bits in (4, 3):
        settings = {"bits": bits, "merge": Merged(start_layer=half, values_only=True)}
        found.append(Mode(f"cache, {bits} bits, values merged from half on", cache=settings))
    found += [Mode(f"attention, {level}", level=level) for level in (*LEVELS, CALIBRATED)]
    found.append(Mode("attention, 4b, the worst half 8b", level="4b", share=0.5))
    for level in COMPILED:
        found.append(Mode(f"attention, {level}, compiled", level=level, compiled=True))
    shown = "attention, half 4b and half 8b by calibration, compiled"
    found.append(Mode(shown, level="4b", compiled=True, share=0.5))
    return found + [Mode(f"weights, {kept} bits of 7", mantissa=kept) for kept in MANTISSAS]


def reported_modes(layers: int) -> list[Mode]:
    """Return the modes that merge layers with a report of the other text."""
    return [
        replace(mode, name=mode.name.replace("aligned", "aligned by a report"), reported=True)
        for mode in modes(layers)
        if "aligned" in mode.name
    ]
