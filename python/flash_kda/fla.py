"""flash-linear-attention's Kimi Delta Attention on our kernels: import flash_kda.fla, once.

FLA (fla-core) hands calls of chunk_kda to flash_kda by itself, but only a part of what flash_kda
can do. Importing this module puts a wider backend in that one's place:

    chunk_kda                 any gate (softplus too, or activated before), beta as logits, factors
                              or doubled, grouped value heads, normalised or raw q and k, both state
                              layouts under both names (state_v_first, transpose_state_layout), with
                              or without A_log and dt_bias, on the CPU and on CUDA
    fused_recurrent_kda_fwd   the same, and pools of states: one token or a few draft tokens each
                              (served from fla-core 0.6.0 on; fused_recurrent_kda calls it)

What stays with FLA: calls with gradients, context parallelism, intermediate states, and what
flash_kda has no kernel for. FLA logs the reason at level INFO (logger fla.backends; before 0.6.0
fla.ops.backends). In the environment

    FLASH_KDA_FLA=0    FLA decides as if this module had not been imported; looked at in each call
    FLA_FLASH_KDA=0    no call reaches flash_kda (FLA's own variable)
"""

import inspect
import os
import sys
import warnings

import torch

import flash_kda

try:
    import fla
    from fla.ops.kda import chunk_kda, fused_recurrent
except ImportError as error:
    raise ImportError(
        f"flash_kda.fla: cannot import fla.ops.kda ({error}), wanted flash-linear-attention: "
        'pip install "fla-core>=0.6.0"'
    ) from error

__all__ = ["served"]

MAX_DECODE_TOKENS = 16
FLOATS = (torch.bfloat16, torch.float32)


def _switched_off():
    value = os.environ.get("FLASH_KDA_FLA", "1")
    if value not in ("0", "1"):
        raise ValueError(f"FLASH_KDA_FLA: {value!r}, wanted 0 or 1")
    return value == "0"


# ---- What is not ours ----------------------------------------------------------------------------
# Each function returns the reason, or None. A call that FLA itself refuses is left to FLA.


def _why_no_device(device):
    if device == "cpu":
        return None
    if device != "cuda":
        return f"q is on {device}, wanted cpu or cuda"
    found = flash_kda.info()
    if not found["cuda_archs"]:
        return "this build of flash_kda has no CUDA kernels"
    return None if found["num_cuda_devices"] else f"no usable GPU: {found['cuda_status']}"


_no_device = {}  # by type of device; it does not change while the process lives


def _why_not_tensors(call, by_decode=False):
    """Gradients, devices, dtypes and sizes."""
    names = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias", "out")
    tensors = [(name, call[name]) for name in names if call.get(name) is not None]
    if torch.is_grad_enabled():
        for name, x in tensors:
            if x.requires_grad:
                return f"{name} requires a gradient, flash_kda has no backward"
    device = call["q"].device.type
    if device not in _no_device:
        _no_device[device] = _why_no_device(device)
    if _no_device[device]:
        return _no_device[device]
    for name, x in tensors:
        narrow = device == "cuda" and not by_decode and name in ("q", "k", "v", "out")
        if x.dtype not in (FLOATS[:1] if narrow else FLOATS) and name not in ("A_log", "dt_bias"):
            wanted = "bfloat16" if narrow else "bfloat16 or float32"
            return f"{name} is {x.dtype}, wanted {wanted} on {device}"
    return _why_not_sizes(call, device)


def _why_not_sizes(call, device):
    H, K = call["q"].shape[2:]
    HV, V = call["v"].shape[2:]
    if call["beta"].ndim != 3:
        return "beta has a value for each channel of v, wanted [B, T, HV]"
    if HV % H:
        return f"HV is {HV}, wanted a multiple of H = {H}"
    if device == "cuda" and K != 128:
        return f"K is {K}, wanted 128 on cuda"
    for letter, size in (("K", K), ("V", V)):
        if size % 16 or not 16 <= size <= 256:
            return f"{letter} is {size}, wanted a multiple of 16 up to 256"
    return None


def _why_not_options(call):
    """The gate, beta and the layout of states."""
    lower_bound = call.get("lower_bound")
    if call.get("use_gate_in_kernel"):
        if lower_bound is not None and not -5 <= lower_bound <= 0:
            return f"lower_bound is {lower_bound}, wanted from -5 to 0"
        if lower_bound is None and call.get("safe_gate"):
            return "safe_gate without lower_bound, which FLA refuses"
        if lower_bound is None and call.get("A_log") is None:
            return "the softplus gate without A_log, which means something else to FLA"
    if call.get("allow_neg_eigval") and not call.get("use_beta_sigmoid_in_kernel"):
        return "allow_neg_eigval without use_beta_sigmoid_in_kernel, which FLA refuses"
    if "transpose_state_layout" in call and call.get("state_v_first"):
        return "both state_v_first and transpose_state_layout, which FLA refuses"
    return None


