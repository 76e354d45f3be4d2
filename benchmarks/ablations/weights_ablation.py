"""NeuZip's tables for a small trained model: perplexity against memory, and errors of lossy modes.

    python benchmarks/models/convergence.py model --to benchmarks/generated/small_model
    python benchmarks/ablations/weights_ablation.py --model benchmarks/generated/small_model

Part `perplexity` (Figure 3, Table 4 of arXiv 2410.20650) replaces the weights of all linears but
the head: dense, 8 and 4 bits as published elsewhere, and this package's codes with 7, 3, 1 and 0
mantissa bits and blocks of 32 to 512. Part `times` takes the time of a forward. Part `errors`
compares decoded with given weights: of a normal distribution, trained-like random ones, and the
model's weights.

The other formats are plain PyTorch written from their papers, not the libraries that provide them;
they show a format's bits and accuracy, not its time:

    int8         LLM.int8 (arXiv 2208.07339): int8 by row of the weight and by token, products of
                 inputs above 6 in 16 bits
    fp4, nf4     QLoRA's (arXiv 2305.14314): blocks of 64, a scale in fp32 each; `double` codes the
                 scales in E4M3 by 256 around their mean
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import GENERATED, RESULTS, registry, rows, timing
from benchmarks.ablations import attention_subjects
from memeff_compile.kernels.coded_weight import CodedWeight, encode
from memeff_compile.model.weights.compress import SKIPPED

BLOCKS = (32, 64, 128, 256, 512)
KEPT = (0, 1, 3)
CODECS = ("win4", "tier", "rans")
SWEPT = "tier"
"""The codec that blocks are swept with; all of them decode to the same weights, up to patches."""
PUBLISHED = ("int8", "fp4", "fp4 double", "nf4", "nf4 double")
"""The formats of other papers."""
SCALED_TOGETHER, SCALES_TOGETHER = 64, 256
LARGE_INPUT = 6.0
FP4 = (0.0, 0.0625, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Sizes of the 4-bit numbers of two exponent bits and one of mantissa, before the scale."""


# --- formats of other papers ----------------------------------------------------------------------


def normal_floats() -> Tensor:
    """Return NF4: quantiles of a normal distribution, 8 below 0, 0 itself and 7 above."""
    outermost = 0.5 * (1 / 32 + 1 / 30)
    below = torch.special.ndtri(torch.linspace(outermost, 0.5, 8, dtype=torch.float64))
    above = torch.special.ndtri(torch.linspace(0.5, 1.0 - outermost, 9, dtype=torch.float64))
    largest = -torch.special.ndtri(torch.tensor(outermost, dtype=torch.float64))
    return torch.cat([below / largest, above[1:] / largest]).float()


def four_bit_floats() -> Tensor:
    """Return FP4 with its signs, the largest 1, in order."""
    sizes = torch.tensor(FP4) / max(FP4)
    return torch.cat([-sizes[1:].flip(0), sizes])


def in_four_bits(weight: Tensor, numbers: Tensor, double: bool) -> tuple[Tensor, float]:
    """Return a weight as 4-bit numbers of blocks hold it, and bits per weight.

    Args:
        weight: bf16; its size a multiple of 64.
        numbers: the value of each code, in ascending order.
        double: whether scales are coded too.
    """
    numbers = numbers.to(weight.device)
    blocks = weight.float().reshape(-1, SCALED_TOGETHER)
    scale = blocks.abs().amax(1).clamp_min(1e-30)
    bits = 4.0 + 32.0 / SCALED_TOGETHER
    if double:
        scale = coded_scales(scale)
        bits = 4.0 + 8.0 / SCALED_TOGETHER + 32.0 / (SCALED_TOGETHER * SCALES_TOGETHER)
        bits += 32.0 / weight.numel()
    middles = (numbers[1:] + numbers[:-1]) / 2
    code = torch.bucketize(blocks / scale[:, None], middles)
    found = numbers[code] * scale[:, None]
    return found.view(weight.shape).to(weight.dtype), bits


def coded_scales(scale: Tensor) -> Tensor:
    """Return scales as E4M3 numbers of 256 around the mean of all hold them."""
    mean = scale.mean()
    padded = F.pad(scale - mean, (0, -scale.numel() % SCALES_TOGETHER)).view(-1, SCALES_TOGETHER)
    top = padded.abs().amax(1, keepdim=True).clamp_min(1e-30) / 448.0
    held = (padded / top).to(torch.float8_e4m3fn).float() * top
    return (held.flatten()[: scale.numel()] + mean).clamp_min(1e-30)


