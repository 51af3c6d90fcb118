"""CUDA tensors on a machine without a GPU: how they are bound, and that the refusal is polite.

The tensors here only claim to be on a device: a CPU tensor's DLPack capsule with another device
written into it, offered by a class that says it is CuPy's, or nobody's.
"""

import ctypes
import sys
import types

import pytest
import torch

import flash_kda

HAVE_CUDA = bool(flash_kda.info()["cuda_archs"])
pytestmark = pytest.mark.skipif(
    flash_kda.info()["num_cuda_devices"] > 0, reason="there is a GPU, and these pointers are none"
)

CUDA = 2


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
    ]


def write_device(capsule, index):
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, b"dltensor")
    tensor = ctypes.cast(address, ctypes.POINTER(DLTensor)).contents
    tensor.device_type, tensor.device_index = CUDA, index


class OnDevice:
    """A tensor that claims to be on CUDA device `index`."""

    def __init__(self, tensor, index=0):
        self.tensor, self.index = tensor, index

    def __dlpack_device__(self):
        return (CUDA, self.index)

    def __dlpack__(self, *, stream=None):
        assert stream == -1, "the producer must not synchronise"
        capsule = self.tensor.__dlpack__()
        write_device(capsule, self.index)
        return capsule


def as_library(name):
    return type("ndarray", (OnDevice,), {"__module__": name})


def call(kind=OnDevice, index=0, **changes):
    x = torch.zeros(1, 20, 2, 128, dtype=torch.bfloat16)
    out = torch.full_like(x, float("nan"))
    tensors = {"q": x, "k": x, "v": x, "g": x, "beta": x[..., 0].contiguous(), "out": out} | changes
    q, k, v, g, beta, out = (
        t if isinstance(t, OnDevice) else kind(t, index) if isinstance(t, torch.Tensor) else t
        for t in (tensors[name] for name in ("q", "k", "v", "g", "beta", "out"))
    )
    return (q, k, v, g, beta, 0.1, out, None, None, -5.0)


@pytest.fixture
def cupy(monkeypatch):
    """Stands for cupy: notes which device was current at each call."""
    seen = []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            seen.append(("enter", self.index))
            return self

        def __exit__(self, *error):
            seen.append(("exit", self.index))

    def empty(count, dtype):
        index = seen[-1][1]
        seen.append(("empty", count))
        if count > 1 << 20:
            raise MemoryError("out of device memory")
        return as_library("cupy")(torch.empty(count, dtype=getattr(torch, dtype)), index)

    def get_current_stream():
        seen.append("stream")
        return types.SimpleNamespace(ptr=1234)

    module = types.ModuleType("cupy")
    module.cuda = types.SimpleNamespace(Device=Device, get_current_stream=get_current_stream)
    module.empty = empty
    monkeypatch.setitem(sys.modules, "cupy", module)
    return seen


def expected_refusal():
    if HAVE_CUDA:
        return pytest.raises(RuntimeError, match="device: cuda, ")
    return pytest.raises(NotImplementedError, match="device: cuda, this build has no CUDA kernels")


def test_a_library_whose_stream_is_unknown_is_refused():
    with pytest.raises(NotImplementedError, match="a <class .*OnDevice'> on CUDA.*torch or cupy"):
        flash_kda.fwd(*call())


def test_stream_and_workspace_come_from_cupy(cupy):
    with expected_refusal():
        flash_kda.fwd(*call(as_library("cupy"), 3))
    assert cupy[:3] == [("enter", 3), "stream", ("exit", 3)]
    if HAVE_CUDA:
        size = 2 * 2 * 17920 + 127  # two tiles, two heads
        assert cupy[3:] == [("enter", 3), ("empty", size), ("exit", 3)]
    else:
        assert not cupy[3:]


def test_the_device_is_left_when_the_allocation_fails(cupy):
    big = torch.zeros(1, 2000, 2, 128, dtype=torch.bfloat16)
    parts = dict.fromkeys(("q", "k", "v", "g"), big) | {"out": torch.zeros_like(big)}
    arguments = call(as_library("cupy"), beta=big[..., 0].contiguous(), **parts)
    with pytest.raises(MemoryError if HAVE_CUDA else NotImplementedError):
        flash_kda.fwd(*arguments)
    assert cupy[-1] == ("exit", 0)


