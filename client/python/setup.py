# SPDX-License-Identifier: Apache-2.0
"""All that pyproject.toml cannot say: where the package is put together.

setuptools does it in build/ beside this file and leaves it there; whatever is deleted or renamed
later is still in that folder, and so in the next wheel.
"""

import atexit
import shutil
import tempfile

from setuptools import setup

folder = tempfile.mkdtemp(prefix="attnd-build-")
atexit.register(shutil.rmtree, folder, ignore_errors=True)
setup(options={"build": {"build_base": folder}})
