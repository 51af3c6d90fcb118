"""serving.py on CPU tensors: 200 steps of a small server, against float64."""

import threading

import pytest

torch = pytest.importorskip("torch")
pytest.register_assert_rewrite("serving")

from serving import BF16, F32, Server, check

import flash_kda

# Largest RMS(error) / RMS(reference) of all outputs (bf16: rounding alone costs 1.66e-3), of the
# worst step's, and of any step's states.
BOUNDS = {F32: (1.75e-3, 2.2e-3, 1e-6), BF16: (5e-3, 1e-2, 1e-2)}
GATES = pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])


@pytest.fixture(autouse=True)
def one_thread():
    """torch's: its threads would only wait for one another between these small steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@GATES
def test_two_hundred_steps(dtype, lower_bound):
    server = Server("cpu", seed=1, lower_bound=lower_bound, state_dtype=dtype).run()
    check(server, BOUNDS[dtype], "cpu/")


def test_every_kernel_set(isa, monkeypatch):
    monkeypatch.setenv("FLASH_KDA_CPU_ISA", isa)
    server = Server("cpu", seed=2, steps=60).run()
    check(server, BOUNDS[F32], f"cpu/{isa}/")


def test_a_seed_repeats(monkeypatch):
    """Bit for bit, with any number of threads."""
    hashes = {}
    for seed, threads in ((3, 1), (3, 3), (4, 1)):
        monkeypatch.setenv("FLASH_KDA_NUM_THREADS", str(threads))
        hashes[seed, threads] = Server("cpu", seed, steps=40).run().hash.hexdigest()
    assert hashes[3, 1] == hashes[3, 3] != hashes[4, 1]


def forget_accepted(*args, num_accepted_tokens=None, **options):
    """Reads the state after the first token whatever was accepted."""
    if num_accepted_tokens is not None:
        num_accepted_tokens = num_accepted_tokens.clamp(max=1)
    flash_kda.decode(*args, num_accepted_tokens=num_accepted_tokens, **options)


def pad_with_slot_0(*args, state_indices=None, **options):
    flash_kda.decode(*args, state_indices=state_indices.clamp(min=0), **options)


def lose_the_update(*args, **options):
    args = list(args)
    args[10] = args[10].clone()
    flash_kda.decode(*args, **options)


@pytest.mark.parametrize("wrong", [forget_accepted, pad_with_slot_0, lose_the_update])
def test_a_wrong_decode_is_found(wrong):
    with pytest.raises((AssertionError, ValueError)):
        check(Server("cpu", seed=1, steps=60, decode=wrong).run(), BOUNDS[BF16], "cpu/")


class Elsewhere:
    """Decodes in a thread of its own: for this one that is no call of the library, as a graph's
    replay is none."""

    def __call__(self, *args, **options):
        thread = threading.Thread(target=flash_kda.decode, args=args, kwargs=options)
        thread.start()
        thread.join()


def test_the_report_of_another_call_is_not_taken():
    with pytest.raises(AssertionError, match="no call of the library, and no kernel is named"):
        Server("cpu", seed=1, steps=20, decode=Elsewhere()).run()
    named = Elsewhere()
    named.kernel = "cpu/elsewhere/decode"
    server = Server("cpu", seed=1, steps=20, decode=named).run()
    prefill = {name for name in server.kernels if "prefill" in name}
    assert prefill and server.kernels == prefill | {named.kernel}
