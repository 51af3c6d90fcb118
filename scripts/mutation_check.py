#!/usr/bin/env python3
"""Breaks the library on purpose, one line at a time, and demands that a test fails each time.

    python scripts/mutation_check.py [--only PATTERN] [--list] [--write]

Each mutant is an exact text of one file and what replaces it; a text that is not found exactly
once ends the run, so that the list cannot rot. The work happens in a copy of the tree, built once
and then file by file. The tests named with a mutant must pass without it and fail with it; a crash
or a run that does not end counts as a failure. --write puts the table into docs/lab-notes.md, below
the heading "Mutation check". Needs what the Python tests need. Exits with 1 when a mutant survives.
"""

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTES = ROOT / "docs" / "lab-notes.md"
HEADING = "## Mutation check"
LIMIT = 150  # seconds for the tests of one mutant


@dataclasses.dataclass
class Mutant:
    what: str
    file: str
    old: str
    new: str
    tests: str  # a file of tests/python, "-k", and an expression that selects some of it


MUTANTS = [
    # ---- The definition
    Mutant(
        "reference: sign of the gate",
        "src/ref/reference.c",
        "return (double)plan->lower_bound * sigmoid(factor * x);",
        "return (double)plan->lower_bound * sigmoid(-factor * x);",
        "test_definition.py -k gates",
    ),
    Mutant(
        "epsilon of the norm ten times as large",
        "src/core/constants.h",
        "#define FKDA_NORM_EPSILON 1e-6",
        "#define FKDA_NORM_EPSILON 1e-5",
        "test_definition.py -k flags",
    ),
    Mutant(
        "reference: wrong head grouping",
        "src/ref/reference.c",
        "int64_t key_head = head / plan->heads_per_key;",
        "int64_t key_head = head % plan->H;",
        "test_definition.py -k grouped",
    ),
    Mutant(
        "reference: checkpoint one token late",
        "src/ref/reference.c",
        "if (fkda_index_at(plan->checkpoint_offsets, m) == t)",
        "if (fkda_index_at(plan->checkpoint_offsets, m) + 1 == t)",
        "test_definition.py -k checkpoints",
    ),
    Mutant(
        "reference: bf16 truncated",
        "src/core/bf16.h",
        "return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);",
        "return (uint16_t)(bits >> 16);",
        "test_definition.py -k rounds",
    ),
    # ---- The fp32 kernels
    Mutant(
        "sign of the gate",
        "src/cpu/prepare.inc.h",
        "gate.inner = -factor * LOG2E;",
        "gate.inner = factor * LOG2E;",
        "test_cases.py -k case_06_every_length",
    ),
    Mutant(
        "gate bias forgotten",
        "src/cpu/prepare.inc.h",
        "    if (plan->dt_bias)\n        gate.bias",
        "    if (false)\n        gate.bias",
        "test_cases.py -k case_12",
    ),
    Mutant(
        "exp(A_log) past what fp32 holds",
        "src/cpu/task_rows.h",
        "return expf(A_log > most ? most : A_log);",
        "return expf(A_log);",
        "test_cases.py -k case_11",
    ),
    Mutant(
        "norm missing in chunks",
        "src/cpu/prepare.inc.h",
        "plan->qk_l2norm ? scaled : vf_set1(factor)",
        "vf_set1(factor)",
        "test_cases.py -k case_06_every_length",
    ),
    Mutant(
        "norm missing in tails and decode",
        "src/cpu/prepare.inc.h",
        "        if (!plan->qk_l2norm) {",
        "        if (true) {",
        "test_properties_decode.py -k decode_and_forward",
    ),
    Mutant(
        "beta not doubled",
        "src/cpu/prepare.inc.h",
        "vf_set1(plan->allow_neg_eigval ? 2.0f : 1.0f)",
        "vf_set1(1.0f)",
        "test_cases.py -k case_13",
    ),
    Mutant(
        "a token past the end is taken as live",
        "src/cpu/prepare.inc.h",
        "for (int64_t i = rows->count; i < GROUP; i++)\n        for (d = 0",
        "for (int64_t i = GROUP; i < GROUP; i++)\n        for (d = 0",
        "test_cases.py -k case_06_every_length",
    ),
    Mutant(
        "decay applied twice",
        "src/cpu/rows.inc.h",
        "vf_store(channels + 2 * K + d, vf_mul(a, k));",
        "vf_store(channels + 2 * K + d, vf_mul(a, vf_mul(a, k)));",
        "test_properties_decode.py -k decode_and_forward",
    ),
    Mutant(
        "the token's own write is missing from its output",
        "src/cpu/rows.inc.h",
        "products[ROWS + r] + u[r] * walk->tokens->kq[i]",
        "products[ROWS + r]",
        "test_properties_decode.py -k decode_and_forward",
    ),
    Mutant(
        "wrong head grouping",
        "src/cpu/prepare.inc.h",
        "const int64_t key_head = head / plan->heads_per_key, K = plan->K;",
        "const int64_t key_head = head % plan->H, K = plan->K;",
        "test_cases_memory.py -k case_38",
    ),
    Mutant(
        "substitution skips a term",
        "src/cpu/panel.inc.h",
        "    x3 = triangle_fma(io, TRIANGLE_A(3, 2), u2, x3);\n",
        "",
        "test_cases.py -k case_06_every_length",
    ),
    Mutant(
        "update forgets the decay",
        "src/cpu/panel.inc.h",
        "return vf_fma(vf_load(panel), d, add);",
        "(void)d;\n    return vf_add(vf_load(panel), add);",
        "test_cases.py -k case_06_every_length",
    ),
    Mutant(
        "narrow panel is not flushed",
        "src/cpu/panel.inc.h",
        "    flush_body(panel, slot, K, 1, u);",
        "    (void)panel, (void)slot, (void)K, (void)u;",
        "test_cases_memory.py -k case_37_ and 64-80",
    ),
    Mutant(
        "tail one token short",
        "src/cpu/kernel_set.inc.h",
        "int64_t count = tokens - t < CHUNK ? tokens - t : CHUNK;",
        "int64_t count = tokens - t < CHUNK ? tokens - t - 1 : CHUNK;",
        "test_cases.py -k case_06_every_length",
    ),
    Mutant(
        "checkpoint one chunk late",
        "src/cpu/kernel_set.inc.h",
        "        store_checkpoint(run, t + count);",
        "        store_checkpoint(run, t);",
        "test_cases_memory.py -k case_47_ and lengths2",
    ),
    Mutant(
        "wrong slot",
        "src/cpu/kernel_set.inc.h",
        "store_panels(&run, h, &plan->final_state, run.seq.slot);",
        "store_panels(&run, h, &plan->final_state, task->n);",
        "test_cases_memory.py -k case_28_ and slots0",
    ),
    Mutant(
        "missing check of slot -1 in prefill",
        "src/cpu/kernel_set.inc.h",
        "    if (run.seq.slot < 0) {",
        "    if (run.seq.slot < -1) {",
        "test_cases_memory.py -k case_28_ and slots0",
    ),
    Mutant(
        "empty sequence keeps what final_state held",
        "src/cpu/kernel_set.inc.h",
        "            copy_state(&run, h, &plan->final_state, run.seq.slot);",
        "            (void)0;",
        "test_cases.py -k case_03_ and state1-None",
    ),
    Mutant(
        "swapped strides of tokens and heads",
        "src/cpu/task_rows.h",
        "(seq->begin + t) * view->stride_t +\n                 head * view->stride_h",
        "(seq->begin + t) * view->stride_h +\n                 head * view->stride_t",
        "test_cases.py -k case_16_ and unbind",
    ),
    Mutant(
        "bf16 truncated by AVX-512",
        "src/cpu/vec_avx512.h",
        "_mm512_mask_or_epi32(_mm512_add_epi32(bits, half), nan, bits,",
        "_mm512_mask_or_epi32(bits, nan, bits,",
        "test_cases.py -k case_06_every_length",
    ),
    Mutant(
        "bf16 ties away from zero in AVX-512",
        "src/cpu/vec_avx512.h",
        "_mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fff), odd,",
        "_mm512_mask_mov_epi32(_mm512_set1_epi32(0x8000), odd,",
        "test_properties.py -k nearest_even",
    ),
    # ---- The bf16 kernels
    Mutant(
        "bf16 products: diagonal of P lost",
        "src/cpu/prepare_bf16.h",
        "upto = (__mmask16)((2u << t) - 1);",
        "upto = (__mmask16)((1u << t) - 1);",
        "test_cases.py -k case_06_every_length",
    ),
    Mutant(
        "bf16 products: too deep a chunk is not noticed",
        "src/cpu/prepare_bf16.h",
        "_mm512_cmp_ps_mask(_mm512_sub_ps(highest, deepest), limit, _CMP_GT_OQ) != 0;",
        "0 * _mm512_cmp_ps_mask(_mm512_sub_ps(highest, deepest), limit, _CMP_GT_OQ) != 0;",
        "test_cases.py -k case_10_ and deep",
    ),
    Mutant(
        "bf16 products: repeated keys are not noticed",
        "src/cpu/prepare_bf16.h",
        "    if (split && keys_agree(draft))",
        "    if (false && keys_agree(draft))",
        "test_cases.py -k case_01_ and 16384",
    ),
    Mutant(
        "bf16 products: beta not doubled",
        "src/cpu/prepare_bf16.h",
        "        b = _mm512_add_ps(b, b);",
        "        b = _mm512_add_ps(b, _mm512_setzero_ps());",
        "test_cases.py -k case_13",
    ),
    # ---- Tasks and threads
    Mutant(
        "all threads share one scratch",
        "src/cpu/cpu_backend.c",
        ".scratch = run->scratch + thread * run->scratch_stride",
        ".scratch = run->scratch + 0 * thread * run->scratch_stride",
        "test_properties.py -k threads",
    ),
    Mutant(
        "every piece of a head begins at channel 0",
        "src/cpu/cpu_backend.c",
        ".v_begin = piece * cut->channels,",
        ".v_begin = 0 * piece * cut->channels,",
        "test_properties.py -k threads",
    ),
    # ---- Validation and plan
    Mutant(
        "int32 offsets read as int64",
        "src/core/plan.h",
        "return view.dtype == FKDA_I32 ?",
        "return view.dtype == FKDA_DTYPE_INVALID ?",
        "test_cases.py -k case_14",
    ),
    Mutant(
        "draft tokens: state read one slot late",
        "src/core/plan.h",
        "fkda_plan_write_slot(plan, n, accepted - 1);",
        "fkda_plan_write_slot(plan, n, accepted);",
        "test_properties_decode.py -k draft",
    ),
    Mutant(
        "overlap of output and input allowed",
        "src/core/validate_tensors.c",
        "                !extents_meet(check->extent[i], check->extent[j]))",
        "                check->extent[i].begin)",
        "test_errors.py -k overlap",
    ),
    Mutant(
        "cu_seqlens past T allowed",
        "src/core/validate_sequences.c",
        "if (end < begin || end > plan->T)",
        "if (end < begin)",
        "test_errors.py -k cu_seqlens",
    ),
    Mutant(
        "a slot may be written twice",
        "src/core/validate_sequences.c",
        "            if (slot_set_has(set, slot))",
        "            if (false)",
        "test_errors.py -k state_indices",
    ),
    Mutant(
        "lower_bound NaN allowed",
        "src/core/validate.c",
        "!(args->lower_bound >= -5 && args->lower_bound <= 0)",
        "(args->lower_bound < -5 || args->lower_bound > 0)",
        "test_errors.py -k lower_bound",
    ),
    Mutant(
        "flat dt_bias read with the wrong stride",
        "src/core/validate.c",
        "bias->ndim == 1 ? plan->K : step(bias, 0)",
        "step(bias, 0)",
        "test_cases.py -k case_12",
    ),
    Mutant(
        "workspace one byte too small allowed",
        "src/api.c",
        "if (args->workspace_bytes < bytes)",
        "if (args->workspace_bytes + 1 < bytes)",
        "test_errors.py -k workspace",
    ),
    Mutant(
        "environment beats the argument",
        "src/core/options.c",
        "    if (*isa == FKDA_ISA_AUTO)\n        status = read_isa",
        "    if (true)\n        status = read_isa",
        "test_errors.py -k argument_beats",
    ),
    Mutant(
        "binding: bytes of a workspace tensor counted too high",
        "python/binding/arrays.c",
        "(((size_t)dl->dtype.bits * dl->dtype.lanes + 7) / 8)",
        "((size_t)dl->dtype.bits * dl->dtype.lanes + 7) / 8",
        "test_errors.py -k workspace",
    ),
    Mutant(
        "binding: torch is not told what was written",
        "python/binding/module.c",
        "if (fkda_mark_written(call.arrays.reader, call.written, call.num_written) == 0) {",
        "if (result == NULL) {",
        "test_torch.py -k write",
    ),
    Mutant(
        "fla: a state keeps FLA's layout",
        "python/flash_kda/fla.py",
        "(state if _value_rows_first(call) else state.transpose(-1, -2)).contiguous()",
        "state.contiguous()",
        "test_fla_backend.py -k layouts",
    ),
    Mutant(
        "fla: a call with gradients is taken",
        "python/flash_kda/fla.py",
        "    if torch.is_grad_enabled():\n",
        "    if False:\n",
        "test_fla_backend.py -k training",
    ),
    Mutant(
        "fla: accepted draft tokens are forgotten",
        "python/flash_kda/fla.py",
        "        num_accepted_tokens=accepted,\n",
        "        num_accepted_tokens=None if accepted is None else accepted.clamp(max=1),\n",
        "test_fla_backend.py -k draft",
    ),
    Mutant(
        "fla: the built-in backend stays beside ours",
        "python/flash_kda/fla.py",
        "        priority = 1\n",
        '        priority = 1\n        backend_type = "another"\n',
        "test_fla_backend.py -k left_to_fla",
    ),
]


