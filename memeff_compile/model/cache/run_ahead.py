"""Let generate() start a decoding step before it checks whether all sequences have ended.

The CPU prepares a decoding step while the GPU runs the previous one. After each token, generate()
checks whether all sequences have ended. Before the check, the CPU waits for the GPU. During the
check, the GPU waits for the CPU. transformers can check after the next step has started
(`DeferredStopCheck`) and discard the extra step, but it does so only on Apple GPUs (`mps`).
With this module, transformers also checks one step late on CUDA GPUs, for caches that
`use_kv_cache_` creates. Other caches are not affected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memeff_compile import compat

DEVICES: tuple[str, ...] = ("cuda",)

_MARK = "_may_run_ahead"


def let_run_ahead(cache: object) -> None:
    """Let generate() check one step late whether all sequences have ended, in calls that use the
    given cache."""
    from transformers.generation import utils  # slow to import; who generates has it

    check: Any = getattr(utils, "DeferredStopCheck", None)
    if check is None:
        return
    if not hasattr(check.is_supported, _MARK):
        check.is_supported = staticmethod(_also_ours(check.is_supported))
    setattr(cache, _MARK, True)


def _also_ours(usual: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(usual)
    def is_supported(
        device: torch.device,
        cache: object,
        cache_is_returned: bool,
        *args: object,
        **kwargs: object,
    ) -> bool:
        if usual(device, cache, cache_is_returned, *args, **kwargs):
            return True
        is_ours = device.type in DEVICES and hasattr(cache, _MARK) and not cache_is_returned
        return is_ours and may_be_late(compat.names_around())

    setattr(is_supported, _MARK, True)
    return is_supported


def may_be_late(loop: Mapping[str, Any]) -> bool:
    """Return whether one extra decoding step has no effect that the user can observe.

    The answer depends on `loop`, the local variables of generate(). If generation ends only at a
    given length, there is no extra step. Otherwise, an extra step could have effects that the user
    sees. An extra step may draw one more random number. An extra step also calls logits processors
    and stopping criteria, which may have a state, once more.
    """
    names = ("stopping_criteria", "logits_processor", "generation_config", "synced_gpus")
    if not all(name in loop for name in names) or loop["synced_gpus"]:
        return False
    criteria, processors, config, _ = (loop[name] for name in names)
    if [type(each).__name__ for each in criteria] == ["MaxLengthCriteria"]:
        return all(map(_is_theirs, criteria))
    asked = (*criteria, *processors)
    return not config.do_sample and not config.is_assistant and all(map(_is_theirs, asked))


def _is_theirs(asked: object) -> bool:
    """Return whether a logits processor or stopping criterion belongs to transformers and calls no
    user function."""
    kind = type(asked)
    is_theirs = kind.__module__.partition(".")[0] == "transformers"
    return is_theirs and kind.__name__ != "PrefixConstrainedLogitsProcessor"
