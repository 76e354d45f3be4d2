"""Text found on this machine, a tokenizer trained on it, and its tokens as flat arrays.

    python benchmarks/data/corpus.py --folder benchmarks/generated --megabytes 128

The text comes from installed Python packages: the slice `python` is sources, the slice `other` is C
and C++ headers and prose. Files come in the order of the hash of their path under the packages'
folder, each content once, until the slice has its size; the hash of the content decides whether a
file is for training or for validation. The same installation gives the same tokens, byte for byte.

Imports neither torch nor transformers, so that its processes start at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy
from tokenizers import ByteLevelBPETokenizer, Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import GENERATED

SLICES = {
    "python": {".py", ".pyi"},
    "other": {".h", ".hpp", ".cuh", ".c", ".cpp", ".rst", ".md", ".txt"},
}
SPLITS = ("train", "validation")
END_OF_TEXT = "<|endoftext|>"
SMALLEST, LARGEST = 256, 512 * 1024
"""Bytes of a file: shorter ones have little text, longer ones are mostly generated tables."""


@dataclass(frozen=True)
class Text:
    """One file's text and the split that its content belongs to."""

    content: str
    split: str


def roots() -> list[Path]:
    """Return the folders that hold installed Python packages, each once."""
    found = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    return list(dict.fromkeys(Path(path).resolve() for path in found))


def candidates(slice_name: str, folders: list[Path]) -> list[Path]:
    """Return the slice's files of these folders, ordered by the hash of their relative path."""
    found: dict[Path, str] = {}
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names:
                path = Path(place, name)
                if path.suffix in SLICES[slice_name] and path not in found:
                    found[path] = _digest(str(path.relative_to(folder)).encode())
    return sorted(found, key=lambda path: found[path])


def texts(slice_name: str, folders: list[Path], size: int, share: int) -> Iterator[Text]:
    """Yield distinct texts of a slice, `size` bytes in all; one in `share` is for validation."""
    seen: set[str] = set()
    total = 0
    for path in candidates(slice_name, folders):
        try:
            if not SMALLEST <= path.stat().st_size <= LARGEST:
                continue
            raw = path.read_bytes()
            content = raw.decode()
        except (OSError, UnicodeDecodeError):
            continue
        digest = _digest(raw)
        if digest in seen:
            continue
        seen.add(digest)
        is_validation = int(digest, 16) % share == 0
        yield Text(content, SPLITS[is_validation])
        total += len(raw)
        if total >= size:
            return


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def train_tokenizer(found: dict[str, list[Text]], vocabulary: int, size: int) -> Tokenizer:
    """Train a byte-level BPE on the first `size` bytes of training text, half from each slice."""
    lines: list[str] = []
    for texts_of_slice in found.values():
        left = size // len(found)
        for text in texts_of_slice:
            if left <= 0:
                break
            if text.split == "train":
                lines += text.content.splitlines(keepends=True)
                left -= len(text.content)
    trainer = ByteLevelBPETokenizer()
    trainer.train_from_iterator(
        lines, vocabulary, special_tokens=[END_OF_TEXT], show_progress=False
    )
    return Tokenizer.from_str(trainer.to_str())


_tokenizer: Tokenizer | None = None


def _load(path: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = Tokenizer.from_file(path)


def _encode(contents: list[str]) -> bytes:
    """Return the tokens of some texts, each followed by the end-of-text token."""
    assert _tokenizer is not None
    end = _tokenizer.token_to_id(END_OF_TEXT)
    parts = []
    for encoded in _tokenizer.encode_batch_fast(contents, add_special_tokens=False):
        parts += [numpy.array(encoded.ids, dtype=numpy.uint16), numpy.array([end], numpy.uint16)]
    return numpy.concatenate(parts).tobytes()


def _batches(contents: list[str], size: int = 1 << 20) -> Iterator[list[str]]:
    batch: list[str] = []
    held = 0
    for content in contents:
        batch.append(content)
        held += len(content)
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def build(
    folder: Path,
    folders: list[Path],
    megabytes: dict[str, float],
    vocabulary: int,
    sample: float,
    share: int,
    processes: int,
) -> dict[str, Any]:
    """Write tokenizer.json, <slice>-<split>.u16 and, last, corpus.json; return its content.

    Args:
        folder: where to write.
        folders: where text is looked for.
        megabytes: text of each slice, at most.
        vocabulary: tokens, the end-of-text token included; at most 65536.
        sample: megabytes of text that the tokenizer is trained on.
        share: one file in so many is for validation.
        processes: workers that encode.
    """
    if vocabulary > 65536:
        raise ValueError(f"vocabulary is {vocabulary}; tokens are stored in 16 bits: use 65536")
    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        name: list(texts(name, folders, int(size * 1e6), share)) for name, size in megabytes.items()
    }
    seconds = {"read": time.perf_counter() - started}
    tokenizer = train_tokenizer(found, vocabulary, int(sample * 1e6))
    tokenizer.save(str(folder / "tokenizer.json"))
    seconds["tokenizer"] = time.perf_counter() - started - sum(seconds.values())
    facts: dict[str, Any] = {"vocabulary": tokenizer.get_vocab_size(), "slices": {}}
    facts["tokenizer"] = _digest((folder / "tokenizer.json").read_bytes())
    pool = ProcessPoolExecutor(
        processes, get_context("spawn"), _load, (str(folder / "tokenizer.json"),)
    )
    with pool:
        for name, texts_of_slice in found.items():
            for split in SPLITS:
                contents = [text.content for text in texts_of_slice if text.split == split]
                path = folder / f"{name}-{split}.u16"
                with path.open("wb") as stream:
                    for part in pool.map(_encode, _batches(contents)):
                        stream.write(part)
                facts["slices"][f"{name}-{split}"] = {
                    "files": len(contents),
                    "bytes": sum(len(content.encode()) for content in contents),
                    "tokens": path.stat().st_size // 2,
                    "digest": _digest(path.read_bytes()),
                }
    seconds["tokens"] = time.perf_counter() - started - sum(seconds.values())
    facts["seconds"] = {name: round(value, 1) for name, value in seconds.items()}
    (folder / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def main() -> None:
    """Build the corpus in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=GENERATED)
    parser.add_argument("--megabytes", type=float, default=128, help="text of the slice `python`")
    parser.add_argument("--other-megabytes", type=float, default=48, help="of the slice `other`")
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--sample-megabytes", type=float, default=24, help="for the tokenizer")
    parser.add_argument("--validation-share", type=int, default=32, help="one file in so many")
    parser.add_argument("--root", type=Path, nargs="+", help="folders to read instead")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    facts = build(
        given.folder,
        given.root or roots(),
        {"python": given.megabytes, "other": given.other_megabytes},
        given.vocabulary,
        given.sample_megabytes,
        given.validation_share,
        given.processes,
    )
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
