"""Measure, on the user's inputs, which attention calls of a model may run in low bits.

During the measurement, the model computes its attention calls exactly. Besides, each attention call
is computed at every level (a low-bit format, such as `8b`), on the same queries, keys and values. A
score measures the similarity of the result to the exact result. The model continues with the exact
result, so an error in one layer does not reach the next layer. As in SageAttention2, a level is
chosen per layer and, for diffusion models, per time step. A level is acceptable if its worst score
over all inputs is high enough. The mean score does not count.

With the argument `share`, this share of the attention calls gets the more precise of two levels. To
choose these calls by the model's output, the model runs twice more for each call and input, once
with this call at each of the two levels. In these two runs, all other calls are exact. At either
level, the call changes the model's output, compared with an exact run. The harm of the less precise
level is the change at this level minus the change at the other level. Any change in a call also
makes all later layers of a 16-bit model round differently. The output's change by this rounding is
largest for calls in early layers. The runs at both levels contain a change by rounding. Subtracting
one level's change from the other's is meant to cancel this change by rounding. A layer whose own
result changes little may change the output much, and the reverse.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from memeff_compile.errors import CalibrationError
from memeff_compile.kernels.quantized_attention import LEVELS, restart
from memeff_compile.model.attention.calls import EXACT, Attended, watched
from memeff_compile.model.attention.output import change_of, main_output
from memeff_compile.model.changes import require_module
from memeff_compile.model.figures import Spread, draw_spreads
from memeff_compile.model.runs import call, runs_of
from memeff_compile.report import VerbReport

FORMAT = 1
DEFAULT_LEVELS = ("8b", "8b+f16")
SHARED_LEVELS = ("4b", "8b")
"""The default levels if a share is given."""
LEAST_SCORE = 0.98
MEASURES = ("output", "attention")
"""How `share` measures harm: by the output of the model, or by the result of the attention call."""
MOST_DRIFT = 0.1
"""The largest change of the output between two exact runs, relative to the largest change by a call
in low bits, with which the changes by calls have a meaning.
"""
_FAR = 1e30
"""The change of an output that contains an infinity or nan; JSON has no infinity."""

_Found: TypeAlias = "dict[str, dict[str, list[list[float]]]]"
"""Scores by site, level and call, one per input."""
_Changes: TypeAlias = "dict[str, list[list[float]]]"
"""Changes of the model's output by site and call, one per input."""
_Scores: TypeAlias = "Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]"


