"""A server in small: prompts, decode steps, draft tokens, one pool of states; all against float64.

Each step of Server.run lets sequences leave and join, prefills a piece of every waiting prompt with
one flash_kda.fwd, and decodes the others with one flash_kda.decode:

    waiting:   x[:, cu[n]:cu[n + 1]], slot of n      -> fwd(..., pool, pool, cu, state_indices)
    decoding:  1 or up to `drafts` tokens per row    -> decode(..., pool, state_indices)

Every sequence owns `drafts` slots. Its state is in the slot of its last accepted token; a step
with drafts leaves the state after each token in a slot of its own, and then so many tokens are
accepted at random. Slots that nobody owns hold NaN, as do the inputs of padding rows and the
outputs before each call, so that whatever is read or left out in error shows. What flash_kda
writes is compared with flash_kda.reference, which carries float64 states of its own.

The same seed gives the same calls on every device. Tokens are views of one fused projection.
"""

import dataclasses
import hashlib
import math
import random

import torch

import flash_kda

K = V = 128
BF16, F32, F64, I32 = torch.bfloat16, torch.float32, torch.float64, torch.int32
NAN = float("nan")


@dataclasses.dataclass
class Settings:
    H: int = 2
    HV: int = 4
    rows: int = 8  # of a decode batch, padding among them
    drafts: int = 4
    slots: int = 48
    steps: int = 200
    longest_prompt: int = 120
    longest_piece: int = 50  # of a prompt, in one step
    longest_answer: int = 80
    lower_bound: float | None = -5.0
    state_dtype: torch.dtype = F32


@dataclasses.dataclass
class Sequence:
    slots: list  # one for each token of a step
    prompt: int  # tokens that wait for prefill
    answer: int  # tokens to decode
    exact: torch.Tensor  # the state in float64
    accepted: int = 1  # the state is in slots[accepted - 1]

    @property
    def slot(self):
        return self.slots[self.accepted - 1]


def num_calls():
    """Successful calls of the library in this thread."""
    return (flash_kda.last_report() or {"num_calls": 0})["num_calls"]


class Errors:
    """RMS(error) / RMS(reference), over everything and in the worst step."""

    def __init__(self):
        self.error = self.reference = self.worst = 0.0

    def add(self, got, wanted):
        got = got.double().cpu()
        error, reference = (got - wanted).norm().item(), wanted.norm().item()
        assert math.isfinite(error), "not every number was written"
        self.error, self.reference = (
            math.hypot(self.error, error),
            math.hypot(self.reference, reference),
        )
        self.worst = max(self.worst, error / reference)

    @property
    def ratio(self):
        return self.error / self.reference


