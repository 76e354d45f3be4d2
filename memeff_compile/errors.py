"""Every exception class of memeff_compile.

Each error message names the input, the requirement and a remedy. Every error class derives from
`MemeffError` and from the built-in class that fits the error, such as `ValueError`. So code
which catches built-in errors keeps working. This module has no imports, because it is imported
while torch itself may still be starting.
"""

from __future__ import annotations

__all__ = [
    "CalibrationError",
    "CodedWeightError",
    "DoubleBackwardError",
    "ExplainError",
    "MemeffError",
    "OptionError",
    "ShardedLogitsError",
    "StaleLogitsError",
    "StrictError",
    "TargetRangeError",
    "UnsupportedInputError",
    "VerifyError",
]


class MemeffError(Exception):
    """Base class of every error that memeff_compile raises on purpose."""


class OptionError(MemeffError, ValueError):
    """An option has an unknown name, a wrong type or a value out of range."""


class StrictError(MemeffError, RuntimeError):
    """A pass named in `memeff.strict` did not apply; the message lists the reasons."""


class StaleLogitsError(MemeffError, RuntimeError):
    """Deferred logits (computed on first use) were read after a tensor from which they are computed
    had changed in place.

    Such tensors are the hidden states and the weight of the output projection, among others. The
    error is also raised if the memory of such a tensor was freed or replaced.
    """


class ShardedLogitsError(MemeffError, RuntimeError):
    """Deferred logits of an output projection that is split over ranks were read without
    `full_tensor()`, or received a gradient.

    Deferred logits are computed on first use. If the output projection is split over ranks, all
    ranks must call `full_tensor()` to read the logits.
    """


class TargetRangeError(MemeffError, IndexError):
    """A target or class index is outside of the vocabulary, and is not the ignored index."""


class DoubleBackwardError(MemeffError, RuntimeError):
    """A second derivative was requested of an op that has only a first derivative."""


class UnsupportedInputError(MemeffError, TypeError):
    """An op was called with a dtype, layout or setting that it does not support."""


class CodedWeightError(MemeffError, RuntimeError):
    """Code tried to change a compressed weight in place, or a file of compressed weights cannot be
    used."""


class VerifyError(MemeffError, RuntimeError):
    """The rewritten graph gave a different result than the original one, and `memeff.verify` is
    'raise'."""


class ExplainError(MemeffError, ValueError):
    """`explain` (the prediction of memory) cannot use a setting, or cannot read, build or capture
    the model."""


class CalibrationError(MemeffError, ValueError):
    """`calibrate_attention` or `fidelity_report` got no inputs or an invalid argument.

    `calibrate_attention` also raises this error if the model called no attention for which the
    calibration can measure the error of low-bit formats.
    """


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with the second line if the first one announces
    it by a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):
        return " ".join(lines[:2])
    return lines[0] if lines else "no message"
