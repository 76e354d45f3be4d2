"""quantize_attention: where low bits apply, their claimed accuracy, exact cases."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import memeff_compile
from memeff_compile.errors import OptionError, StrictError
from memeff_compile.kernels import device
from memeff_compile.kernels.device import planned_for
from memeff_compile.passes import quantize_attention
from memeff_compile.report import Record
from tests.support.coded_attention import relative_l1

NAME = "quantize_attention"
B, H, G, S, D = 2, 4, 2, 40, 16
ON = {"memeff.attention": "8b", "memeff.attention.length": 0, "memeff.inner": "aot_eager"}


IN_LOW_BITS = {
    "needs_gradient",
    "dtype",
    "dense_mask",
    "unsupported",
    "kernels_chosen",
    "dropout",
    "softcap",
    "empty_rows",
    "not_faster",
    "scale_not_constant",
    "not_in_table",
    "exact_in_table",
}
"""The codes that the tests of this file look for."""


def heads(
    count: int = H, length: int = S, seed: int = 0, dtype: torch.dtype | None = None
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(B, count, length, D, generator=generator)
    return found.to(dtype or torch.bfloat16)


def qkv(kv_heads: int = H, queries: int = S, keys: int = S) -> tuple[Tensor, Tensor, Tensor]:
    return heads(H, queries, 1), heads(kv_heads, keys, 2), heads(kv_heads, keys, 3)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def run(
    function: Callable[..., Any], *inputs: Any, grad: bool = False, **options: Any
) -> tuple[Any, list[Record]]:
    """Return the compiled function's result, and the pass's records."""
    torch._dynamo.reset()
    memeff_compile.reset()
    settings = {**ON, **{f"memeff.{name}": value for name, value in options.items()}}
    compiled = torch.compile(function, backend="memeff", options=settings, fullgraph=True)
    with torch.set_grad_enabled(grad):
        found = compiled(*inputs)
    records = memeff_compile.last_report().records
    assert not [r for r in records if r.action == "internal_error"]
    return found, [r for r in records if r.pass_name == NAME]


def check(function: Callable[..., Any], *inputs: Any, level: str = "8b", **options: Any) -> None:
    """Check that the pass fires, changes something, and stays within the level's distance."""
    found, records = run(function, *inputs, attention=level, **options)
    assert [(r.action, r.code) for r in records] == [("rewrote", "rewrote")]
    assert f"level {level}" in records[0].sentence
    wanted = function(*inputs)
    assert not torch.equal(found, wanted)
    assert relative_l1(found, wanted) <= {"8b": 0.06, "8b+f16": 0.02, "4b": 0.3}[level]


def declined(function: Callable[..., Any], *inputs: Any, **options: Any) -> list[str]:
    """Check that the graph is unchanged; return the codes of the reasons."""
    found, records = run(function, *inputs, **options)
    torch.testing.assert_close(found, function(*inputs))
    assert all(r.action == "declined" for r in records)
    return [r.code for r in records]


# --- where it fires -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["8b", "8b+f16", "4b"])
def test_a_causal_call(level: str) -> None:
    check(attend, *qkv(), level=level)


@pytest.mark.parametrize("level", ["8b", "8b+f16", "4b"])
def test_wide_heads_have_values_in_fp16(level: str) -> None:
    """As accurate as `8b+f16`, and the report names the format."""
    operands = [x.repeat(1, 1, 1, 9)[..., :129] for x in qkv()]
    found, (record,) = run(attend, *operands, attention=level)
    assert ("heads of 129: weights and values in fp16" in record.sentence) == (level != "8b+f16")
    if level == "8b":
        assert torch.equal(found, run(attend, *operands, attention="8b+f16")[0])
        assert relative_l1(found, attend(*operands)) <= 0.02


SPELLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "no mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "a scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    "dense causal mask": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.arange(S)[None] <= torch.arange(S)[:, None]
    ),
    "a chain": lambda q, k, v: ((q @ k.transpose(2, 3)) * D**-0.5).softmax(-1) @ v,
    "transposed result": lambda q, k, v: attend(q, k, v).transpose(1, 2).reshape(B, S, H * D),
    "layout that is seen": lambda q, k, v: attend(q, k, v).contiguous().view(B, H * S, D),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_that_is_recovered(spelling: str) -> None:
    check(SPELLINGS[spelling], *qkv())


def test_heads_that_share_keys_and_other_lengths() -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:, :, None].expand(B, G, 2, 60, D).reshape(B, H, 60, D) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    check(grouped, *qkv(G, S, 60))


