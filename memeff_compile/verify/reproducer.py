"""Write a Python program that reproduces a difference between the original and the rewritten graph.

The option `memeff.verify` found this difference. The program has the source of both graphs, and the
inputs for which their results differ."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..logits.recipe import DeferredOutput
from ..options import Options
from ..report import format_bytes
from .op_by_op import KeptGraph
from .tolerance import Gap, slack_of


class Compared(Protocol):
    """The parts of a comparison that a reproducer needs: the original and the rewritten graph, and
    where to write files."""

    original: KeptGraph
    rewritten: KeptGraph
    plan: tuple[DeferredOutput, ...]
    options: Options


def write(compared: Compared, mismatches: Sequence[Gap], graph: str, args: Sequence[Any]) -> str:
    """Write `repro.py` and `inputs.pt` for a mismatch; return a text with the path and the size
    of these files.
    """
    try:
        parent, name = compared.options.verify_folder, re.sub(r"\W+", "_", graph)
        if parent is not None:
            Path(parent).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"memeff_verify_{name}_", dir=parent))
        inputs = _Inputs.choose(compared, args)
        torch.save({"tensors": inputs.saved, "constants": inputs.constants}, folder / "inputs.pt")
        (folder / "repro.py").write_text(_program(compared, mismatches, graph, inputs))
        size = sum(file.stat().st_size for file in folder.iterdir())
    except Exception as error:  # a full disk must not hide the mismatch
        return f"No reproducer was written: {type(error).__name__}: {error}."
    drawn = f"; {len(inputs.drawn)} of its inputs are drawn anew" if inputs.drawn else ""
    return f"Reproducer: {folder / 'repro.py'} ({format_bytes(size)}{drawn})."


@dataclass
class _Inputs:
    """The graph's arguments that the reproducer saves, and descriptions of its other arguments."""

    saved: dict[int, Tensor]
    drawn: dict[int, tuple[Any, ...]]
    plain: dict[int, Any]
    constants: dict[str, Tensor]
    asks_gradient: list[bool]

    @classmethod
    def choose(cls, compared: Compared, args: Sequence[Any]) -> _Inputs:
        """Choose which of the graph's arguments are saved for the reproducer, smallest first.

        The reproducer is a program that runs the original and the rewritten graph, and shows a
        difference in their results. The option `memeff.verify.limit` limits the saved bytes. The
        constant tensors of the two graphs are always saved and count towards this limit."""
        left = compared.options.verify_limit
        inputs = cls({}, {}, {}, {}, [isinstance(a, Tensor) and a.requires_grad for a in args])
        tensors = [(i, a.detach()) for i, a in enumerate(args) if isinstance(a, Tensor)]
        inputs.plain = {i: a for i, a in enumerate(args) if not isinstance(a, Tensor)}
        for graph in (compared.original, compared.rewritten):
            for name, held in _constants(graph.module):
                inputs.constants[name] = held.detach().cpu()
                left -= held.nbytes
        for place, tensor in sorted(tensors, key=lambda pair: pair[1].numel()):
            if tensor.nbytes <= left:
                left -= tensor.nbytes
                inputs.saved[place] = tensor.cpu().clone()
            else:
                inputs.drawn[place] = _description(tensor)
        return inputs


def _constants(module: GraphModule) -> Iterator[tuple[str, Tensor]]:
    """Yield the constant tensors of a graph, with their names."""
    for node in module.graph.nodes:
        held = getattr(module, str(node.target), None)
        if node.op == "get_attr" and isinstance(held, Tensor):
            yield str(node.target), held


def _description(tensor: Tensor) -> tuple[Any, ...]:
    """Return a tensor's shape and dtype, and two numbers that describe its values.

    The numbers are the range of integers, or the mean and standard deviation of floating-point
    numbers."""
    if tensor.is_floating_point():
        spread = tensor.double().std().item() if tensor.numel() > 1 else 1.0
        return tuple(tensor.shape), tensor.dtype, tensor.double().mean().item(), spread
    if tensor.numel() == 0 or tensor.is_complex():
        return tuple(tensor.shape), tensor.dtype, 0, 1
    return tuple(tensor.shape), tensor.dtype, int(tensor.min()), int(tensor.max())


