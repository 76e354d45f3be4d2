"""Tasks that need no download: generated ones, and some from text that comes with Python.

An item is a text that the model reads first, a question, and answers. Two kinds of task are judged
by one forward pass. In an *exact* task an item is right if greedy decoding would give the answer
token by token. In a *choice* task an item is right if the first answer has the largest
log-probability per character. In a *code* task the model writes lines, which must parse.

The first text is longer than the tokens that a cache keeps exact, so that questions and answers
read what a cache has coded. All rows of a task have one length: the first text loses its beginning.
Several questions can be asked about one text, which a model then reads only once.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import json
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.quality import texts

CHOICES = 4
NOUNS = (
    "anchor apple arrow barn basket bell bird boat bottle bridge brush bucket button cabin camera "
    "candle carpet castle chair cherry clock cloud coat corn cup curtain desk door drum eagle "
    "engine feather field flag flower forest fork garden gate glass glove hammer harbor hat hill "
    "horse island jacket kettle key kitchen knife ladder lake lamp leaf lemon letter lion mirror "
    "moon mountain needle nest ocean onion orange paper pencil piano pillow plate pond potato "
    "rabbit ribbon river road robot rope sail salt sand school shell ship shirt silver spoon star "
    "stone street sugar table tiger tower train tree tunnel valley village violin wagon wall wheel "
    "window winter wolf wood wool"
).split()
COLOURS = "amber black blue brown gold gray green pink purple red silver white yellow".split()
PEOPLE = "Anna Ben Carla David Emma Frank Grace Henry Julia Kevin Laura Maria Peter Sam".split()
PLACES = (
    "Athens Berlin Boston Cairo Chicago Delhi Dublin Geneva Havana Lima Lisbon London Madrid Miami "
    "Milan Moscow Nairobi Oslo Paris Prague Quito Rome Seoul Sydney Tokyo Vienna Warsaw Zurich"
).split()
WRITTEN = 40
"""Tokens that a model writes in a code task."""
CHARACTERS = 6
"""Of a token, at the most, over a text before a question."""


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
        before: the text that is read first; more than enough, its beginning is cut.
        question: the end of the prompt.
        answers: the right one first; one alone in exact tasks, the source's own in code tasks.
        told: lines put into `before`, after the share `depth` of it, at the next end of a line.
    """

    before: str
    question: str
    answers: tuple[str, ...]
    told: str = ""
    depth: float = 0.0


Items = Callable[[random.Random, int], Iterator[Item]]


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        name: in rows.
        kind: "exact", "choice" or "code".
        make: yields items without end, from a random generator and how many characters the text
            before must have.
        length: tokens of a row.
        count: items of a run.
        chance: the share of right items of a model that guesses.
        questions: how many items have the same text before, unless a run wants another number.
        is_apart: whether each item needs a text before of its own, which only its answers share.
    """

    name: str
    kind: str
    make: Items
    length: int
    count: int
    chance: float = 0.0
    questions: int = 1
    is_apart: bool = False


class Rows(NamedTuple):
    """Items as tokens.

    Attributes:
        ids: (items x answers, length); rows that are shorter repeat their last token.
        ends: tokens of each row without the repeated ones.
        answers: how many tokens at the end of each row are the answer.
        characters: of each answer.
        first: tokens of each row that come before any question.
        each: answers of an item.
        questions: of each item.
        group: how many rows, one after the other, have their first tokens in common.
    """

    ids: Tensor
    ends: list[int]
    answers: list[int]
    characters: list[int]
    first: int
    each: int
    questions: list[str]
    group: int = 1


def rows_of(
    tokenizer: Any, task: Task, seed: int, count: int | None = None, questions: int | None = None
) -> Rows:
    """Return the rows of a task's first items under a seed, so many questions about each text."""
    draw = random.Random(f"{task.name}, {seed}")
    start = list(tokenizer("").input_ids)
    made, wanted = task.make(draw, CHARACTERS * task.length), count or task.count
    asked = 1 if task.kind == "code" else questions or task.questions
    length = task.length - (WRITTEN if task.kind == "code" else 0)
    found, ends, answers, characters, named, longest = [], [], [], [], [], 0

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    while len(named) < wanted:
        group = _distinct(made, 1 if task.is_apart else min(asked, wanted - len(named)))
        named += [item.question for item in group]
        both = [[(ids_of(i.question), ids_of(answer)) for answer in i.answers] for i in group]
        sizes = [len(q) + len(a) for pairs in both for q, a in pairs]
        longest = max(longest, *sizes)
        before = ids_of(group[0].before)
        told = [(item.depth, ids_of(item.told)) for item in group if item.told]
        characters += [len(answer) for item in group for answer in item.answers]
        for question, answer in (pair for pairs in both for pair in pairs):
            after = max(sizes) if asked > 1 else len(question) + len(answer)
            room = length - len(start) - sum(len(line) for _, line in told) - after
            if not 0 < room <= len(before):
                raise SystemExit(f"{task.name}: {len(before)} tokens of text, {room} are needed")
            row = [*start, *_with_lines(tokenizer, before[-room:], told), *question, *answer]
            ends.append(len(row))
            answers.append(len(answer))
            found.append(row + row[-1:] * (length - len(row)))
    first = length - (0 if task.kind == "code" else longest)
    each = len(found) // len(named)
    group = 1 if asked == 1 else each if task.is_apart else each * min(asked, wanted)
    return Rows(torch.tensor(found), ends, answers, characters, first, each, named, group)


