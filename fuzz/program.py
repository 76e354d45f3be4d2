"""Lines of source that run in one of two worlds, and print as a program of their own."""

from __future__ import annotations

import copy
import io
import linecache
import math
import pickle
import re
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memeff_compile
from memeff_compile.backend import memeff

__all__ = ["Fault", "Program", "World", "leaves", "run", "shaker", "start"]

Names = dict[str, Any]

_IMPORTS = (
    "import copy, io, math, pickle, torch, memeff_compile, torch.nn.functional as F"
    "; from torch import nn; from memeff_compile.backend import memeff\n"
)

_NAMES: Names = {
    "copy": copy,
    "io": io,
    "math": math,
    "pickle": pickle,
    "torch": torch,
    "nn": nn,
    "F": F,
    "memeff_compile": memeff_compile,
    "memeff": memeff,
}

_FILE = "<program>"


@dataclass(frozen=True)
class Program:
    """What is made once, such as a model and its compiled form, and what is then done with it."""

    setup: tuple[str, ...]
    body: tuple[str, ...]
    imports: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """All lines, without the imports."""
        return self.setup + self.body

    @property
    def precision(self) -> torch.dtype:
        """The narrowest dtype that the program computes in."""
        text = "\n".join(self.lines)
        if any(word in text for word in ("half", "float16", "bfloat16", "autocast")):
            return torch.bfloat16
        # Norms, positions and softmaxes of transformers are in float32, whatever the model is in.
        text += self.imports.replace("transformers", "float32")
        return torch.float32 if "float()" in text or "float32" in text else torch.float64

    def widened(self) -> Program:
        """The same program in float64, as far as its text says in what it computes."""

        def wide(line: str) -> str:
            for narrow in ("bfloat16", "float16", "float32"):
                line = line.replace(f"torch.{narrow}", "torch.float64")
            line = line.replace(".float()", ".double()").replace(".half()", ".double()")
            return line.replace("autocast('cpu'", "autocast('cpu', enabled=False")

        setup, body = (tuple(map(wide, lines)) for lines in (self.setup, self.body))
        return Program(setup, body, self.imports)

    def with_writes_counted(self) -> Program:
        """The same program, where autograd notices the writes that `.data` and copies of a tensor's
        Python object hide from it.
        """
        body = tuple(re.sub(r"\.data\b", ".detach()", line) for line in self.body)
        body = tuple(re.sub(r"\bcopy\.copy\((\w+)\)", r"\1[...]", line) for line in body)
        return Program(self.setup, body, self.imports)

    def with_shakes(self) -> Program:
        """The same program, where whatever gets a name is given to `shake` at once."""
        body: list[str] = []
        for line in self.body:
            named = re.match(r"(\w+|\([\w, ]+\)) = ", line)
            body += [line, f"shake({named[1]})"] if named else [line]
        return Program(self.setup, tuple(body), self.imports)

    def without_us(self) -> Program:
        """The same program under the inner compiler alone, if nothing else in it is ours."""
        text = "\n".join(self.lines)
        named = re.findall(r"from memeff_compile\S* import (\w+)", self.imports)
        if any(word in text for word in ("memeff_compile", "if ours:", *named)):
            return self

        def alone(line: str) -> str:
            return re.sub(
                r"backend=memeff, options={'memeff.inner': ('\w+')[^}]*}", r"backend=\1", line
            )

        return Program(tuple(map(alone, self.setup)), tuple(map(alone, self.body)), self.imports)

    def text(self, heading: str = "") -> str:
        """Print it as a program that needs nothing of this harness."""
        lines = ["seen = []; torch.manual_seed(0)", *self.lines, "return seen"]
        body = "\n".join(f"    {part}" for line in lines for part in line.split("\n"))
        title = f"# {heading}\n" if heading else ""
        imports = _IMPORTS + (f"{self.imports}\n" if self.imports else "")
        return f"{title}{imports}def program(ours):\n{body}\nprint(program(False), program(True))\n"


@dataclass(frozen=True)
class Fault:
    """An exception that a program raised."""

    error: BaseException
    line: int

    def __str__(self) -> str:
        # What Dynamo raises names the backend; its cause is the failure.
        error = getattr(self.error, "inner_exception", None) or self.error
        first = str(error).strip().split("\n")[0][:300]
        return f"{type(error).__name__}: {first}"


@dataclass
class World:
    """Names as they are after the setup, and code that restores them for the next body."""

    names: Names
    fault: Fault | None
    without_us: World | None = None  # made when it is asked for

    def __post_init__(self) -> None:
        model = self.names.get("m")
        parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
        self._saved = [(p, p.detach().clone(), p.requires_grad) for p in parameters]
        self._generator = torch.get_rng_state()

    def enter(self) -> Names:
        """Return names for one body, with the model as the setup left it."""
        for parameter, values, requires_grad in self._saved:
            parameter.requires_grad_(requires_grad).grad = None
            with torch.no_grad():
                parameter.copy_(values)
            if parameter._backward_hooks:
                parameter._backward_hooks.clear()
        torch.set_rng_state(self._generator)
        return {**self.names, "seen": []}


WIDE = (torch.float64, torch.float32)


def shaker(seed: int, dtypes: Sequence[torch.dtype] = WIDE) -> Callable[[Any], None]:
    """Return what changes the last bits of tensors, as another order of sums may."""
    generator = torch.Generator().manual_seed(seed)

    def shake(value: Any) -> None:
        for leaf in leaves(value):
            if isinstance(leaf, Tensor) and leaf.dtype in dtypes:
                noise = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype, device="cpu")
                with suppress(RuntimeError):  # entries that share their memory
                    leaf.data.mul_(1 + noise.to(leaf.device) * torch.finfo(leaf.dtype).eps)

    return shake


def leaves(value: Any) -> list[Any]:
    """Flatten lists and tuples."""
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def start(program: Program, *, ours: bool) -> World:
    """Run the setup in one world."""
    names = {**_NAMES, "ours": ours, "seen": []}
    torch.manual_seed(0)
    if program.imports:
        exec(program.imports, names)
    return World(names, run(program.setup, names))


def run(lines: Sequence[str], names: Names) -> Fault | None:
    """Run lines; return the first exception and the place among `lines` where it was raised."""
    text = "\n".join(lines)
    # Dynamo and PyTorch look for the source of the functions that they meet.
    linecache.cache[_FILE] = (len(text), None, [f"{line}\n" for line in text.split("\n")], _FILE)
    try:
        exec(compile(text, _FILE, "exec"), names)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        found = [frame.lineno or 1 for frame in frames if frame.filename == _FILE]
        return Fault(error.with_traceback(None), found[0] if found else 0)
    return None