def padded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    causal = torch.arange(S, device=q.device)[None] <= torch.arange(S, device=q.device)[:, None]
    mask = causal & keep[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_what_attention_of_ours_is_told_is_told_here() -> None:
    """Padding under a causal mask: planned for a GPU, where memeff::attention would serve it."""
    keep = torch.ones(B, S, dtype=torch.bool)
    keep[0, 30:] = False
    with planned_for(torch.device("cuda", 0)):
        found, records = run(padded, *qkv(), keep)
    assert [r.action for r in records] == ["rewrote"]
    assert "memeff::attention -> memeff::quantized_attention" in records[0].sentence
    after = memeff_compile.graphs()[-1].after
    assert "memeff.attention(" not in after
    assert "memeff.quantized_attention(" in after
    assert relative_l1(found, padded(*qkv(), keep)) <= 0.06


def test_lengths_that_change_are_one_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="memeff", options=ON, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (30, 47, 200):
            inputs = qkv(H, length, length)
            assert relative_l1(compiled(*inputs), attend(*inputs)) <= 0.06
    assert len(memeff_compile.graphs()) == 1


def test_autocast_decides_the_dtype() -> None:
    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attend(q, k, v)

    inputs = [x.float() for x in qkv()]
    found, records = run(mixed, *inputs)
    assert [r.action for r in records] == ["rewrote"]
    assert found.dtype == torch.bfloat16
    assert relative_l1(found, mixed(*inputs)) <= 0.06


# --- exact ----------------------------------------------------------------------------------------


def test_gradients_are_never_cut() -> None:
    leaves = [x.float().bfloat16().requires_grad_() for x in qkv()]
    found, records = run(attend, *leaves, grad=True)
    assert [r.code for r in records] == ["needs_gradient"]
    wanted = attend(*leaves)
    ours = torch.autograd.grad(found.sum(), leaves)
    theirs = torch.autograd.grad(wanted.sum(), leaves)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_model_that_trains_and_answers() -> None:
    """The same module: exact with gradients, low bits without."""
    layer = nn.Linear(D, D, bias=False).bfloat16()

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(layer(q), k, v)

    for grad, action in ((True, "declined"), (False, "rewrote")):
        assert [r.action for r in run(forward, *qkv(), grad=grad)[1]] == [action]


def test_what_is_declined() -> None:
    q, k, v = qkv()
    assert declined(attend, q.float(), k.float(), v.float()) == ["dtype"]
    bias = torch.randn(S, S).bfloat16()
    assert declined(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias), q, k, v
    ) == ["dense_mask"]
    narrow = v[..., :8]
    assert declined(lambda q, k, v: attend(q, k, v), q, k, narrow) == ["unsupported"]


def test_chosen_kernels_stay() -> None:
    def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend(q, k, v)

    assert declined(chosen, *qkv()) == ["kernels_chosen"]


def test_a_scale_that_varies_stays() -> None:
    def scaled(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    torch._dynamo.reset()
    compiled = torch.compile(scaled, backend="memeff", options=ON, dynamic=True)
    inputs = qkv()
    with torch.no_grad():
        for scale in (0.2, 0.3, 0.4):
            found = compiled(*inputs, scale)
    torch.testing.assert_close(found, scaled(*inputs, 0.4))
    records = [r for r in memeff_compile.last_report().records if r.pass_name == NAME]
    assert "scale_not_constant" in {r.code for r in records}


def test_dropout_stays() -> None:
    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5) * 0

    assert declined(dropped, *qkv()) == ["dropout"]


