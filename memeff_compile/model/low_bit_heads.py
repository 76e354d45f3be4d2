"""Round queries, keys and values in a model's attention to few bits, for training or inference
(use_low_bit_heads_).

A model trained in this way adapts to a cache that stores keys and values in few bits
(`KVCache(scheme="per_head")`). The method is the one that table 3 of BitNet a4.8 evaluates.
`use_low_bit_heads_` needs transformers, and imports it when it is called.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memeff_compile import compat
from memeff_compile.errors import OptionError, UnsupportedInputError
from memeff_compile.kernels.coded_kv_cache import quantized_heads, require_bits
from memeff_compile.options import is_disabled, plain_path
from memeff_compile.report import VerbReport
from memeff_compile.system import Undone

_FULL = 16


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_off() -> bool:
    """Return whether an option of this package or of PyTorch forbids this package to change
    models."""
    return is_disabled() or compat.compiling_is_off()


@dataclass(frozen=True)
class _Heads:
    """An attention function of transformers that first quantises queries, keys and values."""

    inner: Any  # the function that attends
    query: int  # bits; 16: unchanged
    key_value: int  # likewise
    first: int  # number of keys and values from position 0, and their bits
    first_bits: int  # likewise
    before: str  # the name of `inner`

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: object,
        **kwargs: object,
    ) -> Any:  # noqa: ANN401 - what the attention of transformers returns
        if _is_off():
            return self.inner(module, query, key, value, *args, **kwargs)
        if self.query != _FULL:
            query = quantized_heads(query, self.query)
        if self.key_value != _FULL:
            key, value = (
                quantized_heads(x, self.key_value, first=self.first, first_bits=self.first_bits)
                for x in (key, value)
            )
        return self.inner(module, query, key, value, *args, **kwargs)


class Undo(VerbReport, AbstractContextManager["Undo"]):
    """An object that can undo the change that a function made to a model.

    To undo the change, call the object. If you use the object in a `with` statement, the end of the
    `with` block undoes the change."""

    def __init__(self, undo: Callable[[], None], verb: str, what: str) -> None:
        self.undo = undo
        self.verb, self.what = verb, what

    def __str__(self) -> str:
        return f"{self.verb}: {self.what}"

    def to_json(self, *, indent: int | None = None) -> str:
        """Return JSON with the name of the function that changed the model, and a summary of the
        change."""
        return json.dumps({"verb": self.verb, "summary": self.summary}, indent=indent)

    def __call__(self) -> None:
        """Undo the change."""
        self.undo()

    def __exit__(self, *exception: object) -> None:
        self.undo()


def use_low_bit_heads_(
    model: Any,  # noqa: ANN401 - a transformers model
    *,
    query: int = 16,
    key_value: int = 4,
    first: int = 0,
    first_bits: int = 4,
) -> Undo:
    """Make a model round the queries, keys and values of its attention to few bits.

    Gradients pass through the rounding unchanged. Rounding happens after the rotary embedding, with
    one scale per token and head. BitNet a4.8 uses three settings: `key_value=4`; `query=4,
    key_value=4`; and `query=4, key_value=3, first=1`.

    Args:
        model: a transformers model with an attention implementation other than "eager".
        query: the number of bits of queries: 16 (unchanged), 8, 4, 3 or 2.
        key_value: the number of bits of keys and values.
        first: the number of first tokens of a sequence whose keys and values have `first_bits`
            bits. First tokens are counted from position 0, so pad on the right.
        first_bits: the number of bits of the keys and values of these first tokens.

    Returns:
        An object that undoes the change: call it, or use it as a context manager.

    Raises:
        OptionError: The model's attention cannot be wrapped.
        UnsupportedInputError: A number of bits is not supported.

    Example:
        >>> undo = use_low_bit_heads_(model, query=4, key_value=3, first=1)  # doctest: +SKIP
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, bits in (("query", query), ("key_value", key_value), ("first_bits", first_bits)):
        if bits != _FULL or name == "first_bits":
            require_bits(name, bits)
    if not isinstance(first, int) or first < 0:
        raise UnsupportedInputError(f"first is {first!r}; a number of tokens is needed.")
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if before is None or before not in ALL_ATTENTION_FUNCTIONS:
        raise OptionError(
            f"The model's attention is {before!r}, which is not one that transformers finds by "
            "name. Choose one first: model.set_attn_implementation('sdpa')."
        )
    inner = ALL_ATTENTION_FUNCTIONS[before]
    if isinstance(inner, _Heads):
        raise OptionError("The model's heads are in few bits already. Undo that first.")
    name = f"memeff_{before}_q{query}_kv{key_value}_first{first}at{first_bits}"
    heads = _Heads(inner, query, key_value, first, first_bits, before)
    AttentionInterface.register(name, heads)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    model.set_attn_implementation(name)
    what = f"attention of {type(model).__name__} sees queries in {query} bits, keys and values in "
    what += f"{key_value}" + (f", the first {first} tokens in {first_bits}" if first else "")
    return Undo(partial(model.set_attn_implementation, before), "use_low_bit_heads_", what)


def heads_of(model: nn.Module) -> dict[str, int] | None:
    """Return the settings that `use_low_bit_heads_` put into a model's attention, or None."""
    transformers = sys.modules.get("transformers.modeling_utils")
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    heads = getattr(transformers, "ALL_ATTENTION_FUNCTIONS", {}).get(name, None)
    if not isinstance(heads, _Heads):
        return None
    return {key: getattr(heads, key) for key in ("query", "key_value", "first", "first_bits")}


def settings_of(low_bit_heads: int | Mapping[str, int]) -> dict[str, int]:
    """Return all settings of `use_low_bit_heads_`, given the number of bits of keys and values, or
    a mapping of some settings.
    """
    given = low_bit_heads
    given = {"key_value": given} if not isinstance(given, Mapping) else given
    defaults = {"query": 16, "key_value": 4, "first": 0, "first_bits": 4}
    if unknown := [key for key in given if key not in defaults]:
        raise OptionError(
            f"low_bit_heads has {unknown[0]!r}; known are {', '.join(defaults)}, as in "
            "use_low_bit_heads_."
        )
    return {**defaults, **given}


def full_heads_again(model: nn.Module) -> Undone:
    """Make attention use unrounded queries, keys and values again.

    `memeff_compile.undo` calls this function to undo `use_low_bit_heads_`.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found: dict[str, str] = {}
    for path, module in model.named_modules():
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        heads = ALL_ATTENTION_FUNCTIONS.get(name, None)
        if isinstance(heads, _Heads) and hasattr(module, "set_attn_implementation"):
            module.set_attn_implementation(heads.before)
            found[plain_path(path) or "(model)"] = f"attention {heads.before!r}, was {name!r}"
    return Undone("attention over heads in few bits taken out" if found else "", found)
