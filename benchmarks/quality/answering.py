"""A model that answers the items of a task under a mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

import memeff_compile
from benchmarks import timing
from benchmarks.methods import registered
from benchmarks.quality import tasks, texts
from benchmarks.quality.modes import CALIBRATED, Mode
from benchmarks.quality.subject import Lowered, Subject
from memeff_compile.errors import UnsupportedInputError

PIECE = 64
"""Tokens after the prompt that go through a cache at a time."""
CALIBRATION = (448, 4)
"""Length and number of texts that levels of attention are chosen on."""
MOST = 2**31
"""Bytes of keys and values of texts that are kept for the next mode or question."""
Pairs = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer."""


class Prompts:
    """Keys and values of texts that a model has read, so that it reads each only once."""

    def __init__(self) -> None:
        self.known: dict[str, Pairs] = {}

    def of(self, ids: Tensor, read: Callable[[Tensor], Pairs]) -> Pairs:
        """Return those of tokens (B, N); `read` makes them."""
        key = texts.digest(ids.cpu())
        if key not in self.known:
            self.known[key] = read(ids)
            while len(self.known) > 1 and self.nbytes > MOST:
                del self.known[next(iter(self.known))]
        return self.known[key]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all that is kept."""
        return sum(x.nbytes for pairs in self.known.values() for pair in pairs for x in pair)


def calibration_of(subject: Subject, mode: Mode, length: int, count: int) -> dict[str, Any]:
    """Return the table of levels that a mode's calibration on texts of "source" makes."""
    ids = texts.rows_of(subject.tokenizer, "source", length, count)
    inputs = [{"input_ids": row[None].to(subject.device)} for row in ids]
    given: dict[str, Any] = {"levels": ("8b",)}
    if mode.share is not None:

        def run(body: Any, given: dict[str, Any]) -> dict[str, Tensor]:
            return {"logits": subject.logits(body(**given).last_hidden_state[0])}

        given = {"share": mode.share, "run": run}
    return memeff_compile.calibrate_attention(subject.model.base_model, inputs, **given)


def levels_of(subject: Subject, mode: Mode, length: int, count: int) -> str | list[str]:
    """Return a mode's level of attention, or that of each call, chosen on texts of "source"."""
    if mode.share is None and mode.level != CALIBRATED:
        return mode.level or "exact"
    found = calibration_of(subject, mode, length, count)
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


REWRITES = ("quantize_attention", "compress_kv_cache", "rewrite_kv_update", "recover_attention")


def _sites() -> dict[str, int]:
    report = memeff_compile.last_report()
    return {name: report.rewrites(name) for name in REWRITES}