def _program(compared: Compared, mismatches: Sequence[Gap], graph: str, inputs: _Inputs) -> str:
    imports: dict[str, str] = {}
    original = _source("Original", compared.original.module, imports)
    rewritten = _source("Rewritten", compared.rewritten.module, imports)
    found = "\n".join(f"  - {gap}" for gap in mismatches[:20])
    drawn = "\n".join(f"  - {compared.original.names[place]}" for place in sorted(inputs.drawn))
    kinds = {t.device.type for t in inputs.saved.values()}
    kinds |= {"cuda"} if torch.cuda.is_available() else set()
    is_on, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    return _PROGRAM.format(
        graph=graph,
        torch=torch.__version__,
        found=found.replace("\\", "\\\\").replace('"""', "'''"),
        drawn=drawn or "  - none",
        imports="\n".join(imports.values()),
        original=original,
        rewritten=rewritten,
        names=list(compared.original.names),
        count=len(inputs.asks_gradient),
        asks=inputs.asks_gradient,
        described=inputs.drawn,
        plain=inputs.plain,
        plan=_adjustable(repr(list(compared.plan))),
        autocast=[(kind, dtype(kind)) for kind in sorted(kinds) if is_on(kind)],
        limit=slack_of(compared.original.dtypes, coarse_products=False).relative,
    )


def _source(name: str, module: GraphModule, imports: dict[str, str]) -> str:
    """Return a graph as source code of a class, with another class for each nested graph."""
    parts, made = [], []
    for child, body in module.named_children():
        if isinstance(body, GraphModule):
            kind = f"{name}_{child}"
            parts.append(_source(kind, body, imports))
            # Higher-order operations other than checkpoints need a graph.
            held = [n for n in module.graph.nodes if n.op == "get_attr" and n.target == child]
            users = [str(user.target) for node in held for user in node.users]
            is_checkpointed = all("tag_activation_checkpoint" in user for user in users)
            made_as = f"{kind}()" if is_checkpointed else f"traced({kind}())"
            made.append(f"self.{child} = {made_as}")
    made += [f"self.{held} = constant({held!r})" for held, _ in _constants(module)]
    code = module.graph.python_code("self")
    for word, value in code.globals.items():
        imports.setdefault(word, _import(word, value))
    lines = _adjustable(code.src).strip("\n").splitlines()
    forward = "\n".join(f"    {line}" if line.strip() else "" for line in lines)
    init = "\n        ".join(["def __init__(self):", "super().__init__()", *made])
    init = init.replace("def __init__", "    def __init__", 1)
    parts.append(f"class {name}(torch.nn.Module):\n{init}\n\n{forward}\n")
    return "\n\n".join(parts)


_ADJUSTMENTS = (
    (r"torch\.ops\.higher_order\.tag_activation_checkpoint\(", "_checkpoint("),
    (r"torch\.amp\.autocast_mode\._(enter|exit)_autocast\(", r"_\1_autocast("),
    (r"\.float\(\)", ".to(_float32)"),
    (r"\.half\(\)", ".to(_float16)"),
    (r"\.bfloat16\(\)", ".to(_bfloat16)"),
    (r"torch\.(float16|bfloat16|float32|complex64)\b", r"_\1"),
)


def _adjustable(source: str) -> str:
    """Replace dtypes in the source by names that the reproducer can set to wider dtypes."""
    for pattern, spelling in _ADJUSTMENTS:
        source = re.sub(pattern, spelling, source)
    return source


def _import(word: str, value: Any) -> str:
    if value is None or value is type(None):
        return f"{word} = {'None' if value is None else 'type(None)'}"
    if isinstance(value, float):
        return f"{word} = float({str(value)!r})"
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if type(value).__name__ == "module":
        top = value.__name__
        return f"import {top}" if top == word else f"import {top} as {word}"
    if isinstance(module, str) and path and "<" not in path:
        first, _, rest = path.partition(".")
        line = f"from {module} import {first} as {word}"
        return f"{line}\n{word} = {word}.{rest}" if rest else line
    return f"# {word} is {value!r}, which has no importable name"


