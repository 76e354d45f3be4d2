"""The op of divergences on the CPU: values, gradients, blocks, bad input."""

from __future__ import annotations

import re
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from memeff_compile.errors import DoubleBackwardError, TargetRangeError, UnsupportedInputError
from memeff_compile.kernels import library
from memeff_compile.kernels.linear_divergence import (
    ENGINES,
    Coefficients,
    bytes_after,
    bytes_before,
    engine_for,
    linear_divergence,
    linear_divergence_classes,
    linear_divergence_total,
    makes_gradients_in_forward,
    supports,
    temporary_bytes,
)
from memeff_compile.kernels.linear_divergence.call import (
    TILE,
    columns_of,
    lent_rows,
    slots_for,
    strip_bytes,
)
from tests.kernels.linear_divergence.divergences import DIVERGENCES, N, V, draw, eager
from tests.support.inductors_code import uncompiled
from tests.support.live_bytes import LiveBytes

NAMES = ("hidden", "weight", "bias")
SCALES: dict[str, Any] = {"scale": 0.5, "teacher_scale": 0.7, "workspace": 0}


def trained(given: dict[str, Tensor]) -> list[Tensor]:
    return [given[name] for name in NAMES]


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("workspace", [0, 1], ids=["one block", "a row at a time"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_rows_and_their_gradients_equal_eager(name: str, workspace: int) -> None:
    (coefficients, formula), given = DIVERGENCES[name], draw()
    wanted = eager(given, formula, 0.5, 0.7)
    settings = SCALES | {"workspace": workspace}
    found = linear_divergence(*given.values(), coefficients=coefficients, **settings)
    close(found, wanted)
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)
    for got, expected in zip(
        torch.autograd.grad((found * weights).sum(), trained(given)),
        torch.autograd.grad((wanted * weights).sum(), trained(given)),
        strict=True,
    ):
        close(got, expected)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_total_and_its_gradients_equal_eager_without_the_masked_rows(name: str) -> None:
    (coefficients, formula), given = DIVERGENCES[name], draw()
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0, 1.0, 3.0], dtype=torch.float64)
    poisoned = {**given, "teacher": given["teacher"].clone()}
    poisoned["teacher"][1] = torch.nan
    total, *_ = linear_divergence_total(
        *poisoned.values(), weights, coefficients=coefficients, output_mask=[True] * 3, **SCALES
    )
    wanted = (eager(given, formula, 0.5, 0.7) * weights).sum()
    close(total, wanted)
    for times in (1, 2):  # a second backward reads the same gradients again
        found = torch.autograd.grad(times * total, trained(given), retain_graph=times == 1)
        expected = torch.autograd.grad(times * wanted, trained(given), retain_graph=times == 1)
        for got, each in zip(found, expected, strict=True):
            close(got, each)


def test_a_teachers_logits_may_be_given() -> None:
    (coefficients, _), given = DIVERGENCES["jsd"], draw()
    logits = given["teacher"] @ given["teacher_weight"].t() + given["teacher_bias"]
    student = trained(given)
    wanted = linear_divergence(*given.values(), coefficients=coefficients, **SCALES)
    found = linear_divergence(*student, logits, None, None, coefficients=coefficients, **SCALES)
    close(found, wanted)


def test_impossible_classes_of_the_teacher_add_nothing() -> None:
    given, logits = draw(), torch.randn(N, V, dtype=torch.float64)
    logits[:, ::3] = -torch.inf
    (coefficients, _) = DIVERGENCES["forward_kl"]
    found = linear_divergence(
        *trained(given), logits, None, None, coefficients=coefficients, **SCALES
    )
    student = (given["hidden"] @ given["weight"].t() + given["bias"]) * 0.5
    left = torch.arange(V) % 3 != 0
    q = (logits[:, left] * 0.7).log_softmax(-1)
    close(found, (q.exp() * (q - student.log_softmax(-1)[:, left])).sum(-1))
    (gradient,) = torch.autograd.grad(found.sum(), [given["hidden"]])
    assert gradient.isfinite().all()


