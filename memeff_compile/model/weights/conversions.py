"""Make compressed weights from the tensors of a saved folder while transformers loads a model."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps

from memeff_compile.errors import CodedWeightError
from memeff_compile.kernels.coded_weight import CodedWeight, parse
from memeff_compile.model.weights.compress import coded_or_dense, require_layer
from memeff_compile.model.weights.compressed_file import checksum, name_in_folder

Theirs: TypeAlias = Any
"""A model of transformers, or the quantizer that loads it."""


class Join(ConversionOps):
    """A transformers conversion that assembles a compressed weight from its coded tensors.

    If a conversion raises an error, transformers prints the error in a report and later raises
    another error without the reason. So this class stores its errors in the quantizer, which raises
    the first stored error after loading.
    """

    def __init__(self, hf_quantizer: Theirs) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: object) -> Join:
        """Return the conversion itself.

        transformers copies a conversion for each weight, and the copies must refer to the same
        quantizer.
        """
        return self

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        model: Theirs = None,
        full_layer_name: str = "",
        **_: object,
    ) -> dict[str, Any]:
        try:
            coded = self._joined(input_dict, model, full_layer_name)
        except CodedWeightError as error:
            self.hf_quantizer.errors.append(error)
            return {full_layer_name: _placeholder(model.get_parameter(full_layer_name), "cpu")}
        self.hf_quantizer.loaded[full_layer_name] = coded
        return {full_layer_name: _placeholder(coded, coded.device)}

    def _joined(
        self, input_dict: dict[str, Any], model: Theirs, full_layer_name: str
    ) -> CodedWeight:
        said = self.hf_quantizer.quantization_config.weights
        saved_as = name_in_folder(model, full_layer_name, said)
        codec, crc32 = said[saved_as].split() if saved_as is not None else ("", "")
        found = {key.removeprefix("weight."): held for key, held in input_dict.items()}
        wanted = parse(codec).parts if codec else ()
        parts = [found[part][0] for part in wanted if part in found]
        path, _dot, attribute = full_layer_name.rpartition(".")
        module = model.get_submodule(path)
        shape = tuple(module._parameters[attribute].shape)
        require_layer(module, attribute, shape)
        if len(parts) != len(wanted) or not wanted:
            raise CodedWeightError(
                f"{full_layer_name}: the checkpoint holds the parts {', '.join(sorted(found))}, "
                f"but config.json names {', '.join(wanted) or 'no code'}. Save the model again."
            )
        if f"{checksum([part.cpu() for part in parts]):08x}" != crc32:
            raise CodedWeightError(
                f"{full_layer_name} does not match its checksum; the checkpoint is damaged. Copy "
                "or save it again."
            )
        return CodedWeight(parts, codec, shape)


class Encode(ConversionOps):
    """A transformers conversion that encodes a weight as soon as it is read, and frees the dense
    weight."""

    def __init__(self, hf_quantizer: Theirs) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        model: Theirs = None,
        **_: object,
    ) -> dict[str, Any]:
        own, said, made = self.hf_quantizer, self.hf_quantizer.quantization_config, {}
        codec = said.full_codec
        for name, held in input_dict.items():
            weight = held[0] if isinstance(held, list) else held
            made[name] = weight
            if name not in own.chosen:
                continue
            if weight.shape != model.get_parameter(name).shape:  # transformers reports the mismatch
                own.chosen.discard(name)
                continue
            coded, about = coded_or_dense(name, weight, codec)
            own.report.append(about)
            if coded is not None:
                own.loaded[name] = coded
                made[name] = _placeholder(coded, coded.device)
        return made


def _placeholder(weight: Tensor, device: torch.device | str) -> Tensor:
    """Return a placeholder for a compressed weight.

    The placeholder has the weight's shape, but takes only the memory of one number.

    accelerate reads the addresses of parameters when it distributes a model over several devices,
    and a compressed weight has no usable address.
    """
    number = torch.full((), torch.nan, dtype=weight.dtype, device=device)
    return torch.nn.Parameter(number.expand(weight.shape), requires_grad=False)
