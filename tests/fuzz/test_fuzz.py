"""A small share of the random programs, always the same, and faults that they must find.

`make fuzz` runs as many as one likes.
"""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fuzz.__main__ as watching
import fuzz.worker as working
import memeff_compile
from fuzz import caches
from fuzz.__main__ import main
from fuzz.judge import Verdict, compare, judge
from fuzz.program import Fault, Program
from fuzz.report import Tally
from fuzz.sketch import Sketch
from fuzz.worker import PARTS, work

SECONDS = 0.4


def found(part: str, seed: str = "0", seconds: float = SECONDS) -> Tally:
    """Run programs of one part."""
    tally = Tally(part)
    work(tally, seed, seconds)
    return tally


@pytest.mark.parametrize("part", PARTS)
def test_random_programs_do_what_eager_does(part: str) -> None:
    tally = found(part)
    assert tally.programs
    assert not tally.failures, "\n\n".join(failure.text for failure in tally.failures)


def transposed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from memeff_compile.logits.memory import Memory

    plain = Memory.link

    def link(self: Memory, view: Any) -> torch.Tensor:
        value = plain(self, view)
        return self.value if view.dims == self.shape and self.value is not None else value

    monkeypatch.setattr(Memory, "link", link)


def part_of_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from memeff_compile.kernels.linear_cross_entropy import reference

    plain = reference._subtract_at_target

    def subtract(g: torch.Tensor, column: torch.Tensor, amount: torch.Tensor) -> None:
        plain(g, column, amount * 0.99)

    monkeypatch.setattr(reference, "_subtract_at_target", subtract)


def causal_masks_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from memeff_compile.passes import recover_attention

    plain = recover_attention._masking

    def masking(*given: Any) -> Any:
        said = plain(*given)
        return said and (False, *said[1:])

    monkeypatch.setattr(recover_attention, "_masking", masking)


def bits_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = memeff_compile.compress_

    def compress(model: Any, codec: str, min_size: int) -> object:
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.float().mul(4).round().div(4))
        return plain(model, codec, min_size=min_size)

    monkeypatch.setattr(memeff_compile, "compress_", compress)


def beams_left_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memeff_compile.KVCache, "reorder_cache", lambda self, order: None)


def numbers_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    import memeff_compile.passes.graph.structure as structure

    plain = structure._constant

    def constant(value: Any, places: Any) -> Any:
        return type(value) if type(value) in (int, float) else plain(value, places)

    monkeypatch.setattr(structure, "_constant", constant)


PLANTED = {
    "a": transposed_twice,
    "b": part_of_the_gradient,
    "c": causal_masks_forgotten,
    "d": bits_dropped,
    "e": beams_left_in_order,
    "f": numbers_forgotten,
}
SEEDS = {"a": "2", "e": "21", "f": "25"}
"""Where another one than 0 draws a setup first that can show the fault, in a short program."""


