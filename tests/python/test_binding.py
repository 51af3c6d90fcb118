"""The binding: what it accepts as a tensor, what it refuses and how, and what it reports."""

import inspect
import os
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import flash_kda
import flash_kda_C

D = 128
FWD_ARGUMENTS = [
    "q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound",
    "initial_state", "final_state", "cu_seqlens",
]  # fmt: skip
POISON = 777.0


def make_call(B=1, T=20, H=2, N=None, seed=0, dtype=np.float32):
    """Arguments of fwd by name, NumPy arrays, the outputs poisoned."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    call = {name: normal(B, T, H, D).astype(dtype) for name in ("q", "k", "v", "g")}
    call["beta"] = normal(B, T, H).astype(dtype)
    call["scale"] = D**-0.5
    call["out"] = np.full((B, T, H, D), POISON, dtype)
    call["A_log"] = rng.uniform(0, 2.7, H).astype(np.float32)
    call["dt_bias"] = normal(H, D)
    call["lower_bound"] = -5.0
    call["initial_state"] = normal(N or B, H, D, D)
    call["final_state"] = np.full((N or B, H, D, D), POISON, np.float32)
    call["cu_seqlens"] = None
    return call


def run(call, **changes):
    """fwd(**call, **changes); returns out and final_state."""
    call = {**call, **changes}
    flash_kda.fwd(**call)
    return np.asarray(call["out"]), np.asarray(call["final_state"])


def assert_refused(kind, words, call, function=flash_kda.fwd, **changes):
    """The call raises `kind` with every one of `words` in its text, and writes nothing."""
    call = {**call, **changes}
    written = [call.get(name) for name in ("out", "final_state", "state")]
    before = [np.array(x) if isinstance(x, np.ndarray) else None for x in written]
    with pytest.raises(kind) as raised:
        function(**call)
    text = str(raised.value)
    for word in [words] if isinstance(words, str) else words:
        assert word in text
    for now, then in zip(written, before):
        if then is not None:
            np.testing.assert_array_equal(now, then)
    return text


# ---- The surface ---------------------------------------------------------------------------------


def test_signature_of_fwd():
    parameters = inspect.signature(flash_kda.fwd).parameters
    positional = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == FWD_ARGUMENTS
    assert [p.name for p in positional if p.default is None] == FWD_ARGUMENTS[-3:]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[13:])


def test_signature_of_the_raw_call():
    for function in (flash_kda._fwd_raw, flash_kda_C.fwd):
        names = list(inspect.signature(function).parameters)
        assert names[:14] == [*FWD_ARGUMENTS[:7], "workspace", *FWD_ARGUMENTS[7:]]


def test_reference_takes_what_fwd_takes():
    fwd = list(inspect.signature(flash_kda.fwd).parameters)
    reference = list(inspect.signature(flash_kda.reference).parameters)
    assert reference == [name for name in fwd if name not in ("isa", "precision", "num_threads")]


def test_raw_call_is_fwd_with_a_workspace():
    call = make_call()
    expected = [x.copy() for x in run(call)]
    size = flash_kda.get_workspace_size(20, 2)
    for function in (flash_kda._fwd_raw, flash_kda_C.fwd):
        raw = make_call()
        workspace = np.full(size, 0xFF, np.uint8)
        values = list(raw.values())
        assert function(*values[:7], workspace, *values[7:]) is None
        np.testing.assert_array_equal(raw["out"], expected[0])
        np.testing.assert_array_equal(raw["final_state"], expected[1])
        assert flash_kda.last_report()["workspace_bytes"] <= size


def test_workspace_too_small():
    size = flash_kda.get_workspace_size(20, 2)
    assert size > 0
    words = ["workspace", str(size - 1)]
    call = make_call()
    assert_refused(ValueError, words, call, workspace=np.zeros(size - 1, np.uint8))
    assert_refused(ValueError, "workspace", call, workspace=np.zeros(0, np.uint8))
    assert_refused(ValueError, "contiguous", call, workspace=np.zeros(4 * size, np.uint8)[::2])
    run(call, workspace=np.zeros(size // 8 + 1, np.int64))  # bytes are bytes


@pytest.mark.parametrize("arguments", [(-1, 1), (1, 0), (1, 1, -1)])
def test_workspace_size_refuses(arguments):
    with pytest.raises(ValueError, match="T_total, H, N"):
        flash_kda.get_workspace_size(*arguments)


def test_info():
    info = flash_kda.info()
    assert info["version"] == flash_kda.__version__
    assert "portable" in info["cpu_isa_built"]
    assert set(info["cpu_isa_usable"]) <= set(info["cpu_isa_built"])
    assert info["cpu_isa"] in info["cpu_isa_usable"]
    assert info["num_threads"] >= 1
    assert info["device"] == "cpu" or info["cuda_archs"]


def test_info_follows_the_environment(monkeypatch):
    monkeypatch.setenv("FLASH_KDA_CPU_ISA", "portable")
    monkeypatch.setenv("FLASH_KDA_NUM_THREADS", "3")
    assert flash_kda.info()["cpu_isa"] == "portable"
    assert flash_kda.info()["num_threads"] == 3
    monkeypatch.setenv("FLASH_KDA_CPU_ISA", "mmx")
    with pytest.raises(ValueError, match="(?s)FLASH_KDA_CPU_ISA.*mmx.*portable"):
        flash_kda.info()
    assert_refused(ValueError, ["FLASH_KDA_CPU_ISA", "mmx", "portable"], make_call())
    for value in (os.fsdecode(b"\xff"), 59 * "x" + "\u00e9"):  # no UTF-8, and cut in a letter
        monkeypatch.setenv("FLASH_KDA_CPU_ISA", value)
        assert_refused(ValueError, ["FLASH_KDA_CPU_ISA", "portable"], make_call())


def test_report_tells_what_ran(isa):
    call = make_call(T=33)
    run(call)
    before = flash_kda.last_report()["num_calls"]
    run(call, isa=isa, num_threads=1)
    report = flash_kda.last_report()
    assert report["call"] == "fwd" and report["num_calls"] == before + 1
    assert f"/{isa}/" in report["kernel"]
    assert report["num_threads"] == 1 and report["num_tokens"] == 33
    assert_refused(ValueError, "scale", call, scale=0.0)
    assert flash_kda.last_report() == report


def test_report_belongs_to_the_thread():
    run(make_call())
    seen = []
    thread = threading.Thread(target=lambda: seen.append(flash_kda.last_report()))
    thread.start()
    thread.join()
    assert seen == [None]


# ---- Tensors -------------------------------------------------------------------------------------


def test_bfloat16_of_ml_dtypes_is_bfloat16():
    call = make_call(dtype=ml_dtypes.bfloat16)
    out, final = run(call)
    wide = {
        name: value.astype(np.float32)
        if getattr(value, "dtype", None) == ml_dtypes.bfloat16
        else value
        for name, value in make_call(dtype=ml_dtypes.bfloat16).items()
    }
    wide_out, wide_final = run(wide)
    np.testing.assert_array_equal(final, wide_final)
    np.testing.assert_array_equal(out, wide_out.astype(ml_dtypes.bfloat16))


class Interrupting(np.ndarray):
    """A subclass whose dtype is asked for when the user presses a key."""

    @property
    def dtype(self):
        raise KeyboardInterrupt


def test_an_interrupt_ends_the_call():
    call = make_call()
    call["q"] = call["q"].view(Interrupting)
    with pytest.raises(KeyboardInterrupt):
        flash_kda.fwd(**call)


def test_arrays_without_elements():
    """NumPy 2.4 gives them strides of 0."""
    call = make_call(T=0)
    np.testing.assert_array_equal(run(call)[1], call["initial_state"])


def test_a_memory_map_is_an_array(tmp_path):
    call = make_call()
    expected, _ = run(call)
    maps = {}
    for name in ("q", "initial_state", "out"):
        array = make_call()[name]
        maps[name] = np.memmap(tmp_path / name, array.dtype, "w+", shape=array.shape)
        maps[name][...] = array
    np.testing.assert_array_equal(run(make_call(), **maps)[0], expected)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.astype(x.dtype.newbyteorder()),
        lambda x: x.astype([("x", x.dtype), ("y", "u1")])["x"],
        lambda x: x.astype(np.float16).view("V2"),
        lambda x: x.astype(np.complex64),
        lambda x: x.astype(np.dtype(ml_dtypes.bfloat16).newbyteorder()),
        lambda x: np.ma.masked_less(x, 0),
    ],
    ids=["byte order", "between bytes", "no meaning", "complex", "order of bfloat16", "masked"],
)
def test_arrays_that_are_not_ordinary_are_refused(spoil):
    call = make_call()
    assert_refused((TypeError, ValueError), "q", call, q=spoil(call["q"]))


def test_views_of_a_fused_projection():
    call = make_call(B=2)
    expected, _ = run(call)
    fused = np.stack([call["q"], call["k"], call["v"]], axis=2)
    views = {name: fused[:, :, i] for i, name in enumerate("qkv")}
    assert not views["q"].flags.c_contiguous
    np.testing.assert_array_equal(run(make_call(B=2), **views)[0], expected)


def test_read_only_inputs_are_read():
    call = make_call()
    expected, _ = run(call)
    for value in call.values():
        if isinstance(value, np.ndarray) and value is not call["out"]:
            value.flags.writeable = False
    call["final_state"] = make_call()["final_state"]
    np.testing.assert_array_equal(run(call)[0], expected)


@pytest.mark.parametrize("name", ["out", "final_state"])
def test_read_only_outputs_are_refused(name):
    call = make_call()
    call[name].flags.writeable = False
    assert_refused(ValueError, [name, "read-only"], call)


def test_read_only_workspace_is_refused():
    workspace = np.zeros(flash_kda.get_workspace_size(20, 2), np.uint8)
    workspace.flags.writeable = False
    assert_refused(ValueError, ["workspace", "read-only"], make_call(), workspace=workspace)


class Exporter:
    """An object of another library: __dlpack__ as a producer of DLPack before 1.0 has it."""

    def __init__(self, array):
        self.array = array
        self.exports = 0

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, stream=None):
        assert stream is None  # the CPU has no streams
        self.exports += 1
        return self.array.__dlpack__()


def test_objects_of_other_libraries():
    call = make_call()
    expected, _ = run(call)
    call = {n: Exporter(x) if isinstance(x, np.ndarray) else x for n, x in make_call().items()}
    before = sys.getrefcount(call["q"].array)
    flash_kda.fwd(**call)
    after = sys.getrefcount(call["q"].array)
    assert call["q"].exports == 1
    assert after == before  # the export was given back
    np.testing.assert_array_equal(call["out"].array, expected)


class Elsewhere(Exporter):
    def __init__(self, array, device):
        super().__init__(array)
        self.device = device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, stream=None, max_version=None):
        assert (stream == -1) == (self.device[0] == 2)  # CUDA: do not synchronise
        return self.array.__dlpack__()


def test_cuda_producers_are_asked_not_to_synchronise():
    call = make_call()
    call["q"] = Elsewhere(call["q"], (2, 0))
    run(call)  # the stand-in's capsule says CPU


def test_no_leak_of_references():
    call = make_call()
    run(call)
    arrays = {name: value for name, value in call.items() if isinstance(value, np.ndarray)}
    counts = {name: sys.getrefcount(value) for name, value in arrays.items()}
    for _ in range(20):
        run(call)
        with pytest.raises(ValueError):
            run(call, scale=0.0)
    assert {name: sys.getrefcount(value) for name, value in arrays.items()} == counts


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "out"])
def test_missing_tensors(name):
    assert_refused(TypeError, [name, "None"], make_call(), **{name: None})


@pytest.mark.parametrize("value", [3.0, "text", [1, 2], object(), b"bytes"], ids=repr)
def test_no_tensor_at_all(value):
    for name in ("q", "A_log", "final_state", "cu_seqlens", "workspace"):
        assert_refused(TypeError, [name, "tensor"], make_call(), **{name: value})


class Interrupted:
    """The user presses Ctrl-C while the argument is read."""

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **keywords):
        raise KeyboardInterrupt

    def __float__(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["q", "out", "scale", "lower_bound"])
def test_interrupts_are_passed_on(name):
    with pytest.raises(KeyboardInterrupt):
        flash_kda.fwd(**{**make_call(), name: Interrupted()})


WRONG_DTYPES = {
    "q": np.float16,
    "k": np.int32,
    "v": np.float64,
    "g": np.uint8,
    "beta": np.bool_,
    "out": np.float16,
    "A_log": np.float64,
    "dt_bias": np.float16,
    "initial_state": np.int64,
    "final_state": np.complex64,
}


@pytest.mark.parametrize("name", WRONG_DTYPES)
def test_wrong_dtypes(name):
    call = make_call()
    text = assert_refused(TypeError, name, call, **{name: call[name].astype(WRONG_DTYPES[name])})
    assert np.dtype(WRONG_DTYPES[name]).name in text or "bool" in text
    assert "wanted" in text and "float32" in text


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.uint64])
def test_wrong_dtype_of_offsets(dtype):
    words = ["cu_seqlens", np.dtype(dtype).name, "int32", "int64"]
    assert_refused(TypeError, words, make_call(), cu_seqlens=np.array([0, 20], dtype))


def test_other_byte_order_is_refused():
    call = make_call()
    assert_refused((TypeError, ValueError), "q", call, q=call["q"].astype(">f4"))


def test_wrong_shapes():
    call = make_call()
    assert_refused(ValueError, ["k", "wanted"], call, k=call["k"][:, :19])
    assert_refused(ValueError, ["q", "6"], call, q=call["q"][None, None])
    assert_refused(ValueError, ["dt_bias", "wanted"], call, dt_bias=call["dt_bias"][:1])
    assert_refused(
        ValueError, ["final_state", "wanted"], call, final_state=np.zeros((2, 2, D, D), "f")
    )
    assert_refused(ValueError, ["q", "stride"], call, q=call["q"][..., ::-1])


def test_output_over_an_input():
    call = make_call()
    assert_refused(ValueError, "out", call, out=call["v"])


# ---- Numbers and options -------------------------------------------------------------------------


def test_lower_bound_takes_numbers():
    call = make_call()
    expected, _ = run(call)
    expected = expected.copy()
    for value in (-5, np.float32(-5), np.float64(-5), np.int64(-5)):
        np.testing.assert_array_equal(run(call, lower_bound=value)[0], expected)


@pytest.mark.parametrize("value", [-7, -5.0001, 1, float("nan"), float("inf"), -(10**400)])
def test_lower_bound_out_of_range(value):
    kind = TypeError if isinstance(value, int) and value < -100 else ValueError
    assert_refused(kind, ["lower_bound", "-5"], make_call(), lower_bound=value)


@pytest.mark.parametrize("value", [True, False, "-5", [-5.0], np.zeros(3), object()], ids=repr)
def test_numbers_of_wrong_types(value):
    assert_refused(TypeError, ["lower_bound", "wanted"], make_call(), lower_bound=value)
    assert_refused(TypeError, ["scale", "wanted"], make_call(), scale=value)


def test_missing_scale():
    assert_refused(TypeError, ["scale", "None"], make_call(), scale=None)


def test_no_lower_bound_is_the_softplus_gate():
    call = make_call()
    out, final = run(call, lower_bound=None)
    decay = -np.exp(call["A_log"])[:, None] * np.logaddexp(0, call["g"] + call["dt_bias"])
    activated = make_call()
    activated.update(g=decay.astype(np.float32), A_log=None, dt_bias=None)
    same, same_final = run(activated, use_gate_in_kernel=False)
    np.testing.assert_allclose(out, same, atol=2e-5)
    np.testing.assert_allclose(final, same_final, atol=2e-5)


def test_activated_gate_takes_no_parameters():
    call = make_call()
    call["g"] = -np.abs(call["g"])
    options = {"use_gate_in_kernel": False, "lower_bound": "not looked at"}
    assert_refused(ValueError, "A_log", call, **options)
    assert_refused(ValueError, "dt_bias", call, **options, A_log=None)
    run(call, **options, A_log=None, dt_bias=None)


FLAGS = [
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
]


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_bools(name):
    for value in (None, 1, "True", np.True_):
        assert_refused(TypeError, [name, "True or False"], make_call(), **{name: value})


@pytest.mark.parametrize("name", FLAGS)
def test_flags_reach_the_library(name):
    """Turning one flag changes the result, and in the way that the definition says."""
    call = make_call()
    call["k"] /= D**0.5  # tame without the norm, too
    call["g"], call["beta"] = -np.abs(call["g"]), np.abs(call["beta"]) / 4
    default, _ = run(call)
    default = default.copy()
    value = not inspect.signature(flash_kda.fwd).parameters[name].default
    if name == "use_gate_in_kernel":
        call.update(A_log=None, dt_bias=None)
    out, final = run(call, **{name: value})
    assert not np.allclose(out, default, atol=1e-3)
    expected = make_call()
    expected["out"] = np.zeros(out.shape)
    expected["final_state"] = np.zeros(final.shape)
    wanted = {**call, "out": expected["out"], "final_state": expected["final_state"], name: value}
    flash_kda.reference(**wanted)
    np.testing.assert_allclose(out, wanted["out"], atol=1e-4)
    np.testing.assert_allclose(final, wanted["final_state"], atol=1e-4)


def test_isa_by_name(isa):
    run(make_call(), isa=isa)
    assert f"/{isa}/" in flash_kda.last_report()["kernel"]


def test_isa_refuses():
    assert_refused(ValueError, ["isa", "'mmx'", "'portable'"], make_call(), isa="mmx")
    assert_refused(ValueError, "isa", make_call(), isa="portable\0")
    assert_refused(TypeError, ["isa", "3"], make_call(), isa=3)
    info = flash_kda.info()
    for name in ("avx2", "avx512", "avx512_bf16", "amx_bf16"):
        if name not in info["cpu_isa_usable"]:
            assert_refused(NotImplementedError, [name, "portable"], make_call(), isa=name)


def test_precision_refuses():
    assert_refused(ValueError, ["precision", "'fp16'", "'bf16'"], make_call(), precision="fp16")
    assert_refused(TypeError, ["precision", "16"], make_call(), precision=16)
    words = ["bf16", "portable"]
    assert_refused(NotImplementedError, words, make_call(), precision="bf16", isa="portable")


@pytest.mark.parametrize("value", [0, -1, 2**31, 10**30])
def test_threads_out_of_range(value):
    assert_refused(ValueError, ["num_threads", str(value)], make_call(), num_threads=value)


@pytest.mark.parametrize("value", [True, 1.0, "1"], ids=repr)
def test_threads_of_wrong_types(value):
    assert_refused(TypeError, ["num_threads", repr(value)], make_call(), num_threads=value)


# ---- The other calls -----------------------------------------------------------------------------


def test_decode_continues_fwd():
    whole = make_call(T=21)
    out, final = run(whole)
    head = {
        n: x[:, :20] if n in ("q", "k", "v", "g", "beta", "out") else x
        for n, x in make_call(T=21).items()
    }
    run(head)
    state = head["final_state"]
    tail = {n: whole[n][:, 20:] for n in ("q", "k", "v", "g", "beta")}
    last = np.full((1, 1, 2, D), POISON, np.float32)
    rest = {n: whole[n] for n in ("scale", "A_log", "dt_bias", "lower_bound")}
    assert flash_kda.decode(**tail, **rest, out=last, state=state) is None
    assert flash_kda.last_report()["call"] == "decode"
    np.testing.assert_allclose(last, out[:, 20:], atol=1e-5)
    np.testing.assert_allclose(state, final, atol=1e-5)
    wrong = {**tail, **rest, "out": last}
    text = assert_refused(ValueError, "state", wrong, flash_kda.decode, state=state[:, :1])
    assert text.startswith("state:")
    assert_refused(TypeError, ["state", "None"], wrong, flash_kda.decode, state=None)


def test_reference_in_float64_and_with_a_workspace():
    call = make_call()
    out, final = run(call)
    exact = make_call()
    exact.update(out=np.zeros(out.shape), final_state=np.zeros(final.shape))
    flash_kda.reference(**exact, workspace=np.zeros(0, np.uint8))
    assert flash_kda.last_report()["call"] == "reference"
    assert np.abs(exact["out"] - out).max() < 1e-5
    assert exact["out"].dtype == np.float64
    assert_refused(TypeError, ["out", "float64"], call, out=np.zeros(out.shape))


# ---- Threads -------------------------------------------------------------------------------------


def test_the_gil_is_released():
    """Another thread makes progress while one long call runs."""
    call = make_call(T=6000, H=4)
    ticks = []
    done = threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    flash_kda.reference(**call)  # slow and in one thread
    end = time.perf_counter()
    done.set()
    thread.join()
    during = [t for t in ticks if begin < t < end]
    assert len(during) > 10


def test_calls_from_several_threads_at_once():
    """Each thread on its own inputs and outputs, all at once: the bits do not change."""
    num_threads, repeats = 6, 25
    calls = [make_call(T=10 + 7 * i, H=1 + i % 3, seed=i) for i in range(num_threads)]
    expected = [[x.copy() for x in run(call, num_threads=1)] for call in calls]
    failures, start = [], threading.Barrier(num_threads)

    def work(i):
        try:
            start.wait()
            for repeat in range(repeats):
                call = make_call(T=10 + 7 * i, H=1 + i % 3, seed=i)
                out, final = run(call, num_threads=1 + repeat % 2)
                np.testing.assert_array_equal(out, expected[i][0])
                np.testing.assert_array_equal(final, expected[i][1])
                with pytest.raises(ValueError, match="scale"):
                    run(call, scale=0.0)
                assert flash_kda.last_report()["num_calls"] == repeat + 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
