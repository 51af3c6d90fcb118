"""Bad calls: an error that names the argument, the value and the one wanted; nothing is written."""

import inspect

import pytest
import torch
from inputs import BF16, F32, F64, bits, environment, make, poisoned, run

import flash_kda

ERRORS = (TypeError, ValueError, RuntimeError)
FUNCTIONS = {"fwd": flash_kda.fwd, "reference": flash_kda.reference, "decode": flash_kda.decode}
NAMES = ["q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound"]


def good(function, T=20, **how):
    """Arguments of a call that succeeds, by name."""
    call = make(4 if function == "decode" else T, 2, **how)
    args = {n: getattr(call, n) for n in NAMES if n != "out"}
    args["out"] = poisoned(call.v.shape, BF16)
    if function == "decode":
        args["state"] = torch.zeros(call.state_shape())
    else:
        args["initial_state"] = torch.zeros(call.state_shape())
        args["final_state"] = poisoned(call.state_shape(), F32)
    return args


def call(function, args):
    args = dict(args)
    positional = [args.pop(n) for n in NAMES]
    if function == "decode":
        positional.append(args.pop("state"))
    return FUNCTIONS[function](*positional, **args)


def refuse(function, args, names, kind=ERRORS):
    """The call raises, names one of `names`, and changes no tensor it was given."""
    tensors = {
        n: t
        for n, t in args.items()
        if isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.layout == torch.strided
    }
    before = {n: t.detach().clone() for n, t in tensors.items()}
    with pytest.raises(kind) as raised:
        call(function, args)
    message = str(raised.value)
    assert any(name in message for name in names), f"{message!r} names none of {names}"
    for n, t in tensors.items():
        assert torch.equal(bits(t.detach()), bits(before[n])), f"{n} was written"
    return message


def test_the_good_calls_are_good():
    for function in FUNCTIONS:
        call(function, good(function))


each_function = pytest.mark.parametrize("function", FUNCTIONS)
TENSORS = [
    "q",
    "k",
    "v",
    "g",
    "beta",
    "out",
    "A_log",
    "dt_bias",
    "initial_state",
    "final_state",
    "state",
]


def tensors_of(function):
    return [n for n in TENSORS if n in good(function)]


CASES = [(f, n) for f in FUNCTIONS for n in tensors_of(f)]
each_tensor = pytest.mark.parametrize("function, name", CASES)


# ---- Each tensor: type, dtype, shape, strides, device, memory ------------------------------------


@each_tensor
def test_not_a_tensor(function, name):
    args = good(function)
    absent = [] if name in ("A_log", "dt_bias", "initial_state", "final_state") else [None]
    for value in (3, "text", [1.0, 2.0], object(), *absent):
        refuse(function, args | {name: value}, [name])


@each_tensor
def test_wrong_dtype(function, name):
    args = good(function)
    wrong = [
        torch.float16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ]
    if function != "reference" or name not in ("out", "initial_state", "final_state"):
        wrong.append(F64)
    if name in ("A_log", "dt_bias"):
        wrong.append(BF16)
    for dtype in wrong:
        message = refuse(function, args | {name: args[name].to(dtype)}, [name], TypeError)
        assert f"{name}: dtype {dtype}, wanted " in message and "float32" in message


def parameters_of(function):
    return inspect.signature(FUNCTIONS[function]).parameters


INTEGERS = ["cu_seqlens", "state_indices", "num_accepted_tokens"]
INTEGERS += ["checkpoint_offsets", "checkpoint_indptr"]


@pytest.mark.parametrize(
    "function, name",
    [(f, n) for f in FUNCTIONS for n in INTEGERS if n in parameters_of(f)],
)
def test_wrong_dtype_of_integers(function, name):
    args = good(function)
    for dtype in (F32, BF16, torch.int16, torch.uint8, torch.bool):
        wrong = torch.zeros(2).to(dtype)
        message = refuse(function, args | {name: wrong}, [name], TypeError)
        assert f"{name}: dtype {dtype}, wanted int32 or int64" in message


def test_errors_speak_of_the_python_functions():
    args = good("decode")
    many = {n: torch.zeros(1, 17, 2, 128) for n in ("q", "k", "v", "g", "out")}
    message = refuse("decode", args | many | {"beta": torch.zeros(1, 17, 2)}, ["q"], ValueError)
    assert message == "q: T = 17 tokens, wanted from 1 to 16 in decode"
    overlap = args | {"out": args["state"][0, 0, :8].view(1, 4, 2, 128)}
    message = refuse("decode", overlap, ["out"], ValueError)
    assert "shares memory with" in message and "state" in message
    assert "final_state" not in message


