"""Losses that are written out by hand: each fuses as the call that it spells, or says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.trainer_pt_utils import LabelSmoother

import memeff_compile
from memeff_compile.errors import TargetRangeError
from tests.passes.test_near_misses import head_inputs, logits_of
from tests.support.captured_graphs import compare_with_eager
from tests.support.surfaces import V

Loss = Callable[[Tensor, Tensor], Any]
"""A loss of logits, (rows, V) or (batch, length, V), and class indices."""


def rows(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[0], device=logits.device)


def flat(loss: Loss) -> Loss:
    return lambda z, y: loss(z.flatten(0, 1), y.flatten())


def log_softmax_by_index(z: Tensor, y: Tensor) -> Tensor:
    return -F.log_softmax(z, -1)[rows(z), y].mean()


def log_softmax_by_index_of_a_minus(z: Tensor, y: Tensor) -> Tensor:
    return (-F.log_softmax(z, -1))[rows(z), y].mean()


def log_softmax_by_two_positions(z: Tensor, y: Tensor) -> Tensor:
    first = torch.arange(z.shape[0])[:, None]
    second = torch.arange(z.shape[1])[None]
    return -F.log_softmax(z, -1)[first, second, y].mean()


def log_softmax_by_two_positions_that_broadcast(z: Tensor, y: Tensor) -> Tensor:
    first = torch.arange(z.shape[0]).unsqueeze(1)
    return -F.log_softmax(z, -1)[first, torch.arange(z.shape[1]), y].mean()


def logsumexp_less_the_indexed(z: Tensor, y: Tensor) -> Tensor:
    return (z.logsumexp(-1) - z[rows(z), y]).mean()


def indexed_less_the_logsumexp(z: Tensor, y: Tensor) -> Tensor:
    return -(z[rows(z), y] - torch.logsumexp(z, dim=1)).sum()


def logsumexp_less_the_gathered(z: Tensor, y: Tensor) -> Tensor:
    return (torch.logsumexp(z, -1, keepdim=True) - z.gather(-1, y[..., None])).mean()


def logsumexp_less_what_is_taken(z: Tensor, y: Tensor) -> Tensor:
    return (torch.logsumexp(z, -1) - torch.take_along_dim(z, y[..., None], -1).squeeze(-1)).mean()


def minus_log_softmax_gathered(z: Tensor, y: Tensor) -> Tensor:
    return (-F.log_softmax(z, -1)).gather(-1, y[..., None]).mean()


def minus_gathered_log_softmax(z: Tensor, y: Tensor) -> Tensor:
    return -F.log_softmax(z, -1).gather(-1, y[..., None]).mean()


def times_minus_one(z: Tensor, y: Tensor) -> Tensor:
    return (F.log_softmax(z, -1) * -1).gather(-1, y[..., None]).mean()


def one_hot_sum(z: Tensor, y: Tensor) -> Tensor:
    return -(F.one_hot(y, V) * F.log_softmax(z, -1)).sum(-1).mean()


def one_hot_sum_in_floats(z: Tensor, y: Tensor) -> Tensor:
    return -(F.log_softmax(z, -1) * F.one_hot(y, num_classes=V).to(z.dtype)).sum(-1).mean()


def one_hot_sum_that_keeps_the_dimension(z: Tensor, y: Tensor) -> Tensor:
    return (-F.one_hot(y, V).double() * z.log_softmax(-1)).sum(dim=-1, keepdim=True).mean()


def logsumexp_by_hand(z: Tensor, y: Tensor) -> Tensor:
    return (z.exp().sum(-1).log() - z[rows(z), y]).mean()


def with_the_maximum_taken_off(z: Tensor, y: Tensor) -> Tensor:
    peak = z.max(-1, keepdim=True).values
    lse = (z - peak).exp().sum(-1).log() + peak.squeeze(-1)
    return (lse - z[rows(z), y]).mean()


def with_the_detached_maximum_taken_off(z: Tensor, y: Tensor) -> Tensor:
    peak = z.amax(-1, keepdim=True).detach()
    lse = torch.log(torch.exp(z - peak).sum(-1, keepdim=True)) + peak
    return (lse - z.gather(-1, y[..., None])).mean()


def with_the_maximum_of_the_detached_taken_off(z: Tensor, y: Tensor) -> Tensor:
    peak, _ = torch.max(z.detach(), dim=-1, keepdim=True)
    lse = peak + (z - peak).exp().sum(-1, keepdim=True).log()
    return -(z - lse).gather(-1, y[..., None]).mean()


def log_softmax_of_the_rest(z: Tensor, y: Tensor) -> Tensor:
    x = z - z.max(-1, keepdim=True)[0]
    logs = x - x.exp().sum(-1, keepdim=True).log()
    return -logs.gather(-1, y[..., None]).mean()


def logits_less_their_logsumexp(z: Tensor, y: Tensor) -> Tensor:
    return -(z - z.logsumexp(-1, keepdim=True))[rows(z), y].mean()


def smoothed_by_the_mean(z: Tensor, y: Tensor) -> Tensor:
    logs = F.log_softmax(z, -1)
    nll = -logs.gather(dim=-1, index=y.unsqueeze(1)).squeeze(1)
    return (0.9 * nll + 0.1 * -logs.mean(dim=-1)).mean()


def smoothed_by_the_sum(z: Tensor, y: Tensor) -> Tensor:
    logs = F.log_softmax(z, -1)
    nll, smooth = -logs.gather(-1, y[..., None]), -logs.sum(-1, keepdim=True)
    share = 0.1 / (z.shape[-1] - 1)
    padded = y[..., None].eq(1)
    nll, smooth = nll.masked_fill(padded, 0.0), smooth.masked_fill(padded, 0.0)
    return (0.9 - share) * nll.sum() + share * smooth.sum()


def smoothed_with_writes(z: Tensor, y: Tensor) -> Tensor:
    logs = -F.log_softmax(z, dim=-1)
    labels = y.unsqueeze(-1)
    padded = labels.eq(1)
    nll = logs.gather(dim=-1, index=torch.clamp(labels, min=0))
    smooth = logs.sum(dim=-1, keepdim=True, dtype=torch.float64)
    nll.masked_fill_(padded, 0.0)
    smooth.masked_fill_(padded, 0.0)
    active = padded.numel() - padded.long().sum()
    return 0.9 * nll.sum() / active + 0.1 * smooth.sum() / (active * logs.shape[-1])


def smoothed_by_the_mean_of_logits(z: Tensor, y: Tensor) -> Tensor:
    lse = z.logsumexp(-1)
    return (lse - 0.9 * z[rows(z), y] - 0.1 * z.mean(-1)).mean()


def confident_and_scaled(z: Tensor, y: Tensor) -> Tensor:
    logs = (z / 2).log_softmax(-1)
    return -(logs[rows(z), y] + 0.2 * logs.mean(-1)).sum()


def minus_log_softmax_viewed_and_gathered(z: Tensor, y: Tensor) -> Tensor:
    return (-F.log_softmax(z, -1)).view(-1, V).gather(-1, y.reshape(-1, 1)).mean()


def logsumexp_less_a_one_hot_sum(z: Tensor, y: Tensor) -> Tensor:
    return (z.logsumexp(-1) - (z * F.one_hot(y, V)).sum(-1)).mean()


def logsumexp_less_a_smoothed_one_hot_sum(z: Tensor, y: Tensor) -> Tensor:
    target = F.one_hot(y, V).to(z.dtype) * 0.9 + 0.1 / V
    return (z.logsumexp(-1, keepdim=True) - (target * z).sum(-1, keepdim=True)).mean()


def one_hot_sum_of_everything(z: Tensor, y: Tensor) -> Tensor:
    return -(F.one_hot(y, V) * F.log_softmax(z, -1)).sum()


def one_hot_smoothed(z: Tensor, y: Tensor) -> Tensor:
    target = F.one_hot(y, V).to(z.dtype) * (1 - 0.1) + 0.1 / V
    return -(target * z.log_softmax(-1)).sum(-1).mean()


def one_hot_by_scatter(z: Tensor, y: Tensor) -> Tensor:
    logs = z.log_softmax(-1)
    target = torch.zeros_like(logs).scatter(-1, y.unsqueeze(-1), 1.0)
    return torch.sum(-target * logs, -1).mean()


def one_hot_by_writes(z: Tensor, y: Tensor) -> Tensor:
    logs = z.log_softmax(dim=-1)
    with torch.no_grad():
        target = torch.zeros_like(logs)
        target.fill_(0.1 / (V - 1))
        target.scatter_(-1, y.unsqueeze(-1), 0.9)
    return torch.mean(torch.sum(-target * logs, dim=-1))


def one_hot_by_writes_in_a_row(z: Tensor, y: Tensor) -> Tensor:
    target = torch.full(z.shape, 0.01, dtype=z.dtype).scatter_(-1, y.unsqueeze(-1), value=0.9)
    return -(target * z.log_softmax(dim=-1)).sum()


def one_hot_probabilities(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, F.one_hot(y, V).to(z.dtype))


def one_hot_probabilities_smoothed_twice(z: Tensor, y: Tensor) -> Tensor:
    target = 0.8 * F.one_hot(y, V).to(z.dtype) + 0.2 / V
    return F.cross_entropy(z, target, label_smoothing=0.3, reduction="sum")


def shifted_logsumexp_less_the_shifted_entry(z: Tensor, y: Tensor) -> Tensor:
    x = z - z.max(-1, keepdim=True)[0].detach()
    return (x.exp().sum(-1).log() - x.gather(-1, y[..., None]).squeeze(-1)).mean()


def shifted_entry_less_the_shifted_logsumexp(z: Tensor, y: Tensor) -> Tensor:
    x = z - z.amax(-1, keepdim=True)
    return -(x[rows(z), y] - torch.log(torch.exp(x).sum(-1))).mean()


def shifted_entry_that_keeps_the_dimension(z: Tensor, y: Tensor) -> Tensor:
    x = z - z.amax(-1, keepdim=True)
    return (x.logsumexp(-1, keepdim=True) - x.gather(-1, y[..., None])).mean()


def log_softmax_of_the_shifted(z: Tensor, y: Tensor) -> Tensor:
    return -(z - z.amax(-1, keepdim=True)).log_softmax(-1).gather(-1, y[..., None]).mean()


def log_of_probabilities_by_hand(z: Tensor, y: Tensor) -> Tensor:
    powers = (z - z.amax(-1, keepdim=True)).exp()
    return -(powers / powers.sum(-1, keepdim=True)).log().gather(-1, y[..., None]).mean()


def shift_squeezed_later(z: Tensor, y: Tensor) -> Tensor:
    peak = z.amax(-1, keepdim=True)
    lse = (z - peak).exp().sum(-1, keepdim=True).log().squeeze(-1) + peak.squeeze(-1)
    return (lse - z.gather(-1, y[..., None]).squeeze(-1)).mean()


def smoothed_by_the_mean_of_everything(z: Tensor, y: Tensor) -> Tensor:
    logs = z.log_softmax(-1)
    return -0.9 * logs.gather(-1, y[..., None]).mean() - 0.1 * logs.mean()


def smoothed_by_the_sum_of_everything(z: Tensor, y: Tensor) -> Tensor:
    logs = -z.log_softmax(-1)
    return 0.9 * logs.gather(-1, y[..., None]).sum() + 0.1 / V * logs.sum()


def index_from_the_end(z: Tensor, y: Tensor) -> Tensor:
    return -z.log_softmax(-1)[rows(z), y - V].mean()


def log_softmax_by_a_range(z: Tensor, y: Tensor) -> Tensor:
    return -z.log_softmax(-1)[range(len(y)), y].mean()


def logsumexp_less_the_listed(z: Tensor, y: Tensor) -> Tensor:
    return (z.logsumexp(-1) - z[list(range(16)), y]).mean()


def log_of_the_probability(z: Tensor, y: Tensor) -> Tensor:
    return -z.softmax(-1).gather(-1, y[..., None])[..., 0].log().mean()


def log_of_the_probability_by_index(z: Tensor, y: Tensor) -> Tensor:
    counts = z.exp()
    return -(counts / counts.sum(1, keepdim=True))[rows(z), y].log().mean()


def shifted_entry_selected(z: Tensor, y: Tensor) -> Tensor:
    x = z - z.max(-1, keepdim=True).values
    return (x.exp().sum(-1).log() - x.gather(-1, y[..., None])[..., 0]).mean()


def smoother_of_transformers(z: Tensor, y: Tensor) -> Tensor:
    return LabelSmoother(epsilon=0.1, ignore_index=3)({"logits": z}, y)


def shifting_smoother_of_transformers(z: Tensor, y: Tensor) -> Tensor:
    return LabelSmoother(ignore_index=3)({"logits": z}, y, shift_labels=True)


FUSED: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (
        *(log_softmax_by_two_positions, log_softmax_by_two_positions_that_broadcast),
        *(logsumexp_less_the_gathered, logsumexp_less_what_is_taken),
        *(minus_log_softmax_gathered, minus_gathered_log_softmax, times_minus_one),
        *(one_hot_sum, one_hot_sum_in_floats, one_hot_sum_that_keeps_the_dimension),
        *(with_the_detached_maximum_taken_off, with_the_maximum_of_the_detached_taken_off),
        *(log_softmax_of_the_rest, smoothed_by_the_sum, smoothed_with_writes),
        *(minus_log_softmax_viewed_and_gathered, one_hot_sum_of_everything, one_hot_smoothed),
        *(logsumexp_less_a_one_hot_sum, logsumexp_less_a_smoothed_one_hot_sum),
        *(one_hot_by_scatter, one_hot_by_writes, one_hot_by_writes_in_a_row),
        *(shifted_logsumexp_less_the_shifted_entry, shifted_entry_that_keeps_the_dimension),
        *(log_softmax_of_the_shifted, log_of_probabilities_by_hand, shift_squeezed_later),
        *(smoothed_by_the_mean_of_everything, smoothed_by_the_sum_of_everything),
        *(log_of_the_probability, shifted_entry_selected),
    )
} | {
    loss.__name__: flat(loss)
    for loss in (
        *(log_softmax_by_index, log_softmax_by_index_of_a_minus, logits_less_their_logsumexp),
        *(logsumexp_less_the_indexed, indexed_less_the_logsumexp, logsumexp_by_hand),
        *(with_the_maximum_taken_off, smoothed_by_the_mean, smoothed_by_the_mean_of_logits),
        *(confident_and_scaled, one_hot_probabilities, one_hot_probabilities_smoothed_twice),
        *(shifted_entry_less_the_shifted_logsumexp, index_from_the_end),
        log_of_the_probability_by_index,
    )
}
BY_NUMBERS: dict[str, Loss] = {
    loss.__name__: flat(loss) for loss in (log_softmax_by_a_range, logsumexp_less_the_listed)
}
"""Losses whose rows are Python's numbers, of which as many as rows must be known."""


