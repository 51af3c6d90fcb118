"""The cases of the GPU benchmark, their inputs in three gate regimes, and the bytes they move."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

D = 128
LOWER_BOUND = -5.0
MIXED = (1300, 547, 2048, 963, 271, 3063)


@dataclass(frozen=True)
class Case:
    """`lengths`: tokens of each sequence; more than one are packed, with cu_seqlens."""

    name: str
    lengths: tuple
    H: int

    @property
    def tokens(self):
        return sum(self.lengths)

    @property
    def min_bytes(self):
        """q, k, v, g, out in bf16 and beta, once each; the fp32 states read and written."""
        rows = self.tokens * self.H * (5 * D + 1) * 2
        return rows + 2 * len(self.lengths) * self.H * D * D * 4

    def shrunk(self):
        """A few tokens and heads of the same kind, for a dry run."""
        lengths = tuple(max(1, min(n // 32, 40)) for n in self.lengths[:3])
        return replace(self, lengths=lengths, H=min(self.H, 2))


def case(name):
    """The case of a name in gpu_names.py, or of any other of that kind."""
    if name.startswith("mixed x"):
        return Case(name, MIXED, int(name.removeprefix("mixed x")))
    *N, T, H = map(int, name.split("x"))
    return Case(name, (T,) * (N[0] if N else 1), H)


@dataclass
class Inputs:
    """Arguments of a call. Rows [1, T, H, D] bf16, states [N, H, D, D] fp32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    initial_state: torch.Tensor
    lengths: tuple
    lower_bound: float = LOWER_BOUND
    scale: float = D**-0.5

    @property
    def rows(self):
        return {name: getattr(self, name) for name in ("q", "k", "v", "g", "beta")}

    @property
    def cu_seqlens(self):
        """int64, as FLA passes it; None for one sequence."""
        if len(self.lengths) == 1:
            return None
        ends = torch.tensor((0, *self.lengths)).cumsum(0)
        return ends.to(self.q.device)

    def first_tokens(self, limit):
        """The sequences that begin in the first `limit` tokens, cut there."""
        lengths, left = [], limit
        for n in self.lengths:
            if left > 0:
                lengths.append(min(n, left))
                left -= n
        total = sum(lengths)
        rows = {name: x[:, :total] for name, x in self.rows.items()}
        state = self.initial_state[: len(lengths)]
        return replace(self, **rows, initial_state=state, lengths=tuple(lengths))

    def heads_on_cpu(self, heads):
        rows = {name: x[:, :, heads].cpu() for name, x in self.rows.items()}
        return replace(
            self,
            **rows,
            A_log=self.A_log[heads].cpu(),
            dt_bias=self.dt_bias[heads].cpu(),
            initial_state=self.initial_state[:, heads].cpu(),
        )


def read_layers(path):
    """{prefix: {name: tensor}} of a safetensors file, and its metadata."""
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__", {})
    layers = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        values = torch.frombuffer(bytearray(data[start + begin : start + end]), dtype=torch.uint8)
        tensor = values.view(dtypes[entry["dtype"]]).reshape(entry["shape"])
        prefix, _, short = name.rpartition(".")
        layers.setdefault(prefix, {})[short] = tensor
    return layers, metadata


def trained_inputs(shape, path, device):
    """The layers of a recording side by side as heads, tiled to size in heads and tokens."""
    layers, metadata = read_layers(path)
    parts = [layers[prefix] for prefix in sorted(layers)]
    T = min(part["q"].shape[1] for part in parts)
    heads = torch.arange(shape.H, device=device) % sum(part["q"].shape[2] for part in parts)
    tokens = torch.arange(shape.tokens, device=device) % T
    found = {}
    for name in ("q", "k", "v", "g", "beta"):
        rows = torch.cat([part[name][:1, :T] for part in parts], 2).to(device)
        found[name] = rows[:, :, heads][:, tokens]
    for name in ("A_log", "dt_bias"):
        found[name] = torch.cat([part[name] for part in parts]).float().to(device)[heads]
    found["dt_bias"] = found["dt_bias"].reshape(shape.H, D)
    return found | {"lower_bound": float(metadata.get("lower_bound", LOWER_BOUND))}


def make_inputs(shape, regime, device, data):
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes, dtype=torch.bfloat16):
        return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

    def uniform(*sizes):
        return torch.rand(sizes, generator=generator, device=device)

    T, H, N = shape.tokens, shape.H, len(shape.lengths)
    if regime == "trained":
        found = trained_inputs(shape, data, device)
    else:
        found = {name: normal(1, T, H, D) for name in ("q", "k", "v", "g")}
        found |= {"beta": normal(1, T, H), "A_log": uniform(H), "dt_bias": uniform(H, D)}
    if regime == "slow":
        found["g"].mul_(0.5).sub_(8.5)
        found["A_log"].zero_()
        found["dt_bias"].zero_()
    state = normal(N, H, D, D, dtype=torch.float32).mul_(0.1)
    return Inputs(**found, initial_state=state, lengths=shape.lengths)
