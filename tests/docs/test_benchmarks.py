"""docs/benchmarks.md and its pictures are what the records say; nobody types a figure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH, RESULTS = ROOT / "bench", ROOT / "bench" / "results"
sys.path.insert(0, str(BENCH))
import records  # noqa: E402


def report(*arguments):
    command = [sys.executable, BENCH / "report.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def committed():
    lines = [line for path in RESULTS.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_records_have_every_field():
    found = committed()
    assert found
    wrong = {r["case"]: records.missing_fields(r) for r in found if records.missing_fields(r)}
    assert not wrong
    assert not [r for r in found if r.get("dry_run")], "a dry run is no measurement"


def test_document_follows_from_the_records():
    done = report("--check")
    assert done.returncode == 0, done.stderr


def test_a_typed_figure_is_noticed(tmp_path):
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    copy = tmp_path / "benchmarks.md"
    copy.write_text(text)
    assert report("--check", "--no-pictures", "--document", copy).returncode == 0
    number = next(r for r in committed() if r["kind"] == "prefill")["commit"]
    copy.write_text(text.replace(number[:6], "abcdef", 1))
    assert "not what the records say" in report("--check", "--document", copy).stderr


def test_an_old_picture_is_noticed(tmp_path):
    (tmp_path / "img").mkdir()
    for path in (ROOT / "docs" / "img").glob("*.png"):
        data = path.read_bytes()
        at = data.find(b"Description\0")
        if at > 0:  # another stamp in the same file
            data = data[: at + 12] + b"0" * 16 + data[at + 28 :]
            assert len(data) < 150_000, f"{path.name}: large"
        (tmp_path / "img" / path.name).write_bytes(data)
    copy = tmp_path / "benchmarks.md"
    copy.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    assert "not drawn from the records" in report("--check", "--document", copy).stderr


@pytest.mark.parametrize(
    "change", [{"kernel": ""}, {"p10_ms": 1e9}, {"regime": "fast"}, "error_out"]
)
def test_incomplete_records_are_refused(change, tmp_path):
    record = dict(committed()[0])
    if isinstance(change, str):
        del record[change]
    else:
        record |= change
    with pytest.raises(ValueError, match="missing or wrong"):
        records.append(tmp_path / "x.jsonl", [record])
    assert not (tmp_path / "x.jsonl").exists()
