"""Cases 1 to 23 from public reports about this operator, by number and name.

Each test covers its whole kind, not only the numbers of the report, on every instruction set of the
machine. Cases 26 to 50 are in test_cases_memory.py, with the list of those that need a GPU.
"""

import pytest
import torch
from inputs import (
    BF16,
    F32,
    RATES,
    any_rate,
    assert_near,
    bits,
    built_once,
    check,
    each_kernel,
    make,
    normal,
    poisoned,
    rms_ratio,
    run,
    same_bits,
    shared,
    yardstick,
)

ERRORS = (TypeError, ValueError, RuntimeError)

# ---- 1: near-collinear keys ----------------------------------------------------------------------


@built_once
def collinear(T, spread, g=-12.0, beta=8.0):
    call = make(T, 1)
    gen = torch.Generator().manual_seed(1)
    key = torch.randn(128, generator=gen)
    keys = key + spread * torch.randn(1, T, 1, 128, generator=gen)
    values = torch.randn(16, 128, generator=gen).repeat(-(-T // 16), 1)[:T].reshape(1, T, 1, 128)
    return call.but(
        q=keys.to(BF16),
        k=keys.to(BF16),
        v=values.to(BF16),
        g=torch.full_like(call.g, g),
        beta=torch.full_like(call.beta, beta),
        A_log=torch.zeros(1),
        dt_bias=torch.zeros(1, 128),
    )


@each_kernel
@pytest.mark.parametrize(
    "T, spread", [(16384, 0.0), (16, 0.0), (16, 1e-3), (64, 1e-2), (1000, 1e-3)]
)
def test_case_01_near_collinear_keys(kernel, T, spread):
    """What the state answers to its keys is as exact as for random inputs.

    Across the keys nothing is ever read, so nothing corrects the rounding of the carried state:
    each token may leave one unit of 2^-24 there, and does where the values repeat.
    """
    call = collinear(T, spread)
    got, want = run(call, kernel, out_dtype=F32), yardstick(call)
    assert_near(kernel, got.out, want.out)
    key = torch.nn.functional.normalize(call.k[0, -1, 0].double(), dim=0)
    assert_near(kernel, got.final.double() @ key, want.final @ key, "state along the key")
    across = max(T * 2.0**-24, kernel.bound(F32))
    assert_near(kernel, got.final, want.final, "final_state", bound=across)


# ---- 2: a neighbour's NaN ------------------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
@pytest.mark.parametrize("victim", [0, 1])
def test_case_02_neighbours_nan_varlen(kernel, name, victim):
    clean = make(56, 2, cu=[0, 17, 48], initial=F32)
    dirty = clean.but(**{name: getattr(clean, name).clone()})
    batch, begin, end = clean.spans()[1 - victim]
    if name == "initial_state":
        dirty.initial_state[1 - victim] = float("nan")
    else:
        getattr(dirty, name)[:, begin:end] = float("nan")
        getattr(dirty, name)[:, 48:] = float("nan")  # rows that belong to nobody
    a, b = run(clean, kernel), run(dirty, kernel, finite=False)
    batch, begin, end = clean.spans()[victim]
    assert same_bits(a.out[:, begin:end], b.out[:, begin:end])
    assert same_bits(a.final[victim], b.final[victim])
    assert torch.isnan(b.out).any()


@each_kernel
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_case_02_neighbours_nan_dense_and_heads(kernel, name):
    clean = make(17, 9, B=2)
    for where in ((1,), (slice(None), slice(None), 4)):  # another batch row; another head
        dirty = clean.but(**{name: getattr(clean, name).clone()})
        getattr(dirty, name)[where] = float("nan")
        a, b = run(clean, kernel), run(dirty, kernel, finite=False)
        keep = torch.ones(clean.v.shape[:3], dtype=torch.bool)
        keep[where] = False
        assert same_bits(a.out[keep], b.out[keep])
        assert same_bits(a.final[keep[:, 0]], b.final[keep[:, 0]])


@each_kernel
def test_case_02_nan_in_the_past_stays_in_its_value_channel(kernel):
    """Value channels are independent: a NaN in one never reaches another, nor the past.

    With bf16 products the past ends where the chunk of 16 tokens begins: tile products multiply the
    rows of the whole chunk by zeros, and 0 NaN is NaN.
    """
    clean = make(50, 2)
    dirty = clean.but(v=clean.v.clone())
    dirty.v[0, 20, 1, 77] = float("nan")
    a, b = run(clean, kernel), run(dirty, kernel, finite=False)
    keep = torch.ones(128, dtype=torch.bool)
    keep[77] = False
    assert same_bits(a.out[..., keep], b.out[..., keep])
    assert same_bits(a.final[:, :, keep], b.final[:, :, keep])
    past = 16 if kernel.precision == "bf16" else 20
    assert same_bits(a.out[:, :past], b.out[:, :past])
    assert torch.isnan(b.out[0, 20:, 1, 77]).all() and torch.isnan(b.final[0, 1, 77]).all()


# ---- 3, 4: empty sequences, nothing at all -------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("cu", [[0, 0, 0, 17, 17, 48, 48, 48], [0, 48, 48], [0, 0, 48]])
@pytest.mark.parametrize("initial", [None, BF16, F32])
@pytest.mark.parametrize("state", [BF16, F32])
def test_case_03_empty_sequences(kernel, cu, initial, state):
    call = shared(48, 2, cu=cu, initial=initial)
    got = check(call, kernel, state_dtype=state)
    for n, (_, begin, end) in enumerate(call.spans()):
        if begin == end:
            start = torch.zeros_like(got.final[n]) if initial is None else call.initial_state[n]
            assert torch.equal(got.final[n], start.to(state))


@each_kernel
@pytest.mark.parametrize(
    "B, T, cu",
    [(1, 0, [0, 0, 0]), (1, 0, [0]), (1, 5, [0, 0, 0]), (2, 0, None), (0, 5, None), (0, 0, None)],
)
@pytest.mark.parametrize("initial", [None, F32])
def test_case_04_nothing_at_all(kernel, B, T, cu, initial):
    call = shared(T, 2, B=B, cu=cu, initial=initial)
    got = run(call, kernel)
    start = torch.zeros(call.state_shape()) if initial is None else call.initial_state
    assert torch.equal(got.final, start)
    run(call, kernel, final=False)


# ---- 6: partial tail -----------------------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("T, cu", [(65, None), (281, [0, 65, 131, 202, 281])])
def test_case_06_partial_tail(kernel, T, cu):
    call = shared(T, 2, cu=cu, initial=F32)
    first = check(call, kernel)
    for _ in range(50):
        again = run(call, kernel)
        assert same_bits(first.out, again.out) and same_bits(first.final, again.final)


@each_kernel
def test_case_06_every_length(kernel):
    """One sequence of every length 1..64, each against the definition, and each as if alone."""
    lengths = list(range(1, 65))
    cu = [sum(lengths[:n]) for n in range(65)]
    call = shared(cu[-1], 2, cu=cu, initial=F32)
    got, want = check(call, kernel), yardstick(call)
    for n, (_, begin, end) in enumerate(call.spans()):
        alone = call.cut(begin, end, call.initial_state[n : n + 1])
        mine = run(alone, kernel)
        assert same_bits(mine.out, got.out[:, begin:end]), f"length {end - begin}"
        assert same_bits(mine.final[0], got.final[n]), f"length {end - begin}"
        assert_near(kernel, mine.out, want.out[:, begin:end], f"out of length {end - begin}")
        assert_near(kernel, mine.final[0], want.final[n], f"state of length {end - begin}")


# ---- 8, 10, 11, 12, 41: gates --------------------------------------------------------------------


@built_once
def saturated(T, kind):
    call = make(T, 1, initial=F32)
    if kind.startswith("dt_bias"):
        return call.but(dt_bias=torch.full_like(call.dt_bias, float(kind[-2:])))
    return call.but(g=call.g * 8 if "randn" in kind else torch.full_like(call.g, float(kind[3:])))


@each_kernel
@pytest.mark.parametrize("T", [16, 17, 64, 1000, 4096])
@pytest.mark.parametrize("kind", ["g +8", "g +50", "g randn*8", "dt_bias +8", "dt_bias -8"])
def test_case_08_saturated_gate(kernel, T, kind):
    check(saturated(T, kind), kernel)


@built_once
def softplus(kind):
    regime = kind if kind in ("reports", "random", "slow", "trained") else "random"
    call = make(133, 3, regime=regime, lower_bound=None, initial=F32)
    call.g = call.g.clone()
    if kind == "deep":
        call.g += 40  # log-decays of -40 to -110 at every token
    elif kind == "one channel deep":
        call.g[..., 5] = 60.0
    elif kind == "one token deep":
        call.g[:, 20::16] = 200.0  # everything is forgotten, then the walk goes on
    elif kind == "alternating":
        call.g[:, ::2] = 30.0
    return call


@each_kernel
@pytest.mark.parametrize(
    "kind",
    [
        "reports",
        "random",
        "slow",
        "trained",
        "deep",
        "one channel deep",
        "one token deep",
        "alternating",
    ],
)
def test_case_10_softplus_gate(kernel, kind):
    check(softplus(kind), kernel)


@each_kernel
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_case_11_A_log_absent(kernel, lower_bound):
    call = shared(70, 2, lower_bound=lower_bound, initial=F32).but(A_log=None)
    got = check(call, kernel)
    with_zeros = run(call.but(A_log=torch.zeros(2)), kernel)
    assert same_bits(got.out, with_zeros.out) and same_bits(got.final, with_zeros.final)


@each_kernel
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("A_log", RATES)
def test_case_11_A_log_of_any_size(kernel, A_log, lower_bound):
    check(any_rate(A_log, lower_bound), kernel)


@each_kernel
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_case_12_dt_bias(kernel, lower_bound):
    call = shared(70, 3, lower_bound=lower_bound, initial=F32)
    flat = run(call.but(dt_bias=call.dt_bias.reshape(-1)), kernel)
    shaped = check(call, kernel)
    assert same_bits(flat.out, shaped.out) and same_bits(flat.final, shaped.final)
    absent = check(call.but(dt_bias=None), kernel)
    zeros = run(call.but(dt_bias=torch.zeros_like(call.dt_bias)), kernel)
    assert same_bits(absent.out, zeros.out) and same_bits(absent.final, zeros.final)
    for wrong in (
        call.dt_bias[:-1],
        torch.zeros(3, 127),
        torch.zeros(3 * 128 - 1),
        torch.zeros(128),
    ):
        with pytest.raises(ERRORS, match="dt_bias"):
            run(call.but(dt_bias=wrong.contiguous()), kernel)


@each_kernel
@pytest.mark.parametrize("lower_bound", [0, 0.0, -1e-3, -0.5, -5, (-5)])
def test_case_41_lower_bound_allowed(kernel, lower_bound):
    call = shared(70, 2, lower_bound=lower_bound, initial=F32)
    got = check(call, kernel)
    if lower_bound == 0:  # no decay at all, whatever g says
        other = run(call.but(g=normal(*call.g.shape).to(BF16)), kernel)
        assert same_bits(got.out, other.out) and same_bits(got.final, other.final)


@pytest.mark.parametrize(
    "lower_bound", [-7, 1, 1e-9, -5.001, float("nan"), float("inf"), float("-inf"), "low"]
)
def test_case_41_lower_bound_refused(lower_bound):
    with pytest.raises(ERRORS, match="lower_bound"):
        run(make(20, 2, lower_bound=lower_bound))


# ---- 13, 50: flags -------------------------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("beta", [None, 8.0])
def test_case_13_negative_eigenvalues(kernel, beta):
    call = shared(130, 2, initial=F32, allow_neg_eigval=True)
    if beta is not None:
        call = call.but(beta=torch.full_like(call.beta, beta))
    got = check(call, kernel)
    plain = run(call.but(options={}), kernel)
    assert not same_bits(got.out, plain.out)


@each_kernel
@pytest.mark.parametrize("doubled", [False, True])
def test_case_50_beta_already_activated(kernel, doubled):
    call = shared(130, 2, initial=F32, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=doubled)
    check(call.but(beta=torch.sigmoid(call.beta.float()).to(BF16)), kernel)


@each_kernel
@pytest.mark.parametrize("depth", [0.0, 1e-3, 1.0, 5.0, 80.0, 1000.0])
def test_case_50_gate_already_activated(kernel, depth):
    call = shared(130, 2, initial=F32, use_gate_in_kernel=False)
    g = -depth * torch.rand(call.g.shape, generator=torch.Generator().manual_seed(3))
    call = call.but(A_log=None, dt_bias=None, lower_bound=None, g=g.to(BF16))
    check(call, kernel)
    ignored = run(call.but(lower_bound=-5.0), kernel)
    assert same_bits(run(call, kernel).out, ignored.out)
    for name in ("A_log", "dt_bias"):  # a caller who passes both has misunderstood something
        with pytest.raises(ERRORS, match=name):
            run(
                call.but(**{name: torch.zeros(2) if name == "A_log" else torch.zeros(2, 128)}),
                kernel,
            )


@each_kernel
def test_case_50_without_norm(kernel):
    call = shared(130, 2, initial=F32, use_qk_l2norm_in_kernel=False)
    unit = {
        n: torch.nn.functional.normalize(getattr(call, n).float(), dim=-1).to(BF16)
        for n in ("q", "k")
    }
    check(call.but(**unit), kernel)


# ---- 14, 15, 16, 18, 19, 20: layouts and dtypes --------------------------------------------------


@each_kernel
@pytest.mark.parametrize("cu", [[0, 17, 48], [0, 0, 1, 48]])
def test_case_14_int32_cu_seqlens(kernel, cu):
    wide = make(48, 2, cu=cu, initial=F32)
    narrow = wide.but(cu_seqlens=wide.cu_seqlens.to(torch.int32))
    a, b = check(wide, kernel), run(narrow, kernel)
    assert same_bits(a.out, b.out) and same_bits(a.final, b.final)


@each_kernel
@pytest.mark.parametrize("B, T, cu", [(2, 35, None), (1, 37, [0, 17, 37])])
def test_case_15_strided_beta(kernel, B, T, cu):
    call = shared(T, 4, B=B, cu=cu, initial=F32)
    store = torch.full((B, T, 7), float("nan"), dtype=BF16)
    store[..., 2:6] = call.beta
    a, b = check(call, kernel), run(call.but(beta=store[..., 2:6]), kernel)
    assert same_bits(a.out, b.out) and same_bits(a.final, b.final)


def fused(call, order):
    """q, k, v, g as views of one tensor: as after one projection of all of them."""
    parts = [getattr(call, n) for n in "qkvg"]
    if order == "unbind":
        views = torch.stack(parts, 2).unbind(2)
    elif order == "channels":
        views = torch.cat(parts, -1).split(128, -1)
    else:  # heads first in memory
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    assert not views[0].is_contiguous()
    return call.but(**dict(zip("qkvg", views)))


@each_kernel
@pytest.mark.parametrize("order", ["unbind", "channels", "heads first"])
@pytest.mark.parametrize("B, T, cu", [(2, 35, None), (1, 70, [0, 17, 70])])
def test_case_16_views_of_a_fused_projection(kernel, order, B, T, cu):
    call = shared(T, 3, B=B, cu=cu, initial=F32)
    views = fused(call, order)
    a, b = check(call, kernel), run(views, kernel)
    assert same_bits(a.out, b.out) and same_bits(a.final, b.final)
    like_v = views.v.storage_offset(), views.v.untyped_storage().nbytes() // 2
    store = poisoned((like_v[1],), BF16)
    out = store.as_strided(views.v.shape, views.v.stride(), like_v[0])  # strides as v has them
    c = run(views, kernel, out=out)
    assert same_bits(a.out, c.out.contiguous())
    out.copy_(poisoned(out.shape, BF16))
    assert (bits(store) == -1).all(), "written between the rows of a strided out"


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_case_16_last_stride_is_refused_or_right(name):
    call = shared(20, 2)
    wrong = getattr(call, name).transpose(2, 3).contiguous().transpose(2, 3)
    assert wrong.stride(-1) != 1
    with pytest.raises(ERRORS, match=rf"\b{name}\b"):
        run(call.but(**{name: wrong}))


@each_kernel
@pytest.mark.parametrize(
    "names",
    [("g",), ("beta",), ("q",), ("k",), ("v",), ("g", "beta"), ("q", "k", "v", "g", "beta")],
)
def test_case_18_float32_inputs(kernel, names):
    call = shared(70, 2, dtype=F32, initial=F32)
    call = call.but(
        **{n: getattr(call, n).to(BF16) for n in ("q", "k", "v", "g", "beta") if n not in names}
    )
    check(call, kernel)
    check(call, kernel, out_dtype=F32)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int16, torch.bool])
