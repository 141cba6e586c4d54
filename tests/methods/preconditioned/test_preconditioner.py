# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from noisescale.collectors.averaged_gradient import AveragedGradient
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.methods.preconditioned.preconditioner import AdamPreconditioner

OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, betas=(0.9, 0.99), eps=1e-3),
    "AMSGrad": lambda p: torch.optim.Adam(p, betas=(0.9, 0.99), eps=1e-3, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, betas=(0.9, 0.99), eps=1e-3, fused=True),
}


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    scale = torch.tensor([0.01, 1.0, 30.0])
    return [
        torch.randn(500, 3, generator=generator) * scale / (step + 1),
        torch.randn((), generator=generator),
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_divided_as_the_optimizer_would(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the second moments as of the steps before, written out here from Kingma and Ba's text."""
    monkeypatch.setattr("noisescale.methods.preconditioned.preconditioner._BLOCK", 200)
    parameters = [nn.Parameter(torch.zeros(500, 3)), nn.Parameter(torch.zeros(()))]
    optimizer = OPTIMIZERS[name](parameters)
    norms = GradientNorms(
        [(str(i), p) for i, p in enumerate(parameters)],
        extra=[AdamPreconditioner(optimizer)],
    )
    gradient = AveragedGradient(norms, None)
    second = [torch.zeros(500, 3).double(), torch.zeros(()).double()]
    largest = [v.clone() for v in second]

    for step in range(4):
        for p, g in zip(parameters, gradients(step), strict=True):
            p.grad = g
        simple, preconditioned = gradient.sq_norms().tolist()

        assert simple == pytest.approx(
            sum(g.double().square().sum().item() for g in gradients(step)), rel=1e-6
        )
        if step == 0:
            assert math.isnan(preconditioned)
        else:
            shown = largest if name == "AMSGrad" else second
            expected = sum(
                (g.double() / ((v / (1 - 0.99**step)).sqrt() + 1e-3)).square().sum().item()
                for g, v in zip(gradients(step), shown, strict=True)
            )
            assert preconditioned == pytest.approx(expected, rel=1e-5)
        optimizer.step()
        second = [
            0.99 * v + 0.01 * g.double().square()
            for v, g in zip(second, gradients(step), strict=True)
        ]
        largest = [torch.maximum(m, v) for m, v in zip(largest, second, strict=True)]


@pytest.mark.parametrize("name", ["Adam", "AMSGrad"])
def test_complex_gradients_are_divided_part_by_part(name: str) -> None:
    """Adam steps complex parameters as if they were twice as many real ones."""
    as_complex = [nn.Parameter(torch.view_as_complex(torch.zeros(250, 3, 2)))]
    as_complex.append(nn.Parameter(torch.zeros((), dtype=torch.complex64)))
    as_real = [nn.Parameter(torch.zeros(250, 3, 2)), nn.Parameter(torch.zeros(2))]
    found = []

    for parameters in (as_complex, as_real):
        optimizer = OPTIMIZERS[name](parameters)
        norms = GradientNorms(
            [(str(i), p) for i, p in enumerate(parameters)],
            extra=[AdamPreconditioner(optimizer)],
        )
        of_one: list[float] = []
        for step in range(4):
            parts = gradients(step)[0].T.reshape(-1)[:1500].reshape(250, 3, 2)
            for p, g in zip(parameters, (parts, parts[0, 0]), strict=True):
                p.grad = torch.view_as_complex(g) if p.is_complex() else g
            if step:
                of_one += AveragedGradient(norms, None).sq_norms().tolist()
            optimizer.step()
        found.append(of_one)

    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_an_optimizer_without_second_moments_is_refused() -> None:
    with pytest.raises(ValueError, match="must be an optimizer of Adam's family, got SGD, which"):
        AdamPreconditioner(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
