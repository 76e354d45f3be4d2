"""Measure how a lossy KV cache changes a model's predictions, on the user's inputs.

The model runs twice on each input: with an exact cache, and with a lossy `KVCache`. In the second
run, the model first fills the `KVCache` with all tokens but the last few. The last few tokens then
attend to the contents of the cache. In each run, the model predicts each of these last tokens from
the tokens before it. No tokens are generated. The report compares the probabilities of the next
token in the two runs. For each pair of adjacent layers, the report also compares the keys of the
two layers, and their values. The similarity of two layers shows whether a cache can merge these
layers without much error.

The method `plot` of a report draws the report's data in the form of figure 1a of MiniCache (arXiv
2405.14366).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memeff_compile import compat
from memeff_compile.errors import CalibrationError
from memeff_compile.kernels import coded_kv_cache as op_folder
from memeff_compile.model.cache.minicache import MiniCache, consecutive, rotary_of
from memeff_compile.model.changes import require_module
from memeff_compile.model.figures import Spread, draw_spreads
from memeff_compile.model.runs import evaluating, runs_of
from memeff_compile.model.watch import Watch
from memeff_compile.report import VerbReport

_Layers: TypeAlias = tuple[int, int]
"""The numbers of the lower and the upper layer of a pair."""

BINS = 40
"""Bins of a histogram of cosines from -1 to 1."""
_KINDS = ("keys", "values")


@dataclass(frozen=True)
class FidelityReport(VerbReport):
    """The result of `fidelity_report`, which can be printed and stored as JSON.

    Attributes:
        settings: the settings of the cache that was compared with an exact cache.
        pairs: a dictionary for each pair of adjacent layers. A pair of layers that a cache can
            merge has a dictionary too, even if sliding-window layers lie between the two layers.
            For older tokens, two merged layers share directions (unit vectors) of values, and of
            keys unless `values_only` is set. The dictionary's `layers` are the numbers of the two
            layers. For `keys` and for `values`, the dictionary describes the cosines between the
            vectors of the same token in the two layers. The dictionary has their mean, their 5th
            percentile, and a histogram with `BINS` bins from -1 to 1. Its `aligned` contains the
            mean cosines of `keys` and of `values` after an alignment. The alignment subtracts
            means, matches the heads of the two layers, and rotates the vectors of the upper layer.
            The dictionary's `has_window` says whether one of the two layers has a sliding window
            (such layers stay exact and never merge). A pair that can be merged has `kl` if
            `fidelity_report` had `each_pair=True` and the measured cache merges layers. `kl`
            belongs to a cache that merges only this pair. `kl` is the mean KL divergence, in nats,
            of the next-token probabilities with that cache from those with an exact cache.
        attention: for each attention call of the model, the `mean` and the `worst` cosine between
            its results with the exact cache and with the measured cache. Empty if the model never
            calls scaled_dot_product_attention, or if the number of calls differs between the runs
            with the two caches.
        logits: `kl`, the mean KL divergence of the next-token probabilities from those with an
            exact cache, in nats, and `kl_worst`, the largest of these divergences. `agreement`
            is the share of positions at which the most likely token is the same. The mean loss of
            the input's tokens is `loss_exact` with an exact cache and `loss` with the measured
            cache.
        memory: the `bytes` of the measured cache, the bytes that keys and values take in the
            model's dtype (`before`), and the `ratio` `before` / `bytes`.
        merged: the result of `KVCache.merged` for the last input. Two merged layers share
            directions only for older tokens. These tokens are merged in groups of `group`
            consecutive tokens, a setting of `KVCache`. For each pair of merged layers, `merged` has
            the number of tokens in merged groups, and the mean number of tokens that stayed
            unmerged. For an unmerged token, the two layers share no directions.
        codes: the `bits` per coded number, `kl` and `ratio` of other caches, for comparison. The
            list `codes` is empty if the measured cache does not merge layers. Of the caches in
            `codes`, only the last merges layers. One has as many bits as the measured cache, one
            has 3, and one has 2 (equal caches appear once). Another has 3 bits for keys and 2 for
            values (its entry has `value_bits`). The last also has these bits, and merges the values
            of all layers in pairs (its entry has `values_merged`).
        maps: for each pair in `pairs`, two tensors that align the upper layer with the lower one,
            fitted to all inputs. The first of a pair's two tensors, (heads, 2, depth, depth), has
            the rotations of keys and of values. The second has, for each head of the upper layer,
            the number of the lower layer's matching head. A cache that is created with
            `MiniCache(fidelity=report)` starts with the rotations and matching heads in `maps`.
            The JSON does not contain `maps`.
    """

    settings: dict[str, Any]
    pairs: list[dict[str, Any]]
    attention: list[dict[str, float]]
    logits: dict[str, float]
    memory: dict[str, float]
    merged: list[dict[str, Any]]
    codes: list[dict[str, Any]] = field(default_factory=list)
    maps: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def advice(self) -> str:
        """Return advice on whether to use the measured KV cache or another one.

        Return "" if no layers of the measured cache are merged, that is, share directions (unit
        vectors) of keys or values."""
        if not self.codes:
            return ""
        kl, ratio = self.logits["kl"], self.memory["ratio"]
        here = f"{self._other_layers()}merging: {ratio:.2f} times smaller at KL {kl:.1e}"
        better = [each for each in self.codes if each["ratio"] >= ratio and each["kl"] <= kl]
        if better:
            best = max(better, key=lambda each: each["ratio"])
            return f"{here}. Use {_without(best)} instead: it is no larger and loses no more."
        near = [each for each in self.codes if each["kl"] <= kl]
        if not near:
            return f"{here}. No cache of {_all_bits(self.codes)} bits loses as little."
        best = max(near, key=lambda each: each["ratio"])
        return f"{here}. Use it if {_without(best)} is too large; that loses less."

    def cheapest(self, count: int) -> tuple[int, int] | None:
        """Return the `start_layer` and `end_layer` of `MiniCache` with which merging `count`
        consecutive pairs of layers costs least.

        The cost is the sum of the pairs' errors. The error of a pair is its `kl` in the
        report's `pairs`. This number is the KL divergence of the next-token probabilities from
        those with an exact cache, if a cache merges only this pair. Return None if the errors of
        single pairs were not measured. `fidelity_report` measures these errors only with
        `each_pair=True`, and only for a cache that merges layers. Also return None if fewer than
        `count` consecutive pairs exist.
        """
        measured = sorted((*pair["layers"], pair["kl"]) for pair in self.pairs if "kl" in pair)
        found = []
        for at in range(len(measured)):
            chain = measured[at : at + 1]
            for pair in measured[at:]:
                if len(chain) < count and pair[0] > chain[-1][1]:
                    chain.append(pair)
            if len(chain) == count:
                found.append(chain)
        if not found:
            return None
        best = min(found, key=lambda chain: sum(kl for _, _, kl in chain))
        return best[0][0], best[-1][1] + 1

    def _other_layers(self) -> str:
        """Return advice to merge layers other than those that the measured cache merges, or "".

        There is advice only under two conditions. Each pair of layers was measured alone, and other
        pairs cost less accuracy than the pairs that the measured cache merges.
        """
        merged = [tuple(line["layers"]) for line in self.merged]
        found = self.cheapest(len(merged))
        if found is None or found == (merged[0][0], merged[-1][1] + 1):
            return ""
        return f"MiniCache(start_layer={found[0]}, end_layer={found[1]}) costs least; "

    def __str__(self) -> str:
        """Return the report as text."""
        logits, memory = self.logits, self.memory
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        lines = [
            f"fidelity_report: KVCache({settings}), {memory['ratio']:.2f} times smaller, KL "
            f"{logits['kl']:.2e} nats, the same first choice in {100 * logits['agreement']:.1f} %",
            f"memory      {memory['ratio']:.2f} times smaller ({memory['bytes'] / 2**20:.1f} MiB "
            f"for {memory['before'] / 2**20:.1f} MiB)",
            f"next token  KL {logits['kl']:.2e} nats, worst {logits['kl_worst']:.2e}; the same "
            f"first choice in {100 * logits['agreement']:.1f} %",
            f"loss        {logits['loss']:.4f}, exact {logits['loss_exact']:.4f}",
        ]
        if self.attention:
            worst = min(line["worst"] for line in self.attention)
            mean = sum(line["mean"] for line in self.attention) / len(self.attention)
            lines.append(f"attention   cosine {mean:.4f}, worst {worst:.4f}")
        if self.codes:
            lines.append(f"advice      {self.advice()}")
        head = "layers  keys: mean, 5 %   values: mean, 5 %   aligned: keys, values   merged   kept"
        lines += ["", f"{head}  no room"]
        found = {tuple(line["layers"]): line for line in self.merged}
        for pair in self.pairs:
            k, v = pair["keys"], pair["values"]
            line = found.get(tuple(pair["layers"]))
            tail = "   never: a window" if pair.get("has_window") else ""
            if line:
                tail = f"{line['merged']:8d} {line['kept']:6.1f} {line['left_over']:8.1f}"
            cosines = f"{k['mean']:10.3f} {k['low']:6.3f} {v['mean']:13.3f} {v['low']:6.3f}"
            both = pair["aligned"]
            cosines += f"{both['keys']:16.3f} {both['values']:7.3f}"
            if "kl" in pair:
                tail += f"   alone: KL {pair['kl']:.1e}"
            lines.append(f"{'-'.join(map(str, pair['layers'])):7s} {cosines}{tail}".rstrip())
        return "\n".join(lines)

    def to_json(self, *, indent: int | None = 1) -> str:
        """Return the report as JSON."""
        named = asdict(replace(self, maps={}))
        del named["maps"]
        return json.dumps(named, indent=indent)

    def plot(self, path: str | Path) -> None:
        """Draw how similar the keys, and the values, of two layers are, for each pair of layers.

        A pair consists of two adjacent layers, or of two layers that a cache can merge. For each
        token and head, there is one cosine between the two layers' keys, and one between their
        values. The plot shows the mean cosine, and the range that contains 90 % of the cosines.

        The extension of `path` determines the file format; without an extension, the format is SVG.
        Raise CalibrationError if matplotlib is not installed.
        """
        names = ["-".join(map(str, pair["layers"])) for pair in self.pairs]
        series: dict[str, list[Spread]] = {"keys": [], "values": []}
        for pair, (kind, spreads) in product(self.pairs, series.items()):
            spreads.append((pair[kind]["low"], pair[kind]["mean"], pair[kind]["high"]))
        title = "cosine between the layers of a pair"
        draw_spreads(path, names, series, title, CalibrationError)


def fidelity_report(
    model: nn.Module,
    inputs: Any,  # noqa: ANN401
    *,
    bits: int = 4,
    merge: MiniCache | str | None = "minicache",
    steps: int = 64,
    each_pair: bool = False,
    **settings: Any,  # noqa: ANN401
) -> FidelityReport:
    """Measure how a model's predictions with a `KVCache` differ from its predictions with an
    exact cache.

    Args:
        model: a causal language model of transformers. It runs eagerly, without gradients, in eval
            mode, and its mode is restored afterwards.
        inputs: token ids (batch, tokens), or a mapping with `input_ids` and, if prompts are
            padded on the left, `attention_mask`; or a list of these. Use long inputs, because
            every `KVCache` keeps at least the latest `recent` tokens exact, by default 128.
        bits: the bits per element of stored keys and values, as in `KVCache`.
        merge: how pairs of layers share directions (unit vectors) of keys and values, or None, as
            in `KVCache`.
        steps: the number of tokens at the end of an input whose predictions are compared, at least
            2.
        each_pair: also measure, for each pair of layers that can be merged, a cache that merges
            only this pair. The results show which layers can be merged at the least cost. With
            `each_pair`, the model runs once more for each pair and input.
        settings: further settings of `KVCache`, except `max_cache_len`.

    Returns:
        A report that compares the measured cache with an exact cache: the results of attention, the
        probabilities of the next token, and memory. The report also contains the similarity of
        layers' keys and of their values.

    Raises:
        CalibrationError: There are no inputs, an input is too short, or `steps` is too small.

    Example:
        >>> report = fidelity_report(model, ids, bits=4, merge="minicache")  # doctest: +SKIP
        >>> print(report); report.plot("layers.svg")  # doctest: +SKIP
    """
    from memeff_compile.model.cache.kv_cache import KVCache

    require_module(model, "fidelity_report")
    if steps < 2:
        raise CalibrationError(
            f"steps is {steps}; 2 at least is needed: the loss is of tokens that come after others "
            "that are compared."
        )
    runs = runs_of(inputs)
    if runs is None:
        raise CalibrationError(f"inputs is {inputs!r}; token ids (batch, tokens) are needed.")
    gathered = _Gathered()
    cache: Any = None
    asked = MiniCache() if merge == "minicache" else merge
    if isinstance(asked, MiniCache):
        merge, asked = asked, replace(asked, force=True)
    with evaluating(model):
        for given in runs:
            ids, mask = _tokens(given, steps)
            exact = _run(model, ids, mask, steps)
            gathered.alike(exact.cache, mask, model.config)
            is_padded = mask is not None and bool((mask[:, 0] == 0).any())
            how = {**settings, "merge": asked, "attention_mask": mask if is_padded else None}
            cache = KVCache(model.config, ids.shape[1], bits, **how)
            found = _run(model, ids, mask, steps, cache)
            gathered.answers(exact, found, ids[:, -steps:])
            gathered.bytes += cache.nbytes
            for other in () if asked is None else _others(bits):
                given_others = {**how, "value_bits": other.value_bits, "merge": other.merge()}
                made = KVCache(model.config, ids.shape[1], other.bits, **given_others)
                gathered.other(other, exact, _run(model, ids, mask, steps, made), made.nbytes)
            if each_pair and isinstance(asked, MiniCache):
                for lower, upper in gathered.mergeable:
                    pair = replace(asked, start_layer=lower, end_layer=upper + 1)
                    alone = KVCache(model.config, ids.shape[1], bits, **{**how, "merge": pair})
                    gathered.alone((lower, upper), exact, _run(model, ids, mask, steps, alone))
    if cache is None:
        raise CalibrationError("no inputs were given to compare on; give at least one.")
    shown = {"bits": bits, "merge": merge, **settings}
    return gathered.report(shown, cache.merged())


def _tokens(given: Any, steps: int) -> tuple[Tensor, Tensor | None]:  # noqa: ANN401
    """Return the token ids and the attention mask (or None) of an input.

    Raise an error unless the input has more than `steps` tokens. The tokens before the last `steps`
    ones fill the KV cache whose effect on predictions is measured.
    """
    is_named = isinstance(given, Mapping)
    ids = given.get("input_ids") if is_named else given
    mask = given.get("attention_mask") if is_named else None
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        seen = f"a tensor of {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise CalibrationError(
            f"the token ids of an input are {seen}; a tensor of whole numbers (batch, tokens) is "
            "needed, or a mapping that has one as input_ids."
        )
    if ids.dim() != 2 or ids.shape[1] <= steps:
        raise CalibrationError(
            f"an input has the shape {tuple(ids.shape)}; (batch, tokens) with more than "
            f"steps={steps} tokens is needed."
        )
    return ids, mask


class _Run(NamedTuple):
    """The logits and attention results for an input's last tokens, and the cache that was used."""

    logits: Tensor
    attention: list[Tensor]
    cache: Any


