"""Which kernels a call gets when nobody chooses, and when one does; why not others.

on_gpu.reason_against_sm90 says once more, in Python, what path sm90 takes; every test of the other
files that asks for path sm90 holds the library against it.
"""

import pytest
import torch
from inputs import BF16, F32, make, rms_ratio, same_bits, shared, yardstick
from on_gpu import ERRORS, check, is_split, moved, on_cpu, reason_against_sm90, run

import flash_kda


def multiprocessors():
    return torch.cuda.get_device_properties(0).multi_processor_count


@pytest.fixture
def hopper():
    """A device and a build that have path sm90."""
    found = flash_kda.info()
    if found["cuda_path"] != "sm90":
        pytest.skip(f"no kernels of path sm90: {found['cuda_note']}")


def last():
    report = flash_kda.last_report()
    return report["kernel"], report["note"]


def test_info_names_the_path_of_the_device(monkeypatch):
    found = flash_kda.info()
    has_kernels = "90a" in {name.removesuffix("+ptx") for name in found["cuda_archs"]}
    if torch.cuda.get_device_capability() == (9, 0) and has_kernels:
        assert (found["cuda_path"], found["cuda_note"]) == ("sm90", "")
    else:
        assert found["cuda_path"] == "sm80" and found["cuda_note"]
    monkeypatch.setenv("FLASH_KDA_CUDA_PATH", "sm80")
    found = flash_kda.info()
    assert (found["cuda_path"], found["cuda_note"]) == ("sm80", "FLASH_KDA_CUDA_PATH: sm80")


@pytest.mark.parametrize(
    "T, H, kernel",
    [(40, 1, "pairs"), (16, 200, None), (1000, 2, "pairs+combine+join"), (100, 67, "forward")],
)
def test_the_faster_path_is_taken(hopper, T, H, kernel):
    """As the cost model has it for 132 multiprocessors."""
    call = make(T, H, initial=F32)
    run(call)
    found, note = last()
    check(call, cut=slice(0, 32))
    if multiprocessors() != 132:
        pytest.skip(f"{multiprocessors()} multiprocessors")
    if kernel:
        assert (found, note) == (f"cuda/sm90/{kernel}_bounded", "")
    else:
        assert found.startswith("cuda/sm80/")
        assert note == f"sm90 is the slower path for {T} tokens, 1 sequences of {H} value heads"


@pytest.mark.parametrize("regime", ["trained", "random"])
def test_first_segments_of_many_heads(hopper, regime):
    """Of 66 pairs of multiprocessors 32 have a first segment, more than half of the sequence, and
    the others walk the rest twice."""
    call = shared(3200, 32, regime=regime, initial=F32)
    check(call, bounds=regime, cut=slice(0, 16))
    run(call)
    if multiprocessors() == 132:
        assert last()[0] == "cuda/sm90/pairs+combine+join_bounded"


@pytest.mark.parametrize("how", [{"final": False}, {"state_dtype": F32}, {"state_dtype": BF16}])
def test_segments_and_final_states(hopper, how):
    """Nobody may want the final states, which are what the combine step ends with."""
    call = shared(4000, 2, cu=[0, 2300, 2330, 4000], initial=BF16)
    got = check(call, bounds="reports", cut=slice(0, 16), **how)
    assert same_bits(got.out, on_cpu(run(call)).out)
    assert is_split(flash_kda.last_report())


@pytest.mark.parametrize("N", [7, 128, 129])
def test_ragged_sequences_in_any_order(hopper, N):
    """More chains than multiprocessors; up to 128 sequences are taken longest first."""
    lengths = [40, 700, 0, 17, 90, 1, 333] if N == 7 else [n * 7 % 61 for n in range(N)]
    H = 2 * multiprocessors() // N + 1
    for order in (lengths, sorted(lengths), sorted(lengths, reverse=True)):
        cu = [sum(order[:n]) for n in range(N + 1)]
        call = shared(cu[-1], H, cu=cu, initial=F32)
        check(call, bounds="reports", cut=slice(0, 16))
        run(call)
        assert last()[0].startswith("cuda/sm90/forward_")