def _why_not_pool(call):
    """ssm_state_indices of fused_recurrent_kda_fwd: states that live in a pool."""
    indices, T = call["ssm_state_indices"], call["q"].shape[1]
    if not call.get("inplace_final_state", True):
        return "ssm_state_indices without inplace_final_state"
    if not _value_rows_first(call):
        return "a pool of states [K, V], wanted state_v_first=True, as it is updated in place"
    if indices.ndim == 2:
        longest = indices.shape[1] if call.get("cu_seqlens") is not None else T
        if longest > MAX_DECODE_TOKENS:
            return f"{longest} tokens per sequence, wanted at most {MAX_DECODE_TOKENS}"
    elif call.get("num_accepted_tokens") is not None:
        return "num_accepted_tokens with ssm_state_indices [N], wanted [N, T]"
    elif call.get("cu_seqlens") is None and T != 1:
        return f"ssm_state_indices [N] with T = {T}, wanted [N, T]"
    return None


def _why_not_chunk(call):
    if call.get("cp_context") is not None:
        return "context parallelism"
    if call.get("return_intermediate_states"):
        return "return_intermediate_states"
    return _why_not_options(call) or _why_not_tensors(call)


def _why_not_recurrent(call):
    if call.get("inplace_final_state", True) and call.get("initial_state") is None:
        return "inplace_final_state without initial_state, which FLA refuses"
    pool = call.get("ssm_state_indices") is not None
    return (
        _why_not_options(call)
        or _why_not_tensors(call, by_decode=pool or _is_short(call))
        or (_why_not_pool(call) if pool else None)
    )


# ---- What is ours --------------------------------------------------------------------------------


def _value_rows_first(call):
    return bool(call.get("state_v_first") or call.get("transpose_state_layout"))


def _relaid(state, call):
    """A contiguous state, from FLA's layout to [N, HV, V, K] or back; itself where it is that."""
    return (state if _value_rows_first(call) else state.transpose(-1, -2)).contiguous()


def _rows(x):
    return x if x.stride(-1) == 1 else x.contiguous()


def _arguments(call, out):
    """The ten arguments that fwd and decode begin with, and the flags of both."""
    q, k, v, g, beta = (_rows(call[name]) for name in ("q", "k", "v", "g", "beta"))
    gate, scale = bool(call.get("use_gate_in_kernel")), call.get("scale")
    A_log, dt_bias = (call.get(name) if gate else None for name in ("A_log", "dt_bias"))
    arguments = (
        *(q, k, v, g, beta, q.shape[-1] ** -0.5 if scale is None else scale, out),
        None if A_log is None else A_log.reshape(-1).float(),
        None if dt_bias is None else dt_bias.reshape(-1).float(),
        call.get("lower_bound"),
    )
    flags = {
        "use_qk_l2norm_in_kernel": bool(call.get("use_qk_l2norm_in_kernel")),
        "use_gate_in_kernel": gate,
        "use_beta_sigmoid_in_kernel": bool(call.get("use_beta_sigmoid_in_kernel")),
        "allow_neg_eigval": bool(call.get("allow_neg_eigval")),
    }
    return arguments, flags


def _offsets(call):
    cu = call.get("cu_seqlens")
    return cu if cu is None or cu.dtype in (torch.int32, torch.int64) else cu.long()


def _empty_states(call):
    q, v, cu = call["q"], call["v"], call.get("cu_seqlens")
    N = q.shape[0] if cu is None else len(cu) - 1
    shape = (N, v.shape[2], v.shape[3], q.shape[3])
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def _prefill(call, out):
    """-> the final states in FLA's layout, or None."""
    initial = call.get("initial_state")
    if initial is not None:
        initial = _relaid(initial, call)
    final = _empty_states(call) if call.get("output_final_state") else None
    arguments, flags = _arguments(call, out)
    flash_kda.fwd(*arguments, initial, final, _offsets(call), **flags)
    return final if final is None else _relaid(final, call)


def _chunk(call):
    out = torch.empty_like(call["v"], dtype=call["q"].dtype)
    return out, _prefill(call, out)


def _recurrent(call):
    out = call.get("out")
    if out is None:  # zeros, as FLA makes them, for rows of no sequence
        packed = call.get("cu_seqlens") is not None
        out = (torch.zeros_like if packed else torch.empty_like)(call["v"])
    if call.get("ssm_state_indices") is not None:
        return out, _decode_in_pool(call, out)
    if call.get("inplace_final_state", True):
        return out, _update(call, out, call["initial_state"])
    # Decode works in place. On CUDA it is worth a copy: it computes in fp32, fwd does not there.
    if out.device.type == "cpu" or not _is_short(call):
        return out, _prefill(call, out)
    state, initial = _empty_states(call), call.get("initial_state")
    if initial is None:
        state.zero_()
    else:
        state.copy_(initial if _value_rows_first(call) else initial.transpose(-1, -2))
    _update({**call, "state_v_first": True}, out, state)
    return out, _relaid(state, call) if call.get("output_final_state") else None


