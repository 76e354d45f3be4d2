"""Each distinct layer of a model is compiled once; losses and gradients are those of the whole."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile import compat
from memeff_compile.backend.trip import Trip
from memeff_compile.passes.graph import repeated_layers
from memeff_compile.passes.graph.structure import structure

WIDTH, BLOCKS = 16, 5


class Block(nn.Module):
    """A gated MLP with a residual and a factor."""

    def __init__(self, factor: float = 1.0, width: int = WIDTH) -> None:
        super().__init__()
        self.factor = factor
        self.gate, self.up = (nn.Linear(WIDTH, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, WIDTH, bias=False)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        inner = nn.functional.silu(self.gate(x)) * self.up(x)
        return x + self.factor * scale * self.down(inner)


class Net(nn.Module):
    """Blocks between two linears, with a tensor that all blocks read."""

    def __init__(self, blocks: list[nn.Module], how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with self.around():
            x = self.first(x)
            scale = torch.tanh(x.mean())
            middle = x
            for place, block in enumerate(self.blocks):
                if self.how == "checkpointed":
                    x = checkpoint(block, x, scale, use_reentrant=False)
                elif self.how == "sum in the model":
                    x = x + block(x, scale)
                else:
                    x = block(x, scale)
                middle = x if place == 2 else middle
            return self.last(x).float().square().mean(), middle

    def around(self) -> contextlib.AbstractContextManager[Any]:
        if self.how == "autocast":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count what is handed to AOTAutograd; hold the number of nodes of each graph."""
    seen: list[int] = []
    compile_one = compat.compile_with_aot_eager

    def counted(gm: Any, inputs: Any) -> Any:
        seen.append(len(gm.graph.nodes))
        return compile_one(gm, inputs)

    monkeypatch.setattr(compat, "compile_with_aot_eager", counted)
    yield seen
    memeff_compile.reset()


def records() -> dict[str, str]:
    report = memeff_compile.last_report()
    assert report is not None
    return {r.code: r.sentence for r in report.records if r.pass_name == "backend"}


def model_gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def gradients(model: nn.Module, x: Tensor, regions: str, **more: Any) -> list[Tensor]:
    memeff_compile.reset()
    model.zero_grad()
    options = {"memeff.inner": "aot_eager", "memeff.regions": regions, **more}
    compiled = torch.compile(model, backend="memeff", options=options)
    loss, middle = compiled(x)
    (loss + middle.float().mean()).backward()
    return [loss.detach(), middle.detach(), *model_gradients(model)]


def compare(model: nn.Module, x: Tensor, **tolerance: float) -> None:
    """Compare loss, output and gradients with those of the whole graph, in float64.

    Gradients of a tensor that several layers read are added in another order.
    """
    model, x = model.double(), x.double()
    whole = [each.clone() for each in gradients(model, x, "off")]
    found = gradients(model, x, "on")
    torch.testing.assert_close(found, whole, **(tolerance or {"rtol": 1e-12, "atol": 1e-14}))


def alike(number: int = BLOCKS) -> list[nn.Module]:
    return [Block() for _ in range(number)]


@pytest.mark.parametrize(
    "how",
    ["plain", "checkpointed", "autocast", pytest.param("sum in the model", marks=pytest.mark.slow)],
)
def test_equal_layers_are_compiled_once(compilations: list[int], how: str) -> None:
    x = torch.randn(
        3,
        WIDTH,
    )
    rounded = {"rtol": 0.02, "atol": 1e-3} if how == "autocast" else {}
    compare(Net(alike(), how), x, **rounded)
    # A sum in the model belongs to the layer before it; after the last layer comes the suffix.
    equal = BLOCKS - 1 if how == "sum in the model" else BLOCKS
    assert records()["repeated_layers"] == f"{equal} layers of 1 kind, each kind compiled once"
    # the whole; then what precedes the layers, one layer, and what follows
    assert len(compilations) == 1 + 3
    assert compilations[2] < compilations[0] / 3