NOT_WIDER: dict[str, Loss] = {
    loss.__name__: loss for loss in (smoother_of_transformers, shifting_smoother_of_transformers)
}
"""Losses that sum in fp32, so they are compared in fp32."""


def with_head(loss: Loss) -> Callable[[Tensor, Tensor, Tensor], Any]:
    return lambda h, w, y: loss(logits_of(h, w), y)


@pytest.mark.parametrize("name", FUSED | BY_NUMBERS)
def test_a_loss_by_hand_fuses(name: str) -> None:
    h, w, _, y = head_inputs(ignored=False)
    outcome = compare_with_eager(with_head((FUSED | BY_NUMBERS)[name]), h, w, y)
    assert (outcome.fired, outcome.codes) == (1, [])


@pytest.mark.parametrize("name", [*NOT_WIDER, "one_hot_by_writes", "smoothed_by_the_sum"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_it_fuses_in_fp32(name: str, inner: str) -> None:
    h, w, _, y = head_inputs(ignored=False)
    single = [each.detach().float().requires_grad_() for each in (h, w)]
    how = {"rtol": 2e-5, "atol": 2e-5, "inner": inner}
    outcome = compare_with_eager(with_head((FUSED | NOT_WIDER)[name]), *single, y, **how)
    assert (outcome.fired, outcome.codes) == (1, [])


@pytest.mark.parametrize("name", FUSED)
def test_it_fuses_with_dynamic_sizes(name: str) -> None:
    h, w, _, y = head_inputs(ignored=False)
    head = nn.Linear(w.shape[1], V, bias=False, dtype=w.dtype)
    outcome = compare_with_eager(lambda h, y: FUSED[name](head(h), y), h, y, dynamic=True)
    assert (outcome.fired, outcome.codes) == (1, [])


def gradients(function: Callable[..., Any], *inputs: Tensor) -> Tensor:
    leaves = [i.detach().requires_grad_(i.is_floating_point()) for i in inputs]
    function(*leaves).backward()
    return torch.cat([i.grad.double().flatten() for i in leaves if i.grad is not None])


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize(
    "name",
    ["log_softmax_by_index", "with_the_maximum_taken_off", "smoothed_by_the_mean", *NOT_WIDER],
)
def test_sixteen_bits_lose_no_more_than_in_eager(name: str, autocast: bool) -> None:
    h, w, _, y = head_inputs(4, 32, ignored=False)
    loss = with_head((FUSED | NOT_WIDER)[name])

    def function(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss(h, w, y)

    dtype = torch.float32 if autocast else torch.bfloat16
    given = [each.detach().to(dtype) for each in (h, w)]
    truth = gradients(loss, *(each.double() for each in given), y)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="memeff", options={"memeff.inner": "aot_eager"})
    ours, eager = (gradients(f, *given, y) for f in (compiled, function))
    assert (ours - truth).norm() <= 1.1 * (eager - truth).norm()


@pytest.mark.parametrize("name", ["log_softmax_by_index", "smoothed_by_the_mean", "one_hot_sum"])
def test_no_logits_are_left_in_the_graph(name: str) -> None:
    seen: list[torch.Size] = []

    def look(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        values = (node.meta.get("example_value") for node in gm.graph.nodes)
        seen.extend(v.shape for v in values if isinstance(v, Tensor))
        return gm.forward

    from memeff_compile import compat
    from memeff_compile.backend import memeff

    h, w, _, y = head_inputs(ignored=False)
    torch._dynamo.reset()
    original = compat.compile_with_aot_eager
    try:
        compat.compile_with_aot_eager = look  # type: ignore[assignment]
        compiled = torch.compile(
            with_head(FUSED[name]), backend=memeff, options={"memeff.inner": "aot_eager"}
        )
        compiled(h, w, y)
    finally:
        compat.compile_with_aot_eager = original
    assert not [shape for shape in seen if V in shape[-1:]]


@pytest.mark.parametrize("beyond", [V, -V - 1])
def test_an_index_beyond_the_classes_raises_as_in_eager(beyond: int) -> None:
    h, w, _, y = head_inputs(ignored=False)
    y[0, 1] = beyond
    loss = with_head(FUSED["log_softmax_by_index"])
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="memeff", options={"memeff.inner": "eager"})
    with pytest.raises(IndexError):
        loss(h, w, y)
    with pytest.raises(TargetRangeError):
        compiled(h, w, y)


# --- sizes of logits, and rows that a mask chooses ------------------------------------------------


def kept_rows(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z[y != 3], y[y != 3])


def log_probs_of_kept_rows(z: Tensor, y: Tensor) -> Tensor:
    mask = y != 3
    return -z.log_softmax(-1)[mask].gather(-1, y[mask].unsqueeze(-1)).mean()


def kept_rows_counted(z: Tensor, y: Tensor) -> Tensor:
    logits = z[y != 3]
    return F.cross_entropy(logits, y[y != 3], reduction="sum") / logits.shape[0]


BEFORE_213 = pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="Dynamo before torch 2.13 compares two counts of kept rows, and raises, on any backend",
)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(kept_rows, marks=BEFORE_213),
        log_probs_of_kept_rows,
        pytest.param(kept_rows_counted, marks=BEFORE_213),
    ],
)
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_rows_that_a_mask_chooses_are_chosen_of_hidden_states(loss: Loss, inner: str) -> None:
    h, w, _, y = head_inputs(ignored=False)
    y[0, :4] = 3
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        outcome = compare_with_eager(with_head(loss), h, w, y, inner=inner)
    assert (outcome.fired, outcome.codes) == (1, [])


