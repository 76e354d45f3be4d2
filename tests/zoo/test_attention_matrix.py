"""Every family of the zoo, every attention of transformers, padding and packing, every way to call it.

"The same attention": the rewritten model differs from the model by no more than 1.5 times the
difference between sdpa and eager attention, or by rounding of the last bits; that goes for logits,
also those of padding, and for the gradient of the whole model.

The default run is a diagonal through the table: the families that differ most, a cell of each taken
in turn. The whole table is marked slow.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from tests.support.zoo import FAMILIES, VOCABULARY, Family, build, inputs

transformers = pytest.importorskip("transformers", reason="the zoo is built from its configs")

LENGTH, CACHED = 12, 16
ROUNDING = 5e-6
FACTOR = 1.5

Result = list[Tensor]


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    memeff_compile.reset()
    return torch.compile(function, backend="memeff", options={"memeff.inner": "eager"})


# --- the table ------------------------------------------------------------------------------------

ATTENTIONS = ("sdpa", "eager")
WITHOUT_CACHE = ("train without cache", "prefill without cache")
"""Where transformers looks for packed sequences, with no mask given."""

CALLS: dict[str, tuple[str, ...]] = {
    "causal": ("train", "prefill", "dynamic decode", "static decode"),
    "seq2seq": ("train", "infer"),
    "speech": ("train", "infer"),
    "masked": ("train", "infer"),
}
PADDINGS: dict[str, tuple[str, ...]] = {
    "causal": ("none", "left", "right", "packed"),
    "seq2seq": ("none", "left", "right"),
    "speech": ("none", "right"),
    "masked": ("none", "left", "right"),
}
WITHOUT_POSITIONS = ("bloom", "mpt")
"""Decoders that take no position_ids, and so know no packed sequences."""


@dataclass(frozen=True)
class Cell:
    """One way to call a model."""

    family: Family
    attention: str
    padding: str
    call: str

    def __str__(self) -> str:
        return f"{self.family.name}, {self.attention}, {self.padding}, {self.call}"


def cells_of(family: Family, padding: str) -> list[Cell]:
    """Return the cells of a family with one kind of padding."""
    calls = () if padding == "packed" else CALLS[family.kind]
    if family.kind == "causal" and padding in ("none", "packed"):
        calls += WITHOUT_CACHE
    return [Cell(family, attention, padding, call) for attention in ATTENTIONS for call in calls]


def rows_of_the_table() -> list[tuple[Family, str]]:
    """Return every family with every padding it knows."""
    return [
        (family, padding)
        for family in FAMILIES
        for padding in PADDINGS[family.kind]
        if not (padding == "packed" and family.name in WITHOUT_POSITIONS)
    ]


UNLIKE = (
    "mistral gemma3_text gpt2 gpt_neo opt bloom falcon phi3 cohere2 bart t5 whisper electra".split()
)
"""Families that spell attention, its masks or its positions differently from each other."""

ELSEWHERE = ("mistral", "bart", "t5", "whisper")
"""Those that other quick tests compare with eager: masks that are packed, and losses."""


def diagonal() -> list[Cell]:
    """Return one cell for each of a few families, so that neighbours differ in everything."""
    by_family: dict[str, list[Cell]] = {}
    for family, padding in rows_of_the_table():
        if family.name in UNLIKE:
            by_family.setdefault(family.name, []).extend(cells_of(family, padding))
    return [cells[turn * 7 % len(cells)] for turn, cells in enumerate(by_family.values())]


LAYERS_DIFFER = ("llama", "gemma2", "gemma3_text", "gpt_neo", "cohere2")
"""Families with layers of two kinds, and one with two layers that share a mask."""

ONE_LAYER = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1)


# --- one cell -------------------------------------------------------------------------------------


def model_of(family: Family, attention: str) -> nn.Module | None:
    """Build a model, or return None where transformers has no such attention for it."""
    layers = {} if family.name in LAYERS_DIFFER else ONE_LAYER
    known = {k: v for k, v in layers.items() if k in family.overrides or k == "num_hidden_layers"}
    try:
        return build(family, attn_implementation=attention, **known)
    except ValueError:
        return None


def batch_of(cell: Cell) -> dict[str, Tensor]:
    """Return ids, mask or positions, and labels that leave padding out."""
    batch = inputs(cell.family, length=LENGTH)
    if cell.padding == "packed":
        positions = torch.cat([torch.arange(7), torch.arange(LENGTH - 7)])
        return batch | {"position_ids": positions[None].expand(2, -1)}
    if cell.padding == "none":
        return batch
    if cell.family.kind == "speech":  # its audio is not masked: the decoder's text is
        mask = torch.ones_like(batch["labels"])
        mask[0, -3:] = 0
        return batch | {"decoder_attention_mask": mask}
    mask = torch.ones_like(batch["input_ids"])
    mask[0, (slice(0, 3) if cell.padding == "left" else slice(-3, None))] = 0
    if cell.family.kind != "seq2seq":  # its labels are the decoder's
        batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return batch | {"attention_mask": mask}


def run(cell: Cell, forward: Callable[..., Any], model: nn.Module) -> Result:
    """Call a model as the cell says; return the logits and, of a training step, the gradient."""
    batch = batch_of(cell)
    settings = {"use_cache": False} if cell.call in WITHOUT_CACHE else {}
    if cell.call.startswith("train"):
        model.zero_grad(set_to_none=True)
        out = forward(**batch, **settings)
        out.loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return [(out.logits + 0).detach(), torch.cat(gradients)]
    labels = batch.pop("labels")
    with torch.no_grad():
        if cell.call == "infer":
            more = {} if cell.family.kind == "masked" else {"decoder_input_ids": labels.abs() % 90}
            return [forward(**batch, **more).logits]
        if cell.call.startswith("prefill"):
            return [forward(**batch, **settings).logits]
        cache = cache_for(cell, model)
        before = {name: value[:, :-1] for name, value in batch.items()}
        model(**before, past_key_values=cache)
        batch["input_ids"] = batch["input_ids"][:, -1:]
        return [forward(**batch, past_key_values=cache).logits]


def cache_for(cell: Cell, model: nn.Module) -> Any:
    if cell.call == "static decode":
        return transformers.StaticCache(config=model.config, max_cache_len=CACHED)
    return transformers.DynamicCache(config=model.config)


def kept(cell: Cell, logits: Tensor) -> Tensor:
    """Return which tokens are not padding: for padding the two attentions differ."""
    mask = batch_of(cell).get("attention_mask") if cell.family.kind != "seq2seq" else None
    whole = torch.ones(logits.shape[:2], dtype=torch.bool)
    return whole if mask is None else mask[:, -logits.shape[1] :].bool()


def assert_same(cell: Cell) -> bool:
    """Compare the compiled model with the model; return whether there is such a model."""
    model = model_of(cell.family, cell.attention)
    if model is None:
        return False
    if cell.call == "static decode" and not can_decode_statically(cell):
        return False
    others = [model_of(cell.family, a) for a in ATTENTIONS if a != cell.attention]
    expected = run(cell, model, model)
    found = run(cell, compiled(model), model)
    failed = [r for r in memeff_compile.last_report().records if r.action == "internal_error"]
    assert not failed, str(failed)
    between: list[Tensor] = [torch.zeros_like(e) for e in expected]
    for other in others:
        if other is not None and cell.family.name != "gemma2":  # its sdpa has no softcap
            other.load_state_dict(model.state_dict())
            between = [o - e for o, e in zip(run(cell, other, other), expected, strict=True)]
    between[0] = between[0][kept(cell, between[0])]
    for name, ours, theirs, apart in zip(
        ("logits", "gradient"), found, expected, between, strict=False
    ):
        allowed = ROUNDING * largest(theirs) + FACTOR * largest(apart)
        difference = largest(ours - theirs)
        assert difference <= allowed, f"{cell}: {name} off by {difference:.1e} of {allowed:.1e}"
    return True


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def can_decode_statically(cell: Cell) -> bool:
    """Return whether this transformers decodes the family with a StaticCache, in eager mode."""
    model = model_of(cell.family, cell.attention)
    assert model is not None
    try:
        run(cell, model, model)
    except RuntimeError:  # Bloom of 5.17: its bias is as long as the sequence
        return False
    return True


# --- the tests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=pytest.mark.slow if cell.family.name in ELSEWHERE else ())
        for cell in diagonal()
    ],
    ids=str,
)
def test_a_diagonal_through_families_attends_as_before(cell: Cell) -> None:
    if not assert_same(cell):
        other = next(a for a in ATTENTIONS if a != cell.attention)
        assert assert_same(Cell(cell.family, other, cell.padding, cell.call))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "padding"), rows_of_the_table(), ids=lambda x: getattr(x, "name", x)
)
def test_every_family_attends_as_before(family: Family, padding: str) -> None:
    cells = cells_of(family, padding)
    ran = [cell for cell in cells if assert_same(cell)]
    attentions = {cell.attention for cell in ran}
    left_out = [c for c in cells if c.attention in attentions and c not in ran]
    assert "eager" in attentions
    assert all(family.name == "bloom" and c.call == "static decode" for c in left_out)


# --- generation -----------------------------------------------------------------------------------


def tokens(model: Any, family: Family, padding: str, cache: str) -> Tensor:
    """Return the tokens that a model generates greedily."""
    batch = batch_of(Cell(family, "", padding if family.kind != "speech" else "none", ""))
    batch.pop("labels")
    batch = {n: v[:, :6] if v.dim() == 2 else v for n, v in batch.items()}
    settings = {"cache_implementation": "static", "disable_compile": True} if cache else {}
    found: Tensor = model.generate(
        **batch, **settings, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return found


def assert_same_tokens(family: Family, attention: str, padding: str, cache: str = "") -> bool:
    model = model_of(family, attention)
    if model is None:
        return False
    model.eval()
    if "generation_config" in vars(model):
        model.generation_config.eos_token_id = None
    try:
        expected = tokens(model, family, padding, cache)
    except (RuntimeError, ValueError):  # no static cache for this family
        assert cache
        return False
    model.forward = compiled(model.forward)
    assert torch.equal(tokens(model, family, padding, cache), expected)
    assert memeff_compile.last_report().graphs, "nothing was compiled"
    assert "internal_error" not in {r.code for r in memeff_compile.last_report().records}
    return True


GENERATING = [family for family in FAMILIES if family.kind != "masked"]
FAST_TO_GENERATE = {("mistral", "eager", "left")}


@pytest.mark.parametrize(
    ("name", "attention", "padding"),
    sorted(FAST_TO_GENERATE),
)
def test_generation_with_left_padding_gives_the_same_tokens(
    name: str, attention: str, padding: str
) -> None:
    (family,) = [f for f in FAMILIES if f.name == name]
    assert assert_same_tokens(family, attention, padding)


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("family", GENERATING, ids=lambda f: f.name)
def test_every_family_generates_the_same_tokens(family: Family, padding: str) -> None:
    ran = [
        assert_same_tokens(family, attention, padding, cache)
        for attention in ATTENTIONS
        for cache in ("", "static")
    ]
    assert any(ran[::2])


# --- images ---------------------------------------------------------------------------------------


class DiTBlock(nn.Module, abc.ABC):
    """A block of a diffusion transformer, as diffusers spells it: scale and shift from a time."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.0))
        self.q_norm, self.k_norm = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 64), nn.GELU(approximate="tanh"), nn.Linear(64, width)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    @abc.abstractmethod
    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attend, each block below in its own way."""

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.heads, x.shape[-1] // self.heads).transpose(1, 2)

    def forward(self, x: Tensor, time: Tensor, mask: Tensor | None = None) -> Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = (
            part.unsqueeze(1) for part in self.modulation(time).chunk(6, dim=-1)
        )
        x = x + gate * self.attend(self.norm1(x) * (1 + scale) + shift, mask)
        return x + gate_mlp * self.mlp(self.norm2(x) * (1 + scale_mlp) + shift_mlp)


class FusedDiTBlock(DiTBlock):
    """With scaled_dot_product_attention, as AttnProcessor2_0."""

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (self.split(to(x)) for to in (self.to_q, self.to_k, self.to_v))
        y = nn.functional.scaled_dot_product_attention(
            self.q_norm(q), self.k_norm(k), v, attn_mask=mask, dropout_p=0.0, is_causal=False
        )
        y = y.transpose(1, 2).reshape(x.shape[0], -1, x.shape[-1]).to(q.dtype)
        out: Tensor = self.to_out(y)
        return out


class SpelledOutDiTBlock(DiTBlock):
    """With products and a softmax, as in the first releases of DiT."""

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (self.split(to(x)) for to in (self.to_q, self.to_k, self.to_v))
        q, k = self.q_norm(q) * (x.shape[-1] // self.heads) ** -0.5, self.k_norm(k)
        scores = q @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores + torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -1e9)
        y = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(x.shape)
        out: Tensor = self.to_out(y)
        return out


class MultiheadDiTBlock(DiTBlock):
    """With PyTorch's own module, its weights unread."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__(width, heads)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        taken = None if mask is None else ~mask[:, 0, 0]
        out: Tensor = self.attention(x, x, x, key_padding_mask=taken)[0]
        return out


