"""Convert models to ternary weights, and pack the weights, in place (ternarize_ and
pack_ternary_)."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn

from memeff_compile import compat
from memeff_compile.errors import MemeffError, OptionError, UnsupportedInputError
from memeff_compile.kernels.ternary_linear import ternary_linear_pack, ternary_linear_repack
from memeff_compile.model.changes import Changes, keep, require_module
from memeff_compile.model.ternary.activations import (
    GatedMLP,
    gated_mlp,
    other_activations,
    require_activation,
    require_gated,
    square,
    unsquare,
)
from memeff_compile.model.ternary.layers import (
    PackedTernaryLinear,
    TernaryLinear,
    codes_per_unit,
    require_kind,
)
from memeff_compile.report import format_bytes
from memeff_compile.system import Undone

Model = TypeVar("Model", bound=nn.Module)

_ROLES = {
    "attention input": (
        "q_proj k_proj v_proj qkv_proj query key value wq wk wv wqkv Wqkv qkv query_key_value "
        "q_lin k_lin v_lin attn.c_attn SelfAttention.q SelfAttention.k SelfAttention.v "
        "EncDecAttention.q EncDecAttention.k EncDecAttention.v"
    ),
    "attention output": (
        "o_proj out_proj wo out_lin self_attn.dense self_attention.dense attention.dense "
        "attention.output.dense attn.c_proj SelfAttention.o EncDecAttention.o"
    ),
    "gate or up": (
        "gate_proj up_proj gate_up_proj w1 w3 fc1 fc_in c_fc lin1 dense_h_to_4h intermediate.dense "
        "DenseReluDense.wi DenseReluDense.wi_0 DenseReluDense.wi_1"
    ),
    "down": (
        "down_proj w2 fc2 fc_out lin2 dense_4h_to_h mlp.c_proj output.dense DenseReluDense.wo"
    ),
}
"""The last parts of module paths, by the projection's role; the longest match counts."""

_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names.split()}

RECIPES: dict[str, dict[str, str]] = {
    name: dict(zip(_ROLES, kinds.split(), strict=True))
    for name, kinds in {
        "b1.58": "int8 int8 int8 int8",
        "a4.8": "int4 topk8 int4 int8",
        "a4.8-fp4": "fp4 fp4 fp4 int8",
    }.items()
}
"""How each projection's input is quantised (BitNet a4.8, figure 1 and section 2.3)."""

_FOR_SQUARED_RELU = ("a4.8", "a4.8-fp4")