def _update(call, out, theirs):
    """-> states in FLA's layout, updated in place."""
    ours = theirs if _value_rows_first(call) else _relaid(theirs, call)
    arguments, flags = _arguments(call, out)
    if _is_short(call):
        flash_kda.decode(*arguments, ours, cu_seqlens=_offsets(call), **flags)
    else:
        flash_kda.fwd(*arguments, ours, ours, _offsets(call), **flags)
    return theirs if ours is theirs else theirs.copy_(ours.transpose(-1, -2))


def _decode_in_pool(call, out):
    indices, accepted = call["ssm_state_indices"], call.get("num_accepted_tokens")
    if indices.ndim == 2 and accepted is None:  # read from the first column
        accepted = torch.ones(len(indices), dtype=torch.int32, device=indices.device)
    arguments, flags = _arguments(call, out)
    flash_kda.decode(
        *arguments,
        call["initial_state"],
        state_indices=indices,
        num_accepted_tokens=accepted,
        cu_seqlens=_offsets(call),
        **flags,
    )
    return call["initial_state"]


def _is_short(call):
    """Whether decode takes sequences of these lengths; on CUDA nobody waits for cu_seqlens."""
    T, cu = call["q"].shape[1], call.get("cu_seqlens")
    if cu is not None and T > MAX_DECODE_TOKENS and cu.device.type == "cpu" and len(cu) > 1:
        T = int(cu.diff().max())
    return (T > 0 or cu is not None) and T <= MAX_DECODE_TOKENS


# ---- Registration --------------------------------------------------------------------------------


def _names(function):
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


_CHUNK = _names(chunk_kda)  # their order differs between releases
_RECURRENT = _names(fused_recurrent.fused_recurrent_kda_fwd)


def _make_backend(builtin):
    class FlashKDABackend(builtin):
        """FLA's backend of the same type, widened; FLASH_KDA_FLA=0 brings back what it was."""

        priority = 1

        def chunk_kda_verifier(self, *args, **kwargs):
            if _switched_off():
                return super().chunk_kda_verifier(*args, **kwargs)
            reason = _why_not_chunk(dict(zip(_CHUNK, args), **kwargs))
            return reason is None, reason

        def chunk_kda(self, *args, **kwargs):
            if _switched_off():
                return super().chunk_kda(*args, **kwargs)
            return _chunk(dict(zip(_CHUNK, args), **kwargs))

        def fused_recurrent_kda_fwd_verifier(self, *args, **kwargs):
            if _switched_off():
                return False, "FLASH_KDA_FLA=0"
            reason = _why_not_recurrent(dict(zip(_RECURRENT, args), **kwargs))
            return reason is None, reason

        def fused_recurrent_kda_fwd(self, *args, **kwargs):
            return _recurrent(dict(zip(_RECURRENT, args), **kwargs))

    return FlashKDABackend


def _dispatcher(function):
    """The module whose dispatch decorates a function of FLA; None: no backend is asked."""
    dispatch = getattr(sys.modules[function.__module__], "dispatch", None)
    return dispatch and sys.modules[dispatch.__module__]


def _register():
    """-> the names of the functions that ask us first from now on."""
    release = getattr(fla, "__version__", "")
    backends = _dispatcher(chunk_kda)
    try:
        if hasattr(backends, "register"):
            from fla.ops.kda.backends.flash_kda import FlashKDABackend

            backend = _make_backend(FlashKDABackend)
            backends.register(chunk_kda)(backend)
            backends.register("kda")(backend)
        else:  # before 0.6.0
            from fla.ops.kda.backends import FlashKDABackend, kda_registry

            kda_registry.register(_make_backend(FlashKDABackend)())
    except ImportError as error:
        raise ImportError(
            f"flash_kda.fla: chunk_kda of fla-core {release} has no backend to put this one in "
            f"place of ({error}), wanted 0.5.0 or newer"
        ) from error
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        return ()
    if _dispatcher(fused_recurrent.fused_recurrent_kda_fwd):
        return "chunk_kda", "fused_recurrent_kda_fwd"
    warnings.warn(
        f"flash_kda.fla: fused_recurrent_kda of fla-core {release} asks no backend and stays with "
        "Triton, wanted 0.6.0 or newer",
        RuntimeWarning,
        stacklevel=3,
    )
    return ("chunk_kda",)


_switched_off()  # a wrong value is an error here; later it is the reason of a rejection
served = _register()
