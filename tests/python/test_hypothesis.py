"""Generated calls: good ones against the definition, bad ones must raise and write nothing.

The examples are the same in every run (derandomize), so a failure here can be run again.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import (
    BF16,
    F32,
    assert_near,
    bits,
    decode,
    each_isa,
    each_kernel,
    make,
    normal,
    poisoned,
    rows_of,
    run,
    same_bits,
    uniform,
    yardstick,
)

import flash_kda

ERRORS = (TypeError, ValueError, RuntimeError)
FIXED = settings(
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
FLOATS = st.sampled_from([BF16, F32])


# ---- Good calls ----------------------------------------------------------------------------------


def spread(draw, x):
    """The same values in memory of another layout: gaps, another order of dimensions, an offset."""
    order = draw(st.permutations(range(x.dim() - 1))) + [x.dim() - 1]
    gaps = [draw(st.sampled_from([0, 0, 1, 8])) for _ in range(x.dim())]
    store = torch.full([x.shape[d] + gap for d, gap in zip(order, gaps)], float("nan")).to(x.dtype)
    back = [order.index(d) for d in range(x.dim())]
    view = store.permute(back)[
        tuple(slice(store.permute(back).shape[d] - n, None) for d, n in enumerate(x.shape))
    ]
    view.copy_(x)
    return view


@st.composite
def calls(draw, max_tokens=70, decode=False):
    seed = draw(st.integers(0, 2**20))
    H, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (5, 1), (9, 1)]))
    options, cu, B = {}, None, 1
    lengths = (
        st.integers(0, 16)
        if decode
        else st.one_of(
            st.integers(0, 3), st.integers(0, max_tokens), st.sampled_from([15, 16, 17, 32, 48])
        )
    )
    if draw(st.booleans()):
        parts = draw(st.lists(lengths, min_size=0, max_size=4))
        cu = [sum(parts[:n]) for n in range(len(parts) + 1)]
        T = cu[-1] + draw(st.sampled_from([0, 0, 1, 20]))
    else:
        B = draw(st.integers(1, 3))
        T = max(draw(lengths), 1 if decode else 0)
    gate = draw(st.sampled_from(["bounded", "bounded", "softplus", "activated"]))
    lower_bound = (
        draw(st.sampled_from([-5.0, -5.0, -1.25, -1e-3, 0.0])) if gate == "bounded" else None
    )
    regime = draw(st.sampled_from(["reports", "random", "slow", "trained"]))
    call = make(
        T,
        H,
        B=B,
        HV=H * group if regime != "trained" else H,
        regime=regime,
        seed=seed,
        dtype=F32,
        cu=cu,
        lower_bound=lower_bound,
        index=draw(st.sampled_from([torch.int32, torch.int64])),
    )
    if gate == "activated":
        depth = draw(st.sampled_from([1e-3, 1.0, 6.0, 40.0]))
        call = call.but(g=-depth * uniform(*call.g.shape, seed=seed), A_log=None, dt_bias=None)
        options["use_gate_in_kernel"] = False
    else:
        call.g = call.g + draw(st.sampled_from([0.0, 0.0, -10.0, 10.0]))
        call.A_log = draw(st.sampled_from([call.A_log, call.A_log, None]))
        if draw(st.booleans()):
            call.dt_bias = draw(st.sampled_from([None, call.dt_bias.reshape(-1)]))
    if draw(st.booleans()):
        options["use_beta_sigmoid_in_kernel"] = False
        call.beta = torch.sigmoid(call.beta)
    if draw(st.booleans()):
        options["use_qk_l2norm_in_kernel"] = False
        call.q, call.k = (torch.nn.functional.normalize(x, dim=-1) for x in (call.q, call.k))
    if draw(st.booleans()):
        options["allow_neg_eigval"] = True
    call.scale = draw(st.sampled_from([128**-0.5, 1.0, -2.5]))
    for name in ("q", "k", "v", "g", "beta"):
        x = getattr(call, name).to(draw(FLOATS))
        setattr(call, name, spread(draw, x) if draw(st.booleans()) else x)
    if not decode:
        initial = draw(st.sampled_from([None, BF16, F32]))
        if initial is not None:
            call.initial_state = (0.2 * normal(*call.state_shape())).to(initial)
    call.options = options
    return call


@each_kernel
@settings(FIXED, max_examples=80)
@given(data=st.data())
def test_generated_forward(kernel, data):
    call = data.draw(calls())
    state = data.draw(st.sampled_from([None, BF16, F32]))
    how = dict(
        out_dtype=data.draw(FLOATS),
        threads=data.draw(st.sampled_from([None, 1, 2, 5])),
        workspace=data.draw(st.booleans()),
    )
    if state is None:
        got = run(call, kernel, final=False, **how)
    else:
        got = run(call, kernel, state_dtype=state, **how)
    want = yardstick(call)
    assert_near(kernel, rows_of(call, got.out), rows_of(call, want.out))
    if state is not None:
        assert_near(kernel, got.final, want.final, "final_state")


@each_kernel
@settings(FIXED, max_examples=40)
@given(data=st.data())
def test_generated_cuts_and_checkpoints(kernel, data):
    """One sequence: cut anywhere, and a checkpoint there where that is a multiple of 16."""
    call = data.draw(calls())
    call = call.but(cu_seqlens=None, initial_state=None)
    T = call.q.shape[1]
    if data.draw(st.booleans()):
        call.initial_state = 0.2 * normal(*call.state_shape())
    cut = data.draw(st.integers(0, T))
    cut = cut // 16 * 16 if data.draw(st.booleans()) else cut
    whole = run(call, kernel)
    first = run(call.cut(0, cut, call.initial_state), kernel)
    second = run(call.cut(cut, T, first.final), kernel)
    out, want = torch.cat([first.out, second.out], 1), yardstick(call)
    if cut % 16 == 0:
        assert same_bits(out, whole.out) and same_bits(second.final, whole.final)
        offsets = torch.tensor([cut] * call.sequences)
        marked = run(
            call.but(options=call.options | {"checkpoint_offsets": offsets}),
            kernel,
            checkpoints=call.sequences,
        )
        assert same_bits(marked.checkpoints, first.final) and same_bits(marked.out, whole.out)
    assert_near(kernel, out, want.out)
    assert_near(kernel, second.final, want.final, "final_state")


@each_kernel
@settings(FIXED, max_examples=50)
@given(data=st.data())
def test_generated_pools(kernel, data):
    """A pool in place gives what separate states give; every other slot keeps its bits."""
    call = data.draw(calls(max_tokens=40)).but(initial_state=None)
    N, dtype = call.sequences, data.draw(FLOATS)
    slots = data.draw(st.permutations(range(N + 2)))[:N]
    slots = [-1 if data.draw(st.integers(0, 3)) == 0 else s for s in slots]
    pool = (0.2 * normal(*call.state_shape(N + 2))).to(dtype)
    start = torch.zeros(call.state_shape(), dtype=dtype)
    for n, slot in enumerate(slots):
        if slot >= 0:
            start[n] = pool[slot]
    want = run(call.but(initial_state=start), kernel, state_dtype=dtype)
    after = pool.clone()
    index = torch.tensor(slots, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    got = run(
        call.but(initial_state=after, options=call.options | {"state_indices": index}),
        kernel,
        final=after,
    )
    for n, (batch, begin, end) in enumerate(call.spans()):
        if slots[n] < 0:
            assert not got.out[batch, begin:end].any()
        else:
            assert same_bits(got.out[batch, begin:end], want.out[batch, begin:end])
            assert same_bits(after[slots[n]], want.final[n])
    for slot in set(range(N + 2)) - set(slots):
        assert same_bits(after[slot], pool[slot])


@each_isa
@settings(FIXED, max_examples=60)
@given(data=st.data())
def test_generated_decode(kernel, data):
    call = data.draw(calls(decode=True))
    dtype, out_dtype = data.draw(FLOATS), data.draw(FLOATS)
    state = (0.2 * normal(*call.state_shape())).to(dtype)
    want = yardstick(call.but(initial_state=state.clone()))
    threads = data.draw(st.sampled_from([None, 1, 3]))
    out = decode(call, state, kernel, threads=threads, out_dtype=out_dtype)
    assert_near(kernel, rows_of(call, out), rows_of(call, want.out))
    assert_near(kernel, state, want.final, "state")
    if call.cu_seqlens is not None:
        assert (bits(out[:, int(call.cu_seqlens[-1]) :]) == -1).all()


# ---- Bad calls -----------------------------------------------------------------------------------

TENSORS = ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "out", "initial_state", "final_state"]


def good():
    call = make(19, 2, HV=4, initial=F32)
    args = {
        n: getattr(call, n)
        for n in (
            "q",
            "k",
            "v",
            "g",
            "beta",
            "scale",
            "A_log",
            "dt_bias",
            "lower_bound",
            "initial_state",
        )
    }
    return args | {
        "out": poisoned(call.v.shape, BF16),
        "final_state": poisoned(call.state_shape(), F32),
        "cu_seqlens": torch.tensor([0, 19]),
    }


class Broken(dict):
    """Arguments of which one is wrong, and the names that the message may carry."""

    def __init__(self, names, args):
        super().__init__(args)
        self.names = names

    def __repr__(self):
        return (
            f"Broken({self.names}, "
            + ", ".join(
                f"{n}: {t.dtype} {list(t.shape)} {list(t.stride())}"
                if isinstance(t, torch.Tensor)
                else f"{n}: {t!r}"
                for n, t in self.items()
            )
            + ")"
        )


@st.composite
def broken_tensors(draw):
    """One tensor spoiled in one way."""
    args = good()
    name = draw(st.sampled_from(TENSORS))
    x = args[name]
    how = draw(st.sampled_from(["dtype", "shape", "rank", "stride", "device", "type"]))
    if how == "dtype":
        wrong = x.to(
            draw(
                st.sampled_from(
                    [
                        torch.float16,
                        torch.int8,
                        torch.int32,
                        torch.float64,
                        torch.bool,
                        torch.complex64,
                    ]
                )
            )
        )
    elif how == "shape":
        dim = draw(st.integers(0, x.dim() - 1))
        shape = list(x.shape)
        shape[dim] = draw(
            st.integers(0, 9).map(lambda n: n + shape[dim] + 1) | st.integers(0, shape[dim] - 1)
        )
        wrong = torch.zeros(shape, dtype=x.dtype)
    elif how == "rank":
        wrong = x.reshape(x.shape + (1,)) if draw(st.booleans()) else x[0].clone()
    elif how == "stride":
        wrong = torch.zeros(*x.shape, 2, dtype=x.dtype)[..., 1]
        if name == "A_log":  # the only tensor whose last stride is free
            wrong = torch.zeros(x.shape[0] + 1)
    elif how == "device":
        wrong = x.to("meta")
    else:
        wrong = draw(st.sampled_from([7, "x", b"bytes", 1.5, [], {}, (1, 2)]))
    # A shape that disagrees is blamed on either side.
    names = TENSORS + ["cu_seqlens"] if how == "shape" else [name, "meta"]
    return Broken(names, args | {name: wrong})


@st.composite
def broken_scalars(draw):
    args = good()
    name, value = draw(
        st.sampled_from(
            [
                ("lower_bound", -5.5),
                ("lower_bound", 0.1),
                ("lower_bound", float("nan")),
                ("lower_bound", "x"),
                ("scale", float("nan")),
                ("scale", float("inf")),
                ("scale", None),
                ("num_threads", 0),
                ("num_threads", -3),
                ("num_threads", "two"),
                ("num_threads", 2.5),
                ("num_threads", 10**12),
                ("isa", "sse9"),
                ("isa", 3),
                ("isa", "AVX2"),
                ("precision", "fp8"),
                ("precision", 16),
                ("use_qk_l2norm_in_kernel", "no"),
                ("use_gate_in_kernel", None),
                ("allow_neg_eigval", 7),
                ("use_gate_in_kernel", 0.5),
            ]
        )
    )
    return Broken([name], args | {name: value})


@st.composite
def broken_sequences(draw):
    """cu_seqlens with one entry spoiled, so that it is not 0 = cu[0] <= ... <= cu[N] <= T."""
    args = good()
    parts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))
    cu = [sum(parts[:n]) for n in range(len(parts) + 1)]
    at = draw(st.integers(0, len(cu) - 1))
    value = draw(st.integers(-(2**63), -1) | st.integers(20, 2**63 - 1))
    cu[at] = value
    shape = (len(parts), *args["final_state"].shape[1:])
    return Broken(
        ["cu_seqlens"],
        args
        | {
            "cu_seqlens": torch.tensor(cu),
            "initial_state": None,
            "final_state": poisoned(shape, F32),
        },
    )


@st.composite
def broken_memory(draw):
    """An output over an input or another output, at a drawn distance; or a workspace too small."""
    args = good()
    kind = draw(st.sampled_from(["out", "final_state", "workspace"]))
    if kind == "workspace":
        need = flash_kda.get_workspace_size(19, 4, 1)
        size = draw(st.integers(0, need - 1))
        return Broken(["workspace"], args | {"workspace": torch.zeros(size, dtype=torch.uint8)})
    target = args[kind]
    other = draw(
        st.sampled_from(
            [
                n
                for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "out")
                if n != kind
            ]
        )
    )
    x = args[other]
    need, size = target.numel() * target.element_size(), x.numel() * x.element_size()
    # Byte offset of `other` from the output: anything that still overlaps, aligned to 16.
    shift = draw(st.integers(-((size - 1) // 16), (need - 1) // 16)) * 16
    if shift == 0 and kind == "final_state" and other == "initial_state":
        shift = 16
    base = max(0, -shift)
    store = torch.zeros(max(base + need, base + shift + size), dtype=torch.uint8)
    store[base + shift : base + shift + size] = x.contiguous().view(-1).view(torch.uint8)
    over = store[base + shift : base + shift + size].view(x.dtype).view(x.shape)
    target = store[base : base + need].view(target.dtype).view(target.shape)
    return Broken([kind, other], args | {other: over, kind: target})


@settings(FIXED, max_examples=300)
@given(
    st.one_of(broken_tensors(), broken_scalars(), broken_sequences(), broken_memory()),
    st.sampled_from(["fwd", "reference"]),
)
def test_generated_bad_calls_raise_and_write_nothing(broken, function):
    names, args = broken.names, dict(broken)
    tensors = {
        n: t for n, t in args.items() if isinstance(t, torch.Tensor) and t.device.type == "cpu"
    }
    float64_is_right = function == "reference" and any(
        args[n].dtype == torch.float64
        for n in ("out", "initial_state", "final_state")
        if isinstance(args[n], torch.Tensor)
    )
    only_of_fwd = {"workspace", "num_threads", "isa", "precision"} & set(args)
    if function == "reference" and (float64_is_right or only_of_fwd):
        function = "fwd"
    before = {n: t.clone() for n, t in tensors.items()}
    positional = [
        args.pop(n)
        for n in ("q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound")
    ]
    with pytest.raises(ERRORS) as raised:
        getattr(flash_kda, function)(*positional, **args)
    assert any(name in str(raised.value) for name in names), str(raised.value)
    for n, t in tensors.items():
        assert torch.equal(bits(t), bits(before[n])), f"{n} was written"


@settings(FIXED, max_examples=200)
@given(st.tuples(*[st.integers(-(2**70), 2**70) | st.integers(-3, 3) for _ in range(3)]))
def test_generated_workspace_sizes(sizes):
    """A size, or an error; never a wrapped-around number."""
    try:
        size = flash_kda.get_workspace_size(*sizes)
    except (OverflowError, *ERRORS):
        return
    assert all(n >= 0 for n in sizes) and 0 <= size < 2**63


def test_the_bad_calls_start_from_a_good_one():
    args = good()
    flash_kda.fwd(
        *[
            args.pop(n)
            for n in ("q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound")
        ],
        **args,
    )
