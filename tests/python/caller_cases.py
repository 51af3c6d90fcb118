"""The calls of larger projects in small, and what they become with flash_kda: CPU and CUDA.

docs/integrations.md names the functions of SGLang and vLLM that are played here: the same tensors,
layouts, dtypes and argument order, without the projects. test_callers.py and
tests/gpu/test_gpu_callers.py import everything and say with the fixture `device` where the
tensors live.
"""

import math

import pytest
import torch

import flash_kda
import flash_kda_C

H, D = 4, 128
NAN = math.nan
SCALE = D**-0.5


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameters():
    """A_log as Kimi's checkpoints have it, [1, 1, H, 1], and dt_bias [H * D]."""
    rate = 1 + 15 * torch.rand(1, 1, H, 1, generator=torch.Generator().manual_seed(9))
    return rate.log(), randn(H * D, seed=8)


def poisoned(like, dtype=None):
    return torch.full_like(like, NAN, dtype=dtype)


def ratio(got, wanted):
    got, wanted = got.cpu().double(), wanted.cpu().double()
    if not bool(got.isfinite().all()):
        return math.inf
    return ((got - wanted).norm() / wanted.norm()).item()


def bounds(device, call):
    """Largest ratio of a bf16 out and of an fp32 state."""
    return (0.006, 0.006) if device == "cuda" and call == "fwd" else (2.5e-3, 1e-5)


def on(device, *tensors):
    return tuple(x.to(device) for x in tensors)


# ---- SGLang --------------------------------------------------------------------------------------

SLOTS = 9


@pytest.fixture
def extend():
    """What FlashKDAKernel.extend gets: packed tokens, a pool, slots, int32 offsets."""
    T = 150
    q, k, v, g = (randn(1, T, H, D, seed=n).bfloat16() for n in range(4))
    beta = randn(1, T, H, seed=4).sigmoid()  # activated, in fp32
    pool = randn(SLOTS, H, D, D, seed=5)
    slots = torch.tensor([6, 2, 7], dtype=torch.int32)
    cu = torch.tensor([0, 65, 80, T], dtype=torch.int32)
    return q, k, v, g, beta, pool, slots, cu


def exact_extend(q, k, v, g, beta, pool, slots, cu):
    A_log, dt_bias = parameters()
    out, states = poisoned(v, torch.float64), pool.double()
    flash_kda.reference(
        *(q, k, v, g, beta, SCALE, out, A_log.reshape(-1), dt_bias, -5.0),
        states,
        states,
        cu,
        state_indices=slots,
        use_beta_sigmoid_in_kernel=False,
    )
    return out, states


def test_sglang_extend(extend, device):
    """As SGLang calls today: states gathered and scattered, beta turned back into logits."""
    A_log, dt_bias = on(device, *parameters())
    q, k, v, g, beta, pool, slots, cu = on(device, *extend)
    pool = pool.clone()
    logits = torch.logit(beta.float().clamp(1e-7, 1 - 1e-7)).to(torch.bfloat16)
    out = torch.empty_like(v)
    initial = pool[slots].contiguous()
    final = torch.empty_like(initial)
    flash_kda.fwd(
        *(q, k, v, g, logits, SCALE, out),
        *(A_log.reshape(-1), dt_bias.reshape(H, -1), -5.0),
        initial_state=initial,
        final_state=final,
        cu_seqlens=cu.to(torch.int64),
    )
    pool[slots] = final
    exact_out, exact_pool = exact_extend(*extend)
    assert ratio(out, exact_out) < 0.006 and ratio(pool, exact_pool) < 0.006


def test_sglang_extend_without_copies(extend, device):
    """The pool itself, int32 offsets, and beta as it is: closer to what the model meant."""
    A_log, dt_bias = on(device, *parameters())
    q, k, v, g, beta, pool, slots, cu = on(device, *extend)
    exact_out, exact_pool = exact_extend(*extend)

    def run(state_indices, initial, final):
        out = poisoned(v)
        flash_kda.fwd(
            *(q, k, v, g, beta, SCALE, out, A_log.reshape(-1), dt_bias, -5.0),
            *(initial, final, cu),
            state_indices=state_indices,
            use_beta_sigmoid_in_kernel=False,
        )
        return out

    in_pool = pool.clone()
    out = run(slots, in_pool, in_pool)
    final = poisoned(pool[slots])
    assert torch.equal(out, run(None, pool[slots], final))
    assert torch.equal(in_pool[slots], final)
    others = [n for n in range(SLOTS) if n not in slots.tolist()]
    assert torch.equal(in_pool[others], pool[others])
    out_bound, state_bound = bounds(device, "fwd")
    assert ratio(out, exact_out) < out_bound and ratio(in_pool, exact_pool) < state_bound


