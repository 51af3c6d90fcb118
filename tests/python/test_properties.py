"""Properties that hold bit by bit: repeats, threads, cuts, layouts, checkpoints, in-place states.

Every length 1..64 against the definition is case 6 in test_cases.py.
"""

import pytest
import torch
from inputs import (
    BF16,
    F32,
    assert_near,
    each_kernel,
    make,
    rms_ratio,
    run,
    same_bits,
    shared,
    uniform,
    yardstick,
)


def assert_same(a, b, what=""):
    assert same_bits(a.out, b.out), f"out differs {what}"
    assert same_bits(a.final, b.final), f"final_state differs {what}"


@each_kernel
@pytest.mark.parametrize(
    "T, H, cu", [(128, 2, None), (77, 9, None), (300, 3, [0, 1, 17, 200, 300]), (5, 1, None)]
)
def test_50_runs_give_the_same_bits(kernel, T, H, cu):
    call = shared(T, H, cu=cu, regime="random", initial=F32)
    first = run(call, kernel)
    for n in range(49):
        assert_same(first, run(call, kernel, workspace=n % 2 == 0), f"in run {n + 2}")


@each_kernel
@pytest.mark.parametrize(
    "B, T, H, HV, cu",
    [
        (1, 100, 1, 1, None),
        (1, 100, 3, 3, None),
        (2, 50, 2, 4, None),
        (1, 90, 17, 17, None),
        (1, 100, 2, 2, [0, 3, 3, 60, 100]),
        (1, 1, 2, 2, None),
    ],
)
def test_any_number_of_threads_gives_the_same_bits(kernel, B, T, H, HV, cu):
    """More threads than (sequence, head) pairs split value rows; fewer take several pairs each."""
    call = shared(T, H, B=B, HV=HV, cu=cu, initial=F32)
    one = run(call, kernel, threads=1)
    for threads in (2, 3, 4, 7, 64):
        assert_same(one, run(call, kernel, threads=threads), f"with {threads} threads")


@each_kernel
@pytest.mark.parametrize("regime", ["random", "slow", "trained"])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_every_cut_of_a_call(kernel, regime, lower_bound):
    """Cut at a multiple of 16: the same bits. Cut anywhere else: the same within the bounds."""
    T = 77
    call = shared(T, 2, regime=regime, lower_bound=lower_bound, initial=F32)
    whole, want = run(call, kernel), yardstick(call)
    for cut in range(1, T):
        first = run(call.cut(0, cut, call.initial_state), kernel)
        second = run(call.cut(cut, T, first.final), kernel)
        out = torch.cat([first.out, second.out], 1)
        if cut % 16 == 0:
            assert same_bits(out, whole.out) and same_bits(second.final, whole.final), cut
        assert_near(kernel, out, want.out)
        assert_near(kernel, second.final, want.final, "final_state")


@each_kernel
def test_a_chain_of_cuts(kernel):
    call = shared(272, 3, initial=F32)
    whole, state, outs = run(call, kernel), call.initial_state, []
    for begin, end in ((0, 16), (16, 64), (64, 80), (80, 240), (240, 272)):
        part = run(call.cut(begin, end, state), kernel)
        outs.append(part.out)
        state = part.final
    assert same_bits(torch.cat(outs, 1), whole.out) and same_bits(state, whole.final)


@each_kernel
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_sequences_do_not_know_their_neighbours(kernel, lower_bound):
    """Packed, dense or alone: a sequence's bits are its own."""
    cu = [0, 40, 41, 80, 97]
    call = shared(97, 2, cu=cu, lower_bound=lower_bound, initial=F32)
    packed = run(call, kernel)
    for n in range(4):
        alone = run(call.cut(cu[n], cu[n + 1], call.initial_state[n : n + 1]), kernel)
        assert same_bits(alone.out, packed.out[:, cu[n] : cu[n + 1]]), n
        assert same_bits(alone.final[0], packed.final[n]), n


@each_kernel
def test_heads_do_not_know_their_neighbours(kernel):
    call = shared(50, 19, initial=F32)
    together = run(call, kernel)
    for h in (0, 7, 8, 18):
        one = {n: getattr(call, n)[:, :, h : h + 1] for n in ("q", "k", "v", "g", "beta")}
        alone = run(
            call.but(
                **one,
                A_log=call.A_log[h : h + 1],
                dt_bias=call.dt_bias[h : h + 1],
                initial_state=call.initial_state[:, h : h + 1].contiguous(),
            ),
            kernel,
        )
        assert same_bits(alone.out, together.out[:, :, h : h + 1]), h
        assert same_bits(alone.final, together.final[:, h : h + 1].contiguous()), h


