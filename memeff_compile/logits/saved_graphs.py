"""Let PyTorch's `aot_compile` save compiled graphs to a file, and load graphs from such a file.

    compiled = torch.compile(model, backend="memeff", fullgraph=True)
    compiled.forward.aot_compile(((x,), {})).save_compiled_function(path)

PyTorch saves the inner compiler's result (the artifact). The file also contains the wrappers that
turn the graph's outputs into the model's outputs, such as the wrappers that create deferred logits
(logits that are computed when first read).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from memeff_compile import compat
from memeff_compile.errors import MemeffError
from memeff_compile.logits.attach import attach, with_missing_outputs
from memeff_compile.logits.recipe import DeferredOutput


@dataclass(frozen=True)
class Around:
    """The wrappers that turn a compiled graph's outputs into the model's outputs.

    The wrappers are saved with the graph, because a process that loads the graph needs them too.
    """

    present: list[bool] | None
    plan: Sequence[DeferredOutput]
    clone_hidden: bool
    unread: Sequence[int]

    def put_around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `compiled`, a compiled graph, so that it returns the model's results.

        The graph leaves out outputs that are None, and the wrapper returns them again. The field
        `plan` lists the outputs that are deferred logits (logits that are computed when first
        read). If `plan` is not empty, the wrapper also creates these logits from hidden states.
        """
        if self.present is not None:
            compiled = with_missing_outputs(compiled, self.present)
        if not self.plan:
            return compiled
        how = {"clone_hidden": self.clone_hidden, "unread": self.unread}
        return attach(compiled, self.plan, **how)  # type: ignore[arg-type]


class SavedGraph:
    """A compiled graph that can be saved, in the form of PyTorch's `SerializableCallable`."""

    def __init__(self, run: Callable[..., Any], inner: Callable[..., Any], around: Around) -> None:
        self.run, self.inner, self.around = run, inner, around

    def __call__(self, *args: object) -> object:
        """Run the graph, and turn its outputs into the model's outputs."""
        return self.run(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: SavedGraph) -> bytes:
        """Return, as bytes, the inner compiler's artifact (its result) and the graph's wrappers.

        The wrappers turn the compiled graph's outputs into the model's outputs.
        """
        try:
            around = pickle.dumps(fn.around)
        except Exception as error:
            raise MemeffError(
                "The compiled graph cannot be saved: the recipe of its deferred logits cannot be "
                f"pickled ({type(error).__name__}: {error}). Compile it with "
                'options={"memeff.logits": "eager"}.'
            ) from error
        versions = compat.op_fingerprint()
        return pickle.dumps((versions, compat.serialized(fn.inner), around))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> SavedGraph:
        """Return a graph from the bytes that another process saved."""
        import_module("memeff_compile.kernels")  # the artifact calls our ops by their names
        versions, artifact, around = pickle.loads(data)
        if versions != compat.op_fingerprint():
            raise MemeffError(
                "The compiled graph was saved by another version of memeff_compile, which has "
                "other operators. Compile and save it again."
            )
        inner, made = compat.deserialized(artifact), pickle.loads(around)
        return cls(made.put_around(inner), inner, made)


def savable(
    run: Callable[..., Any],  # the graph in the wrappers of this process
    inner: Callable[..., Any],  # the result of the inner compiler
    around: Around,
    how: str,  # how the graph is compiled; for the error if it cannot be saved
) -> Callable[..., Any]:
    """Return a `SavedGraph`, which can be saved, if `aot_compile` is running; otherwise return the
    callable `run`."""
    if not compat.is_to_be_saved():
        return run
    if not compat.has_artifact(inner):
        raise MemeffError(
            f"aot_compile was asked to save a graph that is compiled {how}, of which there is no "
            "artifact. Compile it whole, with memeff.inner 'inductor' or 'aot_eager'."
        )
    compat.let_be_saved(SavedGraph)
    return SavedGraph(run, inner, around)
