"""A list of GPUs by name, with each GPU's memory and the features that decide which kernels can
run.

The listed memory of each GPU is close to the size that PyTorch reports (`torch.cuda.mem_get_info`),
which is slightly less than the advertised size. Rates (floating-point operations per second) are
the manufacturers' figures for dense matrix products of bf16 operands that are summed in fp32. The
reports of this package print a GPU's rate, but no prediction uses rates. `fit_serving` computes a
lower bound of a decoding step's time from the GPU's memory bandwidth.
"""

from __future__ import annotations

import difflib
import re
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from ..errors import ExplainError
from ..kernels.device import H200, Gpu, gpu_of, planned_for
from ..report import format_bytes
from .setting import read_memory

LIBRARY_THREADS = 2
"""Number of threads with a cuBLAS workspace: one for forward, one for backward."""


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|geforce|tesla)+", "", plain)


class Card(NamedTuple):
    """One GPU model on the market."""

    name: str  # the manufacturer's name
    gib: float  # memory
    capability: tuple[int, int]
    tflops: float  # rate of bf16 matrix products; 0 if the GPU has none
    gb_per_s: float  # memory bandwidth

    @property
    def key(self) -> str:
        """Return the name of the GPU as the command line expects it, such as "rtx4090"."""
        return _plain(self.name)

    @property
    def memory(self) -> int:
        """Return the memory of the GPU in bytes."""
        return int(self.gib * 2**30)

    @property
    def gpu(self) -> Gpu:
        """Return the features of this GPU that decide which kernels can run."""
        return gpu_of(self.capability)

    def __str__(self) -> str:
        major, minor = self.capability
        products = f"{self.tflops:g} TFLOP/s in bf16" if self.tflops else "no bf16 products"
        return (
            f"{self.name}: {format_bytes(self.memory)}, compute capability {major}.{minor}, "
            f"{products}, {self.gb_per_s:,.0f} GB/s"
        )


CARDS = {
    card.key: card
    for card in (
        Card("RTX 3060", 11.76, (8, 6), 25.6, 360),
        Card("RTX 3080", 9.77, (8, 6), 59.5, 760),
        Card("RTX 3090", 23.69, (8, 6), 71, 936),
        Card("RTX 4060 Ti 16GB", 15.7, (8, 9), 44, 288),
        Card("RTX 4070", 11.73, (8, 9), 58.3, 504),
        Card("RTX 4070 Ti Super", 15.7, (8, 9), 88.2, 672),
        Card("RTX 4080", 15.7, (8, 9), 97.5, 717),
        Card("RTX 4090", 23.65, (8, 9), 165.2, 1008),
        Card("RTX 5060 Ti 16GB", 15.5, (12, 0), 47.4, 448),
        Card("RTX 5070", 11.6, (12, 0), 61.7, 672),
        Card("RTX 5070 Ti", 15.5, (12, 0), 87.9, 896),
        Card("RTX 5080", 15.5, (12, 0), 112.6, 960),
        Card("RTX 5090", 31.36, (12, 0), 209.5, 1792),
        Card("RTX A6000", 47.54, (8, 6), 154.8, 768),
        Card("RTX 6000 Ada", 47.5, (8, 9), 364, 960),
        Card("RTX PRO 6000", 94.9, (12, 0), 503.8, 1792),
        Card("T4", 14.58, (7, 5), 0, 320),
        Card("A10", 22.05, (8, 6), 125, 600),
        Card("A10G", 22.05, (8, 6), 70, 600),
        Card("A40", 44.4, (8, 6), 149.7, 696),
        Card("L4", 22.03, (8, 9), 121, 300),
        Card("L40S", 44.4, (8, 9), 362, 864),
        Card("A100 40GB", 39.39, (8, 0), 312, 1555),
        Card("A100 80GB", 79.15, (8, 0), 312, 2039),
        Card("H100", 79.1, (9, 0), 989, 3350),
        Card("H100 PCIe", 79.1, (9, 0), 756, 2039),
        Card("H200", 139.8, (9, 0), 989, 4800),
        Card("B200", 178.3, (10, 0), 2250, 8000),
    )
}
"""To add a card, add its row; `kernels/_triton/gpus.py` has the features of each capability."""

_SHORT = {"a100": "a10080gb", "h100sxm": "h100", "h100nvl": "h100", "rtx4060ti": "rtx4060ti16gb"}
"""Short names, and the row of each."""


class Target(NamedTuple):
    """The device for which memory is planned: "cuda" or "cpu", and which GPU."""

    device: str = "cuda"  # or "cpu"
    card: Card | None = None  # without a card, a GPU is a Hopper GPU

    @property
    def library(self) -> int:
        """Return the bytes that the GPU's matrix library allocates at its first call and never
        frees.
        """
        return 0 if self.device == "cpu" else LIBRARY_THREADS * self.gpu.library_workspace

    @property
    def gpu(self) -> Gpu:
        """Return the features of the GPU for which memory is planned."""
        return H200 if self.card is None else self.card.gpu

    def planned(self) -> AbstractContextManager[None]:
        """Return a context in which this package chooses the kernels of the planned device.

        The planned device is the one for which memory is planned."""
        return planned_for(torch.device(self.device, 0), self.gpu)


def target_of(device: str, gpu: str | None) -> Target:
    """Return the device for which memory is planned; raise ExplainError if the device does not
    exist."""
    if device not in ("cuda", "cpu"):
        raise ExplainError(f"device is {device!r}; it can be 'cuda' or 'cpu'.")
    if gpu is not None and device == "cpu":
        raise ExplainError(f"gpu is {gpu!r} and device is 'cpu'. Give one of them.")
    return Target(device, None if gpu is None else card_of(gpu))


def card_of(name: str) -> Card:
    """Return the GPU with a given name, such as "rtx4090"; for an unknown name, raise ExplainError,
    which lists the most similar names."""
    plain = _plain(str(name))
    plain = _SHORT.get(plain, plain)
    for key in (plain, f"rtx{plain}"):
        if key in CARDS:
            return CARDS[key]
    # names that begin with the given one, else similar names
    near = [key for key in CARDS if plain and key.removeprefix("rtx").startswith(plain)]
    near = near or difflib.get_close_matches(plain, [*CARDS, *_SHORT], n=3, cutoff=0.6)
    meant = f"Did you mean {', '.join(near)}?" if near else f"It can be {', '.join(CARDS)}."
    raise ExplainError(
        f"gpu is {name!r}, which is no card in the list. {meant} Of another card, give --memory "
        "alone: the plan is then for the kernels of an H100."
    )


def given_memory(memory: str | int | None, gpu: str | None) -> tuple[Card | None, int]:
    """Return the GPU (card) that `gpu` names, or None, and the bytes of memory to plan for.

    These bytes are `memory` or, without `memory`, the memory of the named GPU."""
    card = None if gpu is None else card_of(gpu)
    if memory is not None:
        return card, read_memory(memory)
    if card is None:
        raise ExplainError("Say which GPU: gpu, such as 'rtx4090', or memory, such as '24GB'.")
    return card, card.memory
