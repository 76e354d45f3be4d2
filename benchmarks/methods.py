"""The only module that calls each method, as a loss on tensors and as a backend.

The benchmarks name filters, filter levels, parts and sorting; only this module has the op's names
for them. A knob that the op does not have makes a method unavailable, with a reason.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden (N, D), weight (V, D), target (N,)) -> mean loss of the targets that count."""


class Unavailable(Exception):
    """The method cannot run here; the text says why."""


# ------------------------------------------------------------------ whole models

PASS = "fuse_linear_cross_entropy"
MODEL_METHODS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "eager": (None, {}),
    "inductor": ("inductor", {}),
    "exact": ("memeff", {"memeff.linear_cross_entropy": "exact", "memeff.strict": PASS}),
    "mass": ("memeff", {"memeff.linear_cross_entropy": "mass", "memeff.strict": PASS}),
    "block": ("memeff", {"memeff.linear_cross_entropy": "block", "memeff.strict": PASS}),
}


def compile_model(model: Any, method: str, options: dict[str, str], inner: str) -> None:
    """Compile a model in place for a method.

    Args:
        method: a key of `MODEL_METHODS`.
        options: further options of the backend `memeff`.
        inner: the final compiler of the graph: "inductor", or "aot_eager" and "eager" where there
            is no compiler.
    """
    backend, settings = MODEL_METHODS[method]
    if backend is None:
        return
    if backend == "memeff":
        registered()
        model.compile(backend="memeff", options={**settings, **options, "memeff.inner": inner})
        return
    model.compile(backend=inner)


def registered() -> None:
    """Have torch know the backend in a checkout that is not installed, too."""
    if "memeff" not in torch._dynamo.list_backends():
        from memeff_compile.backend import memeff

        torch._dynamo.register_backend(memeff, name="memeff")


def rewrites(method: str) -> int | None:
    """Return how many losses the backend has fused in this process; None for other backends."""
    if MODEL_METHODS.get(method, (None,))[0] != "memeff":
        return None
    from memeff_compile import last_report

    return last_report().rewrites(PASS)


# ------------------------------------------------------------------ the loss on tensors


def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The usual two lines."""
    return F.cross_entropy(F.linear(hidden, weight).float(), target, ignore_index=IGNORED)


def inductor() -> Loss:
    """Return the usual two lines, compiled."""
    return torch.compile(eager, dynamic=False)


def compiled() -> Loss:
    """Return the usual two lines, compiled by the backend `memeff`."""
    registered()
    return torch.compile(eager, dynamic=False, backend="memeff")


def recorded(backend: str) -> Loss:
    """Return the usual two lines, compiled and recorded by Inductor as CUDA graphs.

    The host then launches one graph for each pass, and small calls wait for no host.
    """
    registered()
    return torch.compile(eager, dynamic=False, backend=backend, options={"triton.cudagraphs": True})


def auto_chunked() -> Loss:
    """Return the usual two lines, compiled with the chunks that Inductor chooses by itself."""
    return torch.compile(eager, dynamic=False, options={"auto_chunker.enable": True})


def row_chunks(count: int = 8) -> Loss:
    """Return the loss by chunks of rows whose softmax is compiled, as torchtune has it."""

    def summed(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), target, ignore_index=IGNORED, reduction="sum")

    of_chunk = torch.compile(summed, dynamic=False)

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        chunks = zip(hidden.chunk(count), target.chunk(count), strict=True)
        total = torch.stack([of_chunk(F.linear(h, weight), t) for h, t in chunks]).sum()
        return total / (target != IGNORED).sum()

    return loss


def torch_chunks(rows: int = 0) -> Loss:
    """Return torch's own op in chunks of its own, or of `rows` rows."""
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"torch {torch.__version__} has no LinearCrossEntropyOptions")
    options = torch.nn.LinearCrossEntropyOptions(**({"batch_chunk_size": rows} if rows else {}))

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        found: Tensor = F.linear_cross_entropy(
            hidden, weight, target, ignore_index=IGNORED, options=options
        )
        return found

    return loss