def test_leading_dimensions_and_no_rows() -> None:
    (coefficients, _), given = DIVERGENCES["forward_kl"], draw()
    flat = linear_divergence(*given.values(), coefficients=coefficients, **SCALES)
    shaped = {**given, "hidden": given["hidden"][:6].view(2, 3, -1)}
    shaped["teacher"] = given["teacher"][:6].view(2, 3, -1)
    close(
        linear_divergence(*shaped.values(), coefficients=coefficients, **SCALES).view(6), flat[:6]
    )
    empty = {**given, "hidden": given["hidden"][:0], "teacher": given["teacher"][:0]}
    total, *gradients = linear_divergence_total(
        *empty.values(), None, coefficients=coefficients, output_mask=[True] * 3, **SCALES
    )
    assert total == 0
    assert all(not each.any() for each in gradients)


@pytest.mark.parametrize("is_total", [False, True], ids=["rows", "total"])
def test_the_op_passes_opcheck(is_total: bool) -> None:
    given, settings = draw(vocab=40), {**SCALES, "coefficients": list(DIVERGENCES["jsd"][0])}
    if is_total:
        settings["output_mask"] = [True] * 3
        operands = (*given.values(), torch.ones(N, dtype=torch.float64))
        torch.library.opcheck(linear_divergence_total, operands, settings)
    else:
        torch.library.opcheck(linear_divergence, tuple(given.values()), settings)


def test_second_derivatives_are_refused() -> None:
    (coefficients, _), given = DIVERGENCES["forward_kl"], draw()
    total, *_ = linear_divergence_total(
        *given.values(), None, coefficients=coefficients, output_mask=[True] * 3, **SCALES
    )
    rows = linear_divergence(*given.values(), coefficients=coefficients, **SCALES).sum()
    for loss in (total, rows):
        (first,) = torch.autograd.grad(loss, [given["hidden"]], create_graph=True)
        with pytest.raises(DoubleBackwardError, match="only a first one"):
            torch.autograd.grad(first.sum(), [given["hidden"]])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "few coefficients": ({"coefficients": [1.0]}, "7 finite numbers are needed"),
    "a share": ({"coefficients": [0.0] * 6 + [1.5]}, "between 0 and 1"),
    "a scale": ({"scale": float("inf")}, "scale is inf; it must be finite"),
    "a workspace": ({"workspace": -1}, "workspace is -1 bytes"),
    "other rows": ({"teacher": torch.ones(3, 20, dtype=torch.float64)}, "need the same rows"),
    "other classes": (
        {"teacher_weight": torch.ones(9, 20, dtype=torch.float64), "teacher_bias": None},
        "the teacher has 9 classes and the student 2500",
    ),
    "other features": (
        {"teacher_weight": torch.ones(V, 9, dtype=torch.float64)},
        "teacher 20 features",
    ),
    "two dtypes": ({"bias": torch.ones(V)}, "bias has dtype float32 and hidden float64"),
    "integers": ({"teacher": torch.ones(N, 20, dtype=torch.int64)}, "teacher has dtype int64"),
    "a bias without a weight": ({"teacher_weight": None}, "without teacher_weight"),
    "a teacher that trains": (
        {"teacher_bias": torch.ones(V, dtype=torch.float64, requires_grad=True)},
        "teacher_bias requires a gradient",
    ),
}


@pytest.mark.parametrize(("changed", "said"), REFUSED.values(), ids=REFUSED)
def test_bad_input_gets_a_sentence(changed: dict[str, Any], said: str) -> None:
    settings = {**SCALES, "coefficients": list(DIVERGENCES["jsd"][0])}
    given: dict[str, Any] = draw()
    for name, value in changed.items():
        (given if name in given else settings)[name] = value
    with pytest.raises(UnsupportedInputError, match=said):
        linear_divergence(*given.values(), **settings)