def test_each_kind_is_compiled_once(compilations: list[int]) -> None:
    blocks = [Block(width=32 if place % 2 else 16) for place in range(8)]
    compare(Net(blocks), torch.randn(3, WIDTH))
    assert records()["repeated_layers"] == "8 layers of 2 kinds, each kind compiled once"
    assert len(compilations) == 1 + 4


def _frozen() -> list[nn.Module]:
    blocks = alike()
    blocks[2].requires_grad_(False)
    return blocks


def _wider() -> list[nn.Module]:
    blocks = alike()
    blocks[2] = Block(width=32)
    return blocks


def _rounded() -> list[nn.Module]:
    blocks = alike()
    blocks[2] = Block(factor=0.5)
    return blocks


def _strided() -> list[nn.Module]:
    blocks = alike()
    up: Any = blocks[2].up
    up.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    return blocks


@pytest.mark.parametrize(
    "blocks",
    [
        _frozen,
        _wider,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (_rounded, _strided)),
    ],
)
def test_a_layer_that_differs_is_compiled_by_itself(
    compilations: list[int], blocks: Callable[[], list[nn.Module]]
) -> None:
    compare(Net(blocks()), torch.randn(3, WIDTH))
    assert records()["repeated_layers"] == f"{BLOCKS - 1} layers of 1 kind, each kind compiled once"
    assert len(compilations) == 1 + 4


def test_layers_that_share_weights_share_code(compilations: list[int]) -> None:
    block = Block()
    compare(Net([block] * BLOCKS), torch.randn(3, WIDTH))


def test_few_layers_stay_in_one_graph(compilations: list[int]) -> None:
    compare(Net(alike(3)), torch.randn(3, WIDTH))
    assert records() == {}
    assert len(compilations) == 2


def test_layers_that_all_differ_stay_in_one_graph(compilations: list[int]) -> None:
    blocks: list[nn.Module] = [Block(width=8 * (place + 1)) for place in range(BLOCKS)]
    compare(Net(blocks), torch.randn(3, WIDTH))
    assert "no 4 layers are equal" in records()["layers_differ"]
    assert len(compilations) == 2


def test_another_batch_is_served_by_one_more_graph_at_most(compilations: list[int]) -> None:
    model = Net(alike())
    options = {"memeff.inner": "aot_eager", "memeff.regions": "on"}
    compiled = torch.compile(copy.deepcopy(model), backend="memeff", options=options)
    for batch in (3, 5, 7, 11):
        x = torch.randn(batch, WIDTH)
        (loss, _), (expected, _) = compiled(x), model(x)
        torch.testing.assert_close(loss, expected)
    assert len(compilations) == 2 * 3


class Adding(nn.Module):
    """A layer that writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x += scale * torch.tanh(self.row)
        return x


def test_a_tensor_written_across_a_border_keeps_the_graph_whole(compilations: list[int]) -> None:
    compare(Net([Adding() for _ in range(BLOCKS)]), torch.randn(3, WIDTH))
    assert "writes in place" in records()["layers_written_across"]
    assert len(compilations) == 2


class Making(nn.Module):
    """A layer that writes to a tensor that it has made, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        made[:, 1:] = torch.tanh(self.linear(x))[:, :-1]
        made += x * scale
        return made


def test_a_tensor_written_where_it_is_made_crosses_a_border(compilations: list[int]) -> None:
    compare(Net([Making() for _ in range(BLOCKS)]), torch.randn(3, WIDTH))
    assert records()["repeated_layers"] == f"{BLOCKS} layers of 1 kind, each kind compiled once"
    assert len(compilations) == 1 + 3


class Adapted(nn.Module):
    """A frozen linear with a trained low-rank part."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.low, self.up = (nn.Parameter(torch.randn(*s)) for s in ((2, WIDTH), (WIDTH, 2)))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale * torch.tanh(self.base(x) + x @ self.low.T @ self.up.T)


class Experts(nn.Module):
    """A router, and experts that each row is given to by weight."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        kept = weights * (weights > weights.mean(-1, keepdim=True))
        return x + scale * sum(
            kept[..., place, None] * expert(x) for place, expert in enumerate(self.experts)
        )


