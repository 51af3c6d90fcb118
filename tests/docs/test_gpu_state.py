"""The record of GPU runs: README shows the newest one, the test command says whether it is old."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "gpu"))
import gpu_record  # noqa: E402


def newest(**fields):
    return gpu_record.read()[-1] | fields


def test_readme_shows_the_newest_record():
    text = gpu_record.README.read_text()
    want = gpu_record.put_into(text, newest())
    assert text == want, "run python3 tests/gpu/gpu_record.py --write"


@pytest.mark.parametrize("change", [{"passed": 1}, {"failed": 3}, {"commit": "0" * 40}])
def test_another_record_is_noticed(change):
    text = gpu_record.README.read_text()
    assert gpu_record.put_into(text, newest(**change)) != text


@pytest.mark.parametrize(
    "change, good, said",
    [
        ({}, True, "the kernels are the same"),
        ({"failed": 2}, False, "2 failed"),
        ({"kernels": "0" * 16}, False, "the kernels have changed since"),
    ],
)
def test_state(change, good, said, tmp_path, monkeypatch):
    record = newest(kernels=gpu_record.hash_kernels(), failed=0) | change
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(newest(commit="older")) + "\n" + json.dumps(record) + "\n")
    monkeypatch.setattr(gpu_record, "RECORDS", path)
    found = gpu_record.state()
    assert found[0] is good and said in found[1] and record["commit"][:12] in found[1]


def test_no_record(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_record, "RECORDS", tmp_path / "none")
    assert gpu_record.state() == (False, "GPU tests: no run is recorded")


def test_the_hash_follows_the_kernels(tmp_path, monkeypatch):
    kernel = tmp_path / "src" / "cuda" / "kernels" / "x.cu"
    kernel.parent.mkdir(parents=True)
    monkeypatch.setattr(gpu_record, "ROOT", tmp_path)
    hashes = set()
    for text in ("a", "b"):
        kernel.write_text(text)
        hashes.add(gpu_record.hash_kernels())
    kernel.rename(kernel.with_name("y.cu"))
    hashes.add(gpu_record.hash_kernels())
    kernel.with_name("y.md").write_text("not a source")
    assert len(hashes) == 3 and gpu_record.hash_kernels() in hashes


def test_the_test_command_says_it_and_does_not_fail():
    """Also where there is no record at all: the line of test.sh, run by itself."""
    script = (ROOT / "tests" / "test.sh").read_text()
    (line,) = re.findall(r"^python3 tests/gpu/gpu_record\.py.*$", script, re.M)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("GPU tests: ")