INDEX = torch.tensor(
    [[0, 5, 2499], [7, 7, 9], [1, 2, 3], [4, 4, 4], [8, 6, 5], [9, 0, 2], [3, 1, 7]]
)
OF_CLASSES: dict[str, Any] = {"is_normalised": True, "scale": 0.5, "workspace": 0}


@pytest.mark.parametrize("is_normalised", [True, False], ids=["log-probabilities", "logits"])
@pytest.mark.parametrize("workspace", [0, 1], ids=["one block", "a row at a time"])
def test_some_classes_of_each_row_and_their_gradients_equal_eager(
    workspace: int, is_normalised: bool
) -> None:
    given = trained(draw())
    how = {"is_normalised": is_normalised, "scale": 0.5, "workspace": workspace}
    found = linear_divergence_classes(*given, INDEX, **how)
    logits = (given[0] @ given[1].t() + given[2]) * 0.5
    wanted = (logits.log_softmax(-1) if is_normalised else logits).gather(-1, INDEX)
    close(found, wanted)
    weights = torch.linspace(-1, 2, 3 * N, dtype=torch.float64).view(N, 3)
    weights[2] = 0
    pairs = (torch.autograd.grad((x * weights).sum(), given) for x in (found, wanted))
    for got, expected in zip(*pairs, strict=True):
        close(got, expected)


def test_some_classes_pass_opcheck_and_have_one_derivative() -> None:
    given = trained(draw(vocab=40))
    index = INDEX.clamp(max=39)
    torch.library.opcheck(linear_divergence_classes, (*given, index), OF_CLASSES)
    total = linear_divergence_classes(*given, index, **OF_CLASSES).sum()
    (first,) = torch.autograd.grad(total, [given[0]], create_graph=True)
    with pytest.raises(DoubleBackwardError, match="only a first one"):
        torch.autograd.grad(first.sum(), [given[0]])
    none = linear_divergence_classes(given[0][:0], *given[1:], index[:0], **OF_CLASSES)
    assert none.shape == (0, 3)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (INDEX.int(), "index has dtype int32; int64 is needed"),
        (INDEX[:3], r"index has shape \(3, 3\); \(7, 'k'\) is needed"),
        (INDEX[:, :0], "index names 0 classes per row; 1 to 1024 are supported"),
    ],
    ids=["int32", "other rows", "no classes"],
)
def test_bad_indices_get_a_sentence(index: Tensor, said: str) -> None:
    with pytest.raises(UnsupportedInputError, match=said):
        linear_divergence_classes(*trained(draw()), index, **OF_CLASSES)


@pytest.mark.parametrize("number", [-1, V], ids=["negative", "too large"])
def test_a_number_that_is_no_class_gets_a_sentence(number: int) -> None:
    index = INDEX.clone()
    index[4, 1] = number
    said = rf"row 4 names class {number}; classes run from 0 to {V - 1}"
    with pytest.raises(TargetRangeError, match=said):
        linear_divergence_classes(*trained(draw()), index, **OF_CLASSES)
    hidden, *others = trained(draw())
    with pytest.raises(TargetRangeError, match=r"row \(0, 4\)"):
        linear_divergence_classes(hidden[None], *others, index[None], **OF_CLASSES)


def test_inductors_code_calls_the_functions_of_the_ops() -> None:
    def loss(*operands: Tensor) -> Tensor:
        settings = SCALES | {"coefficients": list(Coefficients(q_log_p=-1))}
        rows = linear_divergence(*operands, **settings).sum()
        mask = [True, True, True]
        total = linear_divergence_total(*operands, None, output_mask=mask, **settings)[0]
        return rows + total + linear_divergence_classes(*operands[:3], INDEX, **OF_CLASSES).sum()

    library.direct_in_inductor()
    compiled = torch.compile(loss, backend="inductor", fullgraph=True)
    with uncompiled(), config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: compiled(*draw().values()).backward())
    called = re.findall(r"ops\.memeff\.linear_divergence(\w*)\.default([.a-z]*)\(", "".join(codes))
    parts = ("", "_backward", "_total", "_classes", "_classes_backward")
    assert set(called) == {(part, ".direct") for part in parts}, "the dispatcher is not asked"


