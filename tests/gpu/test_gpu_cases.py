"""Cases 1 to 13, 41 and 50 from public reports, by number, on CUDA tensors: keys, infinities,
lengths, gates and flags.

The same kinds as tests/python/test_cases*.py has for the CPU. The others are in
test_gpu_cases_layout.py and test_gpu_cases_sequences.py, which ends with the list of all.
"""

import pytest
import torch
from inputs import BF16, F32, RATES, any_rate, make, normal, same_bits, shared
from on_gpu import ERRORS, INPUTS, check, equal, moved, on_cpu, run

pytestmark = pytest.mark.usefixtures("path")

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


@pytest.mark.parametrize("name", [*INPUTS, "initial_state"])
def test_case_02_neighbours_nan_many_short_requests(name):
    """Path sm90 takes several of them with one block."""
    lengths = [0, 1, 31, 32, 33, 64, 65] * 80
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    clean = make(cu[-1], 2, cu=cu, initial=F32)
    dirty = clean.but(**{name: getattr(clean, name).clone()})
    for n, (_, begin, end) in enumerate(clean.spans()):
        if n % 2 and name == "initial_state":
            dirty.initial_state[n] = float("nan")
        elif n % 2:
            getattr(dirty, name)[:, begin:end] = float("nan")
    a, b = run(clean), run(dirty, finite=False)
    for n, (_, begin, end) in enumerate(clean.spans()):
        if n % 2 == 0:
            assert same_bits(a.out[:, begin:end], b.out[:, begin:end])
            assert same_bits(a.final[n], b.final[n])
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
    """The rest of its channel's chunk, of 16 or 32 tokens, may become NaN with it."""
    clean = make(100, 2)
    dirty = clean.but(v=clean.v.clone())
    dirty.v[0, 40, 1, 77] = value
    a, b = run(clean), run(dirty, finite=False)
    keep = torch.arange(128, device=a.out.device) != 77
    assert same_bits(a.out[..., keep], b.out[..., keep])
    assert same_bits(a.final[:, :, keep], b.final[:, :, keep])
    assert same_bits(a.out[:, :32], b.out[:, :32])  # chunks before
    assert torch.isnan(b.out[0, 64:, 1, 77]).all() and torch.isnan(b.final[0, 1, 77]).all()


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
@pytest.mark.parametrize("A_log", RATES)
def test_case_11_A_log_of_any_size(A_log, lower_bound):
    check(any_rate(A_log, lower_bound))


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
