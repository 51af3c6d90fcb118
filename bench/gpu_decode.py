"""Decode on a GPU: N sequences of one token, or of a few draft tokens, the states updated in place.
Cold L2 and device events as for prefill; small calls also as a chain in a CUDA graph, and what an
eager call costs the host."""

import os
import sys
import time
from dataclasses import dataclass, replace

import gpu_cases
import records
import torch
from gpu_cases import D
from gpu_names import DECODE_NAMES
from implementations import Ours, has_module, rms_ratio, spread_heads, version_of

import flash_kda

CHAIN_BYTES = 256 << 20  # states of the calls in a graph: more than an L2 holds
SMALL_BYTES = 16 << 20  # states of a call that is timed in a graph too
CHECKED_SEQUENCES = 16


@dataclass(frozen=True)
class DecodeCase:
    name: str
    N: int
    H: int
    T: int
    dtype: torch.dtype
    drafts: bool

    @property
    def state_bytes(self):
        return self.N * self.H * D * D * self.dtype.itemsize

    @property
    def min_bytes(self):
        """The state read once, and written once or after every draft token; the tokens once."""
        rows = self.N * self.T * self.H * (5 * D + 1) * 2
        return rows + self.state_bytes * (1 + (self.T if self.drafts else 1))

    def shrunk(self):
        return replace(self, N=min(self.N, 3), H=min(self.H, 2))


def case(name):
    """Of names such as "N64xH32xT4 drafts fp32"."""
    sizes, *words = name.split()
    N, H, *T = (int(part[1:]) for part in sizes.split("x"))
    dtype = torch.bfloat16 if "bf16" in words else torch.float32
    return DecodeCase(name, N, H, T[0] if T else 1, dtype, "drafts" in words)


class Problem:
    """Inputs of a case, [N, T, ...], and as many pools of states as asked for, all alike."""

    def __init__(self, shape, regime, device, data, pools=1):
        self.shape, self.device = shape, device
        packed = gpu_cases.Case(shape.name, (shape.T,) * shape.N, shape.H)
        found = gpu_cases.make_inputs(packed, regime, device, data)
        self.inputs = found
        self.rows = {
            name: x.reshape(shape.N, shape.T, *x.shape[2:]) for name, x in found.rows.items()
        }
        self.start = found.initial_state.to(shape.dtype)
        self.slots = self.accepted = None
        if shape.drafts:
            order = torch.randperm(shape.N * shape.T, generator=torch.Generator().manual_seed(0))
            self.slots = order.view(shape.N, shape.T).to(device)
            accepted = 1 + torch.arange(shape.N) % shape.T
            self.accepted = accepted.to(torch.int32).to(device)
        self.pools = [self.new_pool() for _ in range(pools)]
        self.out = torch.full_like(self.rows["v"], torch.nan)

    def read_slots(self):
        if not self.shape.drafts:
            return torch.arange(self.shape.N, device=self.device)
        return self.slots.gather(1, self.accepted.long()[:, None] - 1)[:, 0]

    def written_slots(self):
        return self.slots[:, -1] if self.shape.drafts else self.read_slots()

    def new_pool(self):
        count = self.shape.N * (self.shape.T if self.shape.drafts else 1)
        pool = torch.zeros(count, *self.start.shape[1:], dtype=self.shape.dtype, device=self.device)
        pool[self.read_slots()] = self.start
        return pool


class OurDecode:
    name = Ours.name
    path = "auto"  # decode has one
    takes_drafts = True

    def bind(self, problem, pool):
        self.calls_before = (flash_kda.last_report() or {}).get("num_calls", 0)
        self.wanted = "cuda/" if pool.is_cuda else "cpu/"
        i, rows = problem.inputs, problem.rows.values()
        arguments = (*rows, i.scale, problem.out, i.A_log, i.dt_bias, i.lower_bound, pool)
        options = {}
        if problem.shape.drafts:
            options = {"state_indices": problem.slots, "num_accepted_tokens": problem.accepted}

        def call():
            flash_kda.decode(*arguments, **options)

        return call

    kernel = Ours.kernel


