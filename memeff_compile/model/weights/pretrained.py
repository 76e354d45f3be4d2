"""Save and load compressed models with transformers' save_pretrained and from_pretrained.

The saved folder contains the usual files. config.json lists the compressed weights. A compressed
weight consists of several tensors, such as the codes and signs of its elements. The weight files
contain each of these tensors as `<weight's name>.<tensor's name>`. This module is imported as soon
as transformers loads its own quantizers, before transformers imports its model classes. Some
modules of this package need torch. Those modules are imported here only when a compressed model is
used.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, TypeAlias

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from memeff_compile.errors import CodedWeightError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from memeff_compile.kernels.coded_weight import CodedWeight
    from memeff_compile.model.weights.compress import CompressedWeight
    from memeff_compile.model.weights.conversions import Encode

log = logging.getLogger(__name__)

Theirs: TypeAlias = Any
"""A model of transformers, or an argument that transformers passes."""

METHOD = "memeff"
VERSION = 1


class MemeffConfig(QuantizationConfigMixin):
    """The transformers configuration with which `from_pretrained` compresses a model, or loads a
    compressed one.

    The configuration is stored in config.json. The arguments are those of `compress_`.
    `from_pretrained(name, quantization_config=...)` compresses each weight as soon as it is read.

    Args:
        codec: "win4" (fastest), "tier" (smaller) or "rans" (smallest, slowest).
        mantissa: the number of mantissa bits to keep: 7 (all, lossless), 3, 1 or 0 (lossy, for
            inference).
        block: for lossy compression, the number of weights that share a normaliser (a number by
            which they are divided).
        skip: the names of modules that stay dense; None means output projections.
        min_size: a weight with fewer elements stays dense; None means 2**20.
        layers: the classes whose weights are compressed: "Linear", "Conv1D" and "Embedding".

    Example:
        >>> MemeffConfig("tier").codec
        'tier'
    """

    def __init__(
        self,
        codec: str = "win4",
        mantissa: int = 7,
        block: int = 512,
        skip: Sequence[str] | None = None,
        min_size: int | None = None,
        layers: Sequence[str] = ("Linear",),
        *,
        quant_method: str = METHOD,
        # the remaining arguments describe a saved model
        version: int = VERSION,
        dtype: str | None = None,  # dtype of the tensors that are not compressed
        bits: float | None = None,  # per compressed weight
        weights: Mapping[str, str] | None = None,  # codec and checksum of each
        buffers: Mapping[str, str] | None = None,  # as `compressed_file.digests` gives them
    ) -> None:
        from memeff_compile.model.weights.compress import MIN_SIZE, SKIPPED, settings_of

        self.quant_method: Any = METHOD
        names, least = SKIPPED if skip is None else skip, MIN_SIZE if min_size is None else min_size
        _, chosen, kinds = settings_of(codec, mantissa, block, names, least, layers)
        self.codec, self.mantissa, self.block = codec, mantissa, block
        self.skip, self.min_size, self.layers = list(chosen), least, list(kinds)
        self.version, self.dtype, self.bits = version, dtype, bits
        self.weights, self.buffers = dict(weights or {}), dict(buffers or {})

    @property
    def full_codec(self) -> str:
        """Return the full name of the codec, the compressed format of weights.

        For a lossy codec, the name contains the mantissa bits and the block size, such as
        "win4:k3:b512". The name of a lossless codec does not contain these numbers."""
        from memeff_compile.kernels.coded_weight import Format, parse

        lossy = (self.mantissa, self.block) if self.mantissa < 7 else ()
        return str(Format(self.codec, *lossy) if lossy else parse(self.codec))

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Theirs
    ) -> Theirs:
        """Create the configuration from the entry `quantization_config` of config.json.

        Raise CodedWeightError if the entry has an unsupported format version.
        """
        if config_dict.get("version", VERSION) != VERSION:
            raise CodedWeightError(
                f"config.json describes compressed weights in version {config_dict['version']!r}, "
                f"and this release reads {VERSION}. Load the model with the release that wrote it, "
                "and save it dense: decompress_(model), then save_pretrained."
            )
        read: Any = super().from_dict
        return read(config_dict, return_unused_kwargs, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return this configuration as the entry `quantization_config` of config.json.

        If the model is saved with compressed weights, the entry has only the keys that loading
        needs.
        """
        said = super().to_dict()
        for name in ("skip", "min_size", "layers") if self.weights else ():
            del said[name]
        return said

    def get(self, name: str, default: object = None) -> Theirs:
        """Return a value by key, because from_pretrained treats a config like a dictionary."""
        return getattr(self, name, default)