def ternarize_(
    model: Model,
    recipe: str = "b1.58",
    *,
    kinds: Mapping[str, str] | None = None,
    skip: Iterable[str] = (),
    activation: str | None = None,
    low_bit_heads: int | Mapping[str, int] | None = None,
) -> Model:
    """Replace the linear layers of a model by trainable ternary ones, in place; return the model.

    `verb_report(model)` lists the layers and how each of them quantises its input tokens.

    Parameters stay the same objects under the same names, so that optimizers, checkpoints and state
    dicts of the model remain valid. Output projections (`get_output_embeddings()`, `lm_head`)
    and linear layers that share their weight with an embedding stay dense. If the model is already
    ternary, this call only changes how inputs are quantised. The second stage of BitNet a4.8 begins
    with such a call (see `TernaryStages`).

    Args:
        model: Any module; its linear layers of the exact class `nn.Linear` are changed.
        recipe: how linear layers quantise their inputs. "b1.58": INT8 in all layers. "a4.8": INT4
            in the query, key, value, gate and up projections, INT8 in the down projection. The
            attention output projection gets INT8 for the half of the elements with the largest
            magnitudes. "a4.8-fp4": INT8 in the down projection, FP4 in all others.
        kinds: A mapping from patterns of module paths to "int8", "int4", "fp4" or "topk8" (INT8 for
            the half of the elements with the largest magnitudes). This mapping overrides the
            recipe. Modules whose names the recipe does not know must be in this mapping. If several
            patterns match a path, the first pattern counts.
        skip: Patterns for paths of modules that stay dense. `verb_report` names each pattern that
            matches no module.
        activation: "relu2" puts the squared ReLU of BitNet a4.8 into every gated MLP, and its name
            into the model's config. You must train the model afterwards. If `activation` is
            None, activation functions stay unchanged. The recipes "a4.8" and "a4.8-fp4" were
            designed for the squared ReLU. With one of these two recipes and `activation=None`,
            `verb_report` names the activation functions of gated MLPs that are not the squared
            ReLU.
        low_bit_heads: The number of bits of keys and values in attention, or the settings of
            `use_low_bit_heads_` as a mapping. If `low_bit_heads` is None, attention stays
            unchanged.

    Raises:
        OptionError: The recipe or a kind is unknown. The model has no linear layer to change, or
            one whose name the recipe does not know. A linear layer with hooks or parametrisations
            also raises this error, because they would be lost. If you pass `activation`, an MLP in
            which no activation function can be replaced also raises this error. If you pass
            `low_bit_heads`, a model that does not support low-bit heads also raises this error.

    Example:
        >>> memeff_compile.ternarize_(model, "a4.8", activation="relu2")  # doctest: +SKIP
    """
    plan = plan_of(model, recipe, kinds=kinds, skip=skip, activation=activation)
    heads = _use_heads(model, low_bit_heads)
    made: dict[nn.Module, TernaryLinear] = {}
    for linear, kind in plan.chosen.values():
        if isinstance(linear, TernaryLinear):
            linear.kind = kind
        elif linear not in made:  # one that holds the very parameters of the dense one
            sizes = linear.in_features, linear.out_features
            new = TernaryLinear(*sizes, bias=False, device="meta", kind=kind)
            new.weight, new.bias, new.was_dense = linear.weight, linear.bias, True
            made[linear] = new.train(linear.training)
    _replace(model, made, "linear")
    squared, unsaved = square(plan.mlps, model) if activation else ({}, {})
    places = {path: kind for path, (_, kind) in plan.chosen.items()}
    sentence = f"{len(plan.chosen)} linears ternary by {recipe!r}, {len(plan.left)} left dense"
    if count := len(squared):
        sentence += f"; the squared ReLU in {count} gated MLP{'s' * (count > 1)}"
    others = {} if activation or recipe not in _FOR_SQUARED_RELU else other_activations(plan.mlps)
    if others:
        names = ", ".join(sorted(set(others.values())))
        sentence += f"; into down goes {names}, where {recipe!r} is made for the squared ReLU"
    if heads:
        sentence += f"; {heads}"
    for each in plan.unmatched:
        sentence += f"; skip names {each!r}, but no module has this path (model.named_modules())"
    unlike = dict.fromkeys(others, "the recipe's is the squared ReLU: pass activation='relu2'")
    left = {**plan.left, **unlike, **unsaved}
    keep(model, "ternarize_", Changes("ternarize_", sentence, {**places, **squared}, left))
    return model


@dataclass(frozen=True)
class Plan:
    """The changes that one call of `ternarize_` makes; the function checks all changes before it
    makes the first one."""

    chosen: dict[str, tuple[nn.Linear, str]]  # linears by path, and how each quantises tokens
    left: dict[str, str]  # linears that stay dense, and why
    mlps: list[GatedMLP]
    unmatched: list[str]  # patterns to skip that match no module


def plan_of(
    model: nn.Module,
    recipe: str,
    *,
    kinds: Mapping[str, str] | None = None,
    skip: Iterable[str] = (),
    activation: str | None = None,
) -> Plan:
    """Return the changes that `ternarize_` would make, or raise the errors that it would raise."""
    require_recipe(recipe)
    require_activation(activation)
    require_module(model, "ternarize_")
    dense, modules = _kept_dense(model), dict(model.named_modules())
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    chosen: dict[str, tuple[nn.Linear, str]] = {}
    for path, module in modules.items():
        if _is_linear(module) and module not in dense and not _fits(path, skip):
            chosen[path] = module, _kind_of(path, recipe, kinds or {})
    if not chosen:
        raise OptionError(
            "ternarize_ found no linear to change: the model has no nn.Linear but its head, or "
            "skip names them all."
        )
    for path, (linear, _) in chosen.items():
        _require_replaceable(path, linear)
        if isinstance(modules[path.rpartition(".")[0]], nn.TransformerEncoderLayer):
            raise OptionError(
                f"{path} is part of an nn.TransformerEncoderLayer, which reads its weight directly "
                "in eval mode: it would be dense there. Name it in skip, or write the block "
                "yourself."
            )
    mlps = _mlps(modules, chosen)
    if activation:
        require_gated(mlps)
    why = "skip names it", "an output head, or tied to an embedding"
    left = {p: why[m in dense] for p, m in modules.items() if _is_linear(m) and p not in chosen}
    unmatched = [each for each in skip if not any(_fits(path, (each,)) for path in modules)]
    return Plan(chosen, left, mlps, unmatched)


