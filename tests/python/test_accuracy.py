"""Error against float64: RMS(error) / RMS(reference) and the largest error, per gate regime.

Bounds: the fp32 path 1e-6 for the fp32 state and an fp32 output, 1.75e-3 for a bf16 output (whose
own rounding costs 1.66e-3); bf16 products 4e-3. They hold for every gate regime alike and do not
grow with the number of tokens.
"""

import pytest
from inputs import (
    BF16,
    F32,
    assert_near,
    built_once,
    each_kernel,
    largest,
    make,
    rms_ratio,
    run,
    shared,
    trained_layers,
    yardstick,
)

REGIMES = ["random", "trained", "slow", "reports"]


@each_kernel
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("T, H", [(1, 8), (6, 8), (16, 8), (100, 8), (1024, 4)])
def test_accuracy_of_regimes(kernel, regime, T, H):
    call = shared(T, H, regime=regime, initial=F32)
    for out_dtype, state_dtype in ((BF16, F32), (F32, BF16)):
        got = run(call, kernel, out_dtype=out_dtype, state_dtype=state_dtype)
        want = yardstick(call)
        assert_near(kernel, got.out, want.out)
        assert_near(kernel, got.final, want.final, "final_state")
        for a, b in ((got.out, want.out), (got.final, want.final)):
            if a.numel() >= 2**17:
                assert rms_ratio(a, b) <= kernel.bound(a.dtype)
            # No single element may hide: 10 times the RMS bound, many deviations out.
            assert largest(a, b) <= 10 * kernel.bound(F32), "largest error"


@each_kernel
@pytest.mark.parametrize("regime", REGIMES)
def test_accuracy_of_softplus_gates(kernel, regime):
    call = shared(300, 4, regime=regime, initial=F32, lower_bound=None)
    got, want = run(call, kernel, out_dtype=F32), yardstick(call)
    assert_near(kernel, got.out, want.out)
    assert_near(kernel, got.final, want.final, "final_state")


@each_kernel
def test_accuracy_of_every_trained_head(kernel):
    """Each layer and head by itself, so that a bad one cannot hide among the others."""
    heads = sum(x.shape[2] for x in trained_layers()["q"])
    tokens = trained_layers()["q"][0].shape[1]
    call = shared(tokens, heads, regime="trained")
    got, want = run(call, kernel, out_dtype=F32), yardstick(call)
    for h in range(heads):
        assert rms_ratio(got.out[:, :, h], want.out[:, :, h]) <= kernel.bound(F32), f"head {h}"
        assert rms_ratio(got.final[:, h], want.final[:, h]) <= kernel.bound(F32), f"head {h}"


SOME = slice(56, 72)  # value channels that are compared where float64 takes long


@built_once
def long_call(regime, channels=slice(None)):
    return make(65536, 1, regime=regime).channels(channels)


@each_kernel
@pytest.mark.parametrize("regime", ["slow", "trained", "random"])
def test_accuracy_is_flat_from_1k_to_64k_tokens(kernel, regime):
    call = long_call(regime)
    got, want = run(call, kernel, out_dtype=F32), yardstick(long_call(regime, SOME))
    for begin in (0, 1024, 8192, 32768, 64512):
        part = slice(begin, begin + 1024)
        ratio = rms_ratio(got.out[:, part, :, SOME], want.out[:, part])
        assert ratio <= kernel.bound(F32), f"{ratio:.3g} at token {begin}"
    assert rms_ratio(got.final[:, :, SOME], want.final) <= kernel.bound(F32)


@pytest.mark.slow
def test_accuracy_of_a_million_tokens():
    """Decay near 1 over 2^20 tokens on the fastest fp32 kernel, in 16 calls that hand the state on
    (the same bits as one call)."""
    state = exact = None
    for part in range(16):
        call = make(65536, 1, regime="slow", seed=part)
        got = run(call.but(initial_state=state), out_dtype=F32)
        want = yardstick(call.channels(SOME).but(initial_state=exact))
        state, exact = got.final, want.final
        assert rms_ratio(got.out[..., SOME], want.out) <= 1e-6, f"tokens of part {part}"
        assert rms_ratio(state[:, :, SOME], exact) <= 1e-6, f"state after part {part}"
