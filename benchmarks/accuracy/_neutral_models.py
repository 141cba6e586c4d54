# SPDX-License-Identifier: Apache-2.0
"""Tiny models of public libraries, made from configurations: nothing is downloaded.

Each is made by a function without arguments. A library is imported when its first model is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.accuracy._neutral_training import (
    LENGTH,
    ROWS,
    TOKENS,
    Batch,
    Case,
    NotThere,
    Training,
    classes,
    images,
    points,
    tokens,
)
from benchmarks.accuracy._neutral_transformers import TRANSFORMERS, of_transformers


def cases() -> Iterator[Case]:
    for name, make in _OWN_KINDS.items():
        yield Case("torch", name, "", make, bears="donated" not in name)
    for name, make in _GRAPHS.items():
        yield Case("torch_geometric", name, "", make, bears="GroupAddRev" not in name)
    for name, make in _OTHERS.items():
        library, _, model = name.partition(": ")
        yield Case(library, model, "", make)
    for name in ("SwishMe", "MishMe", "HardSigmoidMe", "HardSwishMe", "HardMishMe"):
        yield Case("timm", name, "", partial(_activation, name))
    for name in _TIMM:
        for variant in ("", "checkpointed"):
            yield Case("timm", name, variant, partial(_of_timm, name, variant))
    for name in TRANSFORMERS:
        for variant in ("", "checkpointed"):
            make = partial(of_transformers, name, variant)
            yield Case("transformers", name, variant, make, bears="Reformer" not in name)


# timm

_TINY_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2}

_NARROW: dict[str, Any] = {"channels": (16, 16, 32, 32), "stem_width": 8}

_TIMM: dict[str, dict[str, Any]] = {
    "resnet10t": _NARROW,
    "resnet26d": _NARROW,
    "resnext26ts": {},
    "seresnet18": _NARROW,
    "densenet121": {"block_config": (2, 2, 2, 2)},
    "regnetx_002": {},
    "regnety_002": {},
    "efficientnet_b0": {},
    "efficientnet_lite0": {},
    "mixnet_s": {},
    "mobilenetv2_035": {},
    "mobilenetv3_small_050": {},
    "mobilenetv4_conv_small_035": {},
    "ghostnet_050": {},
    "lcnet_035": {},
    "mobileone_s0": {},
    "repvit_m0_9": {},
    "convnext_atto": {},
    "convnextv2_atto": {},
    "inception_next_atto": {},
    "hrnet_w18_small": {},
    "res2net50_26w_4s": {"layers": (1, 1, 1, 1), **_NARROW},
    "resnest14d": _NARROW,
    "rexnet_100": {},
    "nf_regnet_b0": {},
    "vit_tiny_patch16_224": {**_TINY_VIT, "num_heads": 3},
    "deit_tiny_distilled_patch16_224": {**_TINY_VIT, "num_heads": 3},
    "beit_base_patch16_224": {**_TINY_VIT, "num_heads": 3},
    "eva02_tiny_patch14_224": {**_TINY_VIT, "num_heads": 3},
    "cait_xxs24_224": {**_TINY_VIT, "num_heads": 3},
    "xcit_nano_12_p8_224": {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3},
    "mixer_s32_224": {"img_size": 64},
    "gmlp_ti16_224": {"img_size": 32},
    "resmlp_12_224": {"img_size": 32},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 2),
    },
    "swinv2_tiny_window8_256": {
        "img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 2),
    },
    "maxvit_rmlp_pico_rw_256": {"img_size": 64, "depths": (1, 1), "embed_dim": (32, 32)},
    "coatnet_pico_rw_224": {"img_size": 32},
    "levit_128s": {"img_size": 64, "embed_dim": (32, 32, 48), "depth": (1, 1, 1)},
    "pvt_v2_b0": {},
    "poolformer_s12": {},
    "edgenext_xx_small": {},
    "mobilevit_xxs": {},
    "focalnet_tiny_srf": {},
    "davit_tiny": {
        "depths": (1, 1, 1, 1), "embed_dims": (24, 24, 48, 48), "num_heads": (1, 1, 2, 2),
    },
    "gcvit_xxtiny": {"img_size": 64},
    "hiera_tiny_224": {"img_size": 64, "embed_dim": 24, "stages": (1, 1, 1, 1)},
    "mambaout_femto": {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)},
    "efficientvit_b0": {},
    "fastvit_t8": {"embed_dims": (16, 16, 32, 32)},
    "tiny_vit_5m_224": {},
    "twins_svt_small": {
        "embed_dims": (16, 16, 32, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2),
    },
    "sequencer2d_s": {"layers": (1, 1, 1, 1)},
}  # fmt: skip


def _of_timm(name: str, variant: str) -> Training:
    timm = import_module("timm")
    options = _TIMM[name]
    model = timm.create_model(name, num_classes=5, **options)
    if variant:
        try:
            model.set_grad_checkpointing(True)
        except (AssertionError, AttributeError) as error:
            raise NotThere from error
    size = options.get("img_size", 32)
    return _classifier(model, partial(images, size=size))


def _activation(name: str) -> Training:
    """An activation of timm that computes its derivative from its input again."""
    return _with_middle(getattr(import_module("timm.layers.activations_me"), name)())


def _classifier(model: nn.Module, inputs: Callable[[torch.Generator], Tensor]) -> Training:
    def loss(batch: Batch) -> Any:
        out = model(batch[0])
        out = torch.stack(out).mean(0) if isinstance(out, tuple) else out
        return F.cross_entropy(out, batch[1])

    return Training(model.train(), loss, lambda g: (inputs(g), classes(g)))


# torch's own kinds

_WIDTH = 8


class _Called(nn.Module):
    """A model whose forward pass is a function of it and the batch."""

    def __init__(self, forward: Callable[[Any, Any], Any], **parts: nn.Module) -> None:
        super().__init__()
        self._function = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, batch: Any) -> Any:
        return self._function(self, batch)


def _regression(model: nn.Module, *shape: int) -> Training:
    """A target of 3 numbers for each row."""

    def draw(g: torch.Generator) -> Batch:
        x = points(g, *shape)
        return x, x.reshape(ROWS, -1)[:, :3]

    return Training(model.train(), lambda batch: F.mse_loss(model(batch[0]), batch[1]), draw)


def _mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(_WIDTH, 16),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(16, 16),
        nn.GELU(),
        nn.Linear(16, 3),
    )


def _with_middle(middle: Callable[[Tensor], Tensor], width: int = 16) -> Training:
    """A network with a function between two layers."""
    first, last = nn.Linear(_WIDTH, 16), nn.Linear(width, 3)
    called = _Called(lambda m, x: m.last(middle(m.first(x))), first=first, last=last)
    if isinstance(middle, nn.Module):
        called.add_module("middle", middle)
    return _regression(called, _WIDTH)


def _recurrent(kind: Callable[..., nn.Module], *, packed: bool) -> Training:
    def forward(m: Any, x: Any) -> Any:
        if packed:
            lengths = [LENGTH - i for i in range(ROWS)]
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out = m.body(x)[0]
        if packed:
            out = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]
        return m.head(out.mean(1))

    body = kind(_WIDTH, 16, 2, batch_first=True, dropout=0.1)
    return _regression(_Called(forward, body=body, head=nn.Linear(16, 3)), LENGTH, _WIDTH)


def _ctc() -> Training:
    model = nn.Sequential(nn.Conv1d(_WIDTH, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 10, 1))

    def loss(batch: Batch) -> Any:
        logp = model(batch[0]).log_softmax(1).permute(2, 0, 1)
        lengths = torch.full((ROWS,), LENGTH), torch.full((ROWS,), 4)
        return F.ctc_loss(logp, batch[1], *lengths)

    def draw(g: torch.Generator) -> Batch:
        return points(g, _WIDTH, LENGTH), torch.randint(1, 10, (ROWS, 4), generator=g)

    return Training(model, loss, draw)


def _embedding(kind: type[nn.Embedding] | type[nn.EmbeddingBag], **options: Any) -> Training:
    bag = kind is nn.EmbeddingBag
    model = _Called(
        lambda m, x: m.head(m.body(x) if bag else m.body(x).mean(1)),
        body=kind(TOKENS, 16, **options),
        head=nn.Linear(16, 5),
    )
    return _classifier(model, tokens)


def _scripted() -> Training:
    return _regression(torch.jit.script(_mlp()), _WIDTH)


def _traced() -> Training:
    return _regression(torch.jit.trace(_mlp(), torch.ones(ROWS, _WIDTH), check_trace=False), _WIDTH)


def _compiled(backend: str, *, donated: bool = True) -> Training:
    torch._dynamo.reset()
    setattr(import_module("torch._functorch.config"), "donated_buffer", donated)  # noqa: B010
    compiled: Any = torch.compile(_mlp(), backend=backend)
    return _regression(compiled, _WIDTH)


def _mapped() -> Training:
    return _regression(
        _Called(lambda m, x: torch.vmap(m.inner, randomness="different")(x), inner=_mlp()), _WIDTH
    )


def _gradient_penalty() -> Training:
    model = _mlp()

    def loss(x: Tensor) -> Any:
        x = x.requires_grad_()
        score = model(x)[:, 0]
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (gradient.norm(dim=1) - 1).square().mean()

    return Training(model, loss, lambda g: points(g, _WIDTH))


def _reparametrized(of: Callable[[nn.Module], nn.Module]) -> Training:
    return _regression(
        nn.Sequential(of(nn.Linear(_WIDTH, 16)), nn.Tanh(), of(nn.Linear(16, 3))), _WIDTH
    )


def _attention(**options: Any) -> Training:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = _Called(
        lambda m, x: m.last(m.body(m.first(x)).mean(1)),
        first=nn.Linear(_WIDTH, 16), body=body, last=nn.Linear(16, 3),
    )  # fmt: skip
    return _regression(model, LENGTH, _WIDTH)


def _transformer() -> Training:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    return Training(
        model, lambda x: model(x, x.flip(1)).square().mean(), lambda g: points(g, LENGTH, 16)
    )


def _convolutions(*norm: nn.Module) -> Training:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), *norm, nn.ReLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(8, 8, 2),
        nn.PReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip
    return _classifier(model, partial(images, size=16))


def _on_the_cpu() -> Training:
    inner = _mlp()

    def forward(m: Any, x: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return m.inner(x)

    return _regression(_Called(forward, inner=inner), _WIDTH)


def _checkpointed(*, sequential: bool) -> Training:
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    def forward(m: Any, x: Any) -> Any:
        if sequential:
            return checkpoint_sequential(m.inner, 3, x, use_reentrant=False)
        return checkpoint(m.inner, x, use_reentrant=False)

    return _regression(_Called(forward, inner=_mlp()), _WIDTH)


def _autocast() -> Training:
    def forward(m: Any, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return m.inner(x).float()

    return _regression(_Called(forward, inner=_mlp()), _WIDTH)


def _per_sample() -> Training:
    """The mean of gradients of single rows by `torch.func`, as a loss."""

    def forward(m: Any, x: Any) -> Any:
        of = torch.func.jacrev(lambda one: m.inner(one).sum())
        return torch.vmap(of, randomness="different")(x)[:, :3]

    return _regression(_Called(forward, inner=_mlp()), _WIDTH)


def _adaptive_softmax() -> Training:
    head = nn.AdaptiveLogSoftmaxWithLoss(16, 60, [10, 30])
    model = _Called(
        lambda m, b: m.head(m.first(b[0]), b[1]).loss, first=nn.Linear(8, 16), head=head
    )
    return Training(model, model, lambda g: (points(g, _WIDTH), classes(g, 60)))


_OWN_KINDS: dict[str, Callable[[], Training]] = {
    "multilayer perceptron": lambda: _regression(_mlp(), _WIDTH),
    "RNN": lambda: _recurrent(nn.RNN, packed=False),
    "LSTM": lambda: _recurrent(nn.LSTM, packed=False),
    "GRU": lambda: _recurrent(nn.GRU, packed=False),
    "RNN, packed": lambda: _recurrent(nn.RNN, packed=True),
    "LSTM, packed": lambda: _recurrent(nn.LSTM, packed=True),
    "GRU, packed": lambda: _recurrent(nn.GRU, packed=True),
    "CTC": _ctc,
    "sparse embedding": lambda: _embedding(nn.Embedding, sparse=True),
    "embedding with max_norm": lambda: _embedding(nn.Embedding, max_norm=1.0),
    "EmbeddingBag": lambda: _embedding(nn.EmbeddingBag),
    "sparse EmbeddingBag": lambda: _embedding(nn.EmbeddingBag, sparse=True),
    "jit.script": _scripted,
    "jit.trace": _traced,
    "vmap": _mapped,
    "jacrev of single rows": _per_sample,
    "weight_norm": lambda: _reparametrized(nn.utils.parametrizations.weight_norm),
    "spectral_norm": lambda: _reparametrized(nn.utils.parametrizations.spectral_norm),
    "spectral_norm by hooks": lambda: _reparametrized(nn.utils.spectral_norm),
    "orthogonal": lambda: _reparametrized(nn.utils.parametrizations.orthogonal),
    "gradient penalty": _gradient_penalty,
    "TransformerEncoder": lambda: _attention(),
    "TransformerEncoder, norm first": lambda: _attention(norm_first=True, dropout=0.0),
    "Transformer": _transformer,
    "convolutions": lambda: _convolutions(),
    "BatchNorm": lambda: _convolutions(nn.BatchNorm2d(8)),
    "GroupNorm": lambda: _convolutions(nn.GroupNorm(2, 8)),
    "InstanceNorm": lambda: _convolutions(nn.InstanceNorm2d(8, affine=True)),
    "adaptive softmax": _adaptive_softmax,
    "checkpoint": lambda: _checkpointed(sequential=False),
    "checkpoint_sequential": lambda: _checkpointed(sequential=True),
    "save_on_cpu": _on_the_cpu,
    "autocast": _autocast,
    "torch.compile, aot_eager": lambda: _compiled("aot_eager"),
    "torch.compile, buffers kept": lambda: _compiled("inductor", donated=False),
    "torch.compile, buffers donated": lambda: _compiled("inductor"),
}


# PyTorch Geometric: batches of graphs with a label each, or one graph with labels of its nodes

_NODES = 5


def _edges(graphs: int) -> Tensor:
    """A ring with a chord in each graph."""
    around = torch.arange(_NODES)
    one = torch.stack(
        [
            torch.cat([around, torch.tensor([0])]),
            torch.cat([(around + 1) % _NODES, torch.tensor([2])]),
        ]
    )
    both = torch.cat([one, one.flip(0)], 1)
    return torch.cat([both + _NODES * graph for graph in range(graphs)], 1)


def _of_graphs(body: Callable[[Any], Any]) -> Training:
    """The mean over nodes of each graph is classified."""
    geometric = import_module("torch_geometric.nn")
    of = torch.arange(ROWS).repeat_interleave(_NODES)
    edges = _edges(ROWS)

    def forward(m: Any, x: Any) -> Any:
        nodes = m.body(x.flatten(0, 1), edges)
        return m.head(geometric.global_mean_pool(nodes, of, ROWS))

    model = _Called(forward, body=body(geometric), head=nn.Linear(16, 5))
    return _classifier(model, lambda g: points(g, _NODES, _WIDTH))


def _of_nodes(body: Callable[[Any], Any]) -> Training:
    """The nodes of one graph are classified, as those of a citation network."""
    model, edges = body(import_module("torch_geometric.nn")), _edges(3)

    def draw(g: torch.Generator) -> Batch:
        return torch.randn(15, _WIDTH, generator=g), torch.randint(16, (15,), generator=g)

    return Training(
        model.train(), lambda batch: F.cross_entropy(model(batch[0], edges), batch[1]), draw, 15
    )


def _of(kind: str, *depth: int, **options: Any) -> Callable[[Any], Any]:
    """Return what makes a stack of `depth` layers of a kind, or one convolution."""
    return lambda geometric: getattr(geometric, kind)(_WIDTH, 16, *depth, **options)


def _group_add_rev(geometric: Any) -> nn.Module:
    """Two reversible blocks: each deletes its input and computes it again in the backward pass."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = geometric.SAGEConv(8, 8)

        def forward(self, x: Tensor, edges: Tensor) -> Any:
            return self.conv(x, edges).relu()

    blocks = nn.ModuleList([geometric.GroupAddRev(Block(), num_groups=2) for _ in range(2)])

    class Reversible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks = nn.Linear(_WIDTH, 16), blocks

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x, edges)
            return x

    return Reversible()


