"""The mutation check breaks lines that exist: each pattern is found once in its file."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import mutation_check  # noqa: E402


def test_every_mutant_finds_its_line():
    assert mutation_check.MUTANTS
    mutation_check.check_patterns(mutation_check.MUTANTS)


def test_lab_notes_list_every_mutant():
    text = mutation_check.NOTES.read_text()
    assert not [m.what for m in mutation_check.MUTANTS if f"| {m.what} | `{m.file}` |" not in text]
