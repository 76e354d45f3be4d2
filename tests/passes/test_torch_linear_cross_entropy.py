"""`F.linear_cross_entropy(options=...)`, PyTorch's own chunked loss, is a match like any other."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memeff_compile

pytestmark = pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="this torch has no such options"
)

N, D, V = 12, 16, 96
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def chunked(h: Tensor, w: Tensor, b: Tensor, y: Tensor, **settings: Any) -> Tensor:
    given = settings.pop("options", None) or nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(h, w, y, options=given, **settings)


def rows(**settings: Any) -> dict[str, Any]:
    return {"options": nn.LinearCrossEntropyOptions(**settings)}


CLASS_WEIGHT = torch.linspace(0.5, 1.5, V, dtype=torch.float64)
SETTINGS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "default": lambda b: {},
    "sum": lambda b: {"reduction": "sum"},
    "none": lambda b: {"reduction": "none"},
    "rows of a chunk": lambda b: rows(batch_chunk_size=5),
    "a method": lambda b: rows(chunking_method="aspect_ratio:4"),
    "accurate": lambda b: rows(acc_policy="accurate"),
    "compact": lambda b: rows(acc_policy="compact"),
    "a dtype of sums": lambda b: rows(acc_dtype=torch.float64),
    "a retained graph": lambda b: rows(allow_retain_graph=True),
    "bias": lambda b: {"linear_bias": b},
    "class weights": lambda b: {"weight": CLASS_WEIGHT},
    "class weights, none": lambda b: {"weight": CLASS_WEIGHT, "reduction": "none"},
    "all of these": lambda b: {
        "linear_bias": b,
        "weight": CLASS_WEIGHT,
        "ignore_index": 3,
        **rows(batch_chunk_size=5, acc_policy="compact"),
    },
    "ignore_index": lambda b: {"ignore_index": 3},
    "ignore_index None": lambda b: {"ignore_index": None},
    "smoothed class weights": lambda b: {"label_smoothing": 0.1, "weight": CLASS_WEIGHT},
    "label smoothing, which PyTorch does not chunk": lambda b: {"label_smoothing": 0.1},
}
if torch.__version__ < (2, 14):
    SETTINGS["balanced"] = lambda b: rows(acc_policy="balanced")


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    h, w, b = (torch.randn(*size, dtype=dtype) for size in ((N, D), (V, D), (V,)))
    y = torch.randint(0, V, (N,))
    y[2], y[5] = -100, 3
    return h.requires_grad_(), w.requires_grad_(), b.requires_grad_(), y


def compiled(loss: Callable[..., Tensor], **options: Any) -> Any:
    torch._dynamo.reset()
    memeff_compile.reset()
    given = {"memeff.inner": "eager", **options}
    return torch.compile(loss, backend="memeff", options=given, fullgraph=True)


def gradients(loss: Tensor, *given: Tensor) -> list[Tensor | None]:
    scale = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return list(torch.autograd.grad((loss * scale).sum(), given, allow_unused=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_option_is_fused_and_equals_eager(name: str) -> None:
    h, w, b, y = operands()
    settings = SETTINGS[name](b)
    if "ignore_index" in settings:
        y[2] = 3
    meaning = {key: value for key, value in settings.items() if key != "options"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compiled(lambda *given: chunked(*given, **settings))(h, w, b, y)
    (record,) = memeff_compile.last_report().records
    assert record.action == "rewrote"
    assert "memeff::linear_cross_entropy" in record.sentence
    wanted = F.linear_cross_entropy(h, w, y, **meaning)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    pairs = zip(gradients(found, h, w, b), gradients(wanted, h, w, b), strict=True)
    for got, expected in pairs:
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_a_row_without_a_batch_is_fused() -> None:
    h, w, b, y = operands()
    found = compiled(lambda h, w, b, y: chunked(h[0], w, b, y[0]))(h, w, b, y)
    (record,) = memeff_compile.last_report().records
    assert record.action == "rewrote"
    wanted = F.linear_cross_entropy(h[0], w, y[0])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_the_loss_keeps_the_dtype_of_16_bit_operands() -> None:
    h, w, b, y = operands(torch.bfloat16)
    found = compiled(chunked)(h, w, b, y)
    assert found.dtype == torch.bfloat16
    (record,) = memeff_compile.last_report().records
    assert record.action == "rewrote"
    exact = F.linear_cross_entropy(h.double(), w.double(), y)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=0)


def test_a_loss_among_other_steps_is_in_their_graph_and_names_the_users_line() -> None:
    h, w, b, y = operands()
    found = compiled(lambda h, w, b, y: 2 * chunked(h.tanh(), w, b, y).square())(h, w, b, y)
    (graph,) = memeff_compile.last_report().graphs
    (record,) = graph.records
    assert record.action == "rewrote"
    assert "test_torch_linear_cross_entropy.py" in record.source
    torch.testing.assert_close(found, 2 * F.linear_cross_entropy(h.tanh(), w, y).square())


def test_the_module_is_fused_for_every_batch() -> None:
    loss = nn.LinearCrossEntropyLoss(
        D, V, options=nn.LinearCrossEntropyOptions(batch_chunk_size=2), dtype=torch.float64
    )
    called, (h, _, _, y) = compiled(loss), operands()
    for rows in (12, 8, 4):
        torch.testing.assert_close(called(h[:rows], y[:rows]), loss(h[:rows], y[:rows]))
    assert {r.action for r in memeff_compile.last_report().records} == {"rewrote"}
    assert len(memeff_compile.last_report().graphs) <= 2


def test_explain_plans_a_function_with_nothing_else_in_it() -> None:
    said = str(memeff_compile.explain(chunked, *operands(torch.float32)))
    assert "linear_cross_entropy with options -> memeff::linear_cross_entropy" in said


DECLINED: dict[str, tuple[Loss, str]] = {
    "operands of two dtypes": (
        lambda h, w, b, y: chunked(h.bfloat16(), w, b, y, **rows(acc_dtype=torch.float32)),
        "dtype_unsupported",
    ),
    "classes in two dimensions": (
        lambda h, w, b, y: chunked(
            h, w.view(V // 2, 2, D), b, (y[:, None].abs() % (V // 2)).repeat(1, 2)
        ),
        "class_dim_changed",
    ),
    "gradients of the op": (
        lambda h, w, b, y: torch.ops.torch_nn._linear_cross_entropy_batch_chunked(
            *(h, w, y, None, None, "mean", -100, 0.0, 4, "compact", h.dtype, True, True),
            *(True, False),
        )[1].sum(),
        "unreadable_loss",
    ),
}


@pytest.mark.parametrize(("loss", "code"), DECLINED.values(), ids=DECLINED)
def test_what_is_not_read_runs_as_pytorchs_op_with_a_reason(loss: Loss, code: str) -> None:
    h, w, b, y = operands(torch.float32)
    with torch.no_grad():
        found = compiled(loss)(h, w, b, y)
        torch.testing.assert_close(found, loss(h, w, b, y))
    (record,) = memeff_compile.last_report().records
    assert (record.action, record.code) == ("declined", code)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"y": slice(5)}, "`target` has the shape (5,) where (12,) is needed"),
        ({"weight": slice(7)}, "`weight` has the shape (7,) where (96,) is needed"),
    ],
    ids=["targets", "class weights"],
)
def test_shapes_that_do_not_fit_have_a_reason_before_pytorch_raises(
    changed: dict[str, slice], said: str
) -> None:
    h, w, b, y = operands()
    y = y[changed.get("y", slice(None))].clamp(min=0)
    weight = CLASS_WEIGHT[changed.get("weight", slice(None))]
    with pytest.raises((RuntimeError, IndexError)):
        compiled(lambda h, w, b, y: chunked(h, w, b, y, weight=weight))(h, w, b, y)
    (record,) = memeff_compile.last_report().records
    assert (record.action, record.code) == ("declined", "unreadable_loss")
    assert said in str(record)


def test_probabilities_as_targets_have_a_reason() -> None:
    h, w, b, _ = operands()
    targets = torch.rand(N, V, dtype=torch.float64)
    compiled(chunked)(h, w, b, targets)
    (record,) = memeff_compile.last_report().records
    assert record.code == "prob_targets"


def test_a_pass_that_is_off_leaves_pytorchs_op_in_the_graph() -> None:
    h, w, b, y = operands()
    found = compiled(chunked, **{"memeff.linear_cross_entropy": "off"})(h, w, b, y)
    assert memeff_compile.last_report().records == ()
    torch.testing.assert_close(found, F.linear_cross_entropy(h, w, y))


def test_another_backend_gets_pytorchs_own_graph_break() -> None:
    import memeff_compile.backend  # noqa: F401  # the substitute is registered by its import

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="warn"):
        torch.compile(chunked, backend="eager", fullgraph=True)(*operands())
