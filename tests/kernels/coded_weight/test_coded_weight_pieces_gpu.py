"""Several weights in one launch, on a GPU: the bits of each alone."""

from __future__ import annotations

import pytest
import torch

from memeff_compile import compress_, optim_in_backward
from memeff_compile.kernels.coded_weight import CodedWeight, codecs, encode, parse, pieces
from memeff_compile.model.weights.compress import compressed_weights
from tests.support.hostile_weights import bits, hostile, normal

pytestmark = pytest.mark.gpu

WIN4 = parse("win4")
SIZES = [(896, 896), (128, 896), (128, 896), (896, 896), (4864, 896), (4864, 896), (896, 4864)]


@pytest.mark.parametrize("size", [(70, 513), *SIZES[1:2], *SIZES[4:]])
def test_a_weight_in_one_piece_is_decoded(size: tuple[int, int]) -> None:
    for weight in (normal(*size).cuda(), hostile(*size).cuda()):
        held = pieces.joined(encode(weight, "win4"), weight.numel())
        for _ in range(2):  # compiled, and looked up
            assert torch.equal(bits(pieces.decode(held, size)), bits(weight))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_several_weights_are_moved_as_each_alone(decay: float) -> None:
    weights = [normal(*size, seed=n).cuda() for n, size in enumerate(SIZES)]
    weights[2].zero_()  # its list has no room
    by = codecs.Step(1e-2, decay)
    room = codecs.Room(0.5, 1 << 14)
    held = []
    for place, weight in enumerate(weights):
        parts = encode(weight, "win4", codecs.EXACT_FIT if place == 2 else room)
        held.append(pieces.joined(parts, weight.numel()))
    counts = [weight.numel() for weight in weights]
    refuge = torch.zeros(pieces.sheltered_together(counts), dtype=torch.int16).pin_memory()
    for step in range(2):
        gradients = [hostile(*size, seed=9 * step + n).cuda() for n, size in enumerate(SIZES)]
        expected = [torch.nn.Parameter(weight.clone()) for weight in weights]
        for one, gradient in zip(expected, gradients, strict=True):
            one.grad = gradient.clone()
            torch.optim.SGD([one], lr=by.rate, weight_decay=by.decay, foreach=False).step()
        moved = pieces.move(held, gradients, by)
        misfits = dict(pieces.list_patches(held, gradients, moved, refuge).misfits())
        assert list(misfits) == ([2] if step == 0 else [])  # it is encoded again, with room
        found = [*map(pieces.decode, held, SIZES)]  # a weight that did not fit is not valid
        for place, (one, gradient) in enumerate(zip(expected, gradients, strict=True)):
            value = bits(one.detach())
            kept = ~one.detach().isnan()
            assert torch.equal(bits(gradient)[kept], value[kept])
            if place in misfits:
                assert torch.equal(misfits[place].view(value.shape), bits(gradient).cpu())
                parts = encode(gradient, "win4", codecs.EXACT_FIT)
                held[place] = pieces.joined(parts, gradient.numel())
            else:
                assert torch.equal(bits(found[place]), bits(gradient))
            weights[place] = gradient


def test_gradients_that_come_together_are_used_together() -> None:
    def trained(*, together: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(256, 256, bias=False) for _ in range(5))
        model = torch.nn.Sequential(*layers).bfloat16().cuda()
        if together:
            compress_(model, min_size=0, progress=False)
        optimizer = optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=0.1))
        weights = list(compressed_weights(model).values())
        x = torch.linspace(-2, 2, 16 * 256, device="cuda").view(16, 256).bfloat16()
        for _ in range(6):
            loss = model(x).float().square().mean()
            optimizer._queue.announce(weights)
            loss.backward()
            assert all(weight.unsettled is None for weight in weights)
            optimizer.step()
        return [p.decode() if isinstance(p, CodedWeight) else p for p in model.parameters()]

    for one, other in zip(trained(together=True), trained(together=False), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=0, atol=0)


def test_who_reads_on_another_stream_waits_for_the_gradients() -> None:
    layers = (torch.nn.Linear(256, 256, bias=False) for _ in range(2))
    model = torch.nn.Sequential(*layers).bfloat16().cuda()
    compress_(model, min_size=0, progress=False)
    optimizer = optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=2.0))
    first, second = compressed_weights(model).values()
    for _ in range(2):  # compiled, and looked up
        before = first.decode()
        optimizer._queue.announce([first, second])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            first.grad = torch.ones(256, 256, device="cuda").bfloat16()
            next(u for u in optimizer._updates if u.parameter is first).run(None)
        assert torch.equal(first.decode(), before - 2)
