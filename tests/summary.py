"""The last lines of tests/test.sh: what every step's own report says, and one total.

    python3 tests/summary.py STEPS

STEPS has one line a step: exit status, seconds, label, JUnit report ("-" for a step that only
builds), separated by tabs. A C test program counts as the cmocka tests inside it. A step that
failed without saying which test counts as one failure, and so does a step whose report is missing
or holds no executed test. Exits with 1 unless some test passed and nothing failed.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Counts:
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    skips: list[tuple[str, str]] = field(default_factory=list)


def count_cmocka(program: str, output: str) -> Counts:
    """The tests inside one C test program, from cmocka's lines; none where it printed no such."""
    counts, running, said = Counts(), None, []
    for line in output.splitlines():
        mark = re.match(r"\[ +(RUN|OK|FAILED|SKIPPED) +\] (.*)", line)
        if mark and mark[1] == "RUN":
            running, said = mark[2], []
        elif mark and mark[2] == running:
            if mark[1] == "OK":
                counts.passed += 1
            elif mark[1] == "SKIPPED":
                counts.skips.append((f"{program}::{running}", " ".join(said) or "no reason given"))
            else:
                counts.failures.append(f"{program}::{running}: {' '.join(said)[:300]}")
            running = None
        else:
            said.append(line.strip())
    if running:
        counts.failures.append(f"{program}::{running}: did not end")
    return counts


def read_report(path: Path) -> Counts:
    counts = Counts()
    for case in ElementTree.parse(path).iter("testcase"):
        classname, name = case.get("classname", ""), case.get("name", "?")
        failed = case.find("failure") is not None or case.find("error") is not None
        failed |= case.findtext("system-out", "").startswith("Unable to find executable")
        skipped = case.find("skipped")
        inner = count_cmocka(name, case.findtext("system-out", ""))
        if inner.passed or inner.failures or inner.skips:
            if failed and not inner.failures:
                inner.failures.append(f"{name}: failed, though each test inside it passed")
            counts.passed += inner.passed
            counts.failures += inner.failures
            counts.skips += inner.skips
            continue
        name = name if classname in ("", name) else f"{classname}::{name}"
        if failed:
            counts.failures.append(name)
        elif skipped is not None:
            reason = skipped.get("message") or (skipped.text or "").strip() or "no reason given"
            counts.skips.append((name, reason))
        else:
            counts.passed += 1
    return counts


def count_step(status: int, label: str, report: str) -> Counts:
    if report == "-":
        return Counts(failures=[] if status == 0 else [f"{label}: exit status {status}"])
    try:
        counts = read_report(Path(report))
    except (OSError, ElementTree.ParseError) as error:
        return Counts(failures=[f"{label}: no readable report ({error})"])
    if not counts.failures and counts.passed == 0:
        counts.failures.append(f"{label}: no test was executed")
    if not counts.failures and status != 0:
        counts.failures.append(f"{label}: exit status {status}, though its report has no failure")
    return counts


def main() -> int:
    total = Counts()
    print(f"{'step':<44}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for line in Path(sys.argv[1]).read_text().splitlines():
        status, seconds, label, report = line.split("\t")
        counts = count_step(int(status), label, report)
        total.passed += counts.passed
        total.failures += counts.failures
        total.skips += counts.skips
        if report == "-":
            cells = f"{'':>8}{'FAILED' if counts.failures else '':>8}{'':>9}"
        else:
            cells = f"{counts.passed:>8}{len(counts.failures):>8}{len(counts.skips):>9}"
        print(f"{label:<44}{cells}{seconds:>9}")
    reasons: dict[str, list[str]] = {}
    for name, reason in total.skips:
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        print(f"skipped ({len(names)}, such as {names[0]}): {reason}")
    for name in total.failures:
        print(f"FAILED: {name}")
    if total.passed == 0 and not total.failures:
        total.failures.append("no test was executed")
        print("FAILED: no test was executed")
    print(f"{total.passed} passed, {len(total.failures)} failed, {len(total.skips)} skipped")
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
