"""ternarize_, TernaryStages and pack_ternary_: numbers, saved state, refusals, memory."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memeff_compile
from memeff_compile.errors import OptionError, UnsupportedInputError
from memeff_compile.kernels.device import planned_for
from memeff_compile.model import PackedTernaryLinear, TernaryLinear, TernaryStages
from tests.support.ternary_layers import Block, Detached, tiny_bitnet, tokens_int8, weights


def eagerly() -> Any:
    """Run transformers' layers without the compiled functions inside them."""
    return torch.compiler.set_stance("force_eager")


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


class Attention(nn.Module):
    """Projections with the names of a Llama block, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(32, 32, bias=False))
        for name in ("gate_proj", "up_proj"):
            setattr(self, name, nn.Linear(32, 48, bias=False))
        self.down_proj = nn.Linear(48, 32)
        self.lm_head = nn.Linear(32, 50, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.o_proj(self.q_proj(x) * self.k_proj(x).sigmoid() + self.v_proj(x))
        x = x + self.down_proj(F.relu(self.gate_proj(x)).square() * self.up_proj(x))
        return self.lm_head(x)


IDS = torch.arange(24).view(2, 12)


def kinds_of(model: nn.Module) -> dict[str, str]:
    return {n: m.kind for n, m in model.named_modules() if isinstance(m, TernaryLinear)}


# --- ternarize_ -----------------------------------------------------------------------------------


def test_a_ternary_linear_computes_what_the_published_layer_does() -> None:
    ours, published = TernaryLinear(32, 24), Detached(32, 24)
    published.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 32)
    outs, inputs = [], []
    for layer in (ours, published):
        inputs.append(x.clone().requires_grad_())
        outs.append(layer(inputs[-1]))
        outs[-1].square().sum().backward()
    assert error(outs[0].detach(), outs[1].detach()) < 1e-6
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert error(inputs[0].grad, inputs[1].grad) < 1e-6
    for mine, theirs in zip(ours.parameters(), published.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert error(mine.grad, theirs.grad) < 1e-6


@pytest.mark.parametrize("kind", ["int8", "int4", "fp4", "topk8"])
def test_every_entry_gets_a_gradient_clipped_and_dropped_ones_too(kind: str) -> None:
    layer = TernaryLinear(64, 16, bias=False, kind=kind)
    x = torch.randn(3, 64) ** 3
    x.requires_grad_()
    layer(x).sum().backward()
    scale = 1.0 / layer.weight.detach().abs().mean()
    wanted = ((layer.weight.detach() * scale).round().clamp(-1, 1) / scale).sum(0)
    assert x.grad is not None
    assert torch.allclose(x.grad, wanted.expand(3, 64), atol=1e-5)
    assert layer.weight.grad is not None


def test_inference_gives_the_bits_of_training() -> None:
    layer, x = TernaryLinear(48, 24), torch.randn(7, 48)
    with torch.no_grad():
        found = layer(x)
    assert torch.equal(found, layer(x).detach())


def test_parameters_stay_the_same_objects_under_the_same_names() -> None:
    model = Attention()
    before = dict(model.named_parameters())
    assert memeff_compile.ternarize_(model) is model
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert type(model.lm_head) is nn.Linear
    assert set(kinds_of(model).values()) == {"int8"}
    assert len(kinds_of(model)) == 7


def test_the_hybrid_recipe_gives_each_projection_its_quantiser() -> None:
    model = memeff_compile.ternarize_(Attention(), "a4.8")
    assert kinds_of(model) == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "int4"),
        "o_proj": "topk8",
        "down_proj": "int8",
    }
    memeff_compile.ternarize_(model, "a4.8-fp4", kinds={"*_proj": "int8"}, skip="o_proj")
    assert kinds_of(model)["o_proj"] == "topk8"
    assert kinds_of(model)["q_proj"] == "int8"


def test_tied_heads_and_skipped_modules_stay_dense() -> None:
    model = nn.ModuleDict(
        {"table": nn.Embedding(8, 4), "head": nn.Linear(4, 8), "other": nn.Linear(4, 4)}
    )
    model["head"].weight = model["table"].weight
    memeff_compile.ternarize_(model)
    assert type(model["head"]) is nn.Linear
    assert isinstance(model["other"], TernaryLinear)
    block = memeff_compile.ternarize_(Attention(), skip=["*_proj.none", "q_*"])
    assert type(block.q_proj) is nn.Linear


def test_the_report_names_patterns_to_skip_that_match_no_module() -> None:
    block = memeff_compile.ternarize_(Attention(), skip=["lm_haed", "q_*"])
    report = memeff_compile.verb_report(block)
    assert report is not None
    assert "skip names 'lm_haed', but no module has this path" in report.summary
    assert "'q_*'" not in report.summary


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_packed_model_runs_with_gradients_on_and_only_its_backward_fails(
    is_compiled: bool,
) -> None:
    layers = nn.Embedding(8, 64), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64, bias=False)
    model = memeff_compile.pack_ternary_(memeff_compile.ternarize_(nn.Sequential(*layers)))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(ids)
    if is_compiled:
        memeff_compile.compile(model, inner="aot_eager")
    found = model(ids)
    assert torch.equal(found, expected)
    with pytest.raises(
        memeff_compile.UnsupportedInputError, match="ternary_linear has no backward"
    ):
        found.sum().backward()


def test_a_module_used_twice_is_replaced_twice_by_one() -> None:
    shared = nn.Linear(4, 4)
    model = memeff_compile.ternarize_(nn.Sequential(shared, nn.ReLU(), shared))
    assert model[0] is model[2]
    assert isinstance(model[0], TernaryLinear)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: memeff_compile.ternarize_(m, "a3"), "one of 'b1.58'"),
        (lambda m: memeff_compile.ternarize_(m, kinds={"q_proj": "int3"}), "int3"),
        (lambda m: memeff_compile.ternarize_(m, skip=["*"]), "found no linear"),
        (lambda m: memeff_compile.ternarize_(nn.Sequential(m.q_proj), "a4.8"), "kinds="),
        (lambda m: memeff_compile.pack_ternary_(m), "ternarize_"),
        (lambda m: memeff_compile.pack_ternary_(TernaryLinear(4, 4)), "nn.Sequential"),
        (lambda m: TernaryStages(m, 0), "at least 1"),
        (lambda m: TernaryStages(m, 5, second="b2"), "one of 'b1.58'"),
    ],
    ids=["recipe", "kind", "nothing", "no role", "nothing to pack", "root", "steps", "second"],
)
def test_what_cannot_be_done_is_refused_with_the_way_out(change: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        change(Attention())


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("layers.0.self_attn.q_proj", "int4"),
        ("blocks.0.attn.Wqkv", "int4"),
        ("encoder.0.SelfAttention.q", "int4"),
        ("layer.0.attention.output.dense", "topk8"),  # BERT's, and not its down projection:
        ("layer.0.output.dense", "int8"),
        ("h.0.attn.c_proj", "topk8"),
        ("h.0.mlp.c_proj", "int8"),
        ("layers.0.mlp.dense_h_to_4h", "int4"),
        ("layers.0.attention.wo", "topk8"),
        ("block.0.layer.1.DenseReluDense.wo", "int8"),
    ],
)
def test_what_a_projection_does_is_read_off_the_end_of_its_path(path: str, kind: str) -> None:
    model: nn.Module = nn.Linear(8, 8)
    for name in reversed(path.split(".")):
        model = nn.ModuleDict({name: model})
    memeff_compile.ternarize_(model, "a4.8")
    assert kinds_of(model) == {path: kind}


def test_modules_with_hooks_are_refused_before_anything_is_changed() -> None:
    model = Attention()
    model.down_proj.register_forward_hook(lambda *given: None)
    with pytest.raises(OptionError, match="down_proj has hooks"):
        memeff_compile.ternarize_(model)
    assert kinds_of(model) == {}


def test_stages_switch_once_and_can_be_resumed() -> None:
    model = Attention()
    stages = TernaryStages(model, steps=4, share=0.5)
    seen = []
    for _ in range(4):
        seen.append((stages.stage, kinds_of(model)["q_proj"]))
        stages.step()
    assert seen == [(1, "int8"), (1, "int8"), (2, "int4"), (2, "int4")]
    resumed = TernaryStages(Attention(), steps=4, share=0.5)
    resumed.load_state_dict(stages.state_dict())
    assert kinds_of(resumed.model)["o_proj"] == "topk8"


@pytest.mark.parametrize(
    "recipe", ["a4.8", *(pytest.param(r, marks=pytest.mark.slow) for r in ("b1.58", "a4.8-fp4"))]
)
def test_a_ternarised_model_trains_compiled_as_it_does_eagerly(recipe: str) -> None:
    torch.manual_seed(0)
    eager = memeff_compile.ternarize_(Attention(), recipe)
    ours = copy.deepcopy(eager)
    compiled = torch.compile(ours, backend="memeff", options={"memeff.inner": "aot_eager"})
    losses: list[list[float]] = []
    for model, call in ((eager, eager), (ours, compiled)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(5):
            loss = F.cross_entropy(call(IDS).flatten(0, 1), IDS.roll(-1, 1).flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
    assert losses[0][-1] < losses[0][0]
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-3
    found = memeff_compile.last_report().records
    merged = sorted(r.sites for r in found if r.pass_name == "ternarize_linear")
    assert merged == [2, 3], "q, k and v are one product, gate and up another"
    after = memeff_compile.graphs()[-1].after
    assert after.count("memeff.ternary_linear_quantize(") == 4


def test_a_write_between_two_ternary_linears_keeps_them_apart() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 8), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            out = self.first(x).sin()
            x.mul_(3)
            return out + self.second(x)

    model = memeff_compile.ternarize_(Written())
    x = torch.randn(4, 32)
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "aot_eager"})
    torch.testing.assert_close(compiled(x), model(x))
    assert memeff_compile.last_report().rewrites("ternarize_linear") == 0


@pytest.mark.parametrize("shape", [(5, 32), (2, 5, 32)])
def test_an_op_in_place_may_follow_a_ternary_linear(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, grads = torch.randn(shape), []
    for in_place in (True, False):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(32, 16), nn.ReLU(inplace=in_place), nn.Linear(16, 8))
        model = memeff_compile.ternarize_(layers)
        model(x).sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for mine, theirs in zip(*grads, strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs)


# --- pack_ternary_ --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["b1.58", "a4.8", "a4.8-fp4"])
def test_a_packed_model_gives_the_bits_of_the_unpacked_one(recipe: str) -> None:
    model = memeff_compile.ternarize_(Attention(), recipe)
    with torch.no_grad():
        wanted = model(IDS)
        assert memeff_compile.pack_ternary_(model) is model
        assert torch.equal(model(IDS), wanted)
    assert not [m for m in model.modules() if isinstance(m, TernaryLinear)]
    names = {n for n, _ in model.named_parameters()}
    assert names == {"embed.weight", "lm_head.weight"}


def test_packed_weights_take_two_bits_each() -> None:
    model = memeff_compile.ternarize_(nn.Sequential(nn.Linear(512, 512, bias=False)))
    memeff_compile.pack_ternary_(model)
    held = sum(t.nbytes for t in model.state_dict().values())
    assert held / (512 * 512) <= 0.26


def test_packed_models_save_and_load() -> None:
    model = memeff_compile.pack_ternary_(memeff_compile.ternarize_(Attention(), "a4.8"))
    with torch.device("meta"):
        empty = Attention()
    memeff_compile.pack_ternary_(memeff_compile.ternarize_(empty, "a4.8"))
    empty.load_state_dict(model.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(empty(IDS), model(IDS))


def test_casting_a_packed_model_keeps_the_scale() -> None:
    model = memeff_compile.pack_ternary_(memeff_compile.ternarize_(Attention()))
    scale = model.q_proj.weight_scale.clone()
    model.to(torch.bfloat16)
    assert torch.equal(model.q_proj.weight_scale, scale)
    assert model(IDS).dtype == torch.bfloat16


def test_training_a_packed_model_is_refused_with_the_way_out() -> None:
    model = memeff_compile.pack_ternary_(memeff_compile.ternarize_(Attention()))
    with pytest.raises(UnsupportedInputError, match="ternarize_"):
        model(IDS).sum().backward()


def test_layers_of_ones_own_are_packed_by_name() -> None:
    model = Block(Detached)
    x = torch.randn(3, 20)
    with torch.no_grad():
        wanted = model(x)
        memeff_compile.pack_ternary_(model, layers={Detached: "int8"})
        assert error(model(x), wanted) < 1e-6


def test_an_online_bitnet_model_is_packed_and_compiles() -> None:
    model = tiny_bitnet().eval()
    ids = torch.randint(3, 96, (1, 9))
    with torch.no_grad():
        with eagerly():
            wanted = model(input_ids=ids).logits
        memeff_compile.pack_ternary_(model)
        assert error(model(input_ids=ids).logits, wanted) < 1e-5
        compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "aot_eager"})
        assert error(compiled(input_ids=ids).logits, wanted) < 1e-5
    assert sum(isinstance(m, PackedTernaryLinear) for m in model.modules()) == 14


@pytest.mark.slow
def test_a_packed_model_says_the_same_512_tokens() -> None:
    """Greedy, in float32, one token at a time: eager and dense, and packed on a static cache."""
    from transformers import StaticCache

    eager = tiny_bitnet().eval()
    packed = memeff_compile.pack_ternary_(copy.deepcopy(eager))
    options = {"memeff.inner": "aot_eager"}
    compiled = torch.compile(packed, backend="memeff", options=options)
    prompt = torch.randint(3, 96, (1, 6), generator=torch.Generator().manual_seed(0))
    said: list[list[int]] = []
    with torch.no_grad(), planned_for(torch.device("cuda", 0)):
        for call, is_eager in ((eager, True), (compiled, False)):
            config = eager.config
            cache = None if is_eager else StaticCache(config=config, max_cache_len=600)
            ids, tokens = prompt, []
            for _ in range(512):
                with eagerly() if is_eager else contextlib.nullcontext():
                    out = call(input_ids=ids, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                ids = out.logits[:, -1:].argmax(-1)
                tokens.append(int(ids))
            said.append(tokens)
    assert len(set(said[0])) > 8, "the model says one thing"
    assert said[0] == said[1]
    assert memeff_compile.last_report().rewrites("ternarize_linear") > 0


def test_reading_the_weight_of_a_packed_linear_names_the_way_out() -> None:
    model = memeff_compile.pack_ternary_(memeff_compile.ternarize_(Attention()))
    assert not hasattr(model.q_proj, "weight")
    with pytest.raises(AttributeError, match="skip"):
        _ = model.q_proj.weight
    with pytest.raises(AttributeError, match="other"):
        _ = model.q_proj.other


def stored_layers() -> tuple[nn.Module, nn.Module, Tensor]:
    """Return one linear as transformers' offline and packed layers hold it, and x."""
    from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights

    codes = torch.randint(-1, 2, (16, 32)).float()
    offline = AutoBitLinear(32, 16, True, online_quant=False)
    stored = BitLinear(32, 16, True, dtype=torch.float32)
    with torch.no_grad():
        offline.weight.copy_(codes)
        offline.weight_scale.fill_(0.25)  # a factor
        stored.weight.copy_(pack_weights(codes.clone()))
        stored.weight_scale.fill_(4.0)  # a divisor
        offline.bias.copy_(torch.linspace(-1, 1, 16))
        stored.bias.copy_(torch.linspace(-1, 1, 16))
    return offline, stored, torch.randn(5, 32)