def _sparse_cross_entropy() -> Training:
    """A loss over several right classes of each row, given as pairs."""
    utils = import_module("torch_geometric.utils.cross_entropy")
    model = _mlp()
    right = torch.tensor([[row for row in range(ROWS) for _ in range(2)], [0, 1] * ROWS])
    return Training(
        model, lambda x: utils.sparse_cross_entropy(model(x), right), lambda g: points(g, _WIDTH)
    )


def _edge_index() -> Training:
    """A product with a sparse matrix that PyTorch Geometric has its own derivative of."""
    data = import_module("torch_geometric")
    edges = data.EdgeIndex(_edges(ROWS), sparse_size=(30, 30)).sort_by("row")[0]

    def forward(m: Any, x: Any) -> Any:
        nodes = edges.matmul(m.first(x.flatten(0, 1)), transpose=False)
        return m.head(nodes.view(ROWS, _NODES, -1).mean(1).tanh())

    first, head = nn.Linear(_WIDTH, 16), nn.Linear(16, 5)
    return _classifier(
        _Called(forward, first=first, head=head), lambda g: points(g, _NODES, _WIDTH)
    )


_PNA: dict[str, Any] = {
    "aggregators": ["mean", "max", "std"],
    "scalers": ["identity", "amplification"],
    "deg": torch.tensor([0, 0, 4, 1]),
}

