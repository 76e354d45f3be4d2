"""A small vision transformer and a small diffusion transformer, trained on pictures of characters.

    python benchmarks/data/glyphs.py --to benchmarks/generated/glyphs.npz
    python benchmarks/models/small_models.py vit --to benchmarks/generated/small_vit
    python benchmarks/models/small_models.py dit --to benchmarks/generated/small_dit

Pictures are 32 x 32, 256 patches of 2 x 2: a character of one of 21 fonts, turned by up to 20
degrees, resized, moved, in random shades, newly drawn for every batch. The first model, of
transformers, tells which of 36 characters it is under noise; the second (arXiv 2212.09748: adaLN-
Zero, no cross attention) draws the character it is asked for, along straight lines from noise to
pictures (rectified flow). Both are trained in fp32 with bf16 autocast and saved as safetensors.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import GENERATED, RESULTS, rows

TURN = math.radians(20.0)


@dataclass(frozen=True)
class Sizes:
    """A model and its training, of so many steps unless time runs out."""

    side: int = 32
    patch: int = 2
    width: int = 256
    layers: int = 8
    heads: int = 4
    classes: int = 36
    batch: int = 256
    steps: int = 2000
    warm_up: int = 100
    peak_lr: float = 6e-4
    weight_decay: float = 0.05
    noise: float = 0.0
    left_out: float = 0.0


SIZES = {
    "vit": Sizes(noise=0.5),
    "dit": Sizes(steps=3000, left_out=0.1, weight_decay=0.0),
}
TINY = {"side": 8, "width": 32, "layers": 2, "heads": 2, "batch": 8, "steps": 6, "warm_up": 2}


def sizes_of(kind: str, size: str = "full") -> Sizes:
    """Return the sizes of a model: "full", or "tiny" for tests."""
    return replace(SIZES[kind], **TINY) if size == "tiny" else SIZES[kind]


# --- pictures -------------------------------------------------------------------------------------


class Glyphs:
    """Draws batches of pictures from the file that `glyphs.py` writes."""

    def __init__(self, path: Path, sizes: Sizes, device: str) -> None:
        drawn = torch.from_numpy(numpy.load(path)["pictures"])[:, : sizes.classes]
        self.fonts, self.classes = drawn.shape[:2]
        self.masters = drawn.to(device).float().div_(255.0)
        self.sizes, self.device = sizes, device

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return pictures (count, 1, side, side) around [-1, 1] and their classes.

        Args:
            count: how many.
            generator: of the device; the same state gives the same pictures there.
        """
        side, where = self.sizes.side, {"generator": generator, "device": self.device}
        label = torch.randint(self.classes, (count,), **where)
        font = torch.randint(self.fonts, (count,), **where)
        chance = torch.rand(6, count, **where)
        angle = (2 * chance[0] - 1) * TURN
        size = 0.75 + 0.55 * chance[1]
        moved = 0.25 * (2 * chance[2:4] - 1)
        cosine, sine = angle.cos() / size, angle.sin() / size
        turned = torch.stack([cosine, -sine, moved[0], sine, cosine, moved[1]], 1).view(-1, 2, 3)
        grid = F.affine_grid(turned, [count, 1, side, side], align_corners=False)
        masters = self.masters[font, label][:, None]
        shape = F.grid_sample(masters, grid, align_corners=False)
        dark, light = (-0.2 - 0.8 * chance[4], 0.2 + 0.8 * chance[5])
        dark, light = (each[:, None, None, None] for each in (dark, light))
        picture = dark + (light - dark) * shape
        if self.sizes.noise:
            picture = picture + self.sizes.noise * torch.randn(picture.shape, **where)
        return picture, label


# --- models ---------------------------------------------------------------------------------------


