"""Few things, very often: memory and live tensors must not grow. `python -m fuzz soak`."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memeff_compile import KVCache, last_report
from memeff_compile.backend import memeff

__all__ = ["COUNTS", "soak"]

COUNTS = {"steps": 2000, "compilations": 500, "generations": 500}

_VOCABULARY = 67
_ALLOWED_MIB = 256
"""What compilers and allocators may keep beyond the warm-up; a leaked step is far more, in all."""


class _Model(nn.Module):
    """A class of ours: torch compiles no `nn.Sequential` in place, whose code is its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(_VOCABULARY, 8), nn.Linear(8, _VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(ids))
        return logits


def _compiled(inner: str, *, is_ours: bool = True) -> nn.Module:
    model = _Model()
    options = {"memeff.inner": inner}
    model.compile(**({"backend": memeff, "options": options} if is_ours else {"backend": inner}))
    return model


def _step(model: nn.Module, number: int) -> Tensor:
    """One training step whose shape changes, and a look at some of the logits."""
    ids = torch.randint(_VOCABULARY, (1 + number % 5, 2 + number % 7))
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    loss.backward()
    if number % 3 == 0:
        logits[:, -1].argmax(-1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
    return loss.detach()


def _steps() -> Callable[[int], object]:
    model = _compiled("aot_eager")
    return lambda number: _step(model, number)


def _compilations(*, is_ours: bool = True) -> Callable[[int], object]:
    def again(number: int) -> object:
        torch._dynamo.reset()
        return _step(_compiled("aot_eager", is_ours=is_ours), number)

    return again


def _generations() -> Callable[[int], object]:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.LlamaConfig(**sizes, **heads, eos_token_id=None, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config).eval()

    def again(number: int) -> object:
        ids = torch.randint(2, 64, (1 + number % 3, 3 + number % 11))
        cache = KVCache(config, 32 + number % 9, bits=(16, 8, 4)[number % 3])
        return model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)

    return again


_KINDS = {"steps": _steps, "compilations": _compilations, "generations": _generations}


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _growth(what: str, again: Callable[[int], object], count: int) -> tuple[int, float]:
    """Do one thing so often; return how many tensors and MiB stay after a warm-up."""
    warm = max(count // 4, 40)
    for number in range(warm):
        again(number)
    tensors, peak = _tensors(), _peak_mib()
    for number in range(warm, warm + count):
        again(number)
    more, mib = _tensors() - tensors, _peak_mib() - peak
    print(f"{what}: {count} after {warm}, {more:+} tensors, {mib:+.0f} MiB", flush=True)
    return more, mib


def _grows(kind: str, count: int) -> str:
    """Say what grew when one thing was done so often, or nothing.

    Of compilations PyTorch itself keeps fake tensors, some for each; twice as many are allowed.
    """
    theirs, their_mib = 0, 0.0
    if kind == "compilations":
        theirs, their_mib = _growth("PyTorch's own", _compilations(is_ours=False), count)
    more, mib = _growth(kind, _KINDS[kind](), count)
    is_flat = more <= 8 + 2 * max(theirs, 0) and mib <= _ALLOWED_MIB + 2 * their_mib
    return "" if is_flat else f"{kind}: {more} more tensors, {mib:.0f} MiB"


def _threads() -> str:
    """Four threads train copies of one model, each compiled in its own thread."""

    def train(model: nn.Module) -> list[float]:
        rows = torch.arange(12).view(3, 4)
        losses = []
        for _ in range(20):
            loss = F.cross_entropy(model(rows).flatten(0, 1), rows.flatten())
            loss.backward()
            losses.append(loss.item())
        return losses

    torch._dynamo.reset()
    alone, *others = (_compiled("aot_eager") for _ in range(5))  # threads share one generator
    models = train(alone)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(train, others))
    print(f"threads: 4, losses {found[0][0]:.4f}", flush=True)
    same = all(torch.allclose(torch.tensor(each), torch.tensor(models)) for each in found)
    return "" if same else f"threads: losses {found}, alone {models}"


_SECOND = """
import torch, fuzz.soak as soak
from torch._dynamo.utils import counters
model = soak._compiled("inductor"); torch.manual_seed(1)
loss = float(soak._step(model, 3))
hits = counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]
print(loss, sum(hits))
"""


def _second_process() -> str:
    """A second process loads the graphs that the first has compiled, and computes the same."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        here = Path(__file__).parent.parent
        command = [sys.executable, "-c", _SECOND]
        first, second = (
            subprocess.run(
                command, env=settings, cwd=here, capture_output=True, text=True, check=True
            ).stdout.split()[-2:]
            for _ in range(2)
        )
    print(f"second process: losses {first[0]}, {second[0]}, cache hits {second[1]}", flush=True)
    return "" if first[0] == second[0] and int(second[1]) else f"second process: {first} {second}"


def soak(counts: dict[str, int]) -> list[str]:
    """Return what grew or went wrong, a sentence each."""
    torch.set_num_threads(1)
    settings = {"recompile_limit": 64, "accumulated_recompile_limit": 100_000}
    with torch._dynamo.config.patch(settings):
        found = [_grows(kind, count) for kind, count in counts.items()]
        found.append(_threads())
    found.append(_second_process())
    lost = [r.sentence for r in last_report().records if r.action == "internal_error"]
    return [sentence for sentence in (*found, *lost) if sentence]
