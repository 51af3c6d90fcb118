"""Calls flash-linear-attention's chunk_kda and tells what became of the call.

As a module it serves test_fla.py in its own process; as a program it does the same in another
process, for other releases of FLA and for environment variables that FLA reads at import:

    python fla_driver.py '{"B": 1, "T": 64, "H": 2, "call": {"state_v_first": true}}'

prints one line of JSON with what run() returns, less the tensors.
"""

import importlib.metadata
import json
import logging
import math
import sys

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


def make_inputs(B, T, H, cu_seqlens=None, seed=0):
    """FLA's acceptance distribution: positive, hence correlated, keys."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    N = len(cu_seqlens) - 1 if cu_seqlens else B
    return {
        "q": uniform(B, T, H, D).bfloat16(),
        "k": uniform(B, T, H, D).bfloat16(),
        "v": uniform(B, T, H, D).bfloat16(),
        "g": normal(B, T, H, D).bfloat16(),
        "beta": normal(B, T, H).bfloat16(),
        "A_log": (1 + 15 * uniform(H)).log(),
        "dt_bias": normal(H * D),
        "initial_state": normal(N, H, D, D),
        "cu_seqlens": torch.tensor(cu_seqlens) if cu_seqlens else None,
    }


def ratio(got, wanted):
    """RMS(error) / RMS(wanted); infinite where anything is not finite."""
    got, wanted = got.double(), wanted.double()
    if not bool(got.isfinite().all()):
        return math.inf
    return ((got - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()).item()


def reference(inputs, lower_bound=-5.0):
    """out and final state of the float64 definition."""
    out = torch.full(inputs["v"].shape, math.nan, dtype=torch.float64)
    final = torch.full(inputs["initial_state"].shape, math.nan, dtype=torch.float64)
    names = ("A_log", "dt_bias")
    flash_kda.reference(
        *(inputs[name] for name in ("q", "k", "v", "g", "beta")),
        D**-0.5,
        out,
        *(inputs[name] for name in names),
        lower_bound,
        inputs["initial_state"],
        final,
        inputs["cu_seqlens"],
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
    import fla

    registries = getattr(getattr(fla, "backends", None), "_function_registries", {})
    for registry in registries.values():
        registry._logged.clear()


def run(inputs, **call):
    """chunk_kda(**inputs, **FLAGS, **call) under inference_mode, and what happened.

    Returns:
        A dict with calls (how often flash_kda.fwd ran), kernel (by our own report; None if it did
        not run in this call), log (FLA's lines on backends), error (of chunk_kda, or None), out and
        final.
    """
    from fla.ops.kda import chunk_kda

    forget_logged()
    calls = 0
    original = flash_kda.fwd

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    lines = _Lines()
    loggers = [logging.getLogger(name) for name in ("fla.backends", "fla.ops.backends")]
    levels = [logger.level for logger in loggers]
    before = (flash_kda.last_report() or {}).get("num_calls", 0)
    result = {"out": None, "final": None, "error": None}
    flash_kda.fwd = counted
    try:
        for logger in loggers:
            logger.addHandler(lines)
            logger.setLevel(logging.INFO)
        with torch.inference_mode():
            result["out"], result["final"] = chunk_kda(**inputs, **{**FLAGS, **call})
    except Exception as error:  # Triton refuses CPU tensors in a different way in each release
        result["error"] = f"{type(error).__name__}: {error}"
    finally:
        flash_kda.fwd = original
        for logger, level in zip(loggers, levels):
            logger.removeHandler(lines)
            logger.setLevel(level)
    after = flash_kda.last_report() or {"num_calls": 0, "kernel": None}
    result["calls"] = calls
    result["kernel"] = after["kernel"] if after["num_calls"] == before + 1 else None
    result["log"] = lines.lines
    return result


def main(argument):
    wanted = json.loads(argument)
    inputs = make_inputs(
        wanted["B"], wanted["T"], wanted["H"], wanted.get("cu_seqlens"), wanted.get("seed", 0)
    )
    result = run(inputs, **wanted["call"])
    out, final = result.pop("out"), result.pop("final")
    if result["calls"]:
        wanted_out, wanted_final = reference(inputs)
        result["ratio_out"] = ratio(out, wanted_out)
        result["ratio_final"] = ratio(final, wanted_final)
    for package in ("fla-core", "triton", "torch"):
        result[package] = importlib.metadata.version(package)
    result["flash_kda"] = flash_kda.__file__
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