@pytest.mark.parametrize(
    ("part", "plant"),
    [
        pytest.param(*pair, marks=[] if pair[0] in "a" else pytest.mark.slow, id=pair[0])
        for pair in PLANTED.items()
    ],
)
def test_a_planted_fault_is_found_and_printed_as_a_short_program(
    part: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    tally = Tally(part)
    work(tally, SEEDS.get(part, "0"), 90, stops=True)
    text = tally.failures[0].text
    most = 40 if part == "f" else 20  # of two classes each line stays
    assert len(text.strip().split("\n")) < most, text
    names: dict[str, Any] = {}
    exec(text, names)
    assert compare(names["program"](True), names["program"](False), torch.float32)
    monkeypatch.undo()
    torch._dynamo.reset()
    exec(text, names)
    assert not compare(names["program"](True), names["program"](False), torch.bfloat16)


CRASHES = """
import sys, types, fuzz.worker, fuzz.__main__
fuzz.worker.load = lambda part: types.SimpleNamespace(
    REUSE=1, IMPORTS="import ctypes", setup=lambda random: [], is_exact=lambda names: True,
    body=lambda random, sketch: sketch.lines.append("if ours: ctypes.string_at(0)"),
)
sys.exit(fuzz.__main__.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_crash_of_the_process_is_reported_with_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(options: Namespace, folder: Path) -> list[str]:
        return [sys.executable, "-c", CRASHES, "worker", "--seconds=1", f"--folder={folder}"]

    monkeypatch.setattr(watching, "_command", command)
    out = tmp_path / "counts.jsonl"
    assert main(["--part=a", "--seconds=1", f"--out={out}"]) == 1
    assert "if ours: ctypes.string_at(0)" in capsys.readouterr().out
    row = json.loads(out.read_text())
    assert (row["part"], row["programs"], row["crash"], row["same"]) == ("a", 1, 1, 0)


def test_results_differ_by_value_kind_and_number() -> None:
    one = torch.ones(2, dtype=torch.float64)
    exact = torch.float64
    assert not compare([one, 1.0, "a", None], [one, 1.0, "a", None], exact)
    assert compare([one + 1e-6], [one], exact)
    assert not compare([one + 1e-6], [one], torch.float32)
    assert compare([one.float()], [one], exact)
    assert compare([one[:1]], [one], exact)
    assert compare([one, one], [one], exact)
    assert compare([None], [one], exact)
    assert compare([one * torch.nan], [one], exact)
    both = (one * 6, one * 0)  # as gradients that are asked for at once
    for precision, is_failure in ((exact, True), (torch.float32, False)):
        assert bool(compare([(one * 6, one * 1e-6)], [both], precision)) == is_failure
        assert compare([(one * 6, one * 1e-4)], [both], precision)
        assert compare([one * 6, one * 2e-6], list(both), precision)
    assert not compare([one * torch.nan], [one * torch.nan], exact)
    assert compare([torch.tensor([1])], [torch.tensor([2])], exact)


def test_a_program_says_what_became_of_it() -> None:
    def kind(*lines: str) -> str:
        return judge(Program((), lines)).kind

    assert kind("seen.append(torch.rand(2))") == "same"
    assert kind("seen.append(2 if ours else 1)") == "difference"
    assert kind("raise ValueError") == "invalid"
    assert kind("if ours: raise ValueError") == "exception"
    assert kind("if ours: raise memeff_compile.OptionError('say so')") == "decline"


def test_a_program_that_hangs_on_the_last_bits_or_on_a_write_unseen_is_no_difference() -> None:
    setup = ("x = torch.ones(9).double(); x[8] = 2",)
    for seen, kind in {
        "a[:2].argmax() ^ ours": "invalid",
        "a.argmax() ^ ours": "difference",
        "a[0] + 1e-8 * ours": "difference",
    }.items():
        assert judge(Program(setup, ("a = x + 0", f"seen.append({seen})"))).kind == kind, seen
    unseen = ("x = torch.ones(3).double().requires_grad_()", "y = x.exp()", "if ours: y = y + 0")
    for write in ("y.data.mul_(2)", "with torch.no_grad(): copy.copy(y).mul_(2)"):
        lines = (*unseen, write, "seen.append(torch.autograd.grad(y.sum(), x))")
        assert judge(Program((), lines, "import copy")).kind == "invalid", write
    for made, kind in {"y * y": "invalid", "y.exp()": "difference"}.items():  # which saves no y
        unseen = ("x = torch.ones(3).double().requires_grad_()", "y = (2 * x).split(1)[-1]")
        unseen += (f"z = {made}", "if ours: z = 2 * z", "y.data.mul_(2)")
        unseen += ("seen.append(torch.autograd.grad(z.sum(), x))",)
        assert judge(Program((), unseen)).kind == kind, made
    # A view's history is made again after a detected write, and no call raises.
    view = ("x = torch.ones(3).double().requires_grad_()", "y = (2 * x).view_as(x)", "z = y.exp()")
    asked = "seen.append(torch.autograd.grad({}.sum(), y, allow_unused=True))"
    for product, kind in {"z": "same", "(y * y)": "invalid"}.items():
        made = (*view, f"w = {product}", "if ours: w = w * (1 + {})", "y.data.mul_(2)")
        body = tuple(line.format(0 if product == "z" else 1) for line in made)
        assert judge(Program((), (*body, asked.format("w")))).kind == kind, product


def test_a_distance_is_rounding_as_far_as_the_last_bits_of_what_is_named_reach() -> None:
    """Eager may be close to float64 by chance where the program multiplies its rounding."""
    wide, narrow = ("torch.full((9,), 1e3, dtype=torch.float32)", "torch.ones(9).bfloat16() * 8")
    for made, seen, kind in (
        (wide, "(a - 1e3) * 3e-2 + 1 + 1.2e-5 * ours", "same"),
        (wide, "(a - 1e3) * 3e-2 + 1 + 5e-5 * ours", "difference"),
        (wide, "a * 1e-3 + 1.2e-5 * ours", "difference"),
        (narrow, "(a - 8.0) * 8 + 1 + 0.4 * ours", "same"),
        (narrow, "(a - 8.0) * 8 + 1 + 4 * ours", "difference"),
        (narrow, "a + 0.4 * ours", "difference"),
    ):
        program = Program((f"x = {made}",), ("a = x + 0", f"seen.append({seen})"))
        assert judge(program).kind == kind, seen


def test_a_cache_may_store_the_next_code_only_of_a_number_between_two_codes() -> None:
    """The codes of these values are 0 to 255, one apart."""
    pytest.importorskip("transformers")
    sizes = "hidden_size=32, num_hidden_layers=1, num_attention_heads=1, head_dim=32"
    setup = (
        f"c = transformers.LlamaConfig({sizes})",
        "x = torch.zeros(1, 1, 100, 32, dtype=torch.float32); x[..., 0] = 255; x[..., 1] = {}",
    )
    body = (
        "k = KVCache(c, 192, 8, recent=16, group=64, keep_first=0)",
        "k.update(torch.zeros_like(x), x + {} * ours * (x == {}), 0)",
        "seen.append(k.update(x[:, :, :1], x[:, :, :1], 0)[1][:, :, :64])",
    )
    for value, nudge, kind in (
        (82.5, -1e-5, "same"),
        (82.5, 3.0, "difference"),
        (82.25, 0.5, "difference"),
        (82.25, -1e-5, "same"),
    ):
        lines = (setup[0], setup[1].format(value)), (body[0], body[1].format(nudge, value), body[2])
        assert judge(Program(*lines, caches.IMPORTS)).kind == kind, (value, nudge)


def test_a_logarithm_of_a_sum_may_be_one_rounded_number() -> None:
    """The error of p = exp(z - lse) if both are large, in fp32; ten times that fails."""
    rows = "[[3000.25, 2999.5, 2998.125], [-7.0, 6000.5, 6000.25]]"
    setup = (f"x = torch.tensor({rows}, dtype=torch.float32)",)
    one = "(x - x.logsumexp(-1, keepdim=True) - x.log_softmax(-1))"
    for factor, kind in ((1, "same"), (10, "difference")):
        seen = f"seen.append((x.log_softmax(-1) + ({factor} * {one} if ours else 0)).exp())"
        assert judge(Program(setup, (seen,))).kind == kind, factor


def test_nothing_is_written_where_entries_share_a_place() -> None:
    sketch = Sketch(random.Random(0), {"torch": torch}, is_exact=True)
    sketch.bind("torch.rand(4, 3)")
    for made in ("a1.unfold(0, 2, 1)", "a1[:1].expand(2, 3)", "a1.t()", "a1[::2]", "a1[0, 0]"):
        sketch.bind(made)
    several = [sketch.overlaps_itself(f"a{place}") for place in range(1, 7)]
    assert several == [False, True, True, False, False, False]
    assert sketch.named_in("torch.mul(a2, 3, out=a12)") == ["a2"]


def test_a_failure_that_is_none_alone_is_counted_as_what_it_is_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = [Verdict("difference", "seen: 1"), Verdict("exception", "E: 2"), Verdict("difference")]
    alone = [Verdict("inner"), Verdict("invalid"), Verdict("same")]
    part = SimpleNamespace(
        REUSE=1, IMPORTS="", setup=lambda random: [], is_exact=lambda names: True,
        body=lambda random, sketch: None,
    )  # fmt: skip
    monkeypatch.setattr(working, "load", lambda name: part)
    monkeypatch.setattr(working, "verdict", lambda *given: said.pop(0))
    monkeypatch.setattr(working, "judge", lambda program: alone.pop(0))
    tally = Tally("a")
    work(tally, "0", 60, stops=True)
    assert (tally.programs, +tally.kinds) == (3, Counter(inner=1, invalid=1, difference=1))
    assert [failure.seed for failure in tally.failures] == ["0/2/0"]
    assert "only after the programs before it" in tally.failures[0].sentence


def test_pytorch_fails_at_stale_views_of_what_was_detached_in_place() -> None:
    # Why no program detaches tensors that have views: wrapper tensors track them as below.
    with torch.autograd._force_original_view_tracking(True):
        base = torch.ones(2, 3, requires_grad=True) * 1
        view = base.unsqueeze(-1)
        base.detach_()
        base.mul_(2)
        with pytest.raises(RuntimeError, match="new_fn INTERNAL ASSERT FAILED"):
            print(view.grad_fn)


def test_pytorch_takes_a_median_of_shared_entries_from_what_lies_behind_them() -> None:
    # Why medians are drawn of contiguous tensors: memory after the last entry is undefined.
    memory = torch.tensor([3.0, 1.0])
    values = memory[:1].expand(2, 1).median(0).values
    assert values.tolist() == [1.0]


@pytest.mark.parametrize(
    ("without_us", "kind"),
    [
        ("seen.append(torch.ones(2) * (1 + ours))", "inner"),
        ("seen.append(torch.ones(2) * (1 + 2 * ours))", "difference"),
        ("seen.append(torch.ones(2) / (1 - ours) if not ours else 1 / 0)", "difference"),
        ("seen.append(torch.ones(2))", "difference"),
    ],
    ids=["the same numbers", "other numbers", "an exception", "none"],
)
def test_a_failure_is_of_pytorchs_compilers_only_if_they_do_the_same(
    without_us: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Program((), (without_us,))
    monkeypatch.setattr(Program, "without_us", lambda self: alone)
    assert judge(Program((), ("seen.append(torch.ones(2) * (1 + ours))",), " ")).kind == kind


def test_an_exception_of_a_compiler_is_named_by_its_cause() -> None:
    def fails(gm: Any, inputs: Any) -> Any:
        raise KeyError("the cause")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        torch.compile(torch.neg, backend=fails)(torch.ones(2))
    assert str(Fault(raised.value, 0)) == "KeyError: 'the cause'"