@each_tensor
def test_wrong_rank(function, name):
    args = good(function)
    flat = [] if name in ("A_log", "dt_bias") else [args[name].reshape(-1)]  # [HV * K] is right
    for wrong in (args[name].unsqueeze(0), args[name][0], torch.zeros(()), *flat):
        refuse(function, args | {name: wrong.to(args[name].dtype)}, [name])


@each_tensor
def test_wrong_extent_of_every_dimension(function, name):
    args = good(function)
    shape = args[name].shape
    for dim in range(len(shape)):
        for extent in (shape[dim] + 1, shape[dim] - 1):
            wrong = list(shape)
            wrong[dim] = extent
            # q leads: a q of another shape is seen as the other tensors being wrong.
            names = TENSORS if name in ("q", "k", "v") else [name]
            refuse(function, args | {name: torch.zeros(wrong, dtype=args[name].dtype)}, names)


@each_tensor
def test_last_stride_must_be_one(function, name):
    args = good(function)
    x = args[name]
    wide = torch.zeros(*x.shape, 2, dtype=x.dtype)
    wide[..., 0] = x
    message = refuse(function, args | {name: wide[..., 0]}, [name]) if name != "A_log" else ""
    assert "stride" in message or "contiguous" in message or name == "A_log"


@each_tensor
def test_other_device(function, name):
    args = good(function)
    refuse(function, args | {name: args[name].to("meta")}, [name, "meta"])


@pytest.mark.parametrize("function", ["fwd", "decode"])
def test_all_on_another_device(function):
    args = good(function)
    meta = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in args.items()}
    with pytest.raises((NotImplementedError, *ERRORS)):
        call(function, meta)


@each_tensor
def test_sparse_tensor(function, name):
    args = good(function)
    with pytest.raises((BufferError, *ERRORS)):
        call(function, args | {name: torch.zeros(args[name].shape).to_sparse()})


@each_tensor
def test_requires_grad(function, name):
    """There is no backward: a tensor that asks for gradients must not lose them silently."""
    args = good(function)
    wanted = args[name].detach().clone().requires_grad_()
    refuse(function, args | {name: wanted}, [name, "grad"])
    with torch.no_grad():
        call(function, good(function) | {name: wanted})


# ---- Outputs: overlap ----------------------------------------------------------------------------


def outputs_of(function):
    return ["out", "state"] if function == "decode" else ["out", "final_state"]


@each_function
def test_output_overlaps_input(function):
    args = good(function)
    for name in ("q", "k", "v", "g"):
        refuse(function, args | {"out": args[name]}, ["out"])
    both = torch.zeros(args["v"].numel() + 128, dtype=BF16)
    v = both[:-128].view(args["v"].shape)
    v.copy_(args["v"])
    refuse(function, args | {"v": v, "out": both[128:].view(args["v"].shape)}, ["out"])  # partly


@each_function
def test_state_overlaps_input(function):
    state = outputs_of(function)[1]
    for name in ("q", "v", "g", "beta", "A_log", "dt_bias"):
        args = good(function)
        x = args[name]
        need = args[state].numel()
        store = torch.zeros(need + 8, dtype=F32)
        raw = store.view(x.dtype)[: x.numel()].view(x.shape)
        raw.copy_(x)
        wrong = args | {name: raw, state: store[:need].view(args[state].shape)}
        refuse(function, wrong, [state, name])


@each_function
def test_outputs_overlap_each_other(function):
    args = good(function)
    state = outputs_of(function)[1]
    store = torch.zeros(args[state].numel() + 8, dtype=F32)
    out = store.view(BF16)[: args["out"].numel()].view(args["out"].shape)
    refuse(function, args | {"out": out, state: store[:-8].view(args[state].shape)}, ["out", state])


@each_function
def test_output_overlaps_itself(function):
    args = good(function)
    shape = args["out"].shape
    row = torch.zeros(shape[0], 1, *shape[2:], dtype=BF16)
    refuse(function, args | {"out": row.expand(shape)}, ["out"])
    window = torch.zeros(100000, dtype=BF16).as_strided(shape, (5000, 100, 128, 1))
    refuse(function, args | {"out": window}, ["out"])


