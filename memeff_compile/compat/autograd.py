"""Private names of torch's autograd: checkpoints, autocast, transforms, hooks, and saved
tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.autograd import forward_ad
from torch.fx import GraphModule, Node, traceback
from torch.optim import optimizer as optimizers
from torch.utils import checkpoint

from .tensors import outside_dispatch_modes


def has_checkpoint_policy(gm: GraphModule) -> bool:
    """Return whether an activation checkpoint has a `context_fn`, which chooses the tensors that
    the checkpoint saves."""
    return gm.meta.get("_checkpoint_context_fn") is not None


leave_autocast: Callable[..., None] = torch.amp.autocast_mode._exit_autocast
"""Close an autocast region in a captured graph; the argument is the node that opened it."""

_KEPT = "memeff_kept"
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::mv")


class _KeepsMarked:
    """A `context_fn` that makes a checkpoint save the results of the calls that
    `keep_in_checkpoint` has marked, and recompute all others."""

    def __init__(self, cache_hash: str) -> None:
        self.cache_hash = cache_hash  # distinguishes two of them in AOTAutograd's caches

    def __call__(self) -> Any:
        return checkpoint.create_selective_checkpoint_contexts(self._policy)

    @staticmethod
    def _policy(context: object, op: Any, *args: object, **kwargs: object) -> Any:
        del context, args, kwargs
        kind, name = traceback.current_meta.get(_KEPT), op.name()
        if kind == "attention":
            is_kept = kind in name
        else:
            is_kept = name in _PRODUCTS if kind == "product" else name.partition(".")[0] == kind
        policies = checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if is_kept else policies.PREFER_RECOMPUTE


def keep_in_checkpoint(gm: GraphModule, kept: Mapping[Node, str]) -> Callable[[], None]:
    """Make a checkpoint save the results of some calls in its body; return a function that reverts
    this.

    For each call, the value in `kept` says which op inside the call has its result saved:

    - "attention": the fused attention kernel;
    - "product": a matrix product;
    - any other value: the op whose name is this value, such as "aten::add".
    """
    for node, kind in kept.items():
        node.meta[_KEPT] = kind
    named = ",".join(sorted(f"{node.name}:{kind}" for node, kind in kept.items()))
    gm.meta["_checkpoint_context_fn"] = _KeepsMarked(f"memeff_compile keeps {named}")

    def undo() -> None:
        del gm.meta["_checkpoint_context_fn"]
        for node in kept:
            del node.meta[_KEPT]

    return undo


def may_be_under_policy(target: object) -> bool:
    """Return whether a call may be inside a checkpoint with a policy, that is, with a rule that
    chooses the results to save.

    PyTorch raises an error if a checkpoint with a policy contains a higher-order operation without
    a rule for such checkpoints. Nested checkpoints and autograd functions need no rule, because
    PyTorch traces the operations inside them.
    """
    if not isinstance(target, HigherOrderOperator):
        return True
    is_traced = target.name() in ("tag_activation_checkpoint", "autograd_function_apply")
    return is_traced or checkpoint._CachingTorchDispatchMode in target.python_key_table


def is_kept(node: Node) -> bool:
    """Return whether the checkpoint that surrounds a call saves the call's result."""
    return _KEPT in node.meta


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Disable autocast in this context, because autocast would also change ops that this package's
    ops call.

    Devices without autocast, such as meta, are not affected.
    """
    if _has_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


@functools.lru_cache(maxsize=16)
def _has_autocast(device_type: str) -> bool:
    return device_type != "meta" and bool(torch.amp.is_autocast_available(device_type))


@contextlib.contextmanager
def beside_autograd() -> Iterator[None]:
    """In this context, the caller's saved-tensor hooks and dispatch modes do not run, and compiled
    autograd is off.

    Otherwise the caller's hooks and modes would count or save temporary tensors, and compiled
    autograd would compile the backward passes that run in this context.
    """
    from torch._dynamo import compiled_autograd

    with unseen_by_saved_tensor_hooks(), outside_dispatch_modes(), compiled_autograd._disable():
        yield


@contextlib.contextmanager
def unseen_by_saved_tensor_hooks() -> Iterator[None]:
    """In this context, save tensors for a backward pass without calling the caller's saved-tensor
    hooks, even if the tensors are fake tensors."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        yield


# Returns whether the current code runs under a transform of `torch.func` or `torch.vmap`.
is_functorch_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether `vmap` or `is_grads_batched` hides a batch dimension of the tensor."""
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def is_forward_mode_active() -> bool:
    """Return whether forward-mode derivatives are being computed."""
    return bool(forward_ad._current_level >= 0)


def frees_saved_tensors() -> bool:
    """Return whether a backward pass is running that frees each node's saved tensors after the node
    has run.
    """
    return (
        torch._C._current_graph_task_id() != -1
        and not torch._C._autograd._get_current_graph_task_keep_graph()
    )


def packs_saved_tensors() -> bool:
    """Return whether saved-tensor hooks, which pack the tensors that autograd saves, are active
    now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_under_checkpoint() -> bool:
    """Return whether the running code is inside a non-reentrant checkpoint, in its forward pass or
    recomputation."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    name = getattr(hooks and hooks[0], "__qualname__", "").partition(".")[0]
    kinds = checkpoint._checkpoint_hook, checkpoint._recomputation_hook
    return name in [kind.__name__ for kind in kinds]


def tensor_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has hooks on its gradient, or hooks that run after the gradient was
    accumulated.
    """
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)


def drop_empty_hooks(tensor: torch.Tensor) -> None:
    """Delete a tensor's table of hooks if the table is empty because all hooks were removed.

    If a module whose weights are tensor subclasses is moved to another device, PyTorch calls
    `torch.utils.swap_tensors`. The swap keeps the table but breaks its connection to autograd.
    PyTorch connects a table only when it creates the table. So hooks that are added to the kept
    table after the swap would never run.
    """
    if not tensor._post_accumulate_grad_hooks:
        tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    if not tensor._backward_hooks:
        tensor._backward_hooks = None


def revive_hooks(tensor: torch.Tensor) -> None:
    """Make the hooks of a tensor effective again after `swap_tensors`; their handles stay valid."""
    tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    tensor._backward_hooks = tensor._backward_hooks


def optimizer_hooks(optimizer: torch.optim.Optimizer, *, but: Callable[..., Any]) -> bool:
    """Return whether an optimizer has hooks that run before or after its steps.

    Hooks that PyTorch runs for every optimizer count only if they run before a step; the hook
    passed as `but` never counts.
    """
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or any(hook is not but for hook in optimizers._global_optimizer_pre_hooks.values())
    )


def run_hooks_after_every_step(optimizer: torch.optim.Optimizer) -> None:
    """Run the hooks that were registered to run after a step of any optimizer."""
    for hook in list(optimizers._global_optimizer_post_hooks.values()):
        hook(optimizer, (), {})


def after_gradients(results: Iterable[Any], function: Callable[[], None]) -> None:
    """Call a function after the autograd nodes of the given results have computed their gradients,
    before autograd passes the gradients on.
    """
    for result in results:
        made_by = result.grad_fn if isinstance(result, torch.Tensor) else None
        if made_by is not None:
            made_by.register_hook(lambda *_: function())
            return


def after_backward(function: Callable[[], None]) -> bool:
    """Call a function at the end of the running backward pass; return False if no backward pass is
    running."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(function)
    except RuntimeError:
        return False
    return True