_GRAPHS: dict[str, Callable[[], Training]] = {
    **{
        name: partial(_of_graphs, body)
        for name, body in {
            "GCN": _of("GCN", 2),
            "GAT": _of("GAT", 2, heads=2, dropout=0.1),
            "GATv2": _of("GAT", 2, v2=True),
            "GraphSAGE": _of("GraphSAGE", 2),
            "GIN": _of("GIN", 2),
            "GIN with LayerNorm": _of("GIN", 2, norm="LayerNorm"),
            "PNA": _of("PNA", 2, **_PNA),
            "EdgeCNN": _of("EdgeCNN", 2),
            "ChebConv": _of("ChebConv", K=2),
            "SGConv": _of("SGConv", K=2),
            "TAGConv": _of("TAGConv"),
            "GraphConv": _of("GraphConv"),
            "TransformerConv": _of("TransformerConv"),
            "ARMAConv": _of("ARMAConv"),
            "GENConv": _of("GENConv", aggr="softmax", norm="layer"),
            "ClusterGCNConv": _of("ClusterGCNConv"),
            "LEConv": _of("LEConv"),
            "SuperGATConv": _of("SuperGATConv", heads=2, concat=False),
            "GroupAddRev": _group_add_rev,
        }.items()
    },
    "GCN of nodes": partial(_of_nodes, _of("GCN", 2)),
    "sparse cross-entropy": _sparse_cross_entropy,
    "EdgeIndex": _edge_index,
}


