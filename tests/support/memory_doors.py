"""Every function through which code reaches a tensor's memory, for tensors without memory.

A door is a function of a tensor and of an ordinary one of the same shape, dtype and device; it
returns the values it read. `check_door` tries one: a tensor subclass gives the same as a plain
tensor, or one sentence, and the ordinary tensor stays whole.
"""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils import _pytree as pytree
from torch.utils import dlpack
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, default_collate

Door = Callable[[Tensor, Tensor], Any]
DOORS: dict[str, Door] = {}


def _door(function: Door) -> Door:
    DOORS[function.__name__.lstrip("_")] = function
    return function


def check_door(name: str, tensor: Tensor, plain: Tensor, *, gives_values: bool) -> None:
    """Try a door on a tensor, and on the plain tensor with its values.

    Args:
        name: of the door.
        tensor: the one without memory.
        plain: its values.
        gives_values: whether the result must equal a plain tensor's, errors included; otherwise a
            sentence is expected.
    """
    other = torch.arange(plain.numel()).reshape(plain.shape).to(plain.detach())
    mine = other.clone()
    expected, found = _tried(DOORS[name], plain, other.clone()), _tried(DOORS[name], tensor, mine)
    if isinstance(found, Exception):
        refuses = not gives_values or isinstance(expected, Exception)
        assert refuses, f"{name} raised {found!r}"
        assert len(str(found).split()) > 3, f"{name}: {found!r} is no sentence"
        assert torch.equal(mine, other), f"{name} refused, and changed another tensor"
        return
    assert gives_values, f"{name} was expected to refuse, and gave {found!r}"
    assert not isinstance(expected, Exception), f"{name} gave {found!r}, and eager {expected!r}"
    for one, two in zip(*map(pytree.tree_leaves, (_plain(found), _plain(expected))), strict=True):
        assert type(one) is type(two), (name, one, two)
        same = one.shape == two.shape and one.dtype == two.dtype if torch.is_tensor(one) else True
        assert same, (name, one, two)
        close = torch.allclose if torch.is_tensor(one) else np.array_equal
        assert close(one, two), (name, one, two)


def _tried(door: Door, tensor: Tensor, other: Tensor) -> Any:
    try:
        return door(tensor, other)
    except Exception as error:
        return error


def _plain(found: Any) -> Any:
    """Replace tensors and arrays by plain copies of their values; writes before show in them."""

    def copied(each: Any) -> Any:
        if isinstance(each, nn.Module):
            return [copied(value) for value in each.state_dict().values()]
        if isinstance(each, np.ndarray):
            return torch.from_numpy(np.array(each))
        if torch.is_tensor(each):
            values = each.detach() + 0 if each.layout == torch.strided else each.to_dense() + 0
            return values if type(values) is Tensor else torch.tensor(values.tolist())
        return each

    return pytree.tree_map(copied, found)