def test_a_nan_stays_in_its_row_of_a_split_sequence(hopper):
    """Channel 5 of one head is lost from the chunk of the NaN on, and nothing else."""
    call = moved(make(3000, 2, cu=[0, 1500, 3000], initial=F32))
    clean = run(call)
    assert is_split(flash_kda.last_report())
    call.v[0, 700, 1, 5] = float("nan")
    got = run(call, finite=False)
    lost = torch.zeros_like(got.out, dtype=torch.bool)
    lost[0, 700 // 32 * 32 : 1500, 1, 5] = True
    assert got.out[0, 700:1500, 1, 5].isnan().all()
    assert same_bits(got.out[~lost], clean.out[~lost])
    kept = torch.ones_like(got.final, dtype=torch.bool)
    kept[0, 1, 5] = False
    assert got.final[~kept].isnan().all() and same_bits(got.final[kept], clean.final[kept])


def worst_chunk(got, want):
    """Largest RMS ratio of 32 tokens."""
    pairs = zip(got.double().split(32, dim=1), want.split(32, dim=1), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def test_a_split_keeps_the_digits_of_what_decays(hopper):
    """No value after the first 300 tokens: what is left of them decays to 1e-20 of its size, over
    several segments, and is as accurate as ever."""
    call = make(2000, 2, initial=F32)
    call.A_log.zero_()
    call.dt_bias.zero_()
    call.g.fill_(-5.0)  # -0.033 a token
    call.beta.fill_(-6.0)
    call.v[:, 300:] = 0
    want = yardstick(call)
    got = on_cpu(run(call))
    assert is_split(flash_kda.last_report())
    assert float(want.out[:, -32:].abs().max()) < 1e-18 * float(want.out[:, :32].abs().max())
    assert worst_chunk(got.out, want.out) < 6e-3
    assert rms_ratio(got.final, want.final) < 3e-3


def test_a_split_of_what_grows(hopper):
    """Keys that are not normalised: what enters a segment comes out many orders larger."""
    call = make(1000, 2, initial=F32, use_qk_l2norm_in_kernel=False)
    call.A_log.zero_()
    call.dt_bias.zero_()
    call.g.fill_(-12.0)
    call.k = (2.1 * call.k / call.k.float().norm(dim=-1, keepdim=True)).to(BF16)
    call.beta.fill_(2.2)
    want = yardstick(call)
    got = on_cpu(run(call))
    assert is_split(flash_kda.last_report())
    assert float(want.final.abs().max()) > 1e6
    assert rms_ratio(got.out, want.out) < 2e-2 and rms_ratio(got.final, want.final) < 2e-2


def test_a_path_of_ones_own_choice(hopper, monkeypatch):
    """Whatever the number of chains; another path is another result, each right."""
    for chains in (1, 2 * multiprocessors()):
        call = make(70, 1, B=chains, initial=F32)
        results = {}
        for path in ("sm80", "sm90"):
            monkeypatch.setenv("FLASH_KDA_CUDA_PATH", path)
            run(call)
            note = "FLASH_KDA_CUDA_PATH: sm80" if path == "sm80" else ""
            assert last()[0].startswith(f"cuda/{path}/") and last()[1] == note
            results[path] = check(call)
        assert not same_bits(results["sm80"].out, results["sm90"].out)
        monkeypatch.setenv("FLASH_KDA_CUDA_PATH", "auto")
        got = on_cpu(run(call))
        chosen = last()[0].split("/")[1]
        assert same_bits(got.final, results[chosen].final)


@pytest.mark.parametrize("T", [1, 31, 32, 33, 64, 65, 96, 127, 128, 200, 261])
def test_pairs_of_blocks_change_no_bit(hopper, T, monkeypatch):
    """Two blocks that share a chain take the steps of one that has it alone."""
    cu = [0, 0, T // 3, T]
    call = moved(make(T, 3, cu=cu, initial=F32))
    results = []
    for path, kernel in (("sm90", "pairs"), ("sm90-forward", "forward")):
        monkeypatch.setenv("FLASH_KDA_CUDA_PATH", path)
        results.append(run(call))
        assert last()[0] == f"cuda/sm90/{kernel}_bounded"
    assert same_bits(results[0].out, results[1].out)
    assert same_bits(results[0].final, results[1].final)


def test_sm90_needs_no_workspace(hopper, monkeypatch):
    call = moved(make(300, 2, initial=F32))
    monkeypatch.setenv("FLASH_KDA_CUDA_PATH", "sm80")
    run(call)
    needed = flash_kda.last_report()["workspace_bytes"]
    assert 0 < needed <= flash_kda.get_workspace_size(300, 2)
    monkeypatch.setenv("FLASH_KDA_CUDA_PATH", "sm90")
    first = run(call)
    assert flash_kda.last_report()["workspace_bytes"] == 0
    tiny = torch.zeros(1, dtype=torch.uint8, device=call.q.device)
    assert same_bits(run(call.but(options={"workspace": tiny})).out, first.out)


def shifted(x):
    """The same values, 8 bytes further."""
    store = torch.zeros(x.numel() + 4, dtype=x.dtype, device=x.device)
    return store[4:].view(x.shape).copy_(x)


def gapped(x):
    """The same values, a head's rows 132 elements apart."""
    store = torch.zeros(*x.shape[:3], 132, dtype=x.dtype, device=x.device)
    return store[..., :128].copy_(x)


CHAINS = 300
UNFIT = {
    "softplus": (dict(lower_bound=None), {}),
    "activated": (dict(use_gate_in_kernel=False, lower_bound=None), {}),
    "V 64": (dict(V=64), {}),
    "fp32 gate": ({}, {"g": lambda g: g.float()}),
    **{f"{n} shifted": ({}, {n: shifted}) for n in "qkvg"},
    **{f"{n} gapped": ({}, {n: gapped}) for n in "qkvg"},
    **{f"one {n} for all": ({}, {n: lambda x: x[:, :1].expand(x.shape)}) for n in "qkvg"},
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_sm90_does_not_take_goes_to_sm80(hopper, kind, monkeypatch):
    sizes, changes = UNFIT[kind]
    call = make(20, 2, B=CHAINS, initial=F32, **sizes)
    if kind == "activated":
        call = call.but(A_log=None, dt_bias=None, g=-call.g.abs())
    call = moved(call)
    call = call.but(**{name: change(getattr(call, name)) for name, change in changes.items()})
    reason = reason_against_sm90(call)
    assert reason
    got = on_cpu(run(call))
    kernel, note = last()
    assert kernel.startswith("cuda/sm80/") and note.startswith(reason)
    monkeypatch.setenv("FLASH_KDA_CUDA_PATH", "sm80")
    assert same_bits(on_cpu(run(call)).out, got.out)
    monkeypatch.setenv("FLASH_KDA_CUDA_PATH", "sm90")
    with pytest.raises(NotImplementedError, match="FLASH_KDA_CUDA_PATH: sm90: " + reason):
        forced(call)


def forced(call):
    """Not on_gpu.run, which would skip the test."""
    out = torch.empty(call.v.shape, dtype=BF16, device=call.q.device)
    flash_kda.fwd(
        *(call.q, call.k, call.v, call.g, call.beta, call.scale, out),
        *(call.A_log, call.dt_bias, call.lower_bound),
        **call.options,
    )


def test_a_strided_out_goes_to_sm80(hopper, monkeypatch):
    call = moved(make(20, 2, B=CHAINS))
    monkeypatch.setenv("FLASH_KDA_CUDA_PATH", "sm90")
    plain = run(call)
    monkeypatch.delenv("FLASH_KDA_CUDA_PATH")
    out = gapped(torch.zeros_like(plain.out))
    run(call, out=out)
    assert last()[0].startswith("cuda/sm80/") and last()[1].startswith("out: stride")


def test_checkpoints_go_to_sm80(hopper):
    call = moved(make(32, 1, B=CHAINS, initial=F32))
    call.options["checkpoint_offsets"] = torch.full((CHAINS,), 16, device=call.q.device)
    run(call, checkpoints=CHAINS)
    assert last()[0].startswith("cuda/sm80/")
    assert last()[1] == f"checkpoint_state: {CHAINS} checkpoints, wanted none"


def test_a_wrong_path_is_named_and_nothing_is_written(monkeypatch):
    monkeypatch.setenv("FLASH_KDA_CUDA_PATH", "hopper")
    call = shared(20, 2)
    with pytest.raises(ERRORS, match="'hopper', wanted auto, sm80, sm90 or sm90-forward"):
        run(call)
    monkeypatch.delenv("FLASH_KDA_CUDA_PATH")
    check(call)