# Other libraries


def _lightning_transformer(root: str) -> Training:
    demos = import_module(f"{root}.demos")
    model = demos.Transformer(vocab_size=TOKENS, ninp=32, nhead=2, nhid=32, nlayers=2)

    def loss(x: Tensor) -> Any:
        output = model(x[:, :-1], x[:, 1:])
        return F.nll_loss(output.view(-1, TOKENS), x[:, 1:].reshape(-1))

    return Training(model.train(), loss, tokens)


def _entmax(name: str) -> Training:
    return _with_middle(partial(getattr(import_module("entmax"), name), dim=-1))


def _entmax_loss(name: str) -> Training:
    model = nn.Linear(_WIDTH, 5)
    of = getattr(import_module("entmax"), name)()
    return Training(
        model,
        lambda batch: of(model(batch[0]), batch[1]),
        lambda g: (points(g, _WIDTH), classes(g)),
    )


def _adapted(config: str, variant: str = "", **options: Any) -> Training:
    """GPT-2 or Llama with an adapter of peft."""
    peft = import_module("peft")
    base = of_transformers("Llama", variant)
    if variant:
        base.model.enable_input_require_grads()  # type: ignore[operator]
    model = peft.get_peft_model(
        base.model, getattr(peft, config)(task_type="CAUSAL_LM", **options)
    ).train()
    return Training(model, lambda batch: model(**batch).loss, base.draw)


