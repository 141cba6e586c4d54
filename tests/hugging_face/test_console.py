# SPDX-License-Identifier: Apache-2.0
from typing import Any

from noisescale.guard import Guard


def test_a_printer_has_one_pair_after_trainings_that_were_interrupted_too(hf: Any) -> None:
    from transformers import PrinterCallback, ProgressCallback

    from noisescale.hugging_face.console import print_all, print_less

    printers = [PrinterCallback(), ProgressCallback()]
    callbacks = [*printers]

    print_less(callbacks, Guard())
    once = [*callbacks]
    print_less(callbacks, Guard())
    again = [*callbacks]
    print_all(callbacks)

    assert len(once) == 6
    assert again == once
    assert callbacks == printers
