"""Kimi Delta Attention stated twice in NumPy float64, independently of the library.

The library's definition (flash_kda.reference) is a C loop over rows of the state. This file says
the same mathematics in two other forms, so that a slip in one cannot hide in the others:

    by_transitions     S_t = S_{t-1} M_t + b_t v_t k_t^T,   M_t = diag(exp g_t) (I - b_t k_t k_t^T)
                       with every [K, K] transition matrix written out;
    by_linear_system   all tokens at once: (I + A) U = b (V - Kd S_0^T), no walk over time.

Shapes: q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K]; beta [B, T, HV]; state [N, HV, V, K].
Arguments are anything that `as_float64` understands. Nothing here is fast.
"""

import numpy as np


def as_float64(x):
    """A float64 copy of a NumPy array (ml_dtypes bfloat16 too), a torch tensor or None."""
    if x is None:
        return None
    if hasattr(x, "detach"):
        x = x.detach().double().numpy()
    return np.array(x, dtype=np.float64)


def sigmoid(x):
    with np.errstate(over="ignore"):  # exp(1000) = inf, and 1 / inf = 0 is right
        return 1.0 / (1.0 + np.exp(-x))


def unit_rows(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def log_decay(g, A_log, dt_bias, lower_bound):
    """Natural-log decay per key channel from the raw gate; lower_bound None: softplus."""
    heads, channels = g.shape[-2:]
    rate = np.exp(np.zeros(heads) if A_log is None else A_log.reshape(heads))
    bias = np.zeros((heads, channels)) if dt_bias is None else dt_bias.reshape(heads, channels)
    if lower_bound is None:
        return -rate[:, None] * np.logaddexp(0.0, g + bias)
    return np.float64(np.float32(lower_bound)) * sigmoid(rate[:, None] * (g + bias))


def by_transitions(S, q, k, v, g, b, scale):
    """One sequence: S [HV, V, K]; q, k, g [T, HV, K]; v [T, HV, V]; b [T, HV]. -> out, S"""
    out = np.empty_like(v)
    eye = np.eye(k.shape[-1])
    for t in range(len(v)):
        kk = np.einsum("hi,hj->hij", k[t], k[t])
        M = np.exp(g[t])[:, :, None] * (eye - b[t, :, None, None] * kk)
        S = S @ M + np.einsum("h,hv,hk->hvk", b[t], v[t], k[t])
        out[t] = scale * np.einsum("hvk,hk->hv", S, q[t])
    return out, S


def by_linear_system(S, q, k, v, g, b, scale):
    """The same without a walk. With D[t, s] = exp(g_{s+1} + ... + g_t) for s <= t,

    U_t = b_t (v_t - S_0 D[t, 0] k_t - sum_{s < t} U_s (k_s . D[t, s] k_t))    a triangular system
    O_t = scale (S_0 D[t, 0] q_t + sum_{s <= t} U_s (k_s . D[t, s] q_t))
    """
    T = len(v)
    if T == 0:
        return np.empty_like(v), S
    G = np.cumsum(g, axis=0)  # [T, HV, K]
    D = np.exp(np.minimum(G[:, None] - G[None, :], 0.0))  # [t, s, HV, K]; s > t is masked below
    past, upto = np.tri(T, k=-1), np.tri(T)
    A = past * np.einsum("th,thk,shk,tshk->hts", b, k, k, D, optimize=True)
    P = upto * np.einsum("thk,shk,tshk->hts", q, k, D, optimize=True)
    from_state = np.einsum("hvk,thk->htv", S, np.exp(G) * k)
    U = np.linalg.solve(np.eye(T) + A, b.T[:, :, None] * (v.transpose(1, 0, 2) - from_state))
    out = np.einsum("hvk,thk->htv", S, np.exp(G) * q) + P @ U
    S = S * np.exp(G[-1])[:, None, :] + np.einsum("hsv,shk,shk->hvk", U, k, D[-1])
    return scale * out.transpose(1, 0, 2), S


def in_pieces(walk, tokens):
    """The same walk over pieces of so many tokens, the state handed over in float64."""

    def walk_pieces(S, q, k, v, g, b, scale):
        out = np.empty_like(v)
        for t in range(0, len(v), tokens):
            s = slice(t, t + tokens)
            out[s], S = walk(S, q[s], k[s], v[s], g[s], b[s], scale)
        return out, S

    return walk_pieces


def forward(
    q,
    k,
    v,
    g,
    beta,
    scale,
    A_log=None,
    dt_bias=None,
    lower_bound=-5.0,
    initial_state=None,
    cu_seqlens=None,
    *,
    use_qk_l2norm_in_kernel=True,
    use_gate_in_kernel=True,
    use_beta_sigmoid_in_kernel=True,
    allow_neg_eigval=False,
    prefixes=(),
    walk=by_transitions,
):
    """-> out [B, T, HV, V], final state [N, HV, V, K], {(n, tokens): state after that prefix}.

    `prefixes` names the (sequence, tokens) whose states are wanted. Rows of out that belong to no
    sequence are NaN. scale and lower_bound are taken in float32, as the library takes them.
    """
    q, k, v, g, beta, A_log, dt_bias, S0 = map(
        as_float64, (q, k, v, g, beta, A_log, dt_bias, initial_state)
    )
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = np.float64(np.float32(scale))
    if use_qk_l2norm_in_kernel:
        q, k = unit_rows(q), unit_rows(k)
    if use_gate_in_kernel:
        g = log_decay(g, A_log, dt_bias, lower_bound)
    b = sigmoid(beta) if use_beta_sigmoid_in_kernel else beta
    b = 2.0 * b if allow_neg_eigval else b
    q, k = np.repeat(q, HV // H, axis=2), np.repeat(k, HV // H, axis=2)

    if cu_seqlens is None:
        spans = [(n, 0, T) for n in range(B)]
    else:
        cu = [int(c) for c in cu_seqlens]
        spans = [(0, cu[n], cu[n + 1]) for n in range(len(cu) - 1)]
    out = np.full((B, T, HV, V), np.nan)
    final = np.zeros((len(spans), HV, V, K)) if S0 is None else S0.copy()
    states = {}
    for n, (batch, begin, end) in enumerate(spans):
        start = final[n].copy()
        for m, tokens in prefixes:
            if m == n:
                cut = slice(begin, begin + tokens)
                states[m, tokens] = walk(
                    start,
                    q[batch, cut],
                    k[batch, cut],
                    v[batch, cut],
                    g[batch, cut],
                    b[batch, cut],
                    scale,
                )[1]
        cut = slice(begin, end)
        out[batch, cut], final[n] = walk(
            start, q[batch, cut], k[batch, cut], v[batch, cut], g[batch, cut], b[batch, cut], scale
        )
    return out, final, states
