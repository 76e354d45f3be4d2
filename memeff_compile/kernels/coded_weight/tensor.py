"""CodedWeight: a tensor subclass that has the shape and dtype of a weight, but stores only the
weight's codes (its compressed form).

An operation without special support first decodes the weight. A linear layer calls
`memeff::coded_weight_linear`, which saves no decoded weight for the backward pass. In-place writes
raise an error, because no dense memory exists to write to. Only `copy_` of a whole new value works:
the value is encoded. A view is a decoded copy, and in-place writes to a view raise an error too.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ... import compat
from ...errors import CodedWeightError, UnsupportedInputError
from ..device import on_stream, stream_of
from . import codecs, dtypes, op, pieces
from .layout import CODECS, parse

_aten = torch.ops.aten
_LINEAR = torch.nn.functional.linear
_INPUT = ("input", "x", "a", "x1")  # names of its first argument, as PyTorch takes them
_DEVICE = torch.ops.prim.device.default


OWN_ATTRIBUTES = frozenset(
    "codec room place piece shares_with unsettled times_anew".split()
    + ["_number", "_memory_number", "_is_param"]
    + [name for codec in CODECS for name in (*parse(codec).parts, "norms", "rest")]
)
"""Attributes of a `CodedWeight`; the last one is PyTorch's. Other code has set any further ones."""


class Unsettled:
    """A compressed weight's new value, until it is known whether its codes (compressed form) fit
    into the memory of the old codes.

    The method `settle` waits for the GPU. If the codes do not fit, `settle` encodes the value again
    into newly allocated tensors. `settle` reads the value from the spill buffer (memory for values
    whose codes do not fit into the existing tensors). Without a spill buffer, this object keeps the
    dense value until `settle` has returned.
    """

    def __init__(self, weight: CodedWeight, value: Tensor) -> None:
        """Record that the codes of `value` are about to overwrite the tensors that encode the
        weight. `value` is the weight's new dense value.

        From then on, all code must call `settle` before it reads the weight. `settle` waits until
        the new codes are complete.
        """
        self._weight = weight
        self._outcome: codecs.Outcome | bool = False
        self._lock = threading.RLock()
        self._kept: Tensor | None = value
        weight.unsettled = self

    def encoded(self, outcome: codecs.Outcome | bool, refuge: Tensor | None = None) -> None:
        """Record whether the weight's new codes fitted into the memory of its old codes.

        `outcome` is an `Outcome` if the GPU has yet to report whether the codes fitted, and a bool
        otherwise. `refuge` is the spill buffer: memory for a value whose codes do not fit. If the
        codes do not fit, the GPU copies the weight's new value to `refuge`. If `outcome` is an
        `Outcome` and `refuge` is given, this object no longer keeps the dense value, only `refuge`.
        The dense value can then be freed.

        If this method raises an error, the object still keeps the dense value.
        """
        self._outcome = outcome
        if isinstance(outcome, bool):
            self.settle()
            return
        outcome.fetch()
        if refuge is not None:
            self._kept = refuge[codecs.HEADING :]

    @property
    def is_settled(self) -> bool:
        """Return whether `settle` has finished.

        `settle` waits until the compressed weight contains its new value, the argument `value` of
        `__init__`.
        """
        return self._kept is None

    def settle(self) -> None:
        """Wait until the GPU has encoded the compressed weight's new value. If the new codes did
        not fit into the memory of the old codes, encode the value again into newly allocated
        tensors."""
        with self._lock:
            kept = self._kept
            if kept is None:
                return
            outcome, weight = self._outcome, self._weight
            fits = outcome if isinstance(outcome, bool) else outcome.fits()
            if not fits:
                value = kept.view(-1)[: weight.numel()].to(weight.device)
                weight.encode_anew(value.view(weight.dtype).view(weight.shape))
            self._kept = None  # only now: if encoding fails, this is the only copy of the value
            if weight.unsettled is self:
                weight.unsettled = None


