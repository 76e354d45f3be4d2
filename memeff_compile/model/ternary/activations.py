"""Find the activation function of a model's gated MLPs, and replace it by BitNet a4.8's squared
ReLU.

BitNet a4.8 is designed for `down(relu(gate(x)) ** 2 * up(x))`. Model classes use different names
for the layers of a gated MLP. So this module runs each MLP's forward with its layers replaced by
stand-ins that return known numbers. The results show which module is the activation function.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from memeff_compile.errors import OptionError
from memeff_compile.model.ternary.layers import PackedTernaryLinear, SquaredReLU

ACTIVATIONS = ("relu2",)
CONFIG_KEYS = ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn")
"""Entries of a config that name the activation of a model's MLPs."""

_TOKENS = 2


@dataclass(frozen=True)
class GatedMLP:
    """The activation function of a gated MLP, which the squared ReLU can replace.

    If no function can be replaced, `why` has the reason. The function was found by running the
    MLP's forward with stand-in layers.
    """

    path: str
    module: nn.Module
    name: str  # name of the activation in the module, or "" if none can be replaced
    why: str  # the reason for that
    is_squared_relu: bool | None  # None if the stand-in could not run

    @property
    def activation(self) -> nn.Module:
        """Return the module of the activation function."""
        return self.module.get_submodule(self.name)

    @property
    def place(self) -> str:
        """Return the path of the activation function in the model, or the path of the MLP if the
        activation function is not a module."""
        return ".".join(filter(None, (self.path, self.name)))


class _Gives(nn.Module):
    """A stand-in layer that returns fixed numbers for any input."""

    weight = torch.empty(0)  # T5 reads its dtype

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, input: Tensor) -> Tensor:
        return self.value


class _Notes(nn.Module):
    """A stand-in layer that records its input, and returns fixed numbers or the input."""

    weight = torch.empty(0)

    def __init__(self, value: Tensor | None = None) -> None:
        super().__init__()
        self.value, self.seen = value, torch.empty(0)

    def forward(self, input: Tensor) -> Tensor:
        self.seen = input
        return input if self.value is None else self.value


def gated_mlp(path: str, module: nn.Module, roles: Mapping[str, str]) -> GatedMLP:
    """Find the activation function of a module that may be a gated MLP.

    The result's field `name` names the activation function. The squared ReLU, relu(x) ** 2, can
    replace this function. If no function can be replaced, `name` is empty, and the field `why`
    gives the reason. `roles` maps the names of the module's linear layers to their roles: "gate or
    up", or "down".
    """
    kind = type(module).__name__
    into = [name for name, role in roles.items() if role == "gate or up"]
    (down, *others) = [name for name, role in roles.items() if role == "down"]
    if others or not into or len(into) > 2 or "forward" in vars(module):
        return GatedMLP(path, module, "", f"{kind} has another form than a gated MLP", None)
    stand_in = _StandIn(module, tuple(into), down)
    plain = [name for name, child in module.named_children() if _may_activate(child)]
    found = [name for name in plain if stand_in.is_gated_by(name)]
    squares = stand_in.squares()
    if len(found) == 1:
        return GatedMLP(path, module, found[0], "", squares)
    if squares is None:
        why = f"{kind} is not recognised as a gated MLP"
    elif plain:
        why = f"{kind} is not gated: the input of {down} is not activation(gate) * up"
    else:
        why = f"{kind} computes its activation in forward, and has no module for it"
    return GatedMLP(path, module, "", why, squares)


def _may_activate(child: nn.Module) -> bool:
    """Return whether a module may be an activation function.

    Such a module has no children and no tensors, and is neither a dropout nor an identity.
    """
    is_plain = not (child._parameters or child._buffers or child._modules)
    return is_plain and not isinstance(child, nn.Dropout | nn.Identity)


@dataclass(frozen=True)
class _StandIn:
    """A copy of an MLP on the CPU whose layers are replaced by stand-ins that return fixed
    numbers."""

    module: nn.Module
    into: tuple[str, ...]  # gate and up, in either order, or one projection that computes both
    down: str

    def is_gated_by(self, name: str) -> bool:
        """Return whether the down projection's input is activation(gate) * up for a given
        activation function."""
        first, second, active = self._draw(3)
        activation = _Notes(active)
        seen = self._into_down(first, second, {name: activation})
        return any(
            _equal(activation.seen, gate) and _equal(seen, active * up)
            for gate, up in ((first, second), (second, first))
        )

    def squares(self) -> bool | None:
        """Return whether the down projection's input is relu(gate) ** 2 * up, or None if this
        cannot be found out.
        """
        first, second = self._draw(2)
        first, second = first - 1.5, second - 1.5
        plain = {n: child for n, child in self.module.named_children() if _may_activate(child)}
        seen = self._into_down(first, second, plain)
        if not seen.numel():
            return None
        orders = ((first, second), (second, first))
        return any(_equal(seen, torch.relu(gate).square() * up) for gate, up in orders)

    def _draw(self, count: int) -> list[Tensor]:
        widths = [self.module.get_submodule(each).out_features for each in self.into]
        draw = torch.Generator("cpu").manual_seed(0)
        size = 1, _TOKENS, sum(cast("list[int]", widths)) // 2
        return [torch.rand(size, generator=draw, device="cpu") + 1 for _ in range(count)]

    def _into_down(self, first: Tensor, second: Tensor, own: Mapping[str, nn.Module]) -> Tensor:
        """Run the MLP's forward with stand-ins for its modules; return the down projection's input.

        The field `into` contains the names of the gate and up projections, in either order. The
        stand-in for the first of them returns `first`, the stand-in for the other `second`. If one
        projection computes gate and up together, `into` has one name. This projection's stand-in
        returns `first` and `second` concatenated. `own` maps names of other modules of the MLP,
        such as the activation function, to the modules that run under these names. All modules
        without a stand-in or an entry in `own` become the identity. If the forward does not have
        the expected form, return an empty tensor."""
        end = _Notes()
        parts: dict[str, nn.Module] = {part: nn.Identity() for part in self.module._modules}
        parts |= {**own, self.down: end}
        if len(self.into) == 1:
            parts[self.into[0]] = _Gives(torch.cat([first, second], -1))
        else:
            parts |= zip(self.into, (_Gives(first), _Gives(second)), strict=True)
        stand_in = copy.copy(self.module)
        object.__setattr__(stand_in, "_modules", parts)
        columns = cast("int", self.module.get_submodule(self.into[0]).in_features)
        try:
            with torch.no_grad(), torch.device("cpu"):
                type(self.module).forward(stand_in, torch.zeros(1, _TOKENS, columns))
        except Exception:  # whatever another form of forward lacks here
            return torch.empty(0)
        return end.seen