def _mlps(modules: Mapping[str, nn.Module], chosen: Iterable[str]) -> list[GatedMLP]:
    """Return the MLPs that contain the selected down projections."""
    roles: dict[str, dict[str, str]] = {}
    for path in chosen:
        parent, _, name = path.rpartition(".")
        roles.setdefault(parent, {})[name] = _role_of(path)
    return [
        gated_mlp(parent, modules[parent], of_children)
        for parent, of_children in roles.items()
        if "down" in of_children.values()
    ]


def _use_heads(model: nn.Module, low_bit_heads: int | Mapping[str, int] | None) -> str:
    """Make attention round queries, keys and values; return a sentence for `ternarize_`'s report.

    `low_bit_heads` is the number of bits of keys and values, or settings of `use_low_bit_heads_`.
    If `low_bit_heads` is None, attention stays unchanged and the sentence is "".
    """
    if low_bit_heads is None:
        return ""
    from memeff_compile.model.low_bit_heads import (
        full_heads_again,
        heads_of,
        settings_of,
        use_low_bit_heads_,
    )

    wanted, before = settings_of(low_bit_heads), heads_of(model)
    if before is not None:
        full_heads_again(model)
    try:
        return use_low_bit_heads_(model, **wanted).what
    except MemeffError:
        if before is not None:
            use_low_bit_heads_(model, **before)
        raise


def dense_again(model: nn.Module) -> Undone:
    """Turn the ternary linear layers that `ternarize_` created back into dense linear layers with
    the same parameters.

    `memeff_compile.undo` calls this function.
    """
    made: dict[nn.Module, nn.Module] = {}
    found: dict[str, str] = {}
    left: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, PackedTernaryLinear):
            left[path] = "packed, so its full-precision weight is gone: load the model again"
        if not isinstance(module, TernaryLinear) or not module.was_dense:
            continue
        why = _bound(path, module)
        if why:
            left[path] = why
            continue
        sizes = module.in_features, module.out_features
        linear = nn.Linear(*sizes, bias=False, device="meta")
        linear.weight, linear.bias = module.weight, module.bias
        made[module] = linear.train(module.training)
        found[path] = f"dense, was ternary by {module.kind!r}"
    _replace(model, made, "ternary linear")
    said = []
    if count := len(found):
        said.append(f"{count} ternary linear{'s' * (count > 1)} dense again")
    back, squared = unsquare(model)
    if count := len(back):
        said.append(f"{count} activation{'s' * (count > 1)} of gated MLPs back")
    return Undone(", ".join(said), {**found, **back}, {**left, **squared})


def _bound(path: str, module: TernaryLinear) -> str:
    """Return the reason why another module cannot replace a ternary linear layer, or ""."""
    if not path:
        return "it is the whole model, which cannot be replaced in place"
    if compat.is_dtensor(module.weight):
        return "its weight is cut over processes, which hold on to the module"
    try:
        _require_replaceable(path, module)
    except OptionError as error:
        return str(error)
    return ""


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear or isinstance(module, TernaryLinear)


def require_recipe(recipe: str) -> None:
    """Raise OptionError for an unknown recipe; a recipe, such as "a4.8", says how layers quantise
    inputs."""
    if recipe not in RECIPES:
        known = ", ".join(map(repr, RECIPES))
        raise OptionError(f"The recipe is {recipe!r}; one of {known} is needed.")


def _kept_dense(model: nn.Module) -> set[nn.Module]:
    """Return the output projections, and the linear layers that share their weight with an
    embedding."""
    found: set[nn.Module] = set()
    for path, module in model.named_modules():
        if path.split(".")[-1] == "lm_head":
            found.add(module)
        head = getattr(module, "get_output_embeddings", None)
        given = head() if callable(head) else None
        if isinstance(given, nn.Module):
            found.add(given)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    found |= {m for m in model.modules() if isinstance(m, nn.Linear) and id(m.weight) in tables}
    return found


