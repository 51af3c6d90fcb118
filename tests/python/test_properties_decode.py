"""flash_kda.decode on CPU tensors: a few tokens per sequence on a pool of states, in place."""

import pytest
import torch
from inputs import (
    BF16,
    F32,
    F64,
    assert_near,
    bits,
    decode,
    each_isa,
    each_kernel,
    make,
    run,
    same_bits,
    shared,
    uniform,
    yardstick,
)


def random_pool(call, slots, dtype=F32, seed=5):
    gen = torch.Generator().manual_seed(seed)
    return (0.3 * torch.randn(call.state_shape(slots), generator=gen)).to(dtype)


@each_isa
@pytest.mark.parametrize("regime", ["random", "slow", "trained"])
@pytest.mark.parametrize("state", [BF16, F32])
@pytest.mark.parametrize("T", range(1, 17))
def test_decode_every_length(kernel, T, state, regime):
    call = shared(T, 3, B=2, regime=regime)
    pool = random_pool(call, 2, state)
    want = yardstick(call.but(initial_state=pool.clone()))
    out = decode(call, pool, kernel)
    assert_near(kernel, out, want.out)
    assert_near(kernel, pool, want.final, "state")


@each_isa
@pytest.mark.parametrize("lower_bound", [-5.0, 0.0, None])
@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("H, HV", [(2, 2), (2, 6)])
def test_decode_options(kernel, lower_bound, doubled, H, HV):
    call = shared(2, H, B=3, HV=HV, lower_bound=lower_bound, allow_neg_eigval=doubled)
    activated = call.but(
        lower_bound=None,
        A_log=None,
        dt_bias=None,
        g=-call.g.abs(),
        beta=uniform(*call.beta.shape).to(BF16),
        options={
            "use_gate_in_kernel": False,
            "allow_neg_eigval": doubled,
            "use_beta_sigmoid_in_kernel": False,
        },
    )
    unit = {n: torch.nn.functional.normalize(getattr(call, n).float(), dim=-1) for n in ("q", "k")}
    raw = call.but(**unit, options={**call.options, "use_qk_l2norm_in_kernel": False})
    bare = call.but(A_log=None, dt_bias=None)
    for one in (call, activated, raw, bare):
        pool = random_pool(one, 3)
        want = yardstick(one.but(initial_state=pool.clone()))
        out = decode(one, pool, kernel, out_dtype=F32)
        assert_near(kernel, out, want.out)
        assert_near(kernel, pool, want.final, "state")


@each_isa
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("cu", [[0, 1, 2, 3], [0, 4, 4, 5], [0, 0, 16, 17], [0, 0, 0, 0]])
def test_decode_packed(kernel, index, cu):
    """[1, total, H, K] with cu_seqlens; an empty sequence keeps its state."""
    call = shared(20, 2, cu=cu, index=index)
    pool = random_pool(call, 3)
    want = yardstick(call.but(initial_state=pool.clone()))
    before = pool.clone()
    out = decode(call, pool, kernel)
    assert (bits(out[:, cu[-1] :]) == -1).all()
    if cu[-1]:
        assert_near(kernel, out[:, : cu[-1]], want.out[:, : cu[-1]])
    assert_near(kernel, pool, want.final, "state")
    for n in range(3):
        if cu[n] == cu[n + 1]:
            assert same_bits(pool[n], before[n])


@each_isa
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("slots", [[4, 0, 2], [-1, 3, -1], [-1, -1, -1]])
@pytest.mark.parametrize("T", [1, 3])
def test_decode_one_slot_per_sequence(kernel, index, slots, T):
    call = shared(T, 2, B=3)
    pool = random_pool(call, 6)
    live = [n for n in range(3) if slots[n] >= 0]
    rest = [s for s in range(6) if s not in slots]
    pool[rest] = float("nan")  # nobody may read these
    start = torch.zeros(call.state_shape())
    start[live] = pool[[slots[n] for n in live]]
    want, before = yardstick(call.but(initial_state=start)), pool.clone()
    out = decode(call, pool, kernel, state_indices=torch.tensor(slots, dtype=index))
    for n in range(3):
        if slots[n] < 0:
            assert not out[n].any(), "rows of padding must be zero"
        else:
            assert_near(kernel, out[n], want.out[n])
            assert_near(kernel, pool[slots[n]], want.final[n], "state")
    assert same_bits(pool[rest], before[rest])


@each_isa
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("accepted", [[1, 1, 1], [4, 2, 3], [1, 4, 2]])
@pytest.mark.parametrize("state", [BF16, F32])
def test_decode_draft_tokens(kernel, index, accepted, state):
    """[N, T] slots: read at [n, accepted - 1], the state after token t written to [n, t]."""
    T = 4
    call = shared(T, 2, B=3)
    slots = torch.randperm(15, generator=torch.Generator().manual_seed(0))[:12].view(3, T)
    pool = random_pool(call, 15, state)
    before = pool.clone()
    start = torch.stack([before[slots[n, accepted[n] - 1]] for n in range(3)])
    out = decode(
        call,
        pool,
        kernel,
        state_indices=slots.to(index),
        num_accepted_tokens=torch.tensor(accepted, dtype=index),
    )
    want = yardstick(call.but(initial_state=start))
    assert_near(kernel, out, want.out)
    for t in range(T):
        prefix = yardstick(call.cut(0, t + 1, start))
        for n in range(3):
            assert_near(kernel, pool[slots[n, t]], prefix.final[n], "state")
    rest = [s for s in range(15) if s not in slots]
    assert same_bits(pool[rest], before[rest])


