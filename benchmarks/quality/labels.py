"""Plain words for the names of modes, designs and tasks: the row labels of tables.

Stored rows have short names such as "cache, merged from half on, slerp, t 0.5". Tables for readers
have the labels that this module returns.
"""

from __future__ import annotations

import re

MODES = {
    "exact": "exact model",
    "compiled": "compiled model",
    "transformers' own cache": "exact model with the KV cache of transformers",
    "attention, 8b": "attention in int8 (`8b`)",
    "attention, 8b+f16": "attention in int8, values in fp16 (`8b+f16`)",
    "attention, 4b": "attention in 4-bit codes (`4b`)",
    "attention, 8b, calibrated": (
        "attention in int8 (`8b`) in the layers that calibration selected, exact in the others"
    ),
    "attention, 4b, the worst half 8b": (
        "attention in `4b`, but in `8b` in the half of the calls that loses most with `4b`"
    ),
    "attention, 8b, compiled": "attention in int8 (`8b`), compiled model",
    "attention, 4b, compiled": "attention in 4-bit codes (`4b`), compiled model",
    "attention, half 4b and half 8b by calibration, compiled": (
        "attention in `4b`, but in `8b` in the half of the calls that calibration selected, "
        "compiled model"
    ),
    "weights, 7 bits of 7": "lossless compressed weights (all 7 mantissa bits)",
    "weights, 3 bits of 7": "weights rounded to 3 mantissa bits",
    "weights, 1 bits of 7": "weights rounded to 1 mantissa bit",
    "weights, 0 bits of 7": "weights rounded to 0 mantissa bits",
}
MERGED = {
    "half": "in the upper half of the layers",
    "three quarters": "in the last quarter of the layers",
    "a quarter": "from the second quarter of the layers on",
    "a third": "from the second third of the layers on",
    "layer 2": "from layer 2 on",
}
"""The layers of merged pairs, by the words of a name."""
PAIRS = re.compile(
    r"(?P<what>values merged|merged|aligned)(?P<report> by a report)?(?: at t (?P<t>[\d.]+))?"
    r" from (?P<where>half|three quarters|a quarter|a third|layer 2)(?: on)?"
)


def of_mode(name: str) -> str:
    """Return the label of a lossy mode."""
    if name in MODES:
        return MODES[name]
    if name.startswith("fine-tuned, "):
        loss, _, seed = name.removeprefix("fine-tuned, ").rpartition("-")
        how = "the exact loss" if loss == "exact" else f"the gradient filter `{loss}`"
        return f"fine-tuned with {how} (seed {seed})"
    return _of_cache(name) if name.startswith("cache, ") else name


def _of_cache(name: str) -> str:
    parts = name.split(", ")[1:]
    bits = next((p.removesuffix(" bits") for p in parts if re.fullmatch(r"\d+ bits", p)), "16")
    mixed = "values of 2 bits" in parts
    told = ["KV cache with 3-bit keys and 2-bit values" if mixed else f"{bits}-bit KV cache"]
    for part in parts:
        pairs = PAIRS.fullmatch(part)
        if pairs:
            what = "values" if mixed or pairs["what"] == "values merged" else "keys and values"
            how = "merged" if what == "values" else "merged without alignment"
            how = "aligned and merged" if pairs["what"] == "aligned" else how
            how += " by a report" if pairs["report"] else ""
            how += f" (`t={pairs['t']}`)" if pairs["t"] else ""
            told.append(f"{what} of every two layers {how}, {MERGED[pairs['where']]}")
        elif part == "merged":
            told.append("values of every two layers merged, in all layers")
        elif part == "per_head":
            told.append("one scale per head (`per_head`)")
        elif part.startswith("groups of "):
            told.append(f"{part.removeprefix('groups of ')} numbers share a scale")
        elif part in ("slerp", "max_norm"):
            told.append(f"rule `{part}`")
        elif part.startswith("t "):
            told[-1] += f" with `t={part.removeprefix('t ')}`"
        elif part not in (f"{bits} bits", "values of 2 bits"):
            told.append(part)
    return ", ".join(told)