def _distinct(made: Iterator[Item], count: int) -> list[Item]:
    found: dict[str, Item] = {}
    while len(found) < count:
        item = next(made)
        found.setdefault(item.question, item)
    return list(found.values())


def _with_lines(tokenizer: Any, ids: list[int], told: list[tuple[float, list[int]]]) -> list[int]:
    """Return tokens with lines put in, each after a share of them, at the next end of a line."""
    size = len(ids)
    for depth, line in sorted(told, reverse=True):  # from the end, so that places stay
        at = _end_of_line(tokenizer, ids, int(depth * size))
        ids = [*ids[:at], *line, *ids[at:]]
    return ids


def _end_of_line(tokenizer: Any, ids: list[int], at: int) -> int:
    for place in range(at, len(ids)):
        if "\n" in tokenizer.decode(ids[place : place + 1]):
            return place + 1
    return at


def digest(items: Rows) -> str:
    """Return a digest of the tokens that a model reads."""
    return texts.digest(items.ids)


def text_digest(task: Task, seed: int, count: int = 8) -> str:
    """Return a digest of a task's first items as text, before any tokenizer."""
    made = task.make(random.Random(f"{task.name}, {seed}"), 400)
    shown = [
        [i.before, i.question, *i.answers, i.told, f"{i.depth:.6f}"] for i in take(made, count)
    ]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:12]


def take(made: Iterator[Item], count: int) -> list[Item]:
    """Return the first items."""
    return [next(made) for _ in range(count)]


# Generated tasks


def shots(line: Callable[[random.Random], tuple[str, str]], heading: str = "") -> Items:
    """Return items whose text before is solved questions of the same kind."""

    def make(draw: random.Random, characters: int) -> Iterator[Item]:
        while True:
            parts, size = [], 0
            while size < characters:
                parts.append("".join(line(draw)))
                size += len(parts[-1])
            question, answer = line(draw)
            yield Item(heading + "".join(parts), question, (answer,))

    return make


def shots_of_choices(line: Callable[[random.Random], tuple[str, tuple[str, ...]]]) -> Items:
    """Return items whose text before is solved questions, with wrong answers to the last one."""

    def make(draw: random.Random, characters: int) -> Iterator[Item]:
        while True:
            parts, size = [], 0
            while size < characters:
                question, answers = line(draw)
                parts.append(question + answers[0])
                size += len(parts[-1])
            yield Item("".join(parts), *line(draw))

    return make


def likely_sum(draw: random.Random) -> tuple[str, tuple[str, ...]]:
    """Return a sum of two digits and four results, the first of which is right."""
    a, b = draw.randrange(1, 10), draw.randrange(1, 10)
    near = [a + b + off for off in (-3, -2, -1, 1, 2, 3) if a + b + off > 1]
    wrong = draw.sample(near, CHOICES - 1)
    return f"{a} + {b} =", tuple(f" {each}\n" for each in (a + b, *wrong))


def sum_of(largest: int) -> Callable[[random.Random], tuple[str, str]]:
    """Return a maker of sums of two numbers."""

    def line(draw: random.Random) -> tuple[str, str]:
        a, b = draw.randrange(1, largest), draw.randrange(1, largest)
        return f"{a} + {b} =", f" {a + b}\n"

    return line


def difference_of(largest: int) -> Callable[[random.Random], tuple[str, str]]:
    """Return a maker of differences that are not negative."""

    def line(draw: random.Random) -> tuple[str, str]:
        a, b = sorted(draw.randrange(1, largest) for _ in range(2))
        return f"{b} - {a} =", f" {b - a}\n"

    return line


