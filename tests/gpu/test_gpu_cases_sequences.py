"""Cases 21 to 30, 45 and 47 from public reports, by number, on CUDA tensors: cut inputs, many
sequences, pools, offsets, checkpoints. At the end: where every number has its test."""

import pathlib
import re

import pytest
import torch
from inputs import BF16, F32, bits, make, rms_ratio, same_bits, shared, yardstick
from on_gpu import (
    CUT_TOKENS,
    INPUTS,
    bounds_of,
    check,
    equal,
    is_split,
    moved,
    on_cpu,
    on_device,
    run,
)

import flash_kda

pytestmark = pytest.mark.usefixtures("path")

# ---- 21, 26: cut inputs, many sequences ----------------------------------------------------------


@pytest.mark.parametrize("regime", ["reports", "slow"])
@pytest.mark.parametrize(
    "T, cut", [(64, 16), (64, 32), (64, 17), (64, 1), (64, 63), (200, 112), (200, 128), (1200, 384)]
)
def test_case_21_chunked_prefill(regime, T, cut, path):
    call = shared(T, 2, regime=regime, initial=F32)
    check(call)
    here, want = moved(call), yardstick(call)
    splits = []

    def run_noted(part):
        result = run(part)
        splits.append(is_split(flash_kda.last_report()))
        return result

    whole = run_noted(here)
    first = run_noted(here.cut(0, cut, here.initial_state))
    second = run_noted(here.cut(cut, T, first.final))
    out = torch.cat([first.out, second.out], 1)
    split = any(splits)  # cut by the library, too
    assert split == (path == "sm90" and T == 1200)
    if cut % CUT_TOKENS[path] == 0 and not split:
        assert same_bits(out, whole.out) and same_bits(second.final, whole.final)
    assert rms_ratio(out.cpu(), want.out) < bounds_of("small")[0]
    assert rms_ratio(second.final.cpu(), want.final) < bounds_of("small")[1]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("H", [1, 3])
@pytest.mark.parametrize("cu", [[0, 1000, 2000], [0, 0, 1500, 1500, 3000], [0, 2900, 3000]])
def test_case_21_packed_sequences_that_are_split(cu, H, padded, path):
    call = shared(cu[-1], H, cu=cu, initial=F32)
    got = check(call, cut=slice(0, 16))
    here = moved(call)
    again = on_cpu(run(here))
    split = is_split(flash_kda.last_report())
    assert split == (path == "sm90")
    assert same_bits(again.out, got.out) and same_bits(again.final, got.final)
    if padded:  # the second sequence has no slot
        slots = torch.arange(len(cu) - 1, dtype=torch.int32, device=here.q.device)
        slots[1] = -1
        pool = here.initial_state.clone()
        part = on_cpu(
            run(here.but(initial_state=pool, options={"state_indices": slots}), final=pool)
        )
        for n, (_, begin, end) in enumerate(call.spans()):
            if n == 1:
                assert not part.out[:, begin:end].any()
                assert same_bits(pool[n].cpu(), call.initial_state[n])
            else:
                assert same_bits(part.out[:, begin:end], got.out[:, begin:end])
                assert same_bits(pool[n].cpu(), got.final[n])


@pytest.mark.parametrize("N, length, H", [(256, 33, 1), (600, 2, 2), (1000, 0, 1), (31, 128, 2)])
def test_case_26_very_many_sequences(N, length, H):
    cu = [n * length for n in range(N + 1)]
    check(shared(max(N * length, 1), H, cu=cu, initial=F32), cut=slice(0, 32))


def test_case_26_4096_sequences_of_two_tokens():
    call = shared(8192, 1, cu=list(range(0, 8193, 2)))
    check(call, cut=slice(0, 16))