OTHER = "optimised for the inputs of the other text"
CODES = {
    "as they are": "{n}-bit KV cache of this package",
    "keys alone": "{n}-bit keys, exact values",
    "values alone": "exact keys, {n}-bit values",
    "keys in groups of 32": "{n} bits, 32 tokens share a scale of the keys",
    "keys and values in groups of 32": "{n} bits, 32 numbers share a scale of the keys or values",
    "keys before their rotary embedding": "{n} bits, keys quantised before their rotary embedding",
    "keys rotated, a scale a token": (
        "{n} bits, keys after a Hadamard transform, one scale per token"
    ),
    "values rotated": "{n} bits, values after a Hadamard transform",
    "values without their mean": "{n} bits, mean over the prompt subtracted from the values",
    "values a channel over tokens": (
        "{n} bits, 64 tokens share a scale of each channel of the values"
    ),
    "scales of least error": "{n} bits, scales that minimise the squared error",
    "centred, groups of 32": "{n} bits, codes symmetric around zero, 32 numbers share a scale",
    "steps of a normal distribution": "{n} bits, steps spaced for a normal distribution",
    "bits of keys by channel": "{n} bits on average, different bits for the channels of the keys",
    "bits of keys by channel, by eighths": (
        "{n} bits on average, different bits for the channels of the keys, set for each eighth "
        "of the channels instead of each quarter"
    ),
    "bits of keys by channel, all in groups of 32": (
        "{n} bits on average, different bits for the channels of the keys, 32 numbers share a scale"
    ),
    "512 recent tokens": "{n} bits, the latest 512 tokens exact",
    "64 first tokens": "{n} bits, the first 64 tokens exact",
    "8 bits in the first two layers": "{n} bits, but 8 bits in the first two layers",
    "keys before their rotary embedding, values rotated, scales of least error": (
        "{n} bits, keys quantised before their rotary embedding, values after a Hadamard "
        "transform, scales that minimise the squared error"
    ),
}
"""Caches of other codes, by the end of a design's name; n: bits."""
SCORES = {
    "as it is": "of this package",
    "values and weights exact": "with exact values and exact softmax weights",
    "scores exact": "with exact scores",
    "values and weights in int8": "with values and softmax weights in int8",
    "queries without their mean": "with the mean query of each block subtracted from the queries",
    "values with their mean": "without subtracting the mean of the values",
    "a scale a key": "with one scale per key",
    "scales by thread": "with one scale for each of SageAttention2's groups of threads",
    "keys' mean of all keys": "with the mean of all keys subtracted from the keys",
    "channels not evened": "without scaling queries and keys to equal energy in each channel",
    "keys rounded for the mean query everywhere": (
        "with keys rounded, in every layer, so that their product with the mean query has a "
        "small error"
    ),
    "keys never rounded for the mean query": (
        "with each key rounded to the nearest code in every layer"
    ),
    "queries without their mean, a scale a key": (
        "with the mean query of each block subtracted from the queries and one scale per key"
    ),
    "weights summed as rounded": "with division by the sum of the rounded softmax weights",
}
"""Arithmetic of attention in 8 bits, by the end of a design's name."""
WEIGHTS = {
    "no normaliser": "3 mantissa bits, weights not divided by a normaliser",
    "the best of four normalisers": "3 mantissa bits, the best of four normalisers for each block",
    "a scale for each row behind it": "3 mantissa bits, each row scaled again after rounding",
    "errors passed along the row": (
        "3 mantissa bits, each rounding error added to the next weight of the row"
    ),
    "even steps": "evenly spaced values in an entropy code",
    "integers of 6 bits, a scale for 32": "6-bit integers, one scale per 32 weights",
    "integers of 5 bits, a scale for 32": "5-bit integers, one scale per 32 weights",
}
"""Other roundings and codes of weights, by the end of a design's name."""


def of_design(name: str) -> str:
    """Return the label of a design."""
    family, _, rest = name.partition(", ")
    if family == "codes":
        bits, _, how = rest.partition(" bits, ")
        uneven = re.fullmatch(r"(keys|values) of (\d) bits", how)
        if uneven:
            keys, values = (uneven[2], bits) if uneven[1] == "keys" else (bits, uneven[2])
            return f"{keys}-bit keys, {values}-bit values"
        return CODES[how].format(n=bits)
    if family == "scores":
        return f"int8 attention (`8b`) {SCORES[rest.removeprefix('8b, ')]}"
    if family == "attention":
        level = re.fullmatch(r"8b, (exact|8b\+f16) below ([\d.]+)", rest)
        if level:
            other = "exact attention" if level[1] == "exact" else "`8b+f16`"
            where = f"in layers with a calibration score below {level[2]}"
            return f"int8 attention (`8b`), but {other} {where}"
        return MODES[name]
    return _of_weights(rest) if family in ("weights", "errors") else name


def _of_weights(rest: str) -> str:
    how = rest.removeprefix("3 bits, ")
    if how in WEIGHTS:
        return WEIGHTS[how]
    blocks = re.fullmatch(r"blocks of (\d+)(, for inputs of the other text)?", how)
    if blocks:
        told = f"3 mantissa bits, blocks of {blocks[1]} weights"
        return f"{told}, {OTHER} (`inputs=`)" if blocks[2] else told
    drawn = re.fullmatch(r"drawn, ([\d.]+ %)( of each)?(?:, draw (\d))?", how)
    if drawn is None:
        return how
    if not drawn[2]:
        return f"random errors, {drawn[1]} of the norm of the matrix"
    return f"random errors in proportion to each weight, {drawn[1]}, seed {drawn[3] or 1}"


TASKS = {
    "addition, likeliest of 4": "addition, choice of 4 results",
    "key-value": "key-value lookup",
    "needles": "finding a needle",
}


def of_task(name: str) -> str:
    """Return the label of a task."""
    task, _, length = name.partition(", ")
    if length.endswith("k"):
        return f"{TASKS.get(task, task)}, {1024 * int(length[:-1]):,} tokens"
    return TASKS.get(name, name)
