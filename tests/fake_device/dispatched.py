# SPDX-License-Identifier: Apache-2.0
"""Look at each operation that torch dispatches."""

from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Dispatched(TorchDispatchMode):
    """Calls `saw` after each operation on real tensors, those of a backward pass too."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # what it does with its parts comes here again
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if FakeTensor not in types:
            self.saw(function, args, kwargs, result)
        return result

    def saw(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        raise NotImplementedError
