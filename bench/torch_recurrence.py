"""What one would write without this library: the recurrence in PyTorch, a loop over tokens."""

import time

HEADS, D = 32, 128
MAX_SECONDS = 20  # no further sample after that


def torch_recurrence(q, k, v, g, beta, A_log, dt_bias, scale, lower_bound):
    """[T, H, D] each: norms, gate and sigmoid for all tokens at once, then token by token."""
    import torch

    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * scale
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    decay = torch.exp(lower_bound * torch.sigmoid(A_log.exp()[:, None] * (g + dt_bias)))
    beta = torch.sigmoid(beta)[..., None]
    S = torch.zeros(q.shape[1], D, D)
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        S = S * decay[t, :, None, :]
        u = beta[t] * (v[t] - torch.einsum("hvk,hk->hv", S, k[t]))
        S = S + u[:, :, None] * k[t, :, None, :]
        out[t] = torch.einsum("hvk,hk->hv", S, q[t])
    return out.bfloat16(), S


def time_recurrence(T, threads, min_samples, seconds):
    """Milliseconds of each of at least `min_samples` calls with random gates, fewer if slow; on the
    wall, and of the processor."""
    import torch

    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    rows = [normal(T, HEADS, D).bfloat16() for _ in range(4)] + [normal(T, HEADS).bfloat16()]
    A_log, dt_bias = (torch.rand(*shape, generator=generator) for shape in ((HEADS,), (HEADS, D)))
    samples, busy = [], []
    with torch.inference_mode():
        while len(samples) < min_samples or sum(samples) < 1e3 * seconds:
            if sum(samples) > 1e3 * MAX_SECONDS:
                break
            begin, processor = time.perf_counter(), time.process_time()
            torch_recurrence(*rows, A_log, dt_bias, scale=D**-0.5, lower_bound=-5.0)
            samples.append(1e3 * (time.perf_counter() - begin))
            busy.append(1e3 * (time.process_time() - processor))
    return samples, busy