class Windowed(nn.Module):
    """Attention in which a query sees so many keys before it."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window, self.products = window, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        query, key, value = self.products(x)[None, None].chunk(3, -1)
        apart = torch.arange(len(x))[:, None] - torch.arange(len(x))
        seen = (apart >= 0) & (apart < self.window)
        found = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return x + scale * found[0, 0]


class Recomputing(nn.Module):
    """A layer that computes its inner part again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return torch.tanh(self.inner(x))

        return x + scale * self.outer(checkpoint(inner, x, use_reentrant=False))


class Pair(nn.Module):
    """Two layers, which are recomputed together."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Block(), Block(width=32)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.two(self.one(x, scale), scale)


LAYERS: dict[str, tuple[Callable[[], list[nn.Module]], str, int]] = {
    "low rank": (lambda: [Adapted() for _ in range(BLOCKS)], "plain", 1),
    "experts": (lambda: [Experts() for _ in range(BLOCKS)], "plain", 1),
    "windows": (lambda: [Windowed(3 if n % 2 else 9) for n in range(8)], "plain", 2),
    "a checkpoint inside": (lambda: [Recomputing() for _ in range(BLOCKS)], "plain", 1),
    "a checkpoint around two": (lambda: [Pair() for _ in range(BLOCKS)], "checkpointed", 1),
}
LONG = ("windows", "a checkpoint around two")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind in LONG else ()) for kind in LAYERS],
)
def test_gradients_of_each_kind_of_layer_are_those_of_the_whole(
    compilations: list[int], kind: str
) -> None:
    make, how, kinds = LAYERS[kind]
    layers = make()
    compare(Net(layers, how), torch.randn(9, WIDTH))
    counted = "1 kind" if kinds == 1 else f"{kinds} kinds"
    assert records()["repeated_layers"].startswith(f"{len(layers)} layers of {counted}")


def test_layers_of_compressed_weights_train_as_without(compilations: list[int]) -> None:
    model = Net([Adapted() for _ in range(BLOCKS)]).bfloat16()
    x = torch.randn(9, WIDTH).bfloat16()
    memeff_compile.compress_(model, layers=["Linear"], skip=("first", "last"))
    whole = [each.clone() for each in gradients(model, x, "off")]
    found = gradients(model, x, "on")
    torch.testing.assert_close(found, whole, rtol=0.02, atol=1e-3)
    assert records()["repeated_layers"].startswith(f"{BLOCKS} layers of 1 kind")


class Stacks(nn.Module):
    """An encoder and a decoder, with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Net(alike(4)), Net(alike(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.tanh(x.mean())
        for block in self.encoder.blocks:
            x = block(x, scale)
        x = encoded = nn.functional.layer_norm(x, (WIDTH,))
        for block in self.decoder.blocks:
            x = block(x, scale) + encoded
        return x.square().mean(), encoded


def test_the_last_layer_of_an_encoder_equals_the_others(compilations: list[int]) -> None:
    compare(Stacks(), torch.randn(3, WIDTH))
    # the last layer of the decoder is followed by another sum
    assert records()["repeated_layers"].startswith("4 layers of 1 kind")


class Remembering(nn.Module):
    """A layer that writes to a buffer which the caller keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self.seen.add_(x.detach().sum(0))
        return x + scale * torch.tanh(self.linear(x + self.seen))


def test_buffers_that_layers_write_are_written(compilations: list[int]) -> None:
    model = Net([Remembering() for _ in range(BLOCKS)])
    twin = copy.deepcopy(model)
    x = torch.randn(3, WIDTH)
    found, expected = gradients(model, x, "on"), gradients(twin, x, "off")
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(list(model.buffers()), list(twin.buffers()))
    assert len(compilations) == 3 + 1


class Memory:
    """The tensor and the length that a layer stores for itself."""

    def __init__(self, length: int) -> None:
        self.rows, self.length = torch.ones(length, WIDTH, dtype=torch.float64), length


class Storing(nn.Module):
    """A layer that appends a row to what it stores, and divides by the length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        memory.rows = torch.cat([memory.rows, self.linear(x)])
        memory.length += 1
        return torch.tanh(memory.rows.sum(0, keepdim=True)) / memory.length


class Storage(nn.Module):
    """Layers and what each stores."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Storing() for _ in range(BLOCKS))

    def forward(self, x: Tensor, memories: list[Memory]) -> Tensor:
        for layer, memory in zip(self.layers, memories, strict=True):
            x = layer(x, memory)
        return x


@torch.no_grad()
def test_layers_that_store_their_own_sizes_are_equal(compilations: list[int]) -> None:
    """Guards hold for later calls: lengths that differ are compiled again."""
    model = Storage().double()
    options = {"memeff.inner": "aot_eager", "memeff.regions": "on"}
    compiled = torch.compile(model, backend="memeff", options=options)
    x = torch.ones(1, WIDTH, dtype=torch.float64)
    said, counts = [], []
    for lengths in ([2] * BLOCKS, [5] * BLOCKS, [9] * BLOCKS, [3, *[4] * (BLOCKS - 1)]):
        ours, theirs = ([Memory(length) for length in lengths] for _ in range(2))
        torch.testing.assert_close(compiled(x, ours), model(x, theirs))
        for found, expected in zip(ours, theirs, strict=True):
            assert found.length == expected.length
            torch.testing.assert_close(found.rows, expected.rows)
        said += [r.sentence.split(",")[0] for r in memeff_compile.graphs()[-1].records]
        counts.append(len(compilations))
    assert said == [f"{BLOCKS} layers of 1 kind"] * 3 + [f"{BLOCKS - 1} layers of 1 kind"]
    assert counts[1] == counts[2], "the second graph serves every length"


def test_verification_compares_the_whole(compilations: list[int]) -> None:
    model = Net(alike())
    found = gradients(model, torch.randn(3, WIDTH), "on", **{"memeff.verify": "raise"})
    assert len(found) == 2 + 3 * BLOCKS + 4


def test_a_failing_search_leaves_the_graph_whole(
    compilations: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("no layers")

    model = Net(alike())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(repeated_layers, "_keys", fails)
        gradients(model, torch.randn(3, WIDTH), "on")
    assert "ZeroDivisionError: no layers" in records()["layers_failed"]
    assert len(compilations) == 1


def test_short_layers_are_compiled_with_the_whole(compilations: list[int]) -> None:
    gradients(Net(alike()), torch.randn(3, WIDTH), "auto")
    assert "a step this short" in records()["layers_are_short"]
    assert len(compilations) == 1


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(("speed", "is_cut"), [(1e6, True), (1e9, False)])
def test_long_layers_are_compiled_once_without_asking(
    compilations: list[int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    speed: float,
    is_cut: bool,
    checkpointed: bool,
) -> None:
    """A layer has 3 x 2 x 300 x 16^2 operations, and as many twice in the backward: 1.4e6."""
    monkeypatch.setitem(repeated_layers.FASTEST, "cpu", speed / torch.get_num_threads())
    gradients(
        Net(alike(), "checkpointed" if checkpointed else "plain"), torch.randn(300, WIDTH), "auto"
    )
    assert ("repeated_layers" in records()) == is_cut
    assert len(compilations) == (3 if is_cut else 1)


def test_operations_of_frozen_weights_count_without_their_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    count = repeated_layers._operations

    def counted(info: Any) -> int:
        counts.append(count(info))
        return counts[-1]

    monkeypatch.setattr(repeated_layers, "_operations", counted)
    for frozen in (False, True):
        net = Net(alike()).requires_grad_(not frozen)
        gradients(net, torch.randn(8, WIDTH, requires_grad=True), "auto")
    one = 2 * 8 * WIDTH**2 * 3 * BLOCKS
    assert counts == [3 * one, 2 * one]


def test_cuda_graphs_of_inductor_keep_layers_apart(
    compilations: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a graph keeps the addresses of one layer's weights."""
    monkeypatch.setattr(Trip, "reuses_memory", True)
    x = torch.randn(3, WIDTH)
    gradients(Net(alike()), x, "on")
    assert "a CUDA graph of its own" in records()["cuda_graphs_of_inductor"]
    assert len(compilations) == 1
    for reuses_memory, count in ((True, BLOCKS + 2), (False, 3)):
        monkeypatch.setattr(Trip, "reuses_memory", reuses_memory)
        compilations.clear()
        model = Net(alike())
        memeff_compile.optim_in_backward(model, torch.optim.SGD, lr=0.1)
        gradients(model, x, "off")
        assert len(compilations) == count


def test_kernels_of_all_layers_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor waits for kernels after the last of three functions, each forward and backward."""
    from torch._inductor.async_compile import AsyncCompile

    order: list[str] = []
    compile_one, wait = compat.compile_with_inductor, AsyncCompile.wait

    def compiled(*args: Any) -> Any:
        order.append("compile")
        return compile_one(*args)

    def waited(self: AsyncCompile, scope: dict[str, Any]) -> None:
        order.append("wait")
        wait(self, scope)

    monkeypatch.setattr(compat, "compile_with_inductor", compiled)
    monkeypatch.setattr(AsyncCompile, "wait", waited)
    model, x = Net(alike()), torch.randn(3, WIDTH)
    # Inductor calls the operations: no loops for g++ to compile
    more = {"memeff.inner": "inductor", "fallback_by_default": True}
    with torch._inductor.config.patch(force_disable_caches=True):
        found = gradients(model, x, "on", **more)
    assert order == ["compile"] * 3 + ["wait"] * 6
    torch.testing.assert_close(found, gradients(model, x, "off"))


def _llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **more))


@pytest.mark.parametrize(
    "checkpointed",
    [pytest.param(False, id="kept"), pytest.param(True, id="checkpointed")],
)
@pytest.mark.slow
def test_a_llama_trains_as_without(compilations: list[int], checkpointed: bool) -> None:
    model = _llama(tie_word_embeddings=True).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    results = []
    options = {"memeff.inner": "aot_eager", "memeff.regions": "on"}
    for call in (model, torch.compile(model, backend="memeff", options=options)):
        model.zero_grad()
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*results)
    assert records()["repeated_layers"] == "4 layers of 1 kind, each kind compiled once"
    assert len(compilations) == 3


def test_the_last_layer_of_a_model_without_a_head_equals_the_others(
    compilations: list[int],
) -> None:
    """The graph ends with a norm, to which the last layer's result goes."""
    model = _llama().eval().model
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    options = {"memeff.inner": "aot_eager", "memeff.regions": "on"}
    compiled = torch.compile(model, backend="memeff", options=options)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).last_hidden_state
        found = compiled(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, wanted)
    assert records()["repeated_layers"] == "4 layers of 1 kind, each kind compiled once"


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["static", 4])
def test_a_llama_generates_as_without(compilations: list[int], cache: Any) -> None:
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    given |= {"max_new_tokens": 4, "do_sample": False}
    model = _llama().eval()
    expected = model.generate(ids, **given)  # shorter than the tokens that a cache of 4 bits keeps
    memeff_compile.compile(model, kv_cache=cache, inner="aot_eager", regions="on")
    assert torch.equal(model.generate(ids, **given), expected)
    assert records()["repeated_layers"] == "4 layers of 1 kind, each kind compiled once"