class Int8Linear(nn.Module):
    """A linear on int8 products; columns of the input with a number above 6 go in 16 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        weight = linear.weight.detach().float()
        self.scale = weight.abs().amax(1).clamp_min(1e-30) / 127.0
        self.codes = (weight / self.scale[:, None]).round()
        self.bits = 8.0 + 32.0 / weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear of x (..., columns)."""
        flat = x.flatten(0, -2).float()
        is_large = flat.abs().amax(0) > LARGE_INPUT
        small = flat.masked_fill(is_large, 0.0)
        top = small.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127.0
        out = (small / top).round() @ self.codes.t() * (top * self.scale)
        if bool(is_large.any()):
            columns = (self.codes[:, is_large] * self.scale[:, None]).to(x.dtype)
            out = out + F.linear(flat[:, is_large].to(x.dtype), columns).float()
        out = out if self.bias is None else out + self.bias.float()
        return out.to(x.dtype).view(*x.shape[:-1], -1)


def linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linears that every method codes, with their owner and name in it."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and not path.endswith(SKIPPED):
            owner, _, name = path.rpartition(".")
            yield model.get_submodule(owner), name, module


def emulate_(model: nn.Module, method: str) -> float:
    """Replace the linears of a model as a published format would; return bits per weight."""
    numbers = normal_floats() if method.startswith("nf4") else four_bit_floats()
    bits, count = 0.0, 0
    for owner, name, linear in list(linears(model)):
        size = linear.weight.numel()
        if method == "int8":
            replaced = Int8Linear(linear)
            setattr(owner, name, replaced)
            bits += size * replaced.bits
        else:
            held, per_weight = in_four_bits(linear.weight, numbers, "double" in method)
            linear.weight.data.copy_(held)
            bits += size * per_weight
        count += size
    return bits / count


# --- perplexity -----------------------------------------------------------------------------------


def methods() -> Iterator[dict[str, Any]]:
    """Yield the methods to measure."""
    yield {"method": "dense"}
    for name in PUBLISHED:
        yield {"method": name, "emulated": True}
    for codec in CODECS:
        yield {"method": "memeff", "codec": codec, "mantissa": 7}
    for block in reversed(BLOCKS):
        for kept in KEPT:
            codecs = CODECS if block == max(BLOCKS) else (SWEPT,)
            for codec in codecs:
                yield {"method": "memeff", "codec": codec, "mantissa": kept, "block": block}


def coded(dense: nn.Module, row: dict[str, Any]) -> tuple[nn.Module, float]:
    """Return a copy of a model with its linears as a row says, and bits per weight."""
    model, bits = copy.deepcopy(dense), 16.0
    if row.get("emulated"):
        return model, emulate_(model, row["method"])
    if row["method"] == "memeff":
        lossy = {"block": row["block"]} if row["mantissa"] < 7 else {}
        report = memeff_compile.compress_(
            model, row["codec"], mantissa=row["mantissa"], min_size=1, progress=False, **lossy
        )
        wanted = sum(linear.weight.numel() for _, _, linear in linears(dense))
        if sum(each.bytes_before for each in report.compressed) != 2 * wanted:
            raise RuntimeError(f"some weights were left dense:\n{report}")
        bits = report.bits
    return model, bits


