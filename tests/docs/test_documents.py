"""Every code block of the documents is executed, in order, as a reader would in one terminal.

A copy of the tree (in a folder with a space in its name) is the working folder, with a new virtual
environment active and a home folder of its own. What each language means:

    sh      run by bash -euo pipefail; variables and the current folder last until the next block
    python  run by the environment's interpreter
    c       saved under the name in its first line; a later sh block must compile it
    cmake   likewise
    json    must parse
    text    shown only

Any other language, or none, is an error: nothing is left out silently.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/algorithm.md", "docs/integrations.md"]

# The whole test command would run this test again: README's runs one part, others show its help.
TEST_COMMAND = "bash tests/test.sh"
INSTEAD = {"README.md": f"{TEST_COMMAND} --only tree"}


@dataclass(frozen=True)
class Block:
    document: str
    line: int
    language: str
    text: str

    @property
    def file_name(self) -> str:
        match = re.match(r"(?:/\*|//|#) ([\w./-]+\.(?:c|txt))\b", self.text)
        assert match, f"{self}: the first line must be a comment that starts with the file's name"
        return match[1]

    def __str__(self) -> str:
        return f"{self.document}:{self.line}-{self.language}"


def blocks_of(document: str) -> list[Block]:
    blocks, language, first, lines = [], None, 0, []
    for number, line in enumerate((ROOT / document).read_text().splitlines(), 1):
        fence = re.match(r" *```\s*(\S*)", line)
        if not fence:
            lines.append(line)
        elif language is None:
            language, first, lines = fence[1] or "(none)", number, []
        else:
            blocks.append(Block(document, first, language, "\n".join(lines) + "\n"))
            language = None
    assert language is None, f"{document}:{first}: a block is not closed"
    return blocks


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]


class Terminal:
    """One reader with one terminal: a copy of the tree, a virtual environment, a home folder."""

    def __init__(self, folder: Path):
        self.tree = folder / "a tree"
        self.copy_tree()
        home = folder / "home"
        home.mkdir()
        subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
        # PyTorch and the rest come from the environment that runs this test; flash_kda does not:
        # it is found only once a block has installed it.
        packages = home / "packages"
        packages.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith("flash_kda"):
                (packages / entry.name).symlink_to(entry)
        site = next((home / "venv" / "lib").glob("python*/site-packages"))
        (site / "outer.pth").write_text(f"{packages}\n")
        self.env = dict(os.environ) | {
            "HOME": str(home),
            "VIRTUAL_ENV": str(home / "venv"),
            "PATH": f"{home / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        self.folder = self.tree
        self.spare = home

    def copy_tree(self):
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, names.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        if (ROOT / "build" / "venv").exists():
            (self.tree / "build").mkdir()
            (self.tree / "build" / "venv").symlink_to(ROOT / "build" / "venv")

    def run(self, command: list[str]) -> subprocess.CompletedProcess:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=900,
        )
        print(done.stdout)
        assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stdout[-4000:]}"
        return done

    def run_shell(self, block: Block):
        instead = INSTEAD.get(block.document, f"{TEST_COMMAND} --help")
        lines = [
            instead if line.split("  #")[0].strip() == TEST_COMMAND else line
            for line in block.text.splitlines()
        ]
        after = self.spare / "after"
        dump = f"env -0 >'{after}'"
        self.run(["bash", "-euo", "pipefail", "-c", "\n".join([*lines, dump])])
        pairs = (pair.partition("=") for pair in after.read_text().split("\0") if pair)
        self.env = {name: value for name, _, value in pairs}
        self.folder = Path(self.env["PWD"])


@pytest.fixture(scope="module")
def terminals(tmp_path_factory):
    made = {}

    def terminal_for(document: str) -> Terminal:
        if document not in made:
            made[document] = Terminal(tmp_path_factory.mktemp("reader"))
        return made[document]

    return terminal_for


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block(block, terminals):
    terminal = terminals(block.document)
    if block.language == "sh":
        terminal.run_shell(block)
    elif block.language == "python":
        terminal.run(["python", "-c", block.text])
    elif block.language in {"c", "cmake"}:
        path = terminal.folder / block.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
        name = path.name if block.language == "c" else "cmake -S"
        users = [b for b in BLOCKS if b.document == block.document and b.line > block.line]
        assert any(b.language in {"sh", "cmake"} and name in b.text for b in users), (
            f"no later block uses {name}"
        )
    elif block.language == "json":
        json.loads(block.text)
    else:
        assert block.language == "text", f"{block}: unknown language"


def test_readme_has_every_kind_of_block():
    kinds = {block.language for block in BLOCKS if block.document == "README.md"}
    assert {"sh", "python", "c", "cmake"} <= kinds
