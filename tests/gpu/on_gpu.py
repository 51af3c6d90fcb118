"""The shared inputs and measures (tests/python/inputs.py), with the tensors on the GPU.

A Call is made on the CPU, where the float64 definition runs on it, and moved for the call itself.
`run` poisons everything that may be written, and proves that a CUDA kernel did the work.
"""

import dataclasses

import inputs
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


def run(call, **how):
    """inputs.run on the GPU; the call may be on either side."""
    if call.q.device.type != DEVICE:
        call = moved(call)
    before = (flash_kda.last_report() or {}).get("num_calls", 0)
    with torch.device(DEVICE):
        result = inputs.run(call, **how)
    report = flash_kda.last_report()
    assert report["num_calls"] == before + 1
    assert report["kernel"].startswith("cuda/"), report
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
# state, by gate regime: a tenth above the worst that the benchmark's records have for out, a half
# for the state. `small` is for tensors so small that the ratio scatters.
BOUNDS = {
    "random": (1.9e-3, 6e-4),
    "trained": (1.9e-3, 6e-4),
    "slow": (1.9e-3, 6e-4),
    "reports": (2.2e-3, 8e-4),
    "small": (4.0e-3, 2e-3),
    "acceptance": (6.0e-3, 6e-3),
    "collinear": (6.0e-3, 7e-3),
}


def check(call, bounds="small", cut=None, **how):
    """Runs the call and compares with the definition -> Result on the CPU.

    cut: value channels (a slice) that the definition is computed for; it is slow.
    """
    out_bound, state_bound = BOUNDS[bounds]
    got = on_cpu(run(call, **how))
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