def story(draw: random.Random) -> tuple[str, str]:
    """Return a word problem of one or two steps."""
    who, what = draw.choice(PEOPLE), draw.choice(NOUNS)
    has, more = draw.randrange(2, 10), draw.randrange(2, 10)
    question = (
        f"Question: {who} has {has} {what}s and buys {more} more. "
        f"How many {what}s does {who} have now?\nAnswer:"
    )
    return question, f" {has + more}\n\n"


def copied(draw: random.Random) -> tuple[str, str]:
    """Return words and the same words again."""
    words = draw.sample(NOUNS, 8)
    return f"Words: {' '.join(words)}\nCopy:", f" {' '.join(words)}\n"


def sorted_words(count: int) -> Callable[[random.Random], tuple[str, str]]:
    """Return a maker of words and the same words in alphabetical order."""

    def line(draw: random.Random) -> tuple[str, str]:
        words = draw.sample(NOUNS, count)
        return f"Words: {' '.join(words)}\nSorted:", f" {' '.join(sorted(words))}\n"

    return line


def sorted_digits(count: int) -> Callable[[random.Random], tuple[str, str]]:
    """Return a maker of digits and the same digits in order."""

    def line(draw: random.Random) -> tuple[str, str]:
        digits = draw.sample(range(1, 10), count)
        in_order = " ".join(map(str, sorted(digits)))
        return f"{' '.join(map(str, digits))} ->", f" {in_order}\n"

    return line


def reversed_words(draw: random.Random) -> tuple[str, str]:
    """Return three words and the same words backwards."""
    words = draw.sample(NOUNS, 3)
    return f"Words: {' '.join(words)}\nReversed:", f" {' '.join(words[::-1])}\n"


def key_values(draw: random.Random, characters: int) -> Iterator[Item]:
    """Yield lists of keys with values, and one key that is asked for."""
    while True:
        lines, size = [], 0
        while size < characters:
            colour, noun = draw.choice(COLOURS), draw.choice(NOUNS)
            lines.append(f"{colour} {noun}: {draw.randrange(1000, 10_000)}\n")
            size += len(lines[-1])
        place, thing = draw.choice(PLACES), draw.choice(NOUNS)
        key, value = f"{place} {thing}", draw.randrange(1000, 10_000)
        told = f"{key}: {value}\n"
        yield Item("".join(lines), f"\nThe value of {key} is asked.\n{key}:", (f" {value}\n",),
                   told, draw.random() * 0.9)  # fmt: skip


def needles(draw: random.Random, characters: int) -> Iterator[Item]:
    """Yield prose with one sentence about a place, and a question about it."""
    prose = texts.text_of("prose")
    twice = prose[-characters:] + prose  # indented text has few tokens: more of it comes before
    while True:
        at = draw.randrange(max(1, len(prose) - characters))
        place, number = draw.choice(PLACES), draw.randrange(1000, 10_000)
        told = f"\nThe secret number of {place} is {number}.\n\n"
        question = f"\n\nQuestion: What is the secret number of {place}?\n"
        question += f"Answer: The secret number of {place} is"
        yield Item(twice[at : at + 2 * characters], question, (f" {number}",), told,
                   draw.random() * 0.9)  # fmt: skip


# Tasks from packaged text


@functools.cache
def sentences() -> list[list[str]]:
    """Return the sentences of each topic of Python's reference, without code and tables."""
    from pydoc_data import topics

    found = []
    for topic in sorted(topics.topics):
        own = []
        for paragraph in re.split(r"\n\s*\n", topics.topics[topic]):
            flat = " ".join(paragraph.split())
            if re.search(r"[*`|=<>\[\]{}\\]|::|--|\.\. ", flat) or paragraph.startswith("  "):
                continue
            own += [s for s in re.split(r"(?<=[.])\s+(?=[A-Z])", flat) if 40 <= len(s) <= 200]
        if len(own) >= 8:
            found.append(own)
    return found


def following(draw: random.Random, characters: int) -> Iterator[Item]:
    """Yield prose and four sentences, the first of which follows."""
    topics = sentences()
    whole = [(t, s) for t, own in enumerate(topics) for s in own]
    while True:
        at = draw.randrange(len(whole) - 1)
        topic, _ = whole[at]
        if whole[at + 1][0] != topic:
            continue
        others = [s for t, s in draw.sample(whole, 40) if t != topic][: CHOICES - 1]
        parts, size, place = [], 0, at
        while size < characters:
            parts.append(whole[place][1])
            size += len(parts[-1])
            place -= 1
        before = " ".join(parts[::-1])
        yield Item(before[: -len(whole[at][1])], whole[at][1],
                   tuple(f" {s}" for s in (whole[at + 1][1], *others)))  # fmt: skip


