"""What a compiled kernel takes of a GPU, read from its code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Return the bytes of stack a kernel uses, which is where spilled registers go."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    listing = subprocess.run(
        [tool, "-res-usage", file], capture_output=True, text=True, check=True
    ).stdout
    return max(int(found) for found in re.findall(r"STACK:(\d+)", listing))
