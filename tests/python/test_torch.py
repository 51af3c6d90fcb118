"""PyTorch tensors: eager calls, the operator torch.ops.flash_kda.fwd, torch.compile around it."""

import functools
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from called_functions import called_functions, one_call

import flash_kda

D = 128


def make_call(B=1, T=20, H=2, N=None, seed=0, dtype=torch.bfloat16):
    """Arguments of fwd by name; the outputs hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    call = {name: normal(B, T, H, D).to(dtype) for name in ("q", "k", "v", "g")}
    call["beta"] = normal(B, T, H).to(dtype)
    call["scale"] = D**-0.5
    call["out"] = torch.full((B, T, H, D), torch.nan, dtype=dtype)
    call["A_log"] = torch.rand(H, generator=generator) * 2.7
    call["dt_bias"] = normal(H, D)
    call["lower_bound"] = -5.0
    call["initial_state"] = normal(N or B, H, D, D)
    call["final_state"] = torch.full((N or B, H, D, D), torch.nan)
    call["cu_seqlens"] = None
    return call


def clone(call):
    return {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in call.items()}


def run(call, function=flash_kda.fwd, **changes):
    """function(**call, **changes) on copies; returns out and final_state. Proves that it ran."""
    call = {**clone(call), **changes}
    before = num_calls()
    function(**call)
    assert num_calls() == before + 1
    return call["out"], call["final_state"]


def num_calls():
    return (flash_kda.last_report() or {"num_calls": 0})["num_calls"]


def assert_same(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y) and not torch.isnan(x).any()


def run_python(program):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- Imports -------------------------------------------------------------------------------------


def test_importing_flash_kda_imports_nothing_large():
    run_python(
        "import sys; before = set(sys.modules);"
        "import flash_kda; flash_kda.info(); new = set(sys.modules) - before;"
        "assert new == {'flash_kda', 'flash_kda._C', 'flash_kda._torch_hook'}, new"
    )


@pytest.mark.parametrize("first, second", [("torch", "flash_kda"), ("flash_kda", "torch")])
def test_operator_is_there_in_any_order_of_imports(first, second):
    printed = run_python(
        f"import {first}, {second}; import sys, torch;"
        "print(torch.ops.flash_kda.fwd.default._schema, torch.ops.flash_kda.decode);"
        "assert 'flash_kda' not in str(sys.meta_path)"
    )
    assert "Tensor(a!) out" in printed and "Tensor(b!)? final_state" in printed


def test_looking_for_torch_is_not_importing_it():
    """As libraries do that only want to know whether torch is installed."""
    run_python(
        "import flash_kda, importlib.util, sys;"
        "assert importlib.util.find_spec('torch').loader is not None;"
        "assert 'torch' not in sys.modules;"
        "import torch; torch.ops.flash_kda.fwd.default"
    )


def test_nothing_is_printed():
    assert run_python("import flash_kda, torch, flash_kda_C") == ""


# ---- Eager ---------------------------------------------------------------------------------------


def test_torch_and_numpy_give_the_same_bits():
    call = make_call(dtype=torch.float32)
    arrays = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in clone(call).items()}
    flash_kda.fwd(**arrays)
    expected = torch.from_numpy(arrays["out"]), torch.from_numpy(arrays["final_state"])
    assert_same(run(call), expected)


def test_a_call_is_one_function_of_the_extension():
    """No dispatcher and nothing else in Python, with gradients on or off."""
    call = make_call()
    per_token = ("q", "k", "v", "g", "beta", "out")
    for guard in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with guard():
            fwd = functools.partial(flash_kda.fwd, **call)
            assert called_functions(fwd) == one_call("fwd")
            token = {n: x[:, :1] if n in per_token else x for n, x in list(call.items())[:10]}
            decode = functools.partial(flash_kda.decode, **token, state=call["final_state"])
            assert called_functions(decode) == one_call("decode")


class OlderTensor:
    """A tensor of a PyTorch before 2.10: __dlpack__ only, and without max_version."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, stream=None):
        return self.tensor.__dlpack__(stream=stream)


