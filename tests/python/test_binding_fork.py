"""Calls in a child process after fork(), where the workers of the parent's threads do not exist.

GCC's OpenMP would wait for them for ever; data loaders and preforking servers fork like this.
"""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import numpy as np
import flash_kda

rng = np.random.default_rng(0)
q, k, v, g = rng.standard_normal((4, 1, 100, 4, 128), dtype=np.float32)
beta = rng.standard_normal((1, 100, 4), dtype=np.float32)

def run():
    out = np.full(v.shape, np.nan, np.float32)
    flash_kda.fwd(q, k, v, g, beta, 0.1, out, None, None, -5.0, num_threads=3)
    assert flash_kda.last_report()["num_threads"] > 1
    return out

{before}
child = os.fork()
outs = [run(), run()]
if child == 0:
    grandchild = os.fork()
    outs.append(run())
    _, status = os.waitpid(grandchild, 0) if grandchild else (0, 0)
    os._exit(0 if status == 0 and all(np.array_equal(x, outs[0]) for x in outs) else 1)
_, status = os.waitpid(child, 0)
assert status == 0 and np.array_equal(*outs), status
"""

BEFORE = {
    "nothing": "",
    "a call": "run()",
    "workers of torch": "import torch; torch.set_num_threads(2); a = torch.ones(800, 800); a @ a",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork() is of POSIX")
@pytest.mark.parametrize("before", BEFORE)
def test_calls_after_fork(before):
    if "torch" in before:
        pytest.importorskip("torch")
    program = PROGRAM.format(before=BEFORE[before])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
