"""docs/benchmarks.md and its pictures are what the records say; nobody types a figure."""

import json
import re
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
    figure = re.search(r"\| \*?\*?(\d+\.\d+)", text)[1]
    copy.write_text(text.replace(figure, figure + "1", 1))
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


def gpu_record(**fields):
    record = dict.fromkeys(records.COMMON + records.ON_GPU)
    record |= {"commit": "abc", "date": "2999-01-01T00:00:00Z", "compiler": "nvcc", "gpu": "Card X"}
    record |= {"driver": "1", "kind": "prefill", "regime": "slow", "impl": "flash_kda 0.1.0"}
    record |= {"kernel": "cuda/k", "samples": 30, "floor_ms": 0.5, "bytes": 1, "load": [1.0, 1.0]}
    record |= {"copy_gb_per_s": 4000.0, "error_out": 1.7e-3, "error_state": 6e-4, "again_ms": 2.02}
    return record | {"median_ms": 2.0, "p10_ms": 1.9, "p90_ms": 2.2} | fields


def test_gpu_part_of_the_report(tmp_path):
    """Newest record of a case; peers beneath; the geometric mean where all ten shapes are there."""
    import gpu_names

    found = [gpu_record(case=name, median_ms=2.0, again_ms=2.02) for name in gpu_names.TEN_SHAPES]
    for record, factor in zip(found, [4, 1 / 4] * 5):
        record["median_ms"] *= factor
        record["p10_ms"], record["p90_ms"] = record["median_ms"] * 0.9, record["median_ms"] * 1.1
    old = gpu_record(case="8192x96", date="2998-01-01T00:00:00Z", median_ms=2.1, again_ms=None)
    peer = gpu_record(case="8192x96", impl="fla chunk_kda 0.6.0", kernel="fla")
    records.append(tmp_path / "gpu.jsonl", [*found, gpu_record(case="8192x96"), old, peer])
    with open(tmp_path / "gpu.jsonl", "a") as file:
        file.write(json.dumps(gpu_record(case="1x1", dry_run=True)) + "\n")
    document = tmp_path / "x.md"
    done = report("--results", tmp_path, "--document", document, "--no-pictures")
    assert done.returncode == 0, done.stderr
    text = document.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| 8192x96 |")]
    assert [("chunk_kda" in row, "**2**" in row, "| 4.0 |" in row) for row in rows] == [
        (False, True, True),
        (True, True, True),
    ]
    assert "| 1 % |" in rows[0] and "1.7e-03 / 6.0e-04" in rows[0]
    assert "| flash_kda | slow | 0.5 | 2 |" in text
    assert "fla chunk_kda | slow" not in text and "1x1" not in text


def test_summary_of_a_gpu(tmp_path):
    """One row a case: newest medians of the regimes, the slowest beside the floor, peers, goals."""
    peer = {"impl": "fla chunk_kda 0.6.0", "kernel": "fla", "median_ms": 5.0, "p90_ms": 6.0}
    found = [
        gpu_record(case="8192x96", date="2998-01-01T00:00:00Z"),
        gpu_record(case="8192x96", median_ms=2.125),
        gpu_record(case="8192x96", regime="random", median_ms=1.95),
        gpu_record(case="8192x96", **peer),
        gpu_record(case="N64xH32", kind="decode"),
        gpu_record(case="4096x8"),  # not one of the summary's
        gpu_record(case="8192x32", **peer),  # nothing of ours to stand beside
    ]
    records.append(tmp_path / "gpu.jsonl", found)
    document = tmp_path / "x.md"
    assert not report("--results", tmp_path, "--document", document, "--no-pictures").returncode
    summary = document.read_text().partition("## How it was measured")[0]
    assert [line for line in summary.splitlines() if line.startswith("| ")][1:] == [
        "| prefill 8192x96 | 0.5 | 1.404 | **1.95** | - | **2.12** | 4.2 "
        "| fla chunk_kda 0.6.0: 5 (2.4x), slow gates |",
        "| decode N64xH32 | 0.5 | - | - | - | **2** | 4.0 | - |",
    ]


def test_decode_of_a_gpu(tmp_path):
    """The bandwidth and its share, graph and host times where they were taken, the goal of ours."""
    own = {"kind": "decode", "case": "N1xH32 fp32", "bytes": 4e9, "floor_ms": 1.0}
    found = [
        gpu_record(**own, graph_ms=0.0045, host_ms=0.0078),
        gpu_record(**own, impl="fla fused_recurrent_kda 0.6.0", kernel="fla", graph_ms=None),
        gpu_record(case="8192x96"),
    ]
    records.append(tmp_path / "gpu.jsonl", found)
    document = tmp_path / "x.md"
    assert not report("--results", tmp_path, "--document", document, "--no-pictures").returncode
    decode = document.read_text().partition("### Decode")[2].partition("###")[0]
    assert "img/gpu-card-x-decode.png" in decode
    rows = [line for line in decode.splitlines() if line.startswith("| N1xH32")]
    assert "| 6.0 us in a graph | **2** | 1.9 to 2.2 | 2.00 | 50 % | 4.5 | 7.8 |" in rows[0]
    assert "| - | **2** | 1.9 to 2.2 | 2.00 | 50 % | - | - |" in rows[1] and len(rows) == 2


def test_summary_names_every_cpu_case():
    summary = (ROOT / "docs" / "benchmarks.md").read_text().partition("## How it was measured")[0]
    cases = {
        (r["kind"], r["case"], r["precision"])
        for r in committed()
        if r["kind"] != "overhead" and "gpu" not in r and r["isa"] != "torch"
    }
    assert cases
    assert all(f"| {' '.join(case)} | `cpu/" in summary for case in cases)


def test_one_thread_counts_processor_time():
    import report_text

    record = {"threads": 1, "min_ms": 9.0, "min_cpu_ms": 4.0}
    assert report_text.best_ms(record) == 4.0
    assert report_text.best_ms(record | {"threads": 2}) == 9.0