class UnsettledTogether:
    """Several compressed weights that are updated and encoded together.

    This object is needed until it is known whether the new codes (compressed form) fit into the
    memory of the old codes. The method `add` collects the weights and their gradients. This object
    keeps the gradients until `encode` is called. `encode` computes the weights' new values from the
    gradients, and encodes these values. All tensors that encode a weight lie in one allocation. The
    class `Unsettled` is for a single weight.

    The method `settle` waits until the weights contain their new values. All code must call this
    method before it reads one of the weights. All gradients were added while the same CUDA stream
    was current. The kernels that `encode` launches run on that stream, even if its caller uses
    another stream.
    """

    is_settled = False

    def __init__(self, by: codecs.Step, like: Tensor, encode_now: Callable[[], None]) -> None:
        """Collect compressed weights that one optimizer step updates.

        Their gradients must have the same stream and device as the tensor `like`.

        The function `encode_now` updates and encodes the collected weights. `settle` calls this
        function if the weights have not been updated yet.
        """
        self._by, self._stream, self._encode_now = by, stream_of(like), encode_now
        self.weights: list[CodedWeight] = []
        self.counts: list[int] = []  # of their elements
        self._gradients: list[Tensor] = []
        # the gradients' memory has the new values, and the allocations hold none
        self._moved = False
        self._outcomes: pieces.Outcomes | None = None
        self._lock = threading.RLock()

    def takes(self, gradient: Tensor, by: codecs.Step) -> bool:
        """Return whether `add` may add a weight, with this gradient and optimizer step, to the
        collected weights.

        The method `encode` updates at most `pieces.MOST_TOGETHER` weights together. All of these
        weights must have the same optimizer step. The same CUDA stream must be current when their
        gradients are added.
        """
        has_room = len(self.counts) < pieces.MOST_TOGETHER
        return has_room and self._by == by and self._stream == stream_of(gradient)

    def add(self, weight: CodedWeight, gradient: Tensor) -> None:
        """Add a compressed weight and its gradient to the weights that are updated together.

        The method `encode` later applies the optimizer step to these weights, and encodes the new
        values. The gradient's memory must be padded to a multiple of 16,384 elements
        (`layout.padded`). After this call, no other code may use the gradient.
        """
        self.weights.append(weight)
        self.counts.append(gradient.numel())
        self._gradients.append(gradient)
        weight.unsettled = self

    def encode(self, refuge: Tensor) -> None:
        """Apply the optimizer step to the compressed weights that `add` has collected, and encode
        the new values.

        A weight's new codes may not fit into the memory of its old codes. The GPU then writes the
        new value to the spill buffer `refuge`.

        If memory runs out before the update, PyTorch's error is raised, and the weights are
        unchanged. If memory runs out after the update, CodedWeightError is raised. The new values
        are then kept dense, and are encoded when a weight is next read.
        """
        with self._lock, on_stream(self._stream):
            held = [cast("Tensor", weight.piece) for weight in self.weights]
            try:
                found = pieces.move(held, self._gradients, self._by)
            except BaseException:
                self._release()  # no weight was changed
                raise
            self._moved = True
            for weight in self.weights:
                torch.autograd.graph.increment_version(weight)
            try:
                self._outcomes = pieces.list_patches(held, self._gradients, found, refuge)
            except (RuntimeError, MemoryError) as error:
                raise _not_encoded(f"{len(held)} compressed weights", error) from error
            self._gradients = []

    def settle(self) -> None:
        """Wait until the GPU has encoded the new values of the compressed weights that `add` has
        collected. If a weight's new codes did not fit into the memory of its old codes, encode this
        weight again.

        If the weights have not been updated yet, `settle` first calls `encode_now`, the
        constructor's argument. `encode_now` updates and encodes the weights.
        """
        if not self._moved:
            self._encode_now()  # without our lock: it takes another one first
        with self._lock:
            if self.is_settled:
                return
            for place, kept in self._misfits():
                weight = self.weights[place]
                value = kept.to(weight.device).view(torch.bfloat16).view(weight.shape)
                weight.encode_anew(value)
            self._release()

    def _misfits(self) -> Iterable[tuple[int, Tensor]]:
        if self._outcomes is not None:
            return self._outcomes.misfits()
        if self._stream is not None:
            self._stream.synchronize()
        return enumerate(self._gradients)

    def _release(self) -> None:
        self.is_settled, self._gradients = True, []
        for weight in self.weights:
            if weight.unsettled is self:
                weight.unsettled = None


def _not_encoded(what: str, error: BaseException) -> CodedWeightError:
    return CodedWeightError(
        f"the new values of {what} could not be encoded ({error}). They are kept dense and encoded "
        "when a weight is next read. If memory ran out, free some on the GPU and the host, or "
        "train with smaller batches."
    )


_numbers: dict[tuple[Any, ...], int] = {}
_memory_numbers = itertools.count(1)

HOW_TO_LEAVE_DENSE = "leave the head dense: name it in skip of compress_"
"""The advice in declines of ops that take only dense weights."""