def test_types_without_an_exchange_table():
    call = make_call()
    expected = run(call)
    copies = clone(call)
    flash_kda.fwd(
        **{n: OlderTensor(x) if isinstance(x, torch.Tensor) else x for n, x in copies.items()}
    )
    assert_same((copies["out"], copies["final_state"]), expected)


class TablelessParameter(torch.nn.Parameter):
    """What torch.nn.Parameter is before PyTorch 2.10; its __dlpack__ refuses requires_grad."""

    __dlpack_c_exchange_api__ = None


def test_parameters_without_an_exchange_table():
    call = make_call()
    expected = run(call)
    older = clone(call)
    for name in ("A_log", "dt_bias"):
        older[name] = TablelessParameter(call[name])
        assert older[name].requires_grad and type(older[name]) is TablelessParameter
    with pytest.raises(RuntimeError, match="A_log: requires_grad"):
        flash_kda.fwd(**older)
    with torch.inference_mode():
        flash_kda.fwd(**older)
    assert_same((older["out"], older["final_state"]), expected)


def test_views_of_a_fused_projection():
    call = make_call(B=2, T=35)
    expected = run(call)
    fused = torch.stack([call["q"], call["k"], call["v"]], dim=2)
    q, k, v = fused.unbind(2)
    rows = torch.zeros(2, 35, 5, dtype=torch.bfloat16)
    beta = rows[..., 2:4].copy_(call["beta"])
    assert not (q.is_contiguous() or beta.is_contiguous())
    copies = clone(call) | {"q": q, "k": k, "v": v, "beta": beta}
    flash_kda.fwd(**copies)
    assert_same((copies["out"], copies["final_state"]), expected)


def test_inference_tensors():
    call = make_call()
    expected = run(call)
    with torch.inference_mode():
        assert_same(run(call), expected)


class ServingParameter(torch.nn.Parameter):
    """Serving engines wrap their weights like this; the memory is an ordinary tensor's."""

    def __new__(cls, data):
        return super().__new__(cls, data, requires_grad=False)


def test_parameters_are_tensors():
    call = make_call()
    expected = run(call)
    for wrap in (torch.nn.Parameter, ServingParameter):
        wrapped = dict(clone(call), A_log=wrap(call["A_log"]), dt_bias=wrap(call["dt_bias"]))
        with torch.no_grad():
            flash_kda.fwd(**wrapped)
        assert_same((wrapped["out"], wrapped["final_state"]), expected)


NAMES = ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("function", [flash_kda.fwd, "operator"], ids=["fwd", "operator"])
def test_gradients_are_refused(name, function):
    function = torch.ops.flash_kda.fwd if function == "operator" else function
    call = make_call()
    call[name] = call[name].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{name}: requires_grad.*no backward"):
        function(**call)
    assert torch.isnan(call["out"]).all() and torch.isnan(call["final_state"]).all()
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            function(**call)
        assert not torch.isnan(call["out"]).any()


@pytest.mark.parametrize("name", ["out", "workspace"])
def test_gradients_are_refused_in_a_leaf_that_is_written(name):
    call = make_call()
    call["workspace"] = torch.zeros(flash_kda.get_workspace_size(20, 2) // 4 + 1)
    call[name] = call[name].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{name}: requires_grad"):
        flash_kda.fwd(**call)


class WantsGradient(torch.Tensor):
    """A subclass that answers for requires_grad itself."""

    requires_grad = property(lambda tensor: True)


def test_a_subclass_may_answer_for_its_gradients():
    call = make_call()
    call["k"] = call["k"].as_subclass(WantsGradient)
    with pytest.raises(RuntimeError, match="k: requires_grad"):
        flash_kda.fwd(**call)


def test_a_tensor_that_comes_twice_is_asked_for_its_gradient():
    call = make_call()
    call["final_state"] = call["initial_state"]
    flash_kda.fwd(**call)
    call["final_state"].requires_grad_()
    with pytest.raises(RuntimeError, match="initial_state: requires_grad"):
        flash_kda.fwd(**call)


def test_negated_views_are_refused():
    """The imaginary part of a conjugate is stored with the other sign."""
    call = make_call()
    values = call["A_log"]
    call["A_log"] = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert call["A_log"].is_neg() and torch.equal(call["A_log"], values)
    with pytest.raises(ValueError, match="A_log: .*resolve_neg"):
        flash_kda.fwd(**call)
    resolved = {**call, "A_log": call["A_log"].resolve_neg()}
    assert_same(run(resolved), run({**call, "A_log": values}))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.to("meta"),
        lambda x: x.to_sparse(),
        lambda x: x.float().to(torch.complex64),
        lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    ],
    ids=["meta", "sparse", "complex", "quantized"],
)
@pytest.mark.parametrize("name", ["q", "beta", "out", "initial_state"])
def test_tensors_without_plain_memory_are_refused(name, spoil):
    call = make_call()
    call[name] = spoil(call[name])
    with pytest.raises((TypeError, ValueError), match=f"^{name}: .*wanted") as raised:
        flash_kda.fwd(**call)
    assert "\n" not in str(raised.value)  # torch's own message is the cause, frames and all


