"""All options of the backend; one frozen dataclass stores, validates and documents these options.

`torch.compile(model, backend="memeff", options={...})` takes two kinds of keys. Keys that start
with `memeff.` are the fields of `Options`; every other key is an Inductor config key and is passed
on to Inductor. The command `python -m memeff_compile options --page` prints `docs/options.md` from
these fields, so the page always agrees with the code.

This module imports torch only to look up an Inductor key, or a mode of `torch.compile`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib.metadata import entry_points
from os import PathLike
from typing import Any, TypeAlias, cast, get_origin

from memeff_compile.errors import OptionError
from memeff_compile.system import PassFacts, in_order

PREFIX = "memeff."


_CORE = (
    PassFacts("fuse_divergence", "divergence", may_find_nothing=True),
    PassFacts("fuse_linear_cross_entropy", "linear_cross_entropy"),
    PassFacts("fuse_embedding_gradient", "embedding"),
    PassFacts("fuse_gated_linear", "gated_linear"),
    PassFacts("defer_logits", "logits", ("eager", "none"), needs="fuse_linear_cross_entropy"),
    PassFacts("rewrite_kv_update", "kv_reads", may_find_nothing=True),
    PassFacts("expand_multihead", "attention", may_find_nothing=True),
    PassFacts("recover_attention", "attention", may_find_nothing=True),
    PassFacts("keep_rotary_tables", "rotary_tables", may_find_nothing=True),
    PassFacts("keep_activations", "recompute", ("as_written",), may_find_nothing=True),
)
PASS_FACTS = in_order(_CORE, lambda facts: facts.name, lambda each: each.facts)
"""Every pass, including those of the systems, in the order in which they run."""

_FACTS = {facts.name: facts for facts in PASS_FACTS}
PASS_NAMES = tuple(_FACTS)

# The option, and its value, that switches each pass off.
SWITCHES = {facts.name: (PREFIX + facts.option, facts.off[0]) for facts in PASS_FACTS}
# Passes for which `memeff.strict` only requires that they decline no match.
MAY_FIND_NOTHING = tuple(facts.name for facts in PASS_FACTS if facts.may_find_nothing)
# The low-bit forms of attention, which `memeff.attention` and its tables name.
ATTENTION_LEVELS = ("8b", "8b+f16", "4b")

Check: TypeAlias = Callable[[str, object], object]


class _FrozenMapping(Mapping[str, Any]):
    """A read-only mapping that can be hashed. Its hash depends only on the keys, so the values need
    not be hashable."""

    def __init__(self, items: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - a config value can be anything
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items))

    def __repr__(self) -> str:
        return repr(self._items)


def _wrong(key: str, value: object, takes: str) -> OptionError:
    return OptionError(f"{key} is {value!r} ({type(value).__name__}); {takes}")


def _is_number(value: object, kinds: type | tuple[type, ...] = (int, float)) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _nearest(name: str, candidates: Iterable[str], count: int = 1) -> list[str]:
    """Return the candidates that are most similar to `name`.

    Case and the prefix `memeff.` are ignored, and a dash equals an underscore."""
    plain = {_plain(candidate): candidate for candidate in candidates}
    close = difflib.get_close_matches(_plain(name), plain, n=count, cutoff=0.6)
    return [plain[match] for match in close]


def _plain(name: str) -> str:
    return name.lower().removeprefix(PREFIX).replace("-", "_")


def _suggest(name: str, candidates: Iterable[str]) -> str:
    nearest = _nearest(name, candidates)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def _suggest_of_all(name: str, candidates: Collection[str]) -> str:
    """Return text that names the most similar option, and the command `memeff options`, which lists
    all options.

    If no option in `candidates` is similar to `name`, the text itself lists all candidates.
    """
    nearest = _suggest(name, candidates)
    if nearest:
        return f"{nearest} `memeff options` lists all of them."
    return f" The options are {', '.join(candidates)}."


def _check_choice(key: str, value: object, *, values: Collection[str], of: str = "") -> object:
    if not isinstance(value, str) or value not in values:
        allowed = ", ".join(map(repr, values))
        raise _wrong(key, value, f"it takes {of}{allowed}.{_suggest(str(value), values)}")
    return value


def _rule(
    takes: str, fits: Callable[[Any], bool], kept: Callable[[Any], object] = lambda value: value
) -> Check:
    """Return a validator that accepts the values for which `fits` is true.

    `takes` describes these values in an error message, and `kept` converts an accepted value.
    """

    def check(key: str, value: object) -> object:
        if not fits(value):
            raise _wrong(key, value, f"it takes {takes}.")
        return kept(value)

    return check


_check_flag = _rule("True or False", lambda value: isinstance(value, bool))
_check_fraction = _rule(
    "a number between 0 and 1, or None",
    lambda value: value is None or (_is_number(value) and 0 < value < 1),
    lambda value: None if value is None else float(value),
)
_check_factor = _rule(
    "a positive number, by which every tolerance is multiplied",
    lambda value: _is_number(value) and 0 < value < float("inf"),
    float,
)
_check_folder = _rule(
    "the path of a folder, which is made when it is needed",
    lambda value: value is None or (isinstance(value, (str, PathLike)) and bool(str(value))),
    lambda value: None if value is None else str(value),
)
_check_length = _rule(
    "'auto' or a number of keys",
    lambda value: value in ("auto", None) or (_is_number(value, int) and value >= 0),
    lambda value: None if value == "auto" else value,
)


def _check_mode(key: str, value: object) -> object:
    if value is None:
        return None
    from memeff_compile import compat

    modes = compat.inductor_modes()
    return _check_choice(key, value, values=modes, of="one of Inductor's modes: ")


def _check_verify(key: str, value: object) -> object:
    if isinstance(value, bool):
        return "on" if value else "off"
    return _check_choice(key, value, values=("off", "on", "raise"))


_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB)\s*", re.IGNORECASE)
_UNIT = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def _check_bytes(key: str, value: Any, *, has_auto: bool = True) -> object:  # noqa: ANN401
    if has_auto and value in ("auto", "minimal"):
        return 0 if value == "auto" else 1
    if isinstance(value, str) and (match := _BYTES.fullmatch(value)):
        value = int(float(match[1]) * _UNIT[match[2].lower()])
    if not _is_number(value, int) or value < 0:
        some, is_auto = ("'auto', 'minimal', ", " (0 means 'auto')") if has_auto else ("", "")
        takes = f"it takes {some}a number of bytes{is_auto} or a size such as '64MiB' or '1GiB'."
        raise _wrong(key, value, takes)
    return value


def _check_recompute(key: str, value: object) -> object:
    if value in ("as_written", "attention"):
        return value
    if isinstance(value, str) and not _BYTES.fullmatch(value):
        takes = "it takes 'as_written', 'attention', a number of bytes or a size such as '12GiB'."
        raise _wrong(key, value, takes + _suggest(value, ("as_written", "attention")))
    return _check_bytes(key, value, has_auto=False)


_SITE_LEVELS = (*ATTENTION_LEVELS, "exact")


def _check_attention(key: str, value: object) -> object:
    """Return a valid value of the attention option, and raise OptionError for any other value.

    Valid values are "exact", "off", a level (the name of a low-bit format), and a calibration table
    that gives each attention call a level."""
    if not isinstance(value, Mapping):
        return _check_choice(key, value, values=("exact", *ATTENTION_LEVELS, "off"))
    levels = value.get("levels", value)
    if not isinstance(levels, Mapping) or not levels:
        raise OptionError(
            f"{key} is a table without levels; it takes {{module path: level}}, or what "
            "memeff_compile.calibrate_attention returns."
        )
    return _FrozenMapping({site: _check_level(key, site, each) for site, each in levels.items()})


def _check_level(key: str, site: object, value: object) -> str | tuple[str, ...]:
    """Accept one level (low-bit format) for an attention module, or one level for each attention
    call in the module."""
    levels = [value] if isinstance(value, str) else value
    is_list = isinstance(levels, (list, tuple)) and bool(levels)
    if not isinstance(site, str) or not is_list:
        raise OptionError(
            f"{key}[{site!r}] is {value!r}; a table takes module paths, and for each a level or a "
            "list of levels by call."
        )
    for level in cast("list[object]", levels):
        if level not in _SITE_LEVELS:
            raise OptionError(
                f"{key}[{site!r}] names the level {level!r}; it takes "
                f"{', '.join(map(repr, _SITE_LEVELS))}.{_suggest(str(level), _SITE_LEVELS)}"
            )
    return value if isinstance(value, str) else tuple(cast("list[str]", levels))


def _check_pass_name(key: str, name: object, names: Collection[str], star: str = "") -> None:
    if name not in names:
        raise OptionError(
            f"{key} names the pass {name!r}, which does not exist; the passes are "
            f"{', '.join(map(repr, names))}{star}.{_suggest(str(name), names)}"
        )


# The entry point group in which packages offer their passes.
INSTALLED = "memeff_compile.passes"


@cache
def _installed_pass(name: str) -> object:
    found = {each.name: each for each in entry_points(group=INSTALLED)}
    if name not in found:
        offered = ", ".join(map(repr, sorted(found))) or "nothing"
        raise OptionError(
            f"{PREFIX}passes names {name!r}, which no installed package offers as an entry point "
            f"of the group {INSTALLED!r}; it has {offered}.{_suggest(name, found)}"
        )
    loaded = found[name].load()
    return loaded() if isinstance(loaded, type) else loaded


_PASS_PARTS = ("find", "check", "rewrite", "identity")


def _check_passes(key: str, value: Any) -> object:  # noqa: ANN401
    given = value if isinstance(value, (list, tuple)) else [value]
    found: tuple[Any, ...] = tuple(
        _installed_pass(each) if isinstance(each, str) else each for each in given
    )
    for each in found:
        is_made = not isinstance(each, type) and all(hasattr(each, p) for p in _PASS_PARTS)
        name, when = getattr(each, "name", None), getattr(each, "when", None)
        if not is_made or not isinstance(name, str) or when not in ("before", "after"):
            takes = "it takes instances of subclasses of memeff_compile.GraphPass, each with a "
            takes += "`name` and `when` as 'before' or 'after', or names of installed ones."
            raise _wrong(key, each, takes)
    names = [each.name for each in found]
    for name in names:
        if not name.isidentifier() or name in (*PASS_NAMES, "backend") or names.count(name) > 1:
            raise OptionError(
                f"{key} has a pass called {name!r}; the name of a pass is an identifier that no "
                "other pass has, the built-in ones included."
            )
    return found


def _several(key: str, value: object, takes: str) -> Collection[Any]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple, set, frozenset)):
        raise _wrong(key, value, takes)
    return names


def _check_strict(key: str, value: object) -> object:
    return tuple(_several(key, value, "it takes a pass name or a list of pass names."))


def _check_paths(key: str, value: object) -> tuple[str, ...]:
    takes = "it takes a module path such as 'model.layers.0', a pattern such as "
    takes += "'model.layers.*.mlp', a list of them, or {pass name: paths}."
    paths = _several(key, value, takes)
    for path in paths:
        if not isinstance(path, str) or not path.strip():
            raise OptionError(
                f"{key} contains {path!r} ({type(path).__name__}); every entry is a non-empty "
                "module path such as 'model.layers.0' ('*' matches every module)."
            )
    return tuple(sorted({plain_path(path) for path in paths}))


def plain_path(path: str) -> str:
    """Return a module path without the `_orig_mod` that `torch.compile(module)` inserts."""
    return re.sub(r"(^|\.)_orig_mod(?=\.|$)", "", path).removeprefix(".")


def _check_skip(key: str, value: object) -> object:
    given = value if isinstance(value, Mapping) else {"*": value}
    rules = {name: _check_paths(key, paths) for name, paths in given.items()}
    return _FrozenMapping({name: paths for name, paths in rules.items() if paths})


def _check_inductor(key: str, value: object) -> object:
    if not isinstance(value, Mapping):
        raise _wrong(key, value, "it takes a mapping of Inductor config keys.")
    if not value:
        return _FrozenMapping()
    from memeff_compile import compat

    known, type_of = compat.inductor_config()
    checked: dict[str, Any] = {}
    for given, setting in value.items():
        name = given.replace("-", "_") if isinstance(given, str) else given
        if name not in known:
            nearest = _nearest(str(given), (*_by_key(), *known), count=3)
            hint = f" Nearest names: {', '.join(map(repr, nearest))}." if nearest else ""
            raise OptionError(
                f"{given!r} is neither an option of memeff (those start with {PREFIX!r}) nor a "
                f"config key of Inductor.{hint} `python -m memeff_compile options` lists ours."
            )
        expected = type_of(name)
        if get_origin(expected) is None and isinstance(expected, type):  # noqa: SIM102
            if not isinstance(setting, expected):
                takes = f"{expected.__name__} (it is {known[name]!r} now)."
                raise _wrong(given, setting, f"Inductor's config key {name!r} takes {takes}")
        checked[name] = setting
    return _FrozenMapping(checked)


FILTERS = ("mass", "block", "published")
"""The lossy values of `linear_cross_entropy`."""
_FILTER, _SORTED = "linear_cross_entropy", "linear_cross_entropy.sort_vocabulary"
_PRESETS: Mapping[str, Mapping[str, object]] = {
    "exact": {_FILTER: "exact", _SORTED: False, "attention": "exact"},
    "fast": {_FILTER: "mass", _SORTED: True, "attention": "8b"},
    "paper": {_FILTER: "published", _SORTED: True, "attention": "8b"},
    "off": {_FILTER: "exact", _SORTED: False, "attention": "exact"},
}
# Default of options that a preset sets: distinguishes them from values set explicitly.
_NOT_CHOSEN = object()


def is_disabled() -> bool:
    """Return whether the environment variable `MEMEFF_DISABLE` switches this package off."""
    return os.environ.get("MEMEFF_DISABLE", "") not in ("", "0")


@dataclass(frozen=True)
class _Info:
    """The documentation and the validator of one option."""

    values: str
    meaning: str
    check: Check
    key: str = ""


def _option(
    default: Any,  # noqa: ANN401 - a dataclass field can hold anything
    values: str,
    check: Check,
    meaning: str,
    *,
    by_preset: bool = False,
) -> Any:  # noqa: ANN401
    metadata = {"info": _Info(values, meaning, check)}
    if isinstance(default, _FrozenMapping):
        return field(default_factory=_FrozenMapping, metadata=metadata)
    return field(default=_NOT_CHOSEN if by_preset else default, metadata=metadata)


def _choice(words: str, meaning: str, *, by_preset: bool = False) -> Any:  # noqa: ANN401
    values = tuple(words.split())
    shown = ", ".join(f"`{value}`" for value in values)
    check = partial(_check_choice, values=values)
    return _option(values[0], shown, check, meaning, by_preset=by_preset)


def _switch(meaning: str) -> Any:  # noqa: ANN401
    return _choice("exact off", meaning)


@dataclass(frozen=True)
class Options:
    """The validated options of one compilation.

    `Options.parse` creates an instance from the arguments of `torch.compile`. The constructor
    takes the options by field name. Instances are immutable, hashable and picklable.

    Raises:
        OptionError: A key is unknown, or a value has the wrong type or is out of range.

    Example:
        >>> Options.parse(None, {"memeff.logits": "eager"}).logits
        'eager'
    """

    preset: str = _choice(
        " ".join(_PRESETS),
        "Which defaults to start from; options you set explicitly override it. `exact` "
        "changes rounding order at most. `fast` sets `linear_cross_entropy=mass` and "
        "`attention=8b`, which are lossy and were measured on trained models. `paper` sets the "
        "published forms, `attention=8b` and `linear_cross_entropy=published`. `off` switches "
        "everything off, whatever else you set: the inner compiler gets the unchanged graph, and "
        "`generate()` creates the model's own cache. `MEMEFF_DISABLE=1` in the environment does "
        "the same (docs/use/undo.md).",
    )
    linear_cross_entropy: str = _choice(
        "exact mass block published off",
        "Compute linear + cross entropy without storing the logits (tokens x classes). `mass`, "
        "`block` and `published` are lossy: in bf16 on a GPU, from a hidden size of 2048 on, they "
        "drop unlikely classes from the gradients of 128 tokens at a time. `mass` limits the "
        "probability mass that a token may lose; `block` uses the threshold of the Cut "
        "Cross-Entropy paper; both redistribute the lost mass over the kept classes. `published` "
        "is the paper's own filter: it drops blocks of 128 tokens x 128 classes below the "
        "threshold, and redistributes nothing.",
        by_preset=True,
    )
    linear_cross_entropy_workspace: int = _option(
        0,
        "`auto`, `minimal`, bytes, or a size such as `64MiB`",
        _check_bytes,
        "Upper limit of the block of logits that exists at a time. A smaller block saves memory, "
        "a larger one needs fewer and larger matrix products. `auto`: 640 MiB on compute "
        "capability 9.0, 64 MiB on other GPUs and 8 MiB on the CPU, more for many rows. "
        "`minimal`: on a GPU, with 16-bit inputs, use the memory of the weight's gradient instead "
        "of a separate block; always exact.",
    )
    linear_cross_entropy_eps: float | None = _option(
        None,
        "none, or a number between 0 and 1",
        _check_fraction,
        "For `linear_cross_entropy=block`: drop a class from the gradients of 128 tokens if the "
        "gradient of its logit (p, or p - 1 at the target) is smaller than this number, in "
        "absolute value, for every one of these tokens. None: 2^-12.",
    )
    linear_cross_entropy_tau: float | None = _option(
        None,
        "none, or a number between 0 and 1",
        _check_fraction,
        "For `linear_cross_entropy=mass`: the largest probability mass that a token may lose. "
        "None: 2^-6.",
    )
    linear_cross_entropy_parts: str = _choice(
        "both hidden weight",
        "For the gradient filters (`mass`, `block`, `published`): filter the gradient of the "
        "hidden states, that of the weight, or both. A gradient that is not filtered stays exact.",
    )
    linear_cross_entropy_sort_vocabulary: bool = _option(
        False,
        "`False`, `True`",
        _check_flag,
        "For the gradient filters, each of which sets it to True by default: sort the classes, "
        "without a copy of the weight, so that most blocks of logits are completely kept or "
        "completely dropped. `mass` and `block` put classes together that the same groups of rows "
        "keep; `published` sorts classes by their mean logits. False is for studies.",
        by_preset=True,
    )
    logits: str = _choice(
        "deferred eager none",
        "The logits that a model called with labels returns. "
        "`deferred`: computed on first use; reading them after the weights changed raises an "
        "error. `eager`: computed in every step, as without the backend. `none`: the output is "
        "None.",
    )
    embedding: str = _switch(
        "Sum the gradient of a tied or large 16-bit embedding without an fp32 copy of the gradient."
    )
    divergence: str = _switch(
        "Compute the divergence of two output projections, as in distillation, without the logits "
        "of either."
    )
    gated_linear: str = _switch(
        "In activation checkpoints, the backward pass of a gated MLP overwrites the results of "
        "the gate and up projections with their gradients."
    )
    recompute: str | int = _option(
        "as_written",
        "`as_written`, `attention`, bytes, or a size such as `12GiB`",
        _check_recompute,
        "The part of activation checkpoints that the backward pass recomputes. `as_written`: "
        "everything. `attention`: everything except the results of attention, which are kept. A "
        "size: checkpoints keep up to this many bytes of results of attention and linears, first "
        "those that take the most time per byte to recompute.",
    )
    rotary_tables: str = _switch(
        "On a GPU, compute the cosines and sines of positions once, not in every kernel "
        "that reads them."
    )
    attention: str | Mapping[str, str | tuple[str, ...]] = _option(
        "exact",
        "`exact`, `8b`, `8b+f16`, `4b`, `off`, or a table `{module path: level}`",
        _check_attention,
        "How attention runs. `exact`: a mask that is causal becomes `is_causal=True`, and a mask "
        "that hides no key is dropped. Keys and values are not copied for each query head; "
        "attention with padding, packed sequences, sliding windows or softcaps runs in "
        "`memeff::attention` if that is fast. `8b`, `8b+f16` and `4b` are lossy levels, used if no "
        "gradient is needed. `8b` computes scores in int8, and multiplies attention weights and "
        "values in E4M3. `8b+f16` computes scores in int8, and multiplies attention weights and "
        "values in fp16. `4b`, for studies, computes scores from queries and keys in 4 bits "
        "(docs/passes/quantize-attention.md).",
        by_preset=True,
    )
    attention_length: int | None = _option(
        None,
        "`auto`, or a number of keys",
        _check_length,
        "Minimum number of keys for low-bit attention; shorter attention stays exact. `auto`: the "
        "measured break-even; on a CPU low bits are never used.",
    )
    kv_reads: str = _switch("Whether attention reads only the filled part of static KV caches.")
    kv_codes: str = _switch(
        "Whether attention reads a `KVCache` directly in its low-bit form, instead of keys and "
        "values that are first converted back."
    )
    ternary: str = _choice(
        "exact off b1.58 a4.8 a4.8-fp4",
        "`exact`: linears with ternary weights (-1, 0 or 1 times a scale) multiply packed "
        "integers, and save these for the backward pass. `b1.58` (8-bit inputs of linears), `a4.8` "
        "and `a4.8-fp4` (mostly 4-bit inputs) are recipes: with one of them, "
        "`memeff_compile.compile(model, ternary=...)` first calls `memeff_compile.ternarize_`, "
        "which makes the linears of the model ternary. `torch.compile` refuses recipes, because a "
        "backend does not see the model.",
    )
    ternary_gate: str = _choice(
        "recompute keep",
        "Whether training keeps the results of ternary gate and up projections for the backward "
        "pass (`keep`), or computes them again from the integers of input and weight "
        "(`recompute`). `recompute` takes less memory and gives the same results.",
    )
    weights: str = _choice(
        "exact off win4 win4:k3 win4:k1 win4:k0 tier rans win4:fp32 tier:fp32 rans:fp32 tier:fp16 "
        "rans:fp16",
        "Whether linears with weights that `memeff_compile.compress_` compressed run as one op "
        "that saves no decoded weight for the backward pass. `off`: every decoded weight is "
        "saved. The other values are codecs (formats of compressed weights): with one of them, "
        "`memeff_compile.compile(model, weights=...)` first calls `compress_` on the model. "
        "`torch.compile` refuses codecs, because a backend does not see the model. `k3`, `k1`, "
        "`k0`: lossy, 3, 1 or 0 mantissa bits are kept. `fp32`, `fp16`: for weights of these "
        "dtypes.",
    )
    skip: Mapping[str, tuple[str, ...]] = _option(
        _FrozenMapping(),
        "a module path, a list of them, or `{pass name or '*': paths}`",
        _check_skip,
        "Modules that passes skip, with everything inside them. Paths are as in "
        "`named_modules()`; `*` and `?` match as in file names.",
    )
    strict: tuple[str, ...] = _option(
        (),
        "a pass name or a list of them",
        _check_strict,
        "Raise instead of compiling if a named pass did not apply.",
    )
    passes: tuple[Any, ...] = _option(
        (),
        "a `GraphPass`, the name of an installed one, or a list of them",
        _check_passes,
        "Your own passes, before or after the built-in ones (docs/use/own-passes.md).",
    )
    verify: str = _option(
        "off",
        "`off`, `on`, `raise`",
        _check_verify,
        "Whether the first call of each rewritten graph also runs the original one and "
        "compares values and gradients. After a mismatch, `on` warns and continues with the "
        "original graph, and `raise` raises a `VerifyError` (docs/use/verify.md).",
    )
    verify_tolerance: float = _option(
        1.0,
        "`1.0`, or another positive number",
        _check_factor,
        "A factor for every tolerance of `memeff.verify`.",
    )
    verify_folder: str | None = _option(
        None,
        "none, or a path",
        _check_folder,
        "The folder in which `memeff.verify` writes a reproducer (a script that shows the "
        "mismatch) after a mismatch. None: a new temporary folder.",
    )
    verify_limit: int = _option(
        64 << 20,
        "`64MiB`, another size, or bytes",
        partial(_check_bytes, has_auto=False),
        "The largest number of bytes of inputs and weights that a reproducer of `memeff.verify` "
        "saves; random values replace the others. 0 saves none.",
    )
    inner: str = _choice(
        "inductor aot_eager eager",
        "The compiler that gets the graph after the passes. Modes and Inductor keys "
        "apply to `inductor` only; `aot_eager` needs no C++ compiler.",
    )
    cuda_graphs: str = _choice(
        "auto off",
        "`auto`: a step of generation (few tokens, caches that it writes in place, no gradient) is "
        "recorded as a CUDA graph and replayed. If you set a `mode` or `triton.cudagraphs`, that "
        "setting takes precedence (docs/use/serving.md).",
    )
    regions: str = _choice(
        "off auto on",
        "Compiles each distinct layer of a model once: the graph is cut between layers, and equal "
        "layers share one compiled function (docs/use/start.md). First calls take a fraction of "
        "the time. `auto` shares functions if layers are so large that a step takes no longer than "
        "without sharing; `on` shares them in all models with at least four equal layers.",
    )
    mode: str | None = _option(
        None,
        "none, or a mode of Inductor such as `reduce-overhead`, `max-autotune`",
        _check_mode,
        "Same as `torch.compile(mode=...)`, which torch refuses next to `options=`.",
    )
    inductor: Mapping[str, Any] = field(default_factory=_FrozenMapping)

    def __post_init__(self) -> None:
        self._take_preset()
        for each, info in _by_field().items():
            self._store(each, info.check(info.key, getattr(self, each)))
        self._store("inductor", _check_inductor("inductor", self.inductor))
        self._check_filter_knobs()
        self._check_pass_names()
        if self.preset == "off":
            self._switch_off()

    @property
    def filter_level(self) -> float:
        """Return the threshold of the gradient filter that the option `linear_cross_entropy` names.

        A gradient filter drops parts of the loss's gradients that are small. The option
        `linear_cross_entropy_eps` or `linear_cross_entropy_tau` sets the threshold, depending on
        the filter. If neither option is set, or no filter is on, the result is 0.
        """
        eps, tau = self.linear_cross_entropy_eps, self.linear_cross_entropy_tau
        levels = {"block": eps, "published": eps, "mass": tau}
        return levels.get(self.linear_cross_entropy) or 0.0

    def attention_levels(self, site: str) -> tuple[str, ...]:
        """Return the levels (low-bit formats) that the option `attention` has for an attention
        module.

        There is one level for all calls of the module, or one level per call. The tuple is empty if
        the option is a calibration table that does not contain the module.

        Example:
            >>> Options(attention={"layers.0": "8b"}).attention_levels("layers.0")
            ('8b',)
        """
        if isinstance(self.attention, str):
            return (self.attention,)
        found = self.attention.get(site, ())
        return (found,) if isinstance(found, str) else found

    def _take_preset(self) -> None:
        """Take the preset's value for each option that the user did not set.

        If the user set `linear_cross_entropy`, the user's value determines the default of the
        option `linear_cross_entropy.sort_vocabulary`. The default is then true for a gradient
        filter, which drops small parts of the loss's gradients, and otherwise false.
        """
        info = _by_field()["preset"]
        info.check(info.key, self.preset)
        chosen = dict(_PRESETS[self.preset])
        if self.linear_cross_entropy is not _NOT_CHOSEN:
            chosen[_SORTED] = self.linear_cross_entropy in FILTERS
        for key, value in chosen.items():
            name = _field_of(PREFIX + key)
            if getattr(self, name) is _NOT_CHOSEN:
                self._store(name, value)

    def _switch_off(self) -> None:
        """Switch all passes off in validated options."""
        for each in fields(self):
            if each.name.startswith("linear_cross_entropy_"):  # options of a switched-off loss
                chosen = each.default is not _NOT_CHOSEN
                self._store(each.name, each.default if chosen else False)
        for facts in PASS_FACTS:
            value = "off" if "off" in facts.off else facts.off[0]
            self._store(_field_of(PREFIX + facts.option), value)
        for name, nothing in (("cuda_graphs", "off"), ("passes", ()), ("strict", ())):
            self._store(name, nothing)

    @property
    def pass_names(self) -> tuple[str, ...]:
        """Return the names of all passes that `memeff.skip` and `memeff.strict` may name, including
        the user's passes.
        """
        return (*PASS_NAMES, *(each.name for each in self.passes))

    def _check_pass_names(self) -> None:
        names = self.pass_names
        for name in self.strict:
            _check_pass_name(f"{PREFIX}strict", name, names)
        for name in self.skip:
            if name != "*":
                _check_pass_name(f"{PREFIX}skip", name, names, " and '*' for all of them")
        self._store("strict", tuple(name for name in names if name in self.strict))
        for name in self.strict:
            setting = self.switched_off(name)
            if setting:
                raise OptionError(
                    f"{PREFIX}strict requires the pass {name!r}, but {setting} switches it "
                    "off. Drop one of the two."
                )

    def _check_filter_knobs(self) -> None:
        """Raise OptionError if an option of a gradient filter is set, but would have no effect.

        A gradient filter drops small parts of the loss's gradients. The value of
        `linear_cross_entropy` may select no filter, or a filter that does not use the option."""
        owners = {"eps": FILTERS[1:], "tau": FILTERS[:1]}
        owners |= {"parts": FILTERS, "sort_vocabulary": FILTERS}
        for knob, modes in owners.items():
            value = getattr(self, f"linear_cross_entropy_{knob}")
            if value not in (None, "both", False) and self.linear_cross_entropy not in modes:
                wanted = " or ".join(map(repr, modes))
                raise OptionError(
                    f"{PREFIX}linear_cross_entropy.{knob} is {value!r}, but "
                    f"{PREFIX}linear_cross_entropy is {self.linear_cross_entropy!r}, which does "
                    f"not use it. Set {PREFIX}linear_cross_entropy to {wanted}, or leave this out."
                )

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def switched_off(self, name: str) -> str:
        """Return the option that switches a pass off, written as in user code; "" if the pass is
        on.

        Example:
            >>> Options(logits="eager").switched_off("defer_logits")
            "memeff.logits='eager'"
        """
        facts = _FACTS.get(name)
        if facts is None:
            return ""  # a user's pass, which is always on
        value = getattr(self, _field_of(PREFIX + facts.option))
        if value in facts.off:
            return f"{PREFIX}{facts.option}={value!r}"
        return self.switched_off(facts.needs) if facts.needs else ""

    @classmethod
    def parse(cls, mode: str | None = None, options: Mapping[str, object] | None = None) -> Options:
        """Return the validated options, given `mode` and `options` of `torch.compile`, which are
        not changed.

        OptionError names the wrong key or value, the most similar valid name, and a remedy.
        """
        if options is not None and not isinstance(options, Mapping):
            takes = "it takes a mapping such as {'memeff.logits': 'eager'}."
            raise _wrong("options", options, takes)
        values: dict[str, Any] = {}
        inductor: dict[str, object] = {}
        for key, value in (options or {}).items():
            if isinstance(key, str) and key.startswith(PREFIX):
                values[_field_of(key)] = value
            else:
                inductor[key] = value
        if mode is not None:
            _check_mode("mode", mode)
            if values.get("mode", mode) != mode:
                raise OptionError(
                    f"mode is {mode!r} and {PREFIX}mode is {values['mode']!r}; they say the same "
                    "thing. Give one of them."
                )
            values["mode"] = mode
        return cls(**values, inductor=inductor)

    def skips(self, pass_name: str, module_path: str) -> bool:
        """Return whether `memeff.skip` excludes a module from a pass; "" names the root module.

        Example:
            >>> Options(skip={"*": ("layers.*.mlp",)}).skips("defer_logits", "layers.3.mlp.up")
            True
        """
        given = (*self.skip.get("*", ()), *self.skip.get(pass_name, ()))
        patterns = (each for pattern in given for each in (pattern, f"{pattern}.*"))
        return any(fnmatchcase(module_path, pattern) for pattern in patterns)

    def inductor_patches(self) -> dict[str, Any]:
        """Return the changes to Inductor's config that the mode of `torch.compile` makes.

        Inductor keys that the user set override these changes."""
        if self.mode is None:
            return dict(self.inductor)
        from memeff_compile import compat

        return {**compat.inductor_modes()[self.mode], **self.inductor}

    def to_dict(self) -> dict[str, Any]:
        """Return the options that differ from the defaults, for `torch.compile(options=...)`."""
        plain = type(self)(preset=self.preset)
        changed = {
            info.key: getattr(self, name)
            for name, info in _by_field().items()
            if getattr(self, name) != getattr(plain, name)
        }
        if self.preset != type(self)().preset:
            changed = {_by_field()["preset"].key: self.preset, **changed}
        if self.skip:
            changed[f"{PREFIX}skip"] = dict(self.skip)
        return {**changed, **self.inductor}


def or_off(options: Options) -> Options:
    """Return the options, with all passes switched off if `MEMEFF_DISABLE` is set."""
    return replace(options, preset="off") if is_disabled() else options


@cache
def _by_field() -> dict[str, _Info]:
    infos = {each.name: each.metadata.get("info") for each in fields(Options)}
    # A knob of an option has a dot: `attention_length` is `memeff.attention.length`.
    knob = re.compile(r"^(linear_cross_entropy|attention|verify)_")
    keys = {name: knob.sub(r"\1.", name) for name in infos}
    return {name: replace(info, key=PREFIX + keys[name]) for name, info in infos.items() if info}


def _by_key() -> dict[str, str]:
    return {info.key: name for name, info in _by_field().items()}


def _field_of(key: str) -> str:
    keys = _by_key()
    if key == PREFIX + "kv_cache":
        raise OptionError(
            f"{key} is not an option of the backend, because generate() creates its cache outside "
            "the graph. Call memeff_compile.compile(model, kv_cache=...), or "
            "memeff_compile.use_kv_cache_."
        )
    if key not in keys:
        raise OptionError(f"{key!r} is not an option of memeff.{_suggest_of_all(key, keys)}")
    return keys[key]


def key_of(name: str) -> str:
    """Return the option key of a keyword of `memeff_compile.compile`; raise OptionError if no
    option has this keyword."""
    known = _by_field()
    if name not in known:
        raise OptionError(
            f"{name!r} is not an option of memeff.{_suggest(name, known)} "
            f"The names are {', '.join(known)}; Inductor's own keys go into options={{...}}."
        )
    return known[name].key


@dataclass(frozen=True)
class OptionFacts:
    """The facts about one option, such as its key, default and meaning."""

    key: str
    values: str  # possible values, as on the page
    default: str
    meaning: str
    example: Mapping[str, Any]  # settings by keyword, including the option
    keys: Mapping[str, str]  # their option keys


def option_facts() -> tuple[OptionFacts, ...]:
    """Return the key, possible values, default, meaning and an example of every option."""
    keys = {name: info.key for name, info in _by_field().items()}
    defaults = Options()
    return tuple(
        OptionFacts(
            info.key,
            info.values,
            _shown(getattr(defaults, name)),
            info.meaning,
            _EXAMPLES.get(name) or {name: _VALUE.findall(info.values)[1]},
            keys,
        )
        for name, info in _by_field().items()
    )


def facts_of(key: str) -> OptionFacts:
    """Return an option's key, default, meaning and example; raise OptionError for an unknown key.

    The keyword of `compile` also works as a key: `verify_limit` for `memeff.verify.limit`.
    """
    name = key.removeprefix(PREFIX)
    key = _by_field()[name].key if name in _by_field() else key
    _field_of(key)
    return next(each for each in option_facts() if each.key == key)


def _shown(value: object) -> str:
    is_empty = value is None or (not isinstance(value, (int, float, str)) and not value)
    return "none" if is_empty else str(value)


class _Code(str):
    """A value that prints as a given Python expression, for code examples."""

    __slots__ = ()
    __repr__ = str.__str__


_VALUE = re.compile(r"`([^`]+)`")

_EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "linear_cross_entropy_workspace": {"linear_cross_entropy_workspace": "64MiB"},
    "linear_cross_entropy_eps": {
        "linear_cross_entropy": "block",
        "linear_cross_entropy_eps": 0.001,
    },
    "linear_cross_entropy_tau": {"linear_cross_entropy": "mass", "linear_cross_entropy_tau": 0.01},
    "linear_cross_entropy_parts": {
        "linear_cross_entropy": "mass",
        "linear_cross_entropy_parts": "hidden",
    },
    "linear_cross_entropy_sort_vocabulary": {
        "linear_cross_entropy": "mass",
        "linear_cross_entropy_sort_vocabulary": False,
    },
    "attention_length": {"attention": "8b", "attention_length": 2048},
    "ternary": {"ternary": "a4.8"},
    "weights": {"weights": "win4"},
    "skip": {"skip": {"defer_logits": ["lm_head"]}},
    "strict": {"strict": "fuse_linear_cross_entropy"},
    "passes": {"passes": _Code("[MyPass()]")},
    "verify_tolerance": {"verify": "on", "verify_tolerance": 2.0},
    "verify_folder": {"verify": "on", "verify_folder": "reproducers"},
    "verify_limit": {"verify": "on", "verify_limit": "1GiB"},
    "mode": {"mode": "max-autotune"},
}
"""Examples for options for which the page's second value is not a valid example."""