@torch.no_grad()
def _run(model: Any, ids: Tensor, mask: Tensor | None, steps: int, cache: Any = None) -> _Run:  # noqa: ANN401
    """Run the model on all tokens of an input.

    If `cache` is given, the model first runs on all but the last `steps` tokens to fill the
    cache. The last tokens then attend to the contents of the cache.
    """
    from memeff_compile.model.cache.layers import CACHE_NAME  # transformers, slow to import

    forward = partial(compat.forward_of(model), **{CACHE_NAME: cache}, use_cache=True)
    if cache is not None:
        before = None if mask is None else mask[:, :-steps]
        forward(input_ids=ids[:, :-steps], attention_mask=before)
        ids = ids[:, -steps:]
    results: list[Tensor] = []
    with Watch(lambda result, *_, **__: results.append(result[:, :, -steps:])):
        out = forward(input_ids=ids, attention_mask=mask)
    return _Run(out.logits[:, -steps:].float(), results, getattr(out, CACHE_NAME))


class _Other(NamedTuple):
    """The settings of a cache with which a fidelity report compares the measured cache.

    A fidelity report describes how a low-bit KV cache, the measured cache, changes a model's
    predictions. The measured cache may merge layers. Merged layers share directions (unit vectors)
    of keys or values. If the measured cache merges layers, the report also describes other caches,
    in its list `codes`.
    """

    bits: int
    value_bits: int | None = None
    values_merged: bool = False

    def merge(self) -> MiniCache | None:
        """Return the argument `merge` for creating a `KVCache` with these settings.

        If `values_merged` is true, pairs of layers, from the first layer on, merge only their
        values. The two layers of a pair then share directions (unit vectors). Otherwise the result
        is None, and no layers are merged.
        """
        return (
            MiniCache(start_layer=0, values_only=True, force=True) if self.values_merged else None
        )

    def named(self) -> dict[str, Any]:
        """Return the cache settings in this object, except those with default values."""
        named = {"bits": self.bits, "value_bits": self.value_bits}
        named["values_merged"] = self.values_merged or None
        return {name: value for name, value in named.items() if value is not None}


