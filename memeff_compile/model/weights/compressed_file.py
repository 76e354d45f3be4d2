"""Save compressed weights to a safetensors file, and load them without dense copies.

A compressed weight consists of several coded tensors; the file stores each of them as a plain
tensor with the name `<weight's name>.<part>`. All other tensors of the model are stored unchanged.
The file's metadata contains, in one string, the format version, and the codec (compressed format),
shape and checksum of each weight. The file also contains small buffers that a state dict omits,
such as rotary angles. When a model on the meta device is loaded, these buffers get their values
from the file.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from memeff_compile import compat
from memeff_compile.errors import CodedWeightError, MemeffError
from memeff_compile.kernels.coded_weight import CodedWeight, parse
from memeff_compile.model.changes import Changes, keep, require_module
from memeff_compile.model.weights.compress import compressed_weights, put_coded, watch_state_dict
from memeff_compile.report import format_bytes

VERSION = 2
READ = (1, VERSION)
"""Versions that can be read; version 1 has no buffers."""
METADATA = "memeff_coded_weights"
BUFFER = "non_persistent:"
"""Prefix of the key of a buffer that a state dict omits."""
LARGEST_BUFFER = 1 << 20
"""Bytes of the largest such buffer that is stored; larger ones only have a checksum."""


class _File(Protocol):
    def keys(self) -> list[str]: ...
    def metadata(self) -> dict[str, str] | None: ...
    def get_tensor(self, name: str) -> Tensor: ...


def save_compressed(model: nn.Module, path: str | PathLike[str]) -> Changes:
    """Save a compressed model to one safetensors file, with the codes in place of the weights.

    Args:
        model: a model whose weights `compress_` has compressed.
        path: the file to write.

    Returns:
        A report of the saved weights; as an integer, it is the number of compressed weights.

    Raises:
        CodedWeightError: No weight of the model is compressed.
        MemeffError: The package safetensors is missing.
    """
    require_module(model, "save_compressed")
    coded = compressed_weights(model)
    if not coded:
        raise CodedWeightError(
            "save_compressed: no weight of this model is compressed. Call "
            "memeff_compile.compress_(model) first, or save its state_dict."
        )
    if any(compat.is_dtensor(parameter) for parameter in model.parameters()):
        raise CodedWeightError(
            "save_compressed: parameters of this model are sharded, and each process holds a part "
            "of them. Save its state_dict with torch.distributed.checkpoint, which is dense."
        )
    tensors: dict[str, Tensor] = {}
    table: dict[str, Any] = {}
    for name, weight in coded.items():
        parts = [part.detach().cpu().contiguous() for part in weight.parts]
        shape, crc32 = list(weight.shape), checksum(parts)
        table[name] = {"codec": weight.codec, "shape": shape, "crc32": crc32}
        for part_name, part in zip(parse(weight.codec).parts, parts, strict=True):
            tensors[f"{name}.{part_name}"] = part
    aliases: dict[str, str] = {}
    first_names = {id(weight): name for name, weight in coded.items()}
    for name, tensor in _everything(model):
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            aliases[name] = first
        elif not isinstance(tensor, CodedWeight):
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    for name, buffer in _left_out(model):
        if buffer.nbytes <= LARGEST_BUFFER and buffer.device.type != "meta":
            tensors[f"{BUFFER}{name}"] = buffer.detach().cpu().contiguous().clone()
    buffers = digests(model)
    note = {"version": VERSION, "tensors": table, "aliases": aliases, "buffers": buffers}
    _safetensors().save_file(tensors, str(path), metadata={METADATA: json.dumps(note)})
    return _changes("save_compressed", f"written to {path}", table, tensors.values())


def load_compressed_(
    model: nn.Module, path: str | PathLike[str], *, device: object = None
) -> Changes:
    """Load a file of `save_compressed` into a model of the same architecture, without a dense
    copy.

    Buffers that a state dict omits, such as rotary angles, keep the values that they have in
    `model`. A warning names the buffers whose values differ from the saved model's. Buffers on
    the meta device get their values from the file, or from the module's initialisation.

    Args:
        model: a dense or compressed model, which may be on the meta device.
        path: the file that `save_compressed` wrote.
        device: the device for the weights of a model on the meta device; by default the CPU.

    Returns:
        A report of the loaded weights; as an integer, it is the number of compressed weights.

    Raises:
        CodedWeightError: The file is damaged, has an unsupported format version, or does not match
            the model. This error is also raised if the values of a buffer on the meta device are
            unknown.
    """
    require_module(model, "load_compressed_")
    with _opened(path) as file:
        note = _note(file, path)
        _check_names(model, file, note)
        _make_buffers(model, file, device)
        modules = dict(model.named_modules())
        for name, about in note["tensors"].items():
            owner, _, attribute = name.rpartition(".")
            old: Any = modules[owner]._parameters[attribute]
            codec, target = about["codec"], _target(old, device)
            parts = [part.to(target) for part in _parts(file, name, about, path)]
            trains = old.requires_grad and parse(codec).is_lossless
            coded = CodedWeight(parts, codec, about["shape"])
            put_coded(modules[owner], attribute, coded, requires_grad=trains)
        for name in sorted(_tensor_names(file) - _coded_names(note)):
            _set_dense(modules, name, file.get_tensor(name), device)
        for name, first in note["aliases"].items():
            _alias(modules, name, first)
    held = {id(tensor): tensor for _, tensor in _everything(model)}.values()
    changes = _changes("load_compressed_", f"read from {path}", note["tensors"], held)
    warn_of_buffers(model, note.get("buffers", {}), "load_compressed_")
    return keep(model, "load_compressed_", changes)


def loaded_changes(coded: Mapping[str, CodedWeight], model: nn.Module, path: object) -> Changes:
    """Return a report, like that of `load_compressed_`, on the weights that were read from a
    folder.
    """
    table = {n: {"codec": weight.codec, "shape": list(weight.shape)} for n, weight in coded.items()}
    held = {id(tensor): tensor for _, tensor in _everything(model)}.values()
    return _changes("load_compressed_", f"read from {path}", table, held)


def digests(model: nn.Module) -> dict[str, str]:
    """Return dtype, shape and checksum of each buffer that a state dict omits."""
    return {name: _digest(b) for name, b in _left_out(model) if b.device.type != "meta"}


def warn_of_buffers(model: nn.Module, saved: Mapping[str, str], verb: str) -> None:
    """Warn the user about buffers that differ from those of the saved model; `saved` contains the
    saved digests."""
    found, differ = digests(model), []
    for name in sorted(saved.keys() & found.keys()):
        if found[name] != saved[name]:
            (here, size, _), (there, its_size, _) = found[name].split(), saved[name].split()
            kinds = (here, there) if here != there else (size, its_size)
            how = f"{kinds[0]} here and {kinds[1]} there" if len(set(kinds)) > 1 else "other values"
            differ.append(f"{name} ({how})")
    if differ:
        warnings.warn(
            f"{verb}: every weight is the saved one, but buffers that no checkpoint holds differ "
            f"from the saved model's, and so will its outputs: {', '.join(differ[:3])}"
            + (f" and {len(differ) - 3} more" if len(differ) > 3 else "")
            + ". model.to(torch.bfloat16) rounds such buffers. Make the model in its dtype from "
            "the start, as memeff_compile.from_pretrained does, or make it under "
            'torch.device("meta"), and load_compressed_ takes them from the file.',
            stacklevel=3,
        )


def _digest(buffer: Tensor) -> str:
    kind, shape = str(buffer.dtype).removeprefix("torch."), "x".join(map(str, buffer.shape)) or "1"
    return f"{kind} {shape} {checksum([buffer.detach().cpu().contiguous().view(-1)]):08x}"


def _left_out(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a state dict omits."""
    for path, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None:
                yield f"{path}.{name}" if path else name, buffer


