"""Remove all changes that this package made to a model (undo)."""

from __future__ import annotations

from torch import nn

from memeff_compile import compat, system
from memeff_compile.model.changes import Changes, keep, require_module
from memeff_compile.options import plain_path

BACKEND = "memeff"


def undo(model: nn.Module) -> Changes:
    """Remove all changes that this package made to a model, in place; return a report.

    The function undoes:

    - the compilation of the model, and of modules inside it, with the backend `memeff`;
    - KV caches of `compile(kv_cache=)` and `use_kv_cache_`;
    - the rounding of queries, keys and values by `use_low_bit_heads_` or `ternarize_`;
    - compressed weights, and linear layers that `ternarize_` changed. Compressed and ternary
      weights become dense, with exactly the values that they have at the time of this call.

    The original values of some weights cannot be restored: weights that were rounded
    (`compress_(mantissa=3)`), packed (`pack_ternary_`) or rotated (`rotate_hidden_states_`). The
    report lists these weights under `left`, with the reason. Modules that another backend compiled
    stay compiled. A second call makes no changes.

    Args:
        model: the model, possibly wrapped by PEFT, or the wrapper that `torch.compile` returned for
            it.

    Returns:
        A report that is also an integer, the number of changes. If you print the report, it lists
            the changes.

    Raises:
        UnsupportedInputError: The model is not a module.

    Example:
        >>> print(memeff_compile.undo(model))  # doctest: +SKIP
    """
    require_module(model, "undo")
    found = [_compiled(model), *(hooks.undo(model) for hooks in system.hooks())]
    places: dict[str, str] = {}
    left: dict[str, str] = {}
    for each in found:
        for all_of_them, its in ((places, each.places), (left, each.left)):
            for name, said in its.items():
                earlier = all_of_them.get(name)
                all_of_them[name] = f"{earlier}; {said}" if earlier else said
    what = ", ".join(each.what for each in found if each.what)
    kind = type(compat.without_compile(model)).__name__
    sentence = what or f"nothing to take back from {kind}"
    if left:
        sentence += f"; {len(left)} left as they are"
    return keep(model, "undo", Changes("undo", sentence, places, left))


def _compiled(model: nn.Module) -> system.Undone:
    """Make the modules of a model run without compilation, and replace `torch.compile` wrappers
    inside the model by the modules that they wrap."""
    places: dict[str, str] = {}
    for path, module in list(model.named_modules()):
        said = compat.undo_compile(module, BACKEND)
        if said:
            places[plain_path(path) or "(model)"] = said
            _unwrap(model, module)
    count = len(places)
    what = f"{count} compiled module{'s' * (count > 1)} uncompiled" if count else ""
    return system.Undone(what, places)


def _unwrap(model: nn.Module, wrapper: nn.Module) -> None:
    """Replace a `torch.compile` wrapper by its module, everywhere in the model."""
    original = compat.original_of(wrapper)
    if original is None:
        return
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is wrapper:
                parent._modules[name] = original