def _over(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """The tensor that a storage holds where `like` says."""
    made = torch.empty(0, dtype=like.dtype, device=like.device)
    return made.set_(storage, like.storage_offset(), like.size(), like.stride())


# Pointers and storages ----------------------------------------------------------------------------


@_door
def data_ptr(tensor: Tensor, other: Tensor) -> Any:
    tensor = tensor.detach().contiguous()
    size = tensor.numel() * tensor.element_size()
    return torch.frombuffer(bytearray(ctypes.string_at(tensor.data_ptr(), size)), dtype=other.dtype)


@_door
def untyped_storage(tensor: Tensor, other: Tensor) -> Any:
    return _over(tensor.untyped_storage(), tensor), tensor.untyped_storage().nbytes() > 0


@_door
def storage_bytes(tensor: Tensor, other: Tensor) -> Any:
    return tensor.clone().untyped_storage().tolist()


@_door
def storage_element(tensor: Tensor, other: Tensor) -> Any:
    return tensor.clone().untyped_storage()[0]


@_door
def storage_of_detached(tensor: Tensor, other: Tensor) -> Any:
    return _over(tensor.detach().untyped_storage(), tensor)


@_door
def typed_storage(tensor: Tensor, other: Tensor) -> Any:
    return list(tensor.clone().storage())


@_door
def storage_by_the_base(tensor: Tensor, other: Tensor) -> Any:
    return torch.Tensor.untyped_storage(tensor.clone()).tolist()


@_door
def storage_copied_from(tensor: Tensor, other: Tensor) -> Any:
    other.untyped_storage().copy_(tensor.clone().untyped_storage())
    return other


@_door
def pickled_storage(tensor: Tensor, other: Tensor) -> Any:
    return pickle.loads(pickle.dumps(tensor.clone().untyped_storage())).tolist()


@_door
def shared_storage(tensor: Tensor, other: Tensor) -> Any:
    return tensor.detach().clone().untyped_storage().share_memory_().tolist()


@_door
def cuda_array_interface(tensor: Tensor, other: Tensor) -> Any:
    return tensor.detach().__cuda_array_interface__


@_door
def set_to(tensor: Tensor, other: Tensor) -> Any:
    return other.set_(tensor.detach()) + 0


@_door
def set_to_storage(tensor: Tensor, other: Tensor) -> Any:
    kept = tensor.detach()
    other.set_(kept.untyped_storage(), kept.storage_offset(), kept.size(), kept.stride())
    return other + 0


@_door
def set_from(tensor: Tensor, other: Tensor) -> Any:
    return tensor.detach().set_(other) + 0


@_door
def resized(tensor: Tensor, other: Tensor) -> Any:
    return tensor.detach().resize_(2) + 0


@_door
def resized_as(tensor: Tensor, other: Tensor) -> Any:
    return other.resize_as_(tensor.detach()) + 0


@_door
def transposed_in_place(tensor: Tensor, other: Tensor) -> Any:
    return tensor.detach().t_() + 0


# .data --------------------------------------------------------------------------------------------


@_door
def data(tensor: Tensor, other: Tensor) -> Any:
    return tensor.data + 0, tensor.data.data.sum()


@_door
def given_as_data(tensor: Tensor, other: Tensor) -> Any:
    other.data = tensor
    return other.sum(), other


@_door
def detached_given_as_data(tensor: Tensor, other: Tensor) -> Any:
    other.data = tensor.detach()
    return other.sum(), other


@_door
def view_given_as_data(tensor: Tensor, other: Tensor) -> Any:
    other.data = tensor.detach()[0]
    return other.sum(), other


@_door
def given_as_data_of_a_parameter(tensor: Tensor, other: Tensor) -> Any:
    parameter = nn.Parameter(other)
    parameter.data = tensor.data
    return parameter.sum(), parameter


@_door
def given_as_data_of_a_gradient(tensor: Tensor, other: Tensor) -> Any:
    parameter = nn.Parameter(other.clone())
    parameter.grad = torch.zeros_like(other)
    parameter.grad.data = tensor.detach()
    return parameter.grad + 0


@_door
def given_as_data_in_inference_mode(tensor: Tensor, other: Tensor) -> Any:
    with torch.inference_mode():
        other.data = tensor.detach()
        return other.sum()


@_door
def given_as_a_vector_of_parameters(tensor: Tensor, other: Tensor) -> Any:
    parameter = nn.Parameter(other)
    nn.utils.vector_to_parameters(tensor.detach().reshape(-1), [parameter])
    return parameter + 0


@_door
def takes_other_data(tensor: Tensor, other: Tensor) -> Any:
    kept = tensor.detach()
    kept.data = other
    return kept + 0


@_door
def swapped(tensor: Tensor, other: Tensor) -> Any:
    kept, ordinary = tensor.detach(), other.clone()
    torch.utils.swap_tensors(kept, ordinary)
    return kept + 0, ordinary + 0


# Other libraries and processes --------------------------------------------------------------------


@_door
def from_dlpack(tensor: Tensor, other: Tensor) -> Any:
    return torch.from_dlpack(tensor.detach())


@_door
def from_dlpack_of_utils(tensor: Tensor, other: Tensor) -> Any:
    return dlpack.from_dlpack(tensor.detach())


@_door
def dlpack_method(tensor: Tensor, other: Tensor) -> Any:
    kept = tensor.detach()
    return dlpack.from_dlpack(kept.__dlpack__()), kept.__dlpack_device__()


@_door
def versioned_dlpack(tensor: Tensor, other: Tensor) -> Any:
    return torch.from_dlpack(tensor.detach().__dlpack__(max_version=(1, 0)))


@_door
def to_dlpack(tensor: Tensor, other: Tensor) -> Any:
    return dlpack.from_dlpack(dlpack.to_dlpack(tensor.detach()))


@_door
def numpy_from_dlpack(tensor: Tensor, other: Tensor) -> Any:
    return np.from_dlpack(tensor.detach())


@_door
def numpy(tensor: Tensor, other: Tensor) -> Any:
    return tensor.detach().numpy()


@_door
def numpy_by_force(tensor: Tensor, other: Tensor) -> Any:
    return tensor.numpy(force=True)


@_door
def numpy_of_the_base(tensor: Tensor, other: Tensor) -> Any:
    return torch.Tensor.numpy(tensor.detach())


@_door
def asarray(tensor: Tensor, other: Tensor) -> Any:
    return np.asarray(tensor.detach())


@_door
def array_method(tensor: Tensor, other: Tensor) -> Any:
    return tensor.detach().__array__(), np.sum(tensor.detach().__array__(dtype=np.float64))


@_door
def buffer(tensor: Tensor, other: Tensor) -> Any:
    return bytes(memoryview(tensor.detach().clone().numpy()))


@_door
def buffer_of_the_tensor(tensor: Tensor, other: Tensor) -> Any:
    return torch.frombuffer(tensor.detach(), dtype=tensor.dtype)


@_door
def torch_asarray(tensor: Tensor, other: Tensor) -> Any:
    return torch.asarray(tensor.detach()), torch.as_tensor(tensor.detach())


@_door
def torch_tensor(tensor: Tensor, other: Tensor) -> Any:
    return torch.tensor(tensor.detach()), other.new_tensor(tensor.detach())


@_door
def legacy_constructor(tensor: Tensor, other: Tensor) -> Any:
    return torch.Tensor(tensor.detach())


@_door
def made_by_new(tensor: Tensor, other: Tensor) -> Any:
    kept = tensor.detach()
    return kept.new_tensor(kept), kept.new_tensor([1.0, 2.0]), other.new(kept) + 0


class OfAUser(Tensor):
    """A subclass without changes."""


@_door
def as_a_class_of_a_user(tensor: Tensor, other: Tensor) -> Any:
    made = [each.as_subclass(OfAUser) for each in (tensor, tensor.detach())]
    return [each.as_subclass(Tensor) + 0 for each in made], [each.requires_grad for each in made]


@_door
def as_subclass(tensor: Tensor, other: Tensor) -> Any:
    return tensor.detach().as_subclass(Tensor)


@_door
def make_subclass(tensor: Tensor, other: Tensor) -> Any:
    return Tensor._make_subclass(Tensor, tensor.detach())


@_door
def share_memory(tensor: Tensor, other: Tensor) -> Any:
    kept = tensor.detach().clone().share_memory_()
    return kept, kept.is_shared()


@_door
def share_memory_of_a_view(tensor: Tensor, other: Tensor) -> Any:
    return tensor.detach()[0].share_memory_()


@_door
def share_memory_of_a_module(tensor: Tensor, other: Tensor) -> Any:
    module = nn.Module()
    module.register_buffer("table", tensor.detach().clone())
    return module.share_memory()


@_door
def pin_memory(tensor: Tensor, other: Tensor) -> Any:
    return tensor.detach().is_pinned() or tensor.detach() + 0


@_door
def reduced_for_another_process(tensor: Tensor, other: Tensor) -> Any:
    rebuild, args = reduce_tensor(tensor.detach())
    return rebuild(*args)


@_door
def sent_to_another_process(tensor: Tensor, other: Tensor) -> Any:
    return ForkingPickler.loads(ForkingPickler.dumps(tensor.detach()))


@_door
def collated(tensor: Tensor, other: Tensor) -> Any:
    return default_collate([tensor.detach(), tensor.detach()])


@_door
def loaded_as_data(tensor: Tensor, other: Tensor) -> Any:
    return list(DataLoader(TensorDataset(tensor.detach()), batch_size=2))


# Copies and files ---------------------------------------------------------------------------------


@_door
def copied(tensor: Tensor, other: Tensor) -> Any:
    return copy.copy(tensor.detach())


@_door
def deep_copied(tensor: Tensor, other: Tensor) -> Any:
    return copy.deepcopy([tensor.detach(), tensor.detach()[0]])


@_door
def pickled(tensor: Tensor, other: Tensor) -> Any:
    return [pickle.loads(pickle.dumps(tensor.detach(), protocol)) for protocol in (2, 5)]


@_door
def saved(tensor: Tensor, other: Tensor) -> Any:
    return _saved(tensor.detach())


@_door
def saved_view(tensor: Tensor, other: Tensor) -> Any:
    return _saved(tensor.detach()[0])


@_door
def saved_in_the_old_format(tensor: Tensor, other: Tensor) -> Any:
    return _saved(tensor.detach(), _use_new_zipfile_serialization=False)


def _saved(value: Tensor, **settings: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file, **settings)
    file.seek(0)
    return torch.load(file, weights_only=False)


@_door
def state_dict(tensor: Tensor, other: Tensor) -> Any:
    module, twin = nn.Module(), nn.Module()
    module.register_buffer("table", tensor.detach())
    twin.register_buffer("table", other.clone())
    twin.load_state_dict(module.state_dict())
    return twin


@_door
def state_dict_assigned(tensor: Tensor, other: Tensor) -> Any:
    twin = nn.Module()
    twin.register_buffer("table", other.clone())
    twin.load_state_dict({"table": tensor.detach()}, assign=True)
    return twin.table


@_door
def module_converted(tensor: Tensor, other: Tensor) -> Any:
    module = nn.Module()
    module.register_buffer("table", tensor.detach())
    return module.double().table


@_door
def parameter(tensor: Tensor, other: Tensor) -> Any:
    return nn.Parameter(tensor.detach()) + 0, nn.Buffer(tensor.detach()) + 0


# Python numbers -----------------------------------------------------------------------------------


@_door
def tolist(tensor: Tensor, other: Tensor) -> Any:
    return tensor.tolist(), torch.Tensor.tolist(tensor)


@_door
def numbers(tensor: Tensor, other: Tensor) -> Any:
    one = tensor.reshape(-1)[0]
    return one.item(), float(one), int(one), bool(one), complex(one), f"{one.detach():.3f}"


@_door
def iterated(tensor: Tensor, other: Tensor) -> Any:
    return [row.tolist() for row in tensor], len(tensor)


@_door
def printed(tensor: Tensor, other: Tensor) -> Any:
    return "tensor" in str(tensor + 0), "values" in repr(tensor) or "tensor" in repr(tensor)


@_door
def type_name(tensor: Tensor, other: Tensor) -> Any:
    kind = str(tensor.device), tensor.is_cpu, tensor.is_cuda, tensor.is_meta, tensor.get_device()
    return tensor.type(), tensor.type(torch.float64), tensor.dtype == other.dtype, kind


@_door
def applied(tensor: Tensor, other: Tensor) -> Any:
    return tensor.detach().apply_(lambda number: number + 1)


@_door
def mapped_onto(tensor: Tensor, other: Tensor) -> Any:
    return other.map_(tensor.detach(), lambda one, two: two)


# Writes and gradients -----------------------------------------------------------------------------


@_door
def copied_onto(tensor: Tensor, other: Tensor) -> Any:
    return other.copy_(tensor.detach())


@_door
def output(tensor: Tensor, other: Tensor) -> Any:
    return torch.add(tensor.detach(), 1, out=other)


@_door
def output_of_another_size(tensor: Tensor, other: Tensor) -> Any:
    kept = tensor.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch advises against it
        return torch.add(other.new_zeros(2, *other.shape), 1, out=kept), kept, tensor + 0


@_door
def output_read(tensor: Tensor, other: Tensor) -> Any:
    kept = tensor.detach()
    return torch.mul(kept, 2, out=kept), kept + 0, tensor + 0


@_door
def output_through_a_view(tensor: Tensor, other: Tensor) -> Any:
    kept = tensor.detach().flatten(0, -2)
    return torch.kron(other.flatten(0, -2), other.new_ones(1, 1), out=kept), tensor + 0


@_door
def diagonal_filled(tensor: Tensor, other: Tensor) -> Any:
    kept = tensor.detach().flatten(0, -2)
    return kept.fill_diagonal_(3.0), tensor + 0


@_door
def foreach(tensor: Tensor, other: Tensor) -> Any:
    torch._foreach_add_([other], [tensor.detach()])
    return other, torch._foreach_norm([tensor.detach(), other]), torch._foreach_neg([tensor])


def _step(factory: Callable[..., torch.optim.Optimizer], **settings: Any) -> Door:
    """An optimizer whose gradient is the tensor."""

    def door(tensor: Tensor, other: Tensor) -> Any:
        parameter = nn.Parameter(other.clone().float())
        parameter.grad = tensor.detach().float()
        nn.utils.clip_grad_norm_([parameter], 1.0)
        factory([parameter], lr=0.1, **settings).step()
        return parameter

    return door


DOORS["gradient_of_fused_adamw"] = _step(torch.optim.AdamW, fused=True)
DOORS["gradient_of_foreach_adamw"] = _step(torch.optim.AdamW, foreach=True)
DOORS["gradient_of_a_loop"] = _step(torch.optim.AdamW, foreach=False)
DOORS["gradient_of_fused_sgd"] = _step(torch.optim.SGD, fused=True)
DOORS["gradient_of_foreach_sgd"] = _step(torch.optim.SGD, foreach=True, momentum=0.9)


@_door
def autograd_function(tensor: Tensor, other: Tensor) -> Any:
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, kept: Tensor) -> Any:
            ctx.save_for_backward(x, kept)
            return kept, x.view_as(x), x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            x, kept = ctx.saved_tensors
            return grads[1] * kept + grads[2] * x, None

    results = Through.apply(other.requires_grad_(), tensor.detach())
    total = sum(each.sum() for each in results[1:])
    total.backward()
    found = [each.detach() for each in results], other.grad
    other.requires_grad_(False)
    return found


