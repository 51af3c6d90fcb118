"""Inputs, poisoned outputs and error measures that the Python tests share.

A test makes a Call (the arguments of flash_kda.fwd by name), runs it with `run` or `check`, and
compares it with `yardstick`, the library's float64 definition. `run` fills everything that may be
written with NaN first, demands that every element which belongs to a sequence was written, that
nothing else was, and that no input changed.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import struct
from typing import Any, NamedTuple

import pytest
import torch

import flash_kda

torch.set_num_threads(1)  # small tensors: a second thread only waits

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.uint8}
DATA = pathlib.Path(__file__).parents[2] / "data"

# ---- Kernels: every instruction set of this machine, and bf16 products where a set has them ------


class Kernel(NamedTuple):
    isa: str
    precision: str

    def __str__(self):
        return f"{self.isa}-{self.precision}"

    def bound(self, dtype):
        """Largest allowed RMS(error) / RMS(reference) of a large result of that dtype."""
        if self.precision == "bf16":
            return 4e-3
        return 1e-6 if dtype == F32 else 1.75e-3  # rounding to bf16 alone costs 1.66e-3


@contextlib.contextmanager
def environment(**variables):
    """Sets FLASH_KDA_<name>, or removes it where the value is None, for the time of a block."""
    names = {f"FLASH_KDA_{name}": value for name, value in variables.items()}
    before = {name: os.environ.get(name) for name in names}

    def put(values):
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = str(value)

    put(names)
    try:
        yield
    finally:
        put(before)


def selected(kernel, threads=None):
    if kernel is None:
        return environment(NUM_THREADS=threads)
    return environment(CPU_ISA=kernel.isa, PRECISION=kernel.precision, NUM_THREADS=threads)


def has_bf16_products(isa):
    x = torch.zeros(1, 1, 1, 128, dtype=BF16)
    try:
        flash_kda.fwd(
            x,
            x,
            x,
            x,
            x[..., 0],
            1.0,
            torch.empty_like(x),
            None,
            None,
            -5.0,
            isa=isa,
            precision="bf16",
        )
    except NotImplementedError:
        return False
    return True


# The sets that add bf16 products take everything else from avx512; test_cases_memory.py (case 49)
# proves that, so that each kernel is tested once.
USABLE = flash_kda.info()["cpu_isa_usable"]
KERNELS = [Kernel(isa, "fp32") for isa in USABLE if isa in ("portable", "avx2", "avx512")]
KERNELS += [Kernel(isa, "bf16") for isa in USABLE if has_bf16_products(isa)]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=str)
FP32_KERNELS = [kernel for kernel in KERNELS if kernel.precision == "fp32"]
each_isa = pytest.mark.parametrize("kernel", FP32_KERNELS, ids=str)  # decode has one arithmetic

# ---- Numbers -------------------------------------------------------------------------------------


def normal(*shape, seed=11, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def uniform(*shape, seed=12):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# ---- Calls ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Call:
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    scale: float
    A_log: Any = None
    dt_bias: Any = None
    lower_bound: float | None = -5.0
    initial_state: Any = None
    cu_seqlens: Any = None
    options: dict = dataclasses.field(default_factory=dict)  # keyword-only arguments of fwd

    def __repr__(self):
        kinds = {
            n: f"{str(t.dtype)[6:]}{list(t.shape)} strides {list(t.stride())}"
            for n, t in self.tensors().items()
        }
        return (
            f"Call({kinds}, scale {self.scale:.4g}, lower_bound {self.lower_bound}, "
            f"cu_seqlens {self.cu_seqlens}, options {list(self.options)})"
        )

    def but(self, **changes):
        """A copy with some arguments replaced."""
        return dataclasses.replace(self, **{"options": dict(self.options)} | changes)

    def __setattr__(self, name, value):
        assert "_shared" not in self.__dict__, "this call belongs to several tests: use but()"
        object.__setattr__(self, name, value)

    def cut(self, begin, end, initial_state=None):
        """Tokens [begin, end) of every row, without cu_seqlens."""
        parts = {name: getattr(self, name)[:, begin:end] for name in ("q", "k", "v", "g", "beta")}
        return self.but(**parts, cu_seqlens=None, initial_state=initial_state)

    def channels(self, part):
        """Some value channels only. They are independent of one another, and float64 is slow."""
        state = self.initial_state
        return self.but(
            v=self.v[..., part],
            initial_state=None if state is None else state[:, :, part].contiguous(),
        )

    @property
    def sequences(self):
        return self.q.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def spans(self):
        """(batch row, first token, last token + 1) of every sequence."""
        if self.cu_seqlens is None:
            return [(n, 0, self.q.shape[1]) for n in range(self.q.shape[0])]
        cu = [int(c) for c in self.cu_seqlens]
        return [(0, cu[n], cu[n + 1]) for n in range(len(cu) - 1)]

    def state_shape(self, slots=None):
        slots = self.sequences if slots is None else slots
        return (slots, self.v.shape[2], self.v.shape[3], self.k.shape[3])

    def tensors(self):
        """Every input tensor by name, options included."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | self.options
        return {name: t for name, t in named.items() if isinstance(t, torch.Tensor)}


