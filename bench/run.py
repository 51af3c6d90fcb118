#!/usr/bin/env python3
"""Takes a benchmark and appends its records to bench/results.

    python3 bench/run.py cpu [--quick] [--regime NAME ...] [--case TEXT] [--threads N]
    python3 bench/run.py gpu [--quick] [--regime NAME ...] [--kind NAME] [--path NAME ...]

cpu needs the program (cmake --preset release; FLASH_KDA_DATA may name a larger recording of trained
activations than the bundled one); gpu needs the package flash_kda with CUDA kernels, and PyTorch.
bench/report.py makes docs/benchmarks.md and its pictures from the records.
"""

import argparse

import run_cpu
import run_gpu


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_subparsers(dest="which", required=True)
    for name, module in (("cpu", run_cpu), ("gpu", run_gpu)):
        part = which.add_parser(name, description=module.__doc__)
        module.add_options(part)
        part.set_defaults(run=module.run)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