def test_a_factor_and_a_divisor_are_told_apart() -> None:
    """transformers' offline layer multiplies by its scale, its packed one divides."""
    offline, stored, x = stored_layers()
    with torch.no_grad(), eagerly():
        for layer in (offline, stored):
            wanted = layer(x)
            packed = memeff_compile.pack_ternary_(nn.Sequential(layer))
            assert error(packed(x), wanted) < 1e-6


def test_an_offline_weight_that_is_not_ternary_is_refused() -> None:
    offline, _, _ = stored_layers()
    with torch.no_grad():
        offline.weight[3, 3] = 0.5
    with pytest.raises(UnsupportedInputError, match=r"holds 0\.5"):
        memeff_compile.pack_ternary_(nn.Sequential(offline))


def test_a_stored_bitnet_layer_compiles_once_packed() -> None:
    """torch 2.13 cannot compile transformers' packed layer: a compiled method inside it."""
    _, stored, x = stored_layers()
    with torch.no_grad(), eagerly():
        wanted = stored(x)
    model = memeff_compile.pack_ternary_(nn.Sequential(stored))
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "aot_eager"})
    with torch.no_grad():
        assert error(compiled(x), wanted) < 1e-6


def test_tokens_and_weights_of_the_published_layer_are_the_oracle() -> None:
    """The tests above compare with these, which implement the papers."""
    x, w = torch.randn(2, 8), torch.randn(4, 8)
    assert torch.allclose(tokens_int8(x), x, atol=float(x.abs().max()) / 127)
    assert set((weights(w) / w.abs().mean()).round().unique().tolist()) <= {-1.0, 0.0, 1.0}


def test_a_bias_alone_can_train() -> None:
    linear = memeff_compile.ternarize_(nn.Sequential(nn.Linear(32, 16)))[0]
    linear.weight.requires_grad_(False)
    linear(torch.randn(4, 32)).sum().backward()
    assert torch.equal(linear.bias.grad, torch.full((16,), 4.0))
    assert linear.weight.grad is None


class Normed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(32, 16)
        self.norm = nn.LayerNorm(32)


def test_what_a_linear_holds_besides_is_not_lost_in_packing() -> None:
    with pytest.raises(OptionError, match="holds norm, which would be lost"):
        memeff_compile.pack_ternary_(nn.Sequential(Normed()), layers={Normed: "int8"})


def test_a_bare_linear_is_refused() -> None:
    with pytest.raises(OptionError, match="is itself a linear"):
        memeff_compile.ternarize_(nn.Linear(32, 16))


def test_a_layer_with_a_fast_path_of_its_own_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64)
    with pytest.raises(OptionError, match="reads its weight directly"):
        memeff_compile.ternarize_(nn.Sequential(layer), skip=["*.self_attn"])
