"""The two verbs of the package: compile with options checked now, and reset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, overload

from memeff_compile.errors import OptionError
from memeff_compile.options import Options, key_of
from memeff_compile.report import clear

__all__ = ["compile", "reset"]

Compilable = TypeVar("Compilable", bound=Callable[..., Any])


@overload
def compile(
    model: Compilable,
    *,
    mode: str | None = None,
    options: Mapping[str, object] | Options | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    disable: bool = False,
    **settings: object,
) -> Compilable: ...


@overload
def compile(
    model: None = None,
    *,
    mode: str | None = None,
    options: Mapping[str, object] | Options | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    disable: bool = False,
    **settings: object,
) -> Callable[[Compilable], Compilable]: ...


def compile(
    model: Compilable | None = None,
    *,
    mode: str | None = None,
    options: Mapping[str, object] | Options | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    disable: bool = False,
    **settings: object,
) -> Compilable | Callable[[Compilable], Compilable]:
    """Compile with `backend="memeff"`, checking the options now and not at the first call.

    `torch.compile` does not look at the options of a backend until the first call, and refuses
    `mode` next to `options`; this does neither.

    Args:
        model: A module or function; leave it out to use the call as a decorator.
        mode: An Inductor mode, such as "reduce-overhead".
        options: As in `torch.compile(options=...)`, or an `Options`.
        dynamic, fullgraph, disable: As in `torch.compile`.
        **settings: Options of ours by keyword: `logits="eager"` is `memeff.logits`.

    Returns:
        What `torch.compile` returns.

    Raises:
        OptionError: An option has an unknown name, a wrong type or a value out of range.

    Example:
        >>> compiled = memeff_compile.compile(model, logits="eager")  # doctest: +SKIP
    """
    checked = _parse(mode, options, settings)

    import torch

    wrapped = torch.compile(
        model,
        backend="memeff",
        options=checked.to_dict() or None,
        dynamic=dynamic,
        fullgraph=fullgraph,
        disable=disable,
    )
    return cast("Compilable | Callable[[Compilable], Compilable]", wrapped)


def _parse(
    mode: str | None,
    options: Mapping[str, object] | Options | None,
    settings: Mapping[str, object],
) -> Options:
    given = options.to_dict() if isinstance(options, Options) else options
    named = {key_of(name): value for name, value in settings.items()}
    if not isinstance(given, Mapping):
        return Options.parse(mode, named if given is None else given)
    twice = sorted(key for key in named if key in given)
    if twice:
        raise OptionError(f"{twice[0]} is given by keyword and in options; give it once.")
    return Options.parse(mode, {**given, **named})


def reset() -> None:
    """Forget every compiled graph and every report; calls `torch._dynamo.reset()`."""
    import torch

    torch._dynamo.reset()
    clear()
