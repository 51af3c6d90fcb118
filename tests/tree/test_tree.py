"""Rules of the tree itself: formatting, shell scripts, presets, paths, links."""

import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.executable).parent


def list_files() -> list[Path]:
    """What git tracks or would track: an unpacked archive without git has the same rules."""
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others"]
        names = subprocess.run(
            [*command, "--exclude-standard"], check=True, capture_output=True, text=True
        ).stdout.split("\0")
        paths = [ROOT / name for name in names if name]
    else:
        paths = [p for p in ROOT.rglob("*") if "build" not in p.relative_to(ROOT).parts]
    return sorted(p for p in paths if p.is_file())


FILES = list_files()
C_FILES = [p for p in FILES if p.suffix in {".c", ".h", ".cu", ".cuh"}]
PYTHON_FILES = [p for p in FILES if p.suffix in {".py", ".pyi"}]
SHELL_FILES = [p for p in FILES if p.suffix == ".sh" or p == ROOT / ".ci" / "run"]
MARKDOWN_FILES = [p for p in FILES if p.suffix == ".md"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def test_the_lists_are_not_empty():
    assert C_FILES and PYTHON_FILES and SHELL_FILES and MARKDOWN_FILES


@pytest.mark.parametrize("path", C_FILES, ids=name_of)
def test_c_is_formatted(path):
    """clang-format 14, as Debian 12 has it and tests/requirements-tree.txt pins it."""
    done = subprocess.run(
        [TOOLS / "clang-format", "--dry-run", "--Werror", path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:3000]


@pytest.mark.parametrize("path", SHELL_FILES, ids=name_of)
def test_shell_script(path):
    done = subprocess.run([TOOLS / "shellcheck", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    text = path.read_text()
    assert "set -euo pipefail" in text
    assert text.startswith("#!/usr/bin/env bash\n")


@pytest.mark.parametrize("path", [p for p in PYTHON_FILES if p.suffix == ".py"], ids=name_of)
def test_python_compiles(path, tmp_path):
    py_compile.compile(str(path), cfile=str(tmp_path / "out.pyc"), doraise=True)


def configure_presets() -> list[str]:
    presets = json.loads((ROOT / "CMakePresets.json").read_text())
    return [p["name"] for p in presets["configurePresets"] if not p.get("hidden")]


@pytest.mark.parametrize("preset", configure_presets())
def test_preset_configures(preset, tmp_path):
    if preset == "cuda" and shutil.which(os.environ.get("CUDACXX", "nvcc")) is None:
        pytest.skip("no CUDA compiler on this machine")
    done = subprocess.run(
        ["cmake", "--preset", preset, "-B", tmp_path / "build"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "build" / "compile_commands.json").is_file()


def test_no_absolute_paths():
    """A path of somebody's machine helps nobody else."""
    folders = "|".join(["work", "root", "home", "Users", "var/tmp", "mnt"])
    path = re.compile(rf"(?<![\w./}}-])/({folders})/[\w.]")
    found = []
    for file in FILES:
        for number, line in enumerate((read_text(file) or "").splitlines(), 1):
            if path.search(line):
                found.append(f"{name_of(file)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_text_is_clean():
    """No tabs or trailing blanks, 100 columns at most in code, a newline at the end."""
    found = []
    for file in C_FILES + PYTHON_FILES + SHELL_FILES + MARKDOWN_FILES:
        text = file.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):
            found.append(f"{name_of(file)}: no newline at the end")
        for number, line in enumerate(text.splitlines(), 1):
            if line != line.rstrip() or "\t" in line:
                found.append(f"{name_of(file)}:{number}: tab or trailing blank")
            if len(line) > 100 and file not in MARKDOWN_FILES:
                found.append(f"{name_of(file)}:{number}: {len(line)} columns")
    assert not found, "\n".join(found)


def test_source_files_stay_readable():
    """About 600 lines a file; beyond 700 it should be split."""
    long = {name_of(p): len(p.read_text().splitlines()) for p in C_FILES + PYTHON_FILES}
    assert not {name: lines for name, lines in long.items() if lines > 700}


def test_source_names_are_unique():
    """A name seen in an error message or a stack trace says which file it is."""
    by_name: dict[str, list[str]] = {}
    for file in C_FILES + PYTHON_FILES:
        if file.name not in {"__init__.py", "conftest.py"}:
            by_name.setdefault(file.name, []).append(name_of(file))
    assert not {name: paths for name, paths in by_name.items() if len(paths) > 1}


def test_no_large_files():
    large = [name_of(p) for p in FILES if p.stat().st_size > 6_000_000]
    assert not large


def headings_of(text: str) -> set[str]:
    """GitHub's anchors of a document's headings."""
    anchors = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
        anchors.add(plain.replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("path", MARKDOWN_FILES, ids=name_of)
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        if not place.exists():
            broken.append(target)
        elif anchor and anchor not in headings_of(place.read_text(encoding="utf-8")):
            broken.append(target)
    assert not broken

