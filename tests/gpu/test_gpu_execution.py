"""How calls run: streams, graphs, repeats under load, devices, errors, host time."""

import random
import statistics
import threading
import time

import pytest
import torch
from inputs import BF16, F32, bits, make, poisoned, same_bits, shared
from on_gpu import DEVICE, check, moved, on_cpu, run

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
        f"assert flash_kda.last_report()['kernel'].startswith('cuda/{path}/')\n"
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


# ---- Host time -----------------------------------------------------------------------------------


def host_time(function, repeats=200):
    """Median of the time until `function` returns, the device idle before."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def test_host_time_beyond_the_launches():
    """A launch of an empty kernel costs about what a small torch operation does; the rest of a call
    (binding, checks, arguments) stays within 5 us of the C library's own time."""
    prepared = Prepared(moved(make(64, 2, initial=F32)))
    prepared()
    c = prepared.call
    arguments = (
        *(c.q, c.k, c.v, c.g, c.beta, c.scale, prepared.out, c.A_log, c.dt_bias, -5.0),
        *(c.initial_state, prepared.final, None, prepared.workspace, None, None, None, None),
        *(True, True, True, False, None, None, None),
    )
    repeats = 50
    in_library = []
    for _ in range(20):
        torch.cuda.synchronize()
        in_library.append(flash_kda._C.time_call("fwd", repeats, *arguments) / repeats)
    library, whole = statistics.median(in_library), host_time(prepared)
    print(f"host time: library {1e6 * library:.1f} us, whole call {1e6 * whole:.1f} us")
    assert whole - library < 10e-6  # the first call after a synchronisation is a slow one


def test_results_reach_the_cpu():
    call = shared(70, 2, initial=F32)
    assert same_bits(on_cpu(run(call)).out, run(call).out.cpu())