def vision_transformer(sizes: Sizes) -> Any:
    """Return transformers' ViT with a head."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=4 * sizes.width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=sizes.side,
        patch_size=sizes.patch,
        num_channels=1,
        num_labels=sizes.classes,
    )
    return ViTForImageClassification._from_config(config, attn_implementation="sdpa")


class Block(nn.Module):
    """A layer whose norms are shifted and scaled by the time and the class."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm_2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        """Attend within the patches (B, L, width), as `given` (B, width) says."""
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(F.silu(given))[
            :, None
        ].chunk(6, -1)
        seen = self.norm_1(x) * (1 + scale_1) + shift_1
        x = x + gate_1 * self.attend(seen)
        seen = self.norm_2(x) * (1 + scale_2) + shift_2
        moved: Tensor = x + gate_2 * self.mlp(seen)
        return moved

    def attend(self, x: Tensor) -> Tensor:
        """Return attention of all patches to all."""
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        found = F.scaled_dot_product_attention(q, k, v)
        made: Tensor = self.out(found.transpose(1, 2).reshape(batch, length, width))
        return made


class DiffusionTransformer(nn.Module):
    """Says in which direction a noisy picture has to move, for a class; the last one means any."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        patches, pixels = (sizes.side // sizes.patch) ** 2, sizes.patch**2
        self.enter = nn.Linear(pixels, sizes.width)
        self.position = nn.Parameter(0.02 * torch.randn(1, patches, sizes.width))
        self.time = nn.Sequential(
            nn.Linear(sizes.width, sizes.width), nn.SiLU(), nn.Linear(sizes.width, sizes.width)
        )
        self.label = nn.Embedding(sizes.classes + 1, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, elementwise_affine=False)
        self.modulation = nn.Linear(sizes.width, 2 * sizes.width)
        self.leave = nn.Linear(sizes.width, pixels)
        for layer in (self.modulation, self.leave):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, picture: Tensor, time: Tensor, label: Tensor) -> Tensor:
        """Return the direction (B, 1, side, side) at a time (B,) between 0, picture, and 1."""
        side, patch = self.sizes.side, self.sizes.patch
        x = F.pixel_unshuffle(picture, patch).flatten(2).transpose(1, 2)
        x = self.enter(x.to(self.position.dtype)) + self.position
        given = self.time(waves(time, self.sizes.width).to(x.dtype)) + self.label(label)
        for block in self.blocks:
            x = block(x, given)
        shift, scale = self.modulation(F.silu(given))[:, None].chunk(2, -1)
        x = self.leave(self.norm(x) * (1 + scale) + shift)
        x = x.transpose(1, 2).unflatten(2, (side // patch, side // patch))
        return F.pixel_shuffle(x, patch)


def waves(time: Tensor, width: int) -> Tensor:
    """Return cosines and sines of a time, (B, width)."""
    rate = torch.exp(-math.log(1e4) * torch.arange(width // 2, device=time.device) / (width // 2))
    angle = 1000.0 * time.float()[:, None] * rate
    return torch.cat([angle.cos(), angle.sin()], 1)


@torch.no_grad()
def sample(
    model: Callable[..., Tensor], start: Tensor, label: Tensor, steps: int, guidance: float
) -> Tensor:
    """Return pictures drawn from noise in Euler steps, in fp32.

    Args:
        model: a `DiffusionTransformer`, as it is or compiled.
        start: noise (B, 1, side, side).
        label: the classes (B,).
        steps: how many.
        guidance: 1 for the class as asked; more exaggerates it against no class at all.
    """
    picture = start.float()
    any_label = torch.full_like(label, SIZES["dit"].classes)
    both = torch.cat([label, any_label])
    times = torch.linspace(1.0, 0.0, steps + 1, device=start.device)
    for step in range(steps):
        time_of_all = times[step].expand(2 * len(label))
        found = model(torch.cat([picture, picture]), time_of_all, both).float()
        asked, free = found.chunk(2)
        direction = free + guidance * (asked - free)
        picture = picture + (times[step + 1] - times[step]) * direction
    return picture


# --- training -------------------------------------------------------------------------------------


def loss_of(
    kind: str, model: Any, pictures: Tensor, label: Tensor, generator: torch.Generator
) -> Tensor:
    """Return the loss of a batch."""
    if kind == "vit":
        return F.cross_entropy(model(pixel_values=pictures).logits.float(), label)
    where = {"generator": generator, "device": label.device}
    is_free = torch.rand(label.shape, **where) < model.sizes.left_out
    label = torch.where(is_free, model.sizes.classes, label)
    noise = torch.randn(pictures.shape, **where)
    time_of_each = torch.sigmoid(torch.randn(label.shape, **where))
    share = time_of_each[:, None, None, None]
    found = model(pictures + share * (noise - pictures), time_of_each, label)
    return F.mse_loss(found.float(), noise - pictures)


def train(
    kind: str,
    sizes: Sizes,
    glyphs: Path,
    device: str,
    seed: int = 0,
    backend: str = "",
    seconds: float = math.inf,
) -> tuple[Any, Any]:
    """Return a trained model and the row that says how it went.

    Args:
        kind: a key of `SIZES`.
        sizes: of the model and its training.
        glyphs: the file that `glyphs.py` writes.
        device: where it is trained.
        seed: of the weights and of all random draws.
        backend: the compiler of the model; None for eager.
        seconds: the rate reaches zero by then, however many steps are done.
    """
    torch.manual_seed(seed)
    built = vision_transformer(sizes) if kind == "vit" else DiffusionTransformer(sizes)
    model = built.to(device).train()
    if backend:
        model.compile(backend=backend)
    drawn, generator = Glyphs(glyphs, sizes, device), torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), weight_decay=sizes.weight_decay, fused=device == "cuda"
    )
    started, curve = time.perf_counter(), []
    for step in range(sizes.steps):
        spent = (time.perf_counter() - started) / seconds
        for group in optimizer.param_groups:
            group["lr"] = rate(sizes, step, spent)
        pictures, label = drawn.draw(sizes.batch, generator)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = loss_of(kind, model, pictures, label, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        is_last = step + 1 == sizes.steps or spent >= 1.0
        if step % max(1, sizes.steps // 20) == 0 or is_last:
            curve.append([step, round(loss.item(), 4)])
            print(f"step {step}: {curve[-1][1]}", flush=True)
        if is_last:
            break
    took = time.perf_counter() - started
    row = {
        "what": f"small {kind}",
        "sizes": asdict(sizes),
        "seed": seed,
        "backend": backend or "eager",
        "loss": curve,
        "steps": curve[-1][0] + 1,
        "seconds": round(took, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    return model.eval(), row


def rate(sizes: Sizes, step: int, spent: float = 0.0) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine to zero.

    Args:
        sizes: of the training.
        step: how many are done.
        spent: the share of the time that has passed; whichever of both is further counts.
    """
    if step < sizes.warm_up:
        return sizes.peak_lr * (step + 1) / sizes.warm_up
    progress = (step - sizes.warm_up) / max(1, sizes.steps - sizes.warm_up)
    progress = min(1.0, max(progress, spent))
    return sizes.peak_lr * (1 + math.cos(math.pi * progress)) / 2


def save(model: Any, kind: str, sizes: Sizes, folder: Path) -> None:
    """Write a model, for `load`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "sizes.json").write_text(json.dumps({"kind": kind, **asdict(sizes)}) + "\n")


def load(folder: Path, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Sizes]:
    """Return a saved model, for use, and its sizes."""
    from safetensors.torch import load_file

    stored = json.loads((folder / "sizes.json").read_text())
    kind = stored.pop("kind")
    sizes = Sizes(**stored)
    model = vision_transformer(sizes) if kind == "vit" else DiffusionTransformer(sizes)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(device, dtype).eval(), sizes


def main() -> int:
    """Train one model and save it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=SIZES)
    parser.add_argument("--glyphs", type=Path, default=GENERATED / "glyphs.npz")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--seconds", type=float, default=math.inf, help="to be done by then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="", help="of torch.compile; none: eager")
    parser.add_argument("--out", type=Path, default=RESULTS / "ablations.jsonl")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = sizes_of(given.kind, given.size)
    sizes = replace(sizes, steps=given.steps or sizes.steps)
    model, row = train(
        given.kind, sizes, given.glyphs, device, given.seed, given.backend, given.seconds
    )
    save(model, given.kind, sizes, given.to)
    rows.write(given.out, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
