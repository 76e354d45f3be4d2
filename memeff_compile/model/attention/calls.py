"""Name the attention calls of a running model, and replace the result of one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from memeff_compile.kernels.quantized_attention import attend_under_mask
from memeff_compile.model.watch import Watch

EXACT = "exact"


@dataclass(frozen=True)
class Attended:
    """One attention call of a running model: its name, its arguments and its exact result."""

    site: str  # the path of the module, with `#1` for the second attention in one call of it
    number: int  # how many calls of this site came before in the same run
    result: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def at(self, level: str) -> Tensor | None:
        """Return the call's result at a precision level, or None if low-bit attention does not
        support the call.

        The level "exact" is PyTorch's attention in float32. In a 16-bit model, this result differs
        slightly from the model's own result, because the model rounds numbers to 16 bits.
        """
        query, key, value = self.query, self.key, self.value
        if level == EXACT:
            mask = self.attn_mask
            if mask is not None and mask.is_floating_point():
                mask = mask.float()
            return torch.nn.functional.scaled_dot_product_attention(
                query.float(),
                key.float(),
                value.float(),
                attn_mask=mask,
                is_causal=self.is_causal,
                scale=self.scale,
                enable_gqa=self.enable_gqa,
            )
        if self.dropout_p or query.dim() != 4 or query.shape[3] != value.shape[3]:
            return None
        return attend_under_mask(
            query,
            key,
            value,
            self.attn_mask,
            is_causal=self.is_causal,
            scale=self.scale,
            level=level,
        )


@contextmanager
def watched(model: nn.Module, seen: Callable[[Attended], Tensor | None]) -> Iterator[None]:
    """In this context, call `seen` for every attention call of a model; a tensor that `seen`
    returns replaces the result of the attention call."""
    paths, inside = [""], [0]  # of the modules that run, and how often each has called attention
    numbers: Counter[str] = Counter()

    def note(result: Tensor, *given: object, **named: object) -> Tensor | None:
        site = f"{paths[-1]}#{inside[-1]}" if inside[-1] else paths[-1]
        inside[-1] += 1
        number, numbers[site] = numbers[site], numbers[site] + 1
        return seen(Attended(site, number, result, *given, **named))  # type: ignore[arg-type]

    def enter(path: str, *_: object) -> None:
        paths.append(path)
        inside.append(0)

    def leave(*_: object) -> None:
        paths.pop()
        inside.pop()

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, path)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with Watch(note):
            yield
    finally:
        for handle in handles:
            handle.remove()
