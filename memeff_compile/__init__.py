"""torch.compile(model, backend="memeff"): the usual compiler, without the buffers nobody reads.

Nothing here needs to be imported to use the backend: torch finds it through its entry point.
Every public name is loaded on first use, so importing this package imports neither torch nor
triton. That matters because TORCH_LOGS="+memeff_compile" makes torch import it while torch
itself is still starting.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memeff_compile.api import compile as compile
    from memeff_compile.api import reset as reset
    from memeff_compile.errors import OptionError as OptionError
    from memeff_compile.explanation import Explanation as Explanation
    from memeff_compile.explanation import explain as explain
    from memeff_compile.functional import linear_cross_entropy as linear_cross_entropy
    from memeff_compile.model.calibrate import calibrate_attention as calibrate_attention
    from memeff_compile.model.calibrate import restart_attention_calls as restart_attention_calls
    from memeff_compile.model.compress import CompressionReport as CompressionReport
    from memeff_compile.model.compress import compress_ as compress_
    from memeff_compile.model.compress import decompress_ as decompress_
    from memeff_compile.model.compressed_file import load_compressed_ as load_compressed_
    from memeff_compile.model.compressed_file import save_compressed as save_compressed
    from memeff_compile.model.kv_cache import KVCache as KVCache
    from memeff_compile.model.kv_cache import use_kv_cache_ as use_kv_cache_
    from memeff_compile.model.optim_in_backward import optim_in_backward as optim_in_backward
    from memeff_compile.model.ternary import pack_ternary_ as pack_ternary_
    from memeff_compile.model.ternary import ternarize_ as ternarize_
    from memeff_compile.options import Options as Options
    from memeff_compile.report import graphs as graphs
    from memeff_compile.report import last_report as last_report

__version__ = "0.1.0"

_HOME = {
    "CompressionReport": "model.compress",
    "Explanation": "explanation",
    "KVCache": "model.kv_cache",
    "OptionError": "errors",
    "Options": "options",
    "calibrate_attention": "model.calibrate",
    "compile": "api",
    "compress_": "model.compress",
    "decompress_": "model.compress",
    "explain": "explanation",
    "graphs": "report",
    "last_report": "report",
    "linear_cross_entropy": "functional",
    "load_compressed_": "model.compressed_file",
    "optim_in_backward": "model.optim_in_backward",
    "pack_ternary_": "model.ternary",
    "reset": "api",
    "restart_attention_calls": "model.calibrate",
    "save_compressed": "model.compressed_file",
    "ternarize_": "model.ternary",
    "use_kv_cache_": "model.kv_cache",
}

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
