"""torch.compile(model, backend="memeff"): torch.compile with passes that avoid large buffers.

PyTorch finds the backend through the package's entry point. This module imports a public name only
when code first uses the name. The reason: if TORCH_LOGS is set, PyTorch imports this package while
PyTorch itself is still loading.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import compile as compile
    from .backend import reset as reset
    from .distillation import linear_divergence as linear_divergence
    from .errors import CalibrationError as CalibrationError
    from .errors import CodedWeightError as CodedWeightError
    from .errors import DoubleBackwardError as DoubleBackwardError
    from .errors import ExplainError as ExplainError
    from .errors import MemeffError as MemeffError
    from .errors import OptionError as OptionError
    from .errors import ShardedLogitsError as ShardedLogitsError
    from .errors import StaleLogitsError as StaleLogitsError
    from .errors import StrictError as StrictError
    from .errors import TargetRangeError as TargetRangeError
    from .errors import UnsupportedInputError as UnsupportedInputError
    from .errors import VerifyError as VerifyError
    from .functional import linear_cross_entropy as linear_cross_entropy
    from .model.attention.calibrate import calibrate_attention as calibrate_attention
    from .model.attention.calibrate import restart_attention_calls as restart_attention_calls
    from .model.cache.fidelity import fidelity_report as fidelity_report
    from .model.cache.kv_cache import KVCache as KVCache
    from .model.cache.kv_cache import use_kv_cache_ as use_kv_cache_
    from .model.cache.minicache import MiniCache as MiniCache
    from .model.changes import verb_report as verb_report
    from .model.ternary.verbs import pack_ternary_ as pack_ternary_
    from .model.ternary.verbs import ternarize_ as ternarize_
    from .model.undo import undo as undo
    from .model.weights.compress import CompressionReport as CompressionReport
    from .model.weights.compress import compress_ as compress_
    from .model.weights.compress import compression_report as compression_report
    from .model.weights.compress import decompress_ as decompress_
    from .model.weights.compressed_file import load_compressed_ as load_compressed_
    from .model.weights.compressed_file import save_compressed as save_compressed
    from .model.weights.loading import from_pretrained as from_pretrained
    from .model.weights.optim_in_backward import optim_in_backward as optim_in_backward
    from .model.weights.pretrained import MemeffConfig as MemeffConfig
    from .options import Options as Options
    from .passes.graph.base import Decline as Decline
    from .passes.graph.base import Done as Done
    from .passes.graph.base import Gain as Gain
    from .passes.graph.base import GraphPass as GraphPass
    from .passes.graph.editor import Editor as Editor
    from .passes.graph.graph_info import GraphInfo as GraphInfo
    from .planning.caches import explain_cache as explain_cache
    from .planning.explain import Explanation as Explanation
    from .planning.explain import explain as explain
    from .planning.fit import Fit as Fit
    from .planning.fit import fit as fit
    from .planning.serving import ServingFit as ServingFit
    from .planning.serving import fit_serving as fit_serving
    from .report import VerbReport as VerbReport
    from .report import graphs as graphs
    from .report import last_report as last_report

__version__ = "0.1.0"

_NAMES = {
    "backend": "compile reset",
    "distillation": "linear_divergence",
    "errors": (
        "CalibrationError CodedWeightError DoubleBackwardError ExplainError MemeffError "
        "OptionError ShardedLogitsError StaleLogitsError StrictError TargetRangeError "
        "UnsupportedInputError VerifyError"
    ),
    "functional": "linear_cross_entropy",
    "model.attention.calibrate": "calibrate_attention restart_attention_calls",
    "model.cache.fidelity": "fidelity_report",
    "model.cache.kv_cache": "KVCache use_kv_cache_",
    "model.cache.minicache": "MiniCache",
    "model.changes": "verb_report",
    "model.ternary.verbs": "pack_ternary_ ternarize_",
    "model.undo": "undo",
    "model.weights.compress": "CompressionReport compress_ compression_report decompress_",
    "model.weights.compressed_file": "load_compressed_ save_compressed",
    "model.weights.loading": "from_pretrained",
    "model.weights.optim_in_backward": "optim_in_backward",
    "model.weights.pretrained": "MemeffConfig",
    "options": "Options",
    "passes.graph.base": "Decline Done Gain GraphPass",
    "passes.graph.editor": "Editor",
    "passes.graph.graph_info": "GraphInfo",
    "planning.caches": "explain_cache",
    "planning.explain": "Explanation explain",
    "planning.fit": "Fit fit",
    "planning.serving": "ServingFit fit_serving",
    "report": "VerbReport graphs last_report",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it, on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


for _system in import_module(f"{__name__}.system").systems():
    for _module in _system.on_import:
        import_module(f"{__name__}.{_module}")
