"""Compiled Triton kernels are saved with PyTorch's cache artifacts and loaded in another process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memeff_compile import compat
from memeff_compile.kernels._triton import stored

cache = pytest.importorskip("triton.runtime.cache", reason="it stores kernels")

KEY = "0a" * 32
FILES = {"kernel.json": b'{"name": "kernel"}', "kernel.cubin": bytes(range(256))}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that makes the caches empty, as in another process."""

    def other(name: str) -> Path:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / name / "triton"))
        monkeypatch.setattr(stored, "_recorded", set())
        monkeypatch.setattr(stored, "_unpacked", set())
        return tmp_path / name

    return other


def test_a_kernel_that_ran_is_in_the_artifacts_and_found_by_triton(folder: Any) -> None:
    from torch.compiler._cache import CacheArtifactManager

    with CacheArtifactManager.with_fresh_cache():
        folder("first")
        manager = cache.get_cache_manager(KEY)
        group = {name: manager.put(data, name) for name, data in FILES.items()}
        manager.put_group("kernel.json", group)
        for _ in range(2):
            stored.record(SimpleNamespace(hash=KEY))
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        data, info = saved
        assert len(info.autotune_artifacts) == 1
        second = folder("second")
        torch.compiler.load_cache_artifacts(data)
        assert cache.get_cache_manager(KEY).get_group("kernel.json") is None
        for _ in range(2):
            stored.unpack()
        found = cache.get_cache_manager(KEY).get_group("kernel.json")
        assert {name: Path(path).read_bytes() for name, path in found.items()} == FILES
        assert all(second in Path(path).parents for path in found.values())


def test_a_kernel_that_triton_has_is_not_overwritten(folder: Any) -> None:
    folder("only")
    manager = cache.get_cache_manager(KEY)
    manager.put_group("kernel.json", {"kernel.json": manager.put(b"{}", "kernel.json")})
    path = folder("only") / "memeff_compile" / "x.json"
    path.parent.mkdir()
    files = {"kernel.json": stored._text_of(b"other")}
    path.write_text(json.dumps({"kernel": KEY, "files": files}))
    assert list(compat.loaded_artifacts()) == ["x"]
    stored.unpack()
    (found,) = cache.get_cache_manager(KEY).get_group("kernel.json").values()
    assert Path(found).read_bytes() == b"{}"


def test_what_cannot_be_saved_or_read_is_left_out(folder: Any) -> None:
    path = folder("only") / "memeff_compile" / "broken.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    stored.unpack()
    stored.record(None)  # what Triton's interpreter returns
    stored.record(SimpleNamespace(hash="no hash"))
