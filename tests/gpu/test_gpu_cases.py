"""Cases from public reports about this operator, by number, on CUDA tensors.

The same kinds as tests/python/test_cases*.py has for the CPU; numbers that are about something else
are in the list at the end.
"""

import pathlib
import re

import on_gpu
import pytest
import torch
from inputs import (
    BF16,
    F32,
    bits,
    make,
    normal,
    poisoned,
    rms_ratio,
    same_bits,
    shared,
    yardstick,
)
from on_gpu import check, moved, on_cpu, run

import flash_kda

ERRORS = (TypeError, ValueError, RuntimeError)


def on_device(*shape, dtype):
    with torch.device(on_gpu.DEVICE):
        return poisoned(shape, dtype)


def equal(a, b):
    return same_bits(a.out, b.out) and same_bits(a.final, b.final)


# ---- 1: near-collinear keys ----------------------------------------------------------------------


def collinear(T, spread):
    call, gen = make(T, 1), torch.Generator().manual_seed(1)
    key = torch.randn(128, generator=gen)
    keys = (key + spread * torch.randn(1, T, 1, 128, generator=gen)).to(BF16)
    values = torch.randn(16, 128, generator=gen).repeat(-(-T // 16), 1)[:T].reshape(1, T, 1, 128)
    return call.but(
        q=keys,
        k=keys,
        v=values.to(BF16),
        g=torch.full_like(call.g, -12.0),
        beta=torch.full_like(call.beta, 8.0),
        A_log=torch.zeros(1),
        dt_bias=torch.zeros(1, 128),
    )


@pytest.mark.parametrize(
    "T, spread", [(16384, 0.0), (16, 0.0), (16, 1e-3), (64, 1e-2), (1000, 1e-3)]
)
def test_case_01_near_collinear_keys(T, spread):
    check(collinear(T, spread), "collinear")


# ---- 2: a neighbour's NaN ------------------------------------------------------------------------

INPUTS = ["q", "k", "v", "g", "beta"]


@pytest.mark.parametrize("name", [*INPUTS, "initial_state"])
@pytest.mark.parametrize("victim", [0, 1])
def test_case_02_neighbours_nan_varlen(name, victim):
    clean = make(56, 2, cu=[0, 17, 48], initial=F32)
    dirty = clean.but(**{name: getattr(clean, name).clone()})
    _, begin, end = clean.spans()[1 - victim]
    if name == "initial_state":
        dirty.initial_state[1 - victim] = float("nan")
    else:
        getattr(dirty, name)[:, begin:end] = float("nan")
        getattr(dirty, name)[:, 48:] = float("nan")  # rows that belong to nobody
    a, b = run(clean), run(dirty, finite=False)
    _, begin, end = clean.spans()[victim]
    assert same_bits(a.out[:, begin:end], b.out[:, begin:end])
    assert same_bits(a.final[victim], b.final[victim])
    assert torch.isnan(b.out).any()


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_case_02_neighbours_nan_dense_and_heads(name, lower_bound):
    clean = make(17, 9, B=2, lower_bound=lower_bound)
    for where in ((1,), (slice(None), slice(None), 4)):  # another batch row; another head
        dirty = clean.but(**{name: getattr(clean, name).clone()})
        getattr(dirty, name)[where] = float("nan")
        a, b = run(clean), run(dirty, finite=False)
        keep = torch.ones(clean.v.shape[:3], dtype=torch.bool)
        keep[where] = False
        keep = keep.to(a.out.device)
        assert same_bits(a.out[keep], b.out[keep])
        assert same_bits(a.final[keep[:, 0]], b.final[keep[:, 0]])
        assert torch.isnan(b.out[~keep]).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_case_02_nan_in_the_past_stays_in_its_value_channel(value):
    clean = make(50, 2)
    dirty = clean.but(v=clean.v.clone())
    dirty.v[0, 20, 1, 77] = value
    a, b = run(clean), run(dirty, finite=False)
    keep = torch.arange(128, device=a.out.device) != 77
    assert same_bits(a.out[..., keep], b.out[..., keep])
    assert same_bits(a.final[:, :, keep], b.final[:, :, keep])
    assert same_bits(a.out[:, :16], b.out[:, :16])  # tiles before
    assert torch.isnan(b.out[0, 32:, 1, 77]).all() and torch.isnan(b.final[0, 1, 77]).all()


# ---- 3, 4, 6: lengths ----------------------------------------------------------------------------


@pytest.mark.parametrize("cu", [[0, 0, 0, 17, 17, 48, 48, 48], [0, 48, 48], [0, 0, 48]])
@pytest.mark.parametrize("initial", [None, BF16, F32])
@pytest.mark.parametrize("state", [BF16, F32])
def test_case_03_empty_sequences(cu, initial, state):
    call = shared(48, 2, cu=cu, initial=initial)
    got = check(call, state_dtype=state)
    for n, (_, begin, end) in enumerate(call.spans()):
        if begin == end:
            start = torch.zeros_like(got.final[n]) if initial is None else call.initial_state[n]
            assert torch.equal(got.final[n], start.to(state))


@pytest.mark.parametrize(
    "B, T, cu",
    [(1, 0, [0, 0, 0]), (1, 0, [0]), (1, 5, [0, 0, 0]), (2, 0, None), (0, 5, None), (0, 0, None)],
)
@pytest.mark.parametrize("initial", [None, F32])
def test_case_04_nothing_at_all(B, T, cu, initial):
    call = shared(T, 2, B=B, cu=cu, initial=initial)
    got = on_cpu(run(call))
    start = torch.zeros(call.state_shape()) if initial is None else call.initial_state
    assert torch.equal(got.final, start)
    run(call, final=False)


@pytest.mark.parametrize("T, cu", [(65, None), (281, [0, 65, 131, 202, 281])])
def test_case_06_partial_tail(T, cu):
    call = shared(T, 2, cu=cu, initial=F32)
    check(call)
    call = moved(call)
    first = run(call)
    for _ in range(50):
        assert equal(first, run(call))


# ---- 8, 10, 11, 12, 41, 13, 50: gates and flags --------------------------------------------------


@pytest.mark.parametrize("T", [16, 17, 64, 1000, 4096])
@pytest.mark.parametrize("kind", ["g +8", "g +50", "g randn*8", "dt_bias +8", "dt_bias -8"])
def test_case_08_saturated_gate(T, kind):
    call = make(T, 1, initial=F32)
    if kind.startswith("dt_bias"):
        call = call.but(dt_bias=torch.full_like(call.dt_bias, float(kind[-2:])))
    else:
        call = call.but(
            g=call.g * 8 if "randn" in kind else torch.full_like(call.g, float(kind[3:]))
        )
    check(call, cut=slice(0, 32))


SOFTPLUS = ["reports", "random", "slow", "trained", "deep", "channel", "token", "alternating"]


@pytest.mark.parametrize("kind", SOFTPLUS)
def test_case_10_softplus_gate(kind):
    """Tiles too deep for the fast factors, and what comes after a token that forgets everything."""
    regime = kind if kind in SOFTPLUS[:4] else "random"
    call = make(133, 3, regime=regime, lower_bound=None, initial=F32)
    call.g = call.g.clone()
    if kind == "deep":
        call.g += 40
    elif kind == "channel":
        call.g[..., 5] = 60.0
    elif kind == "token":
        call.g[:, 20::16] = 200.0
    elif kind == "alternating":
        call.g[:, ::2] = 30.0
    check(call)


def test_case_10_an_abyss_leaves_later_tokens_exact():
    """The sum of the decays in a tile is huge, the next tokens' own decays are small."""
    call = make(48, 2, lower_bound=None, initial=F32)
    call.g = torch.full_like(call.g, -6.0)
    call.g[:, 3], call.g[:, 19] = 1e30, 1e6
    check(call.but(A_log=torch.zeros(2), dt_bias=None))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_case_11_A_log_absent(lower_bound):
    call = shared(70, 2, lower_bound=lower_bound, initial=F32).but(A_log=None)
    check(call)
    assert equal(run(call), run(call.but(A_log=torch.zeros(2))))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_case_12_dt_bias(lower_bound):
    call = shared(70, 3, lower_bound=lower_bound, initial=F32)
    check(call)
    assert equal(run(call), run(call.but(dt_bias=call.dt_bias.reshape(-1))))
    absent = call.but(dt_bias=None)
    check(absent)
    assert equal(run(absent), run(call.but(dt_bias=torch.zeros_like(call.dt_bias))))
    with pytest.raises(ERRORS, match="dt_bias"):
        run(call.but(dt_bias=call.dt_bias[:-1].contiguous()))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_case_12_strided_parameters(lower_bound):
    """A_log and dt_bias as views, rows at odd addresses."""
    call = moved(shared(70, 3, lower_bound=lower_bound, initial=F32))
    rates = torch.zeros(3, 5, device=call.q.device)
    rates[:, 2] = call.A_log
    store = torch.zeros(3, 131, device=call.q.device)
    store[:, 1:129] = call.dt_bias
    assert equal(run(call), run(call.but(A_log=rates[:, 2], dt_bias=store[:, 1:129])))


@pytest.mark.parametrize("lower_bound", [0.0, -1e-3, -0.5, -5])
def test_case_41_lower_bound_allowed(lower_bound):
    call = shared(70, 2, lower_bound=lower_bound, initial=F32)
    check(call)
    if lower_bound == 0:  # no decay at all, whatever g says
        assert equal(run(call), run(call.but(g=normal(*call.g.shape).to(BF16))))


@pytest.mark.parametrize("lower_bound", [-7, 1, -5.001, float("nan")])
def test_case_41_lower_bound_refused(lower_bound):
    with pytest.raises(ERRORS, match="lower_bound"):
        run(make(20, 2, lower_bound=lower_bound))


@pytest.mark.parametrize("beta", [None, 8.0])
@pytest.mark.parametrize("regime", ["reports", "slow"])
def test_case_13_negative_eigenvalues(beta, regime):
    call = shared(130, 2, regime=regime, initial=F32, allow_neg_eigval=True)
    if beta is not None:
        call = call.but(beta=torch.full_like(call.beta, beta))
    check(call)
    assert not same_bits(run(call).out, run(call.but(options={})).out)


@pytest.mark.parametrize("doubled", [False, True])
def test_case_50_beta_already_activated(doubled):
    call = shared(130, 2, initial=F32, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=doubled)
    check(call.but(beta=torch.sigmoid(call.beta.float()).to(BF16)))


@pytest.mark.parametrize("depth", [0.0, 1e-3, 1.0, 5.0, 80.0, 1000.0])
def test_case_50_gate_already_activated(depth):
    call = shared(130, 2, initial=F32, use_gate_in_kernel=False)
    g = -depth * torch.rand(call.g.shape, generator=torch.Generator().manual_seed(3))
    check(call.but(A_log=None, dt_bias=None, lower_bound=None, g=g.to(BF16)))


def test_case_50_without_norm():
    call = shared(130, 2, initial=F32, use_qk_l2norm_in_kernel=False)
    unit = {
        n: torch.nn.functional.normalize(getattr(call, n).float(), dim=-1).to(BF16)
        for n in ("q", "k")
    }
    check(call.but(**unit))


# ---- 14, 15, 16, 18, 20: layouts and dtypes ------------------------------------------------------


@pytest.mark.parametrize("cu", [[0, 17, 48], [0, 0, 1, 48]])
def test_case_14_int32_cu_seqlens(cu):
    wide = make(48, 2, cu=cu, initial=F32)
    check(wide)
    assert equal(run(wide), run(wide.but(cu_seqlens=wide.cu_seqlens.to(torch.int32))))


def test_case_14_strided_cu_seqlens():
    call = moved(make(48, 2, cu=[0, 17, 48], initial=F32))
    store = torch.full((3, 2), 7, device=call.q.device)
    store[:, 1] = call.cu_seqlens
    assert equal(run(call), run(call.but(cu_seqlens=store[:, 1])))


@pytest.mark.parametrize("B, T, cu", [(2, 35, None), (1, 37, [0, 17, 37])])
def test_case_15_strided_beta(B, T, cu):
    call = moved(shared(T, 4, B=B, cu=cu, initial=F32))
    store = torch.full((B, T, 7), float("nan"), dtype=BF16, device=call.q.device)
    store[..., 2:6] = call.beta
    assert equal(run(call), run(call.but(beta=store[..., 2:6])))


def fused(call, order):
    """q, k, v, g as views of one tensor: as after one projection of all of them."""
    parts = [getattr(call, n) for n in "qkvg"]
    if order == "unbind":
        views = torch.stack(parts, 2).unbind(2)
    elif order == "channels":
        views = torch.cat(parts, -1).split(128, -1)
    elif order == "heads first":
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    else:  # rows of odd length at an odd element: no wide access is aligned
        views = []
        for x in parts:
            store = torch.zeros(*x.shape[:3], 133, dtype=x.dtype, device=x.device)
            store[..., 3:131] = x
            views.append(store[..., 3:131])
    assert not views[0].is_contiguous()
    return call.but(**dict(zip("qkvg", views)))


@pytest.mark.parametrize("order", ["unbind", "channels", "heads first", "odd"])
@pytest.mark.parametrize("B, T, cu", [(2, 35, None), (1, 70, [0, 17, 70])])
def test_case_16_views_of_a_fused_projection(order, B, T, cu):
    call = moved(shared(T, 3, B=B, cu=cu, initial=F32))
    views = fused(call, order)
    plain = run(call)
    assert equal(plain, run(views))
    size = views.v.untyped_storage().nbytes() // 2
    store = on_device(size, dtype=BF16)
    out = store.as_strided(views.v.shape, views.v.stride(), views.v.storage_offset())
    assert same_bits(run(views, out=out).out.contiguous(), plain.out)
    out.copy_(on_device(*out.shape, dtype=BF16))
    assert (bits(store) == -1).all(), "written between the rows of a strided out"


@pytest.mark.parametrize("state", [BF16, F32])
def test_case_16_strided_states(state):
    """Pools that are views of larger ones: heads apart, slots apart."""
    call = moved(make(48, 2, cu=[0, 17, 48], initial=state))
    plain = run(call, state_dtype=state)
    stores = [on_device(2, 3, 2, 128, 128, dtype=state) for _ in range(2)]
    initial, final = stores[0][:, 1], stores[1][:, 1]
    initial.copy_(call.initial_state)
    got = run(call.but(initial_state=initial), final=final)
    assert same_bits(got.out, plain.out) and same_bits(final, plain.final)
    assert all((bits(store[:, [0, 2]]) == -1).all() for store in stores)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.float16, F32])
