"""Save and load packed ternary models with transformers' save_pretrained and from_pretrained.

config.json lists the packed linear layers, and from_pretrained creates these layers before it loads
weights. This module is imported as soon as transformers loads its own quantizers. The model classes
of transformers are imported later. So this module imports model classes and packed layers only when
a packed model is used.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from memeff_compile.errors import UnsupportedInputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from memeff_compile.model.ternary.layers import PackedTernaryLinear

METHOD = "memeff_ternary"


class PackedTernaryConfig(QuantizationConfigMixin):
    """The entry in config.json that describes a model with packed ternary weights (two bits each).

    The entry has the paths of the packed linear layers.
    """

    def __init__(
        self,
        linears: dict[str, str] | None = None,  # path -> how the layer quantises its input
        bias_dtypes: dict[str, str] | None = None,  # dtypes of biases if not the model's
        norm_eps: dict[str, float] | None = None,  # eps of layers with a norm
        low_bit_heads: dict[str, int] | None = None,  # settings of use_low_bit_heads_
        **_: object,
    ) -> None:
        self.quant_method: Any = METHOD
        self.linears, self.bias_dtypes = linears or {}, bias_dtypes or {}
        self.norm_eps, self.low_bit_heads = norm_eps or {}, low_bit_heads or {}

    def get(self, name: str, default: object = None) -> Any:  # noqa: ANN401
        """Return a value by key, because from_pretrained treats a config like a dictionary."""
        return getattr(self, name, default)


class PackedTernaryQuantizer(HfQuantizer):
    """A transformers quantizer that creates the linear layers whose ternary weights were packed
    (two bits each) in a saved model.

    The packed weights of these layers are loaded like other buffers.
    """

    quantization_config: PackedTernaryConfig
    # transformers' name for "loads only models that were packed before"
    requires_calibration = True
    is_trainable = False
    is_compileable = True

    def is_serializable(self) -> bool:
        """Return True, because packed ternary weights are buffers, which can be saved."""
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], Any]:
        """Return the tensors to save, and list the packed linear layers in the model's config.

        The weights of packed linear layers are ternary and take two bits each. An empty tensor is
        also saved as the `weight` of the last packed linear layer. Without this tensor, a process
        in which this quantizer is not registered would silently load random dense weights. With it,
        transformers raises an error, because the shape of the weight is wrong.
        """
        for path, linear in _packed(model).items():
            if not isinstance(linear.norm, _norm() | None):
                raise UnsupportedInputError(
                    f"{path} norms its input by a {type(linear.norm).__name__}, and config.json "
                    "can name a LlamaRMSNorm alone, as transformers' BitNet layers have. Use "
                    "torch.save(model.state_dict())."
                )
        marked = _mark(model)
        import torch

        state: dict[str, Tensor] = model.state_dict()
        state[f"{list(marked.linears)[-1]}.weight"] = torch.empty(0, 0)
        return state, {}

    def _process_model_before_weight_loading(self, model: Any, **_: object) -> None:  # noqa: ANN401
        marked, prefix = self.quantization_config, f"{model.base_model_prefix}."
        dense = dict(model.named_modules(remove_duplicate=False))
        made: dict[nn.Module, PackedTernaryLinear] = {}
        for path, kind in marked.linears.items():
            # A base model is loaded from the file of one with a head, and the other way round.
            found = [p for p in (path, prefix + path, path.removeprefix(prefix)) if p in dense]
            for here in found[:1]:
                if (old := dense[here]) not in made:
                    kept, eps = marked.bias_dtypes.get(path), marked.norm_eps.get(path)
                    made[old] = _skeleton(here, old, kind, kept, eps)
                model.set_submodule(here, made[old])
                model._keys_to_ignore_on_load_unexpected.add(f"{re.escape(path)}\\.weight$")
        if not made:
            raise UnsupportedInputError(
                f"config.json names packed ternary linears, as {[*marked.linears][:2]}, and "
                f"{type(model).__name__} has none of them. Load it as the class that was saved."
            )

    def _process_model_after_weight_loading(self, model: nn.Module, **_: object) -> nn.Module:
        for path, linear in _packed(model).items():
            for name, value in linear.named_buffers(recurse=False):
                # A file system path has no meaning here, and the checkpoint's value is kept.
                if not (value.is_meta or getattr(value, "_is_hf_initialized", False)):
                    raise UnsupportedInputError(
                        f"The checkpoint has no {path}.{name}, and the config says that this "
                        "linear is packed. Where the checkpoint is dense, give it a config without "
                        "quantization_config; else save the packed model again."
                    )
        if heads := self.quantization_config.low_bit_heads:
            from memeff_compile.model.low_bit_heads import use_low_bit_heads_

            use_low_bit_heads_(model, **heads)
        know(model)
        return model


# Not by transformers' decorators, which refuse a name that an earlier import has taken.
AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = PackedTernaryConfig
AUTO_QUANTIZER_MAPPING[METHOD] = PackedTernaryQuantizer


def know(model: nn.Module) -> set[nn.Module]:
    """Make `save_pretrained` list the packed linear layers of a model in config.json.

    The weights of packed linear layers are ternary and take two bits each. Every transformers model
    inside `model` that contains packed linear layers is changed. The function returns the changed
    models.
    """
    from transformers import PreTrainedModel

    marked: dict[int, PackedTernaryConfig] = {}  # by config, by the outermost of its models
    holders = [m for m in model.modules() if isinstance(m, PreTrainedModel) and _packed(m)]
    for module in cast("list[Any]", holders):
        # Saving must not undo the quantizer that a BitNet checkpoint was loaded with.
        if (steps := getattr(module, "_weight_conversions", None)) is not None:
            module._weight_conversions = [s for s in steps if not _of_a_quantizer(s)]
        config = id(module.config)
        marked[config] = marked.get(config) or _mark(module)
        module.is_quantized, module.quantization_method = True, METHOD
        module.hf_quantizer = PackedTernaryQuantizer(marked[config])
    return set(holders)


def _of_a_quantizer(step: Any) -> bool:  # noqa: ANN401
    return any(hasattr(each, "hf_quantizer") for each in getattr(step, "operations", ()))


def _norm() -> type[nn.Module]:
    norm: type[nn.Module] = import_module("transformers.models.llama.modeling_llama").LlamaRMSNorm
    return norm


def _packed(model: nn.Module) -> dict[str, PackedTernaryLinear]:
    from memeff_compile.model.ternary.layers import PackedTernaryLinear

    everything = model.named_modules(remove_duplicate=False)
    return {p: module for p, module in everything if isinstance(module, PackedTernaryLinear)}


def _mark(model: Any) -> PackedTernaryConfig:  # noqa: ANN401
    """Record the paths and settings of a model's packed linear layers in the model's config.

    The weights of packed linear layers are ternary and take two bits each.
    """
    from memeff_compile.model.low_bit_heads import heads_of

    marked = PackedTernaryConfig()
    for path, linear in _packed(model).items():
        marked.linears[path] = linear.kind
        if linear.bias is not None and linear.bias.dtype != model.dtype:
            marked.bias_dtypes[path] = str(linear.bias.dtype).removeprefix("torch.")
        if isinstance(linear.norm, _norm()):
            marked.norm_eps[path] = cast("float", linear.norm.variance_epsilon)
    marked.low_bit_heads = heads_of(model) or {}
    model.config.quantization_config = marked
    return marked


def _skeleton(
    path: str, dense: nn.Module, kind: str, kept: str | None, eps: float | None
) -> PackedTernaryLinear:
    import torch

    from memeff_compile.model.ternary.layers import PackedTernaryLinear

    if not isinstance(dense, torch.nn.Linear):
        raise UnsupportedInputError(
            f"config.json says that {path} is a packed ternary linear, and this model has a "
            f"{type(dense).__name__} there. Load it as the class that was saved."
        )
    bias: Tensor | None = dense.bias
    rows, columns = dense.out_features, dense.in_features
    with torch.device("meta"):
        if bias is not None:
            bias = torch.empty(rows, dtype=getattr(torch, kept) if kept else bias.dtype)
        norm = None if eps is None else _norm()(columns, eps=eps)
        codes = torch.empty(rows, -(-columns // 16), dtype=torch.int32)
        scale = torch.empty((), dtype=torch.float32)
    return PackedTernaryLinear(codes, scale, bias, in_features=columns, kind=kind, norm=norm)
