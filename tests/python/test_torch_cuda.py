"""CUDA tensors through the binding: device, stream, workspace, graphs, torch.compile.

Accuracy has tests of its own; here one comparison shows that the right tensors reached the kernels
at the right time.
"""

import math

import pytest

torch = pytest.importorskip("torch")

from test_torch import D, clone, make_call, num_calls

import flash_kda

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not flash_kda.info()["cuda_archs"], reason="this build has no CUDA kernels"),
]
BOUND = 0.006


def on_cuda(call):
    return {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in call.items()}


def ratio(got, wanted):
    got, wanted = got.double().cpu(), wanted.double().cpu()
    if not bool(got.isfinite().all()):
        return math.inf
    return ((got - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()).item()


@pytest.fixture(scope="module")
def case():
    """A call on the CPU and what the definition says of it."""
    call = make_call(T=300, H=3, N=2)
    call["cu_seqlens"] = torch.tensor([0, 117, 300])
    exact = clone(call)
    exact["out"] = exact["out"].double()
    exact["final_state"] = exact["final_state"].double()
    flash_kda.reference(**exact)
    return call, exact


def check(call, exact):
    assert ratio(call["out"], exact["out"]) < BOUND
    assert ratio(call["final_state"], exact["final_state"]) < BOUND


def test_fwd(case):
    call, exact = on_cuda(case[0]), case[1]
    before = num_calls()
    flash_kda.fwd(**call)
    assert num_calls() == before + 1 and flash_kda.last_report()["kernel"].startswith("cuda/")
    assert flash_kda.info()["device"] == "cuda"
    check(call, exact)


def test_workspace(case, monkeypatch):
    monkeypatch.setenv("FLASH_KDA_CUDA_PATH", "sm80")  # which always needs one
    call, exact = on_cuda(case[0]), case[1]
    size = flash_kda.get_workspace_size(300, 3, 2)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
    flash_kda.fwd(**call, workspace=workspace)
    check(call, exact)
    with pytest.raises(ValueError, match="workspace"):
        flash_kda.fwd(**call, workspace=workspace[:16])
    with pytest.raises(ValueError, match="workspace: on cpu, wanted cuda:0"):
        flash_kda.fwd(**call, workspace=workspace.cpu())


def test_memory_of_the_workspace_is_given_back(case):
    call = on_cuda(case[0])
    flash_kda.fwd(**call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        flash_kda.fwd(**call)
    assert torch.cuda.memory_allocated() == before


def test_current_stream(case):
    """Inputs that a slow kernel on the same stream is still writing, and no wait in between."""
    call, exact = on_cuda(case[0]), case[1]
    flash_kda.fwd(**call)  # the first call of a process brings the kernels, which takes time
    values = call["v"].clone()
    call["v"].zero_()
    call["out"].fill_(torch.nan)
    call["final_state"].fill_(torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        call["v"].copy_(values)
        flash_kda.fwd(**call)
        assert not stream.query()  # the call did not wait
    stream.synchronize()
    check(call, exact)


def test_graph_capture(case):
    call, exact = on_cuda(case[0]), case[1]
    flash_kda.fwd(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash_kda.fwd(**call)
    call["out"].fill_(torch.nan)
    call["final_state"].fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    check(call, exact)


@pytest.mark.parametrize("name", ["k", "out", "A_log", "cu_seqlens", "initial_state"])
def test_mixed_devices_are_refused(case, name):
    call = on_cuda(case[0])
    with pytest.raises(ValueError, match=f"{name}: on cpu, wanted cuda:0"):
        flash_kda.fwd(**{**call, name: call[name].cpu()})
    with pytest.raises(ValueError, match="k: on cuda:0, wanted cpu"):
        flash_kda.fwd(**{**case[0], "k": call["k"]})


def test_compile(case):
    call, exact = on_cuda(case[0]), case[1]

    def step(call):
        flash_kda.fwd(**call)
        return call["out"] * 1

    with torch.no_grad():
        torch.compile(step, fullgraph=True, backend="aot_eager")(call)
    check(call, exact)


class Tableless(torch.Tensor):
    """A tensor of PyTorch before 2.10."""

    __dlpack_c_exchange_api__ = None
    __torch_function__ = torch._C._disabled_torch_function_impl


def test_older_torch(case):
    call, exact = on_cuda(case[0]), case[1]
    wrapped = {
        n: x.as_subclass(Tableless) if isinstance(x, torch.Tensor) else x for n, x in call.items()
    }
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        flash_kda.fwd(**wrapped)
        torch.cuda.current_stream().synchronize()
    check(call, exact)


def test_cupy(case):
    cupy = pytest.importorskip("cupy")
    call, exact = on_cuda(case[0]), case[1]
    wide = {n: x.float() if n in ("q", "k", "v", "g", "beta") else x for n, x in call.items()}
    wide["out"] = torch.full_like(wide["v"], torch.nan)
    torch.cuda.synchronize()
    arrays = {n: cupy.from_dlpack(x) if isinstance(x, torch.Tensor) else x for n, x in wide.items()}
    size = flash_kda.get_workspace_size(300, 3, 2)
    try:
        flash_kda.fwd(**arrays, workspace=cupy.zeros(size, cupy.uint8))
    except NotImplementedError as error:
        pytest.skip(f"CUDA kernels take no float32 inputs: {error}")
    cupy.cuda.Device().synchronize()
    check(wide, exact)


def test_shapes_of_fla(case):
    """out = empty_like(v), 1-D dt_bias viewed, an int64 cu_seqlens: as chunk_kda calls it."""
    call, exact = on_cuda(case[0]), case[1]
    call["out"] = torch.empty_like(call["v"])
    call["dt_bias"] = call["dt_bias"].view(-1).view(3, D)
    flash_kda.fwd(*list(call.values())[:7], **dict(list(call.items())[7:]))
    check(call, exact)