class MemeffQuantizer(HfQuantizer):
    """A transformers quantizer that loads and saves compressed weights (codes).

    From a dense checkpoint, the quantizer compresses weights as they are read."""

    quantization_config: MemeffConfig
    is_trainable = True
    is_qat_trainable = True  # transformers' term: every weight can be trained
    is_compileable = True

    def __init__(self, quantization_config: MemeffConfig, **settings: Theirs) -> None:
        super().__init__(quantization_config, **settings)
        self.chosen: set[str] = set()  # weights to encode when they are read
        self.loaded: dict[str, CodedWeight] = {}  # until the model is on its devices
        self.errors: list[CodedWeightError] = []  # errors of weights that could not be loaded
        self.report: list[CompressedWeight] = []
        self.conversions: Any = None  # the model's own, which a folder of codes does not need

    def is_serializable(self) -> bool:
        """Return True, because compressed weights consist of plain tensors that can be saved."""
        return True

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which transformers will load the tensors that are not compressed.

        Raise CodedWeightError if a compressed model was saved in another dtype.
        """
        given, saved = str(dtype).removeprefix("torch."), self.quantization_config.dtype
        if self.pre_quantized and saved is not None and given != saved:
            raise CodedWeightError(
                f"from_pretrained was given dtype={given}, and this compressed model was saved in "
                f"{saved}; codes hold weights of one dtype. Leave dtype out; for another one, "
                "call decompress_(model) and model.to(dtype) afterwards."
            )
        return dtype

    def validate_environment(self, *_: object, device_map: Theirs = None, **__: object) -> None:
        """Raise an error if the device map offloads weights to disk."""
        places = device_map.values() if isinstance(device_map, dict) else [device_map]
        if "disk" in places:
            _refuse_offloading("a part")

    def param_element_size(self, model: Theirs, param_name: str, param: Tensor) -> float:
        """Return the bytes per element of a parameter, from which transformers computes a device
        map."""
        from memeff_compile.model.weights.compressed_file import name_in_folder

        coded = name_in_folder(
            model, param_name, self.quantization_config.weights
        ) or param_name in (self.chosen if not self.pre_quantized else ())
        bits = self.quantization_config.bits or 8.0 * param.element_size()
        return bits / 8 if coded else float(param.element_size())

    def param_needs_quantization(self, model: Theirs, param_name: str, **_: object) -> bool:
        """Return whether to encode a weight as soon as transformers has read it."""
        return param_name in self.chosen

    def get_quantize_ops(self) -> Encode:
        from memeff_compile.model.weights.conversions import Encode

        return Encode(self)

    def update_weight_conversions(self, weight_conversions: list[Any], *_: object) -> list[Any]:
        """Return the conversions from tensors in the saved folder to weights of the model.

        If the folder contains a dense model, the model's own conversions are returned. The
        parameters of a compressed model are saved under their own names, and need no renaming. For
        a folder with such a model, a single conversion is returned, which joins the coded tensors
        of each weight.
        """
        if not self.pre_quantized or not self.quantization_config.weights:
            return weight_conversions
        from transformers.core_model_loading import WeightConverter

        from memeff_compile.model.weights.compress import PARTS
        from memeff_compile.model.weights.conversions import Join

        sentinel = re.escape(_sentinel(self.quantization_config.weights).removesuffix(".weight"))
        patterns = [rf"(?<={sentinel}\.)weight$", *(f"weight.{part}" for part in sorted(PARTS))]
        return [WeightConverter(patterns, "weight", [Join(self)])]

    def _process_model_before_weight_loading(self, model: Theirs, **_: object) -> None:
        from memeff_compile.model.weights.compress import plan

        said = self.quantization_config
        if self.pre_quantized:
            known = dict(model.named_parameters(remove_duplicate=False))
            if not any(_here_of(model, name, known) for name in said.weights):
                raise CodedWeightError(
                    f"config.json names compressed weights, as {[*said.weights][:2]}, and "
                    f"{type(model).__name__} has none of them. Load it as the class that was saved."
                )
            return
        chosen, self.report = plan(model, said.full_codec, said.skip, said.min_size, said.layers)
        self.chosen = set(chosen)

    def _process_model_after_weight_loading(self, model: Theirs, **_: object) -> Theirs:
        from memeff_compile.kernels.coded_weight import CodedWeight, side_by_side
        from memeff_compile.model.changes import keep
        from memeff_compile.model.weights.compress import (
            CompressionReport,
            compressed_weights,
            notes_of_skip,
            put_loaded,
        )
        from memeff_compile.model.weights.compressed_file import loaded_changes, warn_of_buffers

        if self.errors:
            raise self.errors[0]
        for path, module in model.named_modules():
            if getattr(module, "_hf_hook", None) is not None and _offloads(module._hf_hook):
                _refuse_offloading(path)
        put_loaded(model, self.loaded)
        self.loaded = {}
        coded, said = compressed_weights(model), self.quantization_config
        known = dict(model.named_parameters(remove_duplicate=False))
        for name in self.chosen & known.keys():
            if not isinstance(known[name], CodedWeight) and bool(known[name].view(-1)[0].isnan()):
                raise CodedWeightError(
                    f"{name} is tied to a compressed weight, and the device_map puts them on two "
                    "devices. Put both on one, or name the module in skip."
                )
        if self.pre_quantized:
            names = [_here_of(model, name, known) for name in said.weights]
            lost = [n for n in names if n is not None and not isinstance(known[n], CodedWeight)]
            if lost:
                raise CodedWeightError(
                    f"the checkpoint has no codes of {', '.join(lost[:3])}, and config.json says "
                    "that these weights are compressed. If the checkpoint is dense, take "
                    "quantization_config out of its config.json; else save the model again."
                )
            keep(model, "load_compressed_", loaded_changes(coded, model, model.name_or_path))
            warn_of_buffers(model, said.buffers, "from_pretrained")
        else:
            notes = notes_of_skip(model, said.skip, coded)
            report = keep(model, "compress_", CompressionReport(tuple(self.report), notes))
            if not coded:
                log.warning("MemeffConfig: from_pretrained compressed nothing:\n%s", report)
        side_by_side(coded.values())
        self.chosen = set()
        know(model)
        return model

    def _dequantize(self, model: Theirs, dtype: torch.dtype | None = None) -> Theirs:
        from memeff_compile.model.weights.compress import decompress_

        decompress_(model)
        return model if dtype is None else model.to(dtype)

    def get_state_dict_and_metadata(self, model: Theirs) -> tuple[dict[str, Tensor] | None, Any]:
        """Return the tensors to save, after updating the model's config."""
        from memeff_compile import compat
        from memeff_compile.kernels.coded_weight import CodedWeight, parse

        if any(compat.is_dtensor(each) for each in model.parameters()):
            _forget(model)
            return None, {}
        _describe(self.quantization_config, model)
        model.config.quantization_config = self.quantization_config
        state: dict[str, Tensor] = {}
        known: dict[int, list[Tensor]] = {}  # parts of weights with several names: transformers
        for name, held in model.state_dict(keep_vars=True).items():  # saves one name of each
            if not isinstance(held, CodedWeight):
                state[name] = held.detach() if hasattr(held, "detach") else held
                continue
            if id(held) not in known:
                known[id(held)] = [_with_memory_of_its_own(part) for part in held.parts]
            for part_name, part in zip(parse(held.codec).parts, known[id(held)], strict=True):
                state[f"{name}.{part_name}"] = part
        import torch

        # Without this quantizer, transformers would initialise dense weights at random. The shape
        # of this tensor makes it stop instead.
        state[_sentinel(self.quantization_config.weights)] = torch.empty(0, 0)
        return state, {}


