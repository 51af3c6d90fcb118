"""flash-linear-attention by itself, on CPU tensors, runs on our kernels, and proves it.

Every call here is counted by a wrapper around flash_kda.fwd and confirmed by the library's own
report, because FLA falls back to Triton without an error: a test that only compared numbers could
pass without us. Without a GPU that fall-back raises, which the tests of rejections use.
"""

import contextlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fla", reason="flash-linear-attention (fla-core) is not installed")

import fla_driver
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_recurrent_kda
from fla_driver import make_inputs, ratio, reference, run, run_elsewhere

import flash_kda

ACCEPTED = "[FLA Backend] fla.ops.kda.chunk.chunk_kda -> flash_kda"
BOUND = 0.006  # FLA's own acceptance: RMS(error) / RMS(reference)
SMALL = {"B": 1, "T": 40, "H": 2}

DENSE = [
    (1, 1024, 4),
    pytest.param((2, 2048, 8), marks=pytest.mark.slow),
    pytest.param((1, 4096, 16), marks=pytest.mark.slow),
]
VARLEN = [
    ([0, 256, 500, 1000], 4),
    ([0, 100, 300, 1200, 2000], 8),
    pytest.param(([0, 101, 303, 1205, 3007, 4096], 16), marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def quiet_surroundings(monkeypatch):
    """None of FLA's switches, and one thread for the thousands of small steps of its naive loop."""
    monkeypatch.delenv("FLA_FLASH_KDA", raising=False)
    monkeypatch.setenv("FLASH_KDA_FLA", "0")  # should another test have imported flash_kda.fla
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_ours(result):
    assert result["error"] is None
    assert result["calls"] == ["fwd"]
    assert result["kernel"].startswith("cpu/") and "prefill" in result["kernel"]
    assert ACCEPTED in result["log"]


def assert_rejected(result, reason):
    """Not ours, and for that reason. What Triton then does on this machine is not our concern."""
    assert result["calls"] == [] and result["kernel"] is None
    assert ACCEPTED not in result["log"]
    assert any(f"flash_kda rejected: {reason}" in line for line in result["log"]), result["log"]


def naive(inputs, lower_bound=-5.0):
    """FLA's own plain-PyTorch recurrence, sequence by sequence; states with value rows first."""
    q, k, v, g, beta = (inputs[name].float() for name in ("q", "k", "v", "g", "beta"))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    if lower_bound is None:
        g = naive_kda_gate(g, inputs["A_log"], inputs["dt_bias"])
    else:
        g = naive_kda_lowerbound_gate(g, inputs["A_log"], inputs["dt_bias"], lower_bound)
    beta = beta.sigmoid()
    state = inputs["initial_state"].transpose(-1, -2)
    cu = inputs["cu_seqlens"]
    if cu is None:
        out, final = naive_recurrent_kda(q, k, v, g, beta, None, state, True)
        return out, final.transpose(-1, -2)
    outs, finals = [], []
    for n in range(len(cu) - 1):
        piece = slice(int(cu[n]), int(cu[n + 1]))
        parts = (x[:, piece] for x in (q, k, v, g, beta))
        out, final = naive_recurrent_kda(*parts, None, state[n : n + 1], True)
        outs.append(out)
        finals.append(final.transpose(-1, -2))
    return torch.cat(outs, 1), torch.cat(finals)


def check_accuracy(inputs, **call):
    result = run(inputs, state_v_first=True, **call)
    assert_ours(result)
    wanted = {"float64": reference(inputs)}
    if inputs["beta"].numel() <= 16384:  # a loop over tokens in Python
        wanted["FLA naive"] = naive(inputs)
    for name, (out, final) in wanted.items():
        assert ratio(result["out"], out) < BOUND, name
        assert ratio(result["final"], final) < BOUND, name


@pytest.mark.parametrize("shape", DENSE, ids=str)
def test_acceptance_dense(shape):
    check_accuracy(make_inputs(*shape))


@pytest.mark.parametrize("case", VARLEN, ids=lambda case: f"{case[0]}x{case[1]}")
def test_acceptance_varlen(case):
    offsets, heads = case
    check_accuracy(make_inputs(1, offsets[-1], heads, offsets))


def test_int32_offsets_and_no_state():
    inputs = make_inputs(1, 48, 2, [0, 17, 48])
    inputs["cu_seqlens"] = inputs["cu_seqlens"].int()
    check_accuracy(inputs)
    without = dict(inputs, initial_state=None)
    result = run(without, state_v_first=True)
    assert_ours(result)
    zero = dict(inputs, initial_state=torch.zeros_like(inputs["initial_state"]))
    assert torch.equal(result["out"], run(zero, state_v_first=True)["out"])


def test_no_final_state_wanted():
    inputs = make_inputs(**SMALL)
    result = run(inputs, state_v_first=True, output_final_state=False)
    assert_ours(result)
    assert result["final"] is None
    assert ratio(result["out"], reference(inputs)[0]) < BOUND


def test_inputs_of_other_dtypes_that_fla_lets_through():
    """FLA checks the dtype of q only."""
    inputs = make_inputs(**SMALL)
    wide = dict(inputs, **{name: inputs[name].float() for name in ("k", "v", "g", "beta")})
    result = run(wide, state_v_first=True)
    assert_ours(result)
    assert result["out"].dtype == torch.float32
    assert ratio(result["out"], reference(wide)[0]) < 1e-5


def test_out_inherits_the_strides_of_v():
    """FLA allocates out as empty_like(v)."""
    inputs = make_inputs(**SMALL)
    expected = run(inputs, state_v_first=True)["out"]
    inputs["v"] = inputs["v"].transpose(1, 2).contiguous().transpose(1, 2)
    assert not inputs["v"].is_contiguous()
    result = run(inputs, state_v_first=True)
    assert_ours(result)
    assert torch.equal(result["out"], expected)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"state_v_first": False}, "FlashKDA requires state_v_first=True"),
        ({"safe_gate": False}, "FlashKDA requires safe_gate=True"),
        ({"use_gate_in_kernel": False}, "FlashKDA requires use_gate_in_kernel=True"),
        ({"use_qk_l2norm_in_kernel": False}, "FlashKDA requires use_qk_l2norm_in_kernel=True"),
        ({"use_beta_sigmoid_in_kernel": False}, "FlashKDA requires use_beta_sigmoid_in_kernel"),
        ({"allow_neg_eigval": True}, "FlashKDA requires allow_neg_eigval=False"),
        ({"return_intermediate_states": True}, "FlashKDA does not support return_intermediate"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_rejection_by_option(change, reason):
    assert_rejected(run(make_inputs(**SMALL), **{"state_v_first": True, **change}), reason)


def test_rejection_by_tensor():
    inputs = make_inputs(**SMALL)
    for change, reason in [
        ({"A_log": None}, "FlashKDA requires A_log and dt_bias tensors"),
        ({"dt_bias": None}, "FlashKDA requires A_log and dt_bias tensors"),
        ({"q": inputs["q"].half()}, "FlashKDA requires bfloat16, got torch.float16"),
        ({"q": inputs["q"][..., :64]}, "FlashKDA requires K=128, got 64"),
        ({"v": inputs["v"][..., :64]}, "FlashKDA requires V=128, got 64"),
        ({"v": inputs["v"].repeat(1, 1, 2, 1)}, "FlashKDA does not support GVA (HV=4 != H=2)"),
    ]:
        assert_rejected(run({**inputs, **change}, state_v_first=True), reason)


def test_rejection_with_gradients():
    from fla.ops.kda import chunk_kda

    before = flash_kda.last_report()
    with torch.enable_grad(), contextlib.suppress(Exception):  # Triton has no CPU
        chunk_kda(**make_inputs(**SMALL), **fla_driver.FLAGS, state_v_first=True)
    assert flash_kda.last_report() == before


def test_old_name_of_the_state_layout_misses_us():
    """Documented behaviour of FLA 0.6.0: it dispatches before it renames the old argument, so the
    call goes to Triton, and nothing but the log line tells."""
    result = run(make_inputs(**SMALL), transpose_state_layout=True)
    assert_rejected(result, "FlashKDA requires state_v_first=True")


def test_opt_out_of_our_backend(monkeypatch):
    monkeypatch.setenv("FLA_FLASH_KDA", "0")
    result = run(make_inputs(**SMALL), state_v_first=True)
    assert result["calls"] == [] and result["kernel"] is None
    assert not any("flash_kda" in line for line in result["log"])


def test_opt_out_of_all_dispatch():
    """Read once, when FLA is imported."""
    result = run_elsewhere(
        {**SMALL, "call": {"state_v_first": True}}, FLA_DISABLE_BACKEND_DISPATCH="1"
    )
    assert result["calls"] == [] and result["kernel"] is None and result["log"] == []


# What each release makes of the two names of the same option: the log line, and whether we run.
OLD_RELEASES = {
    "0.5.0": {
        "transpose_state_layout": ("kda.chunk_kda -> flashkda", True),
        "state_v_first": ("flashkda rejected: FlashKDA requires transpose_state_layout", False),
    },
    "0.5.2": {
        "state_v_first": ("kda.chunk_kda -> flash_kda", True),
        "transpose_state_layout": ("flash_kda rejected: FlashKDA requires state_v_first", False),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("option", ["state_v_first", "transpose_state_layout"])
@pytest.mark.parametrize("release", OLD_RELEASES)
def test_older_releases(release, option, install):
    """They want an older Triton than the current release does, hence other processes."""
    path = [install(f"fla-core=={release}"), install("triton==3.5.1")]
    result = run_elsewhere({**SMALL, "call": {option: True}}, path)
    assert (result["fla-core"], result["triton"]) == (release, "3.5.1")
    line, ours = OLD_RELEASES[release][option]
    assert any(line in text for text in result["log"]), result["log"]
    if ours:
        assert result["error"] is None and result["calls"] == ["fwd"]
        assert result["kernel"].startswith("cpu/")
        assert result["ratio_out"] < BOUND and result["ratio_final"] < BOUND
    else:
        assert result["calls"] == [] and result["kernel"] is None


@pytest.mark.parametrize("beta", [-8.0, 0.0, 8.0])
def test_negative_eigenvalues_mean_what_fla_means(beta):
    """FLA: beta = 2 sigmoid(logit). One token, no decay: S = b v k^T, so b can be read off."""
    q = torch.ones(1, 1, 1, 128)
    final = torch.empty(1, 1, 128, 128)
    flash_kda.fwd(
        q,
        q,
        q,
        torch.zeros_like(q),
        torch.full((1, 1, 1), beta),
        1.0,
        torch.empty_like(q),
        None,
        None,
        0,
        final_state=final,
        allow_neg_eigval=True,
    )
    key = 1 / (128 + 1e-6) ** 0.5
    torch.testing.assert_close(
        final, torch.full_like(final, 2 * key).mul(torch.tensor(beta).sigmoid())
    )