def quack(rows: int) -> Loss:
    """Return QuACK's loss in chunks of rows, which computes the gradients in the forward."""
    _import("quack")
    from quack.linear_cross_entropy import chunked_linear_cross_entropy as theirs

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        found: Tensor = theirs(
            hidden, weight, target, chunk_size=rows, ignore_index=IGNORED, tuned=False
        )
        return found

    return loss


def memeff(**knobs: Any) -> Loss:
    """Return the op as a mean loss.

    Args:
        gradient_filter: "exact", "mass", "block" or "published".
        filter_level: eps of "block" or tau of "mass"; 0 for automatic.
        filter_parts: gradients that are filtered: "both", "hidden" or "weight".
        sort_vocabulary: whether columns are ordered by the blocks of rows that they count in.
        workspace: bytes, 0 for automatic.
        gradients: "forward" for the op that makes them there.

    Raises:
        Unavailable: If the installed op lacks a knob that is asked for.
    """
    if knobs.pop("gradients", "") == "forward":
        return _total(**knobs)
    from memeff_compile.errors import UnsupportedInputError
    from memeff_compile.kernels import linear_cross_entropy as folder

    settings = {"ignore_index": IGNORED, "scale": 1.0, "softcap": 0.0, "workspace": 0, **knobs}
    known = {a.name: a for a in folder.linear_cross_entropy._schema.arguments if a.kwarg_only}
    missing = sorted(set(settings) - set(known))
    if missing:
        raise Unavailable(f"the op has no {', '.join(missing)}")
    for name, argument in known.items():
        if name not in settings and not argument.has_default_value():
            settings[name] = _neutral(argument)

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        nll = folder.linear_cross_entropy(hidden, weight, None, target, None, **settings)[0]
        return nll.sum() / (target != IGNORED).sum()

    probe = torch.ones(2, 8), torch.ones(4, 8), torch.zeros(2, dtype=torch.int64)
    try:
        loss(*probe)
    except UnsupportedInputError as problem:
        raise Unavailable(str(problem)) from problem
    return loss


def _total(**knobs: Any) -> Loss:
    from memeff_compile.kernels import linear_cross_entropy as folder

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        found: tuple[Tensor, ...] = folder.linear_cross_entropy_total(
            hidden,
            weight,
            None,
            target,
            None,
            (target != IGNORED).sum(),
            ignore_index=IGNORED,
            scale=1.0,
            softcap=0.0,
            output_mask=[hidden.requires_grad, weight.requires_grad, False],
            **{"workspace": 0, **knobs},
        )
        return found[0]

    return loss


def inspect(hidden: Tensor, weight: Tensor, target: Tensor) -> dict[str, Any]:
    """Return the op's filter decisions on these tensors, as plain numbers.

    Raises:
        Unavailable: If the package has no such inspection.
    """
    name = "benchmarks.ops.filter_activity"
    measure = None
    if importlib.util.find_spec(name) is not None:
        measure = getattr(importlib.import_module(name), "measure", None)
    if measure is None:
        raise Unavailable("the op has no filters to inspect")
    tensors = (hidden.detach(), weight.detach(), target)
    if "gradient_filter" not in signature(measure).parameters:
        return {"any": _plain(measure(*tensors))}
    return {f: _plain(measure(*tensors, gradient_filter=f)) for f in ("mass", "block")}


def _plain(found: Any) -> Any:
    """Return tensors as numbers, or as mean and maximum; records as dicts."""
    if isinstance(found, Tensor):
        if found.numel() == 1:
            return found.item()
        wide = found.double()
        return {"mean": float(wide.mean()), "max": float(wide.max())}
    if hasattr(found, "_asdict"):
        return _plain(found._asdict())
    if dataclasses.is_dataclass(found):
        return {f.name: _plain(getattr(found, f.name)) for f in dataclasses.fields(found)}
    if isinstance(found, dict):
        return {str(name): _plain(value) for name, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_plain(value) for value in found]
    return found


def _neutral(argument: Any) -> Any:
    """Return the value of an op's argument that requests no special feature."""
    values = {"bool": False, "float": 0.0, "int": 0}
    kind = str(argument.type)
    if argument.name == "gradient_filter":
        return "exact"
    if argument.name == "filter_parts":
        return "both"
    if kind not in values:
        raise Unavailable(
            f"the op asks for {argument.name} ({kind}), which this file does not know"
        )
    return values[kind]


