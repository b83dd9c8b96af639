# SPDX-License-Identifier: Apache-2.0
"""``model.generate`` of Hugging Face Transformers, with attention answered by attnd.

:func:`attach` gives a model attnd's attention function; a cache of :meth:`Attachment.new_cache`
goes to ``generate`` as ``past_key_values``. The prompt is computed locally and uploaded meanwhile;
every later token is answered by the server. docs/MODEL_SERVER.md is the guide. Install with
``pip install "attnd[transformers]"``; Transformers 4.57 to 5.23 have been tried.
"""

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "attnd.transformers needs PyTorch and Transformers: "
        f'pip install "attnd[transformers]" ({error})'
    ) from error

from attnd.transformers.attachment import Attachment, attach
from attnd.transformers.cache import AttndCache
from attnd.transformers.identity import fingerprint
from attnd.transformers.stats import Stats

__all__ = ["Attachment", "AttndCache", "Stats", "attach", "fingerprint"]