class Calibration(VerbReport, dict[str, Any]):
    """The result of `calibrate_attention`: a dictionary with a low-bit format, such as `8b`, or
    `exact` for each attention module.

    A level is such a format or `exact`. A score measures the similarity of a level's result to the
    exact result, and 1 is best. Pass the dictionary as the option `memeff.attention`, or store it
    as JSON. Its keys:

    - `levels` maps each attention module to a level, or to a list with a level per call;
    - `scores` contains statistics per attention, level and call: the mean and standard deviation
      of the score over inputs, and the worst score;
    - `share` is the argument `share` of `calibrate_attention`: the fraction of all calls that get
      the second of two levels. By default, the first level is `4b`, and the second, more precise
      one is `8b`;
    - `min_score` exists instead of `share` if you did not pass `share`. `min_score` is the lowest
      acceptable score;
    - `by` exists together with `share`. `by` names the measure that chose the calls for the second
      level: the change of the model's output ("output") or the score ("attention");
    - `changes` exists if `by` is "output". For each attention call, `changes` contains a number
      that compares the two levels from which `calibrate_attention` chose. If only this call runs at
      a level, the model's output changes, compared with an exact run. The number is the output's
      change at the first level minus its change at the second. The number is a mean over inputs.
    """

    def __str__(self) -> str:
        """Return the number of attention modules in low bits, and a table of all modules, as text.

        This object is a dictionary with the level of each attention module. A level is a low-bit
        format, such as `8b`, or `exact`. If two levels, such as `4b` and `8b`, were compared by the
        model's output, the dictionary has a key `changes`. `changes` has a number for each
        attention call. If only this call runs at a level, the model's output changes. The number is
        the output's change at the first of the two levels minus the output's change at the second.
        With the key `changes`, the module with the largest number comes first.

        A module's score at a level is the lowest similarity to exact attention, over all inputs and
        calls. The key `scores` has scores at the levels that `calibrate_attention` tried. Without
        `changes`, the module with the lowest score at the first of these levels comes first.
        """
        scores, tried = self._scores()
        chosen = [_chosen(level) for level in self["levels"].values()]
        by = self.get("by", "attention")
        asked = (
            f"the worst {self['share']} of calls by {by} have the more precise level"
            if "share" in self
            else f"at least {self['min_score']} is wanted"
        )
        changes = self.get("changes")
        note = (
            f"calibrate_attention: {len(chosen) - chosen.count(EXACT)} of {len(chosen)} sites in "
            f"low bits; below, the worst score over inputs and calls; {asked}"
        )
        head = ["site", "calls", *tried, *(["output"] if changes else []), "chosen"]
        lines = [head]

        def badness(site: str) -> float:
            return max(changes[site]) if changes else -_worst(scores[site][tried[0]])

        for site in sorted(scores, key=badness, reverse=True):
            found = scores[site]
            calls = len(found[tried[0]])
            shown = [f"{_worst(found[level]):.4f}" for level in tried]
            shown += [f"{max(changes[site]):.2e}"] if changes else []
            lines.append([site or "(model)", str(calls), *shown, _chosen(self["levels"][site])])
        widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
        rows = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([note, *rows])

    def to_json(self, *, indent: int | None = None) -> str:
        """Return, as JSON, the low-bit format or `exact` that was chosen for each attention module.

        A score is the similarity of the attention's result in a low-bit format to the exact result.
        The JSON also has statistics of scores, for each format that was tried. This object is a
        dictionary, and the JSON has all of its keys. The option `memeff.attention` accepts this
        JSON too.
        """
        return json.dumps(self, indent=indent)

    def plot(self, path: str | Path) -> None:
        """Draw the mean similarity to exact attention for each attention module and low-bit format.

        A format, such as `8b`, is called a level. The similarity is called the score. The mean is
        over inputs and calls. The figure also shows the scores' spread. Each call's scores have a
        standard deviation over the inputs. The spread is the largest of the standard deviations of
        all calls.

        The extension of `path` determines the file format; without an extension, the format is SVG.
        Raise CalibrationError if matplotlib is not installed.
        """
        scores, tried = self._scores()
        series = {level: [_spread(found[level]) for found in scores.values()] for level in tried}
        names = [site or "(model)" for site in scores]
        least = self.get("min_score")
        draw_spreads(path, names, series, "score", CalibrationError, least=least)

    def _scores(self) -> tuple[_Scores, list[str]]:
        """Return the scores (similarity to exact attention) by module, level and call, and the
        levels (low-bit formats) with scores."""
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
    by: str | None = None,
    run: Callable[[nn.Module, Any], Any] | None = None,
) -> Calibration:
    """Score each attention module of a model at each level (low-bit format).

    Without `share`, each attention call gets the first of `levels` whose score is at least
    `min_score`. A score is the cosine similarity of a level's result and the exact result,
    multiplied by (1 - their relative L1 distance). The lowest score over all inputs counts. The
    name of an attention is the path of the module that calls it.
    The second attention in one call of the module has `#1` appended to that name, and so on. A
    module may be called several times for one input, as in the steps of a diffusion model. Each of
    these calls gets a separate score and level.

    Args:
        model: The model to calibrate. It runs eagerly, without gradients, and is not changed.
        inputs: The model's inputs, as a list with one entry per run. An entry is a mapping of
            keyword arguments, a tuple or list of arguments, or a single argument. For a single run,
            you can also pass its mapping or tensor directly. A run must not change its inputs, so
            pass no KV cache.
        min_score: The lowest acceptable score, between 0 and 1; by default 0.98, if there is no
            `share`.
        share: An alternative to `min_score`: the share of all calls that gets the second of two
            levels, as in SageAttention2. The calls that do most harm at the first level get the
            second level.
        levels: The levels to choose from, in this order. By default `8b` (INT8 attention scores)
            and `8b+f16` (INT8 attention scores, fp16 attention weights and values). If a call does
            not reach `min_score` at any level, `exact` is chosen for this call. With `share`, there
            must be two levels, by default `4b` (4-bit attention scores) and `8b`. The second may be
            `exact`.
        by: With `share`, how the function measures the harm that a call does at the first level.
            With `by="output"`, the model runs twice more for each call and input. In these runs,
            only this call has the first or the second level. A call's harm is the output's change
            at the first level minus the output's change at the second level, as the mean over
            inputs. The change from an exact run is the KL divergence if the output has `logits`.
            Otherwise the change is the relative squared error of the largest output tensor. With
            `by="attention"`, a call with a lower worst score at the first level does more harm, as
            in SageAttention2. The default is "output" if each attention is called once per input
            and a second run returns the same floating-point output. Otherwise the default is
            "attention".
        run: A function that runs the model on one input, if `model(input)` does not; for example
            a whole sampling loop. With `by="output"`, this function must return the model's
            output.

    Returns:
        The level of each attention module, as a value for the option `memeff.attention`. The
            result can be printed and stored as JSON.

    Raises:
        CalibrationError: There are no inputs, the model called no attention, or an argument is not
            a level.

    Example:
        >>> table = calibrate_attention(model, batches, min_score=0.99)  # doctest: +SKIP
        >>> model.compile(backend="memeff", options={"memeff.attention": table})  # doctest: +SKIP
    """
    require_module(model, "calibrate_attention")
    levels = _levels(min_score, share, levels, by)
    runs = runs_of(inputs)
    if runs is None:
        raise CalibrationError(
            f"inputs is {inputs!r}; a list is needed, with the model's arguments for one run in "
            "each entry."
        )
    found: _Found = {}
    changes: _Changes | None = None if share is None or by == "attention" else {}
    is_empty = True
    for each in runs:
        one = _Run(model, run or call, each)
        places = one.score([level for level in levels if level != EXACT], found)
        if changes is not None:
            problem = one.compare(places, levels, changes, are_single=by is None)
            if problem and by is not None:
                raise CalibrationError(problem)
            changes = None if problem else changes
        is_empty = False
    if is_empty:
        raise CalibrationError("no inputs were given to calibrate on; give at least one.")
    if not found:
        raise CalibrationError(
            "the model called no attention that can be scored: "
            "torch.nn.functional.scaled_dot_product_attention over (batch, heads, length, depth). "
            "Load a model of transformers with attn_implementation='sdpa', and see that it is not "
            "compiled."
        )
    if share is None:
        least = LEAST_SCORE if min_score is None else min_score
        return _table(found, _by_score(found, least, levels), min_score=least)
    if changes is None:
        harms = {site: [-min(each) for each in at[levels[0]]] for site, at in found.items()}
        return _table(found, _by_share(harms, share, levels), share=share, by="attention")
    harms = {site: [sum(each) / len(each) for each in at] for site, at in changes.items()}
    chosen = _by_share(harms, share, levels)
    return _table(found, chosen, share=share, by="output", changes=harms)


