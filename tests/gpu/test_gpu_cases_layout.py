"""Cases 14 to 20, 33, 37, 39 and 49 from public reports, by number, on CUDA tensors: layouts,
dtypes, sizes, memory, and which kernel ran."""

import re

import pytest
import torch
from inputs import BF16, F32, bits, make, same_bits, shared
from on_gpu import ERRORS, check, equal, moved, on_cpu, on_device, run

import flash_kda

pytestmark = pytest.mark.usefixtures("path")

# ---- 14, 15, 16, 18, 20: layouts and dtypes ------------------------------------------------------


@pytest.mark.parametrize("cu", [[0, 17, 48], [0, 0, 1, 48]])
def test_case_14_int32_cu_seqlens(cu):
    wide = make(48, 2, cu=cu, initial=F32)
    check(wide)
    assert equal(run(wide), run(wide.but(cu_seqlens=wide.cu_seqlens.to(torch.int32))))


def test_case_14_strided_cu_seqlens():
    call = moved(make(48, 2, cu=[0, 17, 48], initial=F32))
    store = torch.full((3, 2), 7, device=call.q.device)
    store[:, 1] = call.cu_seqlens
    assert equal(run(call), run(call.but(cu_seqlens=store[:, 1])))


@pytest.mark.parametrize("B, T, cu", [(2, 35, None), (1, 37, [0, 17, 37])])
def test_case_15_strided_beta(B, T, cu):
    call = moved(shared(T, 4, B=B, cu=cu, initial=F32))
    store = torch.full((B, T, 7), float("nan"), dtype=BF16, device=call.q.device)
    store[..., 2:6] = call.beta
    assert equal(run(call), run(call.but(beta=store[..., 2:6])))


def fused(call, order):
    """q, k, v, g as views of one tensor: as after one projection of all of them."""
    parts = [getattr(call, n) for n in "qkvg"]
    if order == "unbind":
        views = torch.stack(parts, 2).unbind(2)
    elif order == "channels":
        views = torch.cat(parts, -1).split(128, -1)
    elif order == "heads first":
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    else:  # rows of odd length at an odd element: no wide access is aligned
        views = []
        for x in parts:
            store = torch.zeros(*x.shape[:3], 133, dtype=x.dtype, device=x.device)
            store[..., 3:131] = x
            views.append(store[..., 3:131])
    assert not views[0].is_contiguous()
    return call.but(**dict(zip("qkvg", views)))


@pytest.mark.parametrize("order", ["unbind", "channels", "heads first", "odd"])
@pytest.mark.parametrize("B, T, cu", [(2, 35, None), (1, 70, [0, 17, 70])])
def test_case_16_views_of_a_fused_projection(order, B, T, cu):
    call = moved(shared(T, 3, B=B, cu=cu, initial=F32))
    views = fused(call, order)
    plain = run(call)
    assert equal(plain, run(views))
    size = views.v.untyped_storage().nbytes() // 2
    store = on_device(size, dtype=BF16)
    out = store.as_strided(views.v.shape, views.v.stride(), views.v.storage_offset())
    assert same_bits(run(views, out=out).out.contiguous(), plain.out)
    out.copy_(on_device(*out.shape, dtype=BF16))
    assert (bits(store) == -1).all(), "written between the rows of a strided out"


@pytest.mark.parametrize("state", [BF16, F32])
def test_case_16_strided_states(state):
    """Pools that are views of larger ones: heads apart, slots apart."""
    call = moved(make(48, 2, cu=[0, 17, 48], initial=state))
    plain = run(call, state_dtype=state)
    stores = [on_device(2, 3, 2, 128, 128, dtype=state) for _ in range(2)]
    initial, final = stores[0][:, 1], stores[1][:, 1]
    initial.copy_(call.initial_state)
    got = run(call.but(initial_state=initial), final=final)
    assert same_bits(got.out, plain.out) and same_bits(final, plain.final)
    assert all((bits(store[:, [0, 2]]) == -1).all() for store in stores)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.float16, F32])
def test_case_18_other_dtypes_are_refused(name, dtype):
    call = shared(20, 2)
    with pytest.raises(ERRORS, match=rf"\b{name}\b"):
        run(call.but(**{name: getattr(call, name).to(dtype)}))


@pytest.mark.parametrize("T", [1, 33])
@pytest.mark.parametrize("i, j", [(0, 127), (5, 64), (127, 3)])
def test_case_20_value_rows_come_first(T, i, j):
    """State e_i e_j^T, nothing written, no decay: a query e_j reads value channel i."""
    call = make(T, 1, lower_bound=0.0)
    call = call.but(
        q=torch.zeros_like(call.q),
        v=torch.zeros_like(call.v),
        scale=1.0,
        beta=torch.full_like(call.beta, -300.0),
    )
    call.q[..., j] = 1.0
    call.initial_state = torch.zeros(call.state_shape())
    call.initial_state[0, 0, i, j] = 1.0
    got = on_cpu(run(call))
    want = torch.zeros(128)
    want[i] = 1.0
    assert (got.out.float() - want.expand(1, T, 1, 128)).abs().max() <= 2.0**-7
    assert torch.equal(got.out.float()[..., want == 0], torch.zeros(1, T, 1, 127))
    assert torch.equal(got.final, call.initial_state)


# ---- 33, 39: memory ------------------------------------------------------------------------------


def test_case_33_stale_memory():
    """Poisoned outputs and workspace, 100 times, at the benchmarks' size."""
    call = moved(make(16384, 96, regime="random"))
    first = run(call, workspace=True)
    for _ in range(100):
        assert equal(first, run(call, workspace=True))


def test_case_33_larger_unaligned_workspace():
    call = moved(shared(100, 3, initial=F32))
    size = flash_kda.get_workspace_size(100, 3)
    first = run(call)
    for offset in (0, 1, 7, 64, 128):
        store = torch.full((size + 4099,), 255, dtype=torch.uint8, device=call.q.device)
        again = run(call.but(options={"workspace": store[offset : offset + size]}))
        assert equal(first, again)
        assert (store[:offset] == 255).all() and (store[offset + size :] == 255).all()


def test_case_39_inputs_are_not_modified():
    """`run` compares every input of every test before and after; here with all of them present."""
    call = make(64, 2, cu=[0, 17, 48], initial=F32)
    call.options["state_indices"] = torch.tensor([1, 0])
    call.options["checkpoint_offsets"] = torch.tensor([16, 16])
    assert len(call.tensors()) == 11
    run(call, checkpoints=2, workspace=True)


# ---- 37: other sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize("K, V", [(64, 64), (64, 128), (256, 256), (96, 96), (128, 100), (128, 8)])
def test_case_37_other_head_sizes_are_refused(K, V):
    with pytest.raises(ERRORS, match=r"head size [KV] = \d+, wanted"):
        run(shared(40, 2, K=K, V=V, initial=F32))


# ---- 49: the wrong kernel measured ---------------------------------------------------------------


@pytest.mark.parametrize("lower_bound, gate", [(-5.0, "bounded"), (None, "softplus")])
def test_case_49_the_kernel_that_ran_is_named(lower_bound, gate):
    run(make(70, 2, lower_bound=lower_bound))
    report = flash_kda.last_report()
    assert re.fullmatch(rf"cuda/\w+/.*{gate}.*", report["kernel"]), report
    assert report["num_tokens"] == 70
    run(make(70, 2, cu=[0, 20, 70]))
    assert flash_kda.last_report()["num_tokens"] == -1  # only the device knows