@pytest.mark.parametrize("function", ["fwd", "reference"])
def test_final_state_may_be_initial_state_but_not_half_of_it(function):
    args = good(function)
    store = torch.zeros(args["final_state"].numel() + 128)
    shape = args["final_state"].shape
    a, b = store[:-128].view(shape), store[128:].view(shape)
    refuse(
        function, args | {"initial_state": a, "final_state": b}, ["final_state", "initial_state"]
    )
    call(function, args | {"initial_state": a, "final_state": a})
    as_bf16 = a.view(torch.uint8).flatten()[: a.numel() * 2].view(BF16).view(shape)
    refuse(
        function,
        good(function) | {"initial_state": a, "final_state": as_bf16},
        ["final_state", "initial_state"],
    )


# ---- Scalars -------------------------------------------------------------------------------------


@each_function
@pytest.mark.parametrize(
    "value",
    [
        -7,
        -5.0001,
        1e-30,
        1,
        float("nan"),
        float("inf"),
        float("-inf"),
        "x",
        [1],
        1j,
        torch.zeros(2),
    ],
    ids=str,
)
def test_lower_bound(function, value):
    refuse(function, good(function) | {"lower_bound": value}, ["lower_bound"])


@each_function
@pytest.mark.parametrize("value", [None, "x", float("nan"), float("inf"), 1j, [1]], ids=str)
def test_scale(function, value):
    refuse(function, good(function) | {"scale": value}, ["scale"])


@each_function
@pytest.mark.parametrize(
    "flag",
    [
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
    ],
)
def test_flags_that_are_no_bool(function, flag):
    for value in ("no", 2.5, None):
        refuse(function, good(function) | {flag: value}, [flag])


@each_function
def test_unknown_and_missing_arguments(function):
    refuse(function, good(function) | {"chunk_size": 64}, ["chunk_size"], TypeError)
    args = good(function)
    with pytest.raises(TypeError):
        FUNCTIONS[function](args["q"])
    with pytest.raises(TypeError):
        FUNCTIONS[function](*([args["q"]] * 40))
    with pytest.raises(TypeError, match="q|multiple"):
        FUNCTIONS[function](*[args[n] for n in NAMES], q=args["q"])


@each_function
def test_activated_gate_takes_no_gate_parameters(function):
    args = good(function) | {"use_gate_in_kernel": False}
    refuse(function, args, ["A_log", "dt_bias"])
    refuse(function, args | {"A_log": None}, ["dt_bias"])
    refuse(function, args | {"dt_bias": None}, ["A_log"])
    call(function, args | {"A_log": None, "dt_bias": None})


# ---- Sequences, pools, checkpoints, workspace ----------------------------------------------------


@pytest.mark.parametrize("function", ["fwd", "reference"])
@pytest.mark.parametrize(
    "cu",
    [
        [1, 17],
        [0, 20, 10, 48],
        [0, 17, 4096],
        [-1, 17],
        [0, -5, 48],
        [],
        [0, 21],
        [0, 2**40],
        [-(2**62), 20],
        [0, 2**62, 20],
    ],
    ids=str,
)
def test_cu_seqlens(function, cu):
    args = good(function)
    N = max(len(cu) - 1, 0)
    args |= {
        "cu_seqlens": torch.tensor(cu, dtype=torch.int64),
        "initial_state": None,
        "final_state": poisoned((N, 2, 128, 128), F32),
    }
    refuse(function, args, ["cu_seqlens"])


@each_function
def test_cu_seqlens_kind(function):
    args = good(function)
    for wrong in (
        torch.tensor([0.0, 4.0]),
        torch.tensor([0, 4], dtype=torch.int16),
        [0, 4],
        4,
        torch.tensor([[0, 4]]),
        torch.tensor([0, 4], device="meta"),
    ):
        refuse(function, args | {"cu_seqlens": wrong}, ["cu_seqlens", "meta"])


@each_function
def test_number_of_states_follows_cu_seqlens(function):
    args = good(function)
    refuse(function, args | {"cu_seqlens": torch.tensor([0, 2, 4])}, ["state"])


@each_function
@pytest.mark.parametrize("slots", [[6], [-2], [2**40], [-(2**40)]], ids=str)
def test_state_indices_out_of_range(function, slots):
    args = good(function)
    pool = torch.zeros(6, 2, 128, 128)
    args |= (
        {"state": pool} if function == "decode" else {"initial_state": pool, "final_state": pool}
    )
    refuse(function, args | {"state_indices": torch.tensor(slots)}, ["state_indices"])