def _note(by_call: list[list[float]], place: int, number: float) -> None:
    """Append a number to the list of the attention call with index `place`.

    If `place` is the index after the last list, first append an empty list for a new call."""
    if place == len(by_call):
        by_call.append([])
    by_call[place].append(number)


class _Run:
    """The runs of a model on one input: exact runs, and runs with one attention call replaced.

    The replaced call runs at a level: a low-bit format, such as `8b`, or `exact`.
    """

    def __init__(
        self, model: nn.Module, run: Callable[[nn.Module, Any], Any], given: object
    ) -> None:
        self.model, self.run, self.given = model, run, given
        self.exact: tuple[Tensor, bool] | None = None  # the model's output

    def _output(self, seen: Callable[[Attended], Tensor | None]) -> tuple[Tensor, bool] | None:
        with torch.no_grad(), watched(self.model, seen):
            return main_output(self.run(self.model, self.given))

    def score(self, levels: Sequence[str], found: _Found) -> list[tuple[str, int]]:
        """Measure how similar attention results in each low-bit format of `levels` are to exact
        results.

        The similarity is called the score. Add the scores to `found`. For each attention, format
        and call of the attention, `found` has a list with one score per input. Return, for each
        scored call, the attention's name and the call's index among the calls of this attention.
        The name begins with the path of the attention's module.
        """
        places: list[tuple[str, int]] = []
        calls: Counter[str] = Counter()

        def seen(attended: Attended) -> None:
            scores = {}
            for level in levels:
                ours = attended.at(level)
                if ours is None:
                    return
                scores[level] = score(ours, attended.result)
            for level, each in scores.items():
                by_call = found.setdefault(attended.site, {}).setdefault(level, [])
                _note(by_call, calls[attended.site], each)
            calls[attended.site] += 1
            places.append((attended.site, attended.number))

        self.exact = self._output(seen)
        return places

    def compare(
        self,
        places: Sequence[tuple[str, int]],
        pair: Sequence[str],
        changes: _Changes,
        *,
        are_single: bool,
    ) -> str | None:
        """Measure the harm of the first of two levels (low-bit formats) for each attention call.

        `pair` contains the two levels, and the second may be `exact`. `places` contains, for each
        call, the attention's name, which begins with its module's path, and the call's index among
        the calls of this attention. Add the harm of each call to `changes`. The model runs with
        only this call at the first level, and with only this call at the second level. The harm is
        the output's change at the first level minus the output's change at the second level.

        If the output cannot be compared, return the reason as a sentence, otherwise None. If
        `are_single` is true, more than one call of an attention module is also such a reason.
        """
        if self.exact is None:
            return "by is 'output', but a run returns no floating-point tensor; return the output."
        if are_single and len({site for site, _ in places}) < len(places):
            return "an attention is called more than once per input"
        drift = self._change(None, pair[0])
        if not math.isfinite(drift):
            return "by is 'output', but the output of an exact run contains an infinity or nan."
        each = [[self._change(place, level) for level in pair] for place in places]
        if each and drift > MOST_DRIFT * max(first for first, _ in each):
            return (
                f"by is 'output', but two exact runs on the same input differ by {drift:.2g} in "
                "the output; make runs repeatable, or use by='attention'."
            )
        calls: Counter[str] = Counter()
        for (site, _), (first, second) in zip(places, each, strict=True):
            more = first - second
            if not math.isfinite(more):
                more = -_FAR if math.isfinite(first) else _FAR
            _note(changes.setdefault(site, []), calls[site], more)
            calls[site] += 1
        return None

    def _change(self, place: tuple[str, int] | None, level: str) -> float:
        """Return how much the model's output changes if one attention call runs at `level`, a
        low-bit format or `exact`.

        `place` is the call: the attention's name, which begins with its module's path, and the
        call's index among the calls of this attention. If `place` is None, return the change
        between two exact runs. `change_of` defines the change."""

        def seen(attended: Attended) -> Tensor | None:
            ours = attended.at(level) if (attended.site, attended.number) == place else None
            # with the strides and the dtype that the model expects
            return None if ours is None else torch.empty_like(attended.result).copy_(ours)

        assert self.exact is not None
        output = self._output(seen)
        if output is None:
            return math.inf
        return change_of(output[0], self.exact[0], are_logits=self.exact[1])