def test_softcaps_and_means_of_empty_rows_stay() -> None:
    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.tanh((q @ k.transpose(2, 3)) * 0.25 / 5.0) * 5.0).softmax(-1) @ v

    def padded_chain(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        low = torch.finfo(q.dtype).min
        bias = torch.where(keep[:, None, None, :], 0.0, low).to(q.dtype)
        return ((q @ k.transpose(2, 3)) * 0.25 + bias).softmax(-1) @ v

    keep = torch.ones(B, S, dtype=torch.bool)
    with planned_for(torch.device("cuda", 0)):
        assert [r.code for r in run(capped, *qkv())[1]] == ["softcap"]
        assert [r.code for r in run(padded_chain, *qkv(), keep)[1]] == ["empty_rows"]


def test_by_default_nothing_fires_where_it_is_not_faster() -> None:
    inputs = qkv()
    assert declined(attend, *inputs, **{"attention.length": "auto"}) == ["not_faster"]
    assert declined(attend, *inputs, **{"attention.length": S + 1}) == ["not_faster"]
    check(attend, *inputs, **{"attention.length": S})


@pytest.mark.parametrize("first", [S // 2, 2 * S])
@pytest.mark.parametrize("least", [S, "auto"])
def test_a_length_that_varies_is_asked_anew_on_the_other_side(
    monkeypatch: pytest.MonkeyPatch, first: int, least: int | str
) -> None:
    monkeypatch.setattr(quantize_attention, "SHORTEST", S)
    monkeypatch.setattr(quantize_attention, "FEWEST_PAIRS", 0)
    monkeypatch.setattr(quantize_attention, "NARROW", D)
    monkeypatch.setattr(quantize_attention, "where_it_runs", lambda _: torch.device("cuda"))
    monkeypatch.setattr(quantize_attention.op_folder, "engine_for", lambda *_: "hopper")
    memeff_compile.reset()
    settings = {**ON, "memeff.attention.length": least}

    def layer(x: Tensor) -> Tensor:
        return attend(x, x.roll(1, 3), x.roll(2, 3))

    step, is_exact = memeff_compile.compile(layer, options=settings), {}
    with torch.no_grad():
        for length in (first, S // 2 + 1, 2 * S + 1, S // 2 + 3, 2 * S + 3):
            x = heads(H, length)
            torch._dynamo.mark_dynamic(x, 2)
            is_exact[length] = torch.equal(step(x), layer(x))
    assert is_exact == {length: length < S for length in is_exact}
    assert len(memeff_compile.graphs()) == 2


@pytest.mark.parametrize(
    ("heads_", "groups", "queries", "keys", "depth", "words"),
    [
        (4, 4, 32, 256, 64, "32 queries or keys are fewer than 64"),
        (4, 4, 256, 32, 64, "32 queries or keys are fewer than 64"),
        (4, 4, 48, 256, 64, "48 queries or keys are fewer than 64"),
        (4, 1, 48, 256, 96, ""),
        (4, 1, 48, 256, 64, "fewer than 64"),
        (1, 1, 64, 64, 64, "too few heads"),
        (4, 4, 256, 256, 160, "eads of 160"),
        (4, 4, 64, 64, 48, ""),
        (4, 4, 64, 64, 40, "eads of 40 leave"),
        (4, 4, 64, 64, 80, "eads of 80 leave"),
    ],
)
def test_on_a_gpu_the_length_decides(
    heads_: int,
    groups: int,
    queries: int,
    keys: int,
    depth: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planned for a GPU, with bounds that are small enough to try."""
    monkeypatch.setattr(quantize_attention, "SHORTEST", 64)
    monkeypatch.setattr(quantize_attention, "SHORTEST_GROUPED", 32)
    monkeypatch.setattr(quantize_attention, "FEWEST_PAIRS", 4 * 48 * 64)
    shapes = [(1, heads_, queries, depth), *2 * [(1, groups, keys, depth)]]
    inputs = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with planned_for(torch.device("cuda", 0)):
        _, records = run(whole, *inputs, **{"attention.length": "auto"})
    assert [r.action for r in records] == ["declined" if words else "rewrote"]
    assert words in records[0].sentence


def test_a_window_counts_as_short_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_attention, "SHORTEST", 32)
    monkeypatch.setattr(quantize_attention, "NARROW", D)
    monkeypatch.setattr(quantize_attention, "FEWEST_PAIRS", 1)

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(S)
        mask = (place[None] <= place[:, None]) & (place[None] > place[:, None] - 10)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def wide(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(S)
        mask = (place[None] <= place[:, None]) & (place[None] > place[:, None] - 20)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    for function, action in ((windowed, "declined"), (wide, "rewrote")):
        with planned_for(torch.device("cuda", 0)):
            _, records = run(function, *qkv(), **{"attention.length": "auto"})
        assert [r.action for r in records] == [action]


@pytest.fixture
def short_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take lengths as small as these for ones from which on low bits pay."""
    monkeypatch.setattr(quantize_attention, "SHORTEST", 32)
    monkeypatch.setattr(quantize_attention, "NARROW", D)
    monkeypatch.setattr(quantize_attention, "FEWEST_PAIRS", 1)


@pytest.mark.usefixtures("short_pays")
def test_a_level_that_was_never_faster_needs_a_length() -> None:
    auto = {"attention.length": "auto"}
    for level, words in (("8b+f16", "slower"), ("4b", "nowhere measured to be faster")):
        with planned_for(torch.device("cuda", 0)):
            _, (record,) = run(attend, *qkv(), attention=level, **auto)
            _, (fired,) = run(attend, *qkv(), attention=level, **{"attention.length": S})
        assert (record.action, record.code) == ("declined", "not_faster")
        assert level in record.sentence
        assert words in record.sentence
        assert "memeff.attention.length" in record.hint
        assert fired.action == "rewrote"


@pytest.mark.usefixtures("short_pays")
def test_levels_of_a_table_that_were_never_faster_stay_exact() -> None:
    """Calibration falls back to 8b+f16 if 8b is too coarse: exact is faster than that."""
    levels = {"layers.0": ["8b", "8b+f16"], "layers.1": ["exact", "8b+f16"], "layers.2": "8b+f16"}
    settings = {"attention": levels, "attention.length": "auto"}
    with planned_for(torch.device("cuda", 0)):
        _, records = run(Blocks(), heads(length=S), **settings)
    (fired,) = [r for r in records if r.action == "rewrote"]
    assert "level by call: 8b x 1, exact x 1," in fired.sentence
    assert "8b+f16 was slower" in fired.sentence
    assert fired.sentence.endswith("exact is used instead.")
    assert sum(r.sites for r in records if r.code == "not_faster") == 2


@pytest.mark.usefixtures("short_pays")
def test_a_plan_asks_nothing_of_the_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned tensors are on the CPU, of which torch.cuda knows no capability."""

    def ask(index: int | torch.device) -> tuple[int, int]:
        raise ValueError(f"Expected a cuda device, but got: {index}")

    monkeypatch.setattr(device, "_has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", ask)
    options = {"memeff.attention": "8b"}
    with torch.no_grad():
        found = str(memeff_compile.explain(Blocks(), heads(length=S), options=options))
    assert "level 8b" in found
    assert "internal" not in found


def test_exact_and_off_leave_it_alone() -> None:
    for level in ("exact", "off"):
        assert declined(attend, *qkv(), attention=level) == []


# --- tables ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attend(x, x.roll(1, 2), x.flip(2)) + attend(x, x, x)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def levels_of(table: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the levels in the order of the calls, and the codes of the declines."""
    _, records = run(Blocks(), heads(), attention=table)
    lines = memeff_compile.graphs()[-1].after.splitlines()
    found = []
    for line in lines:
        if "scaled_dot_product_attention(" in line:
            found.append("exact")
        elif "quantized_attention_by_call(" in line:
            found.append("by call")
        elif "quantized_attention(" in line:
            found.append((re.search(r"level='?([\w+]+)", line) or ["", "8b"])[1])
    return found, [r.code for r in records if r.action == "declined"]


def test_a_table_names_levels_by_module_and_call() -> None:
    table = {
        "layers.0": "8b",
        "layers.0#1": "8b+f16",
        "layers.1": "exact",
        "layers.2": ["4b", "8b"],
        "layers.2#1": "4b",
    }
    found, codes = levels_of(table)
    assert found == ["8b", "8b+f16", "exact", "exact", "by call", "4b"]
    assert codes == ["exact_in_table", "not_in_table"]
    assert levels_of({"levels": table, "scores": {}})[0] == found


def test_verify_compares_the_formula_and_not_the_codes() -> None:
    _, records = run(attend, *qkv(), verify="raise")
    assert [r.action for r in records] == ["rewrote"]
    text = " ".join(memeff_compile.last_report().details().split())
    assert "agree" in text
    assert "memeff.attention computes in low bits" in text


def test_skip_and_strict() -> None:
    _, records = run(Blocks(), heads(), skip={NAME: "layers.1"})
    assert sorted((r.code, r.sites) for r in records) == [("rewrote", 4), ("skipped", 1)]
    assert run(attend, *qkv(), strict=NAME)[1][0].action == "rewrote"
    with pytest.raises(Exception, match="quantize_attention") as caught:
        run(attend, *(x.float() for x in qkv()), strict=NAME)
    assert StrictError.__name__ in repr(caught.value) or isinstance(caught.value, StrictError)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "a table without levels"),
        ({"a": "9b"}, "names the level '9b'"),
        ({"a": []}, "takes module paths"),
        ({1: "8b"}, "takes module paths"),
        ({"levels": 3}, "a table without levels"),
        ("8bit", "Did you mean '8b'"),
    ],
    ids=str,
)
def test_bad_tables_are_named(value: Any, words: str) -> None:
    with pytest.raises(OptionError, match=r"memeff\.attention") as caught:
        memeff_compile.Options(attention=value)
    assert words in str(caught.value)


@pytest.mark.parametrize("value", [-1, 2.5, "short", True])
def test_bad_lengths_are_named(value: Any) -> None:
    with pytest.raises(OptionError, match=r"memeff\.attention\.length"):
        memeff_compile.Options(attention_length=value)
