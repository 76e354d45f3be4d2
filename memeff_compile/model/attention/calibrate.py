"""Measure, on the user's inputs, which attention calls of a model may run in low bits.

During the measurement, the model runs with its usual attention. In addition, each attention call is
also computed at every level (a low-bit format, such as `8b`), on the same queries, keys and values,
and compared with the exact result. The model continues with the exact result, so an error in one
layer does not reach the next layer. As in SageAttention2, a level (low-bit format) is chosen per
layer and, for diffusion models, per time step. A level is acceptable if its worst score over all
inputs is high enough; the mean score does not count.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from memeff_compile.errors import CalibrationError
from memeff_compile.kernels.quantized_attention import LEVELS, attend_under_mask, restart
from memeff_compile.model.changes import require_module
from memeff_compile.model.figures import Spread, draw_spreads
from memeff_compile.model.runs import call, runs_of
from memeff_compile.model.watch import Watch
from memeff_compile.report import VerbReport

FORMAT = 1
EXACT = "exact"
DEFAULT_LEVELS = ("8b", "8b+f16")
SHARED_LEVELS = ("4b", "8b")
"""The default levels if a share is given."""
LEAST_SCORE = 0.98

_Found: TypeAlias = "dict[str, dict[str, list[list[float]]]]"
"""Scores by site, level and call, one per input."""
_Scores: TypeAlias = "Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]"


class Calibration(VerbReport, dict[str, Any]):
    """The result of `calibrate_attention`, a dictionary: the low-bit level of each attention
    module, for the option `memeff.attention`.

    It can be stored as JSON, and it has these keys:

    - `levels` maps each attention module to a level, or to a list with a level per call;
    - `scores` contains, for each attention, level and call, the mean and standard deviation of the
      score over inputs, and the worst score;
    - `min_score`, or `share` if `share` was passed, is the argument of the calibration.
    """

    def __str__(self) -> str:
        """Return how many attention modules run in low bits, and a table of all modules as text, in
        which the module with the lowest score comes first."""
        scores, tried = self._scores()
        chosen = [_chosen(level) for level in self["levels"].values()]
        asked = (
            f"the worst {self['share']} of calls have the more precise level"
            if "share" in self
            else f"at least {self['min_score']} is wanted"
        )
        note = (
            f"calibrate_attention: {len(chosen) - chosen.count(EXACT)} of {len(chosen)} sites in "
            f"low bits; below, the worst score over inputs and calls; {asked}"
        )
        head = ["site", "calls", *tried, "chosen"]
        lines = [head]
        for site in sorted(scores, key=lambda site: _worst(scores[site][tried[0]])):
            found = scores[site]
            calls = len(found[tried[0]])
            shown = [f"{_worst(found[level]):.4f}" for level in tried]
            lines.append([site or "(model)", str(calls), *shown, _chosen(self["levels"][site])])
        widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
        rows = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([note, *rows])

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the table as JSON, which the option `memeff.attention` accepts too."""
        return json.dumps(self, indent=indent)

    def plot(self, path: str | Path) -> None:
        """Draw, for each attention module and low-bit level, the mean and the standard deviation of
        the scores over calls.

        The extension of `path` determines the file format; without an extension, the format is SVG.
        Raise CalibrationError if matplotlib is not installed.
        """
        scores, tried = self._scores()
        series = {level: [_spread(found[level]) for found in scores.values()] for level in tried}
        names = [site or "(model)" for site in scores]
        least = self.get("min_score")
        draw_spreads(path, names, series, "score", CalibrationError, least=least)

    def _scores(self) -> tuple[_Scores, list[str]]:
        """Return the score of each attention module at each level (low-bit format) in each of its
        calls, and the levels for which scores exist.
        """
        scores = self["scores"]
        return scores, list(next(iter(scores.values())))


def _spread(calls: Sequence[Mapping[str, float]]) -> Spread:
    mean = sum(call["mean"] for call in calls) / len(calls)
    off = max(call["std"] for call in calls)
    return mean - off, mean, max(mean, min(1.0, mean + off))


def _worst(calls: Sequence[Mapping[str, float]]) -> float:
    return min(call["worst"] for call in calls)


def _chosen(levels: str | Sequence[str]) -> str:
    if isinstance(levels, str):
        return levels
    return ", ".join(f"{level} x {levels.count(level)}" for level in dict.fromkeys(levels))


