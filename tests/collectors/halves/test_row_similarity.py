# SPDX-License-Identifier: Apache-2.0
"""Trainings whose rows share a draw: their noise scale is withheld, and they are not changed."""

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refused import refused
from torch import Tensor, nn
from torch.nn import functional as F

from noisescale import NoiseScaleMeter, predict, read_run
from noisescale.collectors.halves.graph import is_curved

ROWS, STEPS = 8, 220
Draw = Callable[[torch.Generator], tuple[Tensor, Tensor]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def independent(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(3, (ROWS,), generator=generator)
    x = F.one_hot(labels, 6) + torch.randn(ROWS, 6, generator=generator)
    return x, labels


def one_class(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(3, (1,), generator=generator).expand(ROWS)
    return F.one_hot(labels, 6) + torch.randn(ROWS, 6, generator=generator), labels


def train(
    draw: Draw, *, log_to: Path | None = None, measured: bool = True, steps: int = STEPS
) -> tuple[list[Tensor], Any]:
    """Return the weights, and the meter if there was one."""
    model, generator = network(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    meter = None
    if measured:
        meter = NoiseScaleMeter(
            model, optimizer=optimizer, every_n_steps=2, log_to=log_to, log_every_n_steps=10
        )
    for _ in range(steps):
        optimizer.zero_grad()
        x, labels = draw(generator)
        loss = F.cross_entropy(model(x), labels)
        if meter is None:
            loss.backward()
        else:
            meter.backward(loss, ROWS)
            meter.step()
        optimizer.step()
    if meter is not None:
        meter.close()
    return [p.detach() for p in model.parameters()], meter


def test_rows_that_share_a_class_have_no_noise_scale_anywhere(tmp_path: Path) -> None:
    plain, _ = train(one_class, measured=False)

    with pytest.warns(UserWarning, match="The rows of a batch are alike") as told:
        weights, meter = train(one_class, log_to=tmp_path)

    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
    (warned,) = told
    assert meter.withheld in str(warned.message)
    assert not meter.noise_scale.resolved
    assert np.isnan(meter.history["noise_scale"]).all()
    history = read_run(tmp_path)
    assert history.withheld == meter.history.withheld == meter.withheld
    for run in (tmp_path, meter, meter.history):
        with refused("run", got="one that is withheld", remedy=meter.withheld):
            predict(run)


def test_it_is_withheld_whoever_reads_it_first_and_after_a_resumption(tmp_path: Path) -> None:
    model, generator = network(), torch.Generator().manual_seed(1)
    meter = NoiseScaleMeter(model, every_n_steps=1, log_to=tmp_path, log_every_n_steps=20)

    def train_and_read() -> None:
        for _ in range(120):
            model.zero_grad()
            x, labels = one_class(generator)
            meter.backward(F.cross_entropy(model(x), labels), ROWS)
            meter.step()
            value = meter.noise_scale.value
            assert meter.measuring or math.isnan(value)

    with pytest.warns(UserWarning, match="alike"):
        train_and_read()
    resumed = NoiseScaleMeter(network(), every_n_steps=1)
    with pytest.warns(UserWarning, match="alike"):
        resumed.load_state_dict(meter.state_dict())

    assert not meter.measuring
    assert read_run(tmp_path).withheld == meter.history.withheld == meter.withheld != ""
    assert resumed.withheld == meter.withheld
    assert not resumed.measuring


def test_gradients_of_halves_that_share_no_row_are_no_gradient_of_one_row() -> None:
    """Those of embeddings, for example: |g_s|² is |g|²."""
    model, generator = nn.Embedding(5000, 4), torch.Generator().manual_seed(1)
    meter = NoiseScaleMeter(model, every_n_steps=1)
    for _ in range(12):
        model.zero_grad()
        chosen = torch.randint(5000, (4,), generator=generator)
        meter.backward(model(chosen).square().sum(1).mean(), 4)
        meter.step()

    assert meter.noise_scale.steps > 2
    assert meter.withheld == ""


def test_independent_rows_are_measured(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, meter = train(independent, log_to=tmp_path)

    assert (meter.withheld, meter.measured_steps) == ("", STEPS // 2)
    assert not read_run(tmp_path).withheld


def test_a_new_run_in_the_folder_is_not_withheld(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="alike"):
        train(one_class, log_to=tmp_path)

    train(independent, log_to=tmp_path, steps=20)

    lines = (tmp_path / "noise_scale.jsonl").read_text().splitlines()
    assert any("withheld" in json.loads(line) for line in lines)
    assert not read_run(tmp_path).withheld


class OfFirstRow(torch.autograd.Function):
    """A fused head and loss that takes the gradient of the first row for that of all rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return (hidden @ weight.T).square().sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        of_rows = 2 * gradient[0] * (hidden @ weight.T)
        return of_rows @ weight, of_rows.T @ hidden


def test_a_half_with_the_gradient_of_the_whole_is_not_taken_for_one() -> None:
    model, generator = network(), torch.Generator().manual_seed(1)
    meter = NoiseScaleMeter(model, every_n_steps=1, backward_twice=True)

    for _ in range(12):
        model.zero_grad()
        hidden = model[:2](independent(generator)[0])
        meter.backward(OfFirstRow.apply(hidden, model[2].weight).mean(), ROWS)
        meter.step()
    with pytest.warns(UserWarning, match="A half of the batch has the gradient of the whole"):
        assert not meter.noise_scale.resolved
    meter.close()


@pytest.mark.parametrize(
    ("loss", "curved"),
    [
        (lambda z, t: F.cross_entropy(z, t), False),
        (lambda z, t: F.cross_entropy(z, t, reduction="sum") / 8 + 0.1 * z.square().mean(), False),
        (lambda z, t: z.exp().mean(), False),
        (lambda z, t: F.cross_entropy(z, t).exp(), True),
        (lambda z, t: 2 * z.square().mean().sqrt() + F.cross_entropy(z, t), True),
        (lambda z, t: z.norm(), True),
    ],
)
def test_a_factor_that_all_rows_have_in_common_is_known_by_the_loss(
    loss: Callable[[Tensor, Tensor], Tensor], curved: bool
) -> None:
    z = torch.randn(ROWS, 3, requires_grad=True)

    assert is_curved(loss(z, torch.zeros(ROWS, dtype=torch.long)).grad_fn) == curved