def _denoiser(
    name: str, shape: tuple[int, ...], options: dict[str, Any], *, checkpointed: bool = False
) -> Training:
    """A network of diffusers that takes noised samples and their times."""
    model = getattr(import_module("diffusers"), name)(**options).train()
    if checkpointed:
        model.enable_gradient_checkpointing()
    words = points(torch.Generator().manual_seed(9), 4, 16)

    def loss(batch: Batch) -> Any:
        x, times, noise = batch
        more: dict[str, Any] = {}
        if name == "UNet2DConditionModel":
            more = {"encoder_hidden_states": words}
        elif name == "DiTTransformer2DModel":
            more = {"class_labels": times % 5}
        out = model(x + noise, times, **more).sample
        return F.mse_loss(out[:, : noise.shape[1]], noise)

    def draw(g: torch.Generator) -> Batch:
        return points(g, *shape), torch.randint(10, (ROWS,), generator=g), points(g, *shape)

    return Training(model, loss, draw)


def _autoencoder(name: str, **options: Any) -> Training:
    model = getattr(import_module("diffusers"), name)(**_AUTOENCODER, **options).train()

    def loss(x: Tensor) -> Any:
        return F.mse_loss(model(x).sample, x)

    return Training(model, loss, images)


_UNET: dict[str, Any] = {
    "sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8,
}  # fmt: skip
_UNET_2D = {
    **_UNET,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
_UNET_CONDITIONED = {
    **_UNET,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 8,
}
_DIT = {
    "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2,
    "sample_size": 8, "patch_size": 2, "norm_num_groups": 4, "num_embeds_ada_norm": 10,
}  # fmt: skip
_AUTOENCODER: dict[str, Any] = {
    "block_out_channels": (8, 16), "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
}  # fmt: skip


def _two_views(loss_name: str) -> Training:
    """A self-supervised loss of lightly over two noisy views."""
    of = getattr(import_module("lightly.loss"), loss_name)()
    model = _mlp()

    def loss(batch: Batch) -> Any:
        first, second = (model(view) for view in batch)
        return of(first, second)

    def draw(g: torch.Generator) -> Batch:
        x = points(g, _WIDTH)
        return x + 0.1 * points(g, _WIDTH), x + 0.1 * points(g, _WIDTH)

    return Training(model, loss, draw)


def _dino() -> Training:
    of = import_module("lightly.loss").DINOLoss(output_dim=3, warmup_teacher_temp_epochs=1)

    def forward(m: Any, batch: Batch) -> Any:
        views = [m.inner(view) for view in batch]
        return m.of([view.detach() for view in views], views, epoch=1)

    model = _Called(forward, inner=_mlp(), of=of)
    return Training(model, model, lambda g: (points(g, _WIDTH), points(g, _WIDTH)))


_ENTMAX = [f"{name}_bisect" for name in ("entmax", "sparsemax", "normmax", "budget")]
_ENTMAX_LOSSES = [f"{name}Loss" for name in ("Sparsemax", "Entmax15", "EntmaxBisect")]
_LIGHTLY = [f"{name}Loss" for name in ("NTXent", "BarlowTwins", "VICReg", "TiCo", "DCL")]
_ON_Q: dict[str, Any] = {"target_modules": ["q_proj"]}
_ON_Q_AND_V: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"]}

_OTHERS: dict[str, Callable[[], Training]] = {
    "lightning: Transformer of the demos": partial(_lightning_transformer, "lightning.pytorch"),
    "pytorch_lightning: Transformer of the demos": partial(
        _lightning_transformer, "pytorch_lightning"
    ),
    **{f"entmax: {n}": partial(_entmax, n) for n in ["sparsemax", "entmax15", *_ENTMAX]},
    **{
        f"entmax: {name}": partial(_entmax_loss, name)
        for name in [*_ENTMAX_LOSSES, "SparsemaxBisectLoss"]
    },
    "peft: LoRA": partial(_adapted, "LoraConfig", r=4, lora_dropout=0.1),
    "peft: LoRA, checkpointed": partial(_adapted, "LoraConfig", "checkpointed", r=4),
    "peft: DoRA": partial(_adapted, "LoraConfig", r=4, use_dora=True),
    "peft: IA3": partial(_adapted, "IA3Config"),
    "peft: AdaLoRA": partial(_adapted, "AdaLoraConfig", total_step=20, tinit=1, tfinal=1),
    "peft: LoHa": partial(_adapted, "LoHaConfig", **_ON_Q_AND_V),
    "peft: LoKr": partial(_adapted, "LoKrConfig", **_ON_Q_AND_V),
    "peft: OFT": partial(_adapted, "OFTConfig", oft_block_size=8, **_ON_Q),
    "peft: BOFT": partial(_adapted, "BOFTConfig", boft_block_size=8, **_ON_Q),
    "peft: VeRA": partial(_adapted, "VeraConfig", r=4),
    "peft: FourierFT": partial(_adapted, "FourierFTConfig", n_frequency=10, **_ON_Q),
    "peft: C3A": partial(_adapted, "C3AConfig", block_size=8, **_ON_Q),
    "peft: RandLoRA": partial(_adapted, "RandLoraConfig", r=4, **_ON_Q),
    "peft: HRA": partial(_adapted, "HRAConfig", r=4, **_ON_Q),
    "peft: prompt tuning": partial(_adapted, "PromptTuningConfig", num_virtual_tokens=4),
    "peft: prefix tuning": partial(_adapted, "PrefixTuningConfig", num_virtual_tokens=4),
    "diffusers: UNet2D": partial(_denoiser, "UNet2DModel", (3, 16, 16), _UNET_2D),
    "diffusers: UNet2D, checkpointed": partial(
        _denoiser, "UNet2DModel", (3, 16, 16), _UNET_2D, checkpointed=True
    ),
    "diffusers: UNet2DCondition": partial(
        _denoiser, "UNet2DConditionModel", (4, 16, 16), _UNET_CONDITIONED
    ),
    "diffusers: UNet2DCondition, checkpointed": partial(
        _denoiser, "UNet2DConditionModel", (4, 16, 16), _UNET_CONDITIONED, checkpointed=True
    ),
    "diffusers: DiT": partial(_denoiser, "DiTTransformer2DModel", (4, 8, 8), _DIT),
    "diffusers: AutoencoderKL": partial(_autoencoder, "AutoencoderKL", latent_channels=2),
    "diffusers: VQModel": partial(_autoencoder, "VQModel", num_vq_embeddings=16),
    **{
        f"lightly: {name}": partial(_two_views, name)
        for name in [*_LIGHTLY, "NegativeCosineSimilarity"]
    },
    "lightly: DINOLoss": _dino,
}