def make(
    T,
    H=2,
    *,
    B=1,
    HV=None,
    K=128,
    V=128,
    regime="reports",
    seed=0,
    dtype=BF16,
    cu=None,
    initial=None,
    lower_bound=-5.0,
    index=torch.int64,
    **options,
):
    """A Call with generated inputs. `initial` is the dtype of an initial state, None for none.

    Regimes: "reports" is the default of the cases from public reports (A_log = log U(1, 16),
    dt_bias normal: fast decay); "random" the benchmarks' (A_log, dt_bias uniform in [0, 1));
    "slow" has a log-decay near -0.001; "trained" are activations of a trained model, layers side
    by side as heads, tiled to size.
    """
    HV = HV or H
    gen = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=gen)

    if regime == "trained":
        parts = trained(T, H, B)
        call = Call(**parts, scale=K**-0.5, lower_bound=lower_bound, options=options)
    else:
        call = Call(
            drawn(B, T, H, K),
            drawn(B, T, H, K),
            drawn(B, T, HV, V),
            drawn(B, T, HV, K),
            drawn(B, T, HV),
            K**-0.5,
            lower_bound=lower_bound,
            options=options,
        )
        if regime == "reports":
            call.A_log = torch.log(1 + 15 * torch.rand(HV, generator=gen))
            call.dt_bias = drawn(HV, K)
        elif regime == "random":
            call.A_log, call.dt_bias = (torch.rand(*s, generator=gen) for s in ((HV,), (HV, K)))
        elif regime == "slow":
            call.g = 0.5 * call.g - 8.5
            call.A_log, call.dt_bias = torch.zeros(HV), torch.zeros(HV, K)
        else:
            raise ValueError(regime)
    for name in ("q", "k", "v", "g", "beta"):
        setattr(call, name, getattr(call, name).to(dtype))
    if cu is not None:
        call.cu_seqlens = torch.tensor(cu, dtype=index)
    if initial is not None:
        call.initial_state = (0.1 * drawn(*call.state_shape())).to(initial)
    return call


_SHARED = collections.OrderedDict()


def built_once(build):
    """For a function that builds a Call: the kernels of a test share it and its yardstick."""

    @functools.wraps(build)
    def once(*args, **options):
        key = build.__name__, repr((args, sorted(options.items())))
        if key not in _SHARED:
            _SHARED[key] = build(*args, **options)
            _SHARED[key].__dict__["_shared"] = True
            if len(_SHARED) > 32:
                _SHARED.popitem(last=False)
        return _SHARED[key]

    return once


@built_once
def shared(*args, **options):
    return make(*args, **options)


@built_once
def any_rate(A_log, lower_bound):
    """A head whose exp(A_log) may be nothing or past fp32, beside a usual one; gates that are zero
    before and after it, far below and far above included."""
    call = make(70, 2, lower_bound=lower_bound, initial=F32)
    g = call.g.clone()
    g[..., 0], g[..., 1], g[..., 2] = 0.0, -1000.0, -60.0
    g[..., 3], g[:, 5] = 1e30, -20.0
    bias = call.dt_bias.clone()
    bias[:, :64] = 0.0
    return call.but(g=g, dt_bias=bias, A_log=torch.tensor([A_log, 0.5]))