@pytest.mark.parametrize("H, padded", [(1, False), (3, False), (3, True)])
def test_case_26_short_ragged_sequences(H, padded):
    """So many that path sm90 takes several of them with one block, each with its own head, state
    and partial chunk; a few, which it takes one by one, have the same bits."""
    lengths = [0, 64, 1, 33, 90, 32, 7, 0, 0, 65] * 50
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    call = moved(shared(cu[-1], H, cu=cu, initial=F32))
    whole, device = run(call), call.q.device
    start, few = 4, 9
    parts = {n: getattr(call, n)[:, cu[start] : cu[start + few]] for n in INPUTS}
    some = call.but(
        **parts,
        cu_seqlens=torch.tensor(cu[start : start + few + 1], device=device) - cu[start],
        initial_state=call.initial_state[start : start + few].clone(),
    )
    alone = run(some)
    if padded:  # every third has no slot, the others have them in reverse
        slots = torch.arange(len(lengths) - 1, -1, -1, dtype=torch.int32, device=device)
        slots[::3] = -1
        pool = call.initial_state.flip(0).clone()
        used = slots >= 0
        got = run(
            call.but(initial_state=pool, options={"state_indices": slots}), final=pool
        )
        for n, (_, begin, end) in enumerate(call.spans()):
            if used[n]:
                assert same_bits(got.out[:, begin:end], whole.out[:, begin:end])
            else:
                assert not got.out[:, begin:end].any()
        assert same_bits(pool.flip(0)[used], whole.final[used])
        assert same_bits(pool.flip(0)[~used], call.initial_state[~used])
        return
    assert same_bits(whole.out[:, cu[start] : cu[start + few]], alone.out)
    assert same_bits(whole.final[start : start + few], alone.final)
    check(shared(cu[-1], H, cu=cu, initial=F32), cut=slice(0, 16))


# ---- 28, 29, 30: pools, in place, padding --------------------------------------------------------


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("cu", [None, [0, 17, 17, 48]])
@pytest.mark.parametrize("slots", [[3, -1, 0], [-1, -1, -1], [0, 1, 2], [-1, 4, -1], [2, 6, -9]])
def test_case_28_padded_pool_index(index, cu, slots):
    """-1 is padding, and so is whatever else lies outside of the pool."""
    call = moved(shared(48, 2, B=1 if cu else 3, cu=cu))
    device = call.q.device
    pool = torch.randn(call.state_shape(6), generator=torch.Generator().manual_seed(2)).to(device)
    used = [s if 0 <= s < 6 else -1 for s in slots]
    live = [n for n in range(3) if used[n] >= 0]
    start = torch.zeros(call.state_shape(), device=device)
    start[live] = pool[[used[n] for n in live]]
    want = run(call.but(initial_state=start))
    rest = [s for s in range(6) if s not in used]
    pool[rest] = float("nan")  # nobody may read these
    after = pool.clone()
    call = call.but(
        initial_state=after,
        options={"state_indices": torch.tensor(slots, dtype=index, device=device)},
    )
    got = run(call, final=after)
    for n, (batch, begin, end) in enumerate(call.spans()):
        if used[n] < 0:
            assert not got.out[batch, begin:end].any()
        else:
            assert same_bits(got.out[batch, begin:end], want.out[batch, begin:end])
            assert same_bits(after[used[n]], want.final[n])
    assert same_bits(after[rest], pool[rest])


@pytest.mark.parametrize("state", [BF16, F32])
def test_case_29_in_place(state):
    call = moved(shared(48, 2, cu=[0, 17, 17, 48], initial=state))
    two = run(call, state_dtype=state)
    both = call.initial_state.clone()
    assert equal(two, run(call.but(initial_state=both), final=both))


@pytest.mark.parametrize("cu", [[0, 17, 48], [0, 17, 48, 48, 48], [0, 0], [0, 1]])
def test_case_30_padded_batch(cu):
    """`run` itself demands that rows past cu[-1] keep their bits."""
    call = shared(64, 2, cu=cu, initial=F32)
    got = check(call)
    exact = on_cpu(run(call.but(**{n: getattr(call, n)[:, : cu[-1]] for n in INPUTS})))
    assert same_bits(got.out[:, : cu[-1]], exact.out) and same_bits(got.final, exact.final)


# ---- 45: bad cu_seqlens --------------------------------------------------------------------------


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "cu",
    [
        [1, 17],
        [0, 20, 10, 48],
        [0, 17, 4096],
        [-1, 17],
        [0, -5, 48],
        [48, 0],
        [0, 2**31 - 1],
        [-(2**31), 2**31 - 1, 0, 48],
        [0, 48, 0, 48, 0, 48],
    ],
)
def test_case_45_bad_cu_seqlens_stay_inside(cu, index):
    """The host cannot see them. Whatever they hold, nothing outside of out, final and the workspace
    is written, and the next call is right."""
    good = moved(shared(48, 2))
    device, N = good.q.device, len(cu) - 1
    guard = 4096
    size = flash_kda.get_workspace_size(48, 2, N)
    outs = on_device(2 * guard + good.v.numel(), dtype=BF16)
    finals = on_device(2 * guard + N * 2 * 128 * 128, dtype=F32)
    space = torch.full((size + 2 * guard,), 255, dtype=torch.uint8, device=device)
    out = outs[guard:-guard].view(good.v.shape)
    final = finals[guard:-guard].view(N, 2, 128, 128)
    flash_kda.fwd(
        *(good.q, good.k, good.v, good.g, good.beta, good.scale, out),
        *(good.A_log, good.dt_bias, -5.0, None, final),
        torch.tensor(cu, dtype=index, device=device),
        workspace=space[guard:-guard],
    )
    torch.cuda.synchronize()
    for store in (outs, finals):
        assert (bits(store[:guard]) == -1).all() and (bits(store[-guard:]) == -1).all()
    assert (space[:guard] == 255).all() and (space[-guard:] == 255).all()
    check(shared(48, 2))


