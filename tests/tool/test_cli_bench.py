#!/usr/bin/env python3
"""`flashkda bench`: records and options."""

import json
import subprocess
import sys

from cli_case import INPUT, ROOT, SLICE, USAGE, Case, D, main


class Bench(Case):
    FIELDS = """commit date cpu driver compiler kind case regime impl kernel isa precision threads
        samples median_ms p10_ms p90_ms min_ms cpu_ms min_cpu_ms floor_ms bytes flops
        fma_peak_gflops copy_gb_per_s share_of_fma_peak share_of_copy error_out
        error_state""".split()

    def records(self, *arguments):
        stdout, stderr = self.call("bench", "--quick", "--json", "--threads", "1", *arguments)
        self.assertEqual(stderr, "")
        return [json.loads(line) for line in stdout.splitlines()]

    def expect_record(self, record, kind, case):
        self.assertLessEqual(set(self.FIELDS), set(record))
        self.assertEqual((record["kind"], record["case"]), (kind, case))
        self.assertGreater(record["samples"], 0)
        self.assertLessEqual(record["min_ms"], record["p10_ms"])
        self.assertLessEqual(record["p10_ms"], record["median_ms"])
        self.assertLessEqual(record["median_ms"], record["p90_ms"])
        self.assertGreater(record["floor_ms"], 0)
        self.assertGreater(record["copy_gb_per_s"], 0)
        self.assertGreater(record["fma_peak_gflops"], 0)
        bound = 4e-3 if record["precision"] == "bf16" else 2e-3  # a few elements scatter more
        self.assertLess(record["error_out"], bound)
        self.assertLess(record["error_state"], 4e-3 if record["precision"] == "bf16" else 1e-6)

    def test_prefill(self):
        for record in self.records("--case", "512x32", "--commit", "abc"):
            self.expect_record(record, "prefill", "512x32")
            self.assertEqual(record["commit"], "abc")
            self.assertEqual(record["regime"], "random")
            self.assertEqual(record["flops"], 6 * D * D * 512 * 32)
            self.assertIn("/prefill", record["kernel"])

    def test_decode(self):
        (record,) = self.records("--case", "N1xH32", "--regime", "slow")
        self.expect_record(record, "decode", "N1xH32")
        self.assertIn("/decode", record["kernel"])
        self.assertGreaterEqual(record["bytes"], 2 * 4 * D * D * 32)

    def test_trained(self):
        records = self.records("--case", "512x32", "--regime", "trained", "--input", SLICE)
        for record in records:
            self.expect_record(record, "prefill", "512x32")
            self.assertEqual(record["regime"], "trained")

    def test_text(self):
        text, _ = self.call("bench", "--quick", "--threads", "1", "--case", "N1xH32")
        self.assertIn("GFLOP/s", text)
        self.assertIn("decode N1xH32", text)

    def test_records_and_report(self):
        """The scripts around it: records are appended, and the document follows from them."""
        results, document = self.folder / "results", self.folder / "benchmarks.md"
        record = [sys.executable, ROOT / "bench" / "run.py", "cpu", "--program", self.program]
        record += "--quick --threads 1 --case N1xH32 --regime slow".split()
        record += ["--no-torch", "--no-overhead", "--results", results / "cpu.jsonl"]
        report = [sys.executable, ROOT / "bench" / "report.py", "--results", results]
        report += ["--document", document, "--no-pictures"]
        self.assertEqual(subprocess.run(report, capture_output=True).returncode, 1)  # no records
        subprocess.run(record, check=True, capture_output=True, timeout=120)
        lines = (results / "cpu.jsonl").read_text().splitlines()
        for line in lines:
            self.expect_record(json.loads(line), "decode", "N1xH32")
        self.assertNotEqual(subprocess.run([*report, "--check"], capture_output=True).returncode, 0)
        subprocess.run(report, check=True, capture_output=True, timeout=120)
        subprocess.run([*report, "--check"], check=True, capture_output=True)
        text = document.read_text()
        self.assertEqual(text.count("| N1xH32 | slow |"), len(lines))
        newer = {**json.loads(lines[0]), "date": "2999-01-01T00:00:00Z", "median_ms": 12345.0}
        with open(results / "cpu.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(newer) + "\n")
        self.assertNotEqual(subprocess.run([*report, "--check"], capture_output=True).returncode, 0)
        subprocess.run(report, check=True, capture_output=True, timeout=120)
        self.assertEqual(document.read_text().count("| N1xH32 | slow |"), len(lines))
        self.assertIn("| 12345 |", document.read_text())

    def test_wrong_options(self):
        self.refuse(USAGE, "--case '3x3': no such case", "bench", "--case", "3x3")
        wanted = "--regime 'fast': wanted random, slow or trained"
        self.refuse(USAGE, wanted, "bench", "--regime", "fast")
        self.refuse(USAGE, "belong together", "bench", "--regime", "trained")
        self.refuse(USAGE, "belong together", "bench", "--regime", "slow", "--input", SLICE)
        self.refuse(INPUT, "cannot open it", "bench", "--input", self.folder / "none")
        self.refuse(USAGE, "--isa 'x': wanted one of auto", "bench", "--isa", "x")
        self.refuse(USAGE, "one argument too many", "bench", "x")


if __name__ == "__main__":
    main()
