"""How calls run: streams, graphs, repeats under load, devices, errors, work on the host."""

import ctypes
import random
import threading

import pytest
import torch
from called_functions import called_functions, one_call
from inputs import BF16, F32, bits, make, poisoned, same_bits, shared
from on_gpu import DEVICE, KERNELS, check, is_split, moved, on_cpu, run

import flash_kda

pytestmark = pytest.mark.usefixtures("path")


class Prepared:
    """A call with outputs and workspace of its own, for repeated use."""

    def __init__(self, call, state_dtype=F32, workspace=True):
        self.call = call
        with torch.device(DEVICE):
            self.out = poisoned(call.v.shape, BF16)
            self.final = poisoned(call.state_shape(), state_dtype)
            tokens = call.q.shape[0] * call.q.shape[1]
            size = flash_kda.get_workspace_size(tokens, call.v.shape[2], call.sequences)
            self.workspace = torch.full((size,), 255, dtype=torch.uint8) if workspace else None

    def poison(self):
        self.out.view(torch.int16).fill_(-1)
        self.final.view(torch.int16).fill_(-1)

    def __call__(self):
        c = self.call
        flash_kda.fwd(
            *(c.q, c.k, c.v, c.g, c.beta, c.scale, self.out, c.A_log, c.dt_bias, c.lower_bound),
            *(c.initial_state, self.final, c.cu_seqlens),
            workspace=self.workspace,
            **c.options,
        )

    def equals(self, result):
        return same_bits(self.out, result.out) and same_bits(self.final, result.final)


# ---- Repeats -------------------------------------------------------------------------------------


@pytest.mark.parametrize("H, cu", [(8, None), (40, None), (16, [0, 100, 1300, 1300, 2048])])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_the_same_bits_a_hundred_times_under_load(H, cu, lower_bound):
    """Another stream keeps the multiprocessors busy meanwhile."""
    call = moved(make(2048, H, regime="random", cu=cu, initial=F32, lower_bound=lower_bound))
    first, again = run(call), Prepared(call)
    load, x = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE, dtype=BF16)
    for _ in range(100):
        with torch.cuda.stream(load):
            x = (x @ x).clamp(-1, 1)
        again.poison()
        again()
        assert again.equals(first)
    torch.cuda.synchronize()


def any_call(choose, seed):
    """A call of some kind that every path takes, and the dtype of its final state."""
    lengths = choose.choices([0, 1, 15, 16, 31, 32, 33, 100, 128, 300], k=choose.randint(1, 5))
    H, group = choose.choice([1, 2, 3, 8]), choose.choice([1, 1, 1, 2, 4])
    sizes = {"B": choose.choice([1, 3])} if len(lengths) == 1 else {}
    if len(lengths) > 1:
        sizes["cu"] = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    call = make(
        sum(lengths),
        H,
        HV=H * group,
        seed=seed,
        regime=choose.choice(["random", "reports", "slow"]),
        initial=choose.choice([None, BF16, F32]),
        allow_neg_eigval=choose.random() < 0.2,
        **sizes,
    )
    if choose.random() < 0.3:  # slots of a pool in another order, one of them padding
        slots = list(range(call.sequences))
        choose.shuffle(slots)
        slots[0] = -1
        call.options["state_indices"] = torch.tensor(slots)
    return moved(call), choose.choice([BF16, F32])


@pytest.mark.slow
def test_ten_thousand_mixed_calls():
    """Sixty calls of all kinds again and again in any order on three streams: the same bits."""
    choose, streams = random.Random(0), [torch.cuda.Stream() for _ in range(3)]
    kinds = [[] for _ in streams]
    for seed in range(60):
        call, state_dtype = any_call(choose, seed)
        prepared = Prepared(call, state_dtype)
        prepared.poison()
        prepared()
        first = [bits(x).clone() for x in (prepared.out, prepared.final)]
        kinds[seed % 3].append((prepared, first))
    different = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(10_000):
        n = choose.randrange(3)
        prepared, first = choose.choice(kinds[n])
        with torch.cuda.stream(streams[n]):
            prepared.poison()
            prepared()
            for x, want in zip((prepared.out, prepared.final), first):
                different[n] += (bits(x) != want).sum()
    torch.cuda.synchronize()
    assert [int(x) for x in different] == [0, 0, 0]