def test_case_18_other_dtypes_are_refused(name, dtype):
    call = shared(20, 2)
    with pytest.raises(ERRORS, match=rf"\b{name}\b"):
        run(call.but(**{name: getattr(call, name).to(dtype)}))


@pytest.mark.parametrize("T", [1, 33])
@pytest.mark.parametrize("i, j", [(0, 127), (5, 64), (127, 3)])
def test_case_20_value_rows_come_first(T, i, j):
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
    got = on_cpu(run(call))
    want = torch.zeros(128)
    want[i] = 1.0
    assert (got.out.float() - want.expand(1, T, 1, 128)).abs().max() <= 2.0**-7
    assert torch.equal(got.out.float()[..., want == 0], torch.zeros(1, T, 1, 127))
    assert torch.equal(got.final, call.initial_state)


# ---- 21, 26: cut inputs, many sequences ----------------------------------------------------------


@pytest.mark.parametrize("regime", ["reports", "slow"])
@pytest.mark.parametrize("T, cut", [(64, 16), (64, 32), (64, 17), (64, 1), (64, 63), (200, 112)])
def test_case_21_chunked_prefill(regime, T, cut):
    call = shared(T, 2, regime=regime, initial=F32)
    check(call)
    here, want = moved(call), yardstick(call)
    whole = run(here)
    first = run(here.cut(0, cut, here.initial_state))
    second = run(here.cut(cut, T, first.final))
    out = torch.cat([first.out, second.out], 1)
    if cut % 16 == 0:
        assert same_bits(out, whole.out) and same_bits(second.final, whole.final)
    assert rms_ratio(out.cpu(), want.out) < 4e-3
    assert rms_ratio(second.final.cpu(), want.final) < 2e-3