_PAGE_HEAD = """\
# Options

This page is printed by `python -m memeff_compile options --page`; do not edit it by hand.

```python
torch.compile(model, backend="memeff", options={"memeff.logits": "eager", "max_autotune": True})
memeff_compile.compile(model, logits="eager", options={"max_autotune": True})  # in place, checked
```

Keys that start with `memeff.` are in the table below; every other key is an Inductor config key
and is passed on to Inductor. A key that neither memeff nor Inductor knows raises an `OptionError`
with the most similar name. In the table, the first value of a key is its default.

| key | values | meaning |
|---|---|---|
"""

_PAGE_TAIL = """
In `memeff_compile.compile` the keyword of an option is its key without `memeff.`, with `_` for a
further dot: `linear_cross_entropy_workspace="64MiB"`.

## Passes

`memeff.skip` and `memeff.strict` take the names of passes: {passes}.

```python
options={{"memeff.skip": "draft_head"}}                                   # every pass, one module
options={{"memeff.skip": {{"defer_logits": ["lm_head", "heads.*"]}}}}       # one pass, some modules
options={{"memeff.strict": "fuse_linear_cross_entropy"}}                  # raise unless it applies
```
"""


def options_page() -> str:
    """Return the text of docs/options.md."""
    rows = [f"| `{info.key}` | {info.values} | {info.meaning} |\n" for info in _by_field().values()]
    tail = _PAGE_TAIL.format(passes=", ".join(f"`{name}`" for name in PASS_NAMES))
    return _PAGE_HEAD + "".join(rows) + tail
