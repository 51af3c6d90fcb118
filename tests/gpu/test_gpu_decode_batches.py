"""Decode of large batches on CUDA: other kernels, the same bits as for small ones.

From 16 MiB of state on (512 slabs of 32 KiB, 256 heads in fp32) it passes through shared memory,
if the call is plain: bfloat16, aligned. test_gpu_decode.py has the small batches.
"""

import pytest
import torch
from inputs import BF16, F32, assert_near, bits, make, poisoned, same_bits, shared, yardstick
from on_gpu import DEVICE, decode, moved, random_pool

import flash_kda

ROWS = ("q", "k", "v", "g", "beta")
N, PART = 64, 8  # sequences of a large batch, of its small parts; eight value heads each


def assert_kernel(name):
    assert flash_kda.last_report()["kernel"] == f"cuda/sm80/decode_{name}"


def kind(state):
    return "f32" if state == F32 else "bf16"


def packed(call, lengths):
    """The call's first tokens of each sequence, with cu_seqlens."""
    pieces = {n: [getattr(call, n)[i, :T] for i, T in enumerate(lengths)] for n in ROWS}
    cu = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    return call.but(**{n: torch.cat(x)[None] for n, x in pieces.items()}, cu_seqlens=cu)


def in_parts(call, pool, table=None, accepted=None):
    """The same sequences in calls of PART each. -> outputs of every sequence"""
    outs = []
    for first in range(0, N, PART):
        part = slice(first, first + PART)
        options = {}
        if table is not None:
            options["state_indices"] = table[part]
        if accepted is not None:
            options["num_accepted_tokens"] = accepted[part]
        one = call.but(**{n: getattr(call, n)[part] for n in ROWS})
        outs.append(decode(one, pool if options else pool[part], **options))
        assert "slab" not in flash_kda.last_report()["kernel"]
    return torch.cat(outs)


@pytest.mark.parametrize(
    "state, heads, name",
    [(F32, 3, "f32"), (F32, 4, "f32_slab"), (BF16, 7, "bf16"), (BF16, 8, "bf16_slab")],
)
def test_number_of_heads_chooses_the_kernel(state, heads, name):
    call = moved(make(1, heads, B=N))
    decode(call, random_pool(call, N, state))
    assert_kernel(name)
    decode(call.but(g=call.g.float()), random_pool(call, N, state))
    assert_kernel(kind(state) + "_any")


@pytest.mark.parametrize("regime", ["random", "slow"])
@pytest.mark.parametrize("state", [BF16, F32])
@pytest.mark.parametrize("T", [1, 3])
def test_results(T, state, regime):
    call = make(T, 8, B=N, regime=regime)
    pool = random_pool(call, N, state)
    want = yardstick(call.but(initial_state=pool.cpu()))
    out = decode(call, pool)
    assert_kernel(kind(state) + "_slab")
    assert_near(None, out.cpu(), want.out)
    assert_near(None, pool.cpu(), want.final, "state")


@pytest.mark.parametrize("T", range(1, 17))
@pytest.mark.parametrize("state", [BF16, F32])
def test_every_length(T, state):
    call = moved(make(T, 4, B=N, HV=8))
    a = random_pool(call, N, state)
    b = a.clone()
    out = decode(call, a)
    assert_kernel(kind(state) + "_slab")
    assert same_bits(out, in_parts(call, b)) and same_bits(a, b)


@pytest.mark.parametrize("V", [16, 48, 64, 80, 192, 256])
@pytest.mark.parametrize("state", [BF16, F32])
def test_value_channels(V, state):
    call = moved(make(2, 8, B=N, V=V))
    a = random_pool(call, N, state)
    b = a.clone()
    out = decode(call, a)
    assert_kernel(kind(state) + "_slab")
    assert same_bits(out, in_parts(call, b)) and same_bits(a, b)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_a_pool_with_padding(lower_bound):
    call = moved(make(2, 8, B=N, lower_bound=lower_bound))
    a = random_pool(call, N + 9)
    b = a.clone()
    table = torch.randperm(N + 9, generator=torch.Generator().manual_seed(1))[:N]
    table[::5] = -1
    a[-1], b[-1] = float("nan"), float("nan")
    table[table == N + 8] = -1
    out = decode(call, a, state_indices=table)
    assert_kernel("f32_slab")
    assert same_bits(out, in_parts(call, b, table)) and same_bits(a, b)
    assert not bits(out[table < 0]).any()