@each_function
def test_state_indices_kind(function):
    args = good(function, B=2)
    pool = torch.zeros(6, 2, 128, 128)
    args |= (
        {"state": pool} if function == "decode" else {"initial_state": pool, "final_state": pool}
    )
    for wrong in (
        torch.tensor([0.0, 1.0]),
        torch.tensor([0]),
        torch.tensor([0, 1, 2]),
        [0, 1],
        torch.tensor([0, 1], dtype=torch.int8),
        torch.tensor([[0, 1], [2, 3]]),
    ):
        refuse(function, args | {"state_indices": wrong}, ["state_indices"])
    refuse(
        function, args | {"state_indices": torch.tensor([3, 3])}, ["state_indices"]
    )  # written twice


def test_num_accepted_tokens():
    args = good("decode", B=2) | {"state": torch.zeros(8, 2, 128, 128)}
    slots = torch.arange(8).view(2, 4)
    call("decode", args | {"state_indices": slots, "num_accepted_tokens": torch.tensor([4, 1])})
    for wrong in (
        torch.tensor([5, 1]),
        torch.tensor([-1, 1]),
        torch.tensor([1]),
        [1, 1],
        torch.tensor([1.0, 1.0]),
        torch.tensor([[1, 1]]),
    ):
        refuse(
            "decode",
            args | {"state_indices": slots, "num_accepted_tokens": wrong},
            ["num_accepted_tokens"],
        )
    refuse(
        "decode",
        good("decode", B=2) | {"num_accepted_tokens": torch.tensor([1, 1])},
        ["state_indices"],
    )
    refuse("decode", args | {"state_indices": slots}, ["num_accepted_tokens", "state_indices"])


def test_decode_takes_16_tokens_at_most():
    args = good("decode") | {n: x for n, x in good("fwd", 17).items() if n in NAMES}
    message = refuse("decode", args, ["q", "T", "tokens"])
    assert "16" in message and "17" in message


@pytest.mark.parametrize("function", ["fwd", "reference"])
@pytest.mark.parametrize("offsets", [[8], [32], [-2], [16, 0], [2**40]], ids=str)
def test_checkpoint_offsets(function, offsets):
    args = good(function)
    state = poisoned((len(offsets), 2, 128, 128), F32)
    refuse(
        function,
        args | {"checkpoint_state": state, "checkpoint_offsets": torch.tensor(offsets)},
        ["checkpoint_offsets"],
    )


@pytest.mark.parametrize("function", ["fwd", "reference"])
def test_checkpoints_kind(function):
    args = good(function)
    state, offsets = poisoned((1, 2, 128, 128), F32), torch.tensor([16])
    call(function, args | {"checkpoint_state": state, "checkpoint_offsets": offsets})
    refuse(function, args | {"checkpoint_state": state}, ["checkpoint"])
    refuse(function, args | {"checkpoint_offsets": offsets}, ["checkpoint"])
    for wrong in (state[:, :1], state[..., :64].contiguous(), state.to(torch.float16), state[0]):
        refuse(
            function,
            args | {"checkpoint_state": wrong, "checkpoint_offsets": offsets},
            ["checkpoint_state"],
        )
    for wrong in (torch.tensor([16.0]), torch.tensor([16, 16]), torch.tensor([[16]]), [16]):
        refuse(
            function,
            args | {"checkpoint_state": state, "checkpoint_offsets": wrong},
            ["checkpoint"],
        )
    refuse(
        function,
        args | {"checkpoint_state": args["final_state"], "checkpoint_offsets": offsets},
        ["checkpoint_state", "final_state"],
    )


def test_workspace():
    args = good("fwd", 100)
    empty = torch.zeros(0, dtype=torch.uint8)
    # what this call needs; a build with CUDA promises room for a GPU's call, too
    size = int(refuse("fwd", args | {"workspace": empty}, ["workspace"]).split()[-1])
    assert 0 < size <= flash_kda.get_workspace_size(100, 2)
    call("fwd", args | {"workspace": torch.zeros(size, dtype=torch.uint8)})
    for wrong in (
        torch.zeros(size - 1, dtype=torch.uint8),
        7,
        "x",
        torch.zeros(2 * size, dtype=torch.uint8)[::2],
    ):
        refuse("fwd", args | {"workspace": wrong}, ["workspace"])
    for name in ("q", "out", "final_state"):
        inside = args[name].view(-1).view(torch.uint8)
        if inside.numel() >= size:
            refuse("fwd", args | {"workspace": inside}, ["workspace"])