@pytest.mark.parametrize("N, length, H", [(256, 33, 1), (600, 2, 2), (1000, 0, 1), (31, 128, 2)])
def test_case_26_very_many_sequences(N, length, H):
    cu = [n * length for n in range(N + 1)]
    check(shared(max(N * length, 1), H, cu=cu, initial=F32), cut=slice(0, 32))


def test_case_26_4096_sequences_of_two_tokens():
    call = shared(8192, 1, cu=list(range(0, 8193, 2)))
    check(call, cut=slice(0, 16))


# ---- 28, 29, 30: pools, in place, padding --------------------------------------------------------


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("cu", [None, [0, 17, 17, 48]])
@pytest.mark.parametrize("slots", [[3, -1, 0], [-1, -1, -1], [0, 1, 2], [-1, 4, -1], [2, 6, -9]])
def test_case_28_padded_pool_index(index, cu, slots):
    """-1 is padding, and so is whatever else lies outside of the pool."""
    call = moved(shared(48, 2, B=1 if cu else 3, cu=cu))
    device = call.q.device
    pool = torch.randn(call.state_shape(6), generator=torch.Generator().manual_seed(2)).to(device)
    used = [s if 0 <= s < 6 else -1 for s in slots]
    live = [n for n in range(3) if used[n] >= 0]
    start = torch.zeros(call.state_shape(), device=device)
    start[live] = pool[[used[n] for n in live]]
    want = run(call.but(initial_state=start))
    rest = [s for s in range(6) if s not in used]
    pool[rest] = float("nan")  # nobody may read these
    after = pool.clone()
    call = call.but(
        initial_state=after,
        options={"state_indices": torch.tensor(slots, dtype=index, device=device)},
    )
    got = run(call, final=after)
    for n, (batch, begin, end) in enumerate(call.spans()):
        if used[n] < 0:
            assert not got.out[batch, begin:end].any()
        else:
            assert same_bits(got.out[batch, begin:end], want.out[batch, begin:end])
            assert same_bits(after[used[n]], want.final[n])
    assert same_bits(after[rest], pool[rest])


