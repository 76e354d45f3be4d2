"""Hooks of `make site` (mkdocs.yml): pages outside of docs/, and examples in the API reference.

README.md is the front page, docs/index.md the table of contents. A file of the repository that a
page links to is part of the site, in the same folder. What mkdocs cannot resolve then is an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from griffe import Extension, GriffeLoader, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
MOVED = {"README.md": "index.md", "docs/index.md": "contents.md"}
# A block of code, or what stands between "](" and ")" or "#" in a link to a file.
LINK = re.compile(r"^```.*?^```$|\]\((?!\w+:)([^)#\s]+)", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^Example:\n((?:    .*\n?|\n)+)", re.MULTILINE)


def place(path: str) -> str:
    """Return where a file of the repository lies on the site."""
    return MOVED.get(path, path.removeprefix("docs/"))


def linked(page: str) -> set[str]:
    """Return the files of the repository that a page links to."""
    links = filter(None, LINK.findall((ROOT / page).read_text()))
    paths = {normpath(join(dirname(page), link)) for link in links}
    return {path for path in paths if not path.startswith("..") and (ROOT / path).is_file()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Say which version the site is of; link to the repository once its address is set."""
    project = (ROOT / "pyproject.toml").read_text()
    version = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)[0]
    config.copyright = f"memeff_compile {version}, BSD-3-Clause"
    address = re.findall(r'^Repository = "(.+)"$', project, re.MULTILINE)[0]
    if "ADDRESS" not in address:  # CONTRIBUTING.md, "Before publishing"
        config.repo_url = address
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files outside of docs/, found from page to page."""
    found = {f"docs/{file.src_uri}" for file in files.documentation_pages()} | {"README.md"}
    front = files.get_file_from_path("index.md")
    assert front is not None
    files.remove(front)
    todo = sorted(found)
    while todo:
        new = sorted(linked(todo.pop()) - found)
        found.update(new)
        todo += [path for path in new if path.endswith(".md")]
    for path in sorted(found):
        if files.get_file_from_path(place(path)) is None:
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links into those of the site."""
    source = Path(str(page.file.abs_src_path)).relative_to(ROOT).as_posix()

    def moved(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        path = normpath(join(dirname(source), match[1]))
        return "](" + relpath(place(path), dirname(place(source)) or ".")

    return LINK.sub(moved, markdown)


class Examples(Extension):
    """Shows examples of docstrings as code."""

    def on_object(self, *, obj: Object, loader: GriffeLoader, **_: object) -> None:
        """Put a fence around an example, without notes to doctest."""
        if obj.docstring is not None:
            text = obj.docstring.value.replace("  # doctest: +SKIP", "")
            fenced = "Example:\n    ```pycon\n{}\n    ```\n".format
            obj.docstring.value = EXAMPLE.sub(lambda match: fenced(match[1].rstrip()), text)