class CodedWeight(Tensor):
    """A weight that is stored in compressed form."""

    codec: str  # its name, as `encode` takes it
    room: codecs.Room  # spare memory of lists that have to be allocated again
    place: torch.device  # of the parts
    # the weight whose coded tensors `.data` and `.detach()` share
    shares_with: CodedWeight | None = None
    piece: Tensor | None = None  # the memory of all coded tensors, if they lie in one allocation
    unsettled: Unsettled | UnsettledTogether | None = (
        None  # a new value that may still turn out not to have fitted
    )
    times_anew: int = 0  # how often the weight was encoded into newly allocated tensors
    decodes_for_ops = True  # a pass may hand the weight to an op that takes the decoded weight
    how_to_leave_dense = HOW_TO_LEAVE_DENSE

    @staticmethod
    def __new__(
        cls: type[CodedWeight],
        parts: Sequence[Tensor],
        codec: str,
        shape: Sequence[int],
        requires_grad: bool = False,
        room: codecs.Room = codecs.EXACT_FIT,
    ) -> CodedWeight:
        # Parts are fake where a compiler makes the weight; its modes are asked for the device.
        make: Callable[..., Tensor] = compat.wrapper_subclass
        if type(parts[0]) is Tensor:
            make = compat.make_without_memory
        place = parts[0].device
        dtype = dtypes.dtype_of(parse(codec))
        made = make(cls, shape, dtype=dtype, device=place, requires_grad=requires_grad)
        return cast("CodedWeight", made)

    def __init__(
        self,
        # in the order of `parse(codec).parts`, or one allocation that contains all of them
        parts: Sequence[Tensor],
        codec: str = "",  # the codec's name
        shape: Sequence[int] = (),  # of the weight
        requires_grad: bool = False,  # as of any tensor
        # spare memory of lists that have to be allocated again
        room: codecs.Room = codecs.EXACT_FIT,
    ) -> None:
        """Create the compressed weight from the tensors that `op.encode` returned."""
        if isinstance(parts, CodedWeight):
            return  # torch.Tensor(weight), which has made an alias of it
        self.codec, self.room, self.place = codec, room, parts[0].device
        self._hold(parts)
        _watch_optimizers()

    def _hold(self, parts: Sequence[Tensor]) -> None:
        """Store `parts` as the weight's memory: the tensors that encode the weight, or the one
        allocation that contains them."""
        names = parse(self.codec).parts
        self.piece = parts[0] if len(parts) == 1 < len(names) else None
        if self.piece is None:
            for name, part in zip(names, parts, strict=True):
                setattr(self, name, part)
        else:  # made when first read, because a compiler does not read them
            for name in names:
                vars(self).pop(name, None)

    @property
    def parts(self) -> list[Tensor]:
        """Return the tensors that encode the weight, such as its codes, signs and mantissas.

        For `codec`, the name of the weight's compressed format, `parse(codec).parts` has the names
        of these tensors, in the same order.
        """
        self.settle()
        names, held = parse(self.codec).parts, vars(self)
        if self.piece is not None and names[0] not in held:
            with torch.no_grad():
                found = pieces.parts_of(self.piece, self.numel())
            if type(self.piece) is not Tensor:
                return found  # of a compiler's graph, which is one of several
            held.update(zip(names, found, strict=True))
        return [getattr(self, name) for name in names]

    @property
    def held(self) -> list[Tensor]:
        """Return the tensors that ops take as the compressed weight: the tensors that encode it, or
        the one allocation that contains them."""
        if self.piece is None:
            return self.parts
        self.settle()
        return [self.piece]

    @property
    def number(self) -> int:
        """Return a number that is equal for all weights that the same compiled code can process."""
        self.settle()
        held = vars(self)
        if "_number" not in held:
            parts = [
                (type(p), p.dtype, p.shape, p.stride(), p.device, p.is_inference())
                for p in self.held
            ]
            kind = type(self), self.codec, self.shape, *parts
            held["_number"] = _numbers.setdefault(kind, len(_numbers))
        return int(held["_number"])

    @property
    def memory_number(self) -> int:
        """Return a number that no other weight has. The number changes when one of the tensors that
        encode the weight moves in memory.
        """
        self.settle()
        held = vars(self)
        if "_memory_number" not in held:
            held["_memory_number"] = next(_memory_numbers)
        return cast("int", held["_memory_number"])

    @property
    def coded_bytes(self) -> int:
        """Return the compressed weight's size in bytes, summed over all tensors that encode it."""
        return sum(part.nbytes for part in self.held)

    def refuse_memory(self) -> NoReturn:
        """Raise the error for code that assigns this weight to the `.data` of another tensor."""
        raise CodedWeightError(
            f"a compressed weight of {tuple(self.shape)} was assigned to the .data of another "
            "tensor, and its dense values are nowhere in memory. Assign weight.decode(), which "
            "returns them as a plain tensor, or call memeff_compile.decompress_(model)."
        )

    def _typed_storage(self) -> torch.TypedStorage:
        """Return a new storage with the weight's decoded values. torch.multiprocessing sends this
        storage to other processes."""
        return cast("torch.TypedStorage", self.decode().clone()._typed_storage())

    def as_subclass(self, cls: Any) -> Any:
        """Return the weight's decoded values as a tensor of another class."""
        return self.expand(self.shape).as_subclass(cls)

    def settle(self) -> None:
        """Complete the encoding of the weight's new value, if there is one, and wait for the GPU.

        If the new codes (compressed form) did not fit into the memory of the old codes, encode the
        value again.
        """
        other = self.shares_with
        if self.unsettled is None and (
            other is None or (other.unsettled is None and other.shares_with is None)
        ):
            return  # the usual case, without a list: compiled code asks several times in each call
        for owner in self._owners():
            if owner.unsettled is not None:
                owner.unsettled.settle()

    def _owners(self) -> list[CodedWeight]:
        """Return the compressed weight itself, and all weights that share the tensors that encode
        it."""
        found: list[CodedWeight] = []
        owner: object = self
        while isinstance(owner, CodedWeight) and not any(owner is each for each in found):
            found.append(owner)
            owner = owner.shares_with
        return found

    def decode(self) -> Tensor:
        """Return the decoded weight as a plain tensor."""
        with torch.no_grad():
            return cast("Tensor", op.coded_weight_decode(self.held, self.codec, self.shape))

    def like(self, parts: Sequence[Tensor]) -> CodedWeight:
        """Return the compressed weight that the tensors `parts` encode, with the same shape and
        codec (compressed format) as this weight."""
        return CodedWeight(parts, self.codec, self.shape, room=self.room)

    @torch.no_grad()
    def store(self, value: Tensor) -> None:
        """Encode a new value of the whole weight in place.

        A value of another dtype is first cast to the weight's dtype.
        """
        if tuple(value.shape) != tuple(self.shape):
            raise CodedWeightError(
                f"a value of shape {tuple(value.shape)} was stored in a coded weight of "
                f"{tuple(self.shape)}; the shapes have to be equal."
            )
        if isinstance(value, CodedWeight):
            if value.codec == self.codec and not parse(self.codec).is_lossless:
                # Rounded values, rounded again, are not always the same ones.
                torch.autograd.graph.increment_version(self)
                self.show_all([part.to(self.device, copy=True) for part in value.parts])
                return
            dense = value.decode()
        else:
            dense = value.detach()
        self.store_soon(dense.to(device=self.device, dtype=self.dtype)).settle()

    def store_soon(
        self,
        value: Tensor,  # same shape, dtype and device, without autograd history
        # a spill buffer from `make_refuge`, not used for anything else until the value is
        # confirmed; without one, the value must not change until then
        refuge: Tensor | None = None,
        counts: Tensor | None = None,  # the result of `step`, if that made the value
    ) -> Unsettled:
        """Encode a new value of the weight into the memory of the old codes (compressed form).

        The GPU reports whether the new codes fitted into this memory. With the lossless codecs
        (compressed formats) `win4` and `tier`, this method does not wait for the report. With other
        codecs, this method waits. Call `settle` on the result to wait for the report. If the weight
        is read before `settle` is called, the read itself calls `settle`. Raise CodedWeightError if
        memory runs out while the codes are written. The dense value is then kept, and encoded when
        the weight is next read.
        """
        value, parts = value.contiguous(), self.parts
        found = Unsettled(self, value)
        torch.autograd.graph.increment_version(self)
        try:
            found.encoded(op.encode_soon(parts, value, self.codec, refuge, counts), refuge)
        except UnsupportedInputError:
            self.unsettled = None  # no part was changed
            raise
        except (RuntimeError, MemoryError) as error:
            raise _not_encoded(f"a compressed weight of {tuple(self.shape)}", error) from error
        return found

    def steps(self, gradient: Tensor) -> bool:
        """Return whether `step`, which overwrites a gradient with the weight's new value, supports
        a given gradient.

        The answer depends on the weight's codec (its compressed format), and on the gradient's
        shape, dtype, device and memory layout.
        """
        with compat.without_torch_function():
            return gradient.shape == self.shape and op.steps(gradient, self.codec)

    def step(self, gradient: Tensor, by: codecs.Step) -> Tensor | None:
        """Compute an optimizer step, and write the weight's new value over the gradient, as
        `codecs.step` does.

        The method `steps`, which checks the gradient, must have returned True. The weight is
        invalid until `store_soon` has stored the new value. With the codec `win4`, this function
        counts the new value's patches (elements whose exponents have no code), and returns the
        counts. With other codecs, this function returns None. Pass the result to `store_soon` as
        `counts`.
        """
        return codecs.step(self.parts, parse(self.codec), gradient, by)

    @torch.no_grad()
    def encode_anew(self, dense: Tensor) -> None:
        """Encode `dense`, a new value of the whole weight, into newly allocated tensors.
        `self.room` says how much spare memory the new tensors get."""
        parts = op.encode(dense, self.codec, self.room)
        self.show_all(parts if self.piece is None else [pieces.joined(parts, dense.numel())])
        self.times_anew += 1

    def show(self, name: str, part: Tensor) -> None:
        """Replace one of the tensors that encode the weight, the one called `name`, by `part`.

        The tensor `part` is in other memory than the replaced tensor. `part` contains the same
        values, or the values of a new encoding.
        """
        for owner in self._owners():
            setattr(owner, name, part)
            for known in ("_number", "_memory_number"):
                vars(owner).pop(known, None)

    def show_all(self, held: Sequence[Tensor]) -> None:
        """Replace all tensors that encode the weight by the tensors `held`.

        `held` has one tensor for each replaced tensor, or only one tensor that contains them all.
        """
        for owner in self._owners():
            owner._hold(held)
            for known in ("_number", "_memory_number"):
                vars(owner).pop(known, None)

    def fsdp_pre_all_gather(
        self, mesh: object, size: object, stride: object, module: object, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """Return the tensor that FSDP2 gathers: this rank's decoded values, in the dtype of its
        MixedPrecisionPolicy.
        """
        return (self.decode().to(mp_policy.param_dtype or self.dtype),), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor], *_: object, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """Return the gathered weight to FSDP2 as a dense tensor."""
        return None if out is not None else (gathered[0], ())

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        """Return the names of the inner tensors into which compilers split the weight."""
        self.settle()
        names = ["piece"] if self.piece is not None else list(parse(self.codec).parts)
        return names, self.codec

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], codec: str, outer_size: Sequence[int], outer_stride: object
    ) -> CodedWeight:
        """Rebuild the weight from the inner tensors into which `__tensor_flatten__` split it."""
        names = ("piece",) if "piece" in inner else parse(codec).parts
        return CodedWeight([inner[name] for name in names], codec, outer_size)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensors that encode the weight, and the attributes that other code has set on
        the weight."""
        parts = self.parts
        # A view would be written with all of its memory, and torch.save refuses memory that has
        # lists of two dtypes. Memory that processes share stays shared.
        if self.piece is not None or any(_is_piece_of_more(part) for part in parts):
            parts = [part.clone() for part in parts]
        return _rebuild, (type(self), parts, *self._about(), self._set_by_others())

    def __copy__(self) -> CodedWeight:
        """Return another weight object that shares the tensors that encode this weight."""
        found = _rebuild(type(self), self.held, *self._about(), self._set_by_others())
        found.shares_with = self
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> CodedWeight:
        """Return a compressed weight with its own copies of the tensors that encode this weight."""
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # type: ignore[no-any-return, no-untyped-call]  # refuses
        if id(self) not in memo:
            parts = [part.clone() for part in self.held]
            others = copy.deepcopy(self._set_by_others(), memo)
            found = memo[id(self)] = _rebuild(type(self), parts, *self._about(), others)
            if not isinstance(self, nn.Parameter):  # a parameter's gradient is not copied with it
                found.grad = copy.deepcopy(self.grad, memo)
        return cast("CodedWeight", memo[id(self)])

    def _about(self) -> tuple[str, tuple[int, ...], codecs.Room, bool, bool]:
        is_parameter = isinstance(self, nn.Parameter)
        return self.codec, tuple(self.shape), self.room, self.requires_grad, is_parameter

    def _set_by_others(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if name not in OWN_ATTRIBUTES}

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        """Return the weight's shape, codec (compressed format), device and `requires_grad` as text.

        The text contains no values, so the weight is not decoded.
        """
        return (
            f"CodedWeight(shape={tuple(self.shape)}, codec={self.codec!r}, "
            f"device={str(self.device)!r}, requires_grad={self.requires_grad}; "
            "values are decoded when they are read)"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Handle functions that read memory without PyTorch's dispatcher, and in eager mode run a
        linear layer as this package's op.

        Under a compiler, the layer's call stays, and the pass `encode_weights` rewrites it.
        """
        with compat.without_torch_function():
            out = kwargs.get("out") if kwargs else None
            if out is not None and any(
                isinstance(each, _KINDS) for each in compat.pytree.tree_iter(out)
            ):
                raise _write_error(f"{func.__name__} with out=")
            served = _ABOVE if args and isinstance(args[0], CodedWeight) else _OF_VIEWS
            if func in served and isinstance(args[0], _KINDS):
                return served[func](*args, **(kwargs or {}))
            if func is _LINEAR and not torch.compiler.is_compiling():
                given = dict(kwargs or {})
                by_name = next((given.pop(name) for name in _INPUT if name in given), None)
                found = _linear(*(args if by_name is None else (by_name,)), **given)
                if found is not None:
                    return found
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,  # an op overload
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run supported ops on the compressed form, raise an error for in-place writes, and decode
        the weight for all other ops."""
        if func is _DEVICE:
            return cast("CodedWeight", args[0]).place
        if func in compat.ABOUT_MEMORY:
            return compat.ABOUT_MEMORY[func](*args)
        kwargs = dict(kwargs or {})
        if torch.is_inference_mode_enabled() and compat.is_view(func):
            leaves = compat.pytree.tree_iter((args, kwargs))
            if not next(each for each in leaves if isinstance(each, _KINDS)).is_inference():
                # a view is in inference mode exactly if its base is
                with torch.inference_mode(False):
                    return cls.__torch_dispatch__(func, types, args, kwargs)
        serve = _SERVED.get(func)
        if serve is not None and _is_on_weight(func, args):
            found = serve(*args, **kwargs)
            if found is not NotImplemented:
                return found
        _refuse_writes(func, args, kwargs)
        return _run(func, args, kwargs)


class CodedWeightView(Tensor):
    """A view of a compressed weight: decoded values that are read-only.

    A write to the values raises an error.
    """

    how_to_leave_dense = HOW_TO_LEAVE_DENSE

    @staticmethod
    def __new__(cls: type[CodedWeightView], plain: Tensor, offset: Any = 0) -> CodedWeightView:
        if type(plain) in (Tensor, cls):
            return compat.as_class(cls, plain)
        about = {"dtype": plain.dtype, "device": plain.device, "strides": plain.stride()}
        made = compat.wrapper_subclass(cls, plain.shape, storage_offset=offset, **about)
        made._plain = plain  # a compiler's, which has no memory either
        return made

    @property
    def plain(self) -> Tensor:
        """Return the decoded values of this view of a compressed weight as a plain tensor.

        The view and the plain tensor share one memory, which contains the decoded values.
        """
        if "_plain" not in vars(self):
            with compat.on_real_tensors():
                self._plain = self.detach()  # one object for all readers, as Dynamo's guards ask
        return self._plain

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the inner tensors into which compilers split this view of a
        compressed weight's decoded values."""
        return ["plain"], self.storage_offset()

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], offset: int, outer_size: object, outer_stride: object
    ) -> CodedWeightView:
        """Rebuild the view of decoded values from the inner tensors into which `__tensor_flatten__`
        split the view."""
        return CodedWeightView(inner["plain"], offset)

    def _typed_storage(self) -> torch.TypedStorage:
        """Return the storage of the decoded values of this view of a compressed weight.
        torch.multiprocessing sends this storage to other processes."""
        return cast("torch.TypedStorage", self.plain._typed_storage())

    def as_subclass(self, cls: Any) -> Any:
        """Return a copy of the values of this read-only view of a compressed weight, as a tensor of
        another class.

        A write to this view raises an error, but a write to a tensor of another class does not.
        With a copy, such a write cannot change the values of this view. If `cls` is `Tensor`, the
        method returns the view itself.
        """
        return self if cls is Tensor else self.clone().as_subclass(cls)

    def __copy__(self) -> Tensor:
        """Return another view of the compressed weight's decoded values, with the same memory."""
        return CodedWeightView(self.plain).requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the decoded values of this view of a compressed weight. Unpickling returns a plain
        tensor."""
        return _read(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain tensor with a copy of the decoded values of this view of a compressed
        weight."""
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # type: ignore[no-any-return, no-untyped-call]  # refuses
        return cast("Tensor", memo.setdefault(id(self), copy.deepcopy(_read(self), memo)))

    __torch_function__ = CodedWeight.__torch_function__
    __torch_dispatch__ = CodedWeight.__torch_dispatch__  # type: ignore[assignment]