@pytest.mark.parametrize("state", [BF16, F32])
def test_case_29_in_place(state):
    call = moved(shared(48, 2, cu=[0, 17, 17, 48], initial=state))
    two = run(call, state_dtype=state)
    both = call.initial_state.clone()
    assert equal(two, run(call.but(initial_state=both), final=both))


@pytest.mark.parametrize("cu", [[0, 17, 48], [0, 17, 48, 48, 48], [0, 0], [0, 1]])
def test_case_30_padded_batch(cu):
    """`run` itself demands that rows past cu[-1] keep their bits."""
    call = shared(64, 2, cu=cu, initial=F32)
    got = check(call)
    exact = on_cpu(run(call.but(**{n: getattr(call, n)[:, : cu[-1]] for n in INPUTS})))
    assert same_bits(got.out[:, : cu[-1]], exact.out) and same_bits(got.final, exact.final)


# ---- 33, 39: memory ------------------------------------------------------------------------------


def test_case_33_stale_memory():
    """Poisoned outputs and workspace, 100 times, at the benchmarks' size."""
    call = moved(make(16384, 96, regime="random"))
    first = run(call, workspace=True)
    for _ in range(100):
        assert equal(first, run(call, workspace=True))


def test_case_33_larger_unaligned_workspace():
    call = moved(shared(100, 3, initial=F32))
    size = flash_kda.get_workspace_size(100, 3)
    first = run(call)
    for offset in (0, 1, 7, 64, 128):
        store = torch.full((size + 4099,), 255, dtype=torch.uint8, device=call.q.device)
        again = run(call.but(options={"workspace": store[offset : offset + size]}))
        assert equal(first, again)
        assert (store[:offset] == 255).all() and (store[offset + size :] == 255).all()


