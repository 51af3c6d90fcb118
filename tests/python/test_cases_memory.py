"""Cases 26 to 50 from public reports about this operator: sequences, memory, sizes, callers.

Each test covers its whole kind, not only the numbers of the report, on every instruction set of the
machine. The list at the end says which numbers need a GPU.
"""

import pathlib
import platform
import re

import pytest
import torch
from inputs import (
    BF16,
    F32,
    KERNELS,
    USABLE,
    Kernel,
    assert_near,
    bits,
    check,
    each_kernel,
    make,
    poisoned,
    run,
    same_bits,
    shared,
    yardstick,
)

import flash_kda

ERRORS = (TypeError, ValueError, RuntimeError)

# ---- 26: very many sequences (their results; the speed side needs a GPU) -------------------------


@each_kernel
@pytest.mark.parametrize("N, length, H", [(256, 33, 1), (600, 2, 2), (1000, 0, 1), (31, 128, 2)])
def test_case_26_very_many_sequences(kernel, N, length, H):
    cu = [n * length for n in range(N + 1)]
    check(shared(max(N * length, 1), H, cu=cu, initial=F32), kernel)


@each_kernel
def test_case_26_4096_sequences_of_two_tokens(kernel):
    call = shared(8192, 1, cu=list(range(0, 8193, 2)))
    assert_near(kernel, run(call, kernel, final=False).out, yardstick(call, final=False).out)


# ---- 28, 29, 30: pools, in place, padding --------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("cu", [None, [0, 17, 17, 48]])
@pytest.mark.parametrize("slots", [[3, -1, 0], [-1, -1, -1], [0, 1, 2], [-1, 4, -1]])
def test_case_28_padded_pool_index(kernel, index, cu, slots):
    call = shared(48, 2, B=1 if cu else 3, cu=cu)
    pool = torch.randn(call.state_shape(6), generator=torch.Generator().manual_seed(2))
    live = [n for n in range(3) if slots[n] >= 0]
    start = torch.zeros(call.state_shape())
    start[live] = pool[[slots[n] for n in live]]
    want = run(call.but(initial_state=start), kernel)
    pool[[s for s in range(6) if s not in slots]] = float("nan")  # nobody may read these
    after = pool.clone()
    call = call.but(
        initial_state=after, options={"state_indices": torch.tensor(slots, dtype=index)}
    )
    got = run(call, kernel, final=after)
    for n, (batch, begin, end) in enumerate(call.spans()):
        if slots[n] < 0:
            assert not got.out[batch, begin:end].any()
        else:
            assert same_bits(got.out[batch, begin:end], want.out[batch, begin:end])
            assert same_bits(after[slots[n]], want.final[n])
    rest = [s for s in range(6) if s not in slots]
    assert same_bits(after[rest], pool[rest])


@each_kernel
@pytest.mark.parametrize("state", [BF16, F32])
def test_case_29_in_place(kernel, state):
    call = shared(48, 2, cu=[0, 17, 17, 48], initial=state)
    two = check(call, kernel, state_dtype=state)
    both = call.initial_state.clone()
    one = run(call.but(initial_state=both), kernel, final=both)
    assert same_bits(one.out, two.out) and same_bits(one.final, two.final)


@each_kernel
@pytest.mark.parametrize("cu", [[0, 17, 48], [0, 17, 48, 48, 48], [0, 0], [0, 1]])
def test_case_30_padded_batch(kernel, cu):
    """`run` itself demands that rows past cu[-1] keep their bits."""
    call = shared(64, 2, cu=cu, initial=F32)
    got = check(call, kernel)
    exact = run(
        call.but(**{n: getattr(call, n)[:, : cu[-1]] for n in ("q", "k", "v", "g", "beta")}), kernel
    )
    assert same_bits(got.out[:, : cu[-1]], exact.out) and same_bits(got.final, exact.final)


# ---- 33, 39: memory ------------------------------------------------------------------------------


@each_kernel
def test_case_33_stale_memory(kernel):
    call = shared(500, 9, initial=F32)
    first = check(call, kernel, workspace=True)
    for _ in range(25):
        again = run(call, kernel, workspace=True)
        assert same_bits(first.out, again.out) and same_bits(first.final, again.final)
    own = run(call, kernel)
    assert same_bits(first.out, own.out) and same_bits(first.final, own.final)


