"""flash_kda.decode on CUDA tensors: results against float64, the pool, streams and graphs, errors.

Arithmetic is fp32 as on the CPU, and so are the bounds: 1e-6 of RMS(reference) beyond rounding.
"""

import subprocess
import sys

import inputs
import pytest
import torch
from inputs import (
    BF16,
    F32,
    F64,
    assert_near,
    bits,
    make,
    poisoned,
    rms_ratio,
    same_bits,
    shared,
    uniform,
    yardstick,
)
from on_gpu import DEVICE, bounds_of, decode, moved, on_cpu, random_pool, run

import flash_kda

ERRORS = (TypeError, ValueError, RuntimeError)
INDICES = [torch.int32, torch.int64]


def check(call, slots=None, state=F32, out_dtype=BF16):
    """One decode on a pool of one slot per sequence, against float64. -> out, state"""
    pool = random_pool(call, slots or call.sequences, state)
    want = yardstick(call.but(initial_state=pool.cpu()))
    out = decode(call, pool, out_dtype=out_dtype)
    assert_near(None, inputs.rows_of(call, out.cpu()), inputs.rows_of(call, want.out))
    assert_near(None, pool.cpu(), want.final, "state")
    return out, pool


# ---- Results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("regime", ["random", "slow", "trained", "reports"])
@pytest.mark.parametrize("state", [BF16, F32])
@pytest.mark.parametrize("T", range(1, 17))
def test_every_length(T, state, regime):
    check(make(T, 3, B=2, regime=regime), state=state)
    kind = "f32" if state == F32 else "bf16"
    assert flash_kda.last_report()["kernel"] == f"cuda/sm80/decode_{kind}"


@pytest.mark.parametrize("state", [BF16, F32])
def test_the_cpu_says_the_same(state):
    call = shared(3, 4, B=3)
    pool = random_pool(call, 3, state)
    there, out = pool.cpu(), decode(call, pool, out_dtype=F32).cpu()
    assert_near(None, out, inputs.decode(call, there, out_dtype=F32).double())
    assert_near(None, pool.cpu(), there.double(), "state")


@pytest.mark.parametrize("lower_bound", [-5.0, -1e-3, 0.0, None])
@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("H, HV", [(2, 2), (2, 6)])
def test_gates_and_flags(lower_bound, doubled, H, HV):
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
    for one in (call, activated, raw, call.but(A_log=None, dt_bias=None)):
        check(one, out_dtype=F32)
    flat = call.but(dt_bias=call.dt_bias.reshape(-1))
    (a, s), (b, t) = check(call), check(flat)
    assert same_bits(a, b) and same_bits(s, t)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("size", [-50.0, -8.0, 8.0, 50.0, 1e30])
def test_saturated_and_deep_gates(size, lower_bound):
    call = make(3, 2, B=2, lower_bound=lower_bound)
    call.g = call.g + size
    check(call)


@pytest.mark.parametrize("A_log", [-100.0, 60.0, 300.0])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_rates_beyond_float32(A_log, lower_bound):
    call = make(2, 2, lower_bound=lower_bound)
    check(call.but(A_log=torch.full((2,), A_log)))


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("g",), ("beta",), ("q", "v", "g")])
@pytest.mark.parametrize("state", [BF16, F32])
def test_float32_inputs(names, state):
    call = shared(3, 2, B=2, dtype=F32)
    others = [n for n in ("q", "k", "v", "g", "beta") if n not in names]
    call = call.but(**{n: getattr(call, n).to(BF16) for n in others})
    check(call, state=state)
    check(call, state=state, out_dtype=F32)
    assert flash_kda.last_report()["kernel"].endswith("_any")


@pytest.mark.parametrize("V", [16, 32, 48, 80, 112, 128, 192, 256])
@pytest.mark.parametrize("T", [1, 6])
def test_value_channels(V, T):
    check(make(T, 2, B=2, V=V))


@pytest.mark.parametrize("size", [1e-20, 1e-6, 1e6, 1e20])
def test_magnitudes(size):
    call = shared(2, 2, B=2)
    call = call.but(v=(call.v.float() * size).to(BF16))
    pool = random_pool(call, 2) * size
    want = yardstick(call.but(initial_state=pool.cpu()))
    out = decode(call, pool)
    assert_near(None, out.cpu(), want.out)
    assert_near(None, pool.cpu(), want.final, "state")


