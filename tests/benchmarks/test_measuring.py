"""The benchmark's judge is right: reference, gate, data, tile shares, method names."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks import measuring, methods, registry, tiles
from benchmarks.distributed import looking
from benchmarks.ops import linear_cross_entropy

TINY = "48x32x300"


def tiny(data: str = "peaked", ignored: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    return registry.inputs(TINY, data, "cpu", dtype, ignored)


@pytest.mark.parametrize("ignored", [0, 50], ids=["all-count", "half-ignored"])
@pytest.mark.parametrize("data", registry.DATA)
def test_reference_equals_autograd_in_fp64(data: str, ignored: int) -> None:
    inputs = tiny(data, ignored)
    wide = [t.detach().double().requires_grad_() for t in (inputs.hidden, inputs.weight)]
    loss = functional.cross_entropy(wide[0] @ wide[1].t(), inputs.target, ignore_index=-100)
    loss.backward()
    found = measuring.reference(inputs, step=128)
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert measuring.relative_error(found.grad_hidden, wide[0].grad) < 1e-5
    assert measuring.relative_error(found.grad_weight, wide[1].grad) < 1e-5
    assert (inputs.target == -100).float().mean() == pytest.approx(ignored / 100, abs=0.25)


@pytest.mark.parametrize("data", registry.DATA)
@pytest.mark.parametrize("ignored", [0, 50, 90])
def test_gate_passes_the_exact_op_in_bf16(data: str, ignored: int) -> None:
    inputs = tiny(data, ignored, torch.bfloat16)
    method = methods.method("memeff exact")
    row = measuring.gate(method, method.build(), inputs, measuring.reference(inputs))
    assert "failed" not in row


def scaled_gradient(hidden: Any, weight: Any, target: Any) -> Any:
    loss = methods.eager(hidden, weight, target)
    return loss.detach() + 1.01 * (loss - loss.detach())


def wrong_loss(hidden: Any, weight: Any, target: Any) -> Any:
    return 1.001 * methods.eager(hidden, weight, target)


def no_gradient(hidden: Any, weight: Any, target: Any) -> Any:
    return methods.eager(hidden, weight.detach(), target)


def not_a_number(hidden: Any, weight: Any, target: Any) -> Any:
    return methods.eager(hidden, weight, target) * (hidden.sum() * 0 + float("nan"))


@pytest.mark.parametrize("loss", [scaled_gradient, wrong_loss, no_gradient, not_a_number])
def test_gate_refuses_a_wrong_method(loss: Any) -> None:
    inputs = tiny()
    row = measuring.gate(methods.method("memeff exact"), loss, inputs, measuring.reference(inputs))
    assert "allowed" in row["failed"]


def test_a_method_that_fails_the_gate_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = linear_cross_entropy.arguments().parse_args(["--repeats", "1", "--dtype", "float32"])
    monkeypatch.setitem(
        methods._FIXED, "eager", methods.Method("eager", lambda: wrong_loss, 1e-3, 1e-4)
    )
    bad, good = linear_cross_entropy.measure(["eager", "memeff exact"], TINY, "peaked", 0, given)
    assert "failed" in bad
    assert "both_ms" not in bad
    assert set(good["both_ms"]) == {"median", "p20", "p80"}


def test_a_missing_peer_gives_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods.importlib.util, "find_spec", lambda name: None)
    given = linear_cross_entropy.arguments().parse_args(["--repeats", "1", "--dtype", "float32"])
    rows = linear_cross_entropy.measure(["apple", "liger"], TINY, "flat", 0, given)
    assert [row["unavailable"] for row in rows] == [
        "cut_cross_entropy is not installed",
        "liger_kernel is not installed",
    ]


def test_a_knob_that_the_op_lacks_makes_a_method_unavailable() -> None:
    with pytest.raises(methods.Unavailable, match="the op has no no_such_knob"):
        methods.memeff(no_such_knob=1)


def test_method_names_carry_knobs() -> None:
    method = methods.method("memeff mass parts=hidden level=0.5 sort=1 workspace=2MiB")
    assert method.build.keywords == {
        "gradient_filter": "mass",
        "filter_parts": "hidden",
        "filter_level": 0.5,
        "sort_vocabulary": True,
        "workspace": 2 * 2**20,
    }


def test_a_filter_orders_columns_as_the_backend_has_it_do_unless_told_not_to() -> None:
    from memeff_compile.options import Options

    for how in ("exact", "mass", "block"):
        keywords = methods.method(f"memeff {how} gradients=forward").build.keywords
        found = Options(linear_cross_entropy=how).linear_cross_entropy_sort_vocabulary
        assert keywords.get("sort_vocabulary", False) == found
    assert methods.method("memeff mass sort=0").build.keywords["sort_vocabulary"] is False


@pytest.mark.parametrize(
    "wrong", ["memeff", "memeff rough", "memeff mass parts=none", "memeff mass x=1", "lyger"]
)
def test_unknown_methods_and_knobs_are_answered_with_the_known_ones(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"the (methods|knobs) are"):
        methods.method(wrong)


def test_peaked_rows_have_a_few_likely_tokens_and_flat_rows_none() -> None:
    peaked, flat = (
        registry.inputs("128x64x4096", d, "cpu", torch.float32) for d in ("peaked", "flat")
    )
    likely = [
        float(((x.hidden @ x.weight.t()).softmax(-1) > 0.01).sum(1).float().mean())
        for x in (peaked, flat)
    ]
    assert 1 <= likely[0] <= 16
    assert likely[1] == 0


def test_trained_rows_are_as_those_of_real_models() -> None:
    """Loss, entries that count and mass below them as measured, with ids in random order."""
    x = registry.inputs("256x512x20000", "trained", "cpu", torch.bfloat16)
    found = tiles.measure(x.hidden.detach(), x.weight.detach(), x.target, [(128, 128), (128, 1)])
    assert 1.8 <= found["loss"] <= 3.3
    assert 80 <= found["entries_above_eps"] <= 150
    assert 0.02 <= found["mass_below_eps"] <= 0.08
    assert found["active_share"]["128x128"] > 0.9
    assert found["active_share"]["128x1"] < 0.25
    middle = x.target.median()
    assert 5_000 < middle < 15_000


def test_a_file_of_a_real_model_is_data(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from benchmarks.data.hidden_states import sequences, states

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(16, 40, bias=False)

        def get_decoder(self) -> Any:
            return lambda input_ids: SimpleNamespace(
                last_hidden_state=self.head.weight[input_ids].detach()
            )

        def get_output_embeddings(self) -> torch.nn.Linear:
            return self.head

    def tokenizer(text: str, add_special_tokens: bool) -> Any:
        return SimpleNamespace(input_ids=[ord(letter) % 40 for letter in text])

    rows = list(sequences(tokenizer, iter(["short", "long enough, " * 3, "long, too; " * 4]), 8))
    path = tmp_path / "model.safetensors"
    save_file(states(Model(), rows), path)
    assert registry.data_named(str(path)) == str(path)
    assert registry.saved_sizes(str(path)) == (16, 16, 40)
    data = registry.inputs("", str(path), "cpu", torch.float32, ignored=50)
    assert data.hidden.shape == (16, 16)
    assert data.target[data.target >= 0].tolist() != []
    row = linear_cross_entropy.describe("gemma2", str(path), 0, "float32", "eager")
    assert (row["shape"], row["data"]) == ("16x16x40", "model")
    with pytest.raises(argparse.ArgumentTypeError, match="is no file and none of peaked, trained"):
        registry.data_named("nothing")


def test_tile_shares_and_dropped_mass_equal_a_loop_over_entries() -> None:
    inputs = registry.inputs("40x16x90", "peaked", "cpu", torch.float32, ignored=20)
    eps, size = 0.02, (16, 32)
    found = tiles.measure(inputs.hidden, inputs.weight, inputs.target, [size], eps)
    keep = inputs.target >= 0
    p = (inputs.hidden[keep] @ inputs.weight.t()).softmax(-1).detach()
    target = inputs.target[keep]
    gradient = p.clone()
    gradient[torch.arange(len(target)), target] -= 1
    active, total, dropped = 0, 0, torch.zeros(len(p))
    for top in range(0, len(p), size[0]):
        for left in range(0, p.shape[1], size[1]):
            here = (slice(top, top + size[0]), slice(left, left + size[1]))
            total += 1
            if gradient[here].abs().max() >= eps:
                active += 1
            else:
                dropped[here[0]] += p[here].sum(1)
    assert found["active_share"]["16x32"] == pytest.approx(active / total, abs=1e-5)
    assert 0 < active < total
    assert found["dropped_mass_max"]["16x32"] == pytest.approx(float(dropped.max()), rel=1e-4)
    assert found["mass_below_eps"] == pytest.approx(
        float(torch.where(p < eps, p, 0).sum(1).mean()), rel=1e-4
    )


def test_what_a_stream_does_is_told_from_a_trace() -> None:
    def kernel(
        name: str, start: float, took: float, stream: int = 7, **told: str
    ) -> dict[str, Any]:
        found = {"cat": "kernel", "name": name, "ts": start, "dur": took, "tid": stream}
        return {**found, "args": told}

    gathered = kernel("nccl", 0, 9000, 9, **{"Collective name": "allgather"})
    others = [kernel("copy", 500, 100, 8), {"cat": "cpu_op", "ts": 0, "dur": 1, "name": "mm"}]
    ours = [kernel("mm", 1000, 2000), kernel("add", 2500, 600), kernel("mm", 4100, 1000)]
    said = looking.stream([gathered, *others, *ours])
    assert (said["busy_ms"], said["idle_ms"]) == (3.1, 1.0)
    assert said["gaps"] == [{"ms": 1.0, "at_ms": 2.1, "between": ["add", "mm"]}]
    assert said["kernels"] == [["mm", 3.0], ["add", 0.6]]
    assert looking.stream([gathered]) == {}


def test_the_blocks_of_a_peak_are_told_from_allocations() -> None:
    def event(action: str, address: int, size: int) -> dict[str, Any]:
        frame = {"filename": "/a/step.py", "line": address, "name": "f"}
        return {"action": action, "addr": address, "size": size << 20, "frames": [frame]}

    freed = event("free_completed", 9, 7)  # it was allocated before the step
    given = [freed, event("alloc", 1, 100), event("alloc", 2, 50), event("free_completed", 1, 100)]
    given += [event("alloc", 1, 20), event("alloc", 3, 90)]
    assert looking.blocks(given) == {
        "largest_block_mib": 100.0,
        "above_start_mib": 153.0,
        "at_peak": [[90.0, "step.py:3 f"], [50.0, "step.py:2 f"], [20.0, "step.py:1 f"]],
    }
    assert looking.blocks([]) == {"largest_block_mib": 0.0, "above_start_mib": 0.0, "at_peak": []}