@torch.no_grad()
def _make_buffers(model: nn.Module, file: _File, device: object) -> None:
    """Set the values of buffers that are on the meta device and that a state dict omits.

    If the values of a buffer are not known, raise CodedWeightError and change no buffer.
    """
    modules, stored = dict(model.named_modules()), set(file.keys())
    made: list[tuple[nn.Module, str, Tensor]] = []
    lost: list[str] = []
    for name, buffer in _left_out(model):
        if buffer.device.type != "meta":
            continue
        owner, _, attribute = name.rpartition(".")
        value = file.get_tensor(f"{BUFFER}{name}") if f"{BUFFER}{name}" in stored else None
        if value is None or value.shape != buffer.shape:
            value = _initialised(model, modules[owner], attribute, _target(buffer, device))
        if value is None:
            lost.append(name)
        else:
            made.append((modules[owner], attribute, value.to(_target(buffer, device))))
    if lost:
        raise CodedWeightError(
            f"load_compressed_: the model is on the meta device, and neither the file nor the "
            f"modules' own initialisation has values for the buffers {', '.join(lost[:5])}. Make "
            "these modules outside of torch.device('meta'), or register the buffers as persistent "
            "and save the model again."
        )
    for module, attribute, value in made:
        module._buffers[attribute] = value


