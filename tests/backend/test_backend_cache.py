"""A warm start: the second process finds the compiled graph in AOTAutograd's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.closeness import needs_compiler

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import torch
from torch._dynamo.utils import counters

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 16)
        self.lm_head = torch.nn.Linear(16, 64)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        logits = self.lm_head(self.embed(ids))[:, :-1]
        targets = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 2:]
        z_loss = logits.logsumexp(-1).square().mean()
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 64), targets.reshape(-1))
        return loss + 1e-4 * z_loss, logits

def train():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = torch.compile(Model(), backend="memeff")
    loss, logits = model(torch.arange(16).view(2, 8))
    loss.backward()
    import memeff_compile
    report = memeff_compile.last_report()
    found = counters["aot_autograd"]
    print(f"RESULT {loss.item():.6f} rewrites={report.rewrites('fuse_linear_cross_entropy')}"
          f" tables={report.rewrites('fuse_embedding_gradient')}"
          f" hit={found['autograd_cache_hit']} miss={found['autograd_cache_miss']}"
          f" bypass={found['autograd_cache_bypass']}")

train()
"""


OTHER_VERSION = """
import memeff_compile
memeff_compile.__version__ = "0.0.0"
train()
"""


def _run(folder: Path) -> list[str]:
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    done = subprocess.run(
        [sys.executable, str(folder / "program.py")],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*inherited, str(ROOT)]),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout + done.stderr
    return lines


@needs_compiler
def test_second_process_hits_the_autograd_cache(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (cold,) = _run(tmp_path)
    assert cold.endswith("rewrites=1 tables=1 hit=0 miss=1 bypass=0")
    # Another version of ours may have other ops under the same names.
    (tmp_path / "program.py").write_text(PROGRAM + OTHER_VERSION)
    warm, other = _run(tmp_path)
    assert warm == cold.replace("hit=0 miss=1", "hit=1 miss=0")
    assert other == cold