class Answering:
    """A model that answers items under a mode.

    Args:
        subject: the model.
        mode: how.
        coded: whether weights stay as codes, as they would in use.
        exact: texts that the exact model has read, for other modes.
    """

    def __init__(
        self, subject: Subject, mode: Mode, coded: bool = False, exact: Prompts | None = None
    ) -> None:
        self.subject, self.mode = subject, mode
        self.exact = Prompts() if exact is None else exact
        self.facts: dict[str, Any] = {}
        self.model: Any = None
        self.levels: str | list[str] = ""
        self.own = Prompts()
        self.filled: tuple[Any, Any] = (None, None)
        if mode.mantissa is not None:
            self.model, self.facts = subject.with_weights(mode.mantissa, coded)
        elif mode.compiled:
            self.model = subject.compiled(mode.level)
        elif mode.level is not None:
            self.levels = levels_of(subject, mode, *CALIBRATION)
            if not isinstance(self.levels, str):
                self.facts["levels"] = {each: self.levels.count(each) for each in set(self.levels)}

    @property
    def prompts(self) -> Prompts:
        """Keys and values of texts: those of the exact model, or of the mode's own."""
        is_exact = self.model is None and self.mode.level is None
        return self.exact if is_exact else self.own

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

    def last(self, ids: Tensor, first: int, at: Tensor, is_shared: bool) -> Tensor:
        """Return the last states (B, M, D) of the tokens `at` (B, M) of rows (B, N).

        The first tokens come before any question. If rows have them in common, or go into a cache,
        they are read apart from the others.
        """
        given: dict[str, Any] = {"around": self.around(), "layers": False}
        is_read = self.mode.cache is not None or self.mode.in_pieces or is_shared
        if self.mode.compiled or not is_read:
            found = self.subject.states(ids, self.model, **given).last
        else:
            cache = self._after(ids[:, :first], ids.shape[1], is_shared)
            given |= {"cache": cache, "pieces": (PIECE, PIECE)}
            found = self.subject.states(ids[:, first:], self.model, **given).last
            at = (at - first).clamp(min=0)  # before, there are only tokens that are not judged
            if self.mode.cache is not None:
                self.facts["cache_bytes_a_token"] = round(cache.nbytes / ids.numel(), 1)
        return found.gather(1, at[..., None].expand(-1, -1, found.shape[2]))

    def _after(self, ids: Tensor, length: int, is_shared: bool) -> Any:
        """Return a cache that holds tokens (B, N); the mode's own, else one of transformers."""
        from transformers import DynamicCache

        one = ids[:1] if is_shared and bool((ids == ids[:1]).all()) else ids
        key = texts.digest(one.cpu()), len(ids), length
        if key == self.filled[0]:
            return copy.deepcopy(self.filled[1])
        cache = self.cache(length)
        cache = DynamicCache() if cache is None else cache
        for layer, pair in enumerate(self.prompts.of(one, self._keys_and_values)):
            cache.update(*(x.expand(len(ids), -1, -1, -1) for x in pair), layer)
        if is_shared:
            self.filled = key, copy.deepcopy(cache)
        return cache

    def _keys_and_values(self, ids: Tensor) -> Pairs:
        """Return those of tokens that attend exactly, or as the mode of attention says."""
        from transformers import DynamicCache

        cache = DynamicCache()
        with self.around():
            self._body()(input_ids=ids, past_key_values=cache)
        return [(layer.keys, layer.values) for layer in cache.layers]

    def row(self, items: tasks.Rows, kind: str, batch: int) -> dict[str, Any]:
        """Return which items are right, and what they are."""
        right, margins = self.judge(items, kind, batch)
        self.own, self.filled = Prompts(), (None, None)
        found = {"items": len(right), "right": sum(right), "digest": tasks.digest(items)}
        found["answers"] = "".join(str(int(each)) for each in right)
        if self.mode.is_exact and margins:
            found["margins"] = [float(f"{each:.3g}") for each in margins]
        found["questions"] = max(1, items.group // items.each)
        return {**found, "length": items.ids.shape[1], **self.facts}

    @torch.no_grad()
    def judge(self, items: tasks.Rows, kind: str, batch: int) -> tuple[list[bool], list[float]]:
        """Return which items are right, and by how much: nothing about code.

        An exact item's margin is the smallest difference, over the tokens of the answer, between
        the log-probability of the right token and the largest of all others. That of a choice is
        the same difference between answers.
        """
        if kind == "code":
            return self._code(items, batch), []
        margins: list[Tensor] = []
        most = max(items.answers)
        first = items.first if items.group > 1 else items.first // PIECE * PIECE
        for part in torch.arange(len(items.ids)).split(batch):
            ids = items.ids[part].to(self.subject.device)
            ends = torch.tensor(items.ends, device=ids.device)[part]
            at = ends[:, None] - most - 1 + torch.arange(most, device=ids.device)
            last = self.last(ids, first, at, items.group > 1)
            log_p = self.subject.logits(last.flatten(0, 1)).log_softmax(-1)
            log_p = log_p.view(len(ids), most, -1)
            wanted = ids.gather(1, at + 1)[..., None]
            own = torch.tensor(items.answers, device=ids.device)[part]
            is_other = torch.arange(most, device=ids.device) < most - own[:, None]
            of_each = log_p.gather(-1, wanted)[..., 0]
            if kind == "exact":
                of_each -= log_p.scatter(-1, wanted, -torch.inf).amax(-1)
                margins.append(of_each.masked_fill(is_other, torch.inf).amin(1).cpu())
            else:
                margins.append(of_each.masked_fill(is_other, 0.0).sum(1).cpu())
        found = torch.cat(margins)
        if kind == "exact":
            return (found > 0).tolist(), found.tolist()
        scores = (found / torch.tensor(items.characters)).view(-1, items.each)
        found = scores[:, 0] - scores[:, 1:].amax(1)
        return (found >= 0).tolist(), found.tolist()

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
    def times(
        self, ids: Tensor, count: int, inner: str, alone: AbstractContextManager[Any]
    ) -> dict[str, Any]:
        """Return milliseconds of reading prompts, and of each of `count` tokens after them.

        The model is compiled, `inner` by this compiler. On a GPU the times are those of kernels,
        which a host that is late does not change.

        Args:
            ids: prompts (B, N).
            count: tokens after them.
            inner: the compiler of the rest of the graph.
            alone: entered once everything is compiled.
        """
        body = self._compiled(inner)
        self._read(ids, count, body)
        sites = _sites()
        cache, last = self._read(ids, count, body)
        token = self._next(last)
        self._step(token, cache, body)
        sites = {name: max(each, sites[name]) for name, each in _sites().items()}

        def steps() -> None:
            for _ in range(count - 1):
                self._step(token, cache, body)

        sized = getattr(cache, "nbytes", None)
        if sized is None:
            sized = sum(x.nbytes for each in cache.layers for x in (each.keys, each.values))
        with alone:
            prompt = device_time(lambda: self._read(ids, count, body))
            token_ms = device_time(steps) / (count - 1)
        return {
            "compiled": inner,
            "prompt_ms": round(prompt, 3),
            "token_ms": round(token_ms, 4),
            "cache_mib": round(sized / 2**20, 2),
            "rewrites": sites,
            **self.facts,
        }

    def _compiled(self, inner: str) -> Any:
        """Return the compiled model, whose attention has the mode's level."""
        if not isinstance(self.levels, str):
            raise UnsupportedInputError("levels that calls choose have no compiled time here")
        registered()
        options: dict[str, Any] = {"memeff.inner": inner, "memeff.cuda_graphs": "off"}
        if self.mode.level is not None:
            options |= {"memeff.attention": self.levels, "memeff.attention.length": 0}
        torch.compiler.reset()
        memeff_compile.reset()
        return torch.compile(self._body(), backend="memeff", options=options, dynamic=False)

    def _read(self, ids: Tensor, more: int, compiled: Any = None) -> tuple[Any, Tensor]:
        from transformers import DynamicCache, StaticCache

        length = ids.shape[1] + more
        cache = self.cache(length)
        if compiled is not None:
            if cache is None:
                config = self.subject.model.config
                cache = StaticCache(config=config, max_cache_len=length)
            out = compiled(input_ids=ids, past_key_values=cache)
            return cache, out.last_hidden_state[:, -1]
        cache = DynamicCache() if cache is None else cache
        with self.around():
            out = self._body()(input_ids=ids, past_key_values=cache)
        return cache, out.last_hidden_state[:, -1]

    def _step(self, token: Tensor, cache: Any, compiled: Any = None) -> Tensor:
        body = self._body() if compiled is None else compiled
        last: Tensor = body(input_ids=token, past_key_values=cache).last_hidden_state
        return last[:, -1]

    def _next(self, last: Tensor) -> Tensor:
        return self.subject.logits(last).argmax(-1, keepdim=True)

    def _body(self) -> Any:
        return (self.model or self.subject.model).base_model