def _initialised(
    model: nn.Module, module: nn.Module, attribute: str, target: torch.device
) -> Tensor | None:
    """Return a buffer with the values that the module's initialisation computes, or None.

    A transformers model has a method `_init_weights`, which initialises a given module. In other
    models, each module has a method `reset_parameters`. This function calls these methods only if
    all parameters of the argument `module` are on the meta device. Parameters on the meta device
    have no values, so the calls change no parameter.
    """
    if any(each.device.type != "meta" for each in module.parameters()):
        return None
    of_model = [getattr(each, "_init_weights", None) for each in model.modules()]
    calls: list[tuple[Any, tuple[nn.Module, ...]]] = [(call, (module,)) for call in of_model]
    calls += [(getattr(module, name, None), ()) for name in ("reset_parameters", "rope_init")]
    before = dict(module._buffers)
    try:
        for call, given in calls:
            if not callable(call):
                continue
            for name, buffer in before.items():
                if buffer is not None and buffer.device.type == "meta":
                    module._buffers[name] = torch.empty_like(buffer, device=target)
            empty: Any = module._buffers[attribute]
            version = compat.version_of(empty)
            call(*given)
            found: Any = module._buffers[attribute]
            if found is not None and (found is not empty or compat.version_of(found) > version):
                return None if found.device.type == "meta" else cast("Tensor", found)
    finally:
        module._buffers.update(before)
    return None


def _changes(verb: str, what: str, table: Mapping[str, Any], tensors: Iterable[Tensor]) -> Changes:
    sizes = (t.coded_bytes if isinstance(t, CodedWeight) else t.nbytes for t in tensors)
    places = {name: f"{about['codec']} {about['shape']}" for name, about in table.items()}
    sentence = f"{len(places)} compressed weights {what}, {format_bytes(sum(sizes))} in all"
    return Changes(verb, sentence, places, None)