def test_nan_stays_in_its_channel_and_sequence():
    call = moved(shared(2, 2, B=3))
    a, b = random_pool(call, 3), random_pool(call, 3)
    clean = decode(call, a)
    dirty = call.but(v=call.v.clone())
    dirty.v[1, 0, 1, 77] = float("nan")
    got = decode(dirty, b)
    keep = torch.ones_like(clean, dtype=torch.bool)
    keep[1, :, 1, 77] = False
    assert same_bits(clean[keep], got[keep]) and torch.isnan(got[~keep]).all()
    a[1, 1, 77], b[1, 1, 77] = 0, b[1, 1, 77].nan_to_num(0)
    assert same_bits(a, b)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_a_rate_that_is_nan_makes_its_head_nan(lower_bound):
    call = moved(shared(2, 2, B=3, lower_bound=lower_bound))
    a, b = random_pool(call, 3), random_pool(call, 3)
    dirty = call.but(A_log=call.A_log.clone())
    dirty.A_log[1] = float("nan")
    clean, got = decode(call, a), decode(dirty, b)
    assert same_bits(clean[:, :, 0], got[:, :, 0]) and same_bits(a[:, 0], b[:, 0])
    assert torch.isnan(got[:, :, 1]).all() and torch.isnan(b[:, 1]).all()


@pytest.mark.parametrize("N, H", [(1, 1), (300, 2), (33, 7)])
def test_a_sequence_does_not_see_the_batch(N, H):
    call = moved(make(2, H, B=N))
    pool = random_pool(call, N)
    alone = pool[-1:].clone()
    out = decode(call, pool)
    parts = {n: getattr(call, n)[-1:] for n in ("q", "k", "v", "g", "beta")}
    last = decode(call.but(**parts), alone)
    assert same_bits(last[0], out[-1]) and same_bits(alone[0], pool[-1])


def test_token_by_token_is_decode_at_once():
    """The same bits with an fp32 state."""
    call = moved(shared(16, 2, B=2))
    together, single = random_pool(call, 2), random_pool(call, 2)
    out = decode(call, together)
    steps = [decode(call.cut(t, t + 1), single) for t in range(16)]
    assert same_bits(torch.cat(steps, 1), out) and same_bits(single, together)


@pytest.mark.parametrize("regime", ["random", "trained", "slow"])
def test_prefill_of_16_tokens_agrees(regime):
    """The forward rounds its operands to fp16: its bounds."""
    call = shared(16, 4, B=2, regime=regime)
    pool = random_pool(call, 2)
    prefill = on_cpu(run(call.but(initial_state=pool.cpu())))
    out = decode(call, pool)
    assert rms_ratio(prefill.out, out.cpu().double()) <= bounds_of("small")[0]
    assert rms_ratio(prefill.final, pool.cpu().double()) <= bounds_of("small")[1]


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["trained", "slow"])
def test_ten_thousand_steps(regime):
    """The error of an fp32 state stays below 2e-5 (measured: below 1e-6)."""
    call = make(10_000, 4, regime=regime, initial=F32)
    there, pool = moved(call), call.initial_state.to(DEVICE)
    out = torch.cat([decode(there.cut(t, t + 1), pool, out_dtype=F32) for t in range(10_000)], 1)
    want = yardstick(call)
    print(f"{regime}: out {rms_ratio(out[:, -1000:].cpu(), want.out[:, -1000:]):.2e}")
    print(f"{regime}: state {rms_ratio(pool.cpu(), want.final):.2e}")
    assert rms_ratio(out[:, -1000:].cpu(), want.out[:, -1000:]) < 2e-5
    for h in range(4):
        assert rms_ratio(pool[:, h].cpu(), want.final[:, h]) < 2e-5