BLOCKS: dict[str, tuple[type[DiTBlock], set[str], set[str]]] = {
    "sdpa": (FusedDiTBlock, set(), {"padding_mask"}),
    "spelled out": (SpelledOutDiTBlock, {"rewrote"}, {"padding_mask"}),
    "nn.MultiheadAttention": (MultiheadDiTBlock, {"rewrote"}, {"rewrote", "padding_mask"}),
}


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        pytest.param(
            *(name, padded),
            id=f"{name}-{'padded' if padded else 'whole'}",
            marks=pytest.mark.slow if padded and name == "spelled out" else (),
        )
        for name in BLOCKS
        for padded in (False, True)
    ],
)
def test_a_diffusion_transformer_attends_as_before(name: str, padded: bool) -> None:
    make, without, with_padding = BLOCKS[name]
    torch.manual_seed(0)
    model = nn.ModuleList(make() for _ in range(2)).double()
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    time = torch.randn(2, 32, dtype=torch.float64)
    mask = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    mask[0, ..., 7:] = False

    def forward(x: Tensor) -> Tensor:
        for block in model:
            x = block(x, time, mask if padded else None)
        return x

    def step(function: Any) -> Result:
        model.zero_grad(set_to_none=True)
        out = function(x)
        out.square().mean().backward()
        return [
            out.detach(),
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]),
        ]

    for ours, theirs in zip(step(compiled(forward)), step(forward), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    found = {
        r.code
        for r in memeff_compile.last_report().records
        if r.pass_name in ("recover_attention", "expand_multihead")
    }
    assert found == (with_padding if padded else without)


@pytest.mark.parametrize(
    ("name", "attention", "trains"),
    [
        ("ViT", "eager", True),
        pytest.param("DeiT", "eager", True, marks=pytest.mark.slow),
        *[pytest.param(name, "sdpa", False, marks=pytest.mark.slow) for name in ("ViT", "DeiT")],
    ],
)
def test_image_encoders_attend_as_before(name: str, attention: str, trains: bool) -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 16,
        "patch_size": 8,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "attn_implementation": attention,
    }
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForImageClassification")(config).train(trains)

    def step(forward: Any) -> Result:
        model.zero_grad(set_to_none=True)
        out = forward(pixel_values=pixels, labels=torch.tensor([0, 1]))
        out.loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return [(out.logits + 0).detach(), torch.cat(gradients)]

    for ours, theirs in zip(step(compiled(model)), step(model), strict=True):
        assert largest(ours - theirs) <= ROUNDING * largest(theirs)
    codes = {
        r.code for r in memeff_compile.last_report().records if r.pass_name == "recover_attention"
    }
    assert codes == {"rewrote"} if attention == "eager" else codes <= {"rewrote"}


@pytest.mark.slow
def test_the_table_covers_what_models_take() -> None:
    """Families said to know no packed sequences take no positions, and the others do."""
    for family in FAMILIES:
        if family.kind == "causal":
            model = model_of(family, "eager")
            assert model is not None
            takes = "position_ids" in inspect.signature(model.forward).parameters
            assert takes == (family.name not in WITHOUT_POSITIONS), family.name
    assert VOCABULARY > 90  # the decoder inputs above stay inside it