def test_batched_tensors_of_vmap_are_refused():
    call = make_call()
    queries = torch.stack([call["q"], call["q"]])
    with pytest.raises(ValueError, match="^q: .*storage"):
        torch.func.vmap(lambda q: flash_kda.fwd(**{**call, "q": q}))(queries)


def test_other_dtypes_are_refused():
    call = make_call()
    with pytest.raises(TypeError, match="(?s)q: .*float16.*bfloat16"):
        flash_kda.fwd(**{**call, "q": call["q"].half()})
    with pytest.raises(TypeError, match="A_log.*bfloat16.*float32"):
        flash_kda.fwd(**{**call, "A_log": call["A_log"].bfloat16()})
    with pytest.raises(TypeError, match="cu_seqlens.*float32.*int32"):
        flash_kda.fwd(**{**call, "cu_seqlens": torch.tensor([0.0, 20.0])})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_are_refused_without_cuda_kernels():
    if flash_kda.info()["cuda_archs"]:
        pytest.skip("this build has CUDA kernels")
    call = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in make_call().items()}
    with pytest.raises(RuntimeError, match="no CUDA kernels"):
        flash_kda.fwd(**call)
    mixed = {**call, "k": call["k"].cpu()}
    with pytest.raises(ValueError, match="k: on cpu, wanted cuda:0"):
        flash_kda.fwd(**mixed)


# ---- The operator --------------------------------------------------------------------------------


def positional(call):
    """The 13 arguments by position, the rest by name."""
    values = list(call.values())
    return values[:13], dict(list(call.items())[13:])


def test_operator_gives_the_same_bits():
    call = make_call(T=48, N=2)
    call["cu_seqlens"] = torch.tensor([0, 17, 48])
    expected = run(call)
    assert_same(run(call, torch.ops.flash_kda.fwd), expected)
    copies = clone(call)
    arguments, options = positional(copies)
    torch.ops.flash_kda.fwd(*arguments, **options)
    assert_same((copies["out"], copies["final_state"]), expected)


def test_operator_passes_every_option():
    size = flash_kda.get_workspace_size(48, 2, 2)
    call = make_call(T=48, N=3)
    call.update(
        cu_seqlens=torch.tensor([0, 17, 48]),
        workspace=torch.zeros(size, dtype=torch.uint8),
        checkpoint_state=torch.full((2, 2, D, D), torch.nan),
        checkpoint_offsets=torch.tensor([16, 16]),
        checkpoint_indptr=torch.tensor([0, 1, 2]),
        state_indices=torch.tensor([2, 0]),
        use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=True,
        isa="portable",
        precision="fp32",
        num_threads=1,
        A_log=None,
        dt_bias=None,
    )
    call["k"] = call["k"] / D**0.5
    call["g"] = -call["g"].abs()
    call["beta"] = call["beta"].sigmoid()
    call["final_state"] = call["initial_state"].clone()
    plain, through = clone(call), clone(call)
    flash_kda.fwd(**plain)
    before = num_calls()
    torch.ops.flash_kda.fwd(**through)
    assert num_calls() == before + 1 and "portable" in flash_kda.last_report()["kernel"]
    for name in ("out", "final_state", "checkpoint_state"):
        assert torch.equal(plain[name], through[name]) and not plain[name].isnan().any()


