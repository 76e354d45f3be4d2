"""The way out of every decline about a loss is tried: followed literally, it leads to a rewrite.

Each entry has a program that is declined, with the words of the hint that are followed, and the same
program after that. `NO_REMEDY` names the codes whose record offers none, and why.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile import passes
from memeff_compile.report import CHANGES, Record
from tests.support.captured_graphs import FUSE

D, V = 16, 128

Function = Callable[..., Any]


class Model(nn.Module):
    """A body, a head, and how the loss is computed."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=False)
        self.vector = nn.Parameter(torch.rand(V) + 0.5)
        self.number = nn.Parameter(torch.tensor(0.7))
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(self, self.body(x).sin(), y)


def loss_of(logits: Tensor, y: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1), **settings)


@dataclass(frozen=True)
class Remedy:
    """A declined program, its hint, and the program that follows the hint."""

    code: str
    declined: Function
    hint: str
    followed: Function
    settings: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)  # settings that are part of the remedy
    change: str = "rewrote"


def plain(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return loss_of(m.head(h), y)


def broken(m: Model, h: Tensor, y: Tensor) -> Tensor:
    logits = m.head(h)
    torch._dynamo.graph_break()
    return loss_of(logits, y)


def twice(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return loss_of(m.head(h).tanh().tanh(), y)


def in_no_grad(m: Model, h: Tensor, y: Tensor) -> Any:
    logits = m.head(h)
    with torch.no_grad():
        return loss_of(logits, y), h.sum()


def all_in_no_grad(m: Model, h: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        return loss_of(m.head(h), y)


def written(m: Model, h: Tensor, y: Tensor) -> Tensor:
    logits = m.head(h)
    logits.add_(m.vector)
    return loss_of(logits, y)


def padding_written(m: Model, h: Tensor, y: Tensor) -> Tensor:
    logits = m.head(h)
    logits[..., 120:] = -torch.inf
    return loss_of(logits, y % 120)


def leaving(m: Model, h: Tensor, y: Tensor) -> Any:
    def body(h: Tensor) -> Any:
        logits = m.head(h)
        return loss_of(logits, y), logits

    return checkpoint(body, h, use_reentrant=False)


def staying(m: Model, h: Tensor, y: Tensor) -> Any:
    return checkpoint(lambda h: loss_of(m.head(h), y), h, use_reentrant=False)


def with_logits(m: Model, h: Tensor, y: Tensor) -> Any:
    logits = m.head(h)
    return loss_of(logits, y), logits


def pruned(m: Model, h: Tensor, y: Tensor) -> Any:
    logits = F.linear(h, m.head.weight * (m.head.weight > 0))
    return loss_of(logits, y), logits


def pruned_without_loss(m: Model, h: Tensor, y: Tensor) -> Any:
    return F.linear(h, m.head.weight * (m.head.weight > 0))


def fewer_rows(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return m.head(h).log_softmax(-1).gather(-1, y[:, 1:].unsqueeze(-1)).mean()


def sliced_before(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return m.head(h[:, :7]).log_softmax(-1).gather(-1, y[:, 1:].unsqueeze(-1)).mean()


def unread(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(m.head(h).view(-1, V), y.view(-1))


@torch.compiler.allow_in_graph
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss of somebody else's that only shares its name with PyTorch's."""
    return F.cross_entropy(logits, labels)


def log_probs(logits: Tensor, y: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, y.unsqueeze(-1))


def hidden_of(h: Tensor, scale: Tensor) -> Tensor:
    return h * scale


REMEDIES = [
    Remedy(
        "prob_targets",
        lambda m, h, y: F.cross_entropy(
            m.head(h).view(-1, V), m.vector.detach().softmax(0).expand(16, V)
        ),
        "integer class indices",
        plain,
    ),
    Remedy(
        "divergence",
        lambda m, h, y: F.kl_div(
            m.head(h).log_softmax(-1), m.vector.detach().softmax(0).expand(2, 8, V), reduction="sum"
        ),
        "the softmax or log_softmax of a teacher's logits over all classes",
        lambda m, h, y: F.kl_div(
            m.head(h).log_softmax(-1),
            m.vector.detach().expand(2, 8, V).softmax(-1),
            reduction="sum",
        ),
    ),
    Remedy(
        "logits_reused",
        lambda m, h, y: (lambda p: (F.nll_loss(p.view(-1, V), y.view(-1)), p))(
            m.head(h).log_softmax(-1)
        ),
        "return the logits",
        lambda m, h, y: (lambda z: (F.nll_loss(z.log_softmax(-1).view(-1, V), y.view(-1)), z))(
            m.head(h)
        ),
    ),
    Remedy("unreadable_loss", unread, "torch.nn.functional", plain),
    Remedy(
        "not_log_softmax",
        lambda m, h, y: F.nll_loss(m.head(h).view(-1, V), y.view(-1)),
        "use cross_entropy",
        plain,
    ),
    Remedy(
        "setting_not_constant",
        lambda m, h, y: loss_of(m.head(h), y, ignore_index=h.shape[1]),
        "fixed number",
        lambda m, h, y: loss_of(m.head(h), y, ignore_index=8),
        settings={"dynamic": True},
    ),
    Remedy(
        "logits_reused",
        lambda m, h, y: (lambda z: (loss_of(z, y), z.amax(-1)))(m.head(h)),
        "return the logits and compute that outside",
        with_logits,
    ),
    Remedy(
        "logits_reused",
        lambda m, h, y: (lambda z: loss_of(z, y) + z.gather(-1, y.unsqueeze(-1)).mean())(m.head(h)),
        "gather from log_softmax",
        lambda m, h, y: (lambda z: loss_of(z, y) + log_probs(z, y).mean())(m.head(h)),
    ),
    Remedy(
        "no_linear_head",
        lambda m, h, y: loss_of(F.relu(m.head(h)), y),
        "one linear layer",
        plain,
    ),
    Remedy(
        "no_linear_head",
        lambda m, h, y: loss_of(30 * torch.sigmoid(m.head(h) / 7.5), y),
        "write c * sigmoid(x) as c / 2 * tanh(x / 2)",
        lambda m, h, y: loss_of(15 * torch.tanh(m.head(h) / 7.5 / 2), y),
    ),
    Remedy(
        "no_linear_head",
        lambda m, h, y: loss_of(torch.where(torch.arange(V) < 120, m.head(h), -1e9), y % 120),
        "cut them off (logits[..., :n])",
        lambda m, h, y: loss_of(m.head(h)[..., :120], y % 120),
    ),
    Remedy(
        "no_linear_head",
        lambda m, h, y: loss_of(m.head(h).masked_fill(m.vector > 1.4, -torch.inf), y % 8),
        "or add a vector",
        lambda m, h, y: loss_of(m.head(h) + torch.where(m.vector > 1.4, -torch.inf, 0), y % 8),
    ),
    Remedy(
        "no_linear_head",
        lambda m, h, y: F.cross_entropy(torch.einsum("btd,vd->bvt", h, m.head.weight), y),
        "write 'btd,vd->btv', and transpose the result",
        lambda m, h, y: F.cross_entropy(
            torch.einsum("btd,vd->btv", h, m.head.weight).transpose(1, 2), y
        ),
    ),
    Remedy(
        "mutated",
        padding_written,
        "cut them off",
        lambda m, h, y: loss_of(m.head(h)[..., :120], y % 120),
    ),
    Remedy(
        "graph_break_between",
        broken,
        "as one function",
        plain,
    ),
    Remedy(
        "head_scaled",
        lambda m, h, y: loss_of(
            torch.addmm(m.vector, h.view(-1, D), m.head.weight.t(), alpha=2.0, beta=0.5), y
        ),
        "write the sum without addmm",
        lambda m, h, y: loss_of(2.0 * (h.view(-1, D) @ m.head.weight.t()) + 0.5 * m.vector, y),
    ),
    Remedy(
        "scale_not_constant",
        lambda m, h, y: loss_of(m.vector * m.head(h), y),
        "F.linear(hidden, scale[:, None] * weight)",
        lambda m, h, y: loss_of(F.linear(h, m.vector[:, None] * m.head.weight), y),
    ),
    Remedy(
        "scale_not_constant",
        lambda m, h, y: loss_of(m.head(h) * 0.0, y),
        "finite and not zero",
        lambda m, h, y: loss_of(m.head(h) * 1e-3, y),
    ),
    Remedy(
        "scale_not_constant",
        lambda m, h, y: loss_of(m.number * torch.tanh(m.head(h)), y),
        "before the softcap",
        lambda m, h, y: loss_of(torch.tanh(m.number * m.head(h)), y),
    ),
    Remedy(
        "scale_not_constant",
        lambda m, h, y: loss_of((m.head(h) + m.vector) * h[..., :1], y),
        "scale the hidden states, add the bias after that",
        lambda m, h, y: loss_of(m.head(hidden_of(h, h[..., :1])) + m.vector, y),
    ),
    Remedy(
        "scale_not_constant",
        lambda m, h, y: loss_of(m.head(h) * (y[0, 0] + 1), y),
        "cast the scale to float32",
        lambda m, h, y: loss_of(m.head(h) * (y[0, 0] + 1).float(), y),
    ),
    Remedy(
        "logits_combined",
        lambda m, h, y: loss_of(m.head(h) + m.head(h.cos()).detach(), y),
        "add it to the hidden states, or as a vector",
        lambda m, h, y: loss_of(m.head(h + h.cos().detach()), y),
    ),
    Remedy(
        "unknown_step",
        lambda m, h, y: loss_of(m.head(h)[..., torch.arange(V).roll(1)], y),
        "on the weight",
        lambda m, h, y: loss_of(F.linear(h, m.head.weight[torch.arange(V).roll(1)]), y),
    ),
    Remedy(
        "unknown_step",
        lambda m, h, y: loss_of(m.head(h)[..., ::2], y // 2),
        "weight[0:128:2]",
        lambda m, h, y: loss_of(F.linear(h, m.head.weight[0:128:2]), y // 2),
    ),
    Remedy("rows_differ", fewer_rows, "slice the hidden states", sliced_before),
    Remedy(
        "class_dim_changed",
        lambda m, h, y: F.cross_entropy(m.head(h), y[:, :1].expand(-1, V) % 8),
        "transpose(1, 2) the logits",
        lambda m, h, y: F.cross_entropy(m.head(h).transpose(1, 2), y),
    ),
    Remedy("softcap_twice", twice, "once", lambda m, h, y: loss_of(m.head(h).tanh(), y)),
    Remedy(
        "bias_after_softcap",
        lambda m, h, y: loss_of(m.head(h).tanh() + m.vector, y),
        "before the softcap",
        lambda m, h, y: loss_of((m.head(h) + m.vector).tanh(), y),
    ),
    Remedy(
        "dtype_unsupported",
        lambda m, h, y: loss_of(m.head(h).double(), y),
        "cast them to float32",
        lambda m, h, y: loss_of(m.head(h).float(), y),
    ),
    Remedy(
        "class_weight",
        lambda m, h, y: all_weighted(m, h, y, m.vector),
        "detach them",
        lambda m, h, y: all_weighted(m, h, y, m.vector.detach()),
    ),
    Remedy(
        "detached",
        lambda m, h, y: (loss_of(m.head(h).detach(), y), h.sum()),
        "take the loss of logits that are not detached",
        lambda m, h, y: (plain(m, h, y), h.sum()),
    ),
    Remedy("region_mismatch", in_no_grad, "under the same no_grad", all_in_no_grad),
    Remedy("mutated", written, "out-of-place", lambda m, h, y: loss_of(m.head(h).add(m.vector), y)),
    Remedy("logits_leave_checkpoint", leaving, "return only the loss", staying),
    Remedy(
        "logits_kept",
        with_logits,
        "return only the loss",
        plain,
        settings={"options": {"memeff.logits": "eager"}},
    ),
    Remedy(
        "logits_kept",
        with_logits,
        "'deferred' or 'none'",
        with_logits,
        settings={"options": {"memeff.logits": "eager"}},
        after={"options": {"memeff.logits": "deferred"}},
    ),
    Remedy(
        "logits_not_deferrable",
        pruned,
        "{'memeff.logits': 'none'}",
        pruned,
        after={"options": {"memeff.logits": "none"}},
    ),
    Remedy(
        "logits_not_deferrable",
        pruned_without_loss,
        "compute the loss inside the compiled function",
        lambda m, h, y: loss_of(pruned_without_loss(m, h, y), y),
    ),
]


def all_weighted(m: Model, h: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():  # with gradients eager refuses such weights, too
        return loss_of(m.head(h), y, weight=weight)


def records_of(function: Function, **settings: Any) -> list[Record]:
    torch._dynamo.reset()
    memeff_compile.reset()
    options = {"memeff.inner": "eager", **settings.pop("options", {})}
    x = torch.randn(2, 8, D, generator=torch.Generator().manual_seed(1))
    y = torch.randint(0, V, (2, 8), generator=torch.Generator().manual_seed(2))
    torch.compile(Model(function), backend="memeff", options=options, **settings)(x, y)
    return list(memeff_compile.last_report().records)


NAMES = [f"{each.code}-{place}" for place, each in enumerate(REMEDIES)]


@pytest.mark.parametrize("remedy", REMEDIES, ids=NAMES)
def test_following_the_hint_leads_to_a_rewrite(remedy: Remedy) -> None:
    records = records_of(remedy.declined, **remedy.settings)
    declined = [r for r in records if r.code.partition("(")[0] == remedy.code]
    assert declined, [(r.code, r.sentence) for r in records]
    assert not [r for r in records if r.pass_name in FUSING and r.action in CHANGES]
    hints = " ".join(r.hint for r in declined)
    assert remedy.hint.lower() in hints.lower(), hints
    records = records_of(remedy.followed, **{**remedy.settings, **remedy.after})
    fused = [r for r in records if r.pass_name in FUSING and r.action in CHANGES]
    assert fused, [(r.code, r.sentence) for r in records]
    assert remedy.code not in {r.code for r in records}


FUSING = (FUSE, "fuse_divergence")

NO_REMEDY = {
    "vocab_too_small": "few classes make logits that are too small to matter",
    "head_narrow": "tests/passes/test_unfused_heads.py: the loss inside is fused at any width",
    "loss_not_read": "tests/passes/test_unfused_heads.py",
    "own_loss_function": "tests/passes/test_unfused_heads.py",
    "teacher_trains": "tests/passes/test_fuse_divergence.py: detached weights",
    "side_unsupported": "tests/passes/test_fuse_divergence.py",
    "graph_break_in_loss": "tests/passes/test_unfused_heads.py",
    "dynamic_vocabulary": "tests/passes/test_declines.py: sizes that Dynamo is told to keep",
    "tensor_parallel_head": "tests/distributed: heads that are split by classes",
    "subclass_weight": "tests/model: a weight left dense",
    "torch_func": "tests/passes/test_declines.py: gradients by backward()",
    "unsupported": "the op says what it needs",
}


def test_every_code_of_a_loss_has_a_remedy_or_a_reason_for_none() -> None:
    folder = Path(passes.__file__).parent
    files = [*(folder / "losses").glob("*.py"), folder / "fuse_linear_cross_entropy.py"]
    text = "".join(file.read_text() for file in files)
    written = set(re.findall(r'(?:Decline|Unfoldable)\(\s*f?"([a-z_]+)', text))
    assert len(written) > 25
    assert written - {each.code for each in REMEDIES} - set(NO_REMEDY) == set()
