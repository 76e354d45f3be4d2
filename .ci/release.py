"""Say what stands in the way of a release of the version in pyproject.toml; tag it with `--tag`.

`make release` checks and builds before it calls this. Nothing is pushed and nothing is uploaded:
what comes next is printed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "https://" + "ADDRESS"  # in two parts, so that `make address` leaves it alone


def version_of(root: Path) -> str:
    """Return the version in pyproject.toml."""
    (found,) = re.findall(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.M)
    return str(found)


def git(root: Path, *arguments: str) -> str:
    """Return what git prints."""
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def obstacles(root: Path) -> list[str]:
    """Return a sentence for each thing that has to be done before the version can be tagged."""
    version = version_of(root)
    found = []
    if git(root, "status", "--porcelain"):
        found.append("The working tree has changes: commit them.")
    if git(root, "tag", "--list", f"v{version}"):
        found.append(f"The tag v{version} exists: raise the version in pyproject.toml.")
    if f'__version__ = "{version}"\n' not in (root / "memeff_compile/__init__.py").read_text():
        found.append(f"`__version__` is not {version}.")
    if f"version: {version}\n" not in (root / "CITATION.cff").read_text():
        found.append(f"The version in CITATION.cff is not {version}.")
    heading = re.search(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), re.M)
    seen = heading[1] if heading else "none"
    if not re.fullmatch(rf"{re.escape(version)} \(\d+ \w+ \d{{4}}\)", seen):
        found.append(f"The changelog starts with '{seen}': '{version} (1 May 2027)' is needed.")
    files = [root / name for name in git(root, "ls-files").splitlines()]
    texts = [path for path in files if path.suffix in {".md", ".toml", ".yml", ".cff"}]
    unset = [path.relative_to(root).as_posix() for path in texts if PLACEHOLDER in path.read_text()]
    if unset:
        where = f"{unset[0]} and {len(unset) - 1} more"
        found.append(f"{PLACEHOLDER} stands in {where}: run `make address URL=https://...`.")
    return found


def main() -> None:
    """Print what is missing, or what comes next; tag if asked to and nothing is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", action="store_true", help="create the tag, in this clone only")
    given = parser.parse_args()
    tag = f"v{version_of(ROOT)}"
    missing = obstacles(ROOT)
    for sentence in missing:
        print(f"- {sentence}")
    if missing:
        raise SystemExit(f"{tag} is not ready: {len(missing)} to do.")
    if given.tag:
        git(ROOT, "tag", "--annotate", tag, "--message", f"memeff_compile {tag}")
        print(f"Tagged {tag} here. Next: git push origin {tag}, then upload dist/ to the index.")
    else:
        print(f"{tag} is ready. Nothing was tagged; `make release TAG=1` does it.")


if __name__ == "__main__":
    main()
