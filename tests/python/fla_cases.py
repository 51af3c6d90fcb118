"""What flash_kda.fla makes of flash-linear-attention's calls: the same tests for CPU and CUDA.

test_fla_backend.py and tests/gpu/test_gpu_fla_backend.py import everything here and say with the
fixture `device` where the tensors live. Every accepted call is counted at flash_kda.fwd or decode
and confirmed by the library's own report; outputs and states are compared with the float64
definition and, in test_naive, with FLA's own recurrence in PyTorch.
"""

import importlib

import pytest
import torch
from fla_driver import make_inputs, ratio, reference, run

import flash_kda

CHUNK = "[FLA Backend] fla.ops.kda.chunk.chunk_kda -> "
RECURRENT = "[FLA Backend] kda.fused_recurrent_kda_fwd -> "
V_FIRST = {"state_v_first": True}
K_FIRST = {"state_v_first": False}
SOFTPLUS = {"lower_bound": None, "safe_gate": False}


@pytest.fixture(scope="session")
def backend():
    """flash_kda.fla, imported as late as this so that other tests can see FLA without it."""
    import flash_kda.fla

    return flash_kda.fla


class NotOurs:
    """In place of FLA's own kernels, which would take minutes to tune or, on a CPU, not run."""

    @staticmethod
    def apply(*args):
        raise RuntimeError("this is where FLA's own kernels begin")

    def __getitem__(self, grid):
        self.apply()