def _fits(path: str, patterns: Iterable[str]) -> bool:
    given = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(path, p) or path.startswith(f"{p}.") for p in given)


def _kind_of(path: str, recipe: str, kinds: Mapping[str, str]) -> str:
    for pattern, kind in kinds.items():
        if _fits(path, (pattern,)):
            try:
                return require_kind(kind)
            except UnsupportedInputError as error:
                raise OptionError(f"kinds[{pattern!r}]: {error}") from None
    by_role = RECIPES[recipe]
    if len(set(by_role.values())) == 1:
        return next(iter(by_role.values()))
    if role := _role_of(path):
        return by_role[role]
    raise OptionError(
        f"The recipe {recipe!r} needs the role of each projection and finds none in the name "
        f"{path!r}; known names are {', '.join(_ROLE_OF)}. Give it a "
        f"kind, as in kinds={{{path!r}: 'int8'}}, or name it in skip."
    )


def _role_of(path: str) -> str:
    """Return the role of a linear layer in its transformer block, such as "down".

    The layer's name tells the role. Return "" if the name is unknown."""
    parts = path.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))  # the longest first
    return next((_ROLE_OF[end] for end in ends if end in _ROLE_OF), "")


def _require_replaceable(path: str, module: nn.Module) -> None:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name, None) for name in hooks):
        raise OptionError(
            f"{path} has hooks, which would be lost with the module. Register them afterwards."
        )
    if hasattr(module, "parametrizations"):
        raise OptionError(
            f"{path} has parametrisations, which would be lost with the module. Remove them first "
            "(torch.nn.utils.parametrize.remove_parametrizations)."
        )
    known = {"weight", "bias", "rms_norm", "weight_scale"}
    others = {*module._parameters, *module._buffers, *module._modules} - known
    if others or "forward" in vars(module):
        what = f"holds {', '.join(sorted(others))}" if others else "has a forward of its own"
        raise OptionError(
            f"{path} {what}, which would be lost with the module. Leave it out"
            " (skip in ternarize_), or take it out of the linear."
        )


def _replace(model: nn.Module, made: Mapping[nn.Module, nn.Module], what: str) -> None:
    """Replace modules by new modules everywhere in the model.

    `what` is the word for an old module in error messages.
    """
    if model in made:
        raise OptionError(
            f"The model is itself a {what}, which cannot be replaced in place. Put it into a "
            "module, as in nn.Sequential(linear)."
        )
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in made:
                setattr(parent, name, made[child])


@torch.no_grad()
def pack_ternary_(model: Model, *, layers: Mapping[type, str] | None = None) -> Model:
    """Pack the ternary weights of a model into two bits each, in place, for inference.

    The function returns the model.

    `verb_report(model)` lists the linear layers and their sizes in bytes.

    The full-precision weights are freed. Packed weights take an eighth of the memory of bf16
    weights. The function packs the linear layers that `ternarize_` makes. The function also packs
    the linear layers of transformers' BitNet models: `AutoBitLinear`, online and offline, and the
    packed `BitLinear`. Some of these transformers classes multiply the ternary values by the
    weight's scale, others divide them by the scale. A packed layer always divides.
    `save_pretrained` saves packed transformers models, and `from_pretrained` loads them in packed
    form after memeff_compile was imported. To load a state dict, create the model, call
    `ternarize_` and `pack_ternary_` on it, and then load.

    Args:
        model: Any module that contains ternary linear layers.
        layers: Further classes of linear layers to pack, each with the kind of its input
            quantisation. The kinds are "int8", "int4", "fp4" and "topk8" (INT8 for the half of the
            elements with the largest magnitudes). The classes must be subclasses of nn.Linear that
            quantise weights by their mean absolute value.

    Raises:
        OptionError: There is no linear layer to pack, or one has hooks or parametrisations.
        UnsupportedInputError: The weight of an offline `AutoBitLinear` has values other than -1, 0
            and 1.

    Example:
        >>> memeff_compile.pack_ternary_(model)  # doctest: +SKIP
    """
    require_module(model, "pack_ternary_")
    made: dict[nn.Module, nn.Module] = {}
    places: dict[str, str] = {}
    before = after = 0
    for path, module in model.named_modules():
        packed = _packed(path, module, layers or {}) if module not in made else None
        if packed is not None:
            made[module] = packed.train(module.training)
            places[path] = packed.kind
            before, after = before + module.weight.nbytes, after + packed.packed.nbytes
    if not made and not any(isinstance(m, PackedTernaryLinear) for m in model.modules()):
        raise OptionError(
            "pack_ternary_ found no ternary linear: none of TernaryLinear, AutoBitLinear and "
            "BitLinear. Call ternarize_(model) first, or name your own class in layers."
        )
    _replace(model, made, "ternary linear")
    _save_as_packed(model)
    sentence = f"{len(places)} linears packed, {format_bytes(after)} for {format_bytes(before)}"
    keep(model, "pack_ternary_", Changes("pack_ternary_", sentence, places, None))
    return model