def _everything(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and persistent buffers, once for each of their names."""
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, tensor


def _target(old: Tensor, device: object) -> torch.device:
    if old.device.type != "meta":
        return old.device
    return torch.device("cpu" if device is None else cast("Any", device))


def _set_dense(modules: dict[str, nn.Module], name: str, value: Tensor, device: object) -> None:
    owner, _, attribute = name.rpartition(".")
    module = modules[owner]
    store: Any = module._parameters if attribute in module._parameters else module._buffers
    old = store[attribute]
    if tuple(old.shape) != tuple(value.shape):
        raise CodedWeightError(
            f"load_compressed_: {name} has shape {tuple(value.shape)} in the file and "
            f"{tuple(old.shape)} in the model; load it into the model it was saved from."
        )
    if old.device.type != "meta" and not isinstance(old, CodedWeight):
        with torch.no_grad():
            old.copy_(value)
        return
    value = value.to(_target(old, device))
    is_buffer = store is module._buffers
    store[attribute] = value if is_buffer else nn.Parameter(value, old.requires_grad)


def _alias(modules: dict[str, nn.Module], name: str, first: str) -> None:
    (owner, _, attribute), (source, _, known) = name.rpartition("."), first.rpartition(".")
    for store in ("_parameters", "_buffers"):
        if known in (held := getattr(modules[source], store)):
            getattr(modules[owner], store)[attribute] = held[known]
    watch_state_dict(modules[owner])


def checksum(parts: Sequence[Tensor]) -> int:
    """Return one crc32 checksum over a sequence of CPU tensors."""
    found = 0
    for part in parts:
        found = zlib.crc32(part.view(torch.uint8).numpy().tobytes(), found)
    return found


def _parts(file: _File, name: str, about: dict[str, Any], path: object) -> list[Tensor]:
    parts = [file.get_tensor(f"{name}.{part}") for part in parse(about["codec"]).parts]
    if checksum(parts) != about["crc32"]:
        raise CodedWeightError(
            f"load_compressed_: {name} in {path} does not match its checksum; the file is damaged. "
            "Copy or save it again."
        )
    return parts


def _note(file: _File, path: object) -> dict[str, Any]:
    text = (file.metadata() or {}).get(METADATA)
    if text is None:
        raise CodedWeightError(
            f"load_compressed_: {path} holds no compressed weights. A dense safetensors file is "
            "loaded with load_state_dict; compress_ the model afterwards."
        )
    note = cast("dict[str, Any]", json.loads(text))
    if note.get("version") not in READ:
        raise CodedWeightError(
            f"load_compressed_: {path} has format version {note.get('version')!r} and this release "
            f"reads {' and '.join(map(str, READ))}. Load it with the release that wrote it, "
            "decompress_ the model and save its state_dict."
        )
    return note


def _tensor_names(file: _File) -> set[str]:
    return {name for name in set(file.keys()) if not name.startswith(BUFFER)}


def _coded_names(note: dict[str, Any]) -> set[str]:
    tables = note["tensors"].items()
    return {f"{name}.{part}" for name, about in tables for part in parse(about["codec"]).parts}


def _check_names(model: nn.Module, file: _File, note: dict[str, Any]) -> None:
    """Raise an error if the file belongs to another model; the caller must call this function
    before it changes any weight.
    """
    held, needed = _tensor_names(file), _coded_names(note)
    known = {name for name, _ in _everything(model)}
    there = set(note["tensors"]) | (held - needed) | set(note["aliases"])
    missing = sorted((needed - held) | (known - there))
    unexpected = sorted(there - known)
    if missing or unexpected:
        raise CodedWeightError(
            f"load_compressed_: the file and the model differ. Missing in the file: "
            f"{', '.join(missing[:5]) or 'nothing'}; not in the model: "
            f"{', '.join(unexpected[:5]) or 'nothing'}. Load it into the model it was saved from."
        )


def _safetensors() -> Any:  # noqa: ANN401 - a module
    try:
        import safetensors.torch
    except ImportError:
        raise MemeffError(
            "compressed files are safetensors files, and the package safetensors is not installed. "
            "It comes with transformers; install either."
        ) from None
    return safetensors.torch


def _opened(path: str | PathLike[str]) -> Any:  # noqa: ANN401 - safetensors' own handle
    _safetensors()
    import safetensors

    try:
        return safetensors.safe_open(str(path), framework="pt", device="cpu")
    except safetensors.SafetensorError as error:
        raise CodedWeightError(
            f"load_compressed_: {path} is not a whole safetensors file ({error}). Copy or save it "
            "again."
        ) from None


def name_in_folder(
    model: Any,  # noqa: ANN401 - a model of transformers
    name: str,
    saved: Mapping[str, str],
) -> str | None:
    """Return the name that a weight of the model has in the saved folder, or None if the folder
    does not contain the weight.

    A base model can be loaded from the folder of a model with an output projection, and vice versa.
    """
    prefix = f"{model.base_model_prefix}."
    every = (name, prefix + name, name.removeprefix(prefix))
    return next((each for each in every if each in saved), None)