def _key(function: Callable[..., Any], *inputs: Any) -> Any:
    return structure(torch.fx.symbolic_trace(function), inputs)


class Normed(Block):
    """A block whose norm reads the residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width=width)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        result: Tensor = super().forward(self.norm(x), scale)
        return x + result


class NormedNet(Net):
    """The blocks end in a norm, as in language models."""

    def __init__(self, others: tuple[int, ...] = ()) -> None:
        super().__init__([Normed(width) for width in (*[WIDTH] * BLOCKS, *others)])
        self.last = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH))  # type: ignore[assignment]


@pytest.mark.parametrize("trains", [False, True])
def test_without_gradients_a_norm_belongs_to_the_layer_before(
    monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    pieces: list[list[str]] = []
    compile_one = compat.compile_with_aot_eager

    def seen(gm: Any, inputs: Any) -> Any:
        names = [getattr(node.target, "__name__", "") for node in gm.graph.nodes]
        pieces.append([name for name in names if name in ("rms_norm", "linear")])
        return compile_one(gm, inputs)

    monkeypatch.setattr(compat, "compile_with_aot_eager", seen)
    torch.manual_seed(0)
    model, x = NormedNet().double(), torch.randn(4, WIDTH, dtype=torch.float64)
    memeff_compile.reset()
    options = {"memeff.inner": "aot_eager", "memeff.regions": "on"}
    with torch.set_grad_enabled(trains):
        found = torch.compile(model, backend="memeff", options=options)(x)
        expected = model(x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    norm, linears = ["rms_norm"], ["linear"] * 3
    if trains:
        assert pieces == [["linear"], [*norm, *linears], [*norm, "linear"]]
    else:
        assert pieces == [["linear", *norm], [*linears, *norm], ["linear"]]
    assert records()["repeated_layers"] == f"{BLOCKS} layers of 1 kind, each kind compiled once"
    memeff_compile.reset()


@torch.no_grad()
def test_layers_in_one_partition_return_no_residual_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three layers differ from the others, and are compiled together with the rest."""
    returned: list[int] = []
    compile_one = compat.compile_with_aot_eager

    def seen(gm: Any, inputs: Any) -> Any:
        returned.append(len(gm.graph.output_node().args[0]))
        return compile_one(gm, inputs)

    monkeypatch.setattr(compat, "compile_with_aot_eager", seen)
    torch.manual_seed(0)
    model, x = NormedNet((8, 12, 20)).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    memeff_compile.reset()
    options = {"memeff.inner": "aot_eager", "memeff.regions": "on"}
    found = torch.compile(model, backend="memeff", options=options)(x)
    torch.testing.assert_close(found, model(x), rtol=1e-13, atol=1e-13)
    assert records()["repeated_layers"].startswith(f"{BLOCKS} layers of 1 kind")
    assert returned[-1] == 1, "the loss"
    memeff_compile.reset()


