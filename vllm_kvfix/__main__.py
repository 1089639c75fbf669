# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_kvfix`` is ``vllm-kvfix``."""

import sys

from vllm_kvfix.cli import main

sys.exit(main())