# --- tensors without dimensions -------------------------------------------------------------------

NARROW: dict[str, Callable[[Tensor], Any]] = {
    "logsumexp": lambda z: z.logsumexp(-1),
    "log_softmax": lambda z: z.log_softmax(-1),
    "softmax": lambda z: z.softmax(-1),
    "sum": lambda z: z.log_softmax(-1).sum(-1),
    "mean": lambda z: z.log_softmax(-1).mean(-1),
    "sum of everything": lambda z: z.log_softmax(-1).sum(),
    "product": lambda z: (z.softmax(-1) * z.log_softmax(-1)).sum(-1),
    "argmax": lambda z: (z.argmax(-1), z.max(-1)[1], z.max(-1)[0]),
    "amax": lambda z: (z - z.amax(-1)).exp().sum(-1).log() + z.amax(-1),
    "difference": lambda z: z - z.logsumexp(-1, keepdim=True),
    "gather": lambda z: z.log_softmax(-1).gather(-1, torch.zeros_like(z, dtype=torch.int64)),
    "take": lambda z: z.reshape(-1).take_along_dim(torch.zeros(1, dtype=torch.int64), -1),
    "new axis": lambda z: z[None].logsumexp(-1),
    "moved": lambda z: z.transpose(-1, -1).logsumexp(-1),
    "divergence": lambda z: F.kl_div(z.log_softmax(-1), z.softmax(-1), reduction="sum"),
    "entropy": lambda z: torch.special.entr(z.softmax(-1)).sum(-1),
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("rank", ["no dimension", "a vector", "a product"])
def test_tensors_of_few_dimensions_are_read_without_an_error(name: str, rank: str) -> None:
    h, w, _, _ = head_inputs(ignored=False)

    def function(h: Tensor, w: Tensor) -> Any:
        z = F.linear(h[0, 0], w)
        return NARROW[name]({"no dimension": z.sum(), "a vector": z, "a product": z @ z}[rank])

    compare_with_eager(function, h, w)


# --- reasons ----------------------------------------------------------------------------------------


def mixed_labels(z: Tensor, y: Tensor) -> Tensor:
    target = 0.3 * F.one_hot(y, V) + 0.7 * F.one_hot(y.flip(0), V)
    return F.cross_entropy(z, target.to(z.dtype))


def mixed_losses(z: Tensor, y: Tensor) -> Tensor:
    return 0.3 * F.cross_entropy(z, y) + 0.7 * F.cross_entropy(z, y.flip(0))


def focal_of_all_classes(z: Tensor, y: Tensor) -> Tensor:
    logs = z.log_softmax(-1)
    return -((1 - logs.exp().gather(-1, y[:, None])) ** 2 * logs.gather(-1, y[:, None])).mean()


def focal(z: Tensor, y: Tensor) -> Tensor:
    logs = z.log_softmax(-1).gather(-1, y[:, None])
    return -((1 - logs.exp()) ** 2 * logs).mean()


@pytest.mark.parametrize(
    ("loss", "codes", "way_out"),
    [
        (mixed_labels, ["prob_targets"], mixed_losses),
        (focal_of_all_classes, ["unknown_step", "logits_reused(exp)"], focal),
    ],
)
def test_what_does_not_fuse_says_why_and_its_way_out_does(
    loss: Loss, codes: list[str], way_out: Loss | None
) -> None:
    h, w, _, y = head_inputs(ignored=False)
    outcome = compare_with_eager(with_head(flat(loss)), h, w, y)
    assert (outcome.fired, outcome.codes) == (0, codes)
    if way_out is not None:
        assert compare_with_eager(with_head(flat(way_out)), h, w, y).fired == 1


@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16], ids=str)
def test_a_written_cast_right_before_the_loss_is_not_applied(rounded: torch.dtype) -> None:
    """The loss is that of unrounded logits, so it is closer to fp64 than eager's."""
    h, w, _, y = head_inputs(ignored=False)
    h, w, y = h.flatten(0, 1).float(), w.float(), y.flatten()

    def cast(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w).to(rounded).float(), y)

    exact = F.cross_entropy(h.double() @ w.double().T, y)
    found = torch.compile(cast, backend="memeff", options={"memeff.inner": "eager"})(h, w, y)
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == 1
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    assert (found - exact).abs() < (cast(h, w, y) - exact).abs()
