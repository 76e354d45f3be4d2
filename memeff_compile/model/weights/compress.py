"""Compress the weights of a model's linear layers (compress_), or make them dense again
(decompress_).

A compressed weight is a `CodedWeight` that replaces the dense parameter, under the same name.
Reading the parameter decodes the weight: with lossless codes, it equals the original bf16 weight
bit for bit. `state_dict` returns dense tensors, and `load_state_dict` accepts them. Weights are
encoded one at a time, and each dense weight is freed immediately. So during the compression the
model never takes more memory than the dense model plus one weight.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import math
import re
import sys
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from memeff_compile import compat
from memeff_compile.errors import CodedWeightError, OptionError
from memeff_compile.kernels.coded_weight import (
    CODECS,
    LISTS,
    OWN_ATTRIBUTES,
    WIDER,
    CodedWeight,
    bits_per_weight,
    dtype_of,
    encode,
    parse,
    side_by_side,
    supports_weight,
)
from memeff_compile.kernels.marks import is_updated_in_backward
from memeff_compile.model.changes import Changes, keep, require_module, verb_report
from memeff_compile.model.runs import runs_of
from memeff_compile.model.weights.rounding import gram_groups, grams, rounded_for
from memeff_compile.report import VerbReport, format_bytes
from memeff_compile.system import Undone

log = logging.getLogger(__name__)

LARGEST_SHARE = 0.9
"""A weight stays dense if its code takes more than this share of its bytes."""

SKIPPED = ("lm_head", "embed_out", "output_projection")
"""Modules left dense by default: heads, whose losses the backend fuses on dense weights."""

LAYERS = ("Linear", "Conv1D", "Embedding")
"""Classes of layers whose weights can be compressed; by default only those of the first class
are."""

MIN_SIZE = 1 << 20
"""Elements of the smallest weight that is compressed by default."""


@dataclass(frozen=True)
class CompressedWeight:
    """The result of `compress_` for one weight."""

    name: str  # as in `named_parameters()`
    shape: tuple[int, ...]
    codec: str  # its name, or "" if the weight stayed dense
    bytes_before: int  # bytes of the dense weight
    bytes_after: int  # bytes of all coded tensors, or of the weight if it stays dense
    reason: str = ""  # why it stayed dense or unchanged, as a sentence
    before: str = ""  # the codec that it was compressed with before this call, or ""
    for_inputs: bool = False  # whether it was rounded for given inputs

    @property
    def _about(self) -> str:
        """Return the text that follows this weight's name in the report of `compress_`.

        The text has the weight's shape. If the call of `compress_` compressed the weight, the text
        also has the codec (compressed format). Otherwise the text has the reason why the weight is
        unchanged.
        """
        if not self.codec:
            return f"{list(self.shape)}: {self.reason}"
        how = ", rounded for inputs" if self.for_inputs else ""
        return f"{list(self.shape)} {self.codec}{how}"

    @property
    def bits(self) -> float:
        """Return the number of bits per element of this weight.

        A compressed weight consists of several tensors, such as the codes and signs of its
        elements. All of these tensors count.
        """
        return _bits([self])


@dataclass(frozen=True)
class CompressionReport(VerbReport):
    """The report of `compress_`: which weights were compressed, and which were not.

    A weight that `compress_` left unchanged has a reason, a sentence. In `str()`, weights with
    equal shapes and codecs (compressed formats) share one line if their names and reasons differ
    only in numbers. With the argument `inputs`, `compress_` may round weights so that their
    products with these inputs are more precise. The weights that were rounded for `inputs` share
    no line with other weights. `to_json()` has one entry per weight.
    """

    weights: tuple[CompressedWeight, ...]
    notes: tuple[str, ...] = ()  # about names in `skip` that have an effect you may not expect

    @property
    def compressed(self) -> tuple[CompressedWeight, ...]:
        """Return the weights that were compressed."""
        return tuple(each for each in self.weights if each.codec)

    @property
    def left_dense(self) -> tuple[CompressedWeight, ...]:
        """Return the weights that could have been compressed but stayed dense."""
        return tuple(each for each in self.weights if not each.codec and not each.before)

    @property
    def compressed_before(self) -> tuple[CompressedWeight, ...]:
        """Return the weights that were already compressed before `compress_` was called, and were
        not changed by this call."""
        return tuple(each for each in self.weights if each.before)

    @property
    def bytes_before(self) -> int:
        """Return the bytes that the compressed weights took in dense form."""
        return sum(each.bytes_before for each in self.compressed)

    @property
    def bytes_after(self) -> int:
        """Return the bytes that the codes of the compressed weights take."""
        return sum(each.bytes_after for each in self.compressed)

    @property
    def bits(self) -> float:
        """Return the average number of bits per element, over all compressed weights."""
        return _bits(self.compressed)

    def to_json(self, indent: int | None = None) -> str:
        """Return, as JSON, the result of `compress_` for each weight, and notes on its argument
        `skip`.

        A weight's result has the codec (compressed format), or the reason why the weight is
        unchanged. `skip` contains names of modules that stay dense. Some notes report names that
        match no module. Other notes report output projections that were compressed because your
        `skip` replaced the default.
        """
        weights = [asdict(each) for each in self.weights]
        return json.dumps({"weights": weights, "notes": self.notes}, indent=indent)

    def __str__(self) -> str:
        """Return totals, the notes, and lines for all weights.

        The totals are the compressed weights' number and bytes, and the number of dense weights.
        The notes are about names in `skip`, an argument of `compress_`. A line has a weight's bits
        per element and codec (compressed format), or the reason why the weight is unchanged.
        Weights with equal shapes and codecs share one line if their names and reasons differ only
        in numbers. With the argument `inputs`, `compress_` may round weights so that their products
        with these inputs are more precise. The weights that were rounded for `inputs` share no line
        with other weights. `details` has one line per weight.
        """
        return self._text(folds=True)

    def details(self) -> str:
        """Return totals, the notes, and one line per weight.

        The totals are the compressed weights' number and bytes, and the number of dense weights.
        The notes are about names in `skip`, an argument of `compress_`. A line has the weight's
        bits per element and codec (compressed format), or the reason why the weight is
        unchanged."""
        return self._text(folds=False)

    def _text(self, *, folds: bool) -> str:
        sizes = f", {format_bytes(self.bytes_before)} -> {format_bytes(self.bytes_after)}"
        sizes += f", {self.bits:.2f} bits a weight"
        already = len(self.compressed_before)
        lines = [
            f"compress_: {len(self.compressed)} weights compressed"
            + (sizes if self.compressed else "")
            + (f"; {already} were compressed already" if already else "")
            + f"; {len(self.left_dense)} left dense",
            *(f"  note: {each}" for each in self.notes),
        ]
        groups: dict[Hashable, list[CompressedWeight]] = {}
        for each in (*self.compressed, *self.compressed_before, *self.left_dense):
            alike = each.shape, each.codec, each.for_inputs, each.before
            names = (_NUMBER.sub("*", text) for text in (each.name, each.reason))
            groups.setdefault((*alike, *names) if folds else each.name, []).append(each)
        lines += (_line(weights) for weights in groups.values())
        return "\n".join(lines)

    def _bytes_before_and_after(self) -> tuple[int, int] | None:
        return (self.bytes_before, self.bytes_after) if self.compressed else None


def _bits(weights: Sequence[CompressedWeight]) -> float:
    count = sum(math.prod(each.shape) for each in weights)
    return bits_per_weight(sum(each.bytes_after for each in weights), max(count, 1))


_NUMBER = re.compile(r"\d+")


def _line(weights: Sequence[CompressedWeight]) -> str:
    """Return one line of the compression report, for one weight or several similar weights.

    A weight that `compress_` left unchanged has a reason, a sentence. Weights with equal shapes and
    codecs (compressed formats) share a line if their names and reasons differ only in numbers. With
    the argument `inputs`, `compress_` may round weights so that their products with these inputs
    are more precise. The weights that were rounded for `inputs` share no line with other weights.
    In the longer text that the report's method `details` returns, each weight has its own line.
    """
    first = weights[0]
    label = "as it was " if first.before else "dense     "
    if first.codec:
        label = f"{_bits(weights):5.2f} bits"
    more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
    return f"  {label}  {first.name}{more} {first._about}"


class _Place(NamedTuple):
    """A parameter, and all modules and attributes that refer to it."""

    parameter: Tensor
    owners: list[tuple[str, nn.Module, str]]

    @property
    def name(self) -> str:
        """Return the parameter's name in `named_parameters()`."""
        path, _, attribute = self.owners[0]
        return f"{path}.{attribute}" if path else attribute

    @property
    def is_of_linears(self) -> bool:
        """Return whether only linear layers use the parameter."""
        return all(isinstance(module, nn.Linear) for _, module, _ in self.owners)


