"""What a page or a notebook shows as printed, without what differs from run to run."""

from __future__ import annotations

import re


def normalised(text: str) -> str:
    """Return printed text without times, other packages' line numbers and Dynamo's node count."""
    text = re.sub(r"\d+ nodes, our passes [\d.]+ m?s\)", "# nodes, our passes # ms)", text)
    text = re.sub(r"(transformers/[\w/]+\.py):\d+", r"\1:#", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
