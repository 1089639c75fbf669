# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_kvfix.demo``."""

from __future__ import annotations

import sys

from vllm_kvfix.demo.run import main

sys.exit(main())
