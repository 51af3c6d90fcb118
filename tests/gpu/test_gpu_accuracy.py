"""The CUDA forward against the float64 definition: gates, lengths, sizes, dtypes, magnitudes."""

import pytest
import torch
from inputs import BF16, F32, make, rms_ratio, rows_of, shared, uniform, yardstick
from on_gpu import bounds_of, check, on_cpu, run

pytestmark = pytest.mark.usefixtures("path")

REGIMES = ["random", "trained", "slow", "reports"]
SOME = slice(0, 16)  # value channels of the definition where all would take minutes


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("initial, final", [(None, F32), (F32, F32), (BF16, BF16)])
def test_gate_regimes(regime, initial, final):
    check(shared(2048, 4, regime=regime, initial=initial), regime, state_dtype=final)


@pytest.mark.parametrize("regime", REGIMES)
def test_every_length(regime):
    """One sequence of every length 1..64, and each alone: the same bits."""
    lengths = list(range(1, 65))
    cu = [sum(lengths[:n]) for n in range(65)]
    call = make(cu[-1], 2, regime=regime, cu=cu, initial=F32)
    got = check(call)
    for n, (_, begin, end) in enumerate(call.spans()):
        mine = check(call.cut(begin, end, call.initial_state[n : n + 1]))
        assert torch.equal(mine.out, got.out[:, begin:end]), f"length {end - begin}"
        assert torch.equal(mine.final[0], got.final[n]), f"length {end - begin}"


def acceptance(T, H, B=1, cu=None):
    """Inputs of flash-linear-attention's own acceptance test of a backend."""
    call = make(T, H, B=B, cu=cu)
    q, k, v = (uniform(B, T, H, 128, seed=s).to(BF16) for s in (1, 2, 3))
    state = torch.randn(call.state_shape(), generator=torch.Generator().manual_seed(4))
    return call.but(q=q, k=k, v=v, initial_state=state)


@pytest.mark.parametrize("B, T, H", [(1, 1024, 4), (2, 2048, 8), (1, 4096, 16)])
def test_acceptance_shapes_dense(B, T, H):
    check(acceptance(T, H, B), "acceptance", cut=SOME)


@pytest.mark.parametrize(
    "cu, H",
    [
        ([0, 256, 500, 1000], 4),
        ([0, 100, 300, 1200, 2000], 8),
        ([0, 101, 303, 1205, 3007, 4096], 16),
    ],
)
def test_acceptance_shapes_varlen(cu, H):
    check(acceptance(cu[-1], H, cu=cu), "acceptance", cut=SOME)


@pytest.mark.parametrize("chains", [1, 131, 132, 133, 300])
def test_around_the_number_of_multiprocessors(chains):
    """Other block shapes are chosen there; the numbers stay the same, bit for bit."""
    call = make(70, 1, B=chains, initial=F32)
    got = check(call)
    last = call.but(
        **{n: getattr(call, n)[-1:] for n in ("q", "k", "v", "g", "beta")},
        initial_state=call.initial_state[-1:],
    )
    alone = on_cpu(run(last))
    assert torch.equal(alone.out[0], got.out[-1]) and torch.equal(alone.final[0], got.final[-1])


@pytest.mark.parametrize("V", [16, 32, 48, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("B", [1, 80])
def test_value_channels(V, B):
    """Every split of the value channels over warps and blocks, for few chains and for many."""
    check(make(40, 2, B=B, V=V, initial=F32))


@pytest.mark.parametrize("H, HV", [(2, 4), (1, 8), (3, 9), (1, 3)])
def test_grouped_value_heads(H, HV):
    check(shared(50, H, HV=HV, initial=F32))


@pytest.mark.parametrize("names", [("g",), ("beta",), ("g", "beta")])
def test_float32_gate_and_beta(names):
    call = shared(70, 2, dtype=F32, initial=F32)
    others = [n for n in ("q", "k", "v", "g", "beta") if n not in names]
    check(call.but(**{n: getattr(call, n).to(BF16) for n in others}))


@pytest.mark.parametrize("initial", [None, BF16, F32])
@pytest.mark.parametrize("final", [BF16, F32])
@pytest.mark.parametrize("T", [3, 70])
def test_mixed_state_dtypes(initial, final, T):
    check(make(T, 2, B=2, initial=initial), state_dtype=final)


# ---- Magnitudes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("regime", ["random", "slow"])
@pytest.mark.parametrize("size", [1e-20, 1e-6, 1.0, 1e6, 1e20])
@pytest.mark.parametrize("which", ["values", "state", "both"])
def test_magnitudes(regime, size, which):
    call = shared(300, 2, regime=regime, initial=F32)
    if which != "state":
        call = call.but(v=(call.v.float() * size).to(BF16))
    if which != "values":
        call = call.but(initial_state=call.initial_state * size)
    check(call)


def test_unequal_value_channels():
    call = shared(300, 2, regime="random", initial=F32)
    size = 10.0 ** torch.linspace(-6, 3, 128)
    call = call.but(
        v=(call.v.float() * size).to(BF16), initial_state=call.initial_state * size[:, None]
    )
    got, want = on_cpu(run(call)), yardstick(call)
    for channel in range(0, 128, 9):  # each by its own measure
        out = rms_ratio(got.out[..., channel], want.out[..., channel])
        state = rms_ratio(got.final[:, :, channel], want.final[:, :, channel])
        assert out < bounds_of("small")[0] and state < bounds_of("small")[1]


@pytest.mark.parametrize("regime", ["random", "slow"])
def test_an_outlier_token(regime):
    call = shared(300, 2, regime=regime, initial=F32)
    v = call.v.clone()
    v[:, 100] *= 1e4
    check(call.but(v=v))


@pytest.mark.parametrize("T", [16, 1000])
def test_zeros(T):
    call = shared(T, 2)
    got = run(call.but(v=torch.zeros_like(call.v)))
    assert not got.out.any() and not got.final.any()


# ---- Length --------------------------------------------------------------------------------------


def slow_decay(T):
    call = make(T, 1)
    return call.but(g=torch.full_like(call.g, -20.0), beta=torch.full_like(call.beta, -4.0))


def tail_ratio(call, tokens=4096):
    """Error of the last tokens and of the final state."""
    got, want = on_cpu(run(call)), yardstick(call.channels(SOME))
    out = rms_ratio(rows_of(call, got.out)[-tokens:, :, SOME], rows_of(call, want.out)[-tokens:])
    return out, rms_ratio(got.final[:, :, SOME], want.final)


@pytest.mark.slow
@pytest.mark.parametrize("T", [65536, 1 << 20])
def test_error_does_not_grow_with_length(T):
    """Decay near 1: the state fills and forgets over some thousands of tokens."""
    out, state = tail_ratio(slow_decay(T))
    short_out, short_state = tail_ratio(slow_decay(16384))
    assert out <= 1.2 * short_out and state <= 1.2 * short_state
    assert out <= bounds_of("long")[0] and state <= bounds_of("long")[1]


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["random", "slow"])
def test_long_sequence(regime):
    check(make(65536, 1, regime=regime, initial=F32), regime, cut=SOME)