def calibrate_attention(
    model: nn.Module,
    inputs: Iterable[Any] | Tensor | Mapping[str, Any],
    *,
    min_score: float | None = None,
    share: float | None = None,
    levels: Sequence[str] | None = None,
    run: Callable[[nn.Module, Any], Any] | None = None,
) -> Calibration:
    """Score each attention module of a model at each level (low-bit format), and choose the first
    level that is good enough.

    A score is the cosine similarity of a level's result and the exact result, multiplied by (1 -
    their relative L1 distance). The lowest score over all inputs counts. An attention is named by
    the path of the module that calls it; the second attention in one call of the module has `#1`
    appended to that name, and so on. If a module is called several times for one input, as in the
    steps of a diffusion model, each of these calls gets a separate score and level.

    Args:
        model: The model to calibrate; it runs eagerly, without gradients, and is not changed.
        inputs: The inputs of each run: a mapping of keyword arguments, a tuple or list of
            arguments, or a single argument. A single mapping or tensor is one run.
        min_score: The lowest acceptable score, between 0 and 1; by default 0.98, if there is no
            `share`.
        share: An alternative to `min_score`: the share of all calls that gets the second of two
            levels, as in SageAttention2. The calls with the worst scores at the first level get the
            second level.
        levels: The levels to choose from, in this order, by default `8b` and `8b+f16`; if no level
            reaches the score, `exact` is chosen. With `share`, there must be two levels, by default
            `4b` and `8b`; the second may be `exact`.
        run: A function that runs the model on one input, if `model(input)` does not; for example a
            whole sampling loop.

    Returns:
        The level of each attention module, as a value for the option `memeff.attention`; it can be
            printed and stored as JSON.

    Raises:
        CalibrationError: There are no inputs, the model called no attention, or an argument is not
            a level.

    Example:
        >>> table = calibrate_attention(model, batches, min_score=0.99)  # doctest: +SKIP
        >>> model.compile(backend="memeff", options={"memeff.attention": table})  # doctest: +SKIP
    """
    require_module(model, "calibrate_attention")
    levels = _levels(min_score, share, levels)
    scored = [level for level in levels if level != EXACT]
    runs = runs_of(inputs)
    if runs is None:
        raise CalibrationError(
            f"inputs is {inputs!r}; a list is needed, with the model's arguments for one run in "
            "each entry."
        )
    run = run or call
    found: _Found = {}
    is_empty = True
    for each in runs:
        is_empty = False
        with torch.no_grad(), _watched(model, scored, found):
            run(model, each)
    if is_empty:
        raise CalibrationError("no inputs were given to calibrate on; give at least one.")
    if not found:
        raise CalibrationError(
            "the model called no attention that can be scored: "
            "torch.nn.functional.scaled_dot_product_attention over (batch, heads, length, depth). "
            "Load a model of transformers with attn_implementation='sdpa', and see that it is not "
            "compiled."
        )
    if share is not None:
        return _table(found, _by_share(found, share, levels), share=share)
    least = LEAST_SCORE if min_score is None else min_score
    return _table(found, _by_score(found, least, levels), min_score=least)


def _levels(
    min_score: float | None, share: float | None, levels: Sequence[str] | None
) -> Sequence[str]:
    """Return the levels (low-bit formats) from which the calibration chooses; raise an error if the
    arguments contradict one another."""
    for name, number in (("min_score", min_score), ("share", share)):
        if number is not None and not 0.0 <= number <= 1.0:
            raise CalibrationError(f"{name} is {number}; a number between 0 and 1 is needed.")
    if min_score is not None and share is not None:
        raise CalibrationError(
            f"min_score is {min_score} and share is {share}; one of them is needed: the least "
            "score that will do, or how many calls get the more precise level."
        )
    known = LEVELS if share is None else (*LEVELS, EXACT)
    if levels is None:
        return DEFAULT_LEVELS if share is None else SHARED_LEVELS
    unknown = [level for level in levels if level not in known]
    if unknown or not levels or isinstance(levels, str):
        raise CalibrationError(
            f"levels is {levels!r}; a list of {', '.join(map(repr, known))} is needed."
        )
    if share is not None and (len(levels) != 2 or levels[0] == EXACT):
        raise CalibrationError(
            f"levels is {levels!r}; share needs two: first the level of most calls, then the level "
            "of the worst, such as ('4b', '8b') or ('8b', 'exact')."
        )
    return levels


