# SPDX-License-Identifier: Apache-2.0
"""What else is done with a model while its layers are watched, and what is left of that."""

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import call_in_a_fork, in_a_fork
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.profiler import ProfilerActivity, profile

from noisescale import NoiseScaleMeter

ROWS, FEATURES = 4, 6


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Sequential(nn.ReLU(), nn.Linear(8, 3))
    )


def batch(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(seed))


def steps(model: nn.Module, meter: NoiseScaleMeter, count: int = 3) -> None:
    for seed in range(count):
        model.zero_grad()
        meter.backward(model(batch(seed)).square().mean(), ROWS)
        meter.step()


@contextmanager
def watched(model: nn.Module) -> Iterator[NoiseScaleMeter]:
    meter = NoiseScaleMeter(model, small_batch="example")
    try:
        steps(model, meter)
        yield meter
    finally:
        meter.close()


@pytest.fixture(autouse=True)
def nothing_left_of_other_tests() -> None:
    gc.collect()
    network()(batch())


def hooks_of_all_modules() -> list[Any]:
    return [*torch_modules._global_forward_hooks, *torch_modules._global_forward_hooks_with_kwargs]


def traced(model: nn.Module) -> Any:
    made = torch.jit.trace(model, batch())  # with gradients, as nobody has turned them off
    torch.jit.save(made, io.BytesIO())
    return made


def reloaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


MADE: dict[str, Callable[[nn.Module], Any]] = {
    "scripted": torch.jit.script,
    "traced": traced,
    "exported": lambda model: torch.export.export(model, (batch(),)).module(),
    "symbolically traced": torch.fx.symbolic_trace,
    "compiled": lambda model: torch.compile(model.forward, backend="aot_eager", fullgraph=True),
    "copied": copy.deepcopy,
    "copied and scripted": lambda model: torch.jit.script(copy.deepcopy(model)),
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "saved": reloaded,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript
@pytest.mark.parametrize("way", MADE)
def test_a_watched_model_can_be(way: str) -> None:
    if way == "compiled":
        call_in_a_fork(check_made, way)  # see `in_a_fork`
    else:
        check_made(way)


def check_made(way: str) -> None:
    model = network()
    expected = model(batch())

    with watched(model) as meter:
        made = MADE[way](model)
        torch.testing.assert_close(made(batch()), expected)
        steps(model, meter)

    assert (meter.measured_steps, meter.skipped_steps) == (5, 1)  # the first was the probe


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(4, 8))])
def test_parts_that_are_scripted_are_left_out(
    make: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noisescale.meter.soundness.LEAST_COVERAGE", 0.0)
    model = network()
    model[2] = make(model[2])
    meter = NoiseScaleMeter(model, small_batch="example")

    with pytest.warns(UserWarning, match=r"Left out: 2\.1\.weight, 2\.1\.bias \(in layers without"):
        steps(model, meter)

    assert meter.measured_steps == 2
    meter.close()


@pytest.mark.slow
def test_a_strict_export_takes_a_pause() -> None:
    """Dynamo refuses to go through a module while there is a hook for all of them."""
    model = network()

    with watched(model) as meter:
        meter.pause()
        exported = torch.export.export(model, (batch(),), strict=True).module()
        torch.testing.assert_close(exported(batch()), model(batch()))
        assert not hooks_of_all_modules()
        meter.resume()
        steps(model, meter)

    assert (meter.measured_steps, meter.skipped_steps) == (5, 1)


def test_no_hook_is_left_where_nothing_is_looked_at() -> None:
    model = network()
    meter = NoiseScaleMeter(model, small_batch="example", every_n_steps=2)

    there = []
    for _ in range(4):
        there.append(len(hooks_of_all_modules()))
        steps(model, meter, 1)
    meter.close()

    assert there == [2, 0, 2, 0]  # one hook, and its mark among those given keyword arguments
    assert not hooks_of_all_modules()


def test_a_meter_that_was_dropped_leaves_no_hook_behind() -> None:
    model = network()
    steps(model, NoiseScaleMeter(model, small_batch="example"))

    gc.collect()
    model(batch())

    assert not hooks_of_all_modules()


def test_what_another_hook_makes_of_the_output_is_not_the_layers() -> None:
    model = network()
    model[0].register_forward_hook(lambda module, args, output: output * 2)

    with watched(model) as meter:
        assert meter.measured_steps == 2  # nothing is left out, of which a warning would tell


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo itself
@in_a_fork
def test_compiled_code_beside_the_model_stays_whole() -> None:
    """Without a graph break, of which `fullgraph` would tell: with hooks or without, as before."""
    seen: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(len(graph.graph.nodes))
        return graph.forward

    model, teacher = network(), network()
    distance = torch.compile(
        lambda y, x: (y - teacher(x)).square().mean(), backend=backend, fullgraph=True
    )
    meter = NoiseScaleMeter(model, small_batch="example", every_n_steps=2)

    for seed in range(6):
        model.zero_grad()
        meter.backward(distance(model(batch(seed)) + 1, batch(seed)), ROWS)
        meter.step()
    meter.close()

    assert len(seen) <= 2  # Dynamo may guard the hooks of all modules: none, or this one
    assert len(set(seen)) == 1


def test_inference_takes_the_path_that_it_takes_without() -> None:
    """Encoders have one of fused kernels, rounded in another order, not taken beside hooks."""
    call_in_a_fork(check_paths)  # see `in_a_fork`


def check_paths() -> None:
    def fused_layers(meters: int, hooks: int) -> tuple[int, Tensor]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        model = nn.TransformerEncoder(layer, 2)
        made = [NoiseScaleMeter(model, small_batch="example") for _ in range(meters)]
        for _ in range(hooks):
            model.layers[0].linear1.register_forward_hook(lambda *_: None)
        model.eval()
        with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad():
            output = model(torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1)))
        for meter in made:
            meter.close()
        names = [event.name for event in profiler.events()]
        return names.count("aten::_transformer_encoder_layer_fwd"), output

    (without, expected), (with_it, output) = fused_layers(0, 0), fused_layers(1, 0)

    assert (without, with_it) == (2, 2)
    assert torch.equal(output, expected)
    assert fused_layers(0, hooks=1)[0] == 1  # or this would show nothing