def _import(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Unavailable(f"{package} is not installed")
    if not torch.cuda.is_available():
        raise Unavailable(f"{package} needs a GPU")


def apple(filter_eps: str | None) -> Loss:
    """Return Apple's cut_cross_entropy, with its filter ("auto") or without (None)."""
    _import("cut_cross_entropy")
    from cut_cross_entropy import linear_cross_entropy as theirs

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return theirs(
            hidden, weight, target, impl="cce", filter_eps=filter_eps, ignore_index=IGNORED
        )

    return loss


def liger() -> Loss:
    """Return Liger's fused linear cross entropy, which computes the gradients in the forward."""
    _import("liger_kernel")
    from liger_kernel.transformers.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyLoss,
    )

    theirs = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return theirs(weight, hidden, target)

    return loss


def liger_cute() -> Loss:
    """Return Liger's loss in CuTe DSL for compute capability 9.0, which keeps the logits."""
    _import("liger_kernel")
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        liger_fused_linear_cross_entropy_sm90 as theirs,
    )

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        found: Tensor = theirs(hidden, weight, target, IGNORED)
        return found

    return loss


def liger_cute_rows() -> Loss:
    """Return Liger's loss per row in CuTe DSL, whose backward pass computes the logits again."""
    _import("liger_kernel")
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
        LigerFusedScaledCrossEntropySM90Function,
    )

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        found = LigerFusedScaledCrossEntropySM90Function.apply(hidden, weight, target)
        return (found[0] if isinstance(found, tuple) else found).mean()

    return loss


# ------------------------------------------------------------------ log-probabilities and entropies


Tokens = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(hidden (N, D), weight (V, D), target (N,)) -> log-probability and entropy of every row."""


def memeff_tokens(workspace: int = 0) -> Tokens:
    """Return the op, asked for both."""
    from memeff_compile.kernels import linear_cross_entropy as folder

    def tokens(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        found = folder.linear_cross_entropy(
            hidden,
            weight,
            None,
            target,
            None,
            ignore_index=None,
            scale=1.0,
            softcap=0.0,
            with_lse=False,
            with_logit_sum=False,
            gradient_filter="exact",
            workspace=workspace,
            with_entropy=True,
        )
        return -found[0], found[3]

    return tokens


def dense_tokens(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The usual four lines."""
    every = F.linear(hidden, weight).float().log_softmax(-1)
    log_prob = every.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return log_prob, -(every.exp() * every).sum(-1)