@each_kernel
def test_case_33_larger_unaligned_workspace(kernel):
    call = shared(100, 3, initial=F32)
    size = flash_kda.get_workspace_size(100, 3)
    store = torch.full((size + 4099,), 255, dtype=torch.uint8)
    first = check(call, kernel)
    for offset in (1, 7, 64):
        again = run(call.but(options={"workspace": store[offset:]}), kernel)
        assert same_bits(first.out, again.out) and same_bits(first.final, again.final)


@each_kernel
def test_case_39_inputs_are_not_modified(kernel):
    """`run` compares every input of every test before and after; here with all of them present."""
    call = make(64, 2, cu=[0, 17, 48], initial=F32)
    call.options["state_indices"] = torch.tensor([1, 0])
    call.options["checkpoint_offsets"] = torch.tensor([16, 16])
    assert len(call.tensors()) == 11
    run(call, kernel, checkpoints=2, workspace=True)


# ---- 37, 38: other sizes -------------------------------------------------------------------------


HEAD_SIZES = [(64, 64), (64, 128), (128, 64), (128, 256), (256, 256), (96, 96), (16, 16), (64, 80)]
HEAD_SIZES += [(208, 48), (1, 1), (100, 128), (128, 100), (272, 128), (128, 8)]


@each_kernel
@pytest.mark.parametrize("K, V", HEAD_SIZES)
def test_case_37_other_head_sizes(kernel, K, V):
    """Supported and right, or an error that names the tensor; never a wrong answer."""
    call = shared(40, 2, K=K, V=V, initial=F32)
    try:
        got = run(call, kernel)
    except ERRORS as error:
        assert re.match(r".*head size [KV] = \d+, wanted a multiple of", str(error)), error
        # Promised: multiples of 16 up to 256, and of 32 for bf16 products.
        unit = 32 if kernel.precision == "bf16" else 16
        assert K % unit or V % unit or K > 256, error
        return
    assert_near(kernel, got.out, yardstick(call).out)
    assert_near(kernel, got.final, yardstick(call).final, "final_state")


@each_kernel
@pytest.mark.parametrize("H, HV", [(2, 4), (1, 8), (3, 9), (1, 3)])
def test_case_38_grouped_value_heads(kernel, H, HV):
    call = shared(50, H, HV=HV, initial=F32)
    got = check(call, kernel)
    repeated = call.but(
        q=call.q.repeat_interleave(HV // H, 2), k=call.k.repeat_interleave(HV // H, 2)
    )
    plain = run(repeated, kernel)
    assert same_bits(got.out, plain.out) and same_bits(got.final, plain.final)


# ---- 42: torch.compile ---------------------------------------------------------------------------


def test_case_42_torch_compile():
    call = shared(20, 2, initial=F32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q, k, v, g, beta, A_log, dt_bias, initial_state):
        out, final = torch.empty_like(v), torch.empty_like(initial_state)
        flash_kda.fwd(
            q * 1,
            k,
            v,
            g,
            beta,
            call.scale,
            out,
            A_log,
            dt_bias,
            -5.0,
            initial_state=initial_state,
            final_state=final,
        )
        return out * 1, final

    with torch.inference_mode():
        out, final = layer(
            call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.initial_state
        )
    eager = run(call)
    assert same_bits(out, eager.out) and same_bits(final, eager.final)


# ---- 45: bad cu_seqlens --------------------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "cu",
    [
        [1, 17],
        [0, 20, 10, 48],
        [0, 17, 4096],
        [-1, 17],
        [0, -5, 48],
        [],
        [0, 2**31 - 1],
        [0, 17, 49],
    ],
)
def test_case_45_bad_cu_seqlens(kernel, index, cu):
    call = shared(48, 2).but(cu_seqlens=torch.tensor(cu, dtype=index))
    out, final = poisoned(call.v.shape, BF16), poisoned(call.state_shape(max(len(cu) - 1, 0)), F32)
    with pytest.raises(ERRORS, match="cu_seqlens"):
        run(call, kernel, out=out, final=final)
    assert (bits(out) == -1).all() and (bits(final) == -1).all()


def test_case_45_cu_seqlens_needs_one_batch_row():
    with pytest.raises(ERRORS, match="cu_seqlens"):
        run(make(48, 2, B=2).but(cu_seqlens=torch.tensor([0, 17, 48])))


