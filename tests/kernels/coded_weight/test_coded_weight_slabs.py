"""Lists of coded weights packed together: the same values, few allocations, no shared elements."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from memeff_compile import compat
from memeff_compile.kernels.coded_weight import (
    CODECS,
    CodedWeight,
    Room,
    encode,
    side_by_side,
    slabs,
)
from memeff_compile.kernels.coded_weight.layout import LISTS, parse
from memeff_compile.model.weights.compress import compress_, compressed_weights
from memeff_compile.model.weights.optim_in_backward import optim_in_backward
from tests.support.hostile_weights import bits, hostile, normal


def coded(count: int, codec: str) -> list[CodedWeight]:
    values = [hostile(70 + n, 513, seed=n) for n in range(count)]
    return [CodedWeight(encode(value, codec), codec, value.shape) for value in values]


def lists(weight: CodedWeight) -> list[torch.Tensor]:
    names = parse(weight.codec).parts
    return [p for n, p in zip(names, weight.parts, strict=True) if n in LISTS]


def pieces(weights: list[CodedWeight]) -> int:
    return len({compat.storage_key(part) for weight in weights for part in lists(weight)})


@pytest.mark.parametrize("codec", CODECS)
def test_values_stay_and_memory_is_one_piece(codec: str) -> None:
    weights = coded(3, codec)
    before = [weight.decode() for weight in weights]
    lengths = [[part.numel() for part in lists(weight)] for weight in weights]
    side_by_side(weights, Room(0.1, 7))
    assert pieces(weights) == 1
    for weight, value, had in zip(weights, before, lengths, strict=True):
        assert torch.equal(bits(weight.decode()), bits(value))
        for part, length in zip(lists(weight), had, strict=True):
            assert part.numel() == length + max(-(-length // 10), 7)
            assert part.storage_offset() * part.element_size() % slabs.ALIGNED == 0
            assert part.is_contiguous()


@pytest.mark.parametrize("codec", CODECS)
def test_layers_alike_have_lists_of_one_length_where_that_is_near(codec: str) -> None:
    values = [normal(256, 256, seed=seed) for seed in range(4)]
    weights = [CodedWeight(encode(value, codec), codec, value.shape) for value in values]
    far = normal(256, 256, seed=5)
    far[:64] *= torch.logspace(-30, 0, 64)[:, None]
    weights.append(CodedWeight(encode(far, codec), codec, far.shape))
    needed = [[part.numel() for part in lists(weight)] for weight in weights]
    assert needed[0] != needed[1]
    side_by_side(weights, Room(0.01, 512))
    lengths = [[part.numel() for part in lists(weight)] for weight in weights]
    assert lengths[0] == lengths[1] == lengths[2] == lengths[3] != lengths[4]
    for several, lists_of_one in zip(needed, lengths, strict=True):
        for had, have in zip(several, lists_of_one, strict=True):
            own = Room(0.01, 512).length(had)
            assert own <= have <= slabs.EVEN.length(own)
    for weight, value in zip(weights, [*values, far], strict=True):
        assert torch.equal(weight.decode(), value)


def test_large_lists_get_more_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SLAB", 1)
    weights = coded(3, "tier")
    side_by_side(weights)
    assert pieces(weights) == 3


def test_a_new_value_of_one_weight_leaves_the_others() -> None:
    weights = coded(3, "tier")
    before = [weight.decode() for weight in weights]
    side_by_side(weights, Room(0.5, 4096))
    versions = [part._version for part in lists(weights[1])]
    value = hostile(70, 513, seed=9)
    weights[0].store(value)
    assert weights[0].times_anew == 0
    assert torch.equal(bits(weights[0].decode()), bits(value))
    for weight, kept in zip(weights[1:], before[1:], strict=True):
        assert torch.equal(bits(weight.decode()), bits(kept))
    assert [part._version for part in lists(weights[1])] == versions, "autograd sees no write"


def test_a_compressed_model_has_its_lists_in_one_piece_and_a_copy_its_own() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).bfloat16()
    compress_(model, "tier", min_size=0, progress=False)
    weights = list(compressed_weights(model).values())
    assert pieces(weights) == 1
    other = list(compressed_weights(copy.deepcopy(model)).values())
    assert not {compat.storage_key(p) for w in other for p in lists(w)} & {
        compat.storage_key(p) for w in weights for p in lists(w)
    }


def test_weights_that_outgrew_their_lists_are_put_side_by_side_again() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3))).bfloat16()
    compress_(model, min_size=0, progress=False)
    optimizer = optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=1e20))
    weights = list(compressed_weights(model).values())
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    model(x).float().sum().backward()
    assert pieces(weights) > 1
    values = [weight.decode() for weight in weights]
    optimizer.step()
    assert pieces(weights) == 1
    for weight, value in zip(weights, values, strict=True):
        assert torch.equal(bits(weight.decode()), bits(value))


def test_weights_that_outgrow_their_lists_one_by_one_are_compiled_again_a_few_times() -> None:
    """Dynamo, which knows the lengths, gives a model up that it had to compile eight times."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3))).bfloat16()
    compress_(model, min_size=0, progress=False)
    optimizer = optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=1e-3))
    weights = list(compressed_weights(model).values())
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count)
    for step in range(24):
        weight = weights[step % 3]
        value = weight.decode()
        value.view(-1)[: 600 * step] = 1e-30  # outside the window of exponents
        weight.store(value)
        optimizer.step()
        compiled(torch.ones(1, 256, dtype=torch.bfloat16)).float().sum().backward()
    assert sum(weight.times_anew for weight in weights) > 3
    assert len(graphs) < 7
