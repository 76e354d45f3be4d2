"""NeuZip's Table 2 on a real model: held-out loss against peak memory, full training and QLoRA.

    python benchmarks/models/tuning_formats.py train --model FOLDER
    python benchmarks/models/tuning_formats.py table --out FILE

FOLDER is a causal model with its tokenizer, in bf16. "sgd" updates dense weights in the backward;
`win4` and `tier` do the same with compressed ones. "nf4 + lora" is QLoRA, written from its paper
(arXiv 2305.14314): frozen linears in NF4 with coded scales, decoded in each forward and again in
each backward, and fp32 adapters of all linears, trained by AdamW. All are checkpointed, with
the exact loss, which builds no logits. Text: that of fine_tuning.py; a seed decides its order, and
draws the adapters. A run is a row. Peaks are the allocator's, weights included; the judged tokens
come after them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import RESULTS, rows
from benchmarks.ablations import weights_ablation
from benchmarks.models.fine_tuning import Text
from memeff_compile import functional

METHODS = ("sgd", "win4", "tier", "nf4 + lora")
RATES = {"sgd": (0.003, 0.01, 0.03, 0.1), "nf4 + lora": (0.0003, 0.001, 0.003)}
"""Learning rates to choose from, of SGD and of AdamW."""
WARM_UP, RANK, SCALE = 10, 16, 2.0
GIB = 2**30


class Nf4(nn.Module):
    """A frozen linear in NF4 with coded scales, and an adapter of rank `RANK` in fp32."""

    numbers: Tensor
    codes: Tensor
    scales: Tensor
    ranges: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.shape, device = weight.shape, weight.device
        numbers = weights_ablation.normal_floats().to(device)
        blocks = weight.float().reshape(-1, weights_ablation.SCALED_TOGETHER)
        scale = blocks.abs().amax(1).clamp_min(1e-30)
        padded = F.pad(scale - scale.mean(), (0, -scale.numel() % 256)).view(-1, 256)
        top = padded.abs().amax(1, keepdim=True).clamp_min(1e-30) / 448.0
        codes = torch.bucketize(blocks / scale[:, None], (numbers[1:] + numbers[:-1]) / 2)
        codes = codes.to(torch.uint8).flatten()
        self.register_buffer("numbers", numbers)
        self.register_buffer("codes", codes[::2] | codes[1::2] << 4)
        self.register_buffer("scales", (padded / top).to(torch.float8_e4m3fn))
        self.register_buffer("ranges", torch.cat([top.flatten(), scale.mean().view(1)]))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())
        rows_count, columns = self.shape
        self.down = nn.Parameter(torch.empty(RANK, columns, device=device))
        self.up = nn.Parameter(torch.zeros(rows_count, RANK, device=device))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def weight(self) -> Tensor:
        """Return the decoded weight in bf16."""
        scale = (self.scales.float() * self.ranges[:-1, None]).flatten() + self.ranges[-1]
        pairs = torch.stack([self.codes & 15, self.codes >> 4], 1)
        numbers = self.numbers[pairs.int()].view(-1, weights_ablation.SCALED_TOGETHER)
        held = numbers * scale[: len(numbers), None].clamp_min(1e-30)
        return held.bfloat16().view(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear of x (..., columns), with the adapter."""
        out = _Product.apply(x, self)
        out = out if self.bias is None else out + self.bias
        adapted = F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))
        return out + SCALE * adapted


class _Product(torch.autograd.Function):
    """A product with a frozen weight that the backward decodes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Nf4) -> Tensor:
        ctx.module = module
        return F.linear(x, module.weight())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.module.weight(), None


def build(given: argparse.Namespace, method: str, device: str) -> Any:
    """Return the checkpointed model in bf16, its weights as the method has them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16).to(device)
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if method in ("win4", "tier"):
        memeff_compile.compress_(model, method, min_size=1 << 16, progress=False)
    if method == "nf4 + lora":
        model.requires_grad_(False)
        for owner, name, linear in list(weights_ablation.linears(model)):
            setattr(owner, name, Nf4(linear))
    return model.train()