# transformers' decorators would refuse a name that an earlier import of this module registered.
AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = MemeffConfig
AUTO_QUANTIZER_MAPPING[METHOD] = MemeffQuantizer


def know(model: nn.Module) -> None:
    """Make every transformers model inside a model save its compressed weights in compressed form.

    Models of these kinds still save dense weights:

    - a model without compressed weights;
    - a model with sharded parameters;
    - a model that another quantizer has changed.
    """
    from transformers import PreTrainedModel

    from memeff_compile import compat
    from memeff_compile.model.weights.compress import compressed_weights

    theirs: list[Theirs] = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    for module in theirs:
        known = getattr(module, "hf_quantizer", None)
        if known is not None and not isinstance(known, MemeffQuantizer):
            continue
        is_cut = any(compat.is_dtensor(each) for each in module.parameters())
        if is_cut or not compressed_weights(module):
            _forget(module)
            continue
        # The Trainer, `.to(dtype)` and a compiled wrapper then treat it as a usual model.
        module.is_quantized = False
        if known is None:
            known = module.hf_quantizer = MemeffQuantizer(MemeffConfig())
            known.conversions = getattr(module, "_weight_conversions", None)
        module.quantization_method = METHOD
        module._weight_conversions = []  # the folder uses the modules' parameter names


