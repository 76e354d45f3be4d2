"""Private names of DTensor and FSDP, with which this package finds the shard of a parameter that
each rank stores."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch.utils.weak import WeakTensorKeyDictionary


def is_dtensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether `value` is a tensor spread over ranks."""
    tensor_module = sys.modules.get("torch.distributed.tensor")
    return tensor_module is not None and isinstance(value, tensor_module.DTensor)


def is_tensor_parallel(weight: torch.Tensor) -> bool:
    """Return whether each rank multiplies with only its shard of `weight`; with only FSDP2, ranks
    multiply with the whole weight."""
    return is_dtensor(weight) and getattr(_find_fsdp2_shard(weight), "is_dtensor", True)


def offset_of_part(tensor: Any) -> tuple[int, ...]:
    """Return the index at which this rank's shard of a DTensor starts."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = [int(size) for size in tensor.shape]
    given = (shape, tensor.device_mesh, tensor.placements)
    return tuple(compute_local_shape_and_global_offset(*given)[1])


def gathering_ops() -> tuple[Any, Any]:
    """Return two ops: one starts to gather a tensor from all ranks of a named group, the other
    waits until the gathering ends.

    DTensor also calls these two ops, and AOTAutograd and Inductor can compile them.
    """
    ops = torch.ops._c10d_functional
    return ops.all_gather_into_tensor.default, ops.wait_tensor.default


def ignores_gradients(hook: Any) -> bool:
    """Return whether a tensor hook belongs to FSDP2; hooks of FSDP2 do not read the gradient."""
    owner = getattr(hook, "__self__", None)
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    return states is not None and isinstance(owner, states.FSDPState)


def fsdp_shard(weight: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's shard of `weight`, or None if `weight` was not gathered by FSDP2.

    Optimizers and loaded checkpoints write to the shard, so `weight` has the new values only
    after FSDP2 gathers it again.
    """
    param, _ = _fsdp2_owner(weight)
    return cast("torch.Tensor | None", getattr(param, "sharded_param", None))


def put_fsdp_shard(module: torch.nn.Module, name: str, local: torch.Tensor) -> bool:
    """Replace this rank's shard of an FSDP2 parameter by `local`, as a parameter without gradient.

    `local` may be a tensor subclass with hooks that FSDP2 calls around its all-gather. Return
    False and replace nothing in these cases:

    - FSDP2 does not shard the parameter, or keeps its shards in CPU memory;
    - FSDP2 has gathered the parameter at this time.
    """
    old: Any = module._parameters[name]
    param = _find_fsdp2_shard(old)
    if param is None or param.offload_to_cpu or param.sharded_state.name != "SHARDED":
        return False
    new = with_local_part(old, local)
    module._parameters[name] = torch.nn.Parameter(new, requires_grad=False)
    # Replace the flat copy first: FSDP2 would look for the new shard's memory in it.
    param._sharded_param_data = local_part(module._parameters[name]).view(-1)  # type: ignore[arg-type]
    param.reset_sharded_param()
    param._init_extensions()
    return True


def is_fsdp_shard(weight: torch.Tensor) -> bool:
    """Return whether `weight` is a parameter that FSDP2 shards without CPU offloading."""
    param = _find_fsdp2_shard(weight)
    return param is not None and not param.offload_to_cpu


@dataclass(frozen=True)
class FsdpShard:
    """A parameter that FSDP2 shards, and FSDP2's settings for this parameter."""

    _param: Any

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether FSDP2 still shards `parameter`, that is, whether no other parameter has
        replaced it in its module."""
        return self._param.sharded_param is parameter

    @property
    def is_on_host(self) -> bool:
        """Return whether FSDP2 keeps this rank's shard of the parameter in host (CPU) memory."""
        return bool(self._param.offload_to_cpu)


def fsdp_shards() -> dict[int, FsdpShard]:
    """Return a dictionary of all parameters that FSDP2 shards, with each parameter's `id` as
    key."""
    return {id(param.sharded_param): FsdpShard(param) for param, _ in _fsdp2_parameters()}


def shards_by_fsdp2() -> bool:
    """Return whether FSDP2 shards at least one parameter in this process."""
    return next(_fsdp2_parameters(), None) is not None


def is_fsdp2_module(module: torch.nn.Module) -> bool:
    """Return whether FSDP2 has hooks around `module`."""
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    return states is not None and states._get_module_fsdp_state(module) is not None


def fsdp_group(weight: torch.Tensor) -> tuple[torch.nn.Module, ...]:
    """Return the modules whose parameters FSDP2 gathers together with `weight`, or ()."""
    _, group = _fsdp2_owner(weight)
    return () if group is None else tuple(group.modules)


def sharded_with(weight: torch.Tensor) -> list[torch.nn.Module]:
    """Return all modules that FSDP2 shards under the root module that contains `weight`."""
    for state in _fsdp2_states():
        if any(module in state._modules for module in fsdp_group(weight)):
            return [module for each in state._state_ctx.all_states for module in each._modules]
    return []


