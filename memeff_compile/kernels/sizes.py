"""Sizes in formulas of bytes: numbers, or symbols where they are not known yet."""

from __future__ import annotations

from typing import TypeAlias

import sympy

Size: TypeAlias = sympy.Expr | int
