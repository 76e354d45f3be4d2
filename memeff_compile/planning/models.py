"""Build the model whose memory is predicted, from a Hugging Face config or by a user's function."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import ExplainError, first_line


class Call(NamedTuple):
    """A model and the arguments of its call."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def build(
    source: str,  # a config.json, a folder with one, or "module:function"
    *,
    batch: int,  # of the inputs
    length: int,  # likewise
    dtype: str,  # of the parameters of a model built from a config, such as "bfloat16"
    checkpointing: bool,  # whether to switch gradient checkpointing on
    attention: str | None = None,  # transformers' attn_implementation, or its default
) -> Call:
    """Build a model and its inputs on the device "meta".

    Raise ExplainError if the model cannot be built.
    """
    if batch < 1 or length < 1:
        raise ExplainError(f"batch is {batch} and length {length}; both have to be at least 1.")
    with torch.device("meta"):
        ids = torch.zeros(batch, length, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids}
    path = Path(source)
    if path.exists() or ":" not in source:
        model = _from_config(path, _dtype(dtype), attention)
        call = Call(model, (), inputs)
    else:
        call = _from_function(source, inputs)
    if isinstance(call.model, nn.Module):
        call.model.train()
        if checkpointing:
            checkpoint(call.model)
    return call


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ExplainError(f"dtype is {name!r}; it can be bfloat16, float16 or float32.")
    return found


def _from_config(path: Path, dtype: torch.dtype, attention: str | None) -> nn.Module:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ExplainError(
            f"There is no config at {file}. Give a config.json, a folder that has one, or "
            "module:function. Names on a model hub are not looked up."
        )
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ExplainError(
            "A Hugging Face config needs transformers, which is not installed: pip install "
            "transformers. module:function needs nothing more."
        ) from error
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ExplainError(
            f"{file} is not valid JSON: {first_line(error)}. Give the config.json of a model."
        ) from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ExplainError(
            f"{file} has no model_type, so the class of the model is not known. Give the "
            'config.json of a transformers model; it has an entry such as "model_type": "llama".'
        )
    try:
        config = transformers.AutoConfig.for_model(**values)
    except Exception as error:
        raise ExplainError(
            f"{file} is no config that transformers {transformers.__version__} knows: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    config.use_cache = False
    kind = next(iter(values.get("architectures") or ()), "")
    maker = getattr(transformers, kind, None)
    make = transformers.AutoModelForCausalLM.from_config if maker is None else maker._from_config
    settings = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            model: nn.Module = make(config, dtype=dtype, **settings)
    except Exception as error:
        raise ExplainError(
            f"{kind or config.model_type} cannot be built on device 'meta': "
            f"{type(error).__name__}: {first_line(error)}\n"
            "Build it in a function of yours and give module:function."
        ) from error
    return model


def _from_function(source: str, inputs: dict[str, Any]) -> Call:
    module_name, _, name = source.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ExplainError(f"{module_name!r} cannot be imported: {first_line(error)}") from error
    finally:
        sys.path.pop(0)
    make = getattr(module, name, None)
    if not callable(make):
        raise ExplainError(f"{module_name!r} has no function {name!r}.")
    try:
        with torch.device("meta"):
            made = make()
    except Exception as error:
        raise ExplainError(
            f"{source} cannot be built on device 'meta': {type(error).__name__}: "
            f"{first_line(error)}\nA model that reads its weights while it is built needs a "
            "torch.device('cpu') around that part."
        ) from error
    if not isinstance(made, tuple):
        return Call(made, (), inputs)
    if len(made) == 2 and isinstance(made[1], Mapping):
        return Call(made[0], (), dict(made[1]))
    if len(made) == 2 and isinstance(made[1], tuple):
        return Call(made[0], made[1], {})
    raise ExplainError(
        f"{source} returned a tuple of {len(made)}; it may return a model, which is called with "
        "input_ids and labels, or (model, inputs) with inputs as a dict or a tuple."
    )


def checkpoint(model: nn.Module) -> None:
    """Turn gradient checkpointing on; raise ExplainError if the model has no switch for it."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ExplainError(
            f"{type(model).__name__} has no gradient_checkpointing_enable; leave --checkpointing "
            "out and use torch.utils.checkpoint in the model."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
