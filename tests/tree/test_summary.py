"""tests/summary.py: what makes the test command pass, and that nothing else does."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "summary.py"

PASSED = '<testcase name="a" classname="x"/>'
FAILED = '<testcase name="b" classname="x"><failure message="no"/></testcase>'
SKIPPED = '<testcase name="c" classname="x"><skipped message="no such processor"/></testcase>'
MISSING = (
    '<testcase name="d"><skipped/><system-out>Unable to find executable: d</system-out></testcase>'
)
CMOCKA_LINES = """[==========] Running 3 test(s).
[ RUN      ] one
[       OK ] one
[ RUN      ] two
{detail}
[  {word} ] two
[ RUN      ] three
[       OK ] three
[==========] 3 test(s) run.
[  PASSED  ] 2 test(s).
[  {word} ] 1 test(s), listed below:
[  {word} ] two
"""


def cmocka(word: str, detail: str, failure: str = "") -> str:
    lines = CMOCKA_LINES.format(word=word, detail=detail)
    return f'<testcase name="t" classname="t">{failure}<system-out>{lines}</system-out></testcase>'


def run_summary(folder: Path, steps: list[tuple[int, str | None]]) -> tuple[int, str]:
    """One step for each (exit status, JUnit cases or None for a step that only builds)."""
    lines = []
    for i, (status, cases) in enumerate(steps):
        report = "-"
        if cases is not None:
            report = str(folder / f"{i}.xml")
            if cases != "missing":
                Path(report).write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        lines.append(f"{status}\t1\tstep {i}\t{report}\n")
    (folder / "steps").write_text("".join(lines))
    command = [sys.executable, PROGRAM, folder / "steps"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "steps, status, last",
    [
        ([(0, PASSED)], 0, "1 passed, 0 failed, 0 skipped"),
        ([(0, None), (0, PASSED + SKIPPED)], 0, "1 passed, 0 failed, 1 skipped"),
        ([(0, PASSED), (0, PASSED)], 0, "2 passed, 0 failed, 0 skipped"),
        ([(1, PASSED + FAILED)], 1, "1 passed, 1 failed, 0 skipped"),
        ([(0, PASSED + FAILED)], 1, "1 passed, 1 failed, 0 skipped"),
        ([(8, PASSED + MISSING)], 1, "1 passed, 1 failed, 0 skipped"),
        ([(1, None), (0, PASSED)], 1, "1 passed, 1 failed, 0 skipped"),
        ([(139, PASSED)], 1, "1 passed, 1 failed, 0 skipped"),
        ([(0, PASSED), (0, "missing")], 1, "1 passed, 1 failed, 0 skipped"),
        ([(0, PASSED), (0, "<broken")], 1, "1 passed, 1 failed, 0 skipped"),
        ([(0, PASSED), (0, "")], 1, "1 passed, 1 failed, 0 skipped"),
        ([(0, PASSED), (0, SKIPPED)], 1, "1 passed, 1 failed, 1 skipped"),
        ([(0, None)], 1, "0 passed, 1 failed, 0 skipped"),
        ([], 1, "0 passed, 1 failed, 0 skipped"),
        ([(0, cmocka(" SKIPPED", "no AMX"))], 0, "2 passed, 0 failed, 1 skipped"),
        ([(8, cmocka("FAILED ", "0 != 1", "<failure/>"))], 1, "2 passed, 1 failed, 0 skipped"),
    ],
)
def test_summary(steps, status, last, tmp_path):
    assert run_summary(tmp_path, steps) == (status, last)
