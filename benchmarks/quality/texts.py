"""Texts to judge a model on that come with Python itself, its own continuations, and pass keys.

Rows are token ids, each of one length. A digest of the ids says whether two machines, whose Pythons
differ, read the same text.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

NAMED = ("prose", "source")
"""The language reference, and modules of the standard library."""
SMALLEST_MODULE = 20_000
CHARACTERS_A_TOKEN = 12
"""More than any text here has, so that enough of it is read."""
TOLD = " Remember this: the pass key is{key}. The pass key is{key}."
ASKED = "\n\nWhat is the pass key? The pass key is"
DIGITS = 5
SEED_OF_OWN = 48
"""Tokens of a text that the model continues."""


def text_of(name: str) -> str:
    """Return a text: one of `NAMED`, or a file as NAME=PATH."""
    label, _, path = name.partition("=")
    if path:
        return Path(path).read_text(encoding="utf-8")
    if label == "prose":
        return "\n\n".join(topics.topics[topic] for topic in sorted(topics.topics))
    if label == "source":
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        large = [file for file in files if file.stat().st_size >= SMALLEST_MODULE]
        return "\n\n".join(file.read_text(encoding="utf-8") for file in large)
    raise SystemExit(f"no text {name!r}: one of {', '.join(NAMED)}, own, or NAME=FILE is needed")


def rows_of(tokenizer: Any, name: str, length: int, count: int) -> Tensor:
    """Return at most `count` rows of a text, one after the other; each begins as texts do."""
    start = tokenizer("").input_ids
    text = text_of(name)[: CHARACTERS_A_TOKEN * length * count]
    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
    each = length - len(start)
    found = min(count, len(ids) // each)
    if not found:
        raise SystemExit(f"{name} has {len(ids)} tokens; {each} at least are needed")
    rows = ids[: found * each].view(found, each)
    return torch.cat([torch.tensor(start, dtype=torch.int64).expand(found, -1), rows], 1)


def ids_of(path: Path, model: str, length: int, count: int) -> tuple[Tensor, dict[str, str]]:
    """Return rows that data/continuations.py saved for a model, and how they were drawn."""
    from safetensors import safe_open

    if not path.is_file():
        raise SystemExit(f"{path} is not there; benchmarks/data/continuations.py writes such files")
    with safe_open(path, "pt") as file:
        facts, ids = file.metadata() or {}, file.get_tensor("ids")
    if facts.get("model") != model:
        raise SystemExit(f"{path} is of {facts.get('model')}, not of {model}: not its own words")
    if ids.shape[1] < length:
        raise SystemExit(f"{path} has rows of {ids.shape[1]} tokens; {length} are needed")
    drawn = ("sequences", "length", "dtype", "torch", "transformers", "gpu")
    return ids[:count, :length], {name: facts[name] for name in drawn if name in facts}


@torch.no_grad()
def own(
    model: Any,
    tokenizer: Any,
    length: int,
    count: int,
    begun: Tensor | None = None,  # (rows, tokens) to continue; by default first words of texts
) -> Tensor:
    """Return text that a model generates at temperature 1 after the beginning of texts."""
    if begun is None:
        each = (count + len(NAMED) - 1) // len(NAMED)
        few = [rows_of(tokenizer, name, min(SEED_OF_OWN, length // 2), each) for name in NAMED]
        begun = torch.cat(few)[:count]
    begun = begun.to(model.device)
    more = length - begun.shape[1]
    torch.manual_seed(0)
    found = model.generate(
        begun, attention_mask=torch.ones_like(begun), do_sample=True, temperature=1.0, top_k=0,
        top_p=1.0, repetition_penalty=1.0, min_new_tokens=more, max_new_tokens=more,
    )  # fmt: skip
    return found.cpu()


def pass_keys(tokenizer: Any, length: int, count: int) -> tuple[Tensor, int]:
    """Return rows of prose that hold a key and end with it, and how many tokens the answer has.

    A key lies in the first three quarters of its row, as far on as its number.
    """
    text = rows_of(tokenizer, "prose", length, count)
    draw = torch.Generator().manual_seed(1)
    asked = tokenizer(ASKED, add_special_tokens=False).input_ids
    found, answer = [], 0
    for number in range(count):
        digits = torch.randint(0, 10, (DIGITS,), generator=draw).tolist()
        key = " " + "".join(map(str, digits))
        told = tokenizer(TOLD.format(key=key), add_special_tokens=False).input_ids
        whole = tokenizer(ASKED + key, add_special_tokens=False).input_ids
        if whole[: len(asked)] != asked:
            raise SystemExit("this tokenizer joins the question to its answer: no pass keys")
        answer = len(whole) - len(asked)
        row = text[number % len(text)].tolist()
        at = 1 + int(0.75 * length * number / count)
        row = [*row[:at], *told, *row[at:]][: length - len(whole)] + whole
        found.append(row)
    if len({len(row) for row in found}) > 1 or answer >= len(whole):
        raise SystemExit("keys of this tokenizer differ in length")
    return torch.tensor(found), answer


def digest(ids: Tensor) -> str:
    """Return a digest of a set of rows."""
    return hashlib.sha256(ids.to(torch.int64).numpy().tobytes()).hexdigest()[:12]