def test_case_18_other_dtypes_are_refused(name, dtype):
    call = shared(20, 2)
    with pytest.raises(ERRORS, match=rf"\b{name}\b"):
        run(call.but(**{name: getattr(call, name).to(dtype)}))


@each_kernel
@pytest.mark.parametrize("initial", [None, BF16, F32])
@pytest.mark.parametrize("final", [BF16, F32])
@pytest.mark.parametrize("T", [3, 70])
def test_case_19_mixed_state_dtypes(kernel, initial, final, T):
    check(make(T, 2, B=2, initial=initial), kernel, state_dtype=final)


@each_kernel
@pytest.mark.parametrize("T", [1, 33])
@pytest.mark.parametrize("i, j", [(0, 127), (5, 64), (127, 3)])
def test_case_20_value_rows_come_first(kernel, T, i, j):
    """State e_i e_j^T, nothing written, no decay: a query e_j reads value channel i."""
    call = make(T, 1, lower_bound=0.0)
    call = call.but(
        q=torch.zeros_like(call.q),
        v=torch.zeros_like(call.v),
        scale=1.0,
        beta=torch.full_like(call.beta, -300.0),
    )
    call.q[..., j] = 1.0
    call.initial_state = torch.zeros(call.state_shape())
    call.initial_state[0, 0, i, j] = 1.0
    got = run(call, kernel)
    want = torch.zeros(128)
    want[i] = 1.0
    assert torch.equal(got.out.float(), want.expand(1, T, 1, 128))
    assert torch.equal(got.final, call.initial_state)