def losses_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Return a function from token ids (B, T) to their loss, without logits."""

    def loss(ids: Tensor) -> Tensor:
        hidden = model.base_model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        weight = model.get_output_embeddings().weight
        return functional.linear_cross_entropy(hidden, weight, ids[:, 1:].flatten())

    return loss


def train_once(given: Any, text: Text, method: str, seed: int, rate: float) -> dict[str, Any]:
    """Train from the start in one order of the text; return losses and the peak."""
    device = text.train.device.type
    torch.manual_seed(seed)
    model = build(given, method, device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    optimizer: Any = None
    if method == "nf4 + lora":
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, fused=device == "cuda")
    else:
        optimizer = memeff_compile.optim_in_backward(model, torch.optim.SGD, lr=rate)
    step, losses, started = losses_of(model), [], time.perf_counter()
    for number, ids in enumerate(text.batches(seed)):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (number + 1) / WARM_UP)
        loss = step(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    curve = torch.stack(losses).float().cpu()
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 1)}
    if device == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 4)
    found["loss"] = [round(float(part.mean()), 5) for part in curve.split(max(1, len(curve) // 10))]
    found["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {**found, "validation": judge(model, text)}


@torch.no_grad()
def judge(model: Any, text: Text) -> float:
    """Return the mean loss of a token that was not trained on."""
    model.eval()
    step = losses_of(model)
    each = [float(step(ids)) for ids in text.judged.split(text.batch)]
    return round(statistics.mean(each), 6)


def measure(given: argparse.Namespace) -> int:
    """Train each method with each rate and seed while the budget lasts."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, began = Text(given, device), time.monotonic()
    facts: dict[str, Any] = {"what": "tuning formats", "model": given.model.name}
    facts |= {name: getattr(given, name) for name in ("steps", "batch", "length", "judged")}
    if "sgd" in given.method:
        before = judge(build(given, "sgd", device), text)
        rows.append(
            given.out, {**facts, "method": "before", "validation": before} | rows.environment()
        )
    for seed in given.seed:
        for method in given.method:
            kind = "nf4 + lora" if method == "nf4 + lora" else "sgd"
            for rate in given.rate or RATES[kind]:
                if time.monotonic() - began > given.budget:
                    print(f"out of time before {method}, seed {seed}, rate {rate}", flush=True)
                    return 0
                found = train_once(given, text, method, seed, rate)
                print(method, seed, rate, found["validation"], found["seconds"], "s", flush=True)
                row = {**facts, "method": method, "seed": seed, "rate": rate, **found}
                rows.append(given.out, {**row, **rows.environment()})
    return 0


def show(given: argparse.Namespace) -> int:
    """Print each method at the rate whose held-out loss is least on average."""
    found = [row for row in rows.read(given.out) if row.get("what") == "tuning formats"]
    print("| weights | rate | seeds | held-out loss (deviation) | peak, GiB | s |")
    print("|---|---:|---:|---:|---:|---:|")
    for method in dict.fromkeys(row["method"] for row in found):
        mine = [row for row in found if row["method"] == method]
        if method == "before":
            print(f"| before | | | {mine[-1]['validation']:.4f} | | |")
            continue
        by_rate: dict[float, dict[int, dict[str, Any]]] = {}
        for row in mine:
            by_rate.setdefault(row["rate"], {})[row["seed"]] = row
        most = max(map(len, by_rate.values()))
        means = {
            rate: statistics.mean(row["validation"] for row in seeds.values())
            for rate, seeds in by_rate.items()
            if len(seeds) == most
        }
        rate = min(means, key=means.__getitem__)
        each = list(by_rate[rate].values())
        losses = [row["validation"] for row in each]
        spread = f" ({statistics.stdev(losses):.4f})" if len(losses) > 1 else ""
        peak = max(row.get("peak_gib", 0.0) for row in each)
        cells = [method, f"{rate:g}", str(len(each)), f"{means[rate]:.4f}{spread}", f"{peak:.3f}"]
        print(f"| {' | '.join([*cells, str(statistics.median(r['seconds'] for r in each))])} |")
    return 0


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["train", "table"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rate", nargs="+", type=float, help="all of the method's without")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--judged", type=int, default=64, help="sequences that are judged")
    parser.add_argument("--root", nargs="+", type=Path, help="folders with text")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu" / "tuning-formats.jsonl")
    given = parser.parse_args()
    return {"train": measure, "table": show}[given.action](given)


if __name__ == "__main__":
    sys.exit(main())