def test_case_39_inputs_are_not_modified():
    """`run` compares every input of every test before and after; here with all of them present."""
    call = make(64, 2, cu=[0, 17, 48], initial=F32)
    call.options["state_indices"] = torch.tensor([1, 0])
    call.options["checkpoint_offsets"] = torch.tensor([16, 16])
    assert len(call.tensors()) == 11
    run(call, checkpoints=2, workspace=True)


# ---- 37: other sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize("K, V", [(64, 64), (64, 128), (256, 256), (96, 96), (128, 100), (128, 8)])
def test_case_37_other_head_sizes_are_refused(K, V):
    with pytest.raises(ERRORS, match=r"head size [KV] = \d+, wanted"):
        run(shared(40, 2, K=K, V=V, initial=F32))


# ---- 45: bad cu_seqlens --------------------------------------------------------------------------


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "cu",
    [
        [1, 17],
        [0, 20, 10, 48],
        [0, 17, 4096],
        [-1, 17],
        [0, -5, 48],
        [48, 0],
        [0, 2**31 - 1],
        [-(2**31), 2**31 - 1, 0, 48],
        [0, 48, 0, 48, 0, 48],
    ],
)
def test_case_45_bad_cu_seqlens_stay_inside(cu, index):
    """The host cannot see them. Whatever they hold, nothing outside of out, final and the workspace
    is written, and the next call is right."""
    good = moved(shared(48, 2))
    device, N = good.q.device, len(cu) - 1
    guard = 4096
    size = flash_kda.get_workspace_size(48, 2, N)
    outs = on_device(2 * guard + good.v.numel(), dtype=BF16)
    finals = on_device(2 * guard + N * 2 * 128 * 128, dtype=F32)
    space = torch.full((size + 2 * guard,), 255, dtype=torch.uint8, device=device)
    out = outs[guard:-guard].view(good.v.shape)
    final = finals[guard:-guard].view(N, 2, 128, 128)
    flash_kda.fwd(
        *(good.q, good.k, good.v, good.g, good.beta, good.scale, out),
        *(good.A_log, good.dt_bias, -5.0, None, final),
        torch.tensor(cu, dtype=index, device=device),
        workspace=space[guard:-guard],
    )
    torch.cuda.synchronize()
    for store in (outs, finals):
        assert (bits(store[:guard]) == -1).all() and (bits(store[-guard:]) == -1).all()
    assert (space[:guard] == 255).all() and (space[-guard:] == 255).all()
    check(shared(48, 2))