RATES = [-1e30, -100.0, -20.0, 5.0, 20.0, 60.0, 84.0, 88.0, 89.0, 100.0, 700.0]


def read_safetensors(path):
    """{name: tensor} of a file that is trusted; the hostile ones are the program's tests."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header, body = json.loads(file.read(size)), bytearray(file.read())
    header.pop("__metadata__", None)
    dtypes = {"BF16": BF16, "F32": F32}
    return {
        name: torch.frombuffer(
            body,
            dtype=dtypes[t["dtype"]],
            offset=t["data_offsets"][0],
            count=torch.Size(t["shape"]).numel(),
        ).view(t["shape"])
        for name, t in header.items()
    }


@functools.lru_cache(None)
def trained_layers():
    """The full file where FLASH_KDA_DATA names it, else the slice in data/."""
    path = os.environ.get("FLASH_KDA_DATA") or min(DATA.glob("*.safetensors"))
    tensors = read_safetensors(path)
    layers = sorted({name.split(".")[0] for name in tensors})
    return {
        name: [tensors[f"{layer}.{name}"] for layer in layers]
        for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    }


def trained(T, H, B):
    layers, parts = trained_layers(), {}
    for name in ("q", "k", "v", "g", "beta"):
        x = torch.cat(layers[name], dim=2)
        x = x[:, torch.arange(T * B) % x.shape[1]][:, :, torch.arange(H) % x.shape[2]]
        parts[name] = x.reshape(B, T, *x.shape[2:]).contiguous()
    for name in ("A_log", "dt_bias"):
        x = torch.cat(layers[name])
        parts[name] = x[torch.arange(H) % len(x)].contiguous()
    return parts


# ---- Running -------------------------------------------------------------------------------------


class Result(NamedTuple):
    out: torch.Tensor
    final: torch.Tensor | None
    checkpoints: torch.Tensor | None = None


def poisoned(shape, dtype):
    """NaN in every element, whatever float type it is read as."""
    return torch.full(shape, -1, dtype=BITS[torch.empty(0, dtype=dtype).element_size()]).view(dtype)


def bits(x):
    return x.contiguous().view(BITS[x.element_size()])


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def workspace_for(call, kernel, threads):
    tokens = call.q.shape[0] * call.q.shape[1]
    with selected(kernel, threads):  # each thread has a part of its own
        size = flash_kda.get_workspace_size(tokens, call.v.shape[2], call.sequences)
    return torch.full((size,), 255, dtype=torch.uint8)  # NaN, and no valid index


def run(
    call,
    kernel=None,
    *,
    fn=None,
    threads=None,
    out=None,
    out_dtype=BF16,
    state_dtype=F32,
    final=None,
    checkpoints=None,
    workspace=False,
    finite=True,
):
    """One call on poisoned outputs -> Result.

    out: where to write, else a fresh contiguous tensor. final: False for none, a tensor to write
    to. checkpoints: number of checkpoint states to allocate. finite: False where the inputs hold
    NaN, so that only what is untouched is looked at.
    """
    fn = fn or flash_kda.fwd
    if out is None:
        out = poisoned(call.v.shape, out_dtype)
    if final is None:
        final = poisoned(call.state_shape(), state_dtype)
    elif final is False:
        final = None
    options = dict(call.options)
    if checkpoints is not None:
        options["checkpoint_state"] = poisoned(call.state_shape(checkpoints), state_dtype)
    if workspace:
        options["workspace"] = workspace_for(call, kernel, threads)
    shared = [t.data_ptr() for t in (out, final) if t is not None]
    before = {
        name: t.clone()
        for name, t in call.tensors().items()
        if name not in ("workspace", "checkpoint_state") and t.data_ptr() not in shared
    }

    with selected(kernel, threads):
        done = fn(
            call.q,
            call.k,
            call.v,
            call.g,
            call.beta,
            call.scale,
            out,
            call.A_log,
            call.dt_bias,
            call.lower_bound,
            call.initial_state,
            final,
            call.cu_seqlens,
            **options,
        )
    assert done is None

    for name, t in before.items():
        assert same_bits(call.tensors()[name], t), f"{name} was modified"
    if call.cu_seqlens is not None:
        end = int(call.cu_seqlens[-1])
        assert (bits(out[:, end:]) == -1).all(), "rows past cu_seqlens[-1] were written"
    if finite:
        for batch, begin, end in call.spans():
            assert torch.isfinite(out[batch, begin:end]).all(), "out holds NaN or was not written"
        if final is not None and "state_indices" not in options:
            assert torch.isfinite(final).all(), "final_state holds NaN or was not written"
    return Result(out, final, options.get("checkpoint_state"))


def decode(call, state, kernel=None, *, threads=None, out_dtype=BF16, **options):
    """One decode call on a poisoned out; `state` is updated in place. -> out"""
    out = poisoned(call.v.shape, out_dtype)
    inputs = call.tensors() | {n: t for n, t in options.items() if isinstance(t, torch.Tensor)}
    before = {name: t.clone() for name, t in inputs.items()}
    with selected(kernel, threads):
        done = flash_kda.decode(
            call.q,
            call.k,
            call.v,
            call.g,
            call.beta,
            call.scale,
            out,
            call.A_log,
            call.dt_bias,
            call.lower_bound,
            state,
            cu_seqlens=call.cu_seqlens,
            **call.options,
            **options,
        )
    assert done is None
    for name, t in before.items():
        assert same_bits(inputs[name], t), f"{name} was modified"
    return out


def yardstick(call, **how):
    """The float64 definition of this call, computed once per call."""
    kept = call.__dict__.setdefault("_yardstick", {})
    key = repr(sorted(how.items()))
    if key not in kept:
        kept[key] = run(call, fn=flash_kda.reference, out_dtype=F64, state_dtype=F64, **how)
    return kept[key]


# ---- Measures ------------------------------------------------------------------------------------


def rms(x):
    return float(x.double().square().mean().sqrt())


def rms_ratio(got, want):
    """RMS(error) / RMS(reference); NaN or infinity anywhere is an error, never a number."""
    assert got.shape == want.shape
    got, want = got.double(), want.double()
    assert torch.isfinite(got).all() and torch.isfinite(want).all()
    if torch.equal(got, want):
        return 0.0
    return rms(got - want) / max(rms(want), 1e-300)


def beyond_rounding(got, want):
    """|error| of every element, less the half unit in the last place that rounding to bf16 costs.

    RMS ratios of a few hundred bf16 numbers scatter around 1.66e-3 by several percent: a bound of
    1.75e-3 says little about a small tensor. This is 0 for perfect rounding, whatever the size.
    """
    assert got.shape == want.shape and torch.isfinite(got).all() and torch.isfinite(want).all()
    error = (got.double() - want.double()).abs()
    return error if got.dtype != BF16 else (error - want.double().abs() * 2.0**-8).clamp(min=0)


def largest(got, want):
    """Largest error of an element, beyond its rounding to bf16, over RMS(reference) + |element|."""
    error = beyond_rounding(got, want)
    return float((error / (rms(want) + want.abs())).max()) if error.any() else 0.0


def assert_near(kernel, got, want, what="out", bound=None):
    """A result of the kernel against float64, whatever its dtype and size."""
    bf16_products = kernel is not None and kernel.precision == "bf16"
    bound = bound or (4e-3 if bf16_products else 1e-6)
    if bf16_products:
        ratio = rms_ratio(got, want)
    else:
        error = beyond_rounding(got, want)
        ratio = rms(error) / max(rms(want), 1e-300) if error.any() else 0.0
    assert ratio <= bound, f"{what}: error {ratio:.3g} of RMS(reference), bound {bound:.3g}"


def rows_of(call, x):
    """The rows of out that belong to a sequence, one after another."""
    return torch.cat([x[b, begin:end] for b, begin, end in call.spans()] or [x[:0].flatten(0, 1)])


def check(call, kernel=None, **how):
    """Runs the call and compares out and final_state with the definition -> Result."""
    got, want = run(call, kernel, **how), yardstick(call)
    assert_near(kernel, rows_of(call, got.out), rows_of(call, want.out))
    if got.final is not None:
        assert_near(kernel, got.final, want.final, "final_state")
    return got