def _find_fsdp2_shard(weight: torch.Tensor) -> Any:
    return next((p for p, _ in _fsdp2_parameters() if p.sharded_param is weight), None)


def _fsdp2_states() -> Iterator[Any]:
    """Yield FSDP2's objects for the modules that it shards."""
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if states is None:
        return
    from torch.distributed._composable_state import _module_state_mapping

    for entry in list(_module_state_mapping.values()):
        state = entry() if isinstance(entry, weakref.ref) else entry
        if isinstance(state, states.FSDPState):
            yield state


def _fsdp2_parameters() -> Iterator[tuple[Any, Any]]:
    """Yield FSDP2's object for each parameter that it shards, and its object for the parameter's
    group."""
    for state in _fsdp2_states():
        for group in _groups_of(state):
            for param in group.fsdp_params:
                yield param, group


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # one group, unnumbered, before 2.12
    every = (state._fsdp_param_group,) if groups is None else groups
    return [group for group in every if group is not None]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's local tensor of a distributed tensor."""
    return cast("torch.Tensor", getattr(tensor, "_local_tensor", tensor))


def with_local_part(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a distributed tensor that is like `tensor`, except that this rank's local tensor is
    `local`."""
    from torch.distributed.tensor import DTensor

    like: Any = tensor
    how = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    made = DTensor.from_local(local, like.device_mesh, like.placements, **how)
    return cast("torch.Tensor", made)


def fsdp_frees_after_forward(weight: Any) -> bool:
    """Return whether FSDP frees `weight` at the end of its module's forward pass.

    FSDP1 always frees the weight. FSDP2 frees the weight, except in the outermost group and in
    groups with `reshard_after_forward=False`.
    """
    if not isinstance(weight, torch.Tensor):
        return False
    if _is_fsdp1_view(weight):
        return True
    param, group = _fsdp2_owner(weight)
    return param is not None and getattr(group, "post_forward_mesh_info", group) is not None


def awaits_backward(module: torch.nn.Module) -> bool:
    """Return whether an FSDP2 module has run its forward pass but has not yet finished its backward
    pass.
    """
    if torch._C._current_graph_task_id() != -1:
        return True
    groups = (g for state in _fsdp2_states() if module in state._modules for g in _groups_of(state))
    return any(group._post_forward_indices for group in groups)


def keep_gathered(module: torch.nn.Module, stays: bool) -> None:
    """If `stays` is true, keep the parameters of an FSDP2 module gathered after its forward pass.

    If `stays` is false, restore the user's setting `reshard_after_forward`.
    """
    for state in _fsdp2_states():
        if module not in state._modules:
            continue
        for group in _groups_of(state):
            now, kept = group.post_forward_mesh_info, vars(group)
            if stays and now is not None:
                kept["memeff_after_forward"], group.post_forward_mesh_info = now, None
            elif not stays and "memeff_after_forward" in kept:
                group.post_forward_mesh_info = kept.pop("memeff_after_forward")


def free_last_gather(module: torch.nn.Module) -> None:
    """Free the buffer to which FSDP2's latest all-gather wrote.

    FSDP2 itself frees the buffer at the next all-gather, or after the root module's forward pass.
    When this function runs, FSDP2 has already started to copy the weights out of the buffer. Later
    all-gathers must wait for these copies. So this function first makes the streams of all-gathers
    wait for the copies, and then frees the buffer.
    """
    for state in _fsdp2_states():
        if module not in state._modules:
            continue
        context = state._comm_ctx
        if hasattr(context, "release_all_gather_state_for_comm_reuse"):  # since torch 2.15
            context.release_all_gather_state_for_comm_reuse()
        elif (last := context.all_gather_state) is not None:
            _groups_of(state)[0]._wait_all_gather_streams_on_event(last.event)
            context.all_gather_state = None


def is_sharded_by_fsdp(weight: torch.Tensor) -> bool:
    """Return whether `weight` was gathered from shards by FSDP, 1 or 2."""
    return _is_fsdp1_view(weight) or _fsdp2_owner(weight)[0] is not None


def _is_fsdp1_view(weight: torch.Tensor) -> bool:
    return any(getattr(t, "_is_flat_param", False) for t in (weight, weight._base))


# Gathered parameters live as long as their module, so each tensor is looked up once.
_fsdp2_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _fsdp2_owner(weight: torch.Tensor) -> tuple[Any, Any]:
    """Return FSDP2's object for a gathered parameter and its object for the parameter's group, or
    (None, None)."""
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return None, None
    if weight not in _fsdp2_owners:
        every = _fsdp2_parameters()
        mine = (pair for pair in every if getattr(pair[0], "_unsharded_param", None) is weight)
        found = next(mine, None)
        if found is None:  # not cached: tensors with weak references cannot be swapped
            return None, None
        _fsdp2_owners[weight] = tuple(map(weakref.ref, found))
    param, group = (reference() for reference in _fsdp2_owners[weight])
    return param, group