def _equal(found: Any, wanted: Tensor) -> bool:  # noqa: ANN401
    is_like = isinstance(found, Tensor) and found.shape == wanted.shape
    return is_like and torch.allclose(found.float(), wanted, rtol=1e-2)


def require_activation(name: str | None) -> None:
    """Raise OptionError for an unsupported activation function."""
    if name is not None and name not in ACTIVATIONS:
        raise OptionError(
            f"activation is {name!r}; 'relu2' (the paper's squared ReLU) or None is needed."
        )


def require_gated(mlps: list[GatedMLP]) -> None:
    """Raise OptionError unless the squared ReLU can replace each MLP's activation function."""
    if not mlps:
        raise OptionError(
            "activation='relu2' replaces the activation of gated MLPs, and none of the linears "
            "that become ternary is the down projection of one. Leave activation out."
        )
    for each in mlps:
        if not each.name:
            raise OptionError(
                f"activation='relu2' cannot be set in {each.path or 'the model'}: {each.why}. "
                "Write relu(gate) ** 2 * up in the model itself and leave activation out, or name "
                "the MLP in skip."
            )


def other_activations(mlps: list[GatedMLP]) -> dict[str, str]:
    """Return those activation functions of the MLPs that are not the squared ReLU, each under its
    path.
    """
    return {
        mlp.place: type(mlp.activation if mlp.name else mlp.module).__name__
        for mlp in mlps
        if mlp.is_squared_relu is False
    }


def square(mlps: list[GatedMLP], model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Replace each MLP's activation function by the squared ReLU.

    Also write the squared ReLU's name into the model's config.

    Returns:
        Two dictionaries. The first dictionary maps the path of each replaced activation function to
        a text that names the old and the new function. The second dictionary has the paths of
        configs that will not name the squared ReLU after saving and loading. For each of these
        paths, a sentence asks the user to call `ternarize_` again after loading.
    """
    said: dict[str, str] = {}
    left: dict[str, str] = {}
    configs = {path: module.config for path, module in model.named_modules() if _has_config(module)}
    for mlp in mlps:
        if mlp.is_squared_relu:
            continue
        before = mlp.activation
        ancestors = [path for path in configs if _holds(path, mlp.path)]
        own = max(ancestors, key=len, default=None)
        config = None if own is None else configs[own]
        names = {} if config is None else _names_of(config, before)
        new = SquaredReLU(before, config if names else None, names)
        setattr(mlp.module, mlp.name, new.train(before.training))
        said[mlp.place] = f"squared ReLU, was {type(before).__name__}"
        for key in names:
            setattr(config, key, "relu2")
        if own is not None and not (config is not None and _comes_back(config)):
            left[f"{own or 'model'}.config".lstrip(".")] = (
                "names another activation than the squared ReLU: after from_pretrained, call "
                "ternarize_ with activation='relu2' again"
            )
    return said, left


def unsquare(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Restore the activation functions that `square` replaced.

    `memeff_compile.undo` calls this function.

    Returns:
        The restored activation function of each MLP, by path, and the reason for each activation
        function that was not restored.
    """
    said: dict[str, str] = {}
    left: dict[str, str] = {}
    for path, parent in model.named_modules():
        for name, child in list(parent._modules.items()):
            if not isinstance(child, SquaredReLU) or child.was is None:
                continue
            place = f"{path}.{name}".lstrip(".")
            if any(isinstance(other, PackedTernaryLinear) for other in parent.children()):
                left[place] = "the packed linears around it were trained with it"
                continue
            setattr(parent, name, child.was.train(child.training))
            for key, value in child.names.items():
                setattr(child.config, key, value)
            said[place] = f"{type(child.was).__name__}, was the squared ReLU"
    return said, left


def _has_config(module: nn.Module) -> bool:
    return callable(getattr(getattr(module, "config", None), "to_dict", None))


def _holds(ancestor: str, path: str) -> bool:
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def _names_of(config: Any, activation: nn.Module) -> dict[str, str]:  # noqa: ANN401
    """Return those entries of a config that name an activation function."""
    known = getattr(sys.modules.get("transformers.activations"), "ACT2FN", {})
    found = {key: getattr(config, key, None) for key in CONFIG_KEYS}
    return {
        key: name
        for key, name in found.items()
        if isinstance(name, str) and name in known and type(known[name]) is type(activation)
    }


def _comes_back(config: Any) -> bool:  # noqa: ANN401
    """Return whether a config that names the squared ReLU would still name it after saving and
    loading."""
    saved = type(config).from_dict(config.to_dict())
    return any(getattr(saved, key, None) == "relu2" for key in CONFIG_KEYS)