@each_kernel
@pytest.mark.parametrize(
    "names", [("q",), ("k",), ("v",), ("g",), ("beta",), ("q", "k", "v", "g", "beta")]
)
@pytest.mark.parametrize("gap", [1, 8, 13])
def test_strided_inputs_give_the_same_bits(kernel, names, gap):
    """Rows with gaps after each head, after each token and after each batch row; odd offsets."""
    call = shared(37, 3, B=2, initial=F32)
    views = {}
    for name in names:
        x = getattr(call, name)
        wide = torch.full([n + gap for n in x.shape], float("nan"), dtype=BF16)
        view = wide[tuple(slice(gap // 2, gap // 2 + n) for n in x.shape)]
        view.copy_(x)
        views[name] = view
    assert_same(run(call, kernel), run(call.but(**views), kernel))


@each_kernel
def test_heads_that_share_memory(kernel):
    """Inputs may be expanded: stride 0 over heads or batch rows."""
    call = shared(37, 1)
    gates = {"A_log": call.A_log.repeat(3), "dt_bias": call.dt_bias.repeat(3, 1)}
    views = {n: getattr(call, n).expand(2, 37, 3, 128) for n in "qkvg"}
    views["beta"] = call.beta.repeat(1, 1, 3).expand(2, 37, 3)  # its last stride must be 1
    copies = {n: x.contiguous() for n, x in views.items()}
    a = run(call.but(**views, **gates), kernel)
    assert_same(a, run(call.but(**copies, **gates), kernel))
    assert same_bits(a.out[1:, :, 2:], run(call, kernel).out)


@each_kernel
def test_every_checkpoint_of_a_sequence(kernel):
    call = shared(200, 2, initial=F32)
    offsets = list(range(0, 200, 16))
    got = run(
        call.but(options={"checkpoint_offsets": torch.tensor(offsets)}),
        kernel,
        checkpoints=len(offsets),
    )
    for m, tokens in enumerate(offsets):
        alone = run(call.cut(0, tokens, call.initial_state), kernel)
        assert same_bits(got.checkpoints[m], alone.final[0]), tokens


@each_kernel
def test_resume_from_a_checkpoint(kernel):
    """Prefix caching: the rest of the sequence from a checkpoint is the rest of the whole run."""
    call = shared(150, 2, initial=F32)
    whole = run(call.but(options={"checkpoint_offsets": torch.tensor([96])}), kernel, checkpoints=1)
    rest = run(call.cut(96, 150, whole.checkpoints), kernel)
    assert same_bits(rest.out, whole.out[:, 96:]) and same_bits(rest.final, whole.final)


@each_kernel
@pytest.mark.parametrize("T", [4, 70])
def test_final_state_is_optional(kernel, T):
    call = shared(T, 2, B=2, initial=F32)
    a, b = run(call, kernel), run(call, kernel, final=False)
    assert same_bits(a.out, b.out)


@each_kernel
@pytest.mark.parametrize("T", [2, 70])
def test_output_dtype_only_rounds(kernel, T):
    call = shared(T, 2, initial=F32)
    narrow, wide = run(call, kernel), run(call, kernel, out_dtype=F32, state_dtype=BF16)
    assert torch.equal(wide.out.to(BF16), narrow.out)
    assert torch.equal(narrow.final.to(BF16), wide.final)


@each_kernel
@pytest.mark.parametrize("T", [0, 2, 16, 21])
def test_rounding_to_bf16_is_to_nearest_even(kernel, T):
    """A state that nothing changes (b = 0, no decay) comes out as its fp32 bits round to bf16.

    Ties, carries into the exponent and overflow to infinity are among them."""
    call = make(T, 1, lower_bound=0.0).but(beta=torch.full((1, T, 1), -300.0))
    halves = torch.tensor([0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234], dtype=torch.int32)
    upper = torch.arange(0x0080, 0x7F80, 13, dtype=torch.int32)  # every exponent of a normal number
    numbers = ((upper[:, None] << 16) + halves).flatten()[:8192].view(F32)
    state = torch.cat([numbers, -numbers]).view(1, 1, 128, 128)
    wide = run(call.but(initial_state=state), kernel, state_dtype=F32)
    narrow = run(call.but(initial_state=state), kernel, state_dtype=BF16, finite=False)
    assert same_bits(wide.final, state)
    assert same_bits(narrow.final, state.to(BF16))


@each_kernel
@pytest.mark.parametrize("power", [-60, -20, 0, 20, 60])
def test_values_and_state_scale_exactly(kernel, power):
    """v and the state enter linearly: times 2^n in, times 2^n out, far from the limits of fp32."""
    call = shared(70, 2, dtype=F32, initial=F32)
    factor = 2.0**power
    scaled = call.but(v=call.v * factor, initial_state=call.initial_state * factor)
    a, b = run(call, kernel, out_dtype=F32), run(scaled, kernel, out_dtype=F32)
    assert rms_ratio(b.out.double() / factor, a.out) <= kernel.bound(F32)
    assert rms_ratio(b.final.double() / factor, a.final) <= kernel.bound(F32)
    assert_near(kernel, b.out, yardstick(scaled).out)


@each_kernel
@pytest.mark.parametrize("magnitude", [1e-28, 1e-10, 1e10, 1e36])
def test_magnitudes_of_values(kernel, magnitude):
    """Values whose products with 2^58 leave the range of fp32 must not turn into inf.

    Below 1e-29 products leave the normal numbers of fp32, and precision goes gradually.
    """
    call = shared(70, 2, dtype=F32, initial=F32)
    call = call.but(v=call.v * magnitude, initial_state=call.initial_state * magnitude)
    got, want = run(call, kernel, out_dtype=F32), yardstick(call)
    assert_near(kernel, got.out, want.out)
    assert_near(kernel, got.final, want.final, "final_state")


@each_kernel
@pytest.mark.parametrize("magnitude", [0.0, 1e-20, 1e-6, 1e-3, 1e3, 1e15])
def test_magnitudes_of_queries_and_keys(kernel, magnitude):
    """The norm takes any length of q and k; zero rows stay zero."""
    call = shared(70, 2, dtype=F32, initial=F32)
    call = call.but(q=call.q * magnitude, k=call.k * magnitude)
    got, want = run(call, kernel, out_dtype=F32), yardstick(call)
    assert_near(kernel, got.out, want.out)
    assert_near(kernel, got.final, want.final, "final_state")


@each_kernel
@pytest.mark.parametrize("key", [0.0, 1e-20, 1e-3, 0.3, 4.0, 100.0, 1e10])
@pytest.mark.parametrize("query", [1.0, 1e-3, 1e3])
def test_magnitudes_without_norm(kernel, key, query):
    """Rows that come without a norm and are not of length 1; b |k|^2 stays below 2."""
    call = make(40, 2, dtype=F32, initial=F32, use_qk_l2norm_in_kernel=False)
    call.options["use_beta_sigmoid_in_kernel"] = False
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (call.q, call.k))
    beta = uniform(*call.beta.shape) / max(key * key, 1.0)
    call = call.but(q=query * q, k=key * k, beta=beta)
    got, want = run(call, kernel, out_dtype=F32), yardstick(call)
    assert_near(kernel, got.out, want.out)
    assert_near(kernel, got.final, want.final, "final_state")


@each_kernel
@pytest.mark.parametrize("value", [-1e4, -300.0, -88.0, 88.0, 300.0, 1e4])
def test_extreme_gates_and_betas(kernel, value):
    for name in ("g", "beta"):
        for lower_bound in (-5.0, None):
            if name == "g" and lower_bound is None and value > 0:
                continue  # below: everything is forgotten at once
            call = shared(40, 2, dtype=F32, initial=F32, lower_bound=lower_bound)
            call = call.but(**{name: torch.full_like(getattr(call, name), value)})
            got, want = run(call, kernel), yardstick(call)
            assert_near(kernel, got.out, want.out)
            assert_near(kernel, got.final, want.final, "final_state")


@each_kernel
def test_softplus_that_forgets_everything(kernel):
    call = shared(40, 2, dtype=F32, initial=F32, lower_bound=None)
    call = call.but(g=torch.full_like(call.g, 1e4))
    got, want = run(call, kernel), yardstick(call)
    assert_near(kernel, got.out, want.out)
    assert_near(kernel, got.final, want.final, "final_state")


@each_kernel
def test_precision_and_isa_are_read_at_every_call(kernel):
    """The choice is the call's, not the process's: alternating kernels changes nothing."""
    call = shared(40, 2, initial=F32)
    first = run(call, kernel)
    run(call, None)
    assert_same(first, run(call, kernel))