def _save_as_packed(model: nn.Module) -> None:
    """Prepare the transformers models inside a model, so that `save_pretrained` saves packed
    weights; raise an error if this is not possible."""
    known: set[nn.Module] = set()
    for module in model.modules():
        is_saved = callable(getattr(type(module), "save_pretrained", None))
        if is_saved and any(isinstance(part, PackedTernaryLinear) for part in module.modules()):
            if "transformers.modeling_utils" in sys.modules and not known:
                known = import_module("memeff_compile.model.ternary.pretrained").know(model)
            if module not in known:
                object.__setattr__(module, "save_pretrained", _refuse_to_save)


def _refuse_to_save(*_: object, **__: object) -> None:
    raise UnsupportedInputError(
        "save_pretrained of this class would write packed ternary weights that its from_pretrained "
        "does not know. Save the transformers model inside it, or the model before pack_ternary_; "
        "or torch.save(model.state_dict()), and load it into a model made ready by ternarize_ and "
        "pack_ternary_."
    )


def _packed(path: str, module: Any, layers: Mapping[type, str]) -> PackedTernaryLinear | None:  # noqa: ANN401
    """Return a packed layer that replaces a ternary linear layer, or None for any other module."""
    home = "transformers.integrations.bitnet"
    names = {base.__name__ for base in type(module).__mro__ if base.__module__ == home}
    kinds = [require_kind(kind) for layer, kind in layers.items() if isinstance(module, layer)]
    is_ours = isinstance(module, TernaryLinear)
    if not (is_ours or kinds or names & {"AutoBitLinear", "BitLinear"}):
        return None
    _require_replaceable(path, module)
    kind = "int8"
    weight, bias, norm = module.weight.detach(), module.bias, getattr(module, "rms_norm", None)
    if is_ours or kinds or ("AutoBitLinear" in names and getattr(module, "online_quant", False)):
        kind = kinds[0] if kinds and not is_ours else getattr(module, "kind", kind)
        scale = codes_per_unit(weight)
        codes = ternary_linear_pack(weight, scale)
    elif "AutoBitLinear" in names:  # holds -1, 0 and 1, and its scale is a factor
        _require_ternary(path, weight)
        factor = _scale_of(module)
        codes = ternary_linear_pack(weight, weight.new_ones((), dtype=torch.float32))
        scale = factor.reciprocal()
        # transformers multiplies the bias by the scale too
        bias = None if bias is None else bias.detach().float() * factor
    else:  # holds codes of transformers, and its scale is a divisor
        codes, scale = ternary_linear_repack(weight), _scale_of(module)
    columns = weight.shape[1]
    return PackedTernaryLinear(codes, scale, bias, in_features=columns, kind=kind, norm=norm)


def _require_ternary(path: str, weight: Tensor) -> None:
    is_ternary = (weight == 0) | (weight.abs() == 1)
    if weight.device.type != "meta" and not bool(is_ternary.all()):
        wrong = float(weight[~is_ternary].flatten()[0])
        raise UnsupportedInputError(
            f"{path}: the weight holds {wrong}, where an offline AutoBitLinear has -1, 0 and 1. "
            "Load a checkpoint that was quantised, or use quantization_mode='online'."
        )


def _scale_of(module: Any) -> Tensor:  # noqa: ANN401
    return cast("Tensor", module.weight_scale).detach().float().reshape(())
