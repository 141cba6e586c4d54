# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from brute_force import expected, gradient_of, in_float64, micro_batch
from torch import nn

from noisescale import NoiseScaleMeter
from noisescale.collectors.loss_scale import LossScale


def one_step(unscales: bool, fused: bool) -> tuple[NoiseScaleMeter, tuple[float, float]]:
    """Two micro-batches of one step in a torch loop with a GradScaler, and their moments."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    meter = NoiseScaleMeter(model, grad_scaler=scaler)
    parts = []
    for _ in range(2):
        x = torch.randn(4, 5)
        gradient = gradient_of(in_float64(model), lambda net, x=x: net(x.double()).square().mean())
        parts.append(micro_batch(gradient, 4))
        meter.backward(scaler.scale(model(x).square().mean() / 2), local_batch_size=4)
    if unscales:
        scaler.unscale_(optimizer)
    meter.step()
    scaler.step(optimizer)
    scaler.update()
    return meter, expected(parts).moments


@pytest.mark.parametrize(("unscales", "fused"), [(True, False), (False, False), (False, True)])
def test_the_loss_scale_is_taken_out_whoever_unscales(unscales: bool, fused: bool) -> None:
    meter, moments = one_step(unscales, fused)

    assert meter.sums.mean == pytest.approx(moments, rel=1e-5)


def test_a_disabled_scaler_changes_nothing() -> None:
    norms = torch.tensor([2.0])

    assert LossScale(torch.amp.GradScaler("cpu", enabled=False)).unscale(norms) is norms
    assert LossScale(None).unscale(norms) is norms


@pytest.mark.parametrize("own", [True, False])
def test_only_the_optimizer_that_steps_the_parameters_is_asked_whether_it_was_unscaled(
    own: bool,
) -> None:
    """Of norms that are read when the step is closed."""
    models = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for model in models:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizers[0])
    norms = torch.tensor([64.0])

    found = LossScale(scaler, list(models[0 if own else 1].parameters())).unscale(
        norms, unscaled_with_gradients=True
    )

    assert found.item() == (64.0 if own else 1.0)
