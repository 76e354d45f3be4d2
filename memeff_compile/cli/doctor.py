"""Diagnose this machine: list versions, devices, compilers and kernel implementations, and a remedy
for each problem.

`memeff doctor` prints the findings and exits with 0 if the backend is usable. The last findings
come from trial runs: the doctor compiles, trains and verifies a toy model, and generates with a
transformers model after `memeff_compile.compile(model, kv_cache="static")`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import platform
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, Any

import memeff_compile
from memeff_compile.errors import first_line
from memeff_compile.report import text_width

if TYPE_CHECKING:
    import torch

MIN_PYTHON, MIN_TORCH, MIN_TRITON = (3, 10), (2, 11), (3, 6)

TESTED = {
    "torch": ((2, 11), (2, 13), (2, 14), (2, 15)),
    "triton": ((3, 6), (3, 7), (3, 8), (3, 9)),
    "transformers": ((5, 16), (5, 17), (5, 23), (5, 24)),
}
"""The releases with which the tests ran; see docs/measured/tested-stacks.md."""


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    section: str  # heading under which it is printed
    label: str  # the subject
    text: str  # the observation
    remedy: str = ""  # the remedy, or "" if no action is needed
    blocks: bool = False  # whether the backend is unusable because of it


def is_usable(findings: list[Finding]) -> bool:
    """Return whether the backend works on this machine."""
    return not any(finding.blocks for finding in findings)


def findings_text(findings: list[Finding]) -> str:
    """Return the verdict, the remedies, then the findings by section."""
    lines = [f"memeff_compile {memeff_compile.__version__}: {verdict(findings)}"]
    remedies = [f"  {finding.label}: {finding.remedy}" for finding in findings if finding.remedy]
    if remedies:
        lines += ["", "what to do", *(_wrapped(each, 4) for each in remedies)]
    return "\n".join([*lines, *_sections(findings)])


def verdict(findings: list[Finding]) -> str:
    """Return one line that says whether the backend works, and the number of open problems."""
    count = sum(bool(finding.remedy) for finding in findings)
    things = f"{count} thing{'s' * (count > 1)} to do"
    if not is_usable(findings):
        return f"the backend is not usable here; {things}"
    return f"it works here; {things if count else 'nothing to do'}"


def findings_json(findings: list[Finding]) -> str:
    """Return all findings as JSON, for a bug report."""
    said = {
        "version": memeff_compile.__version__,
        "usable": is_usable(findings),
        "verdict": verdict(findings),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(said, indent=2)


def _sections(findings: list[Finding]) -> list[str]:
    width, section = max((len(finding.label) for finding in findings), default=0), ""
    lines: list[str] = []
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section]
        lines.append(_wrapped(f"  {finding.label:<{width}}  {finding.text}", width + 4))
    return lines


def _wrapped(text: str, indent: int) -> str:
    """Break a line at the terminal's width, and indent its continuation lines."""
    width = text_width()
    head, rest = text[:indent], text[indent:]  # the column keeps its spaces
    if width - indent < width // 2:  # too narrow for columns
        head, indent = f"{head.rstrip()}\n    ".lstrip("\n"), 4
    how: Any = {"break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.wrap(rest, width - indent, **how) or [""]
    return f"\n{' ' * indent}".join([head + lines[0], *lines[1:]])


def diagnose() -> list[Finding]:
    """Inspect this machine, train a toy model, and try `generate()` with a transformers model.

    No model runs if the backend is not usable. Without transformers, `generate()` is not tried.
    """
    findings = _versions()
    if is_usable(findings):
        findings += [*_devices(), *_backend()]
    if is_usable(findings):
        findings += [*_engines(), *_self_tests()]
    return findings


def inductor_problem(device: str) -> str:
    """Return the reason why Inductor cannot compile for a device on this machine, or "" if it can.

    Only a trial shows whether the compilers that Inductor calls work: C++ for the CPU, triton and C
    for a GPU.
    """
    import torch

    from memeff_compile.cli.toy import add_one

    try:
        torch.compile(add_one, backend="inductor")(torch.ones(8, device=device))
    except Exception as error:
        # Inductor passes on any error of its toolchain, so the class of the error is not useful.
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def installed(package: str) -> str:
    """Return the version of an installed package, or "" if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _versions() -> list[Finding]:
    python = platform.python_version()
    old = sys.version_info[:2] < MIN_PYTHON
    needs = f"install Python {'.'.join(map(str, MIN_PYTHON))} or newer"
    findings = [Finding("versions", "python", python, needs if old else "", blocks=old)]
    findings.append(_tested(_required("torch", MIN_TORCH)))
    if sys.platform == "linux":
        findings.append(_tested(_required("triton", MIN_TRITON)))
    for package, use in (("transformers", "Hugging Face models"), ("numpy", "torch itself")):
        found = installed(package) or f"not installed (optional, for {use})"
        findings.append(_tested(Finding("versions", package, found)))
    return findings


def _required(package: str, minimum: tuple[int, int]) -> Finding:
    found = installed(package)
    if found and _release(found) >= minimum:
        return Finding("versions", package, found)
    how, seen = (" --upgrade", f"{found}, too old") if found else ("", "not installed")
    remedy = f'pip install{how} "{package}>={minimum[0]}.{minimum[1]}"'
    return Finding("versions", package, seen, remedy, blocks=package == "torch")


def _tested(found: Finding) -> Finding:
    """Add a remark to the finding about a package: whether this project's tests ran with the
    installed release of the package.
    """
    releases, release = TESTED.get(found.label, ()), _release(found.text)
    if found.remedy or not release or not releases or release in releases:
        return found
    *others, last = (".".join(map(str, each)) for each in releases)
    tested = f"{', '.join(others)} and {last}"
    return replace(found, text=f"{found.text}, untested: expected to work; tested are {tested}")


def _devices() -> list[Finding]:
    import torch

    findings = [_inductor("CPU", "cpu")]
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        text = f"none (this torch is built with {built}); everything runs on the CPU"
        return [*findings, Finding("devices", "GPU", text)]
    from memeff_compile.kernels.device import speed_note

    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        memory = facts.total_memory / (1 << 30)
        note = speed_note(torch.device("cuda", index))
        text = f"{facts.name}, sm_{facts.major}{facts.minor}, {memory:.0f} GiB; {note}"
        findings.append(Finding("devices", f"GPU {index}", text))
    return [*findings, _inductor("GPU", "cuda")]


def _inductor(label: str, device: str) -> Finding:
    problem, name = inductor_problem(device), f"Inductor on the {label}"
    if not problem:
        return Finding("devices", name, "compiles with it")
    needs = "a C++ compiler" if device == "cpu" else "triton and a C compiler"
    remedy = f"install {needs}, or compile with options={{'memeff.inner': 'aot_eager'}}"
    return Finding("devices", name, f"does not work: {problem}", remedy)


def _backend() -> list[Finding]:
    said = 'TORCH_LOGS="+memeff_compile" prints every decision, memeff_compile.last_report() '
    logging = Finding("backend", "logging", f"{said}returns them")
    name, group = 'backend="memeff"', entry_points(group="torch_dynamo_backends")
    if any(entry.name == "memeff" for entry in group):
        return [Finding("backend", name, "found by name"), logging]
    missing = "not found by name, because the package is imported but not installed"
    remedy = "pip install -e . in the repository"
    return [Finding("backend", name, missing, remedy, blocks=True), logging]


def card_text(name: str) -> str:
    """Return text that lists which implementation each op would use on a GPU that is not in this
    machine.

    For an unknown GPU name, the function raises ExplainError with the most similar names.
    """
    import torch

    from memeff_compile.kernels.device import planned_for
    from memeff_compile.planning.cards import card_of

    card = card_of(name)
    kind = card.gpu
    measured = ", ".join(sorted(kind.measured)) or "nothing"
    needed = (
        "Our Triton kernels need compute capability 8.0; losses, caches and weights are served "
    )
    needed += "in plain PyTorch: the same memory is saved, and it is slower."
    says = "Our Triton kernels run on it." if kind.runs_kernels else needed
    products = "int8 and E4M3" if kind.has_fp8 else "int8, and fp16 for weights and values"
    found = [
        Finding("what it has", "kernels", says),
        Finding(
            "what it has", "speed measured", f"{measured}; other choices follow a roofline model"
        ),
    ]
    if kind.runs_kernels:
        found.append(Finding("what it has", "attention=8b", f"multiplies {products}"))
    device = torch.device("cuda", 0)
    with planned_for(device, kind):
        found += [each for each in _engines(device) if each.label]  # only engines that run
    fits = f"`memeff explain CONFIG --memory {card.gib:g}GiB` says what fits."
    return "\n".join([str(card), *_sections(found), "", fits])


def _engines(device: torch.device | None = None) -> list[Finding]:
    """Return findings that name the implementation that each op would use on `device`, by default
    on this machine's GPU or CPU."""
    import torch

    from memeff_compile import kernels

    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    findings: list[Finding] = []
    for entry in pkgutil.iter_modules(kernels.__path__):
        folder = importlib.import_module(f"{kernels.__name__}.{entry.name}")
        if hasattr(folder, "ENGINES"):
            first = folder.engine_for(device, torch.bfloat16)
            findings += _engines_of(f"memeff::{entry.name}", folder.ENGINES, first)
    return findings


def _engines_of(op: str, engines: Mapping[str, str], first: str) -> list[Finding]:
    where = "not on this machine" if first == "reference" else "on tensors that engine cannot take"
    others = [f"{name}, {where}: {text}" for name, text in engines.items() if name != first]
    mine = Finding("what runs where", op, f"{first} engine: {engines[first]}")
    return [mine, *(Finding("what runs where", "", text) for text in others)]


def _self_tests() -> list[Finding]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    inner = "aot_eager" if inductor_problem(device) else "inductor"
    tests = [(_trains, "toy model", inner)]
    if installed("transformers"):  # a CPU has no CUDA graphs, and Inductor is slow
        tests.append((_generates, "generate()", "eager" if device == "cpu" else inner))
    findings = []
    for test, name, compiler in tests:
        label, remedy, blocks = f"{name} on {device}, {compiler}", "", False
        try:
            torch.manual_seed(0)
            text = test(device, compiler)
        except Exception as error:
            # Any error is the finding.
            text = f"failed: {type(error).__name__}: {first_line(error)}"
            remedy = "run it with TORCH_LOGS='+memeff_compile' and report what it prints"
            blocks = test is _trains or not isinstance(error, ImportError)
            if not blocks:  # transformers is optional; this one is too old or broken
                remedy = "pip install 'memeff_compile[transformers]'"
        findings.append(Finding("self-test", label, text, remedy, blocks))
    return findings


def _trains(device: str, inner: str) -> str:
    import torch

    from memeff_compile.cli.toy import ToyModel

    model, ids = ToyModel().to(device), torch.arange(32, device=device)
    expected = model(ids)
    loss = memeff_compile.compile(model, inner=inner)(ids)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
    count = memeff_compile.last_report().rewrites("fuse_linear_cross_entropy")
    return f"trains; {count} rewrite, same loss as eager ({loss.item():.6f})"


def _generates(device: str, inner: str) -> str:
    """Generate text with a compiled transformers model and a static KV cache, and return a finding
    that says whether this worked.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=4, eos_token_id=None, **sizes)
    model: Any = LlamaForCausalLM(config)
    model.to(device).eval()
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ids = torch.arange(2, 10, device=device)[None]
    expected = model.generate(ids, **asked)
    memeff_compile.compile(model, kv_cache="static", inner=inner)
    if not torch.equal(model.generate(ids, **asked), expected):
        raise RuntimeError("a compiled model generates other tokens than eager")
    replayed = sum(graph.replays.replays for graph in memeff_compile.graphs() if graph.replays)
    return f"same tokens as eager; {replayed} steps were replayed as CUDA graphs"