_PROGRAM = '''\
"""{graph}: a graph as memeff_compile rewrote it computes something else than the graph as it came.

Written by memeff.verify with torch {torch}. `python repro.py` runs both graphs op by op, first in
their own arithmetic and then in float64, and prints how far outputs and gradients are apart. It
exits with 1 if one differs by more than LIMIT of its norm, or in float64 by more than 1e-9 of it.
What differed when this was written:
{found}
Inputs that were too large to save, drawn here with the same mean and spread:
{drawn}
"""

import contextlib
import sys
from pathlib import Path

import torch
from torch.fx import symbolic_trace as traced
from torch.utils.checkpoint import checkpoint

import memeff_compile.backend  # registers the ops
from memeff_compile.logits.recipe import (
    DeferredOutput,
    GivenSize,
    LogitsRecipe,
    LogitsView,
    LossSettings,
)
{imports}

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FILE = torch.load(Path(__file__).with_name("inputs.pt"), map_location=DEVICE)
NAMES = {names}
ASKS_GRADIENT = {asks}
DRAWN = {described}  # place: shape, dtype, then lowest and highest, or mean and spread
PLAIN = {plain}
AUTOCAST = {autocast}
LIMIT = {limit}


def set_arithmetic(wide):
    """Choose what the graphs below mean by their dtypes."""
    global WIDE, _float16, _bfloat16, _float32, _complex64
    WIDE = wide
    _float16 = torch.float64 if wide else torch.float16
    _bfloat16 = torch.float64 if wide else torch.bfloat16
    _float32 = torch.float64 if wide else torch.float32
    _complex64 = torch.complex128 if wide else torch.complex64


def deferred():
    """Outputs of Rewritten that carry hidden states in the place of logits."""
    return {plan}


def constant(name):
    value = FILE["constants"][name]
    return value.double() if WIDE and value.is_floating_point() else value


def _checkpoint(body, *args, **_):
    return checkpoint(body, *args, use_reentrant=False)


def _enter_autocast(*args):
    return None if WIDE else torch.amp.autocast_mode._enter_autocast(*args)


def _exit_autocast(region):
    return None if WIDE else torch.amp.autocast_mode._exit_autocast(region)


{original}

{rewritten}


def inputs():
    generator = torch.Generator().manual_seed(0)
    for place in range({count}):
        if place in PLAIN:
            value = PLAIN[place]
        elif place in FILE["tensors"]:
            value = FILE["tensors"][place].clone()
        else:
            shape, dtype, low, high = DRAWN[place]
            if dtype.is_floating_point:
                value = torch.randn(shape, generator=generator) * high + low
            else:
                value = torch.randint(low, high + 1, shape, generator=generator)
            value = value.to(DEVICE, dtype)
        if WIDE and isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.double()
        yield value.requires_grad_() if ASKS_GRADIENT[place] else value


def run(kind, plan=()):
    torch.manual_seed(0)
    given = list(inputs())
    leaves = [v for v, asks in zip(given, ASKS_GRADIENT) if asks]
    with contextlib.ExitStack() as stack:
        for device, dtype in () if WIDE else AUTOCAST:
            stack.enter_context(torch.autocast(device, dtype))
        outputs = list(kind()(*[v * 1 if a else v for v, a in zip(given, ASKS_GRADIENT)]))
    for entry in plan:
        vectors = [given[place] for place in entry.vectors]
        bias = None if entry.bias is None else given[entry.bias]
        hidden, weight = outputs[entry.output], given[entry.weight]
        entry.put(entry.recipe.logits(hidden, weight, bias, vectors), outputs)
    results = {{}}
    for place, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor):
            continue
        results[f"output {{place}}"] = output.detach()
        if output.requires_grad and leaves:
            found = torch.autograd.grad(output.sum(), leaves, retain_graph=True, allow_unused=True)
            names = [n for n, asks in zip(NAMES, ASKS_GRADIENT) if asks]
            for name, gradient in zip(names, found):
                results[f"gradient of {{name}} through output {{place}}"] = gradient
    return results


def is_off(limit):
    """Run both graphs, print how far they are apart, and return whether that is too far."""
    expected, found = run(Original), run(Rewritten, deferred())
    worst = 0.0
    for name, value in expected.items():
        ours = found.get(name)
        if value is None and ours is None:
            continue
        if value is None or ours is None:
            print(f"  {{name}}: missing on one side")
            continue
        apart = float((ours.double() - value.double()).norm())
        apart = apart / max(float(value.double().norm()), 1e-30) if apart else 0.0
        worst = max(worst, apart) if apart == apart else float("inf")
        print(f"  {{name}}: {{apart:.1e}}{{'  <---' if not apart <= limit else ''}}")
    return worst > limit


def main():
    results = []
    for wide, where, limit in ((False, "as run", LIMIT), (True, "in float64", 1e-9)):
        set_arithmetic(wide)
        print(where)
        results.append(is_off(limit))
    return int(any(results))


if __name__ == "__main__":
    sys.exit(main())
'''
