"""Update each weight as soon as its gradient exists, during the backward pass (optim_in_backward,
LOMO).

A weight's gradient is freed as soon as the weight is updated. So only one gradient exists at a
time, or the gradients of a few small compressed weights that one kernel launch updates together. A
compressed weight is decoded, updated and encoded again in one step, so at most these weights are
dense at a time. Each parameter has its own optimizer, which computes the update. The results are
bit for bit the same as if the weights were dense. For plain SGD on a GPU, one kernel decodes and
updates the weight. If no other tensor uses the gradient's memory, the kernel writes the new weight
to this memory.

A parameter that FSDP2 shards is updated after FSDP2 has reduced its gradient, on the CUDA stream of
the reduction. Autograd first adds up all contributions to the gradient of a gathered weight. So
FSDP2 reduces each gradient only once per backward pass.

Between updates, the CPU does not wait for the GPU. The codes of a weight's new value are written to
the memory of the old codes. The CPU checks later whether they fitted. If the new codes did not fit,
the GPU has already copied the new value to a spill buffer in CPU memory.
"""

from __future__ import annotations

import inspect
import json
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from memeff_compile import compat
from memeff_compile.errors import MemeffError, OptionError
from memeff_compile.kernels.coded_weight import (
    CodedWeight,
    Room,
    Step,
    Unsettled,
    UnsettledTogether,
    make_refuge,
    parse,
    refuse_step,
    sheltered,
    sheltered_together,
    side_by_side,
)
from memeff_compile.kernels.marks import Mark, is_updated_in_backward
from memeff_compile.model.changes import require_module
from memeff_compile.report import VerbReport

Factory = Callable[[nn.Parameter], Optimizer]

TRAINING_ROOM = Room(share=0.01, least=512)
"""Spare room in lists: weights change, and a list that grows needs new memory and a new
compilation."""
MOST_ROOM = Room(share=0.16, least=8192)
"""The spare room of all weights is doubled up to this when a weight outgrows its lists. Compiled
code depends on the lists' lengths and has to be compiled again each time, so this has to be rare.
"""

UNSETTLED = 2
"""The number of weights whose dense values are kept if the GPU cannot write to host memory."""
REFUGES = 4
"""The size of the spill buffers in host memory, as a multiple of the largest weight."""
LARGEST_TOGETHER = 1 << 24
"""Elements of weights that one launch updates together. Larger weights keep the GPU busy for longer
than a launch takes on the host, and are updated one by one.
"""


