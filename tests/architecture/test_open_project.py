"""An open project needs more than its code: a workflow, templates, a release, one address."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import memeff_compile

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://example.invalid/owner/name"
NEEDED = "README.md CHANGELOG.md CITATION.cff CONTRIBUTING.md SECURITY.md pyproject.toml Makefile"
TEMPLATES = sorted((ROOT / ".github").rglob("*.yml"))


def parsed(path: Path) -> Any:
    """Return what a YAML file says."""
    yaml = pytest.importorskip("yaml", reason="transformers brings it")
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_files_for_the_host_are_whole(path: Path) -> None:
    found = parsed(path)
    if path.parent.name == "ISSUE_TEMPLATE" and path.stem != "config":
        assert {"name", "description", "body"} <= {*found}
        assert len({field["id"] for field in found["body"]}) == len(found["body"])


def test_the_citation_is_of_this_version() -> None:
    citation = parsed(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "license"} <= {*citation}
    assert citation["version"] == memeff_compile.__version__


def test_the_workflow_runs_what_contributors_run() -> None:
    workflow = parsed(ROOT / ".github/workflows/ci.yml")
    steps = [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    assert [step for step in steps if step] == [".ci/run"]


def test_hooks_before_a_commit_are_checks_of_make_check() -> None:
    hooks = parsed(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    check = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    tools = {Path(hook["entry"].split()[0]).name for hook in hooks}
    assert tools <= set(re.findall(r"\$\(VENV\)/bin/([\w-]+)", check))


def test_nobody_invents_an_address() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("*.*l"), *(ROOT / "docs").rglob("*.md"), *TEMPLATES]
    hosts = r"(?:github|gitlab|codeberg)\.(?:com|org|io)/[\w-]*memeff|memeff[\w-]*\.readthedocs"
    named = {page.name for page in pages if re.search(hosts, page.read_text(), re.IGNORECASE)}
    assert not named


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a small repository with the files that a release looks at, all committed."""
    for name in [
        *NEEDED.split(),
        "memeff_compile/__init__.py",
        ".github/ISSUE_TEMPLATE/config.yml",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    commit(tmp_path, "-c", "init.defaultBranch=main", "init", "--quiet")
    return tmp_path


def commit(folder: Path, *first: str) -> None:
    """Commit everything, after another command of git if there is one."""
    who = ["-c", "user.name=n", "-c", "user.email=n@example.invalid"]
    commands = [[*first]] if first else []
    commands += [["add", "--all"], [*who, "commit", "--quiet", "--message", "m"]]
    for command in commands:
        subprocess.run(["git", *command], cwd=folder, check=True)


def test_a_release_names_each_obstacle_until_none_is_left(clone: Path) -> None:
    obstacles = runpy.run_path(str(ROOT / ".ci" / "release.py"))["obstacles"]
    version = re.findall(r'^version = "(.+)"$', (clone / "pyproject.toml").read_text(), re.M)[0]
    first = obstacles(clone)
    assert len(first) == 2
    assert "changelog" in first[0]
    assert "make address" in first[1]

    subprocess.run(["make", "-s", "address", f"URL={ADDRESS}"], cwd=clone, check=True)
    changes = clone / "CHANGELOG.md"
    dated = f"## {version} (1 May 2027)\n"
    changes.write_text(re.sub(r"^## .+\n", dated, changes.read_text(), count=1, flags=re.M))
    assert [said.split(":")[0] for said in obstacles(clone)] == ["The working tree has changes"]
    commit(clone)
    assert obstacles(clone) == []
    assert f"git+{ADDRESS}" in (clone / "README.md").read_text()

    (clone / "CITATION.cff").write_text("version: 0.0.1\n")
    commit(clone)
    subprocess.run(["git", "tag", f"v{version}"], cwd=clone, check=True)
    assert ["tag" in obstacles(clone)[0], "CITATION" in obstacles(clone)[1]] == [True, True]


def test_the_address_has_to_be_one(clone: Path) -> None:
    run = subprocess.run(["make", "-s", "address"], cwd=clone, capture_output=True, text=True)
    assert run.returncode != 0
    assert "give https://host/owner/name" in run.stdout