def test_sglang_decode(device):
    """TritonKDAKernel.packed_decode: q, k, v in one row, softplus gate, slot -1 is padding."""
    N = 5
    A_log, dt_bias = parameters()
    mixed_qkv = randn(N, 3 * H * D, seed=1).bfloat16()
    a, b = randn(N, H * D, seed=2).bfloat16(), randn(N, H, seed=3).bfloat16()
    pool = randn(SLOTS, H, D, D, seed=5)
    slots = torch.tensor([4, -1, 0, 8, -1], dtype=torch.int32)

    def views(mixed_qkv, a, b):
        q, k, v = (x.view(N, 1, H, D) for x in mixed_qkv.split(H * D, dim=-1))
        return q, k, v, a.view(N, 1, H, D), b.view(N, 1, H)

    exact_out = torch.full((N, 1, H, D), NAN, dtype=torch.float64)
    exact_pool = pool.double()
    flash_kda.reference(
        *(*views(mixed_qkv, a, b), SCALE, exact_out, A_log.reshape(-1), dt_bias, None),
        exact_pool,
        exact_pool,
        state_indices=slots,
    )
    got = pool.to(device)
    out = torch.full((N, 1, H, D), NAN, dtype=torch.bfloat16, device=device)
    flash_kda.decode(
        *(*views(*on(device, mixed_qkv, a, b)), SCALE, out),
        *on(device, A_log.reshape(-1), dt_bias),
        None,
        got,
        state_indices=slots.to(device),
    )
    out_bound, state_bound = bounds(device, "decode")
    assert ratio(out, exact_out) < out_bound and ratio(got, exact_pool) < state_bound
    assert not out[[1, 4]].any()


# ---- vLLM ----------------------------------------------------------------------------------------


def fused_projection(T, device, seed=0):
    """mixed_qkv and beta as views of in_proj's rows, g of its own: as KimiK3DeltaAttention has it.

    -> q, k, v, g [1, T, H, D] and beta [1, T, H] with gaps between their rows.
    """
    rows = randn(T, 4 * H * D + D + H, seed=seed).bfloat16().to(device)
    mixed_qkv, _, _, beta = rows.split([3 * H * D, H * D, D, H], dim=-1)
    q, k, v = (x.unflatten(-1, (H, D))[None] for x in mixed_qkv.split(H * D, dim=-1))
    g = randn(1, T, H, D, seed=seed + 1).bfloat16().to(device)
    return q, k, v, g, beta[None]


def test_vllm_prefill(device):
    """The order of torch.ops._flashkda_C.fwd: workspace after out, checkpoints after cu_seqlens.

    One oversized workspace, int32 offsets, strided beta, a checkpoint in a sequence that has one.
    """
    A_log, dt_bias = parameters()
    A_log, dt_bias = on(device, A_log.reshape(-1), dt_bias.view(-1, D))
    lengths = [384, 320, 17]
    T = sum(lengths)
    q, k, v, g, beta = fused_projection(T, device)
    assert not beta.is_contiguous()
    dense = [x.contiguous() for x in (q, k, v, g)]
    cu = torch.tensor([0, 384, 704, T], dtype=torch.int32, device=device)
    offsets = torch.tensor([256, 128, -1], dtype=torch.int32, device=device)
    initial = randn(3, H, D, D, seed=7).to(device)
    final, checkpoints = poisoned(initial), poisoned(initial)
    out = torch.full((1, T, H, D), NAN, dtype=torch.bfloat16, device=device)
    workspace = torch.empty(
        2 * flash_kda_C.get_workspace_size(T, H, 3), dtype=torch.uint8, device=device
    )
    flash_kda_C.fwd(
        *(*dense, beta, SCALE, out, workspace, A_log, dt_bias, -3.0),
        *(initial, final, cu, checkpoints, offsets),
    )
    exact_out, exact_final = torch.empty(1, T, H, D).double(), initial.cpu().double()
    flash_kda.reference(
        *(x.cpu() for x in (q, k, v, g, beta)),
        *(SCALE, exact_out, A_log.cpu(), dt_bias.cpu(), -3.0, initial.cpu(), exact_final, cu.cpu()),
    )
    out_bound, state_bound = bounds(device, "fwd")
    assert ratio(out, exact_out) < out_bound and ratio(final, exact_final) < state_bound

    for n, offset in enumerate(offsets.tolist()):
        if offset < 0:
            assert checkpoints[n].isnan().all()
            continue
        piece = slice(int(cu[n]), int(cu[n]) + offset)
        prefix = [x[:, piece] for x in (q, k, v, g, beta)]  # rows with gaps, as they are
        state = poisoned(initial[:1])
        flash_kda.fwd(
            *(*prefix, SCALE, poisoned(out[:, piece]), A_log, dt_bias, -3.0),
            *(initial[n : n + 1], state),
        )
        assert torch.equal(checkpoints[n], state[0])