@pytest.mark.parametrize(
    "tokens, heads, sequences",
    [
        (-1, 2, 1),
        (10, 0, 1),
        (10, -3, 1),
        (10, 2, -1),
        (2**62, 2**40, 1),
        ("x", 2, 1),
        (1.5, 2, 1),
        (2**80, 1, 1),
    ],
)
def test_get_workspace_size(tokens, heads, sequences):
    with pytest.raises((OverflowError, *ERRORS)):
        flash_kda.get_workspace_size(tokens, heads, sequences)


@each_function
def test_huge_shapes_without_memory(function):
    """T x H x D far past the memory: expanded views need none, and nothing may wrap around."""
    args = good(function)
    for big in ((2**40, 4), (1, 2**44)):
        huge = dict(args)
        for n in ("q", "k", "v", "g", "beta"):
            x = args[n][:1, :1]
            huge[n] = x.expand(*big, *x.shape[2:])
        with pytest.raises(ERRORS):
            call(function, huge)


@each_function
def test_more_sequences_than_memory_holds(function):
    """One entry seen 2^40 times says that there are as many empty sequences."""
    args = good(function)
    for n in ("q", "k", "v", "g", "beta", "out"):
        args[n] = args[n][:1, :0]
    args["cu_seqlens"] = torch.zeros(1, dtype=torch.int64).expand(2**40)
    with pytest.raises(ERRORS, match="cu_seqlens: stride 0"):
        call(function, args)


# ---- Environment ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variable, value, right",
    [
        ("CPU_ISA", "sse9", ["portable", "avx2", "avx512"]),
        ("CPU_ISA", "AVX2 ", ["avx2"]),
        ("PRECISION", "fp8", ["fp32", "bf16"]),
        ("PRECISION", " ", ["fp32", "bf16"]),
        ("NUM_THREADS", "0", ["1"]),
        ("NUM_THREADS", "-1", ["1"]),
        ("NUM_THREADS", "two", ["1"]),
        ("NUM_THREADS", "3.5", ["1"]),
        ("NUM_THREADS", "99999999999999999999", ["1"]),
    ],
)
@pytest.mark.parametrize("function", ["fwd", "decode"])
def test_environment(function, variable, value, right):
    with environment(**{variable: value}):
        message = refuse(function, good(function), [f"FLASH_KDA_{variable}"])
    assert value.strip() in message and all(name in message for name in right), message


def test_an_empty_environment_variable_is_unset():
    with environment(CPU_ISA="", PRECISION="", NUM_THREADS=""):
        call("fwd", good("fwd"))


def test_an_argument_beats_the_environment():
    args = good("fwd")
    with environment(CPU_ISA="sse9", PRECISION="fp8", NUM_THREADS="none"):
        call("fwd", args | {"isa": "portable", "precision": "fp32", "num_threads": 1})
    assert flash_kda.last_report()["kernel"] == "cpu/portable/prefill_fp32"
    with environment(CPU_ISA="avx2", NUM_THREADS=2):
        call("fwd", args | {"isa": "portable", "num_threads": 1})
    assert flash_kda.last_report()["kernel"] == "cpu/portable/prefill_fp32"
    assert flash_kda.last_report()["num_threads"] == 1


def test_bf16_products_are_never_silently_fp32():
    with environment(CPU_ISA="portable", PRECISION="bf16"):
        message = refuse("fwd", good("fwd"), ["bf16"])
    assert "portable" in message


def test_errors_show_the_value_and_what_was_wanted():
    message = refuse("fwd", good("fwd") | {"lower_bound": -7.25}, ["lower_bound"])
    assert "-7.25" in message and "-5" in message
    args = good("fwd")
    message = refuse("fwd", args | {"beta": args["beta"].half()}, ["beta"])
    assert "float16" in message and "bfloat16" in message
    message = refuse("fwd", args | {"v": torch.zeros(1, 19, 2, 128, dtype=BF16)}, ["v"])
    assert "19" in message and "20" in message


def test_a_failed_call_does_not_harm_the_next():
    first = run(make(20, 2))
    for _ in range(50):
        with pytest.raises(ERRORS):
            call("fwd", good("fwd") | {"g": None})
    assert torch.equal(bits(first.out), bits(run(make(20, 2)).out))