def test_two_calls_share_a_workspace():
    """One after another on one stream, nothing in between."""
    calls = [Prepared(moved(make(1000, 4, seed=s, initial=F32))) for s in (1, 2)]
    expected = [run(p.call) for p in calls]
    calls[1].workspace = calls[0].workspace
    for _ in range(20):
        for p in calls:
            p.poison()
        calls[0]()
        calls[1]()
        assert all(p.equals(e) for p, e in zip(calls, expected))


def test_threads():
    calls = [Prepared(moved(make(300 + 16 * s, 3, seed=s, initial=F32))) for s in range(8)]
    expected = [run(p.call) for p in calls]
    failed = []

    def work(prepared):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    prepared()
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failed.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(p,)) for p in calls]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
    assert all(p.equals(e) for p, e in zip(calls, expected))


# ---- Streams and graphs --------------------------------------------------------------------------


@pytest.mark.parametrize("workspace", [True, False])
def test_a_side_stream_is_followed(workspace):
    """Inputs that arrive late on that stream are waited for; the default stream is not used."""
    call = moved(make(512, 4, initial=F32))
    expected = run(call)
    late = call.but(v=torch.zeros_like(call.v))
    prepared = Prepared(late, workspace=workspace)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.v.copy_(call.v)
        prepared()
    side.synchronize()
    assert prepared.equals(expected)


def test_the_call_does_not_wait_for_the_device():
    prepared = Prepared(moved(make(512, 4, initial=F32)))
    prepared()
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    prepared()
    done.record()
    assert not done.query(), "the call returned only after the device was done"
    torch.cuda.synchronize()


def capture(prepared):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared()
    return graph


@pytest.mark.parametrize("workspace", [True, False])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_graph_replay_with_changed_offsets(workspace, lower_bound):
    """Everything that the graph reads is changed in place: inputs, cu_seqlens, slots, states."""
    tables = [[0, 17, 48, 300], [0, 0, 300, 300], [0, 100, 116, 200], [0, 1, 2, 3]]
    call = moved(make(300, 3, cu=tables[0], initial=F32, lower_bound=lower_bound))
    call.options["state_indices"] = torch.tensor([0, 1, 2], device=DEVICE)
    run(call)  # does the path take it?
    prepared = Prepared(call, workspace=workspace)
    graph = capture(prepared)
    for i, (cu, slots) in enumerate(zip(tables, [[0, 1, 2], [2, 0, 1], [1, -1, 0], [0, 1, 2]])):
        fresh = moved(make(300, 3, cu=cu, initial=F32, seed=i, lower_bound=lower_bound))
        fresh.options["state_indices"] = torch.tensor(slots, device=DEVICE)
        for name, tensor in fresh.tensors().items():
            call.tensors()[name].copy_(tensor)
        prepared.poison()
        graph.replay()
        expected = run(fresh)
        assert prepared.equals(expected)


def test_first_call_of_a_process_may_be_captured(tmp_path, path):
    """Kernels are loaded while the graph is captured."""
    import subprocess
    import sys

    program = tmp_path / "first.py"
    program.write_text(
        "import torch, flash_kda\n"
        "x = torch.randn(1, 64, 2, 128, device='cuda').bfloat16()\n"
        "b = x[..., 0].contiguous()\n"
        "out = torch.full_like(x, float('nan'))\n"
        "size = flash_kda.get_workspace_size(64, 2)\n"
        "w = torch.empty(size, dtype=torch.uint8, device='cuda')\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    flash_kda.fwd(x, x, x, x, b, 0.1, out, None, None, -5.0, workspace=w)\n"
        "graph.replay()\n"
        "first = out.clone()\n"
        "flash_kda.fwd(x, x, x, x, b, 0.1, out, None, None, -5.0, workspace=w)\n"
        "torch.cuda.synchronize()\n"
        "assert torch.isfinite(first).all() and torch.equal(first, out)\n"
        f"assert flash_kda.last_report()['kernel'].startswith('{KERNELS[path]}')\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


# ---- Errors --------------------------------------------------------------------------------------


def test_the_library_stays_usable_after_errors(path):
    call = shared(64, 2, initial=F32)
    small = {"workspace": torch.zeros(8, dtype=torch.uint8)}
    cases = [({"scale": 0.0}, "scale"), ({"q": call.q.float()}, "q: dtype float32")]
    if path == "sm80":  # sm90 needs none
        cases.append(({"options": small}, "workspace_bytes: 8"))
    for wrong, match in cases:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=match):
            run(call.but(**wrong))
        check(call)


