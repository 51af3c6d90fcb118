from typing import Any, Literal, Protocol, TypedDict

from ._C import LastReport

__version__: str

class Tensor(Protocol):
    """torch.Tensor, numpy.ndarray, cupy.ndarray, ..."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

Isa = Literal["auto", "portable", "avx2", "avx512", "avx512_bf16", "amx_bf16"]
Precision = Literal["fp32", "bf16"]

class Info(TypedDict):
    version: str
    cpu_isa_built: list[str]
    cpu_isa_usable: list[str]
    cpu_isa: str
    num_threads: int
    cuda_archs: list[str]
    num_cuda_devices: int
    cuda_status: str
    cuda_path: Literal["", "sm80", "sm90"]
    cuda_note: str
    device: Literal["cpu", "cuda"]

def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    workspace: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indptr: Tensor | None = None,
    state_indices: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    isa: Isa | None = None,
    precision: Precision | None = None,
    num_threads: int | None = None,
) -> None: ...
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    state: Tensor,
    *,
    state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    isa: Isa | None = None,
    num_threads: int | None = None,
) -> None: ...
def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    workspace: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indptr: Tensor | None = None,
    state_indices: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
) -> None: ...
def get_workspace_size(T_total: int, H: int, N: int = 1) -> int: ...
def info() -> Info: ...
def last_report() -> LastReport | None: ...