@_door
def functional_gradient(tensor: Tensor, other: Tensor) -> Any:
    return torch.func.grad(lambda x: (x * x).sum())(tensor.detach())


@_door
def functional_gradient_beside(tensor: Tensor, other: Tensor) -> Any:
    return torch.func.grad(lambda x: (x * tensor.detach()).sum())(other)


@_door
def vmap(tensor: Tensor, other: Tensor) -> Any:
    return torch.func.vmap(lambda x: x * 2 + 1)(tensor.detach())


@_door
def jvp(tensor: Tensor, other: Tensor) -> Any:
    return torch.func.jvp(lambda x: x * x, (tensor.detach(),), (other,))


@_door
def dual_number(tensor: Tensor, other: Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensor.detach(), other)
        return tuple(torch.autograd.forward_ad.unpack_dual(dual * 2))


@_door
def checkpointed(tensor: Tensor, other: Tensor) -> Any:
    leaf = other.clone().requires_grad_()
    kept = tensor.detach()
    for reentrant in (False, True):
        result = checkpoint(lambda x, y: (x * y).sin(), leaf, kept, use_reentrant=reentrant)
        result.sum().backward()
    return leaf.grad


@_door
def saved_on_the_host(tensor: Tensor, other: Tensor) -> Any:
    leaf = other.clone().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        result = leaf * tensor.detach()
    result.sum().backward()
    return leaf.grad