class _Queue:
    """A queue of new values of compressed weights, the oldest first, which the CPU must check.

    The codes (the compressed form) of a new value are written to the memory of the weight's old
    codes. The CPU does not know yet whether the codes of the values in this queue fitted. If the
    codes of a value do not fit, the GPU copies the value to a ring of spill buffers in CPU memory.
    The value is later encoded again from this copy. The CPU can run ahead of the GPU by as many
    weights as the spill buffers can hold.
    """

    def __init__(self, weights: Sequence[CodedWeight]) -> None:
        # held from `place_for` to `add`; autograd has a thread for each device
        self.lock = threading.RLock()
        self._waiting: list[tuple[Unsettled | UnsettledTogether, int]] = []
        self._expected: set[int] = set()  # weights whose gradients come next, one after the other
        self._together: UnsettledTogether | None = None  # weights collected so far
        self._head = 0
        self._ring: Tensor | None = None
        if weights:
            sizes = [weight.numel() for weight in weights]
            most = max(REFUGES * sheltered(max(sizes)), REFUGES * LARGEST_TOGETHER)
            size = min(sum(map(sheltered, sizes)), most)
            self._ring = make_refuge(size, weights[0].device)

    def place_for(self, count: int) -> Tensor | None:
        """Return a free region of `count` elements in CPU memory for a new value of a weight.

        The codes (the compressed form) of the new value are written to the memory of the old codes.
        If the new codes do not fit, the GPU copies the new value to the region. The region lies in
        a ring of spill buffers. This object is a queue of new values for which the CPU has not
        checked yet whether their codes fitted. If no region is free, first wait for the GPU, and
        check the oldest values in the queue. The check frees a value's region. Without a ring,
        return None.
        """
        if self._ring is None:
            while len(self._waiting) >= UNSETTLED:
                self._settle_oldest()
            return None
        while (start := self._free(count, self._ring.numel())) is None:
            self._settle_oldest()
        self._head = start
        return self._ring[start : start + count]

    def _free(self, count: int, size: int) -> int | None:
        """Return the start of a free region of `count` elements in the ring buffer, or None.

        The ring buffer has `size` elements in CPU memory. The used region of the ring buffer
        extends from its tail to its head.
        """
        if not self._waiting:
            return 0
        tail = self._waiting[0][1]
        if self._head >= tail:
            if self._head + count <= size:
                return self._head
            return 0 if count < tail else None
        return self._head if self._head + count < tail else None

    def announce(self, parameters: Sequence[Tensor]) -> None:
        """Tell this queue of compressed weights that the gradients of all given parameters exist.

        The hooks that update these parameters are about to run, one after another. The queue then
        collects the parameters that one kernel launch can update together.
        """
        with self.lock, compat.without_torch_function():
            self._encode()
            if self._ring is None:  # the host would have to wait for each
                return
            self._expected = set()
            coded = [e for e in parameters if isinstance(e, CodedWeight) and e.piece is not None]
            if len(coded) > 1 and sum(each.numel() for each in coded) <= LARGEST_TOGETHER:
                self._expected = {id(each) for each in coded}

    def take(self, weight: CodedWeight, held: list[Tensor], by: Step) -> bool:
        """Add a compressed weight to those that one kernel launch will update together.

        The weight is added only if `announce` selected it. Return whether the weight was added.
        """
        if id(weight) not in self._expected:
            return False
        with self.lock:
            weight.settle()
            together = self._together
            if together is not None and not together.takes(held[0], by):
                self._encode()
                together = None
            if together is None:
                together = self._together = UnsettledTogether(by, held[0], self._encode)
                compat.after_backward(self.settle)
            together.add(weight, held.pop())
            self._expected.discard(id(weight))
            if not self._expected:
                self._encode()
        return True

    def _encode(self) -> None:
        """Update and encode the compressed weights that `take` has collected.

        Encoding computes the codes (the compressed form) of a weight's new value. Before the
        update, older values in this queue whose codes did not fit may be encoded again. If memory
        runs out at this point, the collected weights are kept for the next call.
        """
        with self.lock:
            together = self._together
            if together is not None:
                count = sheltered_together(together.counts)
                place = self.place_for(count)
                assert place is not None, "there is a ring, or nothing is expected"
                self._together = None
                together.encode(place)
                self._waiting.append((together, self._head))
                self._head += count

    def add(self, value: Unsettled, count: int) -> None:
        """Add a compressed weight's new value to the queue of values that `settle` checks.

        Before the backward pass ends, `settle` checks whether the codes (the compressed form) of
        this value fitted into the memory of the weight's old codes.
        """
        if value.is_settled:
            return
        self._waiting.append((value, self._head))
        self._head += count
        if not compat.after_backward(self.settle):
            self.settle()

    def settle(self) -> None:
        """Wait for the GPU, and check all new values of compressed weights in this queue.

        The codes (the compressed form) of a new value are written to the memory of the weight's old
        codes. The check finds out whether the new codes fitted. Each value whose codes did not fit
        is encoded again.
        """
        with self.lock:
            self._encode()
            while self._waiting:
                self._settle_oldest()

    def _settle_oldest(self) -> None:
        self._waiting[0][0].settle()  # if this fails, its value is still in the ring
        del self._waiting[0]


