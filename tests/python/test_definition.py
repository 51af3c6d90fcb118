"""flash_kda.reference, the yardstick of other tests, against definition.py and plain algebra."""

import definition
import numpy as np
import pytest
import torch
from definition import as_float64
from inputs import BF16, F32, F64, bits, make, normal, poisoned, rms_ratio, run, uniform, yardstick

import flash_kda

FLAGS = (
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
)


def stated(call, walk=definition.by_transitions, prefixes=()):
    flags = {name: value for name, value in call.options.items() if name in FLAGS}
    return definition.forward(
        call.q,
        call.k,
        call.v,
        call.g,
        call.beta,
        call.scale,
        call.A_log,
        call.dt_bias,
        call.lower_bound,
        call.initial_state,
        call.cu_seqlens,
        walk=walk,
        prefixes=prefixes,
        **flags,
    )


def assert_agrees(call, walk=definition.by_transitions, bound=1e-12):
    out, final, _ = stated(call, walk)
    got = yardstick(call)
    rows = ~np.isnan(out)
    assert (torch.isnan(got.out).numpy() == ~rows).all(), "other rows written than those of cu"
    assert np.abs(as_float64(got.out)[rows] - out[rows]).max(initial=0) <= bound * max(
        1.0, np.abs(out[rows]).max(initial=0)
    )
    assert np.abs(as_float64(got.final) - final).max(initial=0) <= bound * max(
        1.0, np.abs(final).max(initial=0)
    )


def activated(call):
    """The same call with g as a log-decay (softplus-like, deep now and then)."""
    g = -(torch.rand(call.g.shape, generator=torch.Generator().manual_seed(9)) ** 4) * 20
    return call.but(
        g=g.to(call.g.dtype),
        A_log=None,
        dt_bias=None,
        options={**call.options, "use_gate_in_kernel": False},
    )


# ---- The two statements of definition.py agree, so one of them is enough below -------------------


@pytest.mark.parametrize("lower_bound", [-5.0, None, 0.0])
@pytest.mark.parametrize("doubled", [False, True])
def test_definition_walk_and_linear_system_agree(lower_bound, doubled):
    call = make(40, 2, B=2, HV=4, initial=F32, lower_bound=lower_bound, allow_neg_eigval=doubled)
    by_walk = stated(call)
    for walk in (
        definition.by_linear_system,
        definition.in_pieces(definition.by_linear_system, 16),
    ):
        for a, b in zip(by_walk[:2], stated(call, walk)[:2]):
            assert np.abs(a - b).max() <= 1e-12 * max(1.0, np.abs(a).max())


# ---- The library's definition against them -------------------------------------------------------


@pytest.mark.parametrize("lower_bound", [-5.0, -1e-3, 0.0, None])
@pytest.mark.parametrize("regime", ["reports", "random", "slow", "trained"])
def test_definition_gates(regime, lower_bound):
    assert_agrees(make(40, 2, regime=regime, lower_bound=lower_bound, initial=F32))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_definition_long(lower_bound):
    walk = definition.in_pieces(definition.by_linear_system, 32)
    assert_agrees(make(2000, 2, lower_bound=lower_bound, initial=F32), walk)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("doubled", [True, False])
@pytest.mark.parametrize("gate", [True, False])
def test_definition_flags(norm, sigmoid, doubled, gate):
    call = make(
        23,
        2,
        initial=F32,
        use_qk_l2norm_in_kernel=norm,
        use_beta_sigmoid_in_kernel=sigmoid,
        allow_neg_eigval=doubled,
    )
    if not norm:  # unit keys keep the recurrence from growing, and are what such a caller passes
        call.q, call.k = (
            torch.nn.functional.normalize(x.float(), dim=-1).to(BF16) for x in (call.q, call.k)
        )
    if not sigmoid:
        call.beta = uniform(*call.beta.shape).to(BF16)
    assert_agrees(call if gate else activated(call))


@pytest.mark.parametrize("A_log", [True, False])
@pytest.mark.parametrize("dt_bias", ["[HV, K]", "[HV * K]", None])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_definition_absent_gate_parameters(A_log, dt_bias, lower_bound):
    call = make(19, 3, lower_bound=lower_bound)
    call.A_log = call.A_log if A_log else None
    call.dt_bias = {"[HV, K]": call.dt_bias, "[HV * K]": call.dt_bias.reshape(-1), None: None}[
        dt_bias
    ]
    assert_agrees(call)


@pytest.mark.parametrize("H, HV", [(1, 1), (1, 4), (2, 6), (3, 3)])
@pytest.mark.parametrize("scale", [128**-0.5, 1.0, -0.3])
def test_definition_grouped_heads_and_scale(H, HV, scale):
    assert_agrees(make(18, H, HV=HV, initial=F32).but(scale=scale))


@pytest.mark.parametrize("cu", [[0, 17, 48], [0, 0, 5, 5, 30, 30], [0], [0, 0], [0, 48]])
def test_definition_varlen(cu):
    for index in (torch.int32, torch.int64):
        assert_agrees(make(48, 2, cu=cu, initial=F32, index=index))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("state", [None, BF16, F32, F64])
