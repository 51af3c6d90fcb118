"""Kimi Delta Attention (KDA) on tensors of PyTorch, NumPy and every other DLPack library.

    fwd         prefill: all tokens of every sequence; the signature of MoonshotAI's flash_kda
    decode      a few tokens per sequence, the state updated in place
    reference   the same as fwd in float64, token by token: the definition, for tests
    info        what this build and this machine can do
    last_report what the last call of this thread did, and which kernel ran

What a call computes, per sequence and value head, with a state S [V, K]:

    q, k   divided by sqrt(sum of squares + 1e-6)                 use_qk_l2norm_in_kernel
    g  =   lower_bound * sigmoid(exp(A_log) * (g + dt_bias))      use_gate_in_kernel
       or  -exp(A_log) * softplus(g + dt_bias)                    ... and lower_bound is None
    b  =   sigmoid(beta)                                          use_beta_sigmoid_in_kernel
    b  =   2 b                                                    allow_neg_eigval
    S <- S diag(exp g);  u = b (v - S k);  S <- S + u k^T;  out = scale * S q

(Kimi Linear, arXiv:2510.26692.) Letters: B batch, T tokens, H query and key heads, HV value heads
(a multiple of H), K key channels, V value channels, N sequences.

Importing this package imports neither torch nor numpy. With torch there is also the operator
torch.ops.flash_kda.fwd, which torch.compile sees in place of fwd.
"""

# _C is python/binding/module.c; docs/design.md follows a call from here to the kernels.
from . import _C, _torch_hook
from ._C import __version__, last_report

__all__ = [
    "__version__",
    "decode",
    "fwd",
    "get_workspace_size",
    "info",
    "last_report",
    "reference",
]


def _is_compiling():
    """Stands for torch.compiler.is_compiling until torch is imported."""
    return False


_torch_fwd = _torch_decode = None  # the operators, once torch is imported


def fwd(
    q,
    k,
    v,
    g,
    beta,
    scale,
    out,
    A_log,
    dt_bias,
    lower_bound,
    initial_state=None,
    final_state=None,
    cu_seqlens=None,
    *,
    workspace=None,
    checkpoint_state=None,
    checkpoint_offsets=None,
    checkpoint_indptr=None,
    state_indices=None,
    use_qk_l2norm_in_kernel=True,
    use_gate_in_kernel=True,
    use_beta_sigmoid_in_kernel=True,
    allow_neg_eigval=False,
    isa=None,
    precision=None,
    num_threads=None,
):
    """Prefill: runs all tokens of every sequence; writes out, final_state and checkpoint_state.

    Returns None. Tensors are bfloat16 or float32, each by itself, unless said otherwise; "?" may be
    None. Strides are free where the last one is 1 (views of a fused projection need no copy). On
    CUDA q, k, v and out are bfloat16 and K is 128; the kernels are queued on the current stream.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV, K], before the gate, or natural-log decays when use_gate_in_kernel is False.
        beta: [B, T, HV], logits, or the factors when use_beta_sigmoid_in_kernel is False.
        scale: factor of out, usually K ** -0.5.
        out: [B, T, HV, V], written. Rows past cu_seqlens[-1] stay as they are.
        A_log: ? [HV] float32; None means factor 1.
        dt_bias: ? [HV, K] or [HV * K] float32; None means 0.
        lower_bound: number from -5 to 0 (0: no decay), or None for the softplus gate. With
            use_gate_in_kernel=False it is not looked at, and A_log and dt_bias must be None.
        initial_state: ? [N, HV, V, K], value rows first; None means 0.
        final_state: ? [N, HV, V, K], written, also for empty sequences; may be initial_state.
        cu_seqlens: ? [N + 1] int32 or int64 with B = 1: sequence n has the tokens cu_seqlens[n] up
            to cu_seqlens[n + 1]. None: N = B sequences of T tokens.
        workspace: ? contiguous memory of get_workspace_size(...) bytes or more, any dtype,
            overwritten; None: what the call needs is allocated for its time.
        checkpoint_state: ? [M, HV, V, K], written: states after prefixes of sequences, bit for bit
            the final_state of that prefix run alone.
        checkpoint_offsets: [M] int32 or int64, prefix lengths in tokens, multiples of 16, ascending
            within a sequence; -1 skips an entry.
        checkpoint_indptr: ? [N + 1] int32 or int64: entries indptr[n] up to indptr[n + 1] belong to
            sequence n; None: M / N entries each.
        state_indices: ? [N] int32 or int64. The states are then pools [S, HV, V, K]; sequence n
            reads and writes slot state_indices[n]. -1 is padding: out rows 0, no state touched.
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel: False when q and k,
            g, or beta come normalised or activated.
        allow_neg_eigval: doubles b. Where b |k|^2 is above 2 the state may grow without bound.
        isa: CPU kernels by name ("portable", "avx2", "avx512", "avx512_bf16", "amx_bf16"); None
            takes FLASH_KDA_CPU_ISA, else the fastest that this machine runs.
        precision: "fp32" or "bf16" products on the CPU; None takes FLASH_KDA_PRECISION, else fp32.
        num_threads: CPU threads, at least 1; None takes FLASH_KDA_NUM_THREADS, else all allowed.

    Raises:
        TypeError: an argument is no tensor or has the wrong dtype.
        ValueError: a wrong shape, stride, value or device, or overlapping memory.
        NotImplementedError (a RuntimeError): meaningful, but not on this device, build or version.
        RuntimeError: gradients were asked for; the device refused.
        MemoryError: no memory for the workspace.
        Each names the argument, the value seen and the value wanted; nothing was written then.
    """
    arguments = (
        q,
        k,
        v,
        g,
        beta,
        scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        initial_state,
        final_state,
        cu_seqlens,
        workspace,
        checkpoint_state,
        checkpoint_offsets,
        checkpoint_indptr,
        state_indices,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        isa,
        precision,
        num_threads,
    )
    if _is_compiling() or _C.fwd(*arguments) is NotImplemented:
        _torch_fwd(*arguments)