class _Update:
    """The optimizer of one parameter, and the function that runs it."""

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        factory: Factory,
        queue: _Queue,
        shard: compat.FsdpShard | None,  # the parameter's shard if FSDP2 shards it
    ) -> None:
        self.name, self.queue, self.parameter, self.shard = name, queue, parameter, shard
        self.seen = 0  # gradients since the last update
        self.is_coded = isinstance(parameter, CodedWeight)
        # The optimizer's parameter: the weight itself, or a dense stand-in that is filled during a
        # step.
        self.held = parameter
        self.room = 0  # elements that a new value takes in the spill buffers
        if isinstance(parameter, CodedWeight):
            self.held, self.room = nn.Parameter(parameter.decode()), sheltered(parameter.numel())
        try:
            self.optimizer = factory(self.held)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"optim_in_backward: the factory failed for {name} ({error}); it is a class and "
                "its settings, as in optim_in_backward(model, torch.optim.SGD, lr=1e-3), or a "
                "function that gets one parameter and returns its optimizer."
            ) from error
        _check_optimizer(self.optimizer, self.held, name)
        self._empty()

    def _empty(self) -> None:
        if self.is_coded:
            self.held.grad = None
            self.held.data = self.held.data.new_empty(0)

    def _hold_itself(self) -> None:
        """If a cast by the user has made a compressed weight dense, let the optimizer update the
        dense weight directly.
        """
        state = self.optimizer.state
        if self.held in state:
            state[self.parameter] = state.pop(self.held)
        self.optimizer.param_groups[0]["params"] = [self.parameter]
        self.held, self.is_coded = self.parameter, False

    @torch.no_grad()
    def run(self, max_norm: float | None) -> None:
        """Update the weight with its gradient, then free the gradient."""
        self.seen = 0
        with compat.without_torch_function():
            if self.parameter.grad is None:
                return
            held = [self.parameter.grad]  # the list alone holds it, so that others can be counted
            self.parameter.grad = None
        if self.shard is not None and held[0].is_cuda:  # made on another stream than this, maybe
            compat.local_part(held[0]).record_stream(torch.cuda.current_stream(held[0].device))
        if max_norm is not None:
            _clip(held, max_norm)
        coded = self.parameter
        if isinstance(coded, CodedWeight):
            by = plain_step(self.optimizer)
            if by is not None and coded.steps(held[0]) and compat.is_sole_owner(held):
                if not self.queue.take(coded, held, by):
                    self._store(coded, held, by)
                compat.run_hooks_after_every_step(self.optimizer)
                return
        elif self.is_coded:
            self._hold_itself()
        try:
            if isinstance(coded, CodedWeight):
                self.held.data = coded.decode()
            self.held.grad = held.pop()
            with torch.enable_grad():
                self.optimizer.step()
            self.held.grad = None
            if isinstance(coded, CodedWeight):
                self._store(coded, [self.held.data])
        finally:
            self.parameter.grad = None
            self._empty()

    def _store(self, coded: CodedWeight, held: list[Tensor], by: Step | None = None) -> None:
        """Encode the new value of the compressed weight `coded` in place.

        The list `held` has one tensor: the new value, or the gradient if `by` is a step of plain
        SGD. In this case, the step is computed first, and the new value overwrites the gradient.

        If memory runs out, the weight keeps its previous value.
        """
        with self.queue.lock:
            place = self.queue.place_for(self.room)
            counts = None if by is None else coded.step(held[0], by)
            self.queue.add(coded.store_soon(held.pop(), place, counts), self.room)


def _clip(held: list[Tensor], max_norm: float) -> None:
    """Scale the gradient, which is the only tensor in the list `held`, down to a maximum norm.

    The scaling is in place if no other tensor uses the gradient's memory.
    """
    norm = torch.linalg.vector_norm(held[0], dtype=torch.float32)
    factor = (max_norm / (norm + 1e-6)).clamp_max(1.0)
    if compat.is_sole_owner(held):
        held[0].mul_(factor)
    else:
        held[0] = held[0] * factor


_BEYOND = ("momentum", "nesterov", "maximize", "differentiable", "fused")
"""Settings of SGD with which a step is more than a multiplication and an addition."""


def plain_step(optimizer: Optimizer) -> Step | None:
    """Return a function that does a step of plain SGD; None if the optimizer is not plain SGD."""
    if type(optimizer) is not torch.optim.SGD or "step" in vars(optimizer):
        return None
    (group,) = optimizer.param_groups
    rate, decay = group["lr"], group["weight_decay"]
    # The value of a tensor would have to be read.
    is_known = isinstance(rate, (int, float)) and isinstance(decay, (int, float))
    if not is_known or any(map(group.get, _BEYOND)):
        return None
    is_watched = compat.optimizer_hooks(optimizer, but=refuse_step)
    return None if is_watched else Step(float(rate), float(decay))


