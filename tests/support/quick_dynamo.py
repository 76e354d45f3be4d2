"""Torch and Dynamo without work that serves only their statistics and messages."""

from __future__ import annotations

import logging
import sys
import traceback
from types import SimpleNamespace
from typing import Any


def measure_nothing() -> None:
    """Keep Dynamo, where it is imported, from timing guards and from writing graphs out.

    It empties the processor's caches before it times the guards of a graph: a fifth of the time of
    a test of a small graph. It formats an unread message on each side effect. pytest adds its
    handlers to each logger that does not propagate records, six times a test, so output for
    listeners, such as the structured trace, is always written. It tokenizes each traced file for
    names of functions in unused messages, and records where each mode of fake tensors was made.
    """
    guards: Any = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        guards.profile_guard_manager = lambda *given: 0.0
    tracing: Any = sys.modules.get("torch._dynamo.symbolic_convert")
    if hasattr(tracing, "get_funcname"):
        tracing.get_funcname = lambda filename, line: None
    config: Any = sys.modules.get("torch._dynamo.config")
    fake: Any = sys.modules.get("torch._subclasses.fake_tensor")
    if hasattr(fake, "traceback"):
        given = {**vars(traceback), "extract_stack": lambda *frame: traceback.StackSummary()}
        fake.traceback = SimpleNamespace(**given)
    if hasattr(config, "side_effect_replay_policy"):
        config.side_effect_replay_policy = "silent"
    logging.getLogger("torch.__trace").propagate = True
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def let_cycles_wait() -> None:
    """Keep Dynamo from collecting cycles after each graph: a test that depends on it collects
    them.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if hasattr(config, "run_gc_after_compile"):
        config.run_gc_after_compile = False


def seed_what_is_there() -> None:
    """Keep torch from keeping the stack of each call that seeds a kind of device not there."""
    torch: Any = sys.modules.get("torch")
    for name in ("cuda", "xpu", "mtia"):
        device = getattr(torch, name, None)
        if device is not None and not device.is_available():
            device.manual_seed_all = lambda seed: None


def read_configs_plainly() -> None:
    """Let transformers' configs be read like other objects, if they have no attribute map.

    Dynamo traces the Python code that they run for each attribute: a fifth of its time for a model.
    A part of that code serves per-layer numbers, which no test has; classes with an attribute map
    keep the rest.
    """
    if "transformers" not in sys.modules:
        return
    from transformers.configuration_utils import PreTrainedConfig

    base: Any = PreTrainedConfig
    read, begin = base.__getattribute__, base.__init_subclass__.__func__
    if "__getattribute__" not in vars(base):
        return
    for each in base.__mro__[:-1]:
        if "__getattribute__" in vars(each):
            del each.__getattribute__

    def keep(kind: Any) -> None:
        if kind.attribute_map:
            kind.__getattribute__ = read
        for each in kind.__subclasses__():
            keep(each)

    def begin_and_keep(kind: Any, *given: Any, **more: Any) -> None:
        begin(kind, *given, **more)
        keep(kind)

    keep(base)
    base.__init_subclass__ = classmethod(begin_and_keep)