class Workplace:
    """A copy of the tree with a build folder of its own."""

    def __init__(self, folder: Path):
        self.tree = folder / "tree"
        names = subprocess.run(
            [
                "git",
                "-C",
                str(ROOT),
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        for name in filter(None, names):
            target = self.tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy(ROOT / name, target)
        self.build_folder = folder / "build"
        self.run(
            [
                "cmake",
                "-S",
                self.tree,
                "-B",
                self.build_folder,
                "-G",
                "Ninja",
                "-DFLASH_KDA_BUILD_PYTHON=ON",
                "-DFLASH_KDA_BUILD_TOOLS=OFF",
                "-DFLASH_KDA_BUILD_EXAMPLES=OFF",
                "-DFLASH_KDA_CUDA=OFF",
                "-DCMAKE_C_FLAGS_RELEASE=-O1",  # quicker to build, and the same mathematics
                f"-DPython_EXECUTABLE={sys.executable}",
            ]
        )

    def run(self, command):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{command} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    def build(self):
        self.run(["cmake", "--build", self.build_folder])

    def test(self, selections: list[str]) -> str | None:
        """None when all pass, else the first failure in words."""
        files = sorted({selection.split(" -k ")[0] for selection in selections})
        chosen = " or ".join(f"({selection.split(' -k ')[1]})" for selection in selections)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
        command += [str(self.tree / "tests" / "python" / name) for name in files] + ["-k", chosen]
        environment = os.environ | {"PYTHONPATH": str(self.build_folder / "python")}
        limit = LIMIT * len(selections)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return f"no end within {limit} s"
        if done.returncode == 0:
            return None
        if done.returncode == 5:
            sys.exit(f"no test is selected by: {chosen}")
        failed = re.search(r"^(?:FAILED|ERROR) \S*?(test_\S+)", done.stdout, re.M)
        if failed:
            return f"`{failed[1]}`"
        return f"the process died ({done.returncode}) in: {chosen}"


def check_patterns(mutants):
    for mutant in mutants:
        count = (ROOT / mutant.file).read_text().count(mutant.old)
        if count != 1:
            sys.exit(
                f"{mutant.what}: found {count} times in {mutant.file}, wanted once:\n{mutant.old}"
            )


def write_table(rows):
    """Rows of mutants that did not run now keep what they said."""
    text = NOTES.read_text()
    said = dict(re.findall(r"^(\| .+? \| `[^`|]+` \|) (.+) \|$", text, re.M))
    said |= {f"| {m.what} | `{m.file}` |": result for m, result in rows}
    starts = [f"| {m.what} | `{m.file}` |" for m in MUTANTS]
    lines = [
        HEADING,
        "",
        "Written by `scripts/mutation_check.py --write`: each line was broken on "
        "purpose, alone, and the test named",
        "is the first that failed.",
        "",
        "| broken | in | first test to fail |",
        "|---|---|---|",
    ]
    lines += [f"{start} {said[start]} |" for start in starts if start in said]
    before, _, after = text.partition(HEADING)
    following = re.search(r"^## ", after, re.M)
    tail = "\n" + after[following.start() :] if following else ""
    NOTES.write_text(before.rstrip() + "\n\n" + "\n".join(lines) + "\n" + tail)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose description matches this pattern")
    parser.add_argument("--list", action="store_true", help="names the mutants and ends")
    parser.add_argument(
        "--write", action="store_true", help="results into the table of docs/lab-notes.md"
    )
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if re.search(options.only, m.what)]
    check_patterns(MUTANTS)
    if options.list or not mutants:
        print("\n".join(m.what for m in mutants) or "none is so called")
        return 0 if mutants else 2

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place = Workplace(Path(folder))
        place.build()
        start = time.monotonic()
        failure = place.test(sorted({m.tests for m in mutants}))
        if failure:
            sys.exit(f"fails without any mutant: {failure}")
        print(f"all pass without a mutant ({time.monotonic() - start:.0f} s)", flush=True)
        for mutant in mutants:
            start, file = time.monotonic(), place.tree / mutant.file
            text = file.read_text()
            file.write_text(text.replace(mutant.old, mutant.new))
            place.build()
            result = place.test([mutant.tests])
            file.write_text(text)
            rows.append((mutant, result or "**none: it survived**"))
            print(f"{mutant.what}: {rows[-1][1]} ({time.monotonic() - start:.0f} s)", flush=True)
    survivors = [m.what for m, result in rows if "survived" in result]
    print(f"{len(rows) - len(survivors)} of {len(rows)} mutants were noticed")
    if options.write:
        write_table(rows)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