def chunked_tokens(
    hidden: Tensor, weight: Tensor, target: Tensor, sequences: int = 4, chunk: int = 128
) -> tuple[Tensor, Tensor]:
    """As TRL's loops have it: 16-bit logits, sequence by sequence, entropies by chunks of rows."""
    logits = F.linear(hidden, weight)
    rows = zip(logits.chunk(sequences), target.chunk(sequences), strict=True)
    log_probs = [z.log_softmax(-1).gather(-1, t.unsqueeze(-1)).squeeze(-1) for z, t in rows]
    entropies = []
    for part in logits.split(chunk):
        every = part.log_softmax(-1)
        entropies.append(-(every.exp() * every).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def trl_kernel() -> Tokens:
    """Return TRL's kernel over logits that are kept."""
    _import("trl")
    from trl.kernels import selective_log_softmax_and_entropy as theirs

    def tokens(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, entropy = theirs(F.linear(hidden, weight)[None], target[None])
        return log_prob[0], entropy[0]

    return tokens


def trl_head() -> Tokens:
    """Return TRL's fused head, `model(..., fused_lm_head=True)`, in its own pieces."""
    _import("trl")
    from trl.kernels import ChunkedLogProbFunction as Theirs

    def tokens(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        found = Theirs.apply(hidden, weight, None, target, 1.0, 32768, None, 1.0, ("entropy",))
        return found[0], found[1]

    return tokens


TOKEN_METHODS: dict[str, Callable[[], Tokens]] = {
    "memeff": memeff_tokens,
    "memeff workspace=112MiB": partial(memeff_tokens, 112 * 2**20),
    "inductor": lambda: torch.compile(dense_tokens, dynamic=False),
    "trl head": trl_head,
    "trl kernel": trl_kernel,
    "trl loops": lambda: chunked_tokens,
}


def token_loss(name: str, shares: tuple[Tensor, Tensor]) -> Loss:
    """Return a sum of the losses and the entropies of all rows, each times its share.

    Raises:
        Unavailable: If the method cannot run here.
    """
    tokens = TOKEN_METHODS[name]()

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        log_prob, entropy = tokens(hidden, weight, target)
        return (entropy * shares[1]).sum() - (log_prob * shares[0]).sum()

    return loss


# ------------------------------------------------------------------ by name


UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Method:
    """A way to compute the loss and its gradients.

    Attributes:
        name: its name in rows and figures.
        build: returns the loss, or raises `Unavailable` with the reason.
        budget: largest relative gradient error (Frobenius) with which it may be timed; None for a
            filter without such a bound.
        loss_budget: the same for the loss.
    """

    name: str
    build: Callable[[], Loss]
    budget: float | None
    loss_budget: float

    def why_not(self) -> str | None:
        """Say why the method cannot run here, or return None if it can."""
        try:
            self.build()
        except (Unavailable, ImportError) as problem:
            return str(problem) or type(problem).__name__
        return None


ROUNDED = (3e-2, 1e-2)
"""Budgets of methods that round their logits to 16 bits before `exp`."""

EXACT_LOSS = 1e-4

_FILTERS: dict[str, float | None] = {"exact": 4e-3, "mass": 4e-2, "block": None, "published": None}

_FIXED = {
    name: Method(name, build, *ROUNDED)
    for name, build in (
        ("eager", lambda: eager),
        ("inductor", inductor),
        ("apple", partial(apple, "auto")),
        ("apple no filter", partial(apple, None)),
        ("liger", liger),
        ("liger cute", liger_cute),
        ("liger cute rows", liger_cute_rows),
        ("inductor auto-chunker", auto_chunked),
        ("memeff compiled", compiled),
        ("inductor graphs", partial(recorded, "inductor")),
        ("memeff graphs", partial(recorded, "memeff")),
        ("8 chunks", row_chunks),
        ("torch chunks", torch_chunks),
        ("torch chunks of 2048", partial(torch_chunks, 2048)),
        ("quack 1024", partial(quack, 1024)),
        ("quack 4096", partial(quack, 4096)),
    )
}

NAMES = (*_FIXED, *(f"memeff {name}" for name in _FILTERS))

PARTS = ("both", "hidden", "weight")


def method(spec: str) -> Method:
    """Return the method that a string names.

    Args:
        spec: a name of `NAMES`; "memeff" methods take further words: parts=both|hidden|weight,
            level=<number>, sort=0|1 (1 with a filter), workspace=<bytes, or 64MiB>,
            gradients=forward.

    Example: method("memeff block sort=0").name == "memeff block sort=0".
    """
    if spec in _FIXED:
        return _FIXED[spec]
    words = spec.split()
    if words[:1] != ["memeff"] or len(words) < 2 or words[1] not in _FILTERS:
        raise ValueError(f"method is {spec!r}; the methods are {', '.join(NAMES)}")
    knobs: dict[str, Any] = {"gradient_filter": words[1]}
    if words[1] != "exact":
        knobs["sort_vocabulary"] = True  # as the backend and `memeff_compile.functional` have it
    knobs |= dict(_knob(word) for word in words[2:])
    return Method(spec, partial(memeff, **knobs), _FILTERS[words[1]], EXACT_LOSS)


def _knob(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    if name == "parts" and value in PARTS:
        return "filter_parts", value
    if name == "gradients" and value == "forward":
        return name, value
    if name == "level":
        return "filter_level", float(value)
    if name == "sort" and value in ("0", "1"):
        return "sort_vocabulary", value == "1"
    if name == "workspace":
        return "workspace", _bytes(value)
    raise ValueError(
        f"knob is {word!r}; the knobs are parts={'|'.join(PARTS)}, level=<number>, sort=0|1 and "
        "workspace=<bytes, or a size such as 64MiB>"
    )


def _bytes(text: str) -> int:
    if text == "auto":
        return 0
    unit = next((u for u in UNITS if text.endswith(u)), "")
    return int(float(text.removesuffix(unit)) * UNITS.get(unit, 1))