# ---- 47: checkpoints -----------------------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("state", [BF16, F32])
@pytest.mark.parametrize(
    "lengths, offsets",
    [
        ([20, 20], [[16], [16]]),
        ([130], [[128]]),
        ([130, 16, 0], [[16, 128], [16, -1], [0, -1]]),
        ([64, 100], [[0, 64], [48, 96]]),
    ],
)
def test_case_47_checkpoints(kernel, index, state, lengths, offsets):
    """The same bits as the final state of the prefix run alone; -1 leaves its slot untouched."""
    cu = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    call = shared(cu[-1], 2, cu=cu, initial=F32)
    plain = check(call, kernel)
    flat = [tokens for row in offsets for tokens in row]
    marked = call.but(options={"checkpoint_offsets": torch.tensor(flat, dtype=index)})
    got = run(marked, kernel, checkpoints=len(flat), state_dtype=state)
    assert same_bits(got.out, plain.out)
    m = 0
    for n, row in enumerate(offsets):
        for tokens in row:
            if tokens < 0:
                assert (bits(got.checkpoints[m]) == -1).all()
            else:
                prefix = call.cut(cu[n], cu[n] + tokens, call.initial_state[n : n + 1])
                alone = run(prefix, kernel, state_dtype=state)
                assert same_bits(got.checkpoints[m], alone.final[0]), (n, tokens)
            m += 1


# ---- 49: the wrong kernel measured ---------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("T", [1, 70])
def test_case_49_the_kernel_asked_for_is_the_one_that_runs(kernel, T):
    run(make(T, 2), kernel)
    report = flash_kda.last_report()
    assert report["kernel"] == f"cpu/{kernel.isa}/prefill_{kernel.precision}"
    assert report["num_tokens"] == T


@pytest.mark.parametrize("isa", ["avx512_bf16", "amx_bf16"])
@pytest.mark.parametrize("T", [3, 70])
def test_case_49_sets_with_bf16_products_take_the_rest_from_avx512(isa, T):
    if isa not in USABLE:
        pytest.skip(f"this processor has no {isa}")
    call = shared(T, 9, cu=[0, T // 2, T], initial=F32)
    a, b = run(call, Kernel("avx512", "fp32")), run(call, Kernel(isa, "fp32"))
    assert same_bits(a.out, b.out) and same_bits(a.final, b.final)
    assert flash_kda.last_report()["kernel"] == f"cpu/{isa}/prefill_fp32"


def test_case_49_no_instruction_set_of_the_machine_is_left_out():
    """What the processor lists is built, usable and among the kernels that every test runs on."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if not cpuinfo.exists() or platform.machine() != "x86_64":
        pytest.skip("reads the processor's flags from Linux on x86-64")
    flags = set(re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.M)[1].split())
    needs = {
        "portable": set(),
        "avx2": {"avx2", "fma"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    }
    needs["avx512_bf16"] = needs["avx512"] | {"avx512_bf16"}
    needs["amx_bf16"] = needs["avx512"] | {"amx_tile", "amx_bf16"}
    expected = {isa for isa, wanted in needs.items() if wanted <= flags}
    assert set(USABLE) == expected, "a compiler of 2021 or later builds all of them"
    fp32 = {k.isa for k in KERNELS if k.precision == "fp32"}
    bf16 = {k.isa for k in KERNELS if k.precision == "bf16"}
    assert fp32 == {"portable", "avx2", "avx512"} & expected
    assert bf16 == {"avx512_bf16", "amx_bf16"} & expected


# ---- Numbers that are tested elsewhere -----------------------------------------------------------

ELSEWHERE = {
    26: "its speed side is about blocks of a GPU; the results are tested above",
    27: "a speed of one long sequence on a GPU, against peers on the same GPU",
    32: "disassembly and resources of a CUDA build",
    40: "two CUDA versions",
}


def test_every_case_has_a_test():
    numbers = {1, 2, 3, 4, 6, 8, 10, 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 23, 26, 27, 28, 29, 30,
               32, 33, 37, 38, 39, 40, 41, 42, 45, 47, 49, 50}  # fmt: skip
    files = pathlib.Path(__file__).parent.glob("test_cases*.py")
    here = re.findall(r"^def test_case_(\d+)_", "\n".join(f.read_text() for f in files), re.M)
    assert {int(n) for n in here} | set(ELSEWHERE) == numbers