# ---- 21, 23: long inputs, cut inputs -------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("regime", ["reports", "slow"])
@pytest.mark.parametrize(
    "T, cut", [(64, 16), (64, 32), (64, 17), (64, 1), (64, 63), (200, 112), (200, 99)]
)
def test_case_21_chunked_prefill(kernel, regime, T, cut):
    call = shared(T, 2, regime=regime, initial=F32)
    whole = check(call, kernel)
    first = run(call.cut(0, cut, call.initial_state), kernel)
    second = run(call.cut(cut, T, first.final), kernel)
    out = torch.cat([first.out, second.out], 1)
    if cut % 16 == 0:
        assert same_bits(out, whole.out) and same_bits(second.final, whole.final)
    want = yardstick(call)
    assert_near(kernel, out, want.out)
    assert_near(kernel, second.final, want.final, "final_state")


@built_once
def slow_decay(channels=slice(None)):
    call = make(65536, 1)
    return call.but(
        g=torch.full_like(call.g, -20.0), beta=torch.full_like(call.beta, -4.0)
    ).channels(channels)


@each_kernel
def test_case_23_long_slow_decay(kernel):
    """Decay near 1 over 65536 tokens. The state fills and forgets over some 7000 tokens (128 / b):
    once that is past, the error of 1024 tokens stays what it is."""
    call, some = slow_decay(), slice(0, 16)
    got, want = run(call, kernel, out_dtype=F32), yardstick(slow_decay(some))
    assert_near(kernel, got.out[..., some], want.out)
    assert_near(kernel, got.final[:, :, some], want.final, "final_state")
    early = rms_ratio(got.out[:, 15360:16384, :, some], want.out[:, 15360:16384])
    late = rms_ratio(got.out[:, -1024:, :, some], want.out[:, -1024:])
    assert late < 1.25 * early, f"grew from {early:.3g} to {late:.3g}"