def _fwd_raw(
    q,
    k,
    v,
    g,
    beta,
    scale,
    out,
    workspace,
    A_log,
    dt_bias,
    lower_bound,
    initial_state=None,
    final_state=None,
    cu_seqlens=None,
    checkpoint_state=None,
    checkpoint_offsets=None,
    **options,
):
    """fwd with the workspace right after out, as flash_kda_C.fwd and some benchmarks call it.

    The two checkpoint tensors come last by position, as in the operator of vLLM's fork.
    """
    fwd(
        q,
        k,
        v,
        g,
        beta,
        scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        initial_state,
        final_state,
        cu_seqlens,
        workspace=workspace,
        checkpoint_state=checkpoint_state,
        checkpoint_offsets=checkpoint_offsets,
        **options,
    )


def decode(
    q,
    k,
    v,
    g,
    beta,
    scale,
    out,
    A_log,
    dt_bias,
    lower_bound,
    state,
    *,
    state_indices=None,
    num_accepted_tokens=None,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=True,
    use_gate_in_kernel=True,
    use_beta_sigmoid_in_kernel=True,
    allow_neg_eigval=False,
    isa=None,
    num_threads=None,
):
    """Decode: 1 to 16 tokens per sequence; writes out and updates state in place. Returns None.

    On CUDA K is 128, and one kernel is queued on the current stream. Arguments are those of fwd,
    except:

    Args:
        q, k, v, g, beta, out: T from 1 to 16 in [N, T, ...], or [1, total, ...] with cu_seqlens.
        state: [N, HV, V, K], read and written; with state_indices a pool [S, HV, V, K].
        state_indices: ? [N] int32 or int64: the slot of each sequence; -1 is padding. With
            num_accepted_tokens: [N, T], the slot of the state after each token.
        num_accepted_tokens: ? [N] int32 or int64, for draft tokens: the state is read from slot
            state_indices[n, num_accepted_tokens[n] - 1], and the state after token t is written to
            slot state_indices[n, t].

    Raises:
        As fwd.
    """
    arguments = (
        q,
        k,
        v,
        g,
        beta,
        scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        state,
        state_indices,
        num_accepted_tokens,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        isa,
        num_threads,
    )
    if _is_compiling() or _C.decode(*arguments) is NotImplemented:
        _torch_decode(*arguments)


def reference(
    q,
    k,
    v,
    g,
    beta,
    scale,
    out,
    A_log,
    dt_bias,
    lower_bound,
    initial_state=None,
    final_state=None,
    cu_seqlens=None,
    *,
    workspace=None,
    checkpoint_state=None,
    checkpoint_offsets=None,
    checkpoint_indptr=None,
    state_indices=None,
    use_qk_l2norm_in_kernel=True,
    use_gate_in_kernel=True,
    use_beta_sigmoid_in_kernel=True,
    allow_neg_eigval=False,
):
    """The definition: what fwd computes, token by token in float64, on CPU tensors. Returns None.

    Slow, single-threaded, and meant for tests. Arguments and errors are those of fwd; out and the
    states may also be float64, so that nothing is rounded. It needs no workspace: one is accepted,
    so that a call of fwd can be repeated as it is, and left alone.
    """
    result = _C.reference(
        q,
        k,
        v,
        g,
        beta,
        scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        initial_state,
        final_state,
        cu_seqlens,
        workspace,
        checkpoint_state,
        checkpoint_offsets,
        checkpoint_indptr,
        state_indices,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        None,
        None,
        None,
    )
    if result is NotImplemented:
        raise TypeError("reference: wanted tensors whose memory holds their values, on the CPU")


def get_workspace_size(T_total, H, N=1):
    """Bytes that are enough for fwd's workspace, on the CPU with today's settings or on CUDA.

    Args:
        T_total: tokens of all sequences together (B * T).
        H: value heads of 128 key and 128 value channels.
        N: sequences.
    """
    return _C.workspace_size(T_total, H, N, 128, 128)


def info():
    """What this build and this machine can do.

    Returns:
        A dict with
        version           of the library,
        cpu_isa_built     names of the CPU kernel sets in this build, slowest first,
        cpu_isa_usable    those that this machine can run,
        cpu_isa           the one that isa=None means now,
        num_threads       what num_threads=None means now,
        cuda_archs        CUDA architectures in this build,
        num_cuda_devices  CUDA devices that it could use,
        cuda_status       the name of device 0, or why there is none,
        cuda_path         the fastest kernels that fwd may get on device 0, FLASH_KDA_CUDA_PATH
                          obeyed: "sm80" or "sm90"; "" without a device,
        cuda_note         why there are no faster ones; "" where there are none,
        device            "cuda" where there is a usable device, else "cpu".

    Raises:
        ValueError: a FLASH_KDA_* environment variable is wrong.
    """
    found = _C.info()
    found["cuda_archs"] = found["cuda_archs"].replace(",", " ").replace(";", " ").split()
    found["device"] = "cuda" if found["cuda_archs"] and found["num_cuda_devices"] else "cpu"
    return found


def _connect_torch():
    """Registers the operators; from now on fwd and decode use them where they must."""
    global _is_compiling, _torch_fwd, _torch_decode
    from . import torch_operator

    _is_compiling = torch_operator.is_compiling
    _torch_fwd = torch_operator.fwd
    _torch_decode = torch_operator.decode


_torch_hook.call_after_import("torch", _connect_torch)
