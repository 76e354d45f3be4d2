"""The table of GPUs: the features of each kind of GPU, and the ops whose speed was measured on it.

A kind of GPU is identified by its vendor together with its compute capability. The vendor is needed
because PyTorch also reports a compute capability for AMD's GPUs, such as 9.4 for an MI300. AMD's
numbers do not have the meaning of NVIDIA's numbers. To add a kind of GPU, add a row to the table
`GPUS`. A GPU without a row is treated as the least capable GPU of its vendor.
"""

from __future__ import annotations

from typing import NamedTuple

NVIDIA = "nvidia"
AMD = "amd"


class Gpu(NamedTuple):
    """The features of a kind of GPU."""

    vendor: str  # `NVIDIA` or `AMD`
    capability: tuple[int, int]  # compute capability
    # the row that the GPU uses in an op's table of tile shapes: "hopper" and "blackwell" for GPUs
    # with these tensor cores, "roomy" and "narrow" for others, by the size of their shared memory
    kind: str = "narrow"
    shared: int = 99 << 10  # bytes of shared memory that a program may take
    # ops whose speed was measured here; "grouped_heads" are PyTorch's own kernels, and
    # "attention_hopper" are the Gluon kernels of attention for Hopper
    measured: frozenset[str] = frozenset()

    @property
    def is_nvidia(self) -> bool:
        """Return whether NVIDIA made the GPU.

        Only then does the compute capability have the meaning that NVIDIA defines.
        """
        return self.vendor == NVIDIA

    @property
    def runs_kernels(self) -> bool:
        """Return whether this package's Triton kernels run on the GPU.

        The kernels are compiled and tested for NVIDIA GPUs only.
        """
        return self.is_nvidia and self.capability >= (8, 0)

    @property
    def is_hopper(self) -> bool:
        """Return whether groups of four warps multiply operands in shared memory, as on Hopper
        GPUs."""
        return self.kind == "hopper"

    @property
    def has_fp8(self) -> bool:
        """Return whether tensor cores can multiply E4M3 numbers (8-bit floats)."""
        return self.is_nvidia and self.capability >= (8, 9)

    @property
    def library_workspace(self) -> int:
        """Return the bytes that PyTorch reserves as cuBLAS's workspace in each thread that calls
        cuBLAS.
        """
        return 32 << 20 if self.capability >= (9, 0) else 2 * 4096 + 8 * 16 << 10

    @property
    def has_descriptors(self) -> bool:
        """Return whether the GPU can load tiles through tensor descriptors."""
        return self.is_nvidia and self.capability >= (9, 0)

    @property
    def starts_early(self) -> bool:
        """Return whether the GPU can start a kernel before the kernels on which it depends have
        ended."""
        return self.is_nvidia and self.capability >= (9, 0)


GPUS = {
    gpu.capability: gpu
    for gpu in (
        Gpu(NVIDIA, (8, 0), "roomy", 163 << 10),
        Gpu(NVIDIA, (8, 9)),
        Gpu(
            NVIDIA,
            (9, 0),
            "hopper",
            227 << 10,
            frozenset({"attention", "attention_hopper", "grouped_heads", "quantized_attention"}),
        ),
        Gpu(NVIDIA, (10, 0), "blackwell", 227 << 10),
        Gpu(NVIDIA, (10, 3), "blackwell", 227 << 10),
    )
}

H200 = GPUS[9, 0]


def gpu_of(capability: tuple[int, int], vendor: str = NVIDIA) -> Gpu:
    """Return the features of a kind of GPU.

    A GPU without a row in the table `GPUS` gets the default values of the fields of `Gpu`.
    """
    found = GPUS.get(capability) if vendor == NVIDIA else None
    # so a GPU of AMD with the numbers 9.0 is not taken for a Hopper GPU
    return found or Gpu(vendor, capability)
