# SPDX-License-Identifier: Apache-2.0
"""A callback for the Trainer of Hugging Face's transformers."""

try:
    import transformers as _transformers  # noqa: F401 - whether it is there is all we ask
except ImportError as error:
    raise ImportError(
        "`transformers` must be installed for these callbacks. Install it with the packages that"
        ' its Trainer needs: `pip install "noisescale[hugging-face]"`.'
    ) from error

from noisescale.hugging_face.batch_size_callback import BatchSizeCallback as BatchSizeCallback
from noisescale.hugging_face.noise_scale_callback import NoiseScaleCallback as NoiseScaleCallback