MODULES = (
    "array base64 bisect bz2 calendar cmath codecs collections colorsys configparser copy csv "
    "datetime decimal difflib email enum fileinput fnmatch fractions functools getpass gettext "
    "glob gzip hashlib heapq html inspect io itertools json locale logging lzma math mimetypes "
    "numbers operator os os.path pathlib pickle platform pprint queue random re sched secrets "
    "shelve shlex shutil signal socket statistics string struct subprocess sys tarfile tempfile "
    "textwrap threading time timeit token tokenize traceback types unicodedata urllib.parse uuid "
    "warnings wave weakref zipfile zlib"
).split()


@functools.cache
def definitions() -> list[tuple[str, str]]:
    """Return names of the standard library with the first sentence of their docstrings."""
    found: dict[str, str] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for attribute in sorted(vars(module)):
            if attribute.startswith("_"):
                continue
            own = getattr(module, attribute)
            if not (inspect.isroutine(own) or inspect.isclass(own)):
                continue
            text = inspect.getdoc(own) or ""
            first = " ".join(text.split("\n\n")[0].split())
            is_sentence = 30 <= len(first) <= 120 and first[0].isupper() and first.endswith(".")
            tells = attribute.lower() in first.lower() or first in found.values()
            if is_sentence and not tells:
                found[f"{name}.{attribute}"] = first
    return list(found.items())


def defined(draw: random.Random, characters: int) -> Iterator[Item]:
    """Yield a name of the standard library and four descriptions, the first of which is its own."""
    known = definitions()
    while True:
        one, *others = draw.sample(known, CHOICES)
        parts, size = [], 0
        while size < characters:
            name, text = draw.choice(known)
            if name in [one[0], *(o[0] for o in others)]:
                continue
            parts.append(f"{name}: {text}\n")
            size += len(parts[-1])
        yield Item("".join(parts), f"{one[0]}:", tuple(f" {t}" for _, t in (one, *others)))


def functions(draw: random.Random, characters: int) -> Iterator[Item]:
    """Yield source of the standard library that ends with a function's head and docstring."""
    source = texts.text_of("source")
    heads = [m for m in re.finditer(r'\ndef \w+\([^()]*\):\n    """[^"\n]+"""\n', source)
             if m.start() > characters]  # fmt: skip
    while True:
        head = draw.choice(heads)
        start, end = head.start() + 1, head.end()
        yield Item(source[max(0, start - characters) : start], source[start:end], ("",))


GOES_ON = ("never closed", "expected an indented block", "unterminated triple", "EOF")
"""Parts of messages about a text that ends too early."""


def parses(head: str, written: str) -> bool:
    """Say whether the lines that a model wrote after a function's head are Python.

    The last line, which may be cut, does not count, nor does the end of a statement that goes on.
    At least one statement must follow the docstring.
    """
    lines = written.split("\n")[:-1]
    own = []
    for line in lines:
        if line.strip() and not line.startswith((" ", "\t", "#")):
            break  # the function is over
        own.append(line)
    while own:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(head + "\n".join(own) + "\n")
        except (SyntaxError, ValueError) as problem:
            at = getattr(problem, "lineno", 0) or 0
            is_last = at >= head.count("\n") + len(own) and len(own) > 1
            if not (is_last or any(part in str(problem) for part in GOES_ON)):
                return False
            own.pop()
            continue
        (function,) = tree.body
        return isinstance(function, ast.FunctionDef) and len(function.body) > 1
    return False


SHORT = 448
TASKS = (
    Task("addition", "exact", shots(sum_of(100)), SHORT, 128),
    Task("addition, likeliest of 4", "choice", shots_of_choices(likely_sum), SHORT, 96, 0.25),
    Task("word problems", "exact", shots(story), SHORT, 128),
    Task("copying", "exact", shots(copied), SHORT, 128),
    Task("sorting 3 digits", "exact", shots(sorted_digits(3)), SHORT, 128),
    Task("sorting 5 digits", "exact", shots(sorted_digits(5)), SHORT, 128),
    Task("next sentence", "choice", following, SHORT, 96, 0.25, is_apart=True),
    Task("definitions", "choice", defined, SHORT, 96, 0.25, is_apart=True),
    Task("key-value, 2k", "exact", key_values, 2048, 64),
    Task("needles, 2k", "exact", needles, 2048, 64),
    Task("key-value, 8k", "exact", key_values, 8192, 24),
    Task("needles, 8k", "exact", needles, 8192, 24),
    Task("key-value, 32k", "exact", key_values, 32768, 16, questions=8),
    Task("needles, 32k", "exact", needles, 32768, 16, questions=8),
    Task("code that parses", "code", functions, SHORT, 48),
)
"""Those of `task_scores.py`."""
