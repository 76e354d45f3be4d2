"""Logits that a graph returns twice, with views of them, or as a view: the memory of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memeff_compile
from memeff_compile.logits.tensor import DeferredLogits

D, V = 8, 67

SHARED: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "twice": lambda a: (a, a),
    "last position": lambda a: (a, a[:, -1]),
    "last position first": lambda a: (a[:, -1], a),
    "overlapping": lambda a: (a[:, :-1], a[:, 1:]),
    "disjoint": lambda a: (a[:, :2], a[:, 2:]),
    "three": lambda a: (a[:1], a, a[-1, 1:]),
    "view": lambda a: (a, a.view(-1, V)),
    "reshape": lambda a: (a.reshape(1, -1, V), a[:, 1:].reshape(-1, V), a),
    "flatten of a part": lambda a: (a[1:].flatten(0, 1), a[:, 0]),
    "transpose": lambda a: (a, a.transpose(0, 1)[1:]),
    "alias": lambda a: (a, a[:]),
    "view of its own size": lambda a: (a, a.view_as(a)),
    "cast to its own type": lambda a: (a, a.double()),
    "contiguous": lambda a: (a, a.contiguous()),
    "detached": lambda a: (a, a.detach()),
    "detached part": lambda a: (a[:, 1:].detach(), a),
    "views of a copy": lambda a: (a, a[1:].clone()[:, 1:], (a * 2)[:, 1], (a * 2)),
    "views of a softcap": lambda a: ((b := 3 * (a / 3).tanh()), b[:, -1]),
    "views of a cast": lambda a: ((b := a.float()), b[:, -1], a),
    "copy of a transpose": lambda a: ((b := a.transpose(0, 1).contiguous()), b[1]),
    "transposed in memory": lambda a: ((b := a.transpose(0, 1) * 2), b[1]),
    "transpose alone": lambda a: (a.transpose(0, 1),),
    "transpose of a part": lambda a: (a[1:].transpose(0, 1)[::2],),
    "last position alone": lambda a: (a[:, -1],),
    "strided alone": lambda a: (a[:, ::2],),
    "leading part alone": lambda a: (a[:2],),
    "permuted in memory alone": lambda a: (3 * (a[:, None].permute(2, 0, 1, 3) / 3).tanh(),),
    "part of what is transposed in memory": lambda a: ((a.transpose(0, 1) * 2)[1:, :-1],),
    "cast of a transpose": lambda a: (a.transpose(0, 1).float(),),
    "copy of a part": lambda a: (a[1:, -2:].contiguous(),),
    "reshape of a transpose": lambda a: (a.transpose(0, 1).reshape(-1, V),),
    "one position": lambda a: (a[:, -1:],),
    "expanded": lambda a: (a[None].expand(2, *a.shape),),
    "classes in the middle": lambda a: (a.transpose(1, 2),),
}

# A view that the head's reader does not recognise as rows is left in the graph.
NOT_DEFERRED = ("view of its own size", "expanded", "classes in the middle")

# One case of each kind of memory; the others run with a loss in the slow tests, and alone here.
# With symbols and AOTAutograd, all run there and three here.
WITH_SYMBOLS = ("twice", "reshape", "views of a copy")
BESIDE_A_LOSS = {
    *("twice", "last position", "overlapping", "three", "reshape", "transpose", "alias"),
    *("view of its own size", "detached part", "views of a copy", "views of a softcap"),
    *("views of a cast", "transposed in memory", "transpose alone", "classes in the middle"),
    "part of what is transposed in memory",
}


def leaves(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True)
        for size in ((3, 4, D), (V, D))
    )
    labels = torch.randint(V, (3, 4), generator=generator)
    if kind == "dynamic":
        torch._dynamo.mark_dynamic(hidden, (0, 1))
        torch._dynamo.mark_dynamic(labels, (0, 1))
    return hidden, weight, labels


Program = Callable[[Tensor, Tensor, Tensor], Any]


def programs(name: str, inner: str, *, with_loss: bool) -> tuple[Program, Program]:
    """One function for eager PyTorch, and compiled by us."""
    torch._dynamo.reset()
    memeff_compile.reset()

    def forward(h: Tensor, w: Tensor, y: Tensor) -> Any:
        logits = F.linear(h.sin(), w)
        if not with_loss:
            return SHARED[name](logits)
        return (*SHARED[name](logits), F.cross_entropy(logits.view(-1, V), y.view(-1)))

    options = {"memeff.inner": inner}
    return forward, torch.compile(forward, backend="memeff", fullgraph=True, options=options)


@pytest.mark.parametrize(
    ("name", "kind", "inner", "with_loss"),
    [
        *(pytest.param(name, "static", "eager", False, id=f"{name}-alone") for name in SHARED),
        *(
            pytest.param(name, "static", "eager", True, id=f"{name}-beside a fused loss")
            for name in SHARED
            if name in BESIDE_A_LOSS
        ),
        *(
            pytest.param(
                *(name, "dynamic", "aot_eager", True),
                id=f"{name}-beside a fused loss, with symbols",
                marks=() if name in WITH_SYMBOLS else pytest.mark.slow,
            )
            for name in SHARED
        ),
    ],
)
def test_a_write_to_one_output_is_seen_in_the_others(
    name: str, kind: str, inner: str, *, with_loss: bool
) -> None:
    count = len(SHARED[name](torch.zeros(3, 4, V, dtype=torch.float64)))
    pair = programs(name, inner, with_loss=with_loss)
    for written in range(count):
        seen: list[Any] = []
        places: list[Any] = []
        for program in pair:
            h, w, y = leaves(kind)
            outputs = program(h, w, y)[:count]
            is_deferred = [isinstance(output, DeferredLogits) for output in outputs]
            facts = [(out.stride(), out.storage_offset()) for out in outputs]
            with torch.no_grad():
                outputs[written].flatten().add_(1)  # a copy, unless contiguous
                outputs[written][0].mul_(3)
                outputs[written][-1, ..., 0] = 5
            total = sum(out.double().sin().sum() for out in outputs if out.requires_grad)
            gradients = torch.autograd.grad(total, (h, w))
            seen.append([*(out.detach() + 0 for out in outputs), *gradients])
            places.append(facts)
        torch.testing.assert_close(seen[1], seen[0])
        assert places[1] == places[0]
        left = name in NOT_DEFERRED or ("detached" in name and not with_loss)
        assert is_deferred == [not left] * count
    codes = {record.code for record in memeff_compile.last_report().records}
    assert ("logits_not_deferrable" in codes) == (name == "classes in the middle")
    assert not with_loss or name in NOT_DEFERRED or "rewrote" in codes


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_hook_of_the_head_is_not_called_where_no_gradient_reaches_it(is_turned: bool) -> None:
    embedding, head = nn.Embedding(67, 8), nn.Linear(8, 67, bias=False)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = embedding(x).tanh()
        return hidden @ head.weight.t() if is_turned else head(hidden), hidden.sum()

    compiled: Any = torch.compile(forward, backend="memeff", options={"memeff.inner": "aot_eager"})
    logits, other = compiled(torch.arange(6).view(2, 3))
    seen: list[Tensor] = []
    head.weight.register_hook(seen.append)
    other.backward(retain_graph=True)
    assert not seen
    assert head.weight.grad is None
    logits.square().sum().backward()
    assert len(seen) == 1
    assert embedding.weight.grad is not None


RETURNED: dict[str, Callable[[nn.Linear, Tensor], Any]] = {
    "product": lambda head, h: h @ head.weight.t(),
    "product and bias": lambda head, h: head(h),
    "product and bias of one dimension": lambda head, h: head(h[0, 0]),
    "transposed input": lambda head, h: head(h.transpose(0, 1)),
    "reshape": lambda head, h: F.linear(h, head.weight).reshape(-1, V),
    "unsqueeze": lambda head, h: F.linear(h, head.weight).unsqueeze(0),
    "contiguous": lambda head, h: head(h).contiguous(),
    "softcap": lambda head, h: 3 * (head(h) / 3).tanh(),
    "reshape of a cast": lambda head, h: head(h).float().view(-1, V),
    "twice": lambda head, h: (a := head(h), a),
    "last position beside": lambda head, h: (a := head(h), a[:, -1]),
    "last position": lambda head, h: head(h)[:, -1],
}


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        *(pytest.param(name, False, id=f"{name}-static") for name in RETURNED),
        *(
            pytest.param(
                *(name, True),
                id=f"{name}-dynamic",
                marks=() if name in ("product", "softcap") else pytest.mark.slow,
            )
            for name in RETURNED
        ),
    ],
)
def test_a_write_leaves_the_hooks_of_a_view_behind_as_in_eager(name: str, *, dynamic: bool) -> None:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(V, D), nn.Linear(D, V)
    ids = torch.randint(V, (2, 3))

    def forward(x: Tensor) -> Any:
        return RETURNED[name](head, embedding(x).sin())

    options = {"memeff.inner": "eager"}
    compiled: Any = torch.compile(forward, backend="memeff", options=options, dynamic=dynamic)
    seen: list[Any] = []
    for program in (forward, compiled):
        hooked: list[Tensor] = []
        result = program(ids)
        logits = result[0] if isinstance(result, tuple) else result
        seen.append([logits._is_view(), hooked])
        if isinstance(result, tuple):
            seen[-1].append(result[1] is logits)
        logits.register_hook(hooked.append)
        logits[:1].mul_(2)
        seen[-1] += torch.autograd.grad(logits.sin().sum(), head.weight)
        fresh = program(ids)
        fresh = fresh[0] if isinstance(fresh, tuple) else fresh
        loss = F.cross_entropy(fresh.view(-1, V), torch.zeros(fresh.numel() // V).long())
        fresh.detach()[:1].mul_(3)
        seen[-1] += torch.autograd.grad(loss, fresh, create_graph=True, allow_unused=True)
    assert isinstance(logits, DeferredLogits)
    torch.testing.assert_close(seen[1], seen[0], allow_subclasses=True)