# ---- 47: checkpoints -----------------------------------------------------------------------------


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("state", [BF16, F32])
@pytest.mark.parametrize(
    "lengths, offsets",
    [
        ([20, 20], [[16], [16]]),
        ([130], [[128]]),
        ([130, 16, 0], [[16, 128], [16, -1], [0, -1]]),
        ([64, 100], [[0, 64], [48, 96]]),
        ([64, 100], [[17, 48], [112, 96]]),  # no multiple of 16; past the end, then out of order
    ],
)
@pytest.mark.parametrize("indptr", [False, True])
def test_case_47_checkpoints(index, state, lengths, offsets, indptr):
    """The same bits as the final state of the prefix run alone; the rest stays untouched."""
    cu = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    call = moved(make(cu[-1], 2, cu=cu, initial=F32))
    plain = run(call)
    flat = torch.tensor([t for row in offsets for t in row], dtype=index, device=call.q.device)
    marked = call.but(options={"checkpoint_offsets": flat})
    if indptr:
        ends = [sum(map(len, offsets[:n])) for n in range(len(offsets) + 1)]
        marked.options["checkpoint_indptr"] = torch.tensor(ends, dtype=index, device=flat.device)
    got = run(marked, checkpoints=len(flat), state_dtype=state)
    assert same_bits(got.out, plain.out)
    m = 0
    for n, row in enumerate(offsets):
        due = -1
        for tokens in row:
            if tokens <= due or tokens > lengths[n] or tokens % 16:
                assert (bits(got.checkpoints[m]) == -1).all()
            else:
                due = tokens
                prefix = call.cut(cu[n], cu[n] + tokens, call.initial_state[n : n + 1])
                alone = run(prefix, state_dtype=state)
                assert same_bits(got.checkpoints[m], alone.final[0]), (n, tokens)
            m += 1