def test_vllm_two_checkpoints_each(device):
    """vLLM's fork also has offsets [N, C] and states [N, C, ...]: the same memory, flat."""
    A_log, dt_bias = parameters()
    A_log, dt_bias = on(device, A_log.reshape(-1), dt_bias)
    q, k, v, g, beta = fused_projection(160, device)
    cu = torch.tensor([0, 80, 160], dtype=torch.int32, device=device)
    offsets = torch.tensor([[16, 64], [32, 48]], dtype=torch.int32, device=device)
    checkpoints = torch.full((2, 2, H, D, D), NAN, device=device)
    final = torch.full((2, H, D, D), NAN, device=device)
    arguments = (q, k, v, g, beta, SCALE, torch.empty_like(g), A_log, dt_bias, -5.0, None, final)
    flash_kda.fwd(
        *arguments,
        cu,
        checkpoint_state=checkpoints.flatten(0, 1),
        checkpoint_offsets=offsets.flatten(),
    )
    for n in range(2):
        for c in range(2):
            piece = slice(80 * n, 80 * n + int(offsets[n, c]))
            prefix = [x[:, piece] for x in (q, k, v, g, beta)]
            state = torch.full((1, H, D, D), NAN, device=device)
            out = torch.empty_like(g[:, piece])
            flash_kda.fwd(*prefix, SCALE, out, A_log, dt_bias, -5.0, None, state)
            assert torch.equal(checkpoints[n, c], state[0])


def below_null(indices):
    """vLLM's block 0 is nobody's; without it slots begin at 0 and -1 is left for padding."""
    return indices - 1


@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
def test_vllm_decode(lower_bound, device):
    """fused_recurrent_kda of kimi_k3: row-strided q, k, v; draft tokens; slot 0 is nobody's."""
    A_log, dt_bias = parameters()
    A_log = A_log.reshape(-1)
    lengths, T = [3, 1, 3, 2], 9
    q, k, v, g, beta = fused_projection(T, "cpu")
    cu = torch.tensor([0, 3, 4, 7, 9], dtype=torch.int32)
    indices = torch.tensor([[3, 5, 1], [0, 0, 0], [8, 2, 7], [4, 6, 0]], dtype=torch.int32)
    accepted = torch.tensor([2, 1, 3, 1], dtype=torch.int32)
    pool = randn(SLOTS, H, D, D, seed=5)
    pool[0] = NAN

    exact, exact_out = pool.double(), torch.zeros(1, T, H, D, dtype=torch.float64)
    for n, length in enumerate(lengths):
        state = exact[indices[n, accepted[n] - 1], None].clone()
        for t in range(length if indices[n, accepted[n] - 1] > 0 else 0):
            row = slice(int(cu[n]) + t, int(cu[n]) + t + 1)
            flash_kda.reference(
                *(x[:, row] for x in (q, k, v, g, beta)),
                *(SCALE, exact_out[:, row], A_log, dt_bias, lower_bound, state, state),
            )
            if indices[n, t] > 0:
                exact[indices[n, t]] = state[0]

    got = pool.to(device)
    out = torch.full((1, T, H, D), NAN, dtype=torch.bfloat16, device=device)
    flash_kda.decode(
        *(*fused_projection(T, device), SCALE, out, *on(device, A_log, dt_bias), lower_bound),
        got[1:],
        state_indices=below_null(indices).to(device),
        num_accepted_tokens=accepted.to(device),
        cu_seqlens=cu.to(device),
    )
    out_bound, state_bound = bounds(device, "decode")
    assert ratio(out, exact_out) < out_bound and ratio(got[1:], exact[1:]) < state_bound
    assert got[0].isnan().all() and not out[:, 3].any()


def test_vllm_plain_decode(device):
    """fused_recurrent_kda_packed_decode: one token each, out [1, B, H, V], slot 0 is padding."""
    N = 4
    A_log, dt_bias = parameters()
    parts = fused_projection(N, "cpu")
    indices = torch.tensor([2, 0, 7, 5], dtype=torch.int32)
    pool = randn(SLOTS, H, D, D, seed=5)
    exact, exact_out = pool.double(), torch.full((1, N, H, D), NAN, dtype=torch.float64)
    cu = torch.arange(N + 1, dtype=torch.int32)
    flash_kda.reference(
        *(*parts, SCALE, exact_out, A_log.reshape(-1), dt_bias, -5.0, exact[1:], exact[1:], cu),
        state_indices=below_null(indices),
    )
    got = pool.to(device)
    out = torch.full((1, N, H, D), NAN, dtype=torch.bfloat16, device=device)
    one_row_each = [x.transpose(0, 1) for x in (*fused_projection(N, device), out)]  # [N, 1, ...]
    flash_kda.decode(
        *(*one_row_each[:5], SCALE, one_row_each[5], *on(device, A_log.reshape(-1), dt_bias), -5.0),
        got[1:],
        state_indices=below_null(indices).to(device),
    )
    out_bound, state_bound = bounds(device, "decode")
    assert ratio(out, exact_out) < out_bound and ratio(got, exact) < state_bound
    assert not out[:, 1].any() and torch.equal(got[0].cpu(), pool[0])