def restart_attention_calls() -> None:
    """Make the next call of each attention module use the first level (low-bit format) in its list.

    If a calibration has a list of levels for an attention module, one per call, successive calls
    use these levels in order; after the last level, the next call uses the first level again. Call
    this function after a loop that was interrupted; a loop that completes as many calls as there
    were during the calibration needs no restart.

    Example: memeff_compile.restart_attention_calls()
    """
    restart()


def _by_score(found: _Found, least: float, levels: Sequence[str]) -> dict[str, list[str]]:
    """Return, for each attention call, the first of `levels` (low-bit formats) whose worst score
    over all inputs is at least `least`."""
    return {
        site: [
            next((level for level in levels if min(by_level[level][place]) >= least), EXACT)
            for place in range(len(by_level[levels[0]]))
        ]
        for site, by_level in found.items()
    }


def _by_share(found: _Found, share: float, levels: Sequence[str]) -> dict[str, list[str]]:
    """Return one of two levels (low-bit formats) for each attention call: the second level if the
    call's score at the first level is in the worst fraction `share` of all scores, otherwise the
    first level.
    """
    low, high = levels
    worst = sorted(
        (min(scores), number, site, place)
        for number, (site, by_level) in enumerate(found.items())
        for place, scores in enumerate(by_level[low])
    )
    chosen = {site: [low] * len(by_level[low]) for site, by_level in found.items()}
    for _, _, site, place in worst[: math.ceil(share * len(worst) - 1e-9)]:
        chosen[site][place] = high
    return chosen


def _table(found: _Found, by_call: Mapping[str, list[str]], **asked: float) -> Calibration:
    def summary(scores: Sequence[float]) -> dict[str, float]:
        mean = sum(scores) / len(scores)
        spread = math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))
        return {"mean": mean, "std": spread, "worst": min(scores)}

    scores = {
        site: {level: [summary(s) for s in calls] for level, calls in by_level.items()}
        for site, by_level in found.items()
    }
    levels = {
        site: chosen[0] if len(set(chosen)) == 1 else chosen for site, chosen in by_call.items()
    }
    return Calibration(format=FORMAT, **asked, levels=levels, scores=scores)


def score(found: Tensor, wanted: Tensor) -> float:
    """Return the score of a result: its cosine similarity with the exact result, multiplied by (1 -
    their relative L1 distance). The score is never below 0; it is 0 if the result contains an
    infinity or nan.
    """
    ours, theirs = found.flatten().double(), wanted.flatten().double()
    size = theirs.abs().sum()
    if not float(size):
        return float(not bool(ours.any()))
    cosine = float((ours @ theirs) / (ours.norm() * theirs.norm()).clamp_min(1e-300))
    distance = float((ours - theirs).abs().sum() / size)
    if not math.isfinite(cosine) or not math.isfinite(distance):
        return 0.0
    return min(1.0, max(0.0, cosine)) * max(0.0, 1.0 - distance)


@contextmanager
def _watched(model: nn.Module, levels: Sequence[str], found: _Found) -> Iterator[None]:
    """While a model runs on one input, compare each attention call at each level (low-bit format)
    with the exact result, and add the scores to the dictionary ``found``."""
    paths, inside = [""], [0]  # of the modules that run, and how often each has called attention
    calls: Counter[str] = Counter()  # that were scored, by site

    def note(
        result: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        site = f"{paths[-1]}#{inside[-1]}" if inside[-1] else paths[-1]
        inside[-1] += 1
        if dropout_p or query.dim() != 4 or query.shape[3] != value.shape[3]:
            return
        scores = {}
        for level in levels:
            ours = attend_under_mask(
                query, key, value, attn_mask, is_causal=is_causal, scale=scale, level=level
            )
            if ours is None:
                return
            scores[level] = score(ours, result)
        for level, each in scores.items():
            by_call = found.setdefault(site, {}).setdefault(level, [])
            if calls[site] == len(by_call):
                by_call.append([])
            by_call[calls[site]].append(each)
        calls[site] += 1

    def enter(path: str, *_: object) -> None:
        paths.append(path)
        inside.append(0)

    def leave(*_: object) -> None:
        paths.pop()
        inside.pop()

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, path)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with Watch(note):
            yield
    finally:
        for handle in handles:
            handle.remove()