def _others(bits: int) -> list[_Other]:
    plain = [_Other(few) for few in sorted({bits, 3, 2})]
    return [*plain, _Other(3, 2), _Other(3, 2, values_merged=True)]


def _without(codes: Mapping[str, Any]) -> str:
    """Return the settings and results of one cache of a fidelity report as text.

    `codes`, an entry of the report's list `codes`, describes this cache. The report compares this
    cache with the cache that the user asked about. The results are how many times smaller this
    cache is than an exact cache, and a KL divergence. The KL divergence is that of the next-token
    probabilities from those with an exact cache.
    """
    kl, ratio = codes["kl"], codes["ratio"]
    of_values = f", {codes['value_bits']} for values," if "value_bits" in codes else ""
    merged = "with values alone merged" if codes.get("values_merged") else "without merging"
    return f"{codes['bits']} bits{of_values} {merged} ({ratio:.2f} times smaller, KL {kl:.1e})"


def _all_bits(codes: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(str(each["bits"]) for each in codes))


class _Gathered:
    """The measurements for a fidelity report, over all inputs so far.

    The measurements are grouped by kind, such as the KL divergence of next-token probabilities, or
    the cosines between two layers' keys. The method `report` summarizes the measurements.
    """

    def __init__(self) -> None:
        self.parts: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        self.bytes = self.before = 0
        self.others: defaultdict[_Other, int] = defaultdict(int)  # bytes of other caches
        self.mergeable: list[_Layers] = []
        self.have_windows: dict[_Layers, bool] = {}
        self.slots: dict[_Layers, Tensor] = {}
        self.products: dict[_Layers, Tensor] = {}

    def other(self, which: _Other, exact: _Run, found: _Run, size: int) -> None:
        """Record the measurements of another KV cache, for comparison with the measured cache.

        `which` contains the settings of the other cache. A fidelity report describes such other
        caches in its list `codes`. `found` is the model's run with the other cache, and `exact` the
        run with an exact cache. The measurements are the other cache's bytes, `size`, and a KL
        divergence: of the next-token probabilities in `found` from those in `exact`."""
        wanted, got = exact.logits.log_softmax(-1), found.logits.log_softmax(-1)
        self._add((wanted.exp() * (wanted - got)).sum(-1), "kl", which)
        self.others[which] += size

    def alone(self, at: _Layers, exact: _Run, found: _Run) -> None:
        """Record how the predictions with a cache that merges only one pair of layers differ from
        those with an exact cache.

        The two merged layers, `at`, share directions (unit vectors) of keys or values. `found` is
        the model's run with that cache, and `exact` the run with an exact cache. The difference is
        the KL divergence of the next-token probabilities.
        """
        wanted, got = exact.logits.log_softmax(-1), found.logits.log_softmax(-1)
        self._add((wanted.exp() * (wanted - got)).sum(-1), "alone", at)

    def _add(self, figures: Tensor, *of: object) -> None:
        self.parts[of].append(figures.flatten().cpu())

    def alike(self, cache: Any, mask: Tensor | None, config: Any) -> None:  # noqa: ANN401
        """Record the similarity of keys, and of values, for adjacent layers and for layers that can
        share unit vectors.

        `MiniCache` merges two layers: they then share directions (unit vectors) of keys or values.
        `cache` is the exact cache of one input, with all its keys and values.
        """
        layers = [{kind: getattr(layer, kind) for kind in _KINDS} for layer in cache.layers]
        have_windows = [bool(getattr(layer, "is_sliding", False)) for layer in cache.layers]
        self.before += sum(held.nbytes for layer in layers for held in layer.values())
        rotary = rotary_of(config, len(layers))
        kinds = [None if has else rotary[place] for place, has in enumerate(have_windows)]
        can_merge = consecutive(kinds)
        for at in sorted({*pairwise(range(len(layers))), *can_merge}):
            lower, upper = (layers[place] for place in at)
            if lower["keys"].shape != upper["keys"].shape:
                continue
            self.have_windows[at] = any(have_windows[place] for place in at)
            if at in can_merge and at not in self.mergeable:
                self.mergeable.append(at)
            rows = (lower["keys"], lower["values"], upper["keys"], upper["values"])
            batch, _, tokens, _ = rows[0].shape
            counted = rows[0].new_ones((batch, tokens), dtype=torch.bool)
            if mask is not None:
                counted = mask.bool()[:, -tokens:].to(counted.device)
            slots, products = op_folder.common(rows, counted, self.slots.get(at))
            self.slots[at] = slots
            self.products[at] = self.products.get(at, 0) + products
            for kind, cosines in zip(_KINDS, op_folder.cosines(rows, counted), strict=True):
                self._add(cosines[counted[:, None].expand_as(cosines)], "aligned", at, kind)
            for kind in lower:
                found = F.cosine_similarity(lower[kind].float(), upper[kind].float(), dim=-1)
                if mask is not None:  # without padding
                    found = found[mask.bool()[:, None, -found.shape[2] :].expand_as(found)]
                self._add(found, kind, at)

    def answers(self, exact: _Run, found: _Run, ids: Tensor) -> None:
        """Record how far the predictions with the measured cache are from those with an exact
        cache.
        """
        wanted, got = exact.logits.log_softmax(-1), found.logits.log_softmax(-1)
        self._add((wanted.exp() * (wanted - got)).sum(-1), "kl")
        self._add(wanted.argmax(-1) == got.argmax(-1), "same")
        for name, each in (("loss_exact", wanted), ("loss", got)):
            self._add(-each[:, :-1].gather(2, ids[:, 1:, None].to(each.device)), name)
        if len(exact.attention) == len(found.attention):
            for place, pair in enumerate(zip(exact.attention, found.attention, strict=True)):
                cosine = F.cosine_similarity(pair[0].float(), pair[1].float(), dim=-1)
                self._add(cosine, "attention", place)

    def report(self, settings: dict[str, Any], merged: list[dict[str, Any]]) -> FidelityReport:
        """Return the fidelity report, which compares a low-bit KV cache with an exact one.

        `settings` contains the settings of the low-bit cache, the measured cache. The measured
        cache may merge layers. Two merged layers share directions (unit vectors) of keys or values.
        `merged` has a dictionary for each pair of merged layers, with the numbers of merged and
        unmerged tokens. The measured cache's method `KVCache.merged` returned `merged` for the last
        input.
        """
        whole = {of: torch.cat(parts) for of, parts in self.parts.items()}
        cosines = [found for of, found in whole.items() if of[0] == "attention"]
        attention = [{"mean": float(c.mean()), "worst": float(c.min())} for c in cosines]
        kl = whole["kl",]
        logits = {
            "kl": float(kl.mean()),
            "kl_worst": float(kl.max()),
            "agreement": float(whole["same",].float().mean()),
            "loss_exact": float(whole["loss_exact",].mean()),
            "loss": float(whole["loss",].mean()),
        }
        held, before = float(self.bytes), float(self.before)
        memory = {"bytes": held, "before": before, "ratio": self.before / self.bytes}
        pairs = [
            {
                "layers": list(at),
                **{kind: _spread(whole[kind, at]) for kind in _KINDS},
                "aligned": {kind: float(whole["aligned", at, kind].mean()) for kind in _KINDS},
                "has_window": self.have_windows[at],
                **({"kl": float(whole["alone", at].mean())} if ("alone", at) in whole else {}),
            }
            for at in (of[1] for of in whole if of[0] == "keys")
        ]
        codes = [
            {
                **which.named(),
                "kl": float(whole["kl", which].mean()),
                "ratio": self.before / size,
            }
            for which, size in self.others.items()
        ]
        merge = settings["merge"]
        if isinstance(merge, MiniCache):
            words = [each.name for each in fields(merge) if each.repr]
            merge = {name: getattr(merge, name) for name in words}
        named = {**settings, "merge": merge}
        maps = {
            at: (op_folder.polar(products).float().cpu(), self.slots[at].cpu())
            for at, products in self.products.items()
        }
        return FidelityReport(named, pairs, attention, logits, memory, merged, codes, maps)


def _spread(whole: Tensor) -> dict[str, Any]:
    """Return the mean, the 5th percentile and a histogram of a tensor of cosines."""
    ordered = whole.sort().values
    counts = torch.histc(whole, BINS, -1.0, 1.0)
    return {
        "mean": float(whole.mean()),
        "low": float(ordered[len(ordered) // 20]),
        "high": float(ordered[len(ordered) - 1 - len(ordered) // 20]),
        "histogram": [int(count) for count in counts],
    }
