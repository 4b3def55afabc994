"""Constructors of every kind that real models have; large enough that their weights are not kept while recording.

`RECORDED`: what must be recorded. `BUILT`: what can only be built for real. Each is made anew at every call.
"""

from __future__ import annotations

import copy
import io
import math
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import init
from torch.nn.utils import parametrizations

Fill = Callable[[nn.Module], object]
RECORDED: dict[str, Callable[[], nn.Module]] = {}
BUILT: dict[str, Callable[[], nn.Module]] = {}


class Made(nn.Module):
    def __init__(self, fill: Fill) -> None:
        super().__init__()
        fill(self)


def recorded(fill: Fill) -> Fill:
    RECORDED[fill.__name__] = lambda: Made(fill)
    return fill


def built(fill: Fill) -> Fill:
    BUILT[fill.__name__] = lambda: Made(fill)
    return fill


def _with_init(name: str, *arguments: float, dims: int = 2) -> Callable[[], nn.Module]:
    shape = (90, 100, 3)[:dims]
    return lambda: nn.ParameterList([getattr(init, name)(torch.empty(shape), *arguments), torch.randn(90, 100)])


for _name in (
    "uniform_",
    "normal_",
    "trunc_normal_",
    "ones_",
    "zeros_",
    "eye_",
    "xavier_uniform_",
    "xavier_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "orthogonal_",
):
    RECORDED[f"init.{_name}"] = _with_init(_name)
RECORDED["init.constant_"] = _with_init("constant_", 3.0)
RECORDED["init.dirac_"] = _with_init("dirac_", dims=3)
RECORDED["init.sparse_"] = _with_init("sparse_", 0.3)
RECORDED["weight_norm"] = lambda: parametrizations.weight_norm(nn.Linear(90, 100))
RECORDED["spectral_norm"] = lambda: parametrizations.spectral_norm(nn.Linear(90, 100))
RECORDED["old spectral_norm"] = lambda: nn.utils.spectral_norm(nn.Linear(90, 100))
for _map in ("matrix_exp", "cayley", "householder"):
    RECORDED[f"orthogonal {_map}"] = lambda _map=_map: parametrizations.orthogonal(
        nn.Linear(100, 100), orthogonal_map=_map
    )
RECORDED["half"] = lambda: nn.Sequential(nn.Linear(90, 100), nn.BatchNorm1d(100)).half()
RECORDED["bfloat16"] = lambda: nn.Sequential(nn.Linear(90, 100), nn.BatchNorm1d(100)).to(torch.bfloat16)
RECORDED["transformer"] = lambda: nn.Transformer(96, 4, 1, 1, 128, batch_first=True)
RECORDED["lstm"] = lambda: nn.LSTM(64, 64, 2, proj_size=32)
RECORDED["unused kinds"] = lambda: nn.ModuleList(
    [nn.MultiheadAttention(96, 4, kdim=50, vdim=40), nn.Bilinear(30, 30, 30), nn.EmbeddingBag(100, 90), nn.GRU(64, 64)]
)


@recorded
def default_dtype(m: nn.Module) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        m.layer, m.table = nn.Linear(90, 100), nn.Parameter(torch.arange(9000) / 7 + torch.rand(9000))
    finally:
        torch.set_default_dtype(before)


@recorded
def on_the_cpu_by_name(m: nn.Module) -> None:
    with torch.device("cpu"):
        m.layer = nn.Linear(90, 100)


@recorded
def meta_then_filled(m: nn.Module) -> None:
    with torch.device("meta"):
        m.layer, m.norm = nn.Linear(90, 100), nn.LayerNorm(9000)
    assert m.layer.weight.is_meta and m.layer.weight.device.type == "meta"
    m.to_empty(device="cpu")
    assert not m.layer.weight.is_meta and m.layer.weight.device.type == "cpu"
    m.layer.reset_parameters()
    m.norm.reset_parameters()


@recorded
def deep_copies(m: nn.Module) -> None:
    layer = nn.TransformerEncoderLayer(96, 4, 128, batch_first=True)
    m.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    m.copies = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))


@recorded
def tied_and_shared(m: nn.Module) -> None:
    m.embedding, m.head = nn.Embedding(100, 90), nn.Linear(90, 100, bias=False)
    m.head.weight = m.embedding.weight
    init.normal_(m.embedding.weight, std=0.02)
    m.register_buffer("average", m.head.weight.detach().clone())
    m.shown = m.head.weight.detach()[:4]


@recorded
def filled_later(m: nn.Module) -> None:
    m.layer = nn.Linear(90, 100)
    m.p, m.q = nn.Parameter(torch.empty(90, 100)), nn.Parameter(torch.empty(90, 100))
    init.xavier_uniform_(m.p)
    with torch.no_grad():
        m.q.copy_(m.layer.weight.t()).mul_(2)
    m.layer.weight.data = torch.randn(100, 90) * 0.02
    m.layer.weight.data[3].zero_()
    m.layer.weight.data[4, 5] = 1