class Server:
    def __init__(self, device, seed=0, decode=flash_kda.decode, **settings):
        self.settings = s = Settings(**settings)
        self.device, self.call_decode = device, decode
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.A_log = torch.empty(s.HV).uniform_(1, 16, generator=self.generator).log()
        self.dt_bias = torch.randn(s.HV, K, generator=self.generator)
        self.parameters = [x.to(device) for x in (self.A_log, self.dt_bias)]
        shape = (s.slots, s.HV, V, K)
        self.pool = torch.full(shape, NAN, dtype=s.state_dtype, device=device)
        self.free = list(range(s.slots))
        self.live = []
        self.out, self.state = Errors(), Errors()
        self.count = dict.fromkeys(
            ("joined", "left", "prefilled", "decoded", "drafted", "accepted", "padding"), 0
        )
        self.kernels = set()
        self.hash = hashlib.sha256()

    # ---- Tokens ----------------------------------------------------------------------------------

    def tokens(self, *shape):
        """[*shape, width]: the fused projection of so many tokens."""
        s = self.settings
        width = 2 * s.H * K + s.HV * (V + K + 1)
        return torch.randn(*shape, width, generator=self.generator).to(BF16)

    def split(self, fused):
        """q, k, v, g, beta: views."""
        s = self.settings
        parts = fused.split([s.H * K, s.H * K, s.HV * V, s.HV * K, s.HV], dim=-1)
        heads = (s.H, s.H, s.HV, s.HV)
        return *(x.unflatten(-1, (h, -1)) for x, h in zip(parts, heads)), parts[4]

    def advance(self, sequences, fused, cu):
        """Their float64 states go on by these tokens [1, total, width]; -> out in float64."""
        s = self.settings
        out = torch.full((*fused.shape[:2], s.HV, V), NAN, dtype=F64)
        states = torch.stack([x.exact for x in sequences])
        flash_kda.reference(
            *self.split(fused), K**-0.5, out, self.A_log, self.dt_bias, s.lower_bound,
            initial_state=states, final_state=states, cu_seqlens=torch.tensor(cu),
        )  # fmt: skip
        for x, state in zip(sequences, states):
            x.exact = state
        return out

    def indices(self, values):
        return torch.tensor(values, dtype=I32, device=self.device)

    # ---- What a step does ------------------------------------------------------------------------

    def leave(self):
        for x in [x for x in self.live if not x.prompt and x.answer <= 0]:
            self.live.remove(x)
            self.pool[x.slots] = NAN
            self.free += x.slots
            self.count["left"] += 1

    def join(self):
        s = self.settings
        while len(self.live) < s.rows and len(self.free) >= s.drafts and self.random.random() < 0.4:
            self.random.shuffle(self.free)
            slots = [self.free.pop() for _ in range(s.drafts)]
            self.pool[slots[0]] = 0
            prompt = self.random.randint(1, s.longest_prompt)
            answer = self.random.randint(1, s.longest_answer)
            exact = torch.zeros(s.HV, V, K, dtype=F64)
            self.live.append(Sequence(slots, prompt, answer, exact))
            self.count["joined"] += 1

    def prefill(self, sequences):
        """A piece of each prompt, and a row of padding between them."""
        s = self.settings
        pieces = [min(x.prompt, self.random.randint(1, s.longest_piece)) for x in sequences]
        at = self.random.randint(0, len(pieces))
        lengths = [*pieces[:at], 3, *pieces[at:]]
        slots = [x.slot for x in sequences]
        slots.insert(at, -1)
        cu = [0]
        for length in lengths:
            cu.append(cu[-1] + length)
        spare = 5  # rows past cu[-1]
        fused = self.tokens(1, cu[-1] + spare)
        padding = slice(cu[at], cu[at + 1])
        fused[:, padding] = NAN
        out = torch.full((1, cu[-1] + spare, s.HV, V), NAN, dtype=BF16, device=self.device)
        self.call(
            flash_kda.fwd,
            *self.split(fused.to(self.device)), K**-0.5, out, *self.parameters, s.lower_bound,
            self.pool, self.pool, self.indices(cu), state_indices=self.indices(slots),
        )  # fmt: skip
        out = out.cpu()
        assert out[:, cu[-1] :].isnan().all(), "rows past cu_seqlens[-1] were written"
        assert not out[:, padding].any(), "rows of padding are not zero"
        rows = [t for n in range(len(lengths)) if n != at for t in range(cu[n], cu[n + 1])]
        kept = [0]
        for length in pieces:
            kept.append(kept[-1] + length)
        self.compare(out[:, rows], self.advance(sequences, fused[:, rows], kept))
        for x, length in zip(sequences, pieces):
            x.prompt -= length
        self.count["prefilled"] += sum(pieces)

    def decode(self, sequences):
        """One row for each of them and rows of padding, shuffled; dense or packed."""
        s = self.settings
        rows = [*sequences, *[None] * (s.rows - len(sequences))]
        self.random.shuffle(rows)
        drafts = self.random.random() < 0.7
        packed = self.random.random() < 0.5
        T = s.drafts if drafts else 1
        lengths = [T if not packed else self.random.randint(0 if x is None else 1, T) for x in rows]
        fused = self.tokens(len(rows), T)
        for n, x in enumerate(rows):
            if x is None:
                fused[n] = NAN
        sent, cu = fused, None
        if packed:
            sent = torch.cat([fused[n, :length] for n, length in enumerate(lengths)])[None]
            cu = self.indices([sum(lengths[:n]) for n in range(len(rows) + 1)])
        if drafts:
            slots = [x.slots if x else [-1] * T for x in rows]
            accepted = self.indices([x.accepted if x else 0 for x in rows])
        else:
            slots, accepted = [x.slot if x else -1 for x in rows], None
        shape = (*sent.shape[:2], s.HV, V)
        out = torch.full(shape, NAN, dtype=BF16, device=self.device)
        self.call(
            self.call_decode,
            *self.split(sent.to(self.device)), K**-0.5, out, *self.parameters, s.lower_bound,
            self.pool, state_indices=self.indices(slots), num_accepted_tokens=accepted,
            cu_seqlens=cu,
        )  # fmt: skip
        out = out.cpu()
        if packed:
            out = list(out[0].split(lengths))
        for n, x in enumerate(rows):
            if x is None:
                assert not out[n].any(), "rows of padding are not zero"
                self.count["padding"] += 1
        self.accept(rows, lengths, fused, out, drafts)

    def accept(self, rows, lengths, fused, out, drafts):
        """Compares token by token, and takes over as many tokens as chance will have."""
        taken = {n: self.random.randint(1, lengths[n]) for n, x in enumerate(rows) if x is not None}
        kept = {}
        for t in range(max((lengths[n] for n in taken), default=0)):
            some = [n for n in taken if lengths[n] > t]
            tokens = torch.stack([fused[n, t] for n in some])[None]
            exact = self.advance([rows[n] for n in some], tokens, list(range(len(some) + 1)))
            self.compare(torch.stack([out[n][t] for n in some])[None], exact)
            if drafts and self.looking:
                self.check_states([rows[n].slots[t] for n in some], [rows[n] for n in some])
            for n in some:
                if taken[n] == t + 1:
                    kept[n] = rows[n].exact
        for n, count in taken.items():
            rows[n].exact = kept[n]
            if drafts:
                rows[n].accepted = count
            rows[n].answer -= count
            self.count["decoded"] += lengths[n]
            self.count["drafted"] += lengths[n] - 1
            self.count["accepted"] += count - 1

    def compare(self, got, wanted):
        self.out.add(got, wanted)
        self.hash.update(got.contiguous().view(torch.int16).numpy().tobytes())

    def call(self, function, *args, **options):
        """Notes which kernel ran: the library's report of this very call, or `function.kernel`
        where there is one. A graph's replay is no call of the library, whose last report is then
        that of whatever else ran before."""
        before = num_calls()
        function(*args, **options)
        kernel = getattr(function, "kernel", None)
        if kernel is None:
            assert num_calls() == before + 1, "no call of the library, and no kernel is named"
            kernel = flash_kda.last_report()["kernel"]
        self.kernels.add(kernel)

    def check_states(self, slots, sequences):
        if slots:
            self.state.add(self.pool[slots], torch.stack([x.exact for x in sequences]))

    def check_pool(self):
        """The states of the living are right, and nobody wrote a slot that is free."""
        self.check_states([x.slot for x in self.live], self.live)
        assert self.pool[self.free].isnan().all(), "a free slot was written"

    # ---- All of it -------------------------------------------------------------------------------

    def run(self):
        for step in range(self.settings.steps):
            self.looking = step % 4 == 3  # at states: that takes longer than all the rest
            self.leave()
            self.join()
            waiting = [x for x in self.live if x.prompt]
            decoding = [x for x in self.live if not x.prompt]
            if waiting:
                self.prefill(waiting)
            if decoding:
                self.decode(decoding)
            if self.looking:
                self.check_pool()
        pool = self.pool.cpu().view(torch.int16 if self.pool.dtype == BF16 else torch.int32)
        self.hash.update(pool.numpy().tobytes())
        return self


def check(server, bounds, kernel):
    """The errors, the kernels that ran, and that it was a busy day."""
    errors = server.out.ratio, server.out.worst, server.state.worst
    for name, error, bound in zip(("out", "worst out", "state"), errors, bounds):
        assert error <= bound, f"{name}: {error:.3g} of RMS(reference), bound {bound:.3g}"
    assert all(name.startswith(kernel) for name in server.kernels), server.kernels
    assert any("decode" in name for name in server.kernels) and len(server.kernels) > 1
    count, steps = server.count, server.settings.steps
    assert count["joined"] > count["left"] > steps / 20
    assert count["prefilled"] > 5 * steps and count["decoded"] > 5 * steps
    assert count["drafted"] > count["accepted"] > steps
    assert count["padding"] > steps / 2