def test_definition_dtypes(dtype, state):
    call = make(20, 2, B=2, dtype=dtype)
    if state is not None:
        call.initial_state = normal(*call.state_shape(), dtype=F64).to(state)
    assert_agrees(call)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_definition_rounds_its_results_once(dtype):
    """A bf16 or fp32 result is the nearest one to the float64 result; no rounding in between."""
    call = make(64, 4, initial=F32)
    got = run(call, fn=flash_kda.reference, out_dtype=dtype, state_dtype=dtype)
    want = yardstick(call)
    for a, b in ((got.out, want.out), (got.final, want.final)):
        error = (a.double() - b).abs()
        for step in (-1, 1):  # the neighbours of a in its own dtype are farther away
            neighbour = (bits(a) + step).view(dtype).view(a.shape)
            assert (error <= (neighbour.double() - b).abs()).all()


def test_definition_checkpoints():
    call = make(150, 2, cu=[0, 40, 130, 150], initial=F32)
    prefixes = [(0, 16), (0, 32), (1, 16), (1, 80), (2, 0), (2, 16)]
    call.options["checkpoint_offsets"] = torch.tensor([t for _, t in prefixes])
    got = yardstick(call, checkpoints=6)
    _, _, states = stated(call, prefixes=prefixes)
    for m, prefix in enumerate(prefixes):
        assert np.abs(got.checkpoints[m].numpy() - states[prefix]).max() < 1e-12


def test_definition_pool():
    call = make(21, 2, B=3)
    pool = normal(*call.state_shape(5), dtype=F64)
    plain = yardstick(call.but(initial_state=pool[[3, 0, 1]].clone()))
    call.initial_state = pool
    call.options["state_indices"] = torch.tensor([3, -1, 1])
    got = yardstick(call, final=pool)
    assert torch.equal(got.out[[0, 2]], plain.out[[0, 2]]) and not got.out[1].any()
    assert torch.equal(pool[[3, 1]], plain.final[[0, 2]])


# ---- Plain algebra: what the operator must do whoever writes it ----------------------------------


def plain_call(T, **changes):
    """No decay, b given, unit keys from an orthonormal basis."""
    basis = torch.linalg.qr(torch.randn(128, 128, generator=torch.Generator().manual_seed(1)))[0]
    keys = basis[:T].contiguous().reshape(1, T, 1, 128)
    call = make(T, 1, dtype=F32, use_beta_sigmoid_in_kernel=False)
    return call.but(q=keys, k=keys, beta=torch.ones(1, T, 1), lower_bound=0.0, **changes)


def test_definition_full_strength_write_is_read_back():
    """b = 1, no decay, one token: S k = v, whatever S was."""
    call = plain_call(1).but(scale=1.0)
    call.initial_state = normal(*call.state_shape())
    assert rms_ratio(yardstick(call).out, call.v) < 1e-5  # the norm's 1e-6 and fp32 keys remain


def test_definition_orthogonal_keys_do_not_disturb_each_other():
    call = plain_call(100).but(scale=1.0)
    S = yardstick(call).final[0, 0]
    assert rms_ratio(S @ call.k[0, :, 0].double().T, call.v[0, :, 0].T) < 1e-5


def test_definition_zero_beta_only_decays():
    call = make(37, 2, initial=F32, use_beta_sigmoid_in_kernel=False)
    call.beta = torch.zeros_like(call.beta)
    g = definition.log_decay(*map(as_float64, (call.g, call.A_log, call.dt_bias)), -5.0)
    want = as_float64(call.initial_state) * np.exp(g[0].sum(0))[None, :, None, :]
    assert np.abs(yardstick(call).final.numpy() - want).max() < 1e-15


def test_definition_doubled_full_beta_reflects():
    """b = 2 on unit keys: S (I - 2 k k^T) + 2 v k^T, so S k turns into 2 v - S k."""
    call = plain_call(1, options={"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True})
    call.initial_state = normal(*call.state_shape())
    call.scale = 1.0
    before = call.initial_state[0, 0].double() @ call.k[0, 0, 0].double()
    got = yardstick(call).out[0, 0, 0]
    assert rms_ratio(got, 2 * call.v[0, 0, 0].double() - before) < 1e-5


def test_definition_output_is_linear_in_values_and_state():
    call = make(33, 2, dtype=F32, initial=F32)
    other = call.but(v=normal(*call.v.shape), initial_state=normal(*call.state_shape()))
    both = call.but(v=call.v + other.v, initial_state=call.initial_state + other.initial_state)
    a, b, c = (yardstick(x) for x in (call, other, both))
    assert rms_ratio(a.out + b.out, c.out) < 1e-6  # the sums of the inputs are rounded to fp32
    assert rms_ratio(a.final + b.final, c.final) < 1e-6


def test_definition_gradient_step():
    """The write is a step of gradient descent on |S k - v|^2 / 2 at rate b (finite difference)."""
    call = plain_call(1, options={"use_beta_sigmoid_in_kernel": False})
    call.initial_state, call.beta = normal(*call.state_shape()), torch.full((1, 1, 1), 0.25)
    S, step = call.initial_state[0, 0].double(), 1e-6
    k, v = call.k[0, 0, 0].double(), call.v[0, 0, 0].double()
    k = k / torch.sqrt(k.square().sum() + 1e-6)
    moved = (yardstick(call).final[0, 0] - S) / -0.25
    for i, j in ((0, 0), (5, 77), (127, 127)):
        S_up = S.clone()
        S_up[i, j] += step
        slope = ((S_up @ k - v).square().sum() - (S @ k - v).square().sum()) / 2 / step
        assert abs(float(slope - moved[i, j])) < 1e-5


def test_definition_poison_is_nan():
    """The tests' own poison: NaN in every float type, so an unwritten element cannot pass."""
    for dtype in (BF16, F32, F64):
        assert torch.isnan(poisoned((3,), dtype)).all()