@each_isa
def test_decode_draft_tokens_with_padding(kernel):
    call = shared(3, 2, B=3)
    pool = random_pool(call, 9)
    before = pool.clone()
    slots = torch.tensor([[0, 1, 2], [-1, -1, -1], [6, 7, 8]])
    out = decode(
        call, pool, kernel, state_indices=slots, num_accepted_tokens=torch.tensor([2, 1, 3])
    )
    start = before[[1, 1, 8]]
    want = yardstick(call.but(initial_state=start))
    assert not out[1].any()
    for n in (0, 2):
        assert_near(kernel, out[n], want.out[n])
        assert_near(kernel, pool[slots[n, 2]], want.final[n], "state")
    assert same_bits(pool[3:6], before[3:6])


@each_isa
@pytest.mark.parametrize("T, H, HV", [(1, 1, 1), (4, 3, 6)])
def test_decode_same_bits_for_any_number_of_threads_and_repeats(kernel, T, H, HV):
    call = shared(T, H, B=2, HV=HV)
    results = []
    for threads in (1, 2, 3, 4, 64) + (2,) * 45:
        pool = random_pool(call, 2)
        results.append((decode(call, pool, kernel, threads=threads), pool))
    for out, pool in results[1:]:
        assert same_bits(out, results[0][0]) and same_bits(pool, results[0][1])


@each_isa
def test_decode_token_by_token_is_decode_at_once(kernel):
    """T tokens in one call, or one at a time with the fp32 state in the pool: the same bits."""
    call = shared(16, 2, B=2)
    together = random_pool(call, 2)
    out = decode(call, together, kernel)
    single = random_pool(call, 2)
    steps = [decode(call.cut(t, t + 1), single, kernel) for t in range(16)]
    assert same_bits(torch.cat(steps, 1), out) and same_bits(single, together)


@each_isa
@pytest.mark.parametrize("gap", [1, 8])
def test_decode_strided_inputs_give_the_same_bits(kernel, gap):
    call = shared(2, 3, B=2)
    views = {}
    for name in ("q", "k", "v", "g", "beta"):
        x = getattr(call, name)
        wide = torch.full([n + gap for n in x.shape], float("nan"), dtype=BF16)
        views[name] = wide[tuple(slice(0, n) for n in x.shape)]
        views[name].copy_(x)
    a, b = random_pool(call, 2), random_pool(call, 2)
    assert same_bits(decode(call, a, kernel), decode(call.but(**views), b, kernel))
    assert same_bits(a, b)


@each_kernel
@pytest.mark.parametrize("gate", ["slow", "random"])
def test_serving_prefill_into_a_pool_then_50_steps(kernel, gate):
    """Requests of different lengths share a pool; each step decodes all of them, one draws out."""
    lengths, slots = [40, 17, 3], torch.tensor([5, 0, 3])
    cu = [0, 40, 57, 60]
    steps = 50
    prompt = make(60, 2, cu=cu, regime=gate, seed=1)
    after = make(steps, 2, B=3, regime=gate, seed=2).but(A_log=prompt.A_log, dt_bias=prompt.dt_bias)
    pool = torch.full(prompt.state_shape(6), float("nan"))
    pool[slots] = 0.0
    run(prompt.but(initial_state=pool, options={"state_indices": slots}), kernel, final=pool)
    outs = []
    for t in range(steps):
        live = slots.clone()
        if t >= 30:
            live[1] = -1  # request 1 has ended; its slot must keep its state
        outs.append(decode(after.cut(t, t + 1), pool, kernel, state_indices=live))
    outs = torch.cat(outs, 1)
    for n in range(3):
        whole = {
            x: torch.cat(
                [getattr(prompt, x)[:, cu[n] : cu[n + 1]], getattr(after, x)[n : n + 1]], 1
            )
            for x in ("q", "k", "v", "g", "beta")
        }
        length = lengths[n] + (30 if n == 1 else steps)
        want = yardstick(
            prompt.but(**{x: t[:, :length] for x, t in whole.items()}, cu_seqlens=None)
        )
        got = outs[n : n + 1, : length - lengths[n]]
        assert_near(kernel, got, want.out[:, lengths[n] :])
        assert_near(kernel, pool[slots[n]], want.final[0], "state")
        if n == 1:
            assert not outs[1, 30:].any()
    assert torch.isnan(pool[[1, 2, 4]]).all()


@each_isa
def test_decode_and_forward_agree(kernel):
    call = shared(8, 2, B=2)
    pool = random_pool(call, 2)
    prefill = run(call.but(initial_state=pool.clone()), kernel, out_dtype=F32)
    out = decode(call, pool, kernel, out_dtype=F32)
    assert_near(kernel, out, prefill.out)
    assert_near(kernel, pool, prefill.final, "state")


def test_decode_float64_state_is_for_the_reference_only():
    call = shared(1, 2)
    with pytest.raises((TypeError, ValueError, RuntimeError), match="state"):
        decode(call, random_pool(call, 1, F64))