def test_names_and_weights_do_not_count() -> None:
    one = _key(lambda x, w: torch.tanh(x @ w), torch.ones(2, 2), torch.ones(2, 2))
    assert one == _key(
        lambda first, second: torch.tanh(first @ second), torch.zeros(2, 2), torch.zeros(2, 2)
    )


X = torch.ones(4, 4)
DIFFERENT: dict[str, tuple[Any, ...]] = {
    "another operation": (lambda x, y: torch.sin(x) + y, X, X.clone()),
    "another order of arguments": (lambda x, y: y + torch.tanh(x), X, X.clone()),
    "another constant": (lambda x, y: torch.tanh(x) + y * 1.0, X, X.clone()),
    "a dtype": (lambda x, y: torch.tanh(x) + y, X.double(), X.clone()),
    "a size": (lambda x, y: torch.tanh(x) + y, X[:1].clone(), X.clone()),
    "strides": (lambda x, y: torch.tanh(x) + y, X.clone().t(), X.clone()),
    "an offset": (lambda x, y: torch.tanh(x) + y, torch.ones(17)[1:].view(4, 4), X.clone()),
    "a gradient": (lambda x, y: torch.tanh(x) + y, X.clone().requires_grad_(), X.clone()),
    "a parameter": (lambda x, y: torch.tanh(x) + y, nn.Parameter(X, False), X.clone()),
    "one tensor twice": (lambda x, y: torch.tanh(x) + y, X, X),
    "a device": (lambda x, y: torch.tanh(x) + y, X.to("meta"), X.to("meta").clone()),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_all_that_a_compiler_reads_counts(what: str) -> None:
    base = _key(lambda x, y: torch.tanh(x) + y, X, X.clone())
    assert _key(*DIFFERENT[what]) != base


def test_constants_of_equal_value_and_other_type_differ() -> None:
    keys = {_key(lambda x: x * 1, X), _key(lambda x: x * True, X), _key(lambda x: x * 1.0, X)}
    assert len(keys) == 3