# ---- The pool ------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("cu", [[0, 1, 2, 3], [0, 4, 4, 5], [0, 0, 16, 17], [0, 0, 0, 0]])
def test_case_29_in_place_packed(index, cu):
    """[1, total, H, K] with cu_seqlens, rows past its end untouched; an empty sequence keeps its
    state."""
    call = shared(20, 2, cu=cu, index=index)
    pool = random_pool(call, 3)
    before = pool.clone()
    want = yardstick(call.but(initial_state=pool.cpu()))
    out = decode(call, pool)
    assert (bits(out[:, cu[-1] :]) == -1).all()
    if cu[-1]:
        assert_near(None, out[:, : cu[-1]].cpu(), want.out[:, : cu[-1]])
    assert_near(None, pool.cpu(), want.final, "state")
    for n in range(3):
        if cu[n] == cu[n + 1]:
            assert same_bits(pool[n], before[n])


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("slots", [[3, -1, 0], [-1, 3, -1], [-1, -1, -1]])
@pytest.mark.parametrize("state", [BF16, F32])
@pytest.mark.parametrize("T", [1, 6])
def test_case_28_padded_pool_index(index, slots, state, T):
    call = shared(T, 2, B=3)
    pool = random_pool(call, 6, state)
    live = [n for n in range(3) if slots[n] >= 0]
    rest = [s for s in range(6) if s not in slots]
    pool[rest] = float("nan")  # nobody may read these
    start = torch.zeros(call.state_shape())
    start[live] = pool[[slots[n] for n in live]].float().cpu()
    want, before = yardstick(call.but(initial_state=start)), pool.clone()
    out = decode(call, pool, state_indices=torch.tensor(slots, dtype=index))
    for n in range(3):
        if slots[n] < 0:
            assert not bits(out[n]).any(), "rows of padding must be zero"
        else:
            assert_near(None, out[n].cpu(), want.out[n])
            assert_near(None, pool[slots[n]].cpu(), want.final[n], "state")
    assert same_bits(pool[rest], before[rest])


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("T", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("state", [BF16, F32])
@pytest.mark.parametrize("packed", [False, True])
def test_draft_tokens(index, T, state, packed):
    """Read at [n, accepted - 1], the state after token t written to [n, t]; -1: not kept."""
    call = shared(T, 2, B=3)
    gen = torch.Generator().manual_seed(T)
    slots = torch.randperm(3 * T + 3, generator=gen)[: 3 * T].view(3, T)
    accepted = torch.randint(1, T + 1, (3,), generator=gen)
    pool = random_pool(call, 3 * T + 3, state)
    before = pool.cpu()
    start = torch.stack([before[slots[n, accepted[n] - 1]] for n in range(3)])
    table = slots.clone()
    if T > 2:
        unkept = 0 if accepted[0] != 1 else 1
        table[0, unkept] = -1
    one = call
    if packed:
        rows = {n: getattr(call, n).flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta")}
        one = call.but(**rows, cu_seqlens=torch.arange(4) * T)
    options = {"state_indices": table.to(index), "num_accepted_tokens": accepted.to(index)}
    out = decode(one, pool, **options)
    want = yardstick(call.but(initial_state=start))
    assert_near(None, out.view(want.out.shape).cpu(), want.out)
    for t in range(T):
        prefix = yardstick(call.cut(0, t + 1, start))
        for n in range(3):
            if table[n, t] >= 0:
                assert_near(None, pool[table[n, t]].cpu(), prefix.final[n], "state")
    rest = [s for s in range(3 * T + 3) if s not in table]
    assert same_bits(pool[rest].cpu(), before[rest])


def test_draft_tokens_with_padding():
    call = shared(3, 2, B=4)
    pool = random_pool(call, 12)
    before = pool.clone()
    slots = torch.tensor([[0, 1, 2], [-1, -1, -1], [6, 7, 8], [9, -1, 11]])
    accepted = torch.tensor([2, 1, 3, 2])  # the last reads -1: padding too
    out = decode(call, pool, state_indices=slots, num_accepted_tokens=accepted)
    want = yardstick(call.but(initial_state=before[[1, 1, 8, 9]].cpu()))
    assert not bits(out[[1, 3]]).any()
    for n in (0, 2):
        assert_near(None, out[n].cpu(), want.out[n])
        assert_near(None, pool[slots[n, 2]].cpu(), want.final[n], "state")
    rest = [3, 4, 5, 9, 10, 11]
    assert same_bits(pool[rest], before[rest])


@pytest.mark.parametrize(
    "slots, accepted",
    [
        ([[0, 1], [2, 3], [4, 5]], [0, 3, -1]),
        ([[99, 1], [-7, 3], [2**40, 5]], [1, 1, 1]),
        ([[0, 6], [2, -5], [4, -(2**62)]], [1, 1, 1]),
        ([[0, 1], [2, 3], [4, 5]], [2**40, -(2**40), 2**62]),
    ],
)
def test_indices_outside_the_pool_stay_inside(slots, accepted):
    """What the CPU would refuse: padding, or a state that is not kept; never another's memory."""
    call = moved(shared(2, 2, B=3))
    store = poisoned((10, *call.state_shape(6)[1:]), F32).to(DEVICE)
    pool = store[2:8]
    pool[:] = random_pool(call, 6)
    before = pool.clone()
    options = {"state_indices": slots, "num_accepted_tokens": accepted}
    out = decode(call, pool, **{n: torch.tensor(x) for n, x in options.items()})
    torch.cuda.synchronize()
    assert (bits(store[:2]) == -1).all() and (bits(store[8:]) == -1).all()
    for n in range(3):
        reads = slots[n][accepted[n] - 1] if 1 <= accepted[n] <= 2 else -1
        if not 0 <= reads < 6:
            assert not bits(out[n]).any()
    kept = [s for n in range(3) for s in slots[n] if bits(out[n]).any() and 0 <= s < 6]
    rest = [s for s in range(6) if s not in kept]
    assert same_bits(pool[rest], before[rest])
    single = torch.tensor([row[0] for row in slots])
    decode(call, pool, state_indices=single)
    torch.cuda.synchronize()
    assert (bits(store[:2]) == -1).all() and (bits(store[8:]) == -1).all()


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("cu", [[1, 17], [0, 20, 10, 40], [0, 17, 4096], [-5, 3, 99], [9, 0, 0]])
def test_case_45_bad_offsets_stay_inside(index, cu):
    call = moved(shared(40, 2, cu=[0, 1, 2, 3][: len(cu)]))
    call = call.but(cu_seqlens=torch.tensor(cu, dtype=index, device=DEVICE))
    N = len(cu) - 1
    outs = poisoned((2 + 40, 2, 128), BF16).to(DEVICE)
    states = poisoned((N + 2, 2, 128, 128), F32).to(DEVICE)
    states[1 : N + 1] = 0.1
    c, out = call, outs[1:-1][None]
    flash_kda.decode(
        *(c.q, c.k, c.v, c.g, c.beta, c.scale, out, c.A_log, c.dt_bias, -5.0, states[1 : N + 1]),
        cu_seqlens=call.cu_seqlens,
    )
    torch.cuda.synchronize()
    for edge in (outs[0], outs[-1], states[0], states[-1]):
        assert (bits(edge) == -1).all()


# ---- Memory layouts, repeats ---------------------------------------------------------------------


@pytest.mark.parametrize("gap", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("state", [BF16, F32])
def test_strided_tensors_give_the_same_bits(gap, dtype, state):
    """Inputs, A_log, dt_bias, indices and states as views; rows at any address."""
    call = moved(shared(5, 3, B=2, dtype=dtype))
    views = {}
    for name in ("q", "k", "v", "g", "beta", "dt_bias"):
        x = getattr(call, name)
        wide = torch.full([n + gap for n in x.shape], float("nan"), dtype=x.dtype, device=DEVICE)
        views[name] = wide[tuple(slice(0, n) for n in x.shape)]
        views[name].copy_(x)
    rates = torch.zeros(3, 1 + gap, device=DEVICE)
    rates[:, 0] = call.A_log
    table = torch.zeros(2, 1 + gap, dtype=torch.int64, device=DEVICE)
    table[:, 0] = torch.tensor([2, 1])
    a = random_pool(call, 3, state)
    image = 128 * 128
    store = torch.full((3 * (3 * (image + gap) + gap),), float("nan"), dtype=state, device=DEVICE)
    strides = (3 * (image + gap) + gap, image + gap, 128, 1)
    b = store.as_strided((3, 3, 128, 128), strides)
    b.copy_(a)
    gaps = torch.ones_like(store, dtype=torch.bool)
    gaps.as_strided(b.shape, strides).fill_(False)
    before = bits(store).clone()
    one = decode(call, a, state_indices=torch.tensor([2, 1]))
    other = decode(call.but(**views, A_log=rates[:, 0]), b, state_indices=table[:, 0])
    assert same_bits(one, other) and same_bits(a, b.contiguous())
    assert torch.equal(bits(store)[gaps], before[gaps]), "a gap was written"


def test_a_fused_projection():
    call = make(1, 4, B=3)
    qkvg = torch.stack([call.q, call.k, call.v, call.g], 2).to(DEVICE)  # [N, T, 4, H, D]
    q, k, v, g = qkvg.unbind(2)
    a, b = random_pool(call, 3), random_pool(call, 3)
    assert same_bits(decode(call, a), decode(moved(call).but(q=q, k=k, v=v, g=g), b))
    assert same_bits(a, b)
    assert flash_kda.last_report()["kernel"] == "cuda/sm80/decode_f32"


@pytest.mark.parametrize("T, H, HV", [(1, 1, 1), (4, 3, 6), (1, 40, 40)])
def test_the_same_bits_a_hundred_times_under_load(T, H, HV):
    call = moved(shared(T, H, B=4, HV=HV))
    start = random_pool(call, 4)
    pool = start.clone()
    first = decode(call, pool)
    load, x = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE, dtype=BF16)
    for _ in range(100):
        with torch.cuda.stream(load):
            x = (x @ x).clamp(-1, 1)
        again = start.clone()
        assert same_bits(decode(call, again), first) and same_bits(again, pool)
    torch.cuda.synchronize()


# ---- Streams and graphs --------------------------------------------------------------------------


def call_decode(call, out, pool, **options):
    c = call
    flash_kda.decode(
        *(c.q, c.k, c.v, c.g, c.beta, c.scale, out, c.A_log, c.dt_bias, c.lower_bound, pool),
        cu_seqlens=c.cu_seqlens,
        **options,
    )


def test_a_side_stream_is_followed():
    call = moved(shared(2, 4, B=2))
    want_pool = random_pool(call, 2)
    want = decode(call, want_pool)
    late, pool = call.but(v=torch.zeros_like(call.v)), random_pool(call, 2)
    out, side = poisoned(call.v.shape, BF16).to(DEVICE), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.v.copy_(call.v)
        call_decode(late, out, pool)
    side.synchronize()
    assert same_bits(out, want) and same_bits(pool, want_pool)


@pytest.mark.parametrize("B", [4, 40])
def test_kernels_in_a_row_see_each_other(B):
    """A few blocks (B = 4) may begin before the kernel ahead has ended; they must not read."""
    call = moved(shared(1, 8, B=B))
    expected, pool = random_pool(call, B), random_pool(call, B)
    steps = []
    for _ in range(50):
        steps.append(decode(call, expected))
        torch.cuda.synchronize()
    source, out = torch.zeros_like(call.v), torch.empty_like(call.v)
    late = call.but(v=torch.empty_like(call.v))
    source.copy_(call.v)
    outs = []
    for _ in range(50):
        late.v.fill_(float("nan"))
        late.v.copy_(source)
        call_decode(late, out, pool)
        outs.append(out.clone())
    assert all(same_bits(a, b) for a, b in zip(outs, steps)) and same_bits(pool, expected)


@pytest.mark.parametrize("drafts", [False, True])
def test_graph_replay_with_changed_indices(drafts):
    """Inputs, offsets, slots and accepted tokens are changed in place between replays."""
    tables = [[0, 1, 2, 3], [0, 4, 4, 6], [0, 0, 0, 0], [0, 2, 4, 6]]
    T = 4
    call = moved(shared(6, 3, cu=tables[0]))
    pool = random_pool(call, 3 * T)
    slots = torch.zeros(3, T, dtype=torch.int64, device=DEVICE)
    accepted = torch.ones(3, dtype=torch.int32, device=DEVICE)
    options = {"state_indices": slots, "num_accepted_tokens": accepted}
    if not drafts:
        options = {"state_indices": slots[:, 0].contiguous()}
    static = call.but(**{n: t.clone() for n, t in call.tensors().items()})
    out = poisoned(call.v.shape, BF16).to(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call_decode(static, out, pool, **options)
    gen = torch.Generator().manual_seed(3)
    for i, cu in enumerate(tables):
        fresh = moved(make(6, 3, cu=cu, seed=i))
        for name, tensor in fresh.tensors().items():
            static.tensors()[name].copy_(tensor)
        slots.copy_(torch.randperm(3 * T, generator=gen).view(3, T))
        if i == 1:
            slots[1] = -1
        accepted.copy_(torch.randint(1, T + 1, (3,), generator=gen))
        if not drafts:
            options["state_indices"].copy_(slots[:, 0])
        other = pool.clone()
        bits(out).fill_(-1)
        graph.replay()
        want = decode(fresh, other, **options)
        assert same_bits(out, want) and same_bits(pool, other)


def test_first_call_of_a_process_may_be_captured(tmp_path):
    program = tmp_path / "first.py"
    program.write_text(
        "import torch, flash_kda\n"
        "x = torch.randn(3, 1, 2, 128, device='cuda').bfloat16()\n"
        "b, out = x[..., 0].contiguous(), torch.full_like(x, float('nan'))\n"
        "start = torch.randn(3, 2, 128, 128, device='cuda')\n"
        "state = start.clone()\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    flash_kda.decode(x, x, x, x, b, 0.1, out, None, None, -5.0, state)\n"
        "graph.replay()\n"
        "first, after = out.clone(), state.clone()\n"
        "state.copy_(start)\n"
        "flash_kda.decode(x, x, x, x, b, 0.1, out, None, None, -5.0, state)\n"
        "torch.cuda.synchronize()\n"
        "assert torch.isfinite(first).all() and torch.equal(first, out)\n"
        "assert torch.equal(after, state) and not torch.equal(after, start)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_call_does_not_wait_for_the_device():
    call, done = moved(shared(1, 4)), torch.cuda.Event()
    pool, out = random_pool(call, 1), torch.empty_like(call.v)
    call_decode(call, out, pool)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    call_decode(call, out, pool)
    done.record()
    assert not done.query(), "the call returned only after the device was done"
    torch.cuda.synchronize()


def test_the_registered_operator():
    call = moved(shared(1, 2, B=2))
    a, b = random_pool(call, 2), random_pool(call, 2)
    want, out = decode(call, a), torch.empty_like(call.v)
    c = call
    torch.ops.flash_kda.decode(
        *(c.q, c.k, c.v, c.g, c.beta, c.scale, out, c.A_log, c.dt_bias, c.lower_bound, b)
    )
    assert same_bits(out, want) and same_bits(a, b)

    def twice(q, k, v, g, beta, out, A_log, dt_bias, state):
        flash_kda.decode(q, k, v, g, beta, c.scale, out, A_log, dt_bias, -5.0, state)
        return 2 * out

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    got = compiled(c.q, c.k, c.v, c.g, c.beta, out, c.A_log, c.dt_bias, b)
    assert same_bits(got, 2 * decode(call, a)) and same_bits(a, b)


# ---- Errors --------------------------------------------------------------------------------------


def wrong_calls():
    """(what is wrong, arguments that replace good ones) of a call with T 2, B 3, H 2."""
    table = torch.zeros(3, 2, dtype=torch.int64)
    one = torch.ones(3, dtype=torch.int64)
    return {
        "scale": {"scale": 0.0},
        "lower_bound": {"lower_bound": -7.0},
        "dtype": {"k": torch.zeros(3, 2, 2, 128, dtype=torch.float16)},
        "shape of v": {"v": torch.zeros(3, 2, 3, 128)},
        "state dtype": {"state": torch.zeros(3, 2, 128, 128, dtype=F64)},
        "state shape": {"state": torch.zeros(4, 2, 128, 128)},
        "2-D slots alone": {"state_indices": table},
        "accepted alone": {"num_accepted_tokens": one},
        "too few columns": {"state_indices": table[:, :1], "num_accepted_tokens": one},
        "float indices": {"state_indices": torch.zeros(3)},
        "offsets with a batch": {"cu_seqlens": torch.tensor([0, 1, 2])},
        "activated gate with A_log": {"use_gate_in_kernel": False},
    }


@pytest.mark.parametrize("what", wrong_calls())
def test_errors_are_those_of_the_cpu(what):
    seen = []
    for device in ("cpu", DEVICE):
        call = shared(2, 2, B=3)
        arguments = {
            **{n: getattr(call, n) for n in ("q", "k", "v", "g", "beta", "scale")},
            "out": poisoned(call.v.shape, BF16),
            **{n: getattr(call, n) for n in ("A_log", "dt_bias", "lower_bound")},
            "state": poisoned(call.state_shape(), F32),
        } | wrong_calls()[what]
        on = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
        with pytest.raises(ERRORS) as caught:
            flash_kda.decode(**on)
        seen.append((caught.type, str(caught.value)))
        assert (bits(on["out"]) == -1).all()
    assert seen[0] == seen[1]


def test_what_only_cuda_refuses():
    call = moved(make(1, 2, K=64))
    with pytest.raises(NotImplementedError, match="q: head size K = 64, wanted 128 on CUDA"):
        decode(call, random_pool(call, 1))
    call = moved(make(17, 2))
    with pytest.raises(ValueError, match="q: T = 17 tokens, wanted from 1 to 16"):
        decode(call, random_pool(call, 1))
    call = moved(make(1, 2))
    with pytest.raises(ValueError, match="state: on cpu, wanted cuda:0"):
        decode(call, random_pool(call, 1).cpu())
    check(make(1, 2))
