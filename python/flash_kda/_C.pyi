from typing import Any, Literal, TypedDict

__version__: str

class LastReport(TypedDict):
    call: Literal["fwd", "decode", "reference"]
    kernel: str
    note: str
    num_threads: int
    num_tokens: int
    workspace_bytes: int
    num_calls: int

class LibraryInfo(TypedDict):
    version: str
    cpu_isa_built: list[str]
    cpu_isa_usable: list[str]
    cpu_isa: str
    num_threads: int
    cuda_archs: str
    num_cuda_devices: int
    cuda_status: str
    cuda_path: str
    cuda_note: str

def fwd(*arguments: Any) -> None: ...
def decode(*arguments: Any) -> None: ...
def reference(*arguments: Any) -> None: ...
def time_call(name: str, repeats: int, *arguments: Any) -> float: ...
def workspace_size(T_total: int, H: int, N: int, K: int, V: int, /) -> int: ...
def info() -> LibraryInfo: ...
def last_report() -> LastReport | None: ...