# ---- 47: checkpoints -----------------------------------------------------------------------------


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("state", [BF16, F32])
@pytest.mark.parametrize(
    "lengths, offsets",
    [
        ([20, 20], [[16], [16]]),
        ([130], [[128]]),
        ([130, 16, 0], [[16, 128], [16, -1], [0, -1]]),
        ([64, 100], [[0, 64], [48, 96]]),
        ([64, 100], [[17, 48], [112, 96]]),  # no multiple of 16; past the end, then out of order
    ],
)
@pytest.mark.parametrize("indptr", [False, True])
def test_case_47_checkpoints(index, state, lengths, offsets, indptr):
    """The same bits as the final state of the prefix run alone; the rest stays untouched."""
    cu = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    call = moved(make(cu[-1], 2, cu=cu, initial=F32))
    plain = run(call)
    flat = torch.tensor([t for row in offsets for t in row], dtype=index, device=call.q.device)
    marked = call.but(options={"checkpoint_offsets": flat})
    if indptr:
        ends = [sum(map(len, offsets[:n])) for n in range(len(offsets) + 1)]
        marked.options["checkpoint_indptr"] = torch.tensor(ends, dtype=index, device=flat.device)
    got = run(marked, checkpoints=len(flat), state_dtype=state)
    assert same_bits(got.out, plain.out)
    m = 0
    for n, row in enumerate(offsets):
        due = -1
        for tokens in row:
            if tokens <= due or tokens > lengths[n] or tokens % 16:
                assert (bits(got.checkpoints[m]) == -1).all()
            else:
                due = tokens
                prefix = call.cut(cu[n], cu[n] + tokens, call.initial_state[n : n + 1])
                alone = run(prefix, state_dtype=state)
                assert same_bits(got.checkpoints[m], alone.final[0]), (n, tokens)
            m += 1


@pytest.mark.parametrize("ends", [[0, 99, 3], [-7, 2, 3], [3, 0, 2], [0, 2**40, -(2**40)]])
def test_case_47_bad_indptr_stays_inside(ends):
    call = moved(make(96, 2, cu=[0, 48, 96]))
    device = call.q.device
    store = on_device(5, 2, 128, 128, dtype=F32)
    call = call.but(
        options={
            "checkpoint_offsets": torch.tensor([16, 32, 48], device=device),
            "checkpoint_indptr": torch.tensor(ends, device=device),
            "checkpoint_state": store[1:4],
        }
    )
    run(call)
    torch.cuda.synchronize()
    assert (bits(store[[0, 4]]) == -1).all()


# ---- Numbers that are tested elsewhere -----------------------------------------------------------

ELSEWHERE = {
    19: "test_gpu_accuracy.py: mixed state dtypes",
    23: "test_gpu_accuracy.py: error against length",
    27: "a speed: the benchmark",
    32: "resources of a CUDA build: scripts/kernel_resources.py",
    38: "test_gpu_accuracy.py: grouped value heads",
    40: "two CUDA versions",
    42: "tests/python/test_torch_cuda.py: torch.compile",
}


def test_every_case_has_a_test():
    numbers = {1, 2, 3, 4, 6, 8, 10, 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 23, 26, 27, 28, 29, 30,
               32, 33, 37, 38, 39, 40, 41, 42, 45, 47, 49, 50}  # fmt: skip
    files = pathlib.Path(__file__).parent.glob("test_gpu_cases*.py")
    text = "\n".join(path.read_text() for path in files)
    here = re.findall(r"^def test_case_(\d+)_", text, re.M)
    assert {int(n) for n in here} | set(ELSEWHERE) == numbers