_KINDS = (CodedWeight, CodedWeightView)


def _is_piece_of_more(part: Tensor) -> bool:
    is_shared = part.device.type == "cpu" and part.is_shared()
    return not is_shared and part.untyped_storage().nbytes() > part.nbytes


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on decoded values.

    Results that share memory with the decoded values raise an error on writes.
    """
    leaves, spec = compat.pytree.tree_flatten((args, kwargs))
    memory = set()
    for place, each in enumerate(leaves):
        if isinstance(each, _KINDS):
            plain = each.decode() if isinstance(each, CodedWeight) else each.plain
            leaves[place] = plain
            if type(plain) is Tensor:
                memory.add(compat.storage_key(plain))
    args, kwargs = compat.pytree.tree_unflatten(leaves, spec)
    found = func(*args, **kwargs)
    if compat.schema(func).is_mutable:
        return found

    def kept(each: Tensor) -> Tensor:
        # Dynamo refuses writes through this class. AOTAutograd, which runs after it, wants
        # gradients of its outputs' class.
        shows = compat.is_view(func) and compat.is_fake(each)
        if type(each) is Tensor:
            strided = each.layout == torch.strided
            shows = strided and compat.storage_key(each) in memory
        return CodedWeightView(each, each.storage_offset()) if shows else each

    if isinstance(found, Tensor):
        return kept(found)
    return compat.pytree.tree_map_only(Tensor, kept, found)


def _rebuild(
    kind: type[CodedWeight],
    parts: Sequence[Tensor],
    codec: str,
    shape: Sequence[int],
    room: codecs.Room,
    requires_grad: bool,
    is_parameter: bool,
    others: Mapping[str, Any],
) -> CodedWeight:
    found = kind(parts, codec, shape, room=room)
    if is_parameter:
        found = cast("CodedWeight", nn.Parameter(found, requires_grad=requires_grad))
        found.shares_with = None
    else:
        found.requires_grad_(requires_grad)
    vars(found).update(others)
    return found


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Run a linear layer as this package's op, with autocast's casts.

    Return None if the op does not support the layer.
    """
    if not isinstance(weight, CodedWeight) or isinstance(x, CodedWeight):
        return None
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        if torch.get_autocast_dtype(kind) != weight.dtype:
            return None
        x = x.to(weight.dtype)
        bias = None if bias is None else bias.to(weight.dtype)
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        return None  # the dense layer raises, and so does this
    needs_gradient = any(each is not None and each.requires_grad for each in (x, weight, bias))
    trains = torch.is_grad_enabled() and needs_gradient
    if compat.is_functorch_active() or compat.is_forward_mode_active():
        return None  # the library's linear, of the decoded weight, knows these
    if trains and torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        raise CodedWeightError(
            "torch.jit.trace met a compressed linear that would be trained, and the trace cannot "
            "hold its gradient. Trace under torch.no_grad(), set requires_grad of weights and "
            "inputs to False, or call memeff_compile.decompress_(model) first."
        )
    if trains:
        return op.linear_in_autograd(x, weight, bias)
    return cast("Tensor", op.coded_weight_linear(x, weight, bias, trains))


