"""Calls flash-linear-attention's KDA functions and tells what became of the call.

As a module it serves test_fla.py and fla_cases.py in their own process; as a program it does the
same in another process, for other releases of FLA and for variables that are read at import:

    python fla_driver.py '{"B": 1, "T": 64, "H": 2, "call": {"state_v_first": true}}'

prints one line of JSON with what run() returns, less the tensors; "import": true imports
flash_kda.fla first, "function" is another one than chunk_kda.
"""

import importlib.metadata
import json
import logging
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch

import flash_kda

FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
    "output_final_state": True,
}
D = 128


def make_inputs(B, T, H, cu_seqlens=None, seed=0, HV=None, K=D, V=D):
    """FLA's acceptance distribution: positive, hence correlated, keys. The state is [V, K]."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    HV = HV or H
    N = len(cu_seqlens) - 1 if cu_seqlens else B
    return {
        "q": uniform(B, T, H, K).bfloat16(),
        "k": uniform(B, T, H, K).bfloat16(),
        "v": uniform(B, T, HV, V).bfloat16(),
        "g": normal(B, T, HV, K).bfloat16(),
        "beta": normal(B, T, HV).bfloat16(),
        "A_log": (1 + 15 * uniform(HV)).log(),
        "dt_bias": normal(HV * K),
        "initial_state": normal(N, HV, V, K),
        "cu_seqlens": torch.tensor(cu_seqlens) if cu_seqlens else None,
    }


def ratio(got, wanted):
    """RMS(error) / RMS(wanted); infinite where anything is not finite."""
    got, wanted = got.cpu().double(), wanted.cpu().double()
    if got.shape != wanted.shape or not bool(got.isfinite().all()):
        return math.inf
    return ((got - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()).item()


def reference(inputs, lower_bound=-5.0, **flags):
    """out and final state [N, HV, V, K] of the float64 definition; inputs on the CPU."""
    q, v, cu = inputs["q"], inputs["v"], inputs["cu_seqlens"]
    N = q.shape[0] if cu is None else len(cu) - 1
    out = torch.full(v.shape, math.nan, dtype=torch.float64)
    final = torch.full((N, *v.shape[2:], q.shape[3]), math.nan, dtype=torch.float64)
    flash_kda.reference(
        *(inputs[name] for name in ("q", "k", "v", "g", "beta")),
        q.shape[3] ** -0.5,
        out,
        *(inputs[name] for name in ("A_log", "dt_bias")),
        lower_bound,
        inputs["initial_state"],
        final,
        cu,
        **flags,
    )
    return out, final


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def forget_logged():
    """Lets FLA 0.6 log each decision again; it does so once per process."""
    backends = sys.modules.get("fla.backends")
    for name in ("_function_registries", "_operation_registries"):
        for registry in getattr(backends, name, {}).values():
            registry._logged.clear()


def _counted(name, calls):
    original = getattr(flash_kda, name)

    def counted(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    return original, counted


def run(inputs, function="chunk_kda", grad=False, args=(), **call):
    """function(*args, **inputs, **FLAGS, **call) under inference_mode, and what happened.

    Returns:
        A dict with calls (of ours, such as ["fwd"]), kernel (by our own report; None if nothing ran
        in this call), log (FLA's lines on backends), error (of the function, or None), out and
        final.
    """
    from fla.ops.kda import chunk_kda, fused_recurrent

    called = chunk_kda if function == "chunk_kda" else getattr(fused_recurrent, function)
    forget_logged()
    calls = []
    originals = {}
    lines = _Lines()
    loggers = [logging.getLogger(name) for name in ("fla.backends", "fla.ops.backends")]
    levels = [logger.level for logger in loggers]
    before = (flash_kda.last_report() or {}).get("num_calls", 0)
    result = {"out": None, "final": None, "error": None}
    try:
        for name in ("fwd", "decode"):
            originals[name], counted = _counted(name, calls)
            setattr(flash_kda, name, counted)
        for logger in loggers:
            logger.addHandler(lines)
            logger.setLevel(logging.INFO)
        with torch.enable_grad() if grad else torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the old name of an option
            result["out"], result["final"] = called(*args, **{**inputs, **FLAGS, **call})
    except Exception as error:  # Triton refuses CPU tensors in a different way in each release
        result["error"] = f"{type(error).__name__}: {error}"
    finally:
        for name, original in originals.items():
            setattr(flash_kda, name, original)
        for logger, level in zip(loggers, levels):
            logger.removeHandler(lines)
            logger.setLevel(level)
    after = flash_kda.last_report() or {"num_calls": 0, "kernel": None}
    result["calls"] = calls
    result["kernel"] = after["kernel"] if after["num_calls"] == before + 1 else None
    result["log"] = lines.lines
    return result


def run_elsewhere(wanted, path=(), **environment):
    """main(wanted) in a process of its own, where `path` comes before the installed packages."""
    environment = {**os.environ, **environment}
    paths = [*map(str, path), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(part for part in paths if part)
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(wanted)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert Path(result["flash_kda"]).resolve() == Path(flash_kda.__file__).resolve()
    return result


def main(argument):
    wanted = json.loads(argument)
    served = None
    messages = []
    if wanted.get("import"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            from flash_kda.fla import served
        messages = [str(w.message) for w in caught if "flash_kda" in str(w.message)]
    inputs = make_inputs(
        wanted["B"], wanted["T"], wanted["H"], wanted.get("cu_seqlens"), wanted.get("seed", 0)
    )
    result = run(inputs, wanted.get("function", "chunk_kda"), **wanted["call"])
    out, final = result.pop("out"), result.pop("final")
    if result["calls"]:
        wanted_out, wanted_final = reference(inputs, wanted["call"].get("lower_bound", -5.0))
        result["ratio_out"] = ratio(out, wanted_out)
        result["ratio_final"] = ratio(final, wanted_final)
    for package in ("fla-core", "triton", "torch"):
        result[package] = importlib.metadata.version(package)
    result.update(flash_kda=flash_kda.__file__, served=served, warnings=messages)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
