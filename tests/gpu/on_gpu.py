"""The shared inputs and measures (tests/python/inputs.py), with the tensors on the GPU.

A Call is made on the CPU, where the float64 definition runs on it, and moved for the call itself.
`run` poisons everything that may be written, and proves that a CUDA kernel did the work.
"""

import dataclasses
import os

import inputs
import pytest
import torch

import flash_kda

DEVICE = "cuda"
INPUTS = ["q", "k", "v", "g", "beta"]
ERRORS = (TypeError, ValueError, RuntimeError)  # what a refused call may raise


def moved(call):
    """The same call with its tensors on the GPU; strides are kept where they are no gaps."""
    parts = {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}
    options = {name: _move(t) for name, t in parts.pop("options").items()}
    return call.but(**{name: _move(t) for name, t in parts.items()}, options=options)


def _move(x):
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


def path():
    """FLASH_KDA_CUDA_PATH, which the fixture `path` sets: auto, sm80, sm90 or sm90-forward."""
    return os.environ.get("FLASH_KDA_CUDA_PATH", "auto")


# A call may be cut at multiples of these tokens without changing a bit.
CUT_TOKENS = {"sm80": 16, "sm90": 128, "sm90-forward": 128}

# How the kernels of a path are named.
KERNELS = {
    "auto": "cuda/",
    "sm80": "cuda/sm80/",
    "sm90": "cuda/sm90/",
    "sm90-forward": "cuda/sm90/forward_",
}


def is_split(report):
    """Whether the library has cut the sequences of that call into segments."""
    return "combine" in report["kernel"]


def reason_against_sm90(call, out=None, checkpoints=None):
    """How the library begins to say why path sm90 does not take this call; None: it does."""
    if call.lower_bound is None or call.options.get("use_gate_in_kernel") is False:
        return "gate without a lower bound"
    if call.v.shape[-1] != 128:
        return "v: head size"
    if call.g.dtype != torch.bfloat16:
        return "g: dtype"
    if checkpoints or "checkpoint_state" in call.options:
        return "checkpoint_state: "
    rows = {name: getattr(call, name) for name in "qkvg"} | ({} if out is None else {"out": out})
    for name, x in rows.items():
        if x.data_ptr() % 16:
            return f"{name}: data at"
        used = [s for size, s in zip(x.shape[:-1], x.stride()) if size > 1]
        if any(s == 0 or s % 8 for s in used):
            return f"{name}: stride"
    return None


def run(call, **how):
    """inputs.run on the GPU; the call may be on either side. One that path sm90 does not take has
    to be refused with the right reason there; the test is skipped with it."""
    if call.q.device.type != DEVICE:
        call = moved(call)
    against = reason_against_sm90(call, how.get("out"), how.get("checkpoints"))
    before = (flash_kda.last_report() or {}).get("num_calls", 0)
    try:
        with torch.device(DEVICE):
            result = inputs.run(call, **how)
    except NotImplementedError as error:
        head, _, reason = str(error).partition(f"FLASH_KDA_CUDA_PATH: {path()}: ")
        if head or not reason:
            raise
        assert path().startswith("sm90") and against and reason.startswith(against), reason
        pytest.skip(f"not for path sm90: {against.rstrip(': ')}")
    report = flash_kda.last_report()
    assert report["num_calls"] == before + 1
    if call.sequences == 0:
        assert report["kernel"] == "cuda/none", report
    else:
        assert report["kernel"].startswith(KERNELS[path()]), report
    assert not path().startswith("sm90") or against is None, f"taken in spite of {against!r}"
    return result


def decode(call, state, **options):
    """inputs.decode on the GPU, `state` there already and updated in place. -> out"""
    if call.q.device.type != DEVICE:
        call = moved(call)
    options = {name: _move(x) for name, x in options.items()}
    before = (flash_kda.last_report() or {}).get("num_calls", 0)
    with torch.device(DEVICE):
        out = inputs.decode(call, state, **options)
    report = flash_kda.last_report()
    assert report["num_calls"] == before + 1
    assert report["kernel"].startswith("cuda/"), report
    return out


def random_pool(call, slots, dtype=inputs.F32, seed=5):
    """States of a decode call, on the GPU."""
    gen = torch.Generator().manual_seed(seed)
    return (0.3 * torch.randn(call.state_shape(slots), generator=gen)).to(dtype).to(DEVICE)


def on_cpu(result):
    return inputs.Result(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in result))


def on_device(*shape, dtype):
    """Poisoned memory there."""
    with torch.device(DEVICE):
        return inputs.poisoned(shape, dtype)


def equal(a, b):
    return inputs.same_bits(a.out, b.out) and inputs.same_bits(a.final, b.final)


# Largest RMS(error) / RMS(reference) of out (bf16: rounding it alone costs 1.66e-3) and of an fp32
# state, by path and gate regime. sm80: a tenth above the worst that the benchmark's records have
# for out, a half for the state. sm90 takes A and P from bf16 factors. `small` is for tensors so
# small that the ratio scatters.
BOUNDS_SM80 = {
    "random": (1.9e-3, 6e-4),
    "trained": (1.9e-3, 6e-4),
    "slow": (1.9e-3, 6e-4),
    "reports": (2.2e-3, 8e-4),
    "small": (4.0e-3, 2e-3),
    "acceptance": (6.0e-3, 6e-3),
    "collinear": (6.0e-3, 7e-3),
    "long": (2.2e-3, 8e-4),
}
# A and P from bf16 factors: a few tokens that hold most of the output show it.
BOUNDS_SM90 = {
    "random": (3.0e-3, 8e-4),
    "trained": (2.2e-3, 8e-4),
    "slow": (2.2e-3, 8e-4),
    "reports": (3.0e-3, 1.2e-3),
    "small": (8.0e-3, 3e-3),
    "acceptance": (6.0e-3, 6e-3),
    "collinear": (3.5e-3, 3.5e-3),
    "long": (2.2e-3, 8e-4),
}


def bounds_of(name, kernel=None):
    """For the kernel of a report, or for the path that the test asks for."""
    sm90 = kernel.startswith("cuda/sm90/") if kernel else path().startswith("sm90")
    return (BOUNDS_SM90 if sm90 else BOUNDS_SM80)[name]


def check(call, bounds="small", cut=None, **how):
    """Runs the call and compares with the definition -> Result on the CPU.

    cut: value channels (a slice) that the definition is computed for; it is slow.
    """
    got = on_cpu(run(call, **how))
    out_bound, state_bound = bounds_of(bounds, flash_kda.last_report()["kernel"])
    part = cut or slice(None)
    want = inputs.yardstick(call if cut is None else call.channels(cut))
    ratio = inputs.rms_ratio(
        inputs.rows_of(call, got.out)[..., part], inputs.rows_of(call, want.out)
    )
    assert ratio <= out_bound, f"out: {ratio:.3g} of RMS(reference), bound {out_bound:.3g}"
    if got.final is not None:
        if got.final.dtype == inputs.BF16:
            state_bound = max(state_bound, 2.5e-3)
        ratio = inputs.rms_ratio(got.final[:, :, part], want.final)
        assert ratio <= state_bound, f"final_state: {ratio:.3g}, bound {state_bound:.3g}"
    return got