@pytest.fixture(autouse=True)
def surroundings(backend, monkeypatch):
    chunk = importlib.import_module("fla.ops.kda.chunk")
    recurrent = importlib.import_module("fla.ops.kda.fused_recurrent")
    monkeypatch.setattr(chunk, "ChunkKDAFunction", NotOurs)
    monkeypatch.setattr(recurrent, "fused_recurrent_kda_fwd_kernel", NotOurs())
    for name in ("FLA_FLASH_KDA", "FLASH_KDA_FLA"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for the thousands of small steps of FLA's naive loop
    yield
    torch.set_num_threads(threads)


# ---- Calls and what is wanted of them ------------------------------------------------------------


def moved(inputs, device):
    return {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}


def k_first(state):
    return state.transpose(-1, -2).contiguous()


def bounds(kernel):
    """Largest RMS(error) / RMS(reference) of a bf16 out and of an fp32 state."""
    if kernel.startswith("cuda/") and "decode" not in kernel:
        return 0.006, 0.006  # FLA's own acceptance
    return 2.5e-3, 1e-5  # fp32 arithmetic


def assert_ours(result, device, called, log):
    """It ran once, on our kernel, and FLA says so in a single line."""
    assert result["error"] is None
    assert result["calls"] == [called]
    assert result["kernel"].startswith(f"{device}/"), result["kernel"]
    assert result["log"] == [log + "flash_kda"]


def assert_near(result, out, final=None):
    out_bound, state_bound = bounds(result["kernel"])
    assert ratio(result["out"], out) < out_bound
    if final is None:
        assert result["final"] is None
    else:
        assert result["final"].is_contiguous()
        assert ratio(result["final"], final) < state_bound


def check(inputs, device, called="fwd", function="chunk_kda", **call):
    """The call against the definition; inputs have states [V, K], `call` says what FLA gets."""
    flags = {n: call[n] for n in FLAGS_OF_THE_DEFINITION if n in call}
    known = inputs
    if call.get("use_gate_in_kernel") is False:
        known = {**inputs, "A_log": None, "dt_bias": None}
    out, final = reference(known, **flags)
    sent = moved(inputs, device)
    if not (call.get("state_v_first") or call.get("transpose_state_layout")):
        final = k_first(final)
        if sent["initial_state"] is not None:
            sent["initial_state"] = k_first(sent["initial_state"])
    before = {n: x.clone() for n, x in sent.items() if isinstance(x, torch.Tensor)}
    result = run(sent, function, **call)
    log = CHUNK if function == "chunk_kda" else RECURRENT
    assert_ours(result, device, called, log)
    assert_near(result, out, final if call.get("output_final_state", True) else None)
    assert all(torch.equal(sent[n], x) for n, x in before.items()), "an input was written"
    return result


FLAGS_OF_THE_DEFINITION = [
    "lower_bound",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
]


def small(T=40, cu=None, **how):
    return make_inputs(1 if cu else 2, T, 2, cu, **how)


def unit_rows(x):
    x = x.float()
    return (x / x.norm(dim=-1, keepdim=True)).bfloat16()


# What FLA's own check turns away and we take: the inputs changed, and the options.
WIDER = {
    "softplus": ({}, SOFTPLUS),
    "lower_bound_without_safe_gate": ({}, {"safe_gate": False}),
    "shallow_bound": ({}, {"lower_bound": -0.5}),
    "gate_before": (
        {"g": lambda x: -x["g"].float().exp().bfloat16()},
        {"use_gate_in_kernel": False, "lower_bound": None},
    ),
    "gate_before_with_a_bound": (
        {"g": lambda x: -x["g"].float().sigmoid().bfloat16()},
        {"use_gate_in_kernel": False},
    ),
    "beta_before": (
        {"beta": lambda x: x["beta"].float().sigmoid().bfloat16()},
        {"use_beta_sigmoid_in_kernel": False},
    ),
    "doubled_beta": ({}, {"allow_neg_eigval": True}),
    "normalised_before": (
        {"q": lambda x: unit_rows(x["q"]), "k": lambda x: unit_rows(x["k"])},
        {"use_qk_l2norm_in_kernel": False},
    ),
    "no_A_log": ({"A_log": lambda x: None}, {}),
    "no_dt_bias": ({"dt_bias": lambda x: None}, {}),
    "softplus_without_dt_bias": ({"dt_bias": lambda x: None}, SOFTPLUS),
    "neither": ({"A_log": lambda x: None, "dt_bias": lambda x: None}, {}),
    "float32_g_and_beta": (
        {"g": lambda x: x["g"].float(), "beta": lambda x: x["beta"].float()},
        {},
    ),
    "no_initial_state": ({"initial_state": lambda x: None}, {}),
    "no_final_state": ({}, {"output_final_state": False}),
}
each_wider = pytest.mark.parametrize("case", WIDER)
each_layout = pytest.mark.parametrize(
    "layout",
    [V_FIRST, K_FIRST, {"transpose_state_layout": True}, {"transpose_state_layout": False}],
    ids=["v_first", "k_first", "old_name", "old_name_k_first"],
)


def widened(case, inputs):
    changes, options = WIDER[case]
    return {**inputs, **{n: change(inputs) for n, change in changes.items()}}, options


# ---- chunk_kda -----------------------------------------------------------------------------------


@each_wider
def test_chunk(case, device):
    inputs, options = widened(case, small())
    check(inputs, device, **V_FIRST, **options)


@each_layout
@pytest.mark.parametrize("V", [128, 64])
def test_chunk_layouts(layout, V, device):
    """With V 64 a state in the wrong layout has the wrong shape, with 128 the wrong numbers."""
    check(small(V=V), device, **layout)


@each_layout
def test_chunk_sequences_and_groups(layout, device):
    inputs = small(100, [0, 17, 17, 48, 100], HV=6)
    check(inputs, device, **layout)
    inputs["cu_seqlens"] = inputs["cu_seqlens"].int()
    check(inputs, device, **layout, **SOFTPLUS)


@pytest.mark.parametrize("shape", [(1, 1024, 4), (2, 300, 8)], ids=str)
@pytest.mark.parametrize("options", [{}, SOFTPLUS], ids=["bounded", "softplus"])
def test_chunk_larger(shape, options, device):
    check(make_inputs(*shape), device, **V_FIRST, **options)


def test_chunk_by_position(device):
    """The order of FLA's parameters is FLA's."""
    inputs = small()
    out, final = reference(inputs)
    sent = moved(inputs, device)
    first = [sent.pop(n) for n in ("q", "k", "v", "g", "beta")]
    result = run(sent, args=(*first, 0.5), **V_FIRST)
    assert_ours(result, device, "fwd", CHUNK)
    assert_near(result, out * (0.5 * 128**0.5), final)


def test_chunk_parameters_in_other_shapes(device):
    """A_log and dt_bias as layers keep them, in the dtype of the model."""
    inputs = small()
    for name in ("A_log", "dt_bias"):
        inputs[name] = inputs[name].bfloat16().float()
    out, final = reference(inputs)
    sent = moved(inputs, device)
    sent["A_log"] = sent["A_log"].view(1, 1, -1, 1).bfloat16()
    sent["dt_bias"] = sent["dt_bias"].view(2, 128).bfloat16()
    result = run(sent, **V_FIRST)
    assert_ours(result, device, "fwd", CHUNK)
    assert_near(result, out, final)


def test_chunk_strided(device):
    """Views, with and without a last stride of 1."""
    inputs = small()
    expected = check(inputs, device, **V_FIRST)
    sent = moved(inputs, device)
    sent["q"] = sent["q"].mT.contiguous().mT
    sent["v"] = sent["v"].transpose(1, 2).contiguous().transpose(1, 2)
    sent["g"] = torch.stack([sent["g"], sent["g"]], 2)[:, :, 1]
    assert sent["q"].stride(-1) != 1 and not sent["g"].is_contiguous()
    result = run(sent, **V_FIRST)
    assert_ours(result, device, "fwd", CHUNK)
    assert torch.equal(result["out"], expected["out"])
    assert torch.equal(result["final"], expected["final"])


def test_chunk_padded_for_a_graph(device):
    """use_graph: cu_seqlens ends in empty sequences; their final states are their initial ones."""
    inputs = small(64, [0, 17, 48, 48, 48])
    out, final = reference(inputs)
    result = run(moved(inputs, device), use_graph=True, max_num_seqs=4, **V_FIRST)
    assert_ours(result, device, "fwd", CHUNK)
    assert_near({**result, "out": result["out"][:, :48]}, out[:, :48], final)
    assert torch.equal(result["final"][2:].cpu(), inputs["initial_state"][2:])


def test_chunk_keeps_the_dtype_of_q(device):
    result = run(moved(small(), device), **V_FIRST)
    assert result["out"].dtype == torch.bfloat16 and result["final"].dtype == torch.float32


# ---- fused_recurrent_kda -------------------------------------------------------------------------


def ours_for(device, T):
    """Which of ours serves calls that do not work in place: on CUDA decode where it can."""
    return "decode" if device == "cuda" and T <= 16 else "fwd"


@each_wider
@pytest.mark.parametrize("T", [1, 16])
def test_recurrent(case, T, device):
    inputs, options = widened(case, small(T))
    check(inputs, device, ours_for(device, T), "fused_recurrent_kda", **V_FIRST, **options)


@each_layout
@pytest.mark.parametrize("V", [128, 64])
@pytest.mark.parametrize("T", [3, 17])
def test_recurrent_layouts(layout, V, T, device):
    options = {"function": "fused_recurrent_kda_fwd", "inplace_final_state": False}
    if "transpose_state_layout" in layout:  # renamed before the dispatcher looks
        options = {"function": "fused_recurrent_kda"}
    check(small(T, V=V), device, ours_for(device, T), **options, **layout)


@pytest.mark.parametrize("cu", [[0, 1, 2, 3], [0, 4, 4, 7, 16]], ids=str)
def test_recurrent_sequences(cu, device):
    inputs = small(cu[-1], cu, HV=4)
    check(inputs, device, ours_for(device, 16), "fused_recurrent_kda", **V_FIRST)


@pytest.mark.parametrize("cu", [list(range(41)), [0, 20, 40]], ids=["one each", "twenty each"])
@pytest.mark.parametrize("layout", [V_FIRST, K_FIRST], ids=["v_first", "k_first"])
def test_recurrent_many_sequences(cu, layout, device):
    """On CUDA nobody waits for cu_seqlens to learn that each has one token: that is fwd."""
    inputs = small(40, cu)
    check(inputs, device, "fwd", "fused_recurrent_kda", **layout)
    out, final = reference(inputs)
    sent = moved(inputs, device)
    if layout is K_FIRST:
        final, sent["initial_state"] = k_first(final), k_first(sent["initial_state"])
    result = run(sent, "fused_recurrent_kda_fwd", inplace_final_state=True, **layout)
    called = "decode" if device == "cpu" and len(cu) == 41 else "fwd"
    assert_ours(result, device, called, RECURRENT)
    assert_near(result, out, final)


@pytest.mark.parametrize("layout", [V_FIRST, K_FIRST], ids=["v_first", "k_first"])
@pytest.mark.parametrize("T, called", [(2, "decode"), (20, "fwd")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recurrent_in_place(layout, T, called, dtype, device):
    inputs = small(T)
    inputs["initial_state"] = inputs["initial_state"].to(dtype)
    out, final = reference(inputs)
    sent = moved(inputs, device)
    if layout is K_FIRST:
        final, sent["initial_state"] = k_first(final), k_first(sent["initial_state"])
    result = run(sent, "fused_recurrent_kda_fwd", inplace_final_state=True, **layout)
    assert_ours(result, device, called, RECURRENT)
    assert result["final"] is sent["initial_state"]
    out_bound, state_bound = bounds(result["kernel"])
    assert ratio(result["out"], out) < out_bound
    assert ratio(result["final"], final) < (state_bound if dtype == torch.float32 else 0.006)


def test_recurrent_into_out(device):
    inputs = small(2)
    sent = moved(inputs, device)
    sent["out"] = torch.full_like(sent["v"], torch.nan)
    result = run(sent, "fused_recurrent_kda_fwd", inplace_final_state=False, **V_FIRST)
    assert_ours(result, device, ours_for(device, 2), RECURRENT)
    assert result["out"] is sent["out"]
    assert_near(result, *reference(inputs))


def test_recurrent_float32(device):
    inputs = {n: x.float() if n in "qkvg" or n == "beta" else x for n, x in small(4).items()}
    result = run(moved(inputs, device), "fused_recurrent_kda", **V_FIRST)
    assert_ours(result, device, ours_for(device, 4), RECURRENT)
    out, final = reference(inputs)
    assert result["out"].dtype == torch.float32
    assert ratio(result["out"], out) < 1e-5 and ratio(result["final"], final) < 1e-5
    inputs = {n: x.float() if n in "qkv" else x for n, x in small(20).items()}
    result = run(moved(inputs, device), "fused_recurrent_kda", **V_FIRST)
    if device == "cpu":
        assert_ours(result, device, "fwd", RECURRENT)
    else:
        assert_left(result, "q is torch.float32, wanted bfloat16 on cuda", RECURRENT)


def test_recurrent_rows_of_no_sequence_are_zero(device):
    inputs = small(12, [0, 3, 5])
    result = run(moved(inputs, device), "fused_recurrent_kda", **V_FIRST)
    assert_ours(result, device, ours_for(device, 12), RECURRENT)
    out, final = reference(inputs)
    assert_near({**result, "out": result["out"][:, :5]}, out[:, :5], final)
    assert not result["out"][:, 5:].any()


# ---- fused_recurrent_kda_fwd on a pool -----------------------------------------------------------

SLOTS = 12


def pooled(N, T, indices, device, packed=False, dtype=torch.float32):
    """-> the pool, inputs for FLA, and a function that walks sequence n from a state."""
    inputs = make_inputs(N, T, 2, seed=3)
    generator = torch.Generator().manual_seed(4)
    pool = torch.randn(SLOTS, 2, 128, 128, generator=generator).to(dtype)

    def walk(n, t, state):
        """out and state after token t of sequence n."""
        one = {name: inputs[name][n : n + 1, t : t + 1] for name in ("q", "k", "v", "g", "beta")}
        one.update(A_log=inputs["A_log"], dt_bias=inputs["dt_bias"], cu_seqlens=None)
        return reference({**one, "initial_state": state[None]})

    sent = {**inputs, "initial_state": pool.clone(), "ssm_state_indices": torch.tensor(indices)}
    if packed:
        for name in ("q", "k", "v", "g", "beta"):
            sent[name] = sent[name].flatten(0, 1)[None]
        sent["cu_seqlens"] = torch.arange(0, N * T + 1, T)
    return pool, moved(sent, device), walk


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_pool_of_one_token_each(packed, dtype, kind, device):
    indices = [7, -1, 0, 11]
    pool, sent, walk = pooled(4, 1, indices, device, packed, dtype)
    sent["ssm_state_indices"] = sent["ssm_state_indices"].to(kind)
    result = run(sent, "fused_recurrent_kda_fwd", **V_FIRST)
    assert_ours(result, device, "decode", RECURRENT)
    assert result["final"] is sent["initial_state"]
    wanted = pool.double()
    out = torch.zeros(4, 1, 2, 128, dtype=torch.float64)
    for n, slot in enumerate(indices):
        if slot >= 0:  # -1 is padding: FLA's kernel would read outside the pool
            out[n : n + 1], wanted[slot : slot + 1] = walk(n, 0, pool[slot])
    out_bound, state_bound = bounds(result["kernel"])
    assert ratio(result["out"].reshape(out.shape), out) < out_bound
    got = result["final"].cpu()
    assert ratio(got, wanted) < (state_bound if dtype == torch.float32 else 0.003)
    others = [slot for slot in range(SLOTS) if slot not in indices]
    assert torch.equal(got[others], pool[others])


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("accepted", [[1, 3, 2], None], ids=["accepted", "first"])
def test_pool_of_draft_tokens(packed, accepted, device):
    """The state is read where the last accepted token left it, and every token leaves its own."""
    indices = [[3, 9, 1], [10, 0, 4], [5, 6, 2]]
    pool, sent, walk = pooled(3, 3, indices, device, packed)
    if accepted:
        sent["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int32, device=device)
    result = run(sent, "fused_recurrent_kda_fwd", **V_FIRST)
    assert_ours(result, device, "decode", RECURRENT)
    wanted = pool.double()
    out = torch.zeros(3, 3, 2, 128, dtype=torch.float64)
    for n, slots in enumerate(indices):
        state = pool[slots[accepted[n] - 1 if accepted else 0]].double()
        for t, slot in enumerate(slots):
            out[n : n + 1, t : t + 1], state = (x.clone() for x in walk(n, t, state))
            state = wanted[slot] = state[0]
    result["out"] = result["out"].reshape(out.shape)
    assert_near(result, out, wanted)


# ---- FLA's own recurrence ------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
def test_naive(function, lower_bound, device):
    """The same numbers as FLA's recurrence in PyTorch, with grouped heads and doubled beta."""
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    inputs = small(12, HV=4)
    q, k, v, g, beta = (inputs[name].float() for name in ("q", "k", "v", "g", "beta"))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    parameters = inputs["A_log"], inputs["dt_bias"]
    if lower_bound is None:
        g = naive_kda_gate(g, *parameters)
    else:
        g = naive_kda_lowerbound_gate(g, *parameters, lower_bound)
    state = k_first(inputs["initial_state"])
    out, final = naive_recurrent_kda(q, k, v, g, 2 * beta.sigmoid(), None, state, True)
    sent = moved({**inputs, "initial_state": state}, device)
    options = {"lower_bound": lower_bound, "safe_gate": lower_bound is not None}
    result = run(sent, function, allow_neg_eigval=True, **options)
    assert_ours(
        result,
        device,
        "fwd" if function == "chunk_kda" else ours_for(device, 12),
        CHUNK if function == "chunk_kda" else RECURRENT,
    )
    assert_near(result, out, final)


# ---- What stays with FLA -------------------------------------------------------------------------


def assert_left(result, reason, log=CHUNK):
    """FLA goes on by itself, to its kernels or an error; its built-in backend is not asked."""
    assert result["error"] is not None
    assert result["calls"] == [] and result["kernel"] is None
    assert result["log"] == [f"{log}flash_kda rejected: {reason}"], result["log"]


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"cp_context": object()}, "context parallelism"),
        ({"return_intermediate_states": True}, "return_intermediate_states"),
        ({"lower_bound": -7.0}, "lower_bound is -7.0, wanted from -5 to 0"),
        ({"lower_bound": None}, "safe_gate without lower_bound, which FLA refuses"),
        (
            {**SOFTPLUS, "A_log": None},
            "the softplus gate without A_log, which means something else to FLA",
        ),
        (
            {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True},
            "allow_neg_eigval without use_beta_sigmoid_in_kernel, which FLA refuses",
        ),
        (
            {"transpose_state_layout": True},
            "both state_v_first and transpose_state_layout, which FLA refuses",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_chunk_options_left_to_fla(change, reason, device):
    inputs = moved(small(), device)
    for name in list(change):
        if name in inputs:
            inputs[name] = change[name]
            change = {n: x for n, x in change.items() if n != name}
    assert_left(run(inputs, **V_FIRST, **change), reason)


def test_chunk_tensors_left_to_fla(device):
    inputs = moved(small(), device)
    q, v, beta = inputs["q"], inputs["v"], inputs["beta"]
    wanted = "bfloat16 or float32" if device == "cpu" else "bfloat16"
    for change, reason in [
        ({"q": q.half()}, f"q is torch.float16, wanted {wanted} on {device}"),
        ({"v": v.double()}, f"v is torch.float64, wanted {wanted} on {device}"),
        (
            {"beta": beta.half()},
            f"beta is torch.float16, wanted bfloat16 or float32 on {device}",
        ),
        ({"v": v[..., :72]}, "V is 72, wanted a multiple of 16 up to 256"),
        ({"v": v[:, :, [0, 1, 1]]}, "HV is 3, wanted a multiple of H = 2"),
        ({"beta": v}, "beta has a value for each channel of v, wanted [B, T, HV]"),
    ]:
        assert_left(run({**inputs, **change}, **V_FIRST), reason)
    narrow = {n: inputs[n][..., :64] for n in ("q", "k", "g")}
    narrow["dt_bias"] = inputs["dt_bias"][: 2 * 64]
    narrow["initial_state"] = inputs["initial_state"][..., :64]
    result = run({**inputs, **narrow}, **V_FIRST)
    if device == "cpu":
        assert_ours(result, device, "fwd", CHUNK)
    else:
        assert_left(result, "K is 64, wanted 128 on cuda")


@pytest.mark.parametrize("name", ["q", "beta", "A_log", "initial_state"])
def test_training_stays_with_fla(name, device):
    inputs = moved(small(), device)
    inputs[name] = inputs[name].clone().requires_grad_()
    reason = f"{name} requires a gradient, flash_kda has no backward"
    assert_left(run(inputs, grad=True, **V_FIRST), reason)
    assert_left(run(inputs, "fused_recurrent_kda", grad=True, **V_FIRST), reason, RECURRENT)
    assert_ours(run(inputs, **V_FIRST), device, "fwd", CHUNK)  # inference_mode
    inputs[name] = inputs[name].detach()
    result = run(inputs, grad=True, **V_FIRST)  # nothing here wants a gradient
    assert_ours(result, device, "fwd", CHUNK)
    assert not result["out"].requires_grad


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"inplace_final_state": False}, "ssm_state_indices without inplace_final_state"),
        (
            K_FIRST,
            "a pool of states [K, V], wanted state_v_first=True, as it is updated in place",
        ),
        (
            {"num_accepted_tokens": [1, 1]},
            "num_accepted_tokens with ssm_state_indices [N], wanted [N, T]",
        ),
        ({"T": 2}, "ssm_state_indices [N] with T = 2, wanted [N, T]"),
        ({"T": 17, "indices": 17}, "17 tokens per sequence, wanted at most 16"),
        ({"pool": None}, "inplace_final_state without initial_state, which FLA refuses"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_pools_left_to_fla(change, reason, device):
    change = dict(change)
    inputs = small(change.pop("T", 1))
    columns = change.pop("indices", None)
    indices = torch.zeros((2, columns) if columns else 2, dtype=torch.int64)
    sent = {**moved(inputs, device), "ssm_state_indices": indices.to(device)}
    if "pool" in change:
        sent["initial_state"] = change.pop("pool")
    if "num_accepted_tokens" in change:
        accepted = change.pop("num_accepted_tokens")
        change["num_accepted_tokens"] = torch.tensor(accepted, device=device)
    result = run(sent, "fused_recurrent_kda_fwd", **{**V_FIRST, **change})
    assert_left(result, reason, RECURRENT)


# ---- Switches ------------------------------------------------------------------------------------


def test_switched_off_fla_is_as_before(device, monkeypatch):
    monkeypatch.setenv("FLASH_KDA_FLA", "0")
    inputs = small()
    result = run(moved(inputs, device), **V_FIRST)
    assert_ours(result, device, "fwd", CHUNK)  # by FLA's own backend
    assert_near(result, *reference(inputs))
    result = run(moved(inputs, device), allow_neg_eigval=True, **V_FIRST)
    assert_left(result, "FlashKDA requires allow_neg_eigval=False")
    result = run(moved(small(1), device), "fused_recurrent_kda", **V_FIRST)
    assert_left(result, "FLASH_KDA_FLA=0", RECURRENT)


def test_fla_can_switch_off_all_of_it(device, monkeypatch):
    monkeypatch.setenv("FLA_FLASH_KDA", "0")
    for function, T in (("chunk_kda", 40), ("fused_recurrent_kda", 1)):
        result = run(moved(small(T), device), function, **V_FIRST)
        assert result["calls"] == [] and result["log"] == []


def test_a_wrong_switch_is_named(device, monkeypatch):
    monkeypatch.setenv("FLASH_KDA_FLA", "off")
    result = run(moved(small(), device), **V_FIRST)
    assert_left(result, "FLASH_KDA_FLA: 'off', wanted 0 or 1")


def test_served(backend):
    assert backend.served == ("chunk_kda", "fused_recurrent_kda_fwd")
    assert flash_kda.fla is backend