def _levels(
    min_score: float | None, share: float | None, levels: Sequence[str] | None, by: str | None
) -> Sequence[str]:
    """Return the levels (low-bit formats, or `exact`) to choose from.

    Raise an error if the arguments contradict one another."""
    for name, number in (("min_score", min_score), ("share", share)):
        if number is not None and not 0.0 <= number <= 1.0:
            raise CalibrationError(f"{name} is {number}; a number between 0 and 1 is needed.")
    if min_score is not None and share is not None:
        raise CalibrationError(
            f"min_score is {min_score} and share is {share}; one of them is needed: the least "
            "score that will do, or how many calls get the more precise level."
        )
    if by is not None and (share is None or by not in MEASURES):
        raise CalibrationError(
            f"by is {by!r}; {' or '.join(map(repr, MEASURES))} is needed, together with share."
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
    """Let each attention module start again at the first of its levels (low-bit formats).

    A level is a low-bit format, such as `8b`, or `exact`. `calibrate_attention` may choose a list
    of levels for an attention module, one per call. Successive calls of the module use these levels
    in order. After the last level, or after this function, the next call uses the first level
    again. Call this function if a loop that runs the model, such as a sampling loop, was
    interrupted. You need not call this function after a loop that completes as many calls as the
    calibration had.

    Example: memeff_compile.restart_attention_calls()
    """
    restart()


def _by_score(found: _Found, least: float, levels: Sequence[str]) -> dict[str, list[str]]:
    """Return, for each attention call, the first of `levels` (low-bit formats) that is acceptable.

    A score is the similarity of a level's result to the exact result. A level is acceptable if its
    lowest score over all inputs is at least `least`. If no level is acceptable, the call gets the
    level "exact".
    """
    return {
        site: [
            next((level for level in levels if min(by_level[level][place]) >= least), EXACT)
            for place in range(len(by_level[levels[0]]))
        ]
        for site, by_level in found.items()
    }


def _by_share(
    harms: Mapping[str, Sequence[float]], share: float, levels: Sequence[str]
) -> dict[str, list[str]]:
    """Return a level (a low-bit format or `exact`) for each call of each attention module, in the
    calls' order.

    `levels` has two levels. The first is a low-bit format, such as `4b`. For each call, `harms` has
    a number. The number is larger for a call that the first level harms more. The calls with the
    largest numbers get the second level. They are the fraction `share` of all calls. All other
    calls get the first level.
    """
    low, high = levels
    worst = sorted(
        (-harm, number, site, place)
        for number, (site, calls) in enumerate(harms.items())
        for place, harm in enumerate(calls)
    )
    chosen = {site: [low] * len(calls) for site, calls in harms.items()}
    for _, _, site, place in worst[: math.ceil(share * len(worst) - 1e-9)]:
        chosen[site][place] = high
    return chosen


def _table(found: _Found, by_call: Mapping[str, list[str]], **asked: object) -> Calibration:
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