@pytest.mark.parametrize("ends", [[0, 99, 3], [-7, 2, 3], [3, 0, 2], [0, 2**40, -(2**40)]])
def test_case_47_bad_indptr_stays_inside(ends):
    call = moved(make(96, 2, cu=[0, 48, 96]))
    device = call.q.device
    store = on_device(5, 2, 128, 128, dtype=F32)
    call = call.but(
        options={
            "checkpoint_offsets": torch.tensor([16, 32, 48], device=device),
            "checkpoint_indptr": torch.tensor(ends, device=device),
            "checkpoint_state": store[1:4],
        }
    )
    run(call)
    torch.cuda.synchronize()
    assert (bits(store[[0, 4]]) == -1).all()


# ---- 49: the wrong kernel measured ---------------------------------------------------------------


@pytest.mark.parametrize("lower_bound, gate", [(-5.0, "bounded"), (None, "softplus")])
def test_case_49_the_kernel_that_ran_is_named(lower_bound, gate):
    run(make(70, 2, lower_bound=lower_bound))
    report = flash_kda.last_report()
    assert re.fullmatch(rf"cuda/\w+/.*{gate}.*", report["kernel"]), report
    assert report["num_tokens"] == 70
    run(make(70, 2, cu=[0, 20, 70]))
    assert flash_kda.last_report()["num_tokens"] == -1  # only the device knows


# ---- Numbers that are tested elsewhere -----------------------------------------------------------

ELSEWHERE = {
    19: "test_gpu_accuracy.py: mixed state dtypes",
    23: "test_gpu_accuracy.py: error against length",
    27: "a speed: the benchmark",
    32: "resources of a CUDA build: scripts/kernel_resources.py",
    38: "test_gpu_accuracy.py: grouped value heads",
    40: "two CUDA versions",
    42: "tests/python/test_torch_cuda.py: torch.compile",
}


def test_every_case_has_a_test():
    numbers = {1, 2, 3, 4, 6, 8, 10, 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 23, 26, 27, 28, 29, 30,
               32, 33, 37, 38, 39, 40, 41, 42, 45, 47, 49, 50}  # fmt: skip
    here = re.findall(r"^def test_case_(\d+)_", pathlib.Path(__file__).read_text(), re.M)
    assert {int(n) for n in here} | set(ELSEWHERE) == numbers