def test_a_workspace_of_ones_own_is_used(cupy):
    mine = as_library("cupy")(torch.zeros(1 << 18, dtype=torch.uint8))
    with expected_refusal():
        flash_kda.fwd(*call(as_library("cupy")), workspace=mine)
    assert not [entry for entry in cupy if entry[0] == "empty"]
    if HAVE_CUDA:
        small = as_library("cupy")(torch.zeros(100, dtype=torch.uint8))
        with pytest.raises(ValueError, match="workspace_bytes: 100, wanted at least 71807"):
            flash_kda.fwd(*call(as_library("cupy")), workspace=small)


@pytest.mark.parametrize("where", ["cpu", "cuda:1"])
def test_all_tensors_on_one_device(cupy, where):
    kind = as_library("cupy")
    v = torch.zeros(1, 20, 2, 128, dtype=torch.bfloat16)
    if where == "cpu":
        arguments = list(call(kind))
        arguments[2] = v
    else:
        arguments = call(kind, v=kind(v, 1))
    with pytest.raises(ValueError, match=rf"v: on {where}, wanted cuda:0 \(the device of q\)"):
        flash_kda.fwd(*arguments)


def test_dtypes_are_refused_by_name(cupy):
    wanted = "k: dtype float32, wanted bfloat16 on CUDA"
    if not HAVE_CUDA:  # then that is what matters
        wanted = "device: cuda, this build has no CUDA kernels"
    with pytest.raises(NotImplementedError, match=wanted):
        flash_kda.fwd(*call(as_library("cupy"), k=torch.zeros(1, 20, 2, 128)))


def test_the_reference_has_no_cuda_kernels(cupy):
    with pytest.raises(NotImplementedError, match="cuda, reference has no CUDA kernels"):
        flash_kda.reference(*call(as_library("cupy")))


def test_decode(cupy):
    """It needs no workspace: the library's allocator is not asked."""
    x = torch.zeros(1, 4, 2, 128, dtype=torch.bfloat16)
    parts = dict.fromkeys(("q", "k", "v", "g"), x) | {"out": torch.zeros_like(x)}
    kind = as_library("cupy")
    arguments = call(kind, beta=x[..., 0].contiguous(), **parts)
    with expected_refusal():
        flash_kda.decode(*arguments, kind(torch.zeros(1, 2, 128, 128)))
    assert not [entry for entry in cupy if entry[0] == "empty"]


def test_the_cpu_goes_on_working(cupy):
    with expected_refusal():
        flash_kda.fwd(*call(as_library("cupy")))
    x = torch.zeros(1, 20, 2, 128, dtype=torch.bfloat16)
    out = torch.full_like(x, float("nan"))
    flash_kda.fwd(x, x, x, x, x[..., 0].contiguous(), 0.1, out, None, None, -5.0)
    assert (out == 0).all()


def test_workspace_size_covers_cuda():
    if not HAVE_CUDA:
        pytest.skip("this build has no CUDA kernels")
    for T, N in ((8192, 1), (100, 7), (0, 3), (17, 1)):
        tiles = T // 16 + N if T and N else 0
        assert flash_kda.get_workspace_size(T, 4, N) >= tiles * 4 * 17920


def test_info_says_why_there_is_no_device():
    found = flash_kda.info()
    assert found["device"] == "cpu" and found["num_cuda_devices"] == 0
    assert found["cuda_status"] in (
        "this build has no CUDA kernels",
        "no NVIDIA driver on this machine",
        "the driver finds no device",
    ) or found["cuda_status"].startswith("the driver is for CUDA")
    assert found["cuda_path"] == found["cuda_note"] == ""


def test_a_wrong_path_is_named(cupy, monkeypatch):
    """By every call on CUDA and by info; the CPU goes on."""
    monkeypatch.setenv("FLASH_KDA_CUDA_PATH", "sm_90")
    wrong = "FLASH_KDA_CUDA_PATH: 'sm_90', wanted auto, sm80, sm90 or sm90-forward"
    with pytest.raises(ValueError, match=wrong) if HAVE_CUDA else expected_refusal():
        flash_kda.fwd(*call(as_library("cupy")))
    with pytest.raises(ValueError, match=wrong):
        flash_kda.info()
    x = torch.zeros(1, 20, 2, 128, dtype=torch.bfloat16)
    flash_kda.fwd(x, x, x, x, x[..., 0].contiguous(), 0.1, x.clone(), None, None, -5.0)