class FLADecode:
    """fused_recurrent_kda_fwd of flash-linear-attention in its own Triton kernel, in place."""

    takes_drafts = False

    def __init__(self):
        os.environ["FLA_FLASH_KDA"] = "0"
        os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        self.function = fused_recurrent_kda_fwd
        version = version_of("fla-core", "flash-linear-attention")
        self.name = f"fla fused_recurrent_kda {version}"

    def bind(self, problem, pool):
        i = problem.inputs
        dt_bias = i.dt_bias.reshape(-1)
        options = {
            "scale": i.scale,
            "lower_bound": i.lower_bound,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "state_v_first": True,
            "inplace_final_state": True,
            "out": problem.out,
        }

        def call():
            self.function(
                **problem.rows, A_log=i.A_log, dt_bias=dt_bias, initial_state=pool, **options
            )

        before = (flash_kda.last_report() or {}).get("num_calls", 0)
        call()
        if (flash_kda.last_report() or {}).get("num_calls", 0) != before:
            raise RuntimeError("FLA came to us")
        return call

    def kernel(self):
        return "fla.ops.kda.fused_recurrent_kda_fwd/triton"


def installed_peers():
    try:
        return [FLADecode()] if has_module("fla") else []
    except Exception as error:  # a broken installation of a peer is not our failure
        print(f"left out: {error!r}", file=sys.stderr)
        return []


def graph_ms(implementation, problem, count):
    """Milliseconds a call in a graph of calls on pools of their own, more than the L2 holds."""
    calls = [implementation.bind(problem, pool) for pool in problem.pools]
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    samples = []
    for _ in range(count + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) / len(calls))
    return records.summarize(samples[2:])["median_ms"]


def host_ms(call, clock, batches=20, calls=50):
    """Until an eager call returns: many in a row on an idle device."""
    samples = []
    for _ in range(batches):
        clock.wait()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append(1e3 * (time.perf_counter() - begin) / calls)
    clock.wait()
    return records.summarize(samples)["median_ms"]


def measure_error(implementation, problem):
    """One call from the start against the float64 definition: some heads of the first sequences."""
    N = min(problem.shape.N, CHECKED_SEQUENCES)
    heads = spread_heads(problem.shape.H)
    pool = problem.new_pool()
    call = implementation.bind(problem, pool)
    pool[problem.read_slots()] = problem.start  # binding may have called
    call()
    kernel = implementation.kernel()
    out, state = problem.out[:N, :, heads], pool[problem.written_slots()][:N, heads]
    rows = [x[:N, :, heads].cpu() for x in problem.rows.values()]
    i = problem.inputs
    start = problem.start[:N, heads].float().cpu().contiguous()
    exact_out = torch.full(rows[2].shape, torch.nan, dtype=torch.float64)
    exact_state = torch.full(start.shape, torch.nan, dtype=torch.float64)
    leading = (*rows, i.scale, exact_out, i.A_log[heads].cpu(), i.dt_bias[heads].cpu())
    flash_kda.reference(*leading, i.lower_bound, start, exact_state)
    return {
        "error_out": rms_ratio(out, exact_out),
        "error_state": rms_ratio(state, exact_state),
        "error_kernel": kernel,
    }


def measure(implementation, problem, clock, options):
    call = implementation.bind(problem, problem.pools[0])
    clock.warm_up(call)
    count = 3 if options.dry_run else 10 if options.quick else 50
    found = records.summarize(clock.samples_ms(call, count))
    found["kernel"] = implementation.kernel()
    again = None if options.quick else records.summarize(clock.samples_ms(call, count))
    found["again_ms"] = again and again["median_ms"]
    found["host_ms"] = host_ms(call, clock, *(1, 2) if options.dry_run else ())
    found["graph_ms"] = None
    if len(problem.pools) > 1 and not options.dry_run:
        found["graph_ms"] = graph_ms(implementation, problem, count)
        found["graph_calls"] = len(problem.pools)
    return found | measure_error(implementation, problem)


def run(options, clock, device, common, data):
    """Yields a record per case, regime and implementation."""
    peers = [] if options.no_peers else installed_peers()
    for name in options.decode_cases or DECODE_NAMES:
        shape = case(name)
        shape = shape.shrunk() if options.dry_run else shape
        pools = CHAIN_BYTES // shape.state_bytes if shape.state_bytes <= SMALL_BYTES else 1
        pools = min(pools, 2) if options.dry_run else pools
        for regime in options.regime:
            problem = Problem(shape, regime, device, data, pools)
            for implementation in (OurDecode(), *peers):
                if shape.drafts and not implementation.takes_drafts:
                    continue
                record = records.take(
                    lambda: measure(implementation, problem, clock, options),
                    {**common, "kind": "decode"},
                    *(shape, regime, implementation.name),
                    must_work=isinstance(implementation, OurDecode),
                )
                if record:
                    yield record
            del problem
