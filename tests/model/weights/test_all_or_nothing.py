"""Casts, steps and averages of a model with compressed weights: done whole, or not at all."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers.optimization import Adafactor

from memeff_compile.errors import CodedWeightError
from memeff_compile.kernels.coded_weight import CodedWeight
from memeff_compile.model.weights.compress import compress_, decompress_
from memeff_compile.model.weights.optim_in_backward import optim_in_backward

X = torch.arange(6).view(2, 3)


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(6, 128), nn.Linear(128, 256), nn.Linear(256, 128)).bfloat16()


def compressed() -> nn.Sequential:
    model = dense()
    report = compress_(model, min_size=0, progress=False)
    assert len(report.compressed) == 2
    return model


def trained(model: nn.Module) -> nn.Module:
    model(X).float().square().sum().backward()
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(left: nn.Module, right: nn.Module) -> None:
    a, b = left.state_dict(), right.state_dict()
    assert list(a) == list(b)
    for name, value in a.items():
        assert value.dtype == b[name].dtype, name
        assert torch.equal(value, b[name]), name


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "type": lambda m: m.type(torch.float32),
    "to": lambda m: m.to("cpu", torch.float16),
    "from above": lambda m: nn.ModuleDict({"first": nn.Linear(2, 2), "second": m}).half()["second"],
    "one part": lambda m: (m[1].float(), m)[1],  # type: ignore[index]
    "bfloat16": lambda m: m.bfloat16(),
    "there and back": lambda m: m.float().bfloat16(),
}


@pytest.mark.filterwarnings("ignore:a compressed weight of")
@pytest.mark.parametrize("case", CASTS)
@pytest.mark.parametrize("with_gradients", [False, True], ids=["", "gradients"])
def test_a_cast_model_is_the_dense_model_cast(case: str, with_gradients: bool) -> None:
    model, twin = compressed(), dense()
    if with_gradients:
        trained(model), trained(twin)
    parameters = list(model.parameters())
    assert_same(CASTS[case](model), CASTS[case](twin))
    after = list(model.parameters())
    assert all(a is b for a, b in zip(parameters, after, strict=True)), "an optimizer holds them"
    for mine, other in zip(after, twin.parameters(), strict=True):
        assert mine.requires_grad == other.requires_grad
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None and other.grad is not None:
            assert torch.equal(mine.grad, other.grad)


def test_a_cast_is_said_and_a_move_stays_compressed() -> None:
    with pytest.warns(UserWarning, match="became a dense one of torch.float16"):
        compressed().half()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = compressed().to("cpu").bfloat16()
    assert isinstance(model[1].weight, CodedWeight)


@pytest.mark.filterwarnings("ignore:a compressed weight of")
def test_a_weight_that_others_hold_is_replaced_where_a_model_is_cast() -> None:
    """Compiled code and kept losses hold parameters, which cannot change their kind then."""
    model = compressed()
    kept = model(X)
    held = model[1].weight
    assert_same(model.half(), dense().half())
    assert isinstance(held, CodedWeight)
    assert kept.grad_fn is not None


def test_emptied_and_shared_models_are_whole() -> None:
    model = compressed()
    shared = model.share_memory()
    assert all(parameter.is_shared() for parameter in shared.parameters())
    assert_same(shared, dense())
    shapes = [tuple(p.shape) for p in compressed().to_empty(device="cpu").parameters()]
    assert shapes == [tuple(p.shape) for p in dense().parameters()]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{
        f"{name} {settings}": lambda p, name=name, settings=settings: getattr(torch.optim, name)(
            p, lr=0.1, **settings
        )
        for name in ("SGD", "AdamW", "Adagrad", "RMSprop", "Adam", "NAdam", "Adamax", "Adafactor")
        for settings in ({}, {"foreach": False})
    },
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "Adafactor of transformers": lambda p: Adafactor(p, lr=0.1, relative_step=False),
    "own groups": lambda p: torch.optim.SGD([{"params": [each]} for each in p], lr=0.1),
}


@pytest.mark.parametrize("is_early", [False, True], ids=["made after", "made before"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_refused_before_it_changes_anything(name: str, is_early: bool) -> None:
    model = dense()
    early = OPTIMIZERS[name](list(model.parameters()))
    compress_(model, min_size=0, progress=False)
    optimizer = early if is_early else OPTIMIZERS[name](list(model.parameters()))
    trained(model)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CodedWeightError, match="optim_in_backward"):
        optimizer.step()
    assert_same(model, dense())
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    decompress_(model)
    early.step() if is_early else None  # the obstacle is gone


def test_a_step_with_a_closure_is_refused_before_the_closure() -> None:
    model = compressed()
    optimizer = torch.optim.LBFGS(model.parameters())
    calls: list[int] = []
    with pytest.raises(CodedWeightError, match="optim_in_backward"):
        optimizer.step(lambda: calls.append(1) or 0.0)
    assert not calls
    assert_same(model, dense())


def test_an_optimizer_of_what_is_not_compressed_or_has_no_gradient_steps() -> None:
    model = compressed()
    for module in (model[1], model[2]):
        module.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model)
    optimizer.step()
    assert not torch.equal(model[0].weight, dense()[0].weight)


@pytest.mark.parametrize("make", [AveragedModel, None], ids=["swa", "ema"])
def test_averages_of_weights_are_those_of_dense_ones(make: Any) -> None:
    averages = []
    for model in (compressed(), dense()):
        rule = {} if make else {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
        average = AveragedModel(model, **rule)
        for factor in (1.0, 2.0, 3.0):
            other = {name: value * factor for name, value in dense().state_dict().items()}
            model.load_state_dict(other)
            average.update_parameters(model)
        averages.append(average)
    assert_same(*averages)
    assert isinstance(averages[0].module[1].weight, CodedWeight)


COLLECTIVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "broadcast": lambda coded, plain: dist.broadcast(coded, 0),
    "all_reduce": lambda coded, plain: dist.all_reduce(coded),
    "reduce": lambda coded, plain: dist.reduce(coded, 0),
    "scatter": lambda coded, plain: dist.scatter(coded, [plain]),
}


def test_collectives_read_a_weight_and_do_not_write_to_it(tmp_path: Path) -> None:
    """Where the result of one would be lost, it raises."""
    weight, plain = compressed()[1].weight.detach(), torch.zeros(256, 128, dtype=torch.bfloat16)
    store = f"file://{tmp_path / 'group'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        for collective in COLLECTIVES.values():
            with pytest.raises(CodedWeightError, match="memeff_compile"):
                collective(weight, plain)
        dist.all_gather([plain], weight)
        dist.all_gather([weight], plain.mul(2))  # a whole value
    finally:
        dist.destroy_process_group()
    assert torch.equal(plain, dense()[1].weight)
    assert torch.equal(weight.decode(), plain * 2)


def test_clipping_and_vectors_of_parameters_are_those_of_dense_ones() -> None:
    found = []
    for model in (compressed(), dense()):
        trained(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 2, model.parameters())
        found.append((norm, vector, *(p.grad for p in model.parameters())))
        twice = dense()
        for parameter in twice.parameters():
            parameter.data.mul_(2)
        assert_same(model, twice)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:a compressed weight of")
def test_a_model_that_is_cast_while_it_trains_in_the_backward_trains_on() -> None:
    results = []
    for model in (compressed(), dense()):
        optimizer = optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=0.01, momentum=0.9))
        trained(model)
        optimizer.step()
        model.float()
        optimizer.train()
        trained(model)
        optimizer.step()
        results.append(state(model))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
