"""A model that answers the items of a task under a mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

import memeff_compile
from benchmarks import timing
from benchmarks.quality import tasks, texts
from benchmarks.quality.modes import CALIBRATED, Mode
from benchmarks.quality.subject import Lowered, Subject

PIECE = 64
"""Tokens after the prompt that go through a cache at a time."""
CALIBRATION = (448, 4)
"""Length and number of texts that levels of attention are chosen on."""


def levels_of(subject: Subject, mode: Mode, length: int, count: int) -> str | list[str]:
    """Return a mode's level of attention, or that of each call, chosen on texts of "source"."""
    if mode.share is None and mode.level != CALIBRATED:
        return mode.level or "exact"
    ids = texts.rows_of(subject.tokenizer, "source", length, count)
    inputs = [{"input_ids": row[None].to(subject.device)} for row in ids]
    given: dict[str, Any] = {"levels": ("8b",)} if mode.share is None else {"share": mode.share}
    found = memeff_compile.calibrate_attention(subject.model.base_model, inputs, **given)
    return [str(each) for each in found["levels"].values()]


def device_time(call: Callable[[], Any]) -> float:
    """Return the milliseconds of a call: of its kernels on a GPU, else of the host."""
    if not torch.cuda.is_available():
        return timing.waited(call)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return float(sum(each.self_device_time_total for each in seen.key_averages())) / 1e3


class Answering:
    """A model that answers items under a mode.

    Args:
        subject: the model.
        mode: how.
        coded: whether weights stay as codes, as they would in use.
    """

    def __init__(self, subject: Subject, mode: Mode, coded: bool = False) -> None:
        self.subject, self.mode = subject, mode
        self.facts: dict[str, Any] = {}
        self.model: Any = None
        self.levels: str | list[str] = ""
        if mode.mantissa is not None:
            self.model, self.facts = subject.with_weights(mode.mantissa, coded)
        elif mode.compiled:
            self.model = subject.compiled(mode.level)
        elif mode.level is not None:
            self.levels = levels_of(subject, mode, *CALIBRATION)
            if not isinstance(self.levels, str):
                self.facts["levels"] = {each: self.levels.count(each) for each in set(self.levels)}

    def around(self) -> AbstractContextManager[Any]:
        """Return the context of one forward pass of several tokens."""
        if self.mode.level is None or self.mode.compiled:
            return nullcontext()
        return Lowered(self.levels, judged=False).forward()

    def cache(self, length: int) -> Any:
        """Return an empty cache, or None where the mode has no own."""
        if self.mode.cache is None:
            return None
        return memeff_compile.KVCache(self.subject.model.config, length, **self.mode.cache)

    def last(self, ids: Tensor, first: int) -> Tensor:
        """Return the last states of tokens (B, N)."""
        cache = self.cache(ids.shape[1])
        pieces = None if cache is None else (first, PIECE)
        around = self.around()
        found = self.subject.states(ids, self.model, cache, pieces, around, layers=False).last
        if cache is not None:
            self.facts["cache_bytes_a_token"] = round(cache.nbytes / ids.numel(), 1)
        return found

    def row(self, items: tasks.Rows, kind: str, batch: int) -> dict[str, Any]:
        """Return which items are right, and what they are."""
        right = self.judge(items, kind, batch)
        found = {"items": len(right), "right": sum(right), "digest": tasks.digest(items)}
        answers = "".join(str(int(each)) for each in right)
        return {**found, "answers": answers, "length": items.ids.shape[1], **self.facts}

    @torch.no_grad()
    def judge(self, items: tasks.Rows, kind: str, batch: int) -> list[bool]:
        """Return which items are right."""
        if kind == "code":
            return self._code(items, batch)
        found: list[Tensor] = []
        most = max(items.answers)
        first = items.first // PIECE * PIECE
        for part in torch.arange(len(items.ids)).split(batch):
            ids = items.ids[part].to(self.subject.device)
            last = self.last(ids, first)[:, -most - 1 : -1]
            log_p = self.subject.logits(last.flatten(0, 1)).log_softmax(-1)
            log_p = log_p.view(len(ids), most, -1)
            wanted = ids[:, -most:]
            own = torch.tensor([items.answers[each] for each in part], device=ids.device)
            is_answer = torch.arange(most, device=ids.device) >= most - own[:, None]
            if kind == "exact":
                same = log_p.argmax(-1) == wanted
                found.append((same | ~is_answer).all(1).float().cpu())
            else:
                of_each = log_p.gather(-1, wanted[..., None])[..., 0] * is_answer
                found.append(of_each.sum(1).cpu())
        scores = torch.cat(found)
        if kind == "exact":
            return [bool(each) for each in scores]
        scores = (scores / torch.tensor(items.characters)).view(-1, items.each)
        return [bool(each) for each in scores.argmax(1) == 0]

    def _code(self, items: tasks.Rows, batch: int) -> list[bool]:
        """Let the model write greedily, and judge each text."""
        right: list[bool] = []
        for ids in items.ids.to(self.subject.device).split(batch):
            for row in self.written(ids, tasks.WRITTEN):
                text = str(self.subject.tokenizer.decode(row))
                right.append(tasks.parses(items.questions[len(right)], text))
        return right

    def written(self, ids: Tensor, count: int) -> Tensor:
        """Return tokens (B, count) that the model writes greedily after prompts (B, N)."""
        cache, last = self._read(ids, count)
        found = [self._next(last)]
        while len(found) < count:
            found.append(self._next(self._step(found[-1], cache)))
        return torch.cat(found, 1)

    @torch.no_grad()
    def times(self, ids: Tensor, count: int) -> dict[str, Any]:
        """Return milliseconds of reading prompts, and of each of `count` tokens after them.

        On a GPU they are the time of kernels, which a host that is late does not change.
        """
        self._read(ids, count)
        cache, last = self._read(ids, count)
        token = self._next(last)
        self._step(token, cache)

        def steps() -> None:
            for _ in range(count - 1):
                self._step(token, cache)

        sized = getattr(cache, "nbytes", None)
        if sized is None:
            sized = sum(x.nbytes for each in cache.layers for x in (each.keys, each.values))
        return {
            "prompt_ms": round(device_time(lambda: self._read(ids, count)), 3),
            "token_ms": round(device_time(steps) / (count - 1), 4),
            "cache_mib": round(sized / 2**20, 2),
            **self.facts,
        }

    def _read(self, ids: Tensor, more: int) -> tuple[Any, Tensor]:
        from transformers import DynamicCache

        cache = self.cache(ids.shape[1] + more)
        cache = DynamicCache() if cache is None else cache
        with self.around():
            out = self._body()(input_ids=ids, past_key_values=cache)
        return cache, out.last_hidden_state[:, -1]

    def _step(self, token: Tensor, cache: Any) -> Tensor:
        last: Tensor = self._body()(input_ids=token, past_key_values=cache).last_hidden_state
        return last[:, -1]

    def _next(self, last: Tensor) -> Tensor:
        return self.subject.logits(last).argmax(-1, keepdim=True)

    def _body(self) -> Any:
        return (self.model or self.subject.model).base_model