def _check_optimizer(optimizer: object, held: nn.Parameter, name: str) -> None:
    if not isinstance(optimizer, Optimizer):
        raise OptionError(
            f"optim_in_backward: the factory returned {type(optimizer).__name__} for {name}; a "
            "torch.optim.Optimizer of the parameter it is given is needed, such as "
            "lambda p: torch.optim.SGD([p], lr=1e-3)."
        )
    given = [each for group in optimizer.param_groups for each in group["params"]]
    if len(given) != 1 or given[0] is not held:
        raise OptionError(
            f"optim_in_backward: the optimizer that the factory returned for {name} holds "
            f"{len(given)} parameters; it has to hold the one it is given, and that alone: "
            "lambda p: torch.optim.SGD([p], lr=1e-3)."
        )
    asked = inspect.signature(optimizer.step).parameters.values()
    needs = [p.name for p in asked if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if needs:
        raise OptionError(
            f"optim_in_backward: {type(optimizer).__name__}.step() needs {', '.join(needs)}, but "
            "each weight is updated during the backward, where only its gradient is known. Use an "
            "optimizer whose step() takes no arguments, such as torch.optim.AdamW."
        )


class BackwardOptimizer(VerbReport, Optimizer):
    """The optimizers of a model whose weights are updated during the backward pass.

    Code that expects an optimizer, such as a scheduler or a training loop, can use this object. A
    scheduler sets learning rates through this object's `param_groups`, of which there is one per
    parameter. `state_dict` saves the optimizer state of every parameter. `step` only checks that
    the weights were updated.
    """

    def __init__(
        self, updates: Iterable[_Update], accumulate: int, max_norm: float | None, queue: _Queue
    ) -> None:
        """Register the hooks that update the weights; `optim_in_backward` creates this object."""
        self._updates = list(updates)
        self._queue = queue
        self._times_anew = sum(each.times_anew for each in self._coded())
        self._room = TRAINING_ROOM
        self.accumulate = accumulate  # backwards per update
        self.max_norm = max_norm  # largest norm of each parameter's gradient, or None
        held = [update.held for update in self._updates]
        super().__init__(held, {})
        # The very groups of the optimizers: a scheduler that writes to them sets their rates.
        self.param_groups = [g for u in self._updates for g in u.optimizer.param_groups]
        for update in self._updates:
            compat.drop_empty_hooks(update.parameter)
        self._hooks = {update.name: self._hooked(update) for update in self._updates}

    def __str__(self) -> str:
        """Return a report with the number of weights that are updated; `repr` shows the parameter
        groups."""
        often = f", once in {self.accumulate} backwards" if self.accumulate > 1 else ""
        clipped = f", gradients clipped to {self.max_norm}" if self.max_norm is not None else ""
        return (
            f"optim_in_backward: {len(self._updates)} weights updated in the backward, "
            f"{len(self._coded())} of them compressed{often}{clipped}"
        )

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the first line of `str(self)`, and each weight's optimizer class, as JSON."""
        kinds = {name: type(each).__name__ for name, each in self.optimizers.items()}
        return json.dumps({"summary": self.summary, "optimizers": kinds}, indent=indent)

    def _hooked(self, update: _Update) -> RemovableHandle:
        # A weight that is moved gets other attributes, and its hooks do not run any more. It keeps
        # this optimizer. The hook does not: the garbage collector does not see references of hooks,
        # so a deleted model would stay in memory with all of its state.
        parameter: Any = update.parameter
        parameter.updated_in_backward = Mark(parameter, self._queue.announce, keeps=(self, update))
        optimizer_of, update_of = weakref.ref(self), weakref.ref(update)

        def after_gradient(_: Tensor) -> None:
            optimizer, its = optimizer_of(), update_of()
            if optimizer is None or its is None:  # the mark is gone: the gradient stays
                return
            its.seen += 1
            if its.seen >= optimizer.accumulate:
                its.run(optimizer.max_norm)

        hook = update.parameter.register_post_accumulate_grad_hook(after_gradient)
        return cast("RemovableHandle", hook)

    def train(self) -> None:
        """Register again the hooks that update the weights, if moving the model to a device has
        removed them.

        The Trainer calls this method at each step.
        """
        for update in self._updates:
            if self._hooks and not is_updated_in_backward(update.parameter):
                self._hooks[update.name].remove()  # others' stay, and run again
                compat.drop_empty_hooks(update.parameter)
                compat.revive_hooks(update.parameter)
                self._hooks[update.name] = self._hooked(update)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizer of each parameter, by the parameter's name."""
        return {update.name: update.optimizer for update in self._updates}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Check that the backward pass has updated all weights, and update the weights whose
        gradients the user has set.

        Raise MemeffError if a weight still has a gradient because its hook did not run. As with any
        optimizer, a closure computes the loss and its gradients again; the backward pass of the
        closure updates the weights.
        """
        with torch.enable_grad():
            result = None if closure is None else closure()
        self._queue.settle()
        self._tidy()
        with compat.without_torch_function():
            self._update_by_hand()
        return result

    def _update_by_hand(self) -> None:
        """Update the weights whose gradients the user has set.

        Raise MemeffError if a weight still has a gradient because the hook that updates the weight
        is gone. Raise MemeffError, too, if a parameter of FSDP2 was replaced."""
        for update in self._updates:
            if update.shard is not None and not update.shard.holds(update.parameter):
                raise MemeffError(
                    f"optim_in_backward: the parameter {update.name} of FSDP2 was replaced, and "
                    "the new one would not be updated. Call optim_in_backward after every call "
                    "that replaces parameters, such as load_state_dict(..., assign=True)."
                )
            if update.seen or update.parameter.grad is None:
                continue
            if not is_updated_in_backward(update.parameter):
                raise MemeffError(
                    f"optim_in_backward: {update.name} has a gradient and was not updated with it. "
                    "Its hook is gone, as when the model is moved or cast afterwards: call train() "
                    "of the optimizer before the backward, or optim_in_backward when the model is "
                    "where it will train."
                )
            update.run(self.max_norm)  # somebody gave it by hand, as DCP does to have states made

    @torch.no_grad()
    def _tidy(self) -> None:
        """If a coded tensor of variable length (a list) has outgrown its memory, move the lists of
        all weights to new memory.

        The length of a list depends on the weight's values. All lists move into a few new
        allocations, in which each list has spare memory at its end.
        """
        coded = self._coded()
        anew = sum(weight.times_anew for weight in coded)
        if anew > self._times_anew:
            self._times_anew, room = anew, self._room
            share = min(2 * room.share, MOST_ROOM.share)
            self._room = Room(share, min(2 * room.least, MOST_ROOM.least))
            with suppress(torch.OutOfMemoryError):  # where they are is good enough
                side_by_side(coded, self._room, whole=True)

    def _coded(self) -> list[CodedWeight]:
        return [u.parameter for u in self._updates if isinstance(u.parameter, CodedWeight)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that are kept for a later update."""
        with compat.without_torch_function():
            for update in self._updates:
                update.seen = 0
                update.parameter.grad = None

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Return the states of all optimizers as one dictionary, with the parameters as keys."""
        every = (update.optimizer.state for update in self._updates)
        return defaultdict(dict, {held: own for each in every for held, own in each.items()})

    @state.setter
    def state(self, made: defaultdict[Tensor, Any]) -> None:
        """Ignore an assignment to `state`, because the constructor of torch's Optimizer would set
        an empty state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every optimizer in torch's format, keyed by parameter names, so that
        torch.distributed.checkpoint can save and load it.
        """
        return {**super().state_dict(), "names": [update.name for update in self._updates]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned for the same model.

        Raise MemeffError if the state belongs to another model.
        """
        names = [update.name for update in self._updates]
        groups = state_dict.get("param_groups", ())
        if len(groups) != len(names) or state_dict.get("names", names) != names:
            raise MemeffError(
                "optim_in_backward: the state to load was saved by another optimizer or for "
                "another model: it needs a group for each trainable parameter, in their order. "
                "Load a state that a BackwardOptimizer of this model saved."
            )
        for update, group in zip(self._updates, groups, strict=True):
            own = state_dict["state"].get(group["params"][0])
            states = {} if own is None else {0: own}
            update.optimizer.load_state_dict(
                {"state": states, "param_groups": [{**group, "params": [0]}]}
            )
        self.param_groups = [g for u in self._updates for g in u.optimizer.param_groups]

    def remove(self) -> None:
        """Remove the hooks that update the weights, so that the model's backward pass stores
        gradients again."""
        self._queue.settle()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        for update in self._updates:
            compat.drop_empty_hooks(update.parameter)
            update.parameter.updated_in_backward = None  # type: ignore[attr-defined]


def optim_in_backward(
    model: nn.Module,
    factory: Factory | type[Optimizer],
    *,
    accumulate: int = 1,
    max_norm: float | None = None,
    **settings: Any,  # noqa: ANN401 - whatever the class takes
) -> BackwardOptimizer:
    """Update every trainable weight during the backward pass, as soon as its gradient exists.

    After `loss.backward()`, all weights are updated and all gradients are freed. Global-norm
    clipping is therefore impossible, because `clip_grad_norm_` would see no gradients. Instead,
    `max_norm` clips the gradient of each parameter by its own norm.

    Args:
        model: a model with compressed or dense weights, or both. Dense weights can be sharded with
            FSDP2. DDP is not supported.
        factory: an optimizer class, or a function that creates the optimizer of one parameter.
        accumulate: the number of gradients per update, counted per parameter. If a backward pass
            computes no gradient for a parameter, the parameter's update comes correspondingly
            later. If `accumulate` is more than one, dense gradients stay in memory until the
            update, as in usual training.
        max_norm: the largest allowed norm of each parameter's gradient. A gradient with a larger
            norm is scaled down.
        settings: arguments of the optimizer class, such as `lr`.

    Returns:
        An optimizer object for schedulers, checkpoints and training loops.

    Raises:
        OptionError: An argument, or the object that the factory returns, is not supported.
        MemeffError: Several processes train together, and FSDP2 does not shard every weight.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> _ = optim_in_backward(model, torch.optim.SGD, lr=0.1)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> model.weight.grad is None
        True
    """
    require_module(model, "optim_in_backward")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise OptionError(
            f"optim_in_backward: accumulate is {accumulate!r}; a whole number of backwards, 1 or "
            "more, is needed."
        )
    if max_norm is not None and not max_norm > 0:
        raise OptionError(
            f"optim_in_backward: max_norm is {max_norm!r}; a positive number or None is needed."
        )
    factory = _with_settings(factory, settings)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    shards = compat.fsdp_shards()
    for name, parameter in trained:
        _refuse_what_cannot_be_updated(name, parameter)
        _refuse_what_others_update(name, parameter, shards.get(id(parameter)))
    coded = [parameter for _, parameter in trained if isinstance(parameter, CodedWeight)]
    tight = [weight for weight in coded if weight.room != TRAINING_ROOM]
    for weight in tight:
        weight.room = TRAINING_ROOM
    with torch.no_grad():
        side_by_side(tight, TRAINING_ROOM, whole=True)
    queue = _Queue(coded)
    updates = [_Update(name, p, factory, queue, shards.get(id(p))) for name, p in trained]
    if not updates:
        raise OptionError(
            "optim_in_backward: no parameter of the model requires gradients. Set requires_grad on "
            "those to train (lossy compressed weights cannot be trained)."
        )
    return BackwardOptimizer(updates, accumulate, max_norm, queue)


def _with_settings(factory: Factory | type[Optimizer], settings: dict[str, Any]) -> Factory:
    """Return a function that creates the optimizer of one parameter with the given settings."""
    if isinstance(factory, type) and issubclass(factory, Optimizer):
        kind: Any = factory
        return lambda parameter: cast("Optimizer", kind([parameter], **settings))
    if settings:
        raise OptionError(
            f"optim_in_backward: {', '.join(settings)} were given, which are for the class of an "
            "optimizer, as in optim_in_backward(model, torch.optim.SGD, lr=1e-4); the factory is "
            f"a {type(factory).__name__}. Give them where it makes the optimizer."
        )
    return cast("Factory", factory)


def _refuse_what_cannot_be_updated(name: str, parameter: nn.Parameter) -> None:
    if is_updated_in_backward(parameter):
        raise OptionError(
            f"optim_in_backward: an earlier optim_in_backward updates {name}. Call remove() on the "
            "result of that call first."
        )
    if isinstance(parameter, CodedWeight) and not parse(parameter.codec).is_lossless:
        raise OptionError(
            f"optim_in_backward: {name} is compressed with fewer mantissa bits, which is for "
            "inference. Set its requires_grad to False, or compress with mantissa=7."
        )


def _refuse_what_others_update(
    name: str, parameter: nn.Parameter, shard: compat.FsdpShard | None
) -> None:
    if shard is not None and shard.is_on_host:
        raise MemeffError(
            f"optim_in_backward: FSDP2 keeps the shard of {name} in host memory, where its "
            "gradient may arrive after the update. Train without CPUOffloadPolicy, or with an "
            "ordinary optimizer."
        )
    if compat.is_sharded_by_fsdp(parameter):
        raise MemeffError(
            f"optim_in_backward: {name} is gathered at the moment, but its shard has to be "
            "updated. Call reshard() on the model first. FSDP1 is not served; fully_shard is."
        )
    distributed = torch.distributed
    is_running = distributed.is_available() and distributed.is_initialized()
    count = distributed.get_world_size() if is_running else 1
    if shard is None and count > 1:
        raise MemeffError(
            f"optim_in_backward: {count} processes train together, and each would update {name} "
            "with its own gradients only. Shard the model with fully_shard, train with one process,"
            " or freeze the compressed weights and train adapters."
        )
