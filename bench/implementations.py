"""What the GPU benchmark times: this package, and those of others that happen to be installed.

Each implementation binds inputs once and gives back a call without arguments, as a user's loop has
it, and a way to the results of the last call.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from gpu_cases import D

import flash_kda


def version_of(*distributions):
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "unknown"


def new_outputs(inputs):
    """Poisoned, so that what is not written shows as NaN in the error."""
    return torch.full_like(inputs.v, torch.nan), torch.full_like(inputs.initial_state, torch.nan)


def fwd_arguments(inputs, out, final_state):
    """The thirteen arguments of flash_kda.fwd, in order; MoonshotAI's takes the same."""
    i = inputs
    leading = (i.q, i.k, i.v, i.g, i.beta, i.scale, out, i.A_log, i.dt_bias, i.lower_bound)
    return (*leading, i.initial_state, final_state, i.cu_seqlens)


# How the kernels of a path are named.
KERNELS = {
    "auto": "cuda/",
    "sm80": "cuda/sm80/",
    "sm90": "cuda/sm90/",
    "sm90-forward": "cuda/sm90/forward_",
}


class Ours:
    name = f"flash_kda {flash_kda.__version__}"

    def __init__(self, path="auto", keeps_workspace=True):
        self.path, self.keeps_workspace = path, keeps_workspace

    def chosen(self):
        """Sets the kernels that calls get (FLASH_KDA_CUDA_PATH)."""
        return mock.patch.dict(os.environ, FLASH_KDA_CUDA_PATH=self.path)

    def bind(self, inputs):
        self.calls_before = (flash_kda.last_report() or {}).get("num_calls", 0)
        self.wanted = KERNELS[self.path] if inputs.q.is_cuda else "cpu/"
        outputs = new_outputs(inputs)
        arguments = fwd_arguments(inputs, *outputs)
        options = {}
        if self.keeps_workspace:
            size = flash_kda.get_workspace_size(
                sum(inputs.lengths), inputs.q.shape[2], len(inputs.lengths)
            )
            options["workspace"] = torch.empty(size, dtype=torch.uint8, device=inputs.q.device)

        def call():
            flash_kda.fwd(*arguments, **options)

        return call, lambda: outputs

    def kernel(self):
        """What the library says it ran in the last call of this thread, one made since bind."""
        report = flash_kda.last_report()
        if report["num_calls"] <= self.calls_before or not report["kernel"].startswith(self.wanted):
            raise RuntimeError(f"the timed call ran elsewhere, wanted {self.wanted}: {report}")
        return report["kernel"]

    def note(self):
        """Why no faster kernel took that call."""
        return flash_kda.last_report()["note"]


class Moonshot:
    """MoonshotAI's package of the same name, from a folder of its own: ours is set aside while it
    is imported, and where a module came from is checked."""

    def __init__(self, folder):
        folder = Path(folder).resolve()
        ours = {name: sys.modules.pop(name) for name in list(sys.modules) if is_ours(name)}
        sys.path.insert(0, str(folder))
        try:
            importlib.invalidate_caches()
            self.module = importlib.import_module("flash_kda")
        finally:
            sys.path.remove(str(folder))
            for name in [name for name in sys.modules if is_ours(name)]:
                del sys.modules[name]
            sys.modules.update(ours)
        origin = Path(self.module.__file__).resolve()
        if folder not in origin.parents or self.module is flash_kda:
            raise ImportError(f"flash_kda in {folder} came from {origin}")
        self.name = f"MoonshotAI flash_kda {getattr(self.module, '__version__', 'unknown')}"

    def bind(self, inputs):
        outputs = new_outputs(inputs)
        arguments = fwd_arguments(inputs, *outputs)
        return (lambda: self.module.fwd(*arguments)), lambda: outputs

    def kernel(self):
        return "flash_kda.fwd"


def is_ours(name):
    return name in {"flash_kda", "flash_kda_C"} or name.startswith("flash_kda.")


def find_moonshot():
    """FLASH_KDA_MOONSHOT, or a folder of sys.path with a flash_kda that is not this one."""
    if os.environ.get("FLASH_KDA_MOONSHOT"):
        return os.environ["FLASH_KDA_MOONSHOT"]
    own = Path(flash_kda.__file__).resolve()
    for folder in sys.path:
        package = Path(folder or ".") / "flash_kda" / "__init__.py"
        if package.is_file() and package.resolve() != own:
            return folder
    return None


class FLA:
    """chunk_kda of flash-linear-attention in its own Triton kernels: it must not come to us."""

    def __init__(self):
        os.environ["FLA_FLASH_KDA"] = "0"
        os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
        from fla.ops.kda import chunk_kda

        self.chunk_kda = chunk_kda
        self.name = f"fla chunk_kda {version_of('fla-core', 'flash-linear-attention')}"

    def bind(self, inputs):
        i, result = inputs, []
        options = {
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "safe_gate": True,
            "state_v_first": True,
            "output_final_state": True,
        }
        dt_bias, cu_seqlens = i.dt_bias.reshape(-1), i.cu_seqlens

        def call():
            result[:] = self.chunk_kda(
                i.q,
                i.k,
                i.v,
                i.g,
                i.beta,
                scale=i.scale,
                A_log=i.A_log,
                dt_bias=dt_bias,
                lower_bound=i.lower_bound,
                initial_state=i.initial_state,
                cu_seqlens=cu_seqlens,
                **options,
            )

        with mock.patch.object(flash_kda, "fwd", side_effect=AssertionError("FLA came to us")):
            call()
        return call, lambda: tuple(result)

    def kernel(self):
        return "fla.ops.kda.chunk_kda/triton"


def installed_peers():
    peers = []
    folder = find_moonshot()
    for kind, present in ((lambda: Moonshot(folder), folder), (FLA, has_module("fla"))):
        if not present:
            continue
        try:
            peers.append(kind())
        except Exception as error:  # a broken installation of a peer is not our failure
            print(f"left out: {error!r}", file=sys.stderr)
    return peers


def has_module(name):
    return importlib.util.find_spec(name) is not None


def spread_heads(H, count=3):
    """Up to `count` heads, first and last among them."""
    return sorted({round(i * (H - 1) / max(count - 1, 1)) for i in range(count)})


def rms_ratio(got, wanted):
    got, wanted = got.double().cpu(), wanted.double()
    return float(((got - wanted) ** 2).mean().sqrt() / (wanted**2).mean().sqrt())


def measure_error(implementation, inputs, max_tokens=2048):
    """RMS(error) / RMS(reference) of out and final state against the float64 definition, on some
    heads of the first tokens of the same inputs: a call of its own, whose kernel is named too."""
    part = inputs.first_tokens(max_tokens)
    call, results = implementation.bind(part)
    call()
    kernel = implementation.kernel()
    out, state = results()
    heads = spread_heads(part.q.shape[2])
    small = part.heads_on_cpu(heads)
    exact_out = torch.full(small.v.shape, torch.nan, dtype=torch.float64)
    exact_state = torch.full(small.initial_state.shape, torch.nan, dtype=torch.float64)
    assert exact_state.shape[-1] == D
    flash_kda.reference(*fwd_arguments(small, exact_out, exact_state))
    return {
        "error_out": rms_ratio(out[:, :, heads], exact_out),
        "error_state": rms_ratio(state[:, heads], exact_state),
        "error_kernel": kernel,
        "error_tokens": sum(part.lengths),
    }