# Compilers and other kinds of tensors -------------------------------------------------------------


@_door
def traced(tensor: Tensor, other: Tensor) -> Any:
    function = torch.jit.trace(lambda x: x * 2 + 1, (tensor.detach(),), check_trace=False)
    return function(other), function(tensor.detach())


@_door
def compiled(tensor: Tensor, other: Tensor) -> Any:
    return torch.compile(lambda x, y: x * 2 + y, backend="eager")(tensor.detach(), other)


@_door
def nested(tensor: Tensor, other: Tensor) -> Any:
    return torch.nested.nested_tensor([tensor.detach(), other]).to_padded_tensor(0.0)


@_door
def sparse(tensor: Tensor, other: Tensor) -> Any:
    return tensor.detach().to_sparse()


@_door
def of_another_type(tensor: Tensor, other: Tensor) -> Any:
    return tensor.detach().view(torch.uint8), tensor.detach().view(-1)[:1].view(torch.uint8)


@_door
def complex_numbers(tensor: Tensor, other: Tensor) -> Any:
    return torch.view_as_real(torch.complex(tensor.detach().float(), other.float()))


@_door
def views_of_views(tensor: Tensor, other: Tensor) -> Any:
    kept = tensor.detach()
    size, stride = tuple(reversed(kept.size())), tuple(reversed(kept.stride()))
    return [
        kept[0].detach().unsqueeze(0).expand(2, *kept[0].shape),
        kept.transpose(0, -1).detach()[0],
        torch.as_strided(kept, size, stride, kept.storage_offset()),
        kept.narrow(0, 1, 1).data.squeeze(0).detach().clone(),
        kept.unfold(0, 2, 1),
        kept.diagonal(),
    ]


@_door
def is_set_to(tensor: Tensor, other: Tensor) -> Any:
    return tensor.is_set_to(tensor), tensor.is_set_to(other), torch.equal(tensor, tensor.clone())


@_door
def profiled(tensor: Tensor, other: Tensor) -> Any:
    with torch.profiler.profile(record_shapes=True, profile_memory=True):
        return tensor.detach() + other