@pytest.mark.parametrize("T", [1, 2, 4, 5, 16])
@pytest.mark.parametrize("state", [BF16, F32])
def test_draft_tokens(T, state):
    call = moved(make(T, 8, B=N))
    gen = torch.Generator().manual_seed(T)
    a = random_pool(call, N * T + 3, state)
    b = a.clone()
    table = torch.randperm(N * T + 3, generator=gen)[: N * T].view(N, T)
    accepted = torch.randint(1, T + 1, (N,), generator=gen)
    table[torch.rand(N, T, generator=gen) < 0.1] = -1
    out = decode(call, a, state_indices=table, num_accepted_tokens=accepted)
    assert_kernel(kind(state) + "_slab")
    assert same_bits(out, in_parts(call, b, table, accepted)) and same_bits(a, b)


@pytest.mark.parametrize("state", [BF16, F32])
@pytest.mark.parametrize("most", [1, 2, 16])
def test_ragged_lengths(most, state):
    call = moved(make(most, 8, B=N))
    gen = torch.Generator().manual_seed(most)
    lengths = torch.randint(0, most + 1, (N,), generator=gen).tolist()
    a = random_pool(call, N, state)
    b = a.clone()
    out = decode(packed(call, lengths), a)
    assert_kernel(kind(state) + "_slab")
    for n, T in enumerate(lengths):
        if T:
            one = call.but(**{x: getattr(call, x)[n : n + 1, :T] for x in ROWS})
            begin = sum(lengths[:n])
            assert same_bits(decode(one, b[n : n + 1])[0], out[0, begin : begin + T])
    assert same_bits(a, b)


def test_wrong_indices_and_offsets_stay_inside():
    call = moved(make(2, 8, B=N))
    store = poisoned((N + 4, 8, 128, 128), F32).to(DEVICE)
    pool = store[2:-2]
    pool[:] = random_pool(call, N)
    table = torch.arange(2 * N).view(N, 2) * 3 - N  # some below, some past the pool
    accepted = torch.arange(N) % 5 - 1
    decode(call, pool, state_indices=table, num_accepted_tokens=accepted)
    assert_kernel("f32_slab")
    decode(call, pool, state_indices=table[:, 0])
    flat = call.but(**{n: getattr(call, n).flatten(0, 1)[None] for n in ROWS})
    for cu in (torch.arange(N + 1) * 5 - 9, torch.arange(N + 1) * -1, torch.arange(N + 1) * 99):
        decode(flat.but(cu_seqlens=cu.to(DEVICE)), pool)
        assert_kernel("f32_slab")
    torch.cuda.synchronize()
    assert (bits(store[:2]) == -1).all() and (bits(store[-2:]) == -1).all()


def test_the_same_bits_a_hundred_times_under_load():
    call = moved(shared(2, 8, B=N))
    start = random_pool(call, N)
    pool = start.clone()
    first = decode(call, pool)
    load, x = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE, dtype=BF16)
    for _ in range(100):
        with torch.cuda.stream(load):
            x = (x @ x).clamp(-1, 1)
        again = start.clone()
        assert same_bits(decode(call, again), first) and same_bits(again, pool)
    torch.cuda.synchronize()


def test_a_graph_whose_first_call_is_large():
    call = moved(make(1, 8, B=N))
    want_pool = random_pool(call, N)
    pool, out = want_pool.clone(), poisoned(call.v.shape, BF16).to(DEVICE)
    want, graph, c = decode(call, want_pool), torch.cuda.CUDAGraph(), call
    with torch.cuda.graph(graph):
        flash_kda.decode(
            *(c.q, c.k, c.v, c.g, c.beta, c.scale, out, c.A_log, c.dt_bias, c.lower_bound, pool)
        )
    graph.replay()
    assert same_bits(out, want) and same_bits(pool, want_pool)