@recorded
def tables(m: nn.Module) -> None:
    positions = torch.zeros(200, 64)
    angles = torch.arange(200.0).unsqueeze(1) * torch.exp(torch.arange(0, 64, 2) * (-math.log(1e4) / 64))
    positions[:, 0::2], positions[:, 1::2] = torch.sin(angles), torch.cos(angles)
    m.register_buffer("positions", positions, persistent=False)
    m.register_buffer("mask", torch.ones(100, 100).tril().bool())
    m.register_buffer("bias", torch.where(m.mask, 0.0, -1e9))
    m.register_buffer("count", torch.tensor(0))
    m.register_buffer("permutation", torch.randperm(10_000))
    m.permuted = nn.Parameter(torch.randn(10_000)[m.permutation])


@recorded
def numbers_of_values(m: nn.Module) -> None:
    rates = [x.item() for x in torch.linspace(0, 0.1, 12)]
    m.drop, m.layer = nn.Dropout(rates[3]), nn.Linear(90, 100)


@recorded
def looks_at_random_values(m: nn.Module) -> None:
    m.small, m.layer = nn.Linear(10, 10), nn.Linear(90, 100)
    m.filled = nn.Parameter(torch.full((90, 100), m.small.weight.tolist()[0][0]))
    m.scaled = nn.Parameter(torch.full((90, 100), float(m.layer.weight.detach().std())))
    m.more = nn.ModuleList(nn.Linear(90, 100) for _ in range(torch.randint(1, 4, ()).item()))
    if torch.isnan(m.layer.weight).any() or not torch.equal(m.layer.weight, copy.deepcopy(m.layer).weight):
        raise ValueError


@recorded
def own_generators(m: nn.Module) -> None:
    generator = torch.Generator().manual_seed(int(torch.randint(0, 1000, ())))
    m.drawn, m.layer = nn.Parameter(torch.randn(90, 100, generator=generator)), nn.Linear(90, 100)
    init.trunc_normal_(m.layer.weight, generator=generator)
    m.small = nn.Parameter(torch.rand(5, generator=generator))


@recorded
def sets_the_generator(m: nn.Module) -> None:
    m.a = nn.Linear(90, 100, bias=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        m.b = nn.Linear(90, 100)
    state = torch.get_rng_state()
    m.c = nn.Linear(90, 100, bias=False)
    torch.set_rng_state(state)
    m.d = nn.Linear(90, 100)
    torch.manual_seed(torch.initial_seed() + 1)
    m.e = nn.Linear(90, 100)


@recorded
def other_generators(m: nn.Module) -> None:
    m.layer = nn.Linear(90, 100)
    m.layer.weight.data.copy_(torch.from_numpy(np.random.randn(100, 90).astype(np.float32)))
    m.layer.bias.data.fill_(random.random())


@recorded
def runs_itself(m: nn.Module) -> None:
    m.net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Dropout())
    m.head = nn.Linear(m.net(torch.rand(2, 3, 8, 8)).flatten(1).shape[1], 10)


@recorded
def many_draws(m: nn.Module) -> None:
    m.sampled = nn.Parameter(torch.distributions.Normal(0.0, 1.0).sample((90, 100)))
    m.cauchy = nn.Parameter(torch.empty(90, 100).cauchy_())
    m.chosen = torch.multinomial(torch.ones(9000), 100)
    mask = torch.bernoulli(torch.full((90, 100), 0.1))
    m.masked = nn.Parameter((torch.randn(90, 100) * mask).masked_fill_(mask.bool(), 0.5))
    m.a, m.b = (nn.Parameter(part) for part in torch.randn(200, 90).chunk(2))
    m.unitary = nn.Parameter(torch.linalg.svd(torch.randn(90, 100), full_matrices=False)[0])


@recorded
def swapped_and_strided(m: nn.Module) -> None:
    m.a, m.b = nn.Linear(100, 100), nn.Linear(100, 100)
    m.a.weight.data, m.b.weight.data = m.b.weight.data, m.a.weight.data
    m.c = nn.Conv2d(40, 40, 3).to(memory_format=torch.channels_last)
    m.load_state_dict({name: value * 2 for name, value in m.state_dict().items()})


@built
def numpy_writes_large(m: nn.Module) -> None:
    m.layer = nn.Linear(90, 100)
    m.layer.weight.detach().numpy()[:] = 1


@built
def numpy_writes_small(m: nn.Module) -> None:
    m.layer = nn.Linear(90, 100)
    m.register_buffer("small", torch.zeros(5))
    m.small.numpy()[:] = 1


@built
def an_array_is_filled_again(m: nn.Module) -> None:
    m.layers = nn.ModuleList(nn.Linear(90, 100) for _ in range(2))
    array = np.zeros((100, 90), np.float32)
    shared = torch.from_numpy(array)
    for i, layer in enumerate(m.layers):
        array[:] = i + 1
        layer.weight.data.copy_(shared)


@built
def loads_much(m: nn.Module) -> None:
    m.layer = nn.Linear(3000, 3000)
    m.layer.weight.data.copy_(torch.from_numpy(np.arange(9_000_000, dtype=np.float32).reshape(3000, 3000)))


@built
def catches_everything(m: nn.Module) -> None:
    m.layer = nn.Linear(90, 100)
    try:
        m.layer.weight.detach().numpy()[:] = 1
    except Exception:
        m.layer.weight.data.fill_(2)


@built
def saves_and_loads(m: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(torch.arange(9000.0).view(100, 90), file)
    file.seek(0)
    m.layer = nn.Linear(90, 100)
    m.layer.weight.data.copy_(torch.load(file))
