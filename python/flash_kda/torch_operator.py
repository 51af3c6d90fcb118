"""torch.ops.flash_kda.fwd and torch.ops.flash_kda.decode: the same calls, seen by torch.

flash_kda.fwd on plain tensors goes straight to the extension. The operators serve what needs the
dispatcher of torch: torch.compile and torch.export trace them (there is a fake implementation), and
tensor subclasses with a __torch_dispatch__ of their own go through them. Importing this module
registers both; flash_kda imports it as soon as torch is imported.
"""

import inspect

import torch

import flash_kda
from flash_kda import _C

is_compiling = torch.compiler.is_compiling


def current_stream(tensor, device):
    """For the extension, where torch has no exchange table: the stream that kernels go to."""
    return torch.cuda.current_stream(device).cuda_stream


def empty_bytes(tensor, count):
    """Likewise: memory for the time of a call."""
    return torch.empty(count, dtype=torch.uint8, device=tensor.device)


_FLAGS = """
    bool use_qk_l2norm_in_kernel=True, bool use_gate_in_kernel=True,
    bool use_beta_sigmoid_in_kernel=True, bool allow_neg_eigval=False, str? isa=None"""

# Parameters in the order of the Python functions, and of _C's.
_SCHEMAS = {
    "fwd": f"""fwd(
    Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out,
    Tensor? A_log, Tensor? dt_bias, float? lower_bound, Tensor? initial_state=None,
    Tensor(b!)? final_state=None, Tensor? cu_seqlens=None, Tensor(c!)? workspace=None,
    Tensor(d!)? checkpoint_state=None, Tensor? checkpoint_offsets=None,
    Tensor? checkpoint_indptr=None, Tensor? state_indices=None,{_FLAGS},
    str? precision=None, int? num_threads=None) -> ()""",
    "decode": f"""decode(
    Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out,
    Tensor? A_log, Tensor? dt_bias, float? lower_bound, Tensor(b!) state,
    Tensor? state_indices=None, Tensor? num_accepted_tokens=None, Tensor? cu_seqlens=None,{_FLAGS},
    int? num_threads=None) -> ()""",
}

_library = torch.library.Library("flash_kda", "DEF")


def _register(name):
    """Defines torch.ops.flash_kda.<name> for plain, fake and gradient tensors -> the operator."""
    call = getattr(_C, name)
    parameters = inspect.signature(getattr(flash_kda, name)).parameters.values()
    defaults = tuple(parameter.default for parameter in parameters)
    schema = " ".join(_SCHEMAS[name].split())

    def run(*arguments):
        # torch leaves out trailing arguments that equal their defaults.
        if call(*arguments, *defaults[len(arguments) :]) is NotImplemented:
            raise NotImplementedError(f"flash_kda.{name}: no kernel for this tensor subclass")

    def fake(*arguments, **options):
        return None

    def autograd(*arguments):
        if torch.is_grad_enabled():
            for parameter, argument in zip(parameters, arguments):
                if isinstance(argument, torch.Tensor) and argument.requires_grad:
                    raise RuntimeError(
                        f"{parameter.name}: requires_grad is True and gradients are enabled, but "
                        "flash_kda has no backward yet; call it under torch.inference_mode() or "
                        f"torch.no_grad(), or detach {parameter.name}"
                    )
        with torch._C._AutoDispatchBelowAutograd():
            operator(*arguments)

    _library.define(schema, tags=_tags())
    operator = getattr(torch.ops.flash_kda, name).default
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    _library.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"flash_kda::{name}", fake, lib=_library)
    return operator


def _tags():
    """The kernels read strides as they are, so a compiler must hand over what the code said."""
    exact = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    return (torch.Tag.pt2_compliant_tag, exact)


fwd = _register("fwd")
decode = _register("decode")