def test_tensors_on_different_devices_are_refused():
    call = moved(shared(20, 2))
    for name in ("k", "A_log"):
        with pytest.raises(ValueError, match=rf"{name}: on cpu, wanted cuda:0"):
            run(call.but(**{name: getattr(call, name).cpu()}))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_tensors_is_used():
    call = shared(70, 2, initial=F32)
    want = run(call)
    there = {n: t.to("cuda:1") for n, t in call.tensors().items()}
    torch.cuda.set_device(0)
    out, final = (poisoned(t.shape, t.dtype).to("cuda:1") for t in (want.out, want.final))
    flash_kda.fwd(
        *(there[n] for n in ("q", "k", "v", "g", "beta")),
        *(call.scale, out, there["A_log"], there["dt_bias"], -5.0, there["initial_state"], final),
    )
    assert torch.cuda.current_device() == 0
    assert same_bits(out.cpu(), want.out.cpu()) and same_bits(final.cpu(), want.final.cpu())


def test_the_reference_says_that_it_has_no_cuda_kernels():
    call = moved(shared(4, 2))
    with pytest.raises(NotImplementedError, match="cuda, reference has no CUDA kernels"):
        run(call, fn=flash_kda.reference)


# ---- What a call does on the host ----------------------------------------------------------------
# Counted, as neighbours change every time; bench/run.py gpu --kind host measures the time.

SIZES = pytest.mark.parametrize("T, H", [(64, 2), (1000, 2)])  # sm90: whole, and in segments


def kinds_of_nodes(graph):
    """Of a torch.cuda.CUDAGraph(keep_graph=True), as the driver counts them: 0 is a kernel."""
    driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph())
    count, kind = ctypes.c_size_t(), ctypes.c_int()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    kinds = []
    for node in nodes:
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    return kinds


@SIZES
def test_only_the_named_kernels_are_queued(T, H):
    """No copies, no memsets; a wait or a cudaMalloc would end the capture."""
    call = moved(make(T, H, initial=F32))
    run(call)
    prepared, graph = Prepared(call), torch.cuda.CUDAGraph(keep_graph=True)
    before = flash_kda.last_report()["num_calls"]
    with torch.cuda.graph(graph):
        prepared()
    report = flash_kda.last_report()
    assert report["num_calls"] == before + 1
    assert kinds_of_nodes(graph) == [0] * len(report["kernel"].split("+")), report


def allocated():
    """Blocks asked of torch's allocator since the process began, and their bytes."""
    stats = torch.cuda.memory_stats()
    return stats["allocation.all.allocated"], stats["requested_bytes.all.allocated"]


@SIZES
def test_only_what_the_kernels_need_is_allocated(T, H):
    """And nothing where the caller brings a workspace, or they need none."""
    call = moved(make(T, H, initial=F32))
    run(call)
    for workspace in (True, False):
        prepared = Prepared(call, workspace=workspace)
        blocks, size = allocated()
        prepared()
        report, after = flash_kda.last_report(), allocated()
        needed = report["workspace_bytes"]
        wanted = (1, needed) if needed and not workspace else (0, 0)
        assert (after[0] - blocks, after[1] - size) == wanted, report
        assert needed <= flash_kda.get_workspace_size(T, H)
        assert (needed == 0) == ("sm90" in report["kernel"] and not is_split(report))


def test_a_call_is_one_function_of_the_extension():
    prepared = Prepared(moved(make(64, 2, initial=F32)))
    prepared()
    assert called_functions(prepared)[1:] == one_call("fwd")  # the first is prepared itself


def test_results_reach_the_cpu():
    call = shared(70, 2, initial=F32)
    assert same_bits(on_cpu(run(call)).out, run(call).out.cpu())
