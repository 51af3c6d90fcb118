"""The GPU benchmark's code, tried on CPU tensors: `bench/run.py gpu --dry-run`."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

BENCH = Path(__file__).resolve().parents[2] / "bench"
REGIMES = ("random", "trained", "slow")


def run(*arguments, **environment):
    command = [sys.executable, BENCH / "run.py", "gpu", *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    theirs = folder / "theirs" / "flash_kda"
    theirs.mkdir(parents=True)
    (theirs / "__init__.py").write_text(
        "__version__ = '7.7'\n"
        "def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound,\n"
        "        initial_state=None, final_state=None, cu_seqlens=None):\n"
        "    out.zero_(), final_state.zero_()\n"
    )
    build = folder / "build.json"
    build.write_text(json.dumps({"commit": "0123456789ab", "compiler": "some nvcc"}))
    path = folder / "gpu.jsonl"
    options = ("--dry-run", "--results", path, "--build", build)
    options += ("--cases", "8192x96", "mixed x96", "--path", "auto", "sm80")
    done = run(*options, FLASH_KDA_MOONSHOT=str(theirs.parent))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_case_and_regime_is_recorded(dry_run):
    ours = [r for r in dry_run if r["impl"].startswith("flash_kda") and r["kind"] == "prefill"]
    cases, paths = ("8192x96", "mixed x96"), ("auto", "sm80")
    wanted = set(itertools.product(cases, REGIMES, paths))
    assert {(r["case"], r["regime"], r["path"]) for r in ours} == wanted
    for record in dry_run:
        assert record["dry_run"] and record["commit"] == "0123456789ab"
    for record in ours:
        assert record["error_out"] < 2e-3 and record["error_state"] < 1e-6
        assert record["kernel"].startswith("cpu/") and record["error_kernel"] == record["kernel"]
        assert record["no_workspace_ms"] > 0 and record["again_ms"] > 0 and record["note"] == ""


def test_host_overhead_is_recorded(dry_run):
    found = [r for r in dry_run if r["kind"] == "overhead"]
    cases = itertools.product(("16x1", "1024x4"), ("auto", "sm80"))
    assert [(r["case"], r["path"]) for r in found] == list(cases)
    for record in found:
        assert record["median_ms"] > 0 and record["no_workspace_ms"] > 0
        assert record["c_ms"] > 0 and record["launch_ms"] > 0


def test_one_kind_alone(tmp_path):
    path = tmp_path / "gpu.jsonl"
    done = run("--dry-run", "--results", path, "--kind", "host")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == 2 * ["overhead"]


def test_a_peer_of_the_same_name_is_itself(dry_run):
    """A package flash_kda in another folder, which writes zeros: its error is 1, ours is not."""
    theirs = [r for r in dry_run if r["impl"] == "MoonshotAI flash_kda 7.7"]
    assert len(theirs) == 6
    assert {(r["error_out"], r["error_state"]) for r in theirs} == {(1.0, 1.0)}


def test_dry_runs_stay_out_of_the_results():
    done = run("--dry-run")
    assert done.returncode == 1 and "--results" in done.stderr


def test_bytes_of_a_case():
    code = (
        "from gpu_cases import case; a = case('8192x96'); b = case('mixed x64');"
        "assert a.min_bytes == 8192 * 96 * (5 * 128 + 1) * 2 + 2 * 96 * 128 * 128 * 4;"
        "assert b.tokens == 8192 and len(b.lengths) == 6 and b.H == 64;"
        "assert case('8x1024x96').lengths == (1024,) * 8"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=BENCH)
