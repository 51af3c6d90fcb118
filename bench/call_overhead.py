"""What a Python call costs above the C call: flash_kda.fwd and decode at T = 1.

    python bench/call_overhead.py [--json]

The C call is timed inside the extension on arguments that are bound already (_C.time_call), the
Python call around it in batches; the overhead is the difference of the fastest of many, on one
thread. One head keeps the work small; the overhead does not depend on shapes.
"""

import argparse
import contextlib
import functools
import json
import time

import numpy as np
import records

import flash_kda
from flash_kda import _C

BATCH = 20  # calls between two looks at the clock
REPEATS = 3000


def compare(call, name, arguments):
    """Seconds per call of every batch, in Python and in C, taken in turns."""
    python, c = [], []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(BATCH):
            call()
        python.append((time.perf_counter() - begin) / BATCH)
        c.append(_C.time_call(name, BATCH, *arguments) / BATCH)
    return python, c


def numpy_arrays():
    rng = np.random.default_rng(0)

    def make(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    return make


def torch_tensors(dtype):
    import torch

    torch.manual_seed(0)

    def make(*shape):
        wide = len(shape) < 3 or shape[-2:] == (128, 128)
        return torch.randn(*shape).to(torch.float32 if wide else dtype)

    return make


def measure(make, guard):
    token, beta = (1, 1, 1, 128), (1, 1, 1)
    q, k, v, g, out = (make(*token) for _ in range(5))
    state = make(1, 1, 128, 128)
    leading = (q, k, v, g, make(*beta), 128**-0.5, out, make(1), make(1, 128), -5.0)
    workspace = make(flash_kda.get_workspace_size(1, 1) // 4 + 1)
    flags = (True, True, True, False)
    results = {}
    with guard():
        for name, arguments, bound in (
            (
                "fwd",
                (*leading, state, state, None),
                (None, None, None, None, *flags, None, None, 1),
            ),
            ("decode", (*leading, state), (None, None, None, *flags, None, 1)),
        ):
            call = getattr(flash_kda, name)
            options = {"num_threads": 1}
            if name == "fwd":
                options["workspace"] = workspace
                bound = (workspace, *bound)
            whole = functools.partial(call, *arguments, **options)
            python, c = compare(whole, name, (*arguments, *bound))
            results[name] = {
                "kernel": flash_kda.last_report()["kernel"],
                "python_us": min(python) * 1e6,
                "c_us": min(c) * 1e6,
                **records.summarize([1e3 * seconds for seconds in python]),
            }
    return results


def make_record(name, case):
    """The fields of a record that the measurement does not give (records.py)."""
    return {
        "kind": "overhead",
        "case": f"{name}, {case}",
        "regime": "random",
        "impl": f"flash_kda {flash_kda.__version__}",
        "isa": flash_kda.info()["cpu_isa"],
        "precision": "fp32",
        "threads": 1,
        "floor_ms": None,
        "bytes": None,
        "error_out": None,
        "error_state": None,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    as_json = parser.parse_args().json
    import torch

    cases = {
        "numpy, float32": (numpy_arrays(), contextlib.nullcontext),
        "torch, inference_mode": (torch_tensors(torch.bfloat16), torch.inference_mode),
        "torch, no_grad": (torch_tensors(torch.bfloat16), torch.no_grad),
        "torch, grad mode on": (torch_tensors(torch.bfloat16), contextlib.nullcontext),
    }
    for case, (make, guard) in cases.items():
        for name, times in measure(make, guard).items():
            times["overhead_us"] = times["python_us"] - times["c_us"]
            if as_json:
                print(json.dumps({**make_record(name, case), **times}))
            else:
                print(
                    f"{name:7} {case:22} Python {times['python_us']:6.2f} us, "
                    f"C {times['c_us']:6.2f} us, overhead {times['overhead_us']:5.2f} us"
                )


if __name__ == "__main__":
    main()