@torch.no_grad()
def compress_(
    model: nn.Module,
    codec: str = "win4",
    *,
    mantissa: int = 7,
    block: int = 512,
    skip: Sequence[str] = SKIPPED,
    min_size: int = MIN_SIZE,
    layers: Sequence[str] = LAYERS[:1],
    inputs: Iterable[Any] | Tensor | Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> CompressionReport:
    """Compress the weights of a model's linear layers in place.

    The function compresses those bf16 weights that only `nn.Linear` modules use. With `layers`,
    you can name more classes. With `mantissa=7`, the default, this compression is lossless. In
    inference on a GPU with inputs of a few tokens, one kernel decodes a `win4` weight and
    multiplies the inputs by it. This kernel adds up the products in another order than a dense
    matrix product does.
    Call this function before you create an optimizer and before you compile the model.

    Args:
        model: any module, possibly wrapped by PEFT, on the device where it will run.
        codec: "win4" (fastest), "tier" (smaller) or "rans" (smallest, slowest); "win4:k3" is
            "win4" with `mantissa=3`.
        mantissa: the number of mantissa bits to keep: 7 (all, lossless), 3, 1 or 0. Values below 7
            are lossy and only for inference: the weights then no longer require gradients.
        block: the number of weights in a block: 32, 64, 128, 256 or 512. In lossy compression, all
            weights of a block are divided by the same number before they are rounded.
        skip: names of modules that stay dense, with everything inside them. A name matches one or
            more consecutive components of a path, such as `lm_head` or `mlp.gate_proj`. In a name,
            `*` and `?` match as in file names. Your names replace the default, which keeps the
            output projection dense.
        min_size: a weight with fewer elements stays dense.
        layers: the classes whose weights are compressed: "Linear", "Conv1D" (of GPT-2) and
            "Embedding". Conv1D and Embedding decode the whole weight in each call. If the output
            projection shares its weight with the embedding, name both "Linear" and "Embedding",
            and set `skip=()`.
        inputs: for lossy compression, example inputs of the model, as a list with one entry per
            call of the model. An entry is a mapping of keyword arguments, a tuple or list of
            arguments, or a single argument. For a single call, you can also pass its mapping or
            tensor directly. With `inputs`, weights are rounded so that their products with such
            inputs are more precise, at the same number of bits. For this, the model runs eagerly,
            without gradients, in eval mode.
        progress: whether to show a progress bar (with tqdm, if it is installed); None shows it only
            on a terminal.

    Returns:
        A report with the result for each weight. The report's `bits` is the average number of bits
        per element, over all compressed weights.

    Raises:
        OptionError: The codec, mantissa or block does not exist, or `inputs` is empty or has no
            effect.

    Example:
        >>> linear = torch.nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
        >>> report = compress_(linear, min_size=0)
        >>> round(report.bits, 1)
        12.0
    """
    require_module(model, "compress_")
    name, skip, layers = settings_of(codec, mantissa, block, skip, min_size, layers)
    places = list(_places(model))
    memory: dict[int, set[int]] = {}  # which tensors share each storage
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type != "meta":
            memory.setdefault(compat.storage_key(tensor), set()).add(id(tensor))
    reasons = [_reason(place, name, skip, min_size, layers, memory) for place in places]
    rounding = None
    if inputs is not None:
        several = zip(places, reasons, strict=True)
        chosen = [place for place, reason in several if not reason and place.is_of_linears]
        rounding = _Rounding(model, chosen, _runs(inputs, chosen, name), name)
    found = []
    for place, reason in _with_progress(list(zip(places, reasons, strict=True)), progress):
        if reason:
            found.append(_dense(place, reason))
        else:
            rounded = None if rounding is None else rounding.of(place)
            found.append(_compress_one(place, name, rounded))
    names = {each.name for each in found if each.codec}
    # Not those that FSDP2 shards: its objects refer to the lists at their present addresses.
    side_by_side(w for p, w in _coded_places(model) if p.name in names and w is p.parameter)
    _tell_transformers(model)
    notes = notes_of_skip(model, skip, names)
    return keep(model, "compress_", CompressionReport(tuple(found), notes))


def notes_of_skip(
    model: nn.Module, skip: Sequence[str], compressed: Collection[str]
) -> tuple[str, ...]:
    """Return the report's notes about the argument `skip` of `compress_`.

    One kind of note names each entry of `skip` that matches no module. The other kind names output
    projections that are compressed because the caller's `skip` replaced the default.
    """
    paths = [path for path, _ in model.named_modules()]
    own = [each for each in skip if each not in SKIPPED]
    notes = [
        f"skip names {each!r}, but no module has this name. Compare it with the names in "
        "model.named_modules()."
        for each in own
        if not any(_skipped(path, (each,)) for path in paths)
    ]
    heads = [n for n in compressed if _skipped(n.rpartition(".")[0], SKIPPED)] if own else []
    notes += (
        f"{each} is compressed, because your skip replaces the default. The fused loss needs a "
        f"dense output projection: add {_skipped(each.rpartition('.')[0], SKIPPED)!r} to skip."
        for each in sorted(heads)
    )
    return tuple(notes)


def compressible(model: nn.Module) -> list[Tensor]:
    """Return the weights that `compress_` compresses by default, including those on the meta
    device.

    The result may contain too many weights: `compress_` leaves a weight dense if its codes would
    take more than nine tenths of its memory.
    """
    found = []
    for place in _places(model):
        weight, local = place.parameter, compat.local_part(place.parameter)
        is_linear = all(
            _layer(module, attribute) == "Linear" and not _skipped(path, SKIPPED)
            for path, module, attribute in place.owners
        )
        if is_linear and local.dtype == torch.bfloat16 and local.numel() >= MIN_SIZE:
            found.append(weight)
    return found


def settings_of(
    codec: str,
    mantissa: int,
    block: int,
    skip: Sequence[str],
    min_size: int,
    layers: Sequence[str],
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the codec's name with mantissa bits and block size, the names to skip and the layer
    classes.

    For example, the name is "win4:k3:b512", or "win4" if the compression is lossless.
    For an unknown codec or layer, raise OptionError.
    """
    name = _codec_name(codec, mantissa, block)
    skip = (skip,) if isinstance(skip, str) else skip
    are_names = isinstance(skip, Collection) and all(isinstance(each, str) for each in skip)
    if not are_names or not isinstance(min_size, (int, float)):
        raise OptionError(
            f"compress_: min_size is {min_size!r} and skip {skip!r}; a number of elements and the "
            "names of modules are needed."
        )
    layers = (layers,) if isinstance(layers, str) else tuple(layers)
    if not layers or set(layers) - set(LAYERS):
        raise OptionError(
            f"compress_: layers is {layers!r}; one or more of {', '.join(LAYERS)} are needed."
        )
    return name, tuple(skip), layers


def plan(
    model: nn.Module, codec: str, skip: Sequence[str], min_size: int, layers: Sequence[str]
) -> tuple[list[str], list[CompressedWeight]]:
    """Return, for a model on the meta device, which of its weights will be compressed when they are
    loaded, and which will not."""
    chosen: list[str] = []
    left: list[CompressedWeight] = []
    for place in _places(model):
        if reason := _reason(place, codec, skip, min_size, layers, None):
            left.append(_dense(place, reason))
        else:
            chosen += [f"{path}.{attribute}" for path, _, attribute in place.owners]
    return chosen, left


def coded_or_dense(
    name: str, weight: Tensor, codec: str
) -> tuple[CodedWeight | None, CompressedWeight]:
    """Encode a weight that was just loaded; return the coded weight and its entry in the report.

    If the weight stays dense, return None instead of a coded weight. A weight stays dense if it
    cannot be encoded, or if its codes would take more than nine tenths of its memory."""
    sentence = supports_weight(weight, codec)
    parts = [] if sentence else encode(weight, codec)
    after, shape = sum(part.nbytes for part in parts), tuple(weight.shape)
    if parts and after > LARGEST_SHARE * weight.nbytes:
        bits = bits_per_weight(after, weight.numel())
        sentence = f"its code would take {bits:.1f} bits a weight"
    if sentence:
        return None, CompressedWeight(name, shape, "", weight.nbytes, weight.nbytes, sentence)
    coded = CodedWeight(parts, codec, shape)
    return coded, CompressedWeight(name, shape, codec, weight.nbytes, coded.coded_bytes)


def _tell_transformers(model: nn.Module) -> None:
    """Make transformers' save_pretrained save the codes of a model's compressed weights; the module
    `pretrained` describes the format of the saved files.
    """
    if "transformers.modeling_utils" in sys.modules:
        import_module("memeff_compile.model.weights.pretrained").know(model)


def compression_report(model: nn.Module) -> CompressionReport | None:
    """Return the report of the latest `compress_` of a model, or None.

    The model is the argument of `compress_` or `compile(weights=...)`, or the result of `compile`.
    """
    return cast("CompressionReport | None", verb_report(model, "compress_"))


def compress_for_compile(model: object, codec: str, skip: Sequence[str]) -> None:
    """Compress a model before it is compiled; warn the user if no weight was compressed.

    Raise OptionError if the argument is a function, because the weights that a function uses are
    not known.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"compile was given weights={codec!r} and a {type(model).__name__}; weights belong to "
            f"modules. Call memeff_compile.compress_(module, {codec!r}) on those that the function "
            "uses, and compile it without."
        )
    report = compress_(compat.without_compile(model), codec, skip=(*SKIPPED, *skip))
    if not compressed_weights(model):
        log.warning("memeff_compile.compile(weights=%r) compressed nothing:\n%s", codec, report)


@torch.no_grad()
def decompress_(model: nn.Module) -> Changes:
    """Replace a model's compressed weights by dense weights; return the number of replaced weights.

    The result is an integer and also a report: `print` shows the replaced weights.
    """
    require_module(model, "decompress_")
    found: dict[str, str] = {}
    before = after = 0
    for place, shard in _coded_places(model):
        coded = place.parameter
        codec, size, dense = shard.codec, shard.coded_bytes, shard.decode().clone()
        if not _put_local(place, dense, coded.requires_grad):
            continue
        before, after = before + size, after + dense.nbytes
        found[place.name] = f"was {codec}"
    _tell_transformers(model)
    sizes = (
        f"{format_bytes(after)} for {format_bytes(before)}" if found else "nothing was compressed"
    )
    sentence = f"{len(found)} weights dense again, {sizes}"
    return keep(model, "decompress_", Changes("decompress_", sentence, found, None))


@torch.no_grad()
def dense_again(model: nn.Module) -> Undone:
    """Replace losslessly compressed weights by dense ones.

    `memeff_compile.undo` calls this function. Some weights stay compressed, and the result gives
    the reasons. These are lossily compressed weights, weights with hooks, and weights that FSDP has
    gathered.
    """
    found: dict[str, str] = {}
    left: dict[str, str] = {}
    before = after = 0
    for place, shard in _coded_places(model):
        codec, size, coded = shard.codec, shard.coded_bytes, place.parameter
        if not parse(codec).is_lossless:
            left[place.name] = f"rounded to {codec}, so its bits are gone: load the model again"
        elif compat.tensor_hooks(coded):
            left[place.name] = (
                "hooks are registered on it, which would be lost: call remove() on the result of "
                "optim_in_backward, and undo again"
            )
        elif not _put_local(place, dense := shard.decode().clone(), coded.requires_grad):
            left[place.name] = "FSDP has gathered it: call reshard() on the model, and undo again"
        else:
            before, after = before + size, after + dense.nbytes
            found[place.name] = f"dense, was {codec}"
    count = len(found)
    sizes = f"{format_bytes(before)} -> {format_bytes(after)}"
    what = f"{count} compressed weight{'s' * (count > 1)} dense again ({sizes})" if count else ""
    return Undone(what, found, left)


def _codec_name(codec: str, mantissa: int, block: int) -> str:
    name = codec if mantissa == 7 else f"{codec}:k{mantissa}:b{block}"
    try:
        form = parse(name)
    except Exception as error:
        raise OptionError(f"compress_: {error}") from None
    if ":" in codec and mantissa != 7:
        raise OptionError(f"compress_: codec is {codec!r} and mantissa {mantissa}; give one only.")
    return str(form)


def _runs(inputs: object, chosen: Sequence[_Place], codec: str) -> list[Any]:
    """Return a list with the model's arguments for each run.

    The model runs so that Gram matrices of the linear layers' inputs can be computed.
    """
    if parse(codec).is_lossless:
        raise OptionError(
            "compress_: inputs were given, and mantissa is 7, which keeps every bit: nothing is "
            "rounded. Leave them out, or give mantissa=3."
        )
    runs = list(runs_of(inputs) or ())
    if not runs:
        raise OptionError(
            f"compress_: inputs is {inputs!r}; a list with at least one entry is needed, each with "
            "the model's arguments for one run."
        )
    cut = next((place.name for place in chosen if compat.is_dtensor(place.parameter)), None)
    if cut is not None:
        raise OptionError(
            f"compress_: {cut} is split over processes, but inputs= needs whole weights. Round and "
            "save the model before it is split, or leave the inputs out."
        )
    return runs


class _Rounding:
    """Rounds weights so that their products with the layers' inputs lose little precision.

    Each run of the model computes the Gram matrices of a few layers' inputs.
    """

    def __init__(
        self, model: nn.Module, chosen: Sequence[_Place], runs: list[Any], codec: str
    ) -> None:
        self.model, self.waiting, self.runs, self.form = model, list(chosen), runs, parse(codec)
        self.groups = list(gram_groups(place.parameter.shape[1] for place in chosen))
        self.grams: dict[str, Tensor] = {}

    def of(self, place: _Place) -> Tensor | None:
        """Return a weight, rounded so that products with its layer's inputs lose little precision,
        or None if this is not possible.

        Call this method for the weights in their order in the model.
        """
        if self.waiting and place is self.waiting[0]:
            count = self.groups.pop(0)
            group, self.waiting = self.waiting[:count], self.waiting[count:]
            owners = {each.name: [module for _, module, _ in each.owners] for each in group}
            self.grams = grams(self.model, owners, self.runs)
        gram = self.grams.pop(place.name, None)
        if gram is None:
            return None
        return rounded_for(place.parameter, gram, self.form.mantissa, self.form.block)


def _with_progress(places: list[_Looked], progress: bool | None) -> Iterable[_Looked]:
    if progress is False:
        return places
    try:
        from tqdm import tqdm
    except ImportError:
        return places
    hidden = None if progress is None else not progress  # None: tqdm looks for a terminal
    return cast("Iterable[_Looked]", tqdm(places, desc="compressing", disable=hidden))


_Looked: TypeAlias = tuple[_Place, str]
"""A `_Place`, and why its weight is left dense, if it is."""


def _places(model: nn.Module) -> Iterator[_Place]:
    """Yield each parameter that has more than one dimension, with all modules that use it; a shared
    parameter is yielded once."""
    found: dict[int, _Place] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() > 1:
                place = found.setdefault(id(parameter), _Place(parameter, []))
                place.owners.append((path, module, attribute))
    yield from found.values()


def _reason(
    place: _Place,
    codec: str,
    skip: Sequence[str],
    min_size: int,
    layers: Sequence[str],
    memory: dict[int, set[int]] | None,  # which tensors share memory; None: not allocated yet
) -> str:
    """Return the reason why a weight stays dense, or "" if it will be compressed."""
    weight = place.parameter
    held = compat.local_part(weight)
    if isinstance(held, CodedWeight):
        way_out = "" if held.codec == codec else f"; for {codec}, call decompress_(model) first"
        return f"it is compressed already, with {held.codec}{way_out}"
    for path, module, attribute in place.owners:
        kind = _layer(module, attribute)
        if kind not in layers:
            named = type(module).__name__
            way_out = f"; layers may name {kind!r}" if kind and kind != "Linear" else ""
            return (
                f"it belongs to {path or 'the model'}, a {named}, which is not a plain nn.Linear"
                f"{way_out}"
            )
        pattern = _skipped(path, skip)
        if pattern:
            return f"skip names {pattern!r}"
    if compat.is_dtensor(weight):
        return _shard_reason(weight, codec, min_size)
    if compat.is_sharded_by_fsdp(weight):
        return "FSDP has gathered it; call reshard() on the model (FSDP2) before compress_"
    if type(weight) is not nn.Parameter:
        return f"it is a {type(weight).__name__}; compress it before it is sharded or quantised"
    if weight.numel() < min_size:
        return f"it has {weight.numel()} elements, fewer than min_size, which is {min_size}"
    sentence = supports_weight(weight, codec, is_loaded_later=memory is None)
    if sentence is None and memory and len(memory[compat.storage_key(weight)]) > 1:
        return "its memory is shared with another tensor of the model"
    return sentence or _unmovable(weight)


def _shard_reason(weight: Tensor, codec: str, min_size: int) -> str:
    """Return the reason why a sharded weight is not compressed, or "" if this rank's shard can be
    encoded."""
    local = compat.local_part(weight)
    if _is_cut_once(weight):
        return _unfit_shard(weight, codec, min_size)
    if not compat.is_fsdp_shard(weight):
        return (
            "it is a DTensor that is neither cut for tensor parallelism alone nor held by FSDP2 "
            "(fully_shard) in shards on their device"
        )
    if weight.requires_grad:
        return (
            "it is sharded and trained, and a compressed shard cannot be updated; freeze it with "
            "requires_grad_(False) and train adapters"
        )
    ranks = weight.device_mesh.size()  # type: ignore[attr-defined]
    if local.shape[1:] != weight.shape[1:] or local.shape[0] * ranks != weight.shape[0]:
        return "it is not split into equal shards of whole rows, as coded weights need"
    return _unfit_shard(weight, codec, min_size)


def _unfit_shard(weight: Tensor, codec: str, min_size: int) -> str:
    local = compat.local_part(weight)
    if local.numel() < min_size:
        return f"its shard has {local.numel()} elements, fewer than min_size, which is {min_size}"
    return supports_weight(local, codec) or _unmovable(weight)


def _is_cut_once(weight: Tensor) -> bool:
    """Return whether a weight is split only by tensor parallelism."""
    mesh: Any = getattr(weight, "device_mesh", None)
    return mesh is not None and mesh.ndim == 1 and compat.is_tensor_parallel(weight)


def _layer(module: nn.Module, attribute: str) -> str:
    """Return a module's name in `LAYERS`, the classes whose weights can be compressed, or "".

    The names are "Linear", "Conv1D" and "Embedding". Return "" for other modules, and if
    `attribute` is not "weight".
    """
    kind = type(module)
    if attribute != "weight":
        return ""
    if isinstance(module, nn.Linear):
        return "Linear" if kind.forward is nn.Linear.forward else ""
    if isinstance(module, nn.Embedding):  # one with `max_norm` writes to its weight
        return "Embedding" if module.max_norm is None and not module.sparse else ""
    is_theirs = (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    return "Conv1D" if is_theirs else ""


def require_layer(module: nn.Module, attribute: str, shape: Sequence[int]) -> None:
    """Raise CodedWeightError if a module cannot use a compressed weight of a given shape."""
    if not _layer(module, attribute):
        raise CodedWeightError(
            f"a compressed weight is meant for {type(module).__name__}.{attribute}, which is not "
            "the weight of a plain nn.Linear. Load it into the model it was saved from."
        )
    expected = module._parameters[attribute]
    if expected is not None and tuple(expected.shape) != tuple(shape):
        raise CodedWeightError(
            f"a compressed weight has shape {tuple(shape)} and the model's "
            f"{tuple(expected.shape)}; load it into the model it was saved from."
        )


def _skipped(path: str, skip: Sequence[str]) -> str:
    parts = path.split(".")
    tails = [".".join(parts[first:end]) for end in range(len(parts) + 1) for first in range(end)]
    return next((p for p in skip if any(fnmatch.fnmatchcase(tail, p) for tail in tails)), "")


def _unmovable(weight: Tensor) -> str:
    if weight.grad is not None:
        return "it has a gradient; set it to None first (optimizer.zero_grad())"
    if compat.tensor_hooks(weight):
        return "hooks are registered on it, which would be lost"
    return ""


def _dense(place: _Place, reason: str) -> CompressedWeight:
    held, shape = compat.local_part(place.parameter), tuple(place.parameter.shape)
    if isinstance(held, CodedWeight):
        return CompressedWeight(place.name, shape, "", 0, 0, reason, held.codec)
    nbytes = place.parameter.nbytes
    return CompressedWeight(place.name, shape, "", nbytes, nbytes, reason)


def _compress_one(place: _Place, codec: str, rounded: Tensor | None = None) -> CompressedWeight:
    """Encode a weight, or its rounded values if given.

    Leave the weight dense if the codes would take more than nine tenths of its memory."""
    weight = compat.local_part(place.parameter) if rounded is None else rounded
    parts = encode(weight, codec)
    after = sum(part.nbytes for part in parts)
    if after > LARGEST_SHARE * weight.nbytes:
        bits = bits_per_weight(after, weight.numel())
        return _dense(place, f"its code would take {bits:.1f} bits a weight")
    coded = CodedWeight(parts, codec, weight.shape)
    trains = place.parameter.requires_grad and parse(codec).is_lossless
    nbytes, after = weight.nbytes, coded.coded_bytes
    if not _put_local(place, coded, trains):
        return _dense(place, "FSDP has gathered it; call reshard() on the model first")
    for_inputs = rounded is not None
    return CompressedWeight(
        place.name, tuple(coded.shape), codec, nbytes, after, for_inputs=for_inputs
    )


def _put(place: _Place, value: nn.Parameter) -> None:
    """Replace a parameter by another tensor in every module that uses it."""
    if compat.tensor_hooks(place.parameter):
        raise CodedWeightError(
            f"hooks are registered on {place.name} and would be lost. Remove them first; if they "
            "belong to optim_in_backward, call remove() on its result."
        )
    compat.drop_empty_hooks(place.parameter)
    _keep_attributes(place.parameter, value)
    try:
        # The same object now has the new value, so an optimizer created earlier sees it too.
        torch.utils.swap_tensors(place.parameter, value)
        value = cast("nn.Parameter", place.parameter)
    except RuntimeError:  # a weak reference, or a node of the autograd graph, holds the old one
        pass
    for _, module, attribute in place.owners:
        module._parameters[attribute] = value
        watch_state_dict(module)


def _put_local(place: _Place, local: Tensor, trains: bool) -> bool:
    """Store a tensor as this rank's local tensor of a distributed weight; return whether that was
    possible."""
    old = place.parameter
    if compat.is_dtensor(old) and not compat.is_tensor_parallel(old):
        return _put_shard(place, local)
    whole = compat.with_local_part(old, local) if compat.is_dtensor(old) else local
    new = nn.Parameter(whole, requires_grad=trains)
    new.grad = old.grad
    _put(place, new)
    return True


def _put_shard(place: _Place, local: Tensor) -> bool:
    """Store a tensor as this rank's shard of a weight that FSDP2 shards; return whether that was
    possible."""
    for _, module, attribute in place.owners:
        parameters: dict[str, Any] = module._parameters
        old = parameters[attribute]
        if not compat.put_fsdp_shard(module, attribute, local):
            return False
        _keep_attributes(old, parameters[attribute])
        watch_state_dict(module)
    return True


def _keep_attributes(old: Tensor, new: Tensor) -> None:
    """Copy the attributes that other code has set on a parameter to the parameter's replacement."""
    for name, attribute in vars(old).items():
        if name not in vars(new) and name not in OWN_ATTRIBUTES:
            setattr(new, name, attribute)


def put_loaded(model: nn.Module, loaded: Mapping[str, CodedWeight]) -> None:
    """Replace the parameters whose names are keys of `loaded` by the compressed weights in
    `loaded`, in every module that uses these parameters."""
    places = {}
    for place in _places(model):
        for path, _, attribute in place.owners:
            places[f"{path}.{attribute}"] = place
    for name, coded in loaded.items():
        value = nn.Parameter(coded, requires_grad=parse(coded.codec).is_lossless)
        _keep_attributes(places[name].parameter, value)
        for _, module, attribute in places[name].owners:
            module._parameters[attribute] = value
            watch_state_dict(module)


def watch_state_dict(module: nn.Module) -> None:
    if not compat.has_state_dict_hook(module, _decode_in_state_dict):
        module.register_state_dict_post_hook(_decode_in_state_dict)
        module.register_load_state_dict_pre_hook(_codes_in_state_dict)


def _codes_in_state_dict(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_messages: list[str],
) -> None:
    """Let `load_state_dict` accept a compressed weight as several tensors named `<name>.<part>`.

    A compressed weight consists of these tensors, such as the codes and signs of its elements.
    transformers' Trainer passes these tensors when it loads a checkpoint."""
    for name, own in module._parameters.items():
        path = f"{prefix}{name}"
        parts = {part: state_dict.pop(f"{path}.{part}", None) for part in PARTS}
        parts = {part: held for part, held in parts.items() if held is not None}
        if parts and own is not None:
            try:
                state_dict[path] = _from_parts(own, parts)
            except CodedWeightError as error:
                error_messages.append(f"{path}: {error}")


PARTS = frozenset(part for each in CODECS for part in (*parse(each).parts, "norms", "rest"))
"""Names of the parts of compressed weights, of any codec."""


def _from_parts(own: Tensor, found: Mapping[str, Tensor]) -> Tensor:
    """Return a compressed weight that can replace `own`, a module's weight.

    A compressed weight consists of several tensors, such as the codes and signs of its elements.
    `found` contains these tensors by name.
    """
    every = [name for name in (*CODECS, *WIDER) if dtype_of(parse(name)) == own.dtype]
    forms = [own.codec] if isinstance(own, CodedWeight) else every
    codec = next((each for each in forms if set(parse(each).parts) == set(found)), None)
    if codec is None:
        raise CodedWeightError(
            f"the state dict holds the parts {', '.join(sorted(found))} of a compressed weight, "
            f"and this model's weight is {forms[0] if len(forms) == 1 else 'dense'}. Load the "
            "whole folder with memeff_compile.from_pretrained, or compress_ the model as the saved "
            "one was."
        )
    parts = [found[part].to(own.device) for part in parse(codec).parts]
    if isinstance(own, CodedWeight):
        for name, part, held in zip(parse(codec).parts, parts, own.parts, strict=True):
            if name not in LISTS and part.shape != held.shape:
                raise CodedWeightError(
                    f"its part {name} has {part.numel()} elements in the state dict and "
                    f"{held.numel()} in the model. Load it into the model it was saved from."
                )
    return CodedWeight(parts, codec, own.shape)


def _decode_in_state_dict(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Make `state_dict` return decoded, dense tensors under the usual names, unless the caller
    passed `keep_vars=True` to get the parameters."""
    for name in module._parameters:
        value = state_dict.get(prefix + name)
        if isinstance(value, CodedWeight) and not isinstance(value, nn.Parameter):
            state_dict[prefix + name] = value.decode()
        elif value is not None and compat.is_dtensor(value):
            local = compat.local_part(value)
            if isinstance(local, CodedWeight):
                state_dict[prefix + name] = compat.with_local_part(value, local.decode())


def compressed_weights(model: nn.Module) -> dict[str, CodedWeight]:
    """Return the compressed weights of a model, each under the first of its names."""
    return {place.name: weight for place, weight in _coded_places(model)}


def _coded_places(model: nn.Module) -> Iterator[tuple[_Place, CodedWeight]]:
    for place in _places(model):
        local = compat.local_part(place.parameter)
        if isinstance(local, CodedWeight):
            yield place, local


def put_coded(
    module: nn.Module, attribute: str, coded: CodedWeight, *, requires_grad: bool
) -> None:
    """Replace a layer's parameter by a compressed weight.

    If the module's class is not in `LAYERS`, or its weight has another shape, raise
    CodedWeightError.
    """
    require_layer(module, attribute, coded.shape)
    expected = module._parameters[attribute]
    if is_updated_in_backward(expected):
        raise CodedWeightError(
            "optim_in_backward trains this model, and a loaded weight would replace the one that "
            "it updates. Call remove() on its result, load the weights, and call it again."
        )
    value = nn.Parameter(coded, requires_grad=requires_grad)
    if expected is not None:
        _keep_attributes(expected, value)
    module._parameters[attribute] = value
    watch_state_dict(module)