def versions(call):
    return {n: x._version for n, x in call.items() if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("call_it", ["function", "operator", "under inference_mode"])
@pytest.mark.parametrize("name", ["fwd", "decode"])
def test_a_call_counts_as_a_write(name, call_it):
    """Autograd must notice that what it saved has changed."""
    call = make_call(T=1 if name == "decode" else 20)
    written = {"out", "final_state"}
    if name == "fwd" and call_it != "operator":
        call["workspace"] = torch.zeros(flash_kda.get_workspace_size(20, 2) // 4 + 1)
        written.add("workspace")
    if name == "decode":
        call["state"] = call.pop("initial_state")
        del call["final_state"]
        written = {"out", "state"}
    function = getattr(torch.ops.flash_kda if call_it == "operator" else flash_kda, name)
    before = versions(call)
    with torch.inference_mode(call_it == "under inference_mode"):
        function(**call)
    after = versions(call)
    assert {n for n in before if after[n] > before[n]} == written


def test_a_call_without_success_is_no_write():
    call = make_call()
    before = versions(call)
    with pytest.raises(ValueError, match="scale"):
        flash_kda.fwd(**{**call, "scale": 0.0})
    assert versions(call) == before


def test_autograd_notices_what_a_call_wrote():
    call = make_call()
    factor = torch.ones(1, requires_grad=True)
    product = factor * call["out"]  # saves out for the backward pass
    flash_kda.fwd(**call)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_inference_tensors_have_no_version_to_count():
    with torch.inference_mode():
        call = clone(make_call())
        flash_kda.fwd(**call)
    assert not call["out"].isnan().any()


def test_operator_passes_the_checks_of_torch():
    call = make_call()
    arguments, options = positional(call)
    result = torch.library.opcheck(torch.ops.flash_kda.fwd.default, arguments, options)
    assert set(result.values()) == {"SUCCESS"}
    token = make_call(T=1)
    names = [*list(token)[:10], "initial_state"]
    result = torch.library.opcheck(
        torch.ops.flash_kda.decode.default, [token[name] for name in names]
    )
    assert set(result.values()) == {"SUCCESS"}


def test_fake_tensors_go_through_the_operator():
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = num_calls()
    with FakeTensorMode() as mode:
        call = {
            n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for n, x in make_call().items()
        }
        flash_kda.fwd(**call)
        flash_kda.decode(*(call[n] for n in list(call)[:10]), call["initial_state"])
    assert num_calls() == before  # nothing was computed


class Foreign(torch.Tensor):
    """A subclass whose values are not where its memory is."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"Foreign does not know {function}")


def test_subclasses_decide_for_themselves():
    call = make_call()
    call["q"] = call["q"].as_subclass(Foreign)
    with pytest.raises(NotImplementedError, match="Foreign does not know flash_kda.fwd"):
        flash_kda.fwd(**call)
    with pytest.raises(TypeError, match="reference"):
        flash_kda.reference(**call)


# ---- torch.compile -------------------------------------------------------------------------------

GUARDS = {"none": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def layer(q, k, v, g, beta, A_log, dt_bias, initial_state, **options):
    """What a model does around fwd: allocates, calls, and goes on computing."""
    out = torch.empty_like(v)
    final = torch.empty_like(initial_state)
    flash_kda.fwd(
        q * 1.0,
        k,
        v,
        g,
        beta,
        D**-0.5,
        out,
        A_log,
        dt_bias,
        -5,
        initial_state=initial_state,
        final_state=final,
        **options,
    )
    return out * 2, final + 1


def layer_arguments(**shape):
    call = make_call(**shape)
    return [call[n] for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")]


needs_inductor = pytest.mark.skipif(
    " " in torch.__file__, reason="PyTorch's inductor cannot link from a folder with a space"
)


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=needs_inductor)]
)
def test_compile_fullgraph(backend, guard):
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    arguments = layer_arguments(B=2)
    with GUARDS[guard]():
        expected = layer(*arguments)
        before = num_calls()
        got = compiled(*arguments)
        assert num_calls() == before + 1
    assert_same(got, expected)


def test_compile_with_dynamic_shapes():
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (20, 33, 64):
        arguments = layer_arguments(T=T, seed=T)
        assert_same(compiled(*arguments), layer(*arguments))


@pytest.mark.parametrize(
    "options",
    [
        {"cu_seqlens": torch.tensor([0, 17, 48])},
        {
            "cu_seqlens": torch.tensor([0, 17, 48], dtype=torch.int32),
            "state_indices": torch.tensor([1, 0]),
        },
        {"isa": "portable", "precision": "fp32", "num_threads": 1},
        {"use_qk_l2norm_in_kernel": False, "allow_neg_eigval": True},
    ],
    ids=lambda options: "+".join(options),
)
def test_compile_with_options(options):
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    arguments = layer_arguments(T=48, N=2 if "cu_seqlens" in options else 1)
    arguments[1] = arguments[1] / D**0.5
    assert_same(compiled(*arguments, **options), layer(*arguments, **options))


@needs_inductor
def test_compile_with_the_state_in_place():
    """A pool of states that the graph gets as an input and updates."""

    def step(call, pool):
        flash_kda.fwd(**call, initial_state=pool, final_state=pool, state_indices=indices)
        return call["out"] * 2

    call = make_call(T=30, N=2)
    indices = torch.tensor([4, 1])
    call["cu_seqlens"] = torch.tensor([0, 13, 30])
    del call["initial_state"], call["final_state"]
    pool = torch.randn(6, 2, D, D)
    eager, compiled = pool.clone(), pool.clone()
    expected = step(clone(call), eager)
    got = torch.compile(step, fullgraph=True)(clone(call), compiled)
    assert_same((got, compiled), (expected, eager))
    untouched = [0, 2, 3, 5]
    assert torch.equal(compiled[untouched], pool[untouched])
    assert not torch.equal(compiled[4], pool[4])


@needs_inductor
def test_compile_decode():
    def step(token, state):
        out = torch.empty_like(token["v"])
        flash_kda.decode(**token, out=out, state=state)
        return out * 2

    call = make_call(B=3, T=1)
    token = {n: call[n] for n in list(call)[:10] if n != "out"}
    eager, compiled = call["initial_state"].clone(), call["initial_state"].clone()
    expected = step(token, eager)
    before = num_calls()
    got = torch.compile(step, fullgraph=True)(token, compiled)
    assert num_calls() == before + 1 and flash_kda.last_report()["call"] == "decode"
    assert_same((got, compiled), (expected, eager))


def test_compile_refuses_gradients():
    arguments = layer_arguments()
    arguments[0].requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="no backward"):
        compiled(*arguments)
    with torch.no_grad():
        assert_same(compiled(*arguments), layer(*arguments))


def test_errors_of_compiled_calls_name_the_argument():
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="cu_seqlens"):
        compiled(*layer_arguments(), cu_seqlens=torch.tensor([0, 21]))


def test_compile_when_torch_comes_last():
    run_python(
        "import flash_kda, torch\n"
        "def f(q, beta):\n"
        "    out = torch.empty_like(q)\n"
        "    flash_kda.fwd(q, q, q, q, beta, 0.1, out, None, None, -5.0)\n"
        "    return out + 1\n"
        "q, beta = torch.randn(1, 9, 2, 128), torch.randn(1, 9, 2)\n"
        "g = torch.compile(f, fullgraph=True, backend='aot_eager')\n"
        "assert torch.equal(g(q, beta), f(q, beta))\n"
    )


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, *arguments):
            return layer(*arguments)

    arguments = tuple(layer_arguments())
    program = torch.export.export(Layer(), arguments)
    assert "flash_kda.fwd" in str(program.graph)
    assert_same(program.module()(*arguments), layer(*arguments))