def test_sizes_of_a_trace_are_not_refused() -> None:
    given = draw()
    fault = supports(*given.values(), coefficients=list(Coefficients(q_log_p=-1)))
    assert fault is None


def test_neither_side_has_all_its_logits() -> None:
    given, rows, vocab = draw(torch.float32), 4096, 2500
    hidden = torch.randn(rows, 12, requires_grad=True)
    with LiveBytes() as counted:
        linear_divergence_total(
            *(hidden, given["weight"], given["bias"], torch.randn(rows, 20)),
            *(given["teacher_weight"], given["teacher_bias"], None),
            **{**SCALES, "workspace": 2**20},
            coefficients=DIVERGENCES["jsd"][0],
            output_mask=[True] * 3,
        )
    assert counted.peak < rows * vocab * 4 / 4


@pytest.mark.parametrize("rows", [1, 127, 512, 2048, 8192, 100_000])
@pytest.mark.parametrize("vocab", [2000, 128_256, 262_144])
@pytest.mark.parametrize("workspace", [0, 2**20, 2**28])
def test_slots_fit_the_workspace_and_the_rows(rows: int, vocab: int, workspace: int) -> None:
    columns = columns_of(vocab, TILE)
    budget = max(workspace or 640 * 2**20, 2 * columns * 2)
    for lent in (0, lent_rows((vocab, 4096), columns, TILE, 2)):
        for sides, trains in ((2, True), (2, False), (1, True), (1, False)):
            slots = slots_for(*(rows, columns, workspace, 2), sides=sides, trains=trains, lent=lent)
            assert slots.rows >= 1
            assert slots.blocks >= 1
            assert slots.allocated * columns * 2 <= max(budget, 128 * sides * columns * 2)
            assert slots.together <= max(2 * rows, 512)
            assert slots.is_lent <= (0 < slots.rows <= lent)
            assert slots.is_lent or slots.others == sides - 1


def test_few_rows_keep_no_more_than_one_sides_logits() -> None:
    """As much as Inductor: the weight's gradient lends its memory to the teacher's."""
    rows, vocab = 2048, 131_072
    slots = slots_for(rows, vocab, 0, 2, lent=lent_rows((vocab, 5120), vocab, TILE, 2))
    assert (slots.is_lent, slots.allocated) == (True, rows)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "engine": "kept_logits", "workspace": 0}
    held = temporary_bytes(rows, vocab, depth=5120, **how)
    assert held - strip_bytes(slots.rows, vocab) <= rows * vocab * 2 + 2**20
    assert held < temporary_bytes(rows, vocab, **how)


def test_bytes_say_that_two_logits_tensors_are_gone() -> None:
    before = bytes_before(8192, 128_256, dtype=torch.bfloat16, teacher_bytes=2)
    held = temporary_bytes(8192, 128_256, dtype=torch.bfloat16, engine="kept_logits", workspace=0)
    assert before == 4 * 8192 * 128_256
    assert bytes_after(8192, held) < 700 * 2**20


def test_the_reference_serves_the_cpu_and_fp16_has_its_gradients_in_the_backward() -> None:
    assert engine_for(torch.device("cpu"), torch.bfloat16, torch.float32) == "reference"
    assert set(ENGINES) == {"kept_logits", "reference"}
    assert makes_gradients_in_forward(torch.bfloat16)
    assert not makes_gradients_in_forward(torch.float16)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_formula_in_symbols_is_an_upper_bound(engine: str) -> None:
    rows = sympy.Symbol("N", integer=True, positive=True)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "engine": engine, "workspace": 0}
    formula = temporary_bytes(rows, 32_000, **how)
    for number in (1, 100, 512, 3000, 50_000):
        assert formula.subs(rows, number) >= temporary_bytes(number, 32_000, **how)