def perplexities(subject: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each method: bits, memory and perplexity."""
    weights = sum(linear.weight.numel() for _, _, linear in linears(subject.model))
    others = sum(p.numel() for p in subject.model.parameters()) - weights
    base: dict[str, float] = {}
    for row in methods():
        model, bits = coded(subject.model, row)
        found = subject.quality(model)
        base = base or found
        size = (weights * bits / 8 + 2 * others) / 2**20
        row |= {"part": "perplexity", "bits": bits, "linears_mib": weights * bits / 8 / 2**20}
        row |= {"model_mib": size, **found}
        row["against_dense"] = found["perplexity"] / base["perplexity"]
        row["is_same_loss"] = found["loss"] == base["loss"]
        yield row


def times(subject: Any, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the time of a forward for each method that is no emulation, blocks of 512."""
    for row in methods():
        is_rans = row.get("codec") == "rans" and row["mantissa"] < 7
        if row.get("emulated") or is_rans or row.get("block", max(BLOCKS)) < max(BLOCKS):
            continue
        model, bits = coded(subject.model, row)
        tokens = subject.batch * subject.tokens.shape[1]
        row |= {"part": "times", "bits": bits, "tokens": tokens}
        yield {**row, "ms": forward_ms(subject, model, repeats)}


def forward_ms(subject: Any, model: nn.Module, repeats: int) -> dict[str, float]:
    """Return the time of a forward over one batch of text, eager."""
    warm_up = min(2, repeats)
    with torch.no_grad():
        found = [timing.waited(lambda: subject.run(model, 0)) for _ in range(repeats + warm_up)]
    return rows.percentiles(found[warm_up:])


# --- errors ---------------------------------------------------------------------------------------


def published(weight: Tensor, kept: int, block: int) -> Tensor:
    """Return a bf16 weight as the paper's formula leaves it, written out with floating point."""
    blocks = weight.float().view(-1, block)
    norm = fraction(blocks.abs().amax(1, keepdim=True))
    small = (blocks / norm).to(torch.bfloat16).float()
    mantissa, exponent = torch.frexp(small)
    steps = 2.0 ** (kept + 1)
    rounded = torch.sign(mantissa) * torch.floor(mantissa.abs() * steps + 0.5) / steps
    if kept < 7:
        small = torch.ldexp(rounded, exponent)
    return (small * norm).to(torch.bfloat16).view(weight.shape)


def fraction(size: Tensor) -> Tensor:
    """Return a bf16 number without its exponent, 1 to 2; 1 for 0."""
    mantissa, _ = torch.frexp(size)
    return torch.where(size > 0, 2.0 * mantissa, 1.0)


def errors(subject: Any, side: int) -> Iterator[dict[str, Any]]:
    """Yield relative L2 and largest relative errors by kind of weights, bits kept and block."""
    device = subject.tokens.device.type
    torch.manual_seed(0)
    given: dict[str, Callable[[], list[Tensor]]] = {
        "normal": lambda: [registry.weight_of("normal", (side, side), device)],
        "trained-like": lambda: [registry.weight_of("trained", (side, side), device)],
        "the model": lambda: [one.weight.detach() for _, _, one in linears(subject.model)],
    }
    for kind, make in given.items():
        weights = make()
        for kept in (*KEPT, 7):
            for block in BLOCKS:
                formula = relative([(w, published(w, kept, block)) for w in weights])
                row = {"part": "errors", "weights": kind, "mantissa": kept, "block": block}
                row |= {"formula": formula, "entropy_bits": entropy(weights, kept, block)}
                if kept < 7:
                    coded = [(w, through_codes(w, f"win4:k{kept}:b{block}")) for w in weights]
                    row["memeff"] = relative(coded)
                yield row


def through_codes(weight: Tensor, codec: str) -> Tensor:
    """Return a weight encoded and decoded again."""
    return CodedWeight(encode(weight, codec), codec, weight.shape).decode()


def relative(pairs: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the L2 error over all weights, and the largest of one weight, relative."""
    error, size, worst = 0.0, 0.0, 0.0
    for given, found in pairs:
        wide = given.double()
        difference = (found.double() - wide).abs()
        error += float(difference.square().sum())
        size += float(wide.square().sum())
        is_normal = wide.abs() > 1e-30
        worst = max(worst, float((difference[is_normal] / wide.abs()[is_normal]).max()))
    return {"relative_l2": (error / size) ** 0.5, "largest": worst}


def entropy(weights: list[Tensor], kept: int, block: int) -> float:
    """Return bits per weight if exponents took no more than their entropy, normalisers counted."""
    total, count = 0.0, 0
    for weight in weights:
        norm = fraction(weight.float().view(-1, block).abs().amax(1, keepdim=True))
        held = published(weight, kept, block).float().view(-1, block) / norm
        exponents = (held.to(torch.bfloat16).view(torch.int16).flatten() >> 7) & 0xFF
        share = torch.bincount(exponents.int(), minlength=256).double() / exponents.numel()
        share = share[share > 0]
        total += float(-(share * share.log2()).sum()) * weight.numel()
        count += weight.numel()
    return total / count + kept + 1 + 8.0 / block


# --- the command ----------------------------------------------------------------------------------


def show(row: dict[str, Any]) -> str:
    """Return a row as a line of Markdown."""
    if row["part"] == "errors":
        cells = [row["weights"], f"k={row['mantissa']}", f"B={row['block']}"]
        for name in ("formula", "memeff"):
            if name in row:
                cells.append(f"{row[name]['relative_l2']:.4f} / {row[name]['largest']:.3f}")
        return f"| {' | '.join([*cells, format(row['entropy_bits'], '.2f')])} |"
    name = row["method"]
    if name == "memeff":
        name = f"{row['codec']} k={row['mantissa']}"
        name += f" B={row['block']}" if "block" in row else ""
    if row["part"] == "times":
        return f"| {name} | {row['bits']:.3f} | {row['ms']['median']:.2f} ms |"
    cells = [name, f"{row['bits']:.3f}", f"{row['model_mib']:.1f}", f"{row['perplexity']:.4f}"]
    cells += [f"{100 * (row['against_dense'] - 1):+.3f} %"]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Measure a saved model and append the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = GENERATED
    parser.add_argument("--model", type=Path, default=data / "small_model")
    parser.add_argument("--folder", type=Path, default=data, help="of the text")
    parts = ["perplexity", "times", "errors"]
    parser.add_argument("--part", nargs="+", choices=parts, default=parts)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows-of-text", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the model, for the rows")
    parser.add_argument("--side", type=int, default=4096, help="of random weights")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS / "weights-ablation.jsonl")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    subject = attention_subjects.language_model(
        given.model, given.folder, given.length, given.rows_of_text, given.batch, device
    )
    facts = {
        "what": "weights ablation",
        "seed": given.seed,
        "parameters": sum(p.numel() for p in subject.model.parameters()),
        "sequences": len(subject.tokens),
        "length": given.length,
        **rows.environment(),
    }
    made = {
        "perplexity": lambda: perplexities(subject),
        "times": lambda: times(subject, given.repeats),
        "errors": lambda: errors(subject, given.side),
    }
    for part in given.part:
        for row in made[part]():
            rows.append(given.out, {**row, **facts})
            print(show(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