def _forget(module: Theirs) -> None:
    known = getattr(module, "hf_quantizer", None)
    if not isinstance(known, MemeffQuantizer):
        return
    module._weight_conversions = known.conversions
    undo: Any = known.remove_quantization_config
    undo(module)


def _with_memory_of_its_own(part: Tensor) -> Tensor:
    """Return `part`, or a copy of `part`, as a tensor with a storage of its own, for saving.

    `part` is one of the tensors of a compressed weight, such as the codes or signs of its elements.
    These tensors may share one storage. If this function copies `part`, the copy is in CPU memory,
    so saving needs no GPU memory.
    """
    return part.to("cpu", copy=True) if part.nbytes != part.untyped_storage().nbytes() else part


def _describe(said: MemeffConfig, model: Theirs) -> None:
    """Update the entry in config.json that describes a model's compressed weights."""
    from memeff_compile.kernels.coded_weight import bits_per_weight, parse
    from memeff_compile.model.weights.compress import compressed_weights
    from memeff_compile.model.weights.compressed_file import checksum, digests

    coded: dict[str, CodedWeight] = compressed_weights(model)
    marks = {
        id(weight): f"{weight.codec} {checksum([part.detach().cpu() for part in weight.parts]):08x}"
        for weight in coded.values()
    }
    every = model.named_parameters(remove_duplicate=False)
    said.weights = {name: marks[id(each)] for name, each in every if id(each) in marks}
    form = parse(next(iter(coded.values())).codec)
    said.codec, said.mantissa, said.block = form.family, form.mantissa, form.block or said.block
    said.dtype = str(model.dtype).removeprefix("torch.")
    count = sum(weight.numel() for weight in coded.values())
    said.bits = round(bits_per_weight(sum(w.coded_bytes for w in coded.values()), count), 3)
    said.buffers = digests(model)


def _sentinel(weights: Mapping[str, str]) -> str:
    """Return the name of the empty tensor that is saved with a compressed model.

    Because of this tensor, transformers raises an error if it loads the saved folder without
    `MemeffQuantizer`."""
    return max(weights)


def _here_of(model: Theirs, saved: str, known: Mapping[str, object]) -> str | None:
    prefix = f"{model.base_model_prefix}."
    every = (saved, prefix + saved, saved.removeprefix(prefix))
    return next((each for each in every if each in known), None)


def _offloads(hook: Theirs) -> bool:
    """Return whether a hook of accelerate moves weights to the device at each call of a module."""
    return any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,)))


def _refuse_offloading(what: str) -> None:
    raise CodedWeightError(
        f"the device_map keeps {what or 'the model'} on the disk or in host memory and moves it to "
        "another device in each call, which compressed weights do not support. Use a device_map "
        "without 'disk', and without 'cpu' next to GPUs, or a smaller codec."
    )
