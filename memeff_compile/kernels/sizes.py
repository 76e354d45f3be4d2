"""The type of sizes in byte formulas: a number, or a symbol if the size is not known yet."""

from __future__ import annotations

from typing import TypeAlias

import sympy

Size: TypeAlias = sympy.Expr | int