def _on_values(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler that runs a function on decoded values.

    If the function raises an error on the decoded values, this handler raises the same error.
    """

    def read(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = compat.pytree.tree_map_only(_KINDS, _read, (args, kwargs))
        found = func(*args, **kwargs)
        if hasattr(found, "flags") and not found.flags.owndata:
            found.flags.writeable = False  # an array of a view's memory
        return found

    return read


def _read(weight: CodedWeight | CodedWeightView) -> Tensor:
    values = weight.decode() if isinstance(weight, CodedWeight) else weight.plain.detach()
    if isinstance(weight, nn.Parameter):
        return nn.Parameter(values, weight.requires_grad)
    return values.requires_grad_(weight.requires_grad)


def _set_data_of_view(view: CodedWeightView, new: Tensor) -> None:
    """Assign new memory to a view of a compressed weight. The weight keeps its own memory."""
    vars(view).pop("_plain", None)
    Tensor.data.__set__(view, new)  # type: ignore[attr-defined]


def _no_write(writer: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise _write_error(writer)

    return refuse


def _share_memory(weight: CodedWeight) -> CodedWeight:
    """Move every tensor that encodes the weight into memory that other processes can access."""
    for part in weight.held:
        part.share_memory_()
    return weight


def _no_address(weight: CodedWeight, *_: object) -> NoReturn:
    raise CodedWeightError(
        f"a compressed weight of {tuple(weight.shape)} has no address, because its dense values "
        "are not in memory. weight.decode() returns them as a plain tensor; or call "
        "memeff_compile.decompress_(model)."
    )


def _takes_data(weight: CodedWeight, new: Tensor) -> bool:
    """Return whether `weight.data = new` is supported, for `Module.half` and similar methods."""
    if compat.can_be_swapped(weight):
        return True
    if weight.grad is None and not compat.tensor_hooks(weight):
        return False  # the module gets a new parameter
    raise CodedWeightError(
        f"a compressed weight of {tuple(weight.shape)} has a gradient or hooks and cannot be cast "
        "or emptied while an autograd graph or compiled code holds it. Drop the gradient and the "
        "loss first, call remove() on the result of optim_in_backward, or call "
        "torch._dynamo.reset()."
    )


_WRITERS = ("__setitem__", "fill_", "copy_", "resize_")
_READ_ONLY: dict[type, type] = {
    kind: type(
        f"ReadOnly{kind.__name__}",
        (kind,),
        dict.fromkeys(_WRITERS, _no_write("a write to its storage")),
    )
    for kind in (torch.UntypedStorage, torch.TypedStorage)
}


def _untyped_storage(weight: CodedWeight | CodedWeightView) -> torch.UntypedStorage:
    """Return a read-only storage without memory.

    Other code can only read the storage's size and compare the storage with other storages. The
    size is that of the decoded weight.
    """
    if isinstance(weight, CodedWeightView) and type(weight.plain) is Tensor:
        held = vars(weight)
        if "_storage" not in held:
            held["_storage"] = torch.UntypedStorage(weight.nbytes, device="meta")
        found = cast("torch.UntypedStorage", held["_storage"])
    else:
        found = Tensor.untyped_storage(weight)
    if found.device.type == "meta" and type(found) in _READ_ONLY:
        found.__class__ = _READ_ONLY[type(found)]
    return found


def _storage(weight: CodedWeight) -> torch.TypedStorage:
    """Return decoded values for reading only, because a write to them would not reach the
    weight."""
    found: torch.TypedStorage = Tensor.storage(weight)  # type: ignore[no-untyped-call]
    for each in (found, found._untyped_storage):
        each.__class__ = _READ_ONLY.get(type(each), type(each))
    return found


@torch.no_grad()
def _set_data(weight: CodedWeight, new: Tensor) -> None:
    """Handle an assignment to `.data`: a tensor of the same shape is encoded.

    An assigned tensor of another shape makes the weight dense.
    """
    like = (new.dtype, tuple(new.shape), new.device)
    if like == (weight.dtype, tuple(weight.shape), weight.device):
        weight.store(new)
        return
    if not compat.can_be_swapped(weight):
        raise CodedWeightError(
            f"data of {new.dtype} was assigned to a compressed weight, which would make it dense, "
            "while an autograd graph or compiled code holds it. Call "
            "memeff_compile.decompress_(model) first."
        )
    warnings.warn(
        f"a compressed weight of {tuple(weight.shape)} became a dense one of {new.dtype} on "
        f"{new.device}, since new data was assigned to it, as module.half(), .float() and "
        ".to(dtype) do; codes hold weights of one dtype.",
        stacklevel=2,
    )
    dense = new.detach()
    if isinstance(weight, nn.Parameter):
        dense = nn.Parameter(dense, requires_grad=weight.requires_grad)
    vars(dense).update(weight._set_by_others())
    gradient, weight.grad = weight.grad, None
    torch.utils.swap_tensors(weight, dense)
    compat.revive_hooks(weight)
    if gradient is not None and gradient.shape == weight.shape:
        weight.grad = gradient.to(weight.device, weight.dtype)


_READERS = (
    *(Tensor.new, Tensor.new_tensor, Tensor.tolist, Tensor.__format__, Tensor.__repr__),
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__),
)
_OF_VIEWS: dict[Any, Callable[..., Any]] = {
    **{func: _on_values(func) for func in _READERS},
    **{
        func: _no_write(f"Tensor.{func.__name__}")
        for func in (Tensor.__setitem__, Tensor.apply_, Tensor.map_, Tensor.map2_)
    },
    Tensor.untyped_storage: _untyped_storage,
    Tensor.storage: _storage,
    Tensor.data.__set__: _set_data_of_view,  # type: ignore[attr-defined]
}
"""Functions for which torch calls no op, and their replacements, for weights and views."""
_ABOVE: dict[Any, Callable[..., Any]] = {
    **_OF_VIEWS,
    Tensor.share_memory_: _share_memory,
    Tensor.is_shared: lambda weight: all(part.is_shared() for part in weight.held),
    Tensor.data_ptr: _no_address,
    Tensor.__cuda_array_interface__.__get__: _no_address,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    compat.TAKES_ANOTHERS_INSIDES: _takes_data,
}
"""The functions of `_OF_VIEWS`, and those that only weights replace."""


def _share(weight: CodedWeight, size: Sequence[int] | None = None) -> CodedWeight:
    parts, shape = weight.held, weight.shape if size is None else size
    found = CodedWeight(parts, weight.codec, shape, room=weight.room)
    found.shares_with = weight
    return found


def _view(weight: CodedWeight, size: Sequence[int]) -> object:
    """Return a view of the weight in the same shape, or a flat view; FSDP2 creates both kinds of
    views of a shard.
    """
    if tuple(size) == tuple(weight.shape):
        return _share(weight)
    if len(size) != 1 or size[0] not in (-1, weight.numel()):
        return NotImplemented
    return _share(weight, (weight.numel(),))


def _to_copy(weight: CodedWeight, **kwargs: Any) -> object:
    if kwargs.get("dtype") not in (None, weight.dtype):
        return NotImplemented
    place = {name: kwargs[name] for name in ("device", "non_blocking") if name in kwargs}
    return weight.like([part.to(copy=True, **place) for part in weight.held])


def _is_set_to(weight: CodedWeight, other: Tensor) -> bool:
    if not isinstance(other, CodedWeight) or weight.shape != other.shape:
        return False
    return weight.held[0] is other.held[0]


def _copy_(weight: CodedWeight, value: Tensor, *_: object) -> CodedWeight:
    weight.store(value)
    return weight


def _lerp(selves: Any, others: Any, weights: Any) -> object:
    """Average weights, as `torch.optim.swa_utils` does: decode the weight, compute the average, and
    encode it.
    """
    if isinstance(selves, Tensor):
        _lerp([selves], [others], weights)
        return selves
    each = weights if isinstance(weights, (list, tuple)) else [weights] * len(selves)
    for own, other, weight in zip(selves, others, each, strict=True):
        if isinstance(own, CodedWeight):
            own.store(torch.lerp(own.decode(), other, weight))
        else:
            own.lerp_(other, weight)
    return None


def _product(
    x: Tensor, weight: CodedWeight, bias: Tensor | None = None, trains: bool = False
) -> object:
    given = op.Product(x, weight.held, bias, weight.codec, weight.shape, trains)
    if trains:
        return op.trained_product(given, folds=weight.requires_grad)
    return op.coded_weight_product(*given)


def _product_backward(grad: Tensor, weight: CodedWeight) -> object:
    return op.trained_product_backward(grad, weight.held, weight.codec, weight.shape)


def _products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> object:
    coded = [weight for weight in weights if isinstance(weight, CodedWeight)]
    if len(coded) != len(weights) or len({weight.codec for weight in coded}) != 1:
        return NotImplemented
    parts = [part for weight in coded for part in weight.parts]
    sizes = [size for weight in coded for size in weight.shape]
    return op.coded_weight_products(x, parts, biases, coded[0].codec, sizes)


_SERVED: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _share,
    _aten.alias.default: _share,
    _aten.view.default: _view,
    _aten.clone.default: lambda weight, **_: weight.like([part.clone() for part in weight.held]),
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy_,
    _aten.is_set_to.default: _is_set_to,
    _aten.lerp_.Scalar: _lerp,
    _aten._foreach_lerp_.Scalar: _lerp,
    _aten._foreach_lerp_.List: _lerp,
    _aten._foreach_lerp_.ScalarList: _lerp,
    op.coded_weight_linear: _product,
    op.coded_weight_linears: _products,
    op.coded_weight_linear_backward: _product_backward,
}
_AT_SECOND = (op.coded_weight_linear, op.coded_weight_linears, op.coded_weight_linear_backward)


def _is_on_weight(func: object, args: Sequence[object]) -> bool:
    """Return whether the weight argument of a supported op, or one of several weight arguments, is
    compressed."""
    given = args[1 if func in _AT_SECOND else 0]
    several = given if isinstance(given, (list, tuple)) else (given,)
    return any(isinstance(each, CodedWeight) for each in several)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise an error if an op would write to a compressed weight."""
    schema = compat.schema(func)
    written = [
        kwargs.get(argument.name, args[place] if place < len(args) else None)
        for place, argument in enumerate(schema.arguments if schema.is_mutable else ())
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if schema.name.startswith("c10d::") and schema.name.endswith("_"):
        # collectives do not declare their writes: they write to their first argument
        written += args[:1]
    if any(isinstance(each, _KINDS) for each in compat.pytree.tree_iter(written)):
        raise _write_error(schema.name)


def refuse_step(optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise an error if an optimizer would update a compressed weight, before the optimizer changes
    any parameter."""
    computes_gradients = any(each is not None for each in (*args[1:], *kwargs.values()))
    for group in optimizer.param_groups:
        for each in group["params"]:
            if isinstance(compat.local_part(each), _KINDS) and (
                each.grad is not None or (computes_gradients and each.requires_grad)
            ):
                raise _write_error(f"{type(optimizer).__name__}.step")


@functools.cache
def _watch_optimizers() -> RemovableHandle:
    """Let PyTorch call `refuse_step` before each step of an optimizer. `refuse_step` raises an
    error if the optimizer would update a compressed weight.

    The check runs before the step. An error in the middle of the step would leave some parameters
    updated and others not.
    """
    return register_optimizer_step_pre_hook(refuse_step)


def _write_error(writer: str) -> CodedWeightError:
    seen = (
        f"{writer} would write in place to a compressed weight, which has no dense memory to write "
        "to."
    )
    train = (
        "memeff_compile.optim_in_backward(model, factory), which updates and encodes each weight "
        "during the backward, and give no compressed weight to an optimizer"
    )
    if writer.endswith(".step"):
        return CodedWeightError(
            f"{seen} To train it, use {train} (in the Trainer: optimizers=(that, None)); to have a "
            "dense model again, use memeff_compile.decompress_(model)."
        )
    return CodedWeightError(
        f"{seen} Call memeff_compile.decompress_(model) before it (as before merge_and_unload of "
        f"adapters) and compress_(model) after it. To train it, use {train}."
    )
