# SPDX-License-Identifier: Apache-2.0
import math
import sys
from pathlib import Path

import pytest
from refused import refused

from noisescale.lab.compare.readers import hyperparameters as module
from noisescale.lab.compare.readers.hyperparameters import hyperparameters, read_hparams


def test_numbers_switches_words_and_lists_count_wherever_they_are_nested_and_nothing_else() -> None:
    found = hyperparameters(
        {
            "model": {"width": 64, "bias": True, "name": "net", "optim": {"lr": 0.1}},
            "batch_size": "128",
            "optimizer": "adam",
            "schedule": {"kind": "cosine", "lr": "auto"},
            "layers": [1, 2],
            "optim": {"betas": (0.9, 0.95)},
            "limit": math.inf,
            "none": None,
        }
    )

    assert (found.batch_size, found.learning_rate, found.optimizer) == (128, 0.1, "adam")
    assert found.others == {
        "model/width": 64,
        "model/bias": 1,
        "model/name": "net",
        "schedule/kind": "cosine",
        "layers": "[1, 2]",
        "optim/betas": "[0.9, 0.95]",
    }


def test_an_object_is_the_same_wherever_it_lay_in_memory() -> None:
    first, again = (
        hyperparameters({"activation": f"<function relu at 0x7f{address}>"}).others
        for address in ("3a90", "41B8")
    )

    assert first == again == {"activation": "<function relu>"}


def test_a_learning_rate_that_is_said_differently_is_not_known() -> None:
    assert math.isnan(hyperparameters({"g": {"lr": 0.1}, "d": {"lr": 0.2}}).learning_rate)
    assert hyperparameters({"g": {"lr": 0.1}, "d": {"lr": 0.1}}).learning_rate == 0.1
    assert hyperparameters({"lr": 0.3, "d": {"lr": 0.1}}).learning_rate == 0.3


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    (tmp_path / "hparams.yaml").write_text(
        "lr: 0.1\nnet: !!python/object/apply:os.mkdir [made]\nsize: !!python/tuple [1, 2]\n"
    )

    assert read_hparams(tmp_path) == {"lr": 0.1, "net": None, "size": [1, 2]}
    assert not Path("made").exists()


def test_hparams_that_are_missing_or_unreadable_without_pyyaml_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_hparams(tmp_path) == {}

    (tmp_path / "hparams.yaml").write_text("lr: [0.1")
    with refused(str(tmp_path / "hparams.yaml"), requirement="be YAML"):
        read_hparams(tmp_path)

    monkeypatch.setattr(module, "is_installed", lambda package: package != "yaml")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert read_hparams(tmp_path) == {}
