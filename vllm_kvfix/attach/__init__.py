# SPDX-License-Identifier: Apache-2.0
"""Brings the fix, the recorder or both into a running engine, and takes them back, without a restart.

The way of it: :mod:`target` looks from outside, :mod:`parcel` packs our modules for the target's Python,
:mod:`injection` has a few lines run there, which connect at a :mod:`meeting` and unpack the parcel (:mod:`arrival`);
:mod:`inside` prepares, and acts at a step :mod:`boundary`. :mod:`session` leads all that from end to end.
"""

from vllm_kvfix.attach.errors import AttachError, Reason
from vllm_kvfix.attach.session import Outcome, attach_to, detach_from

__all__ = ["AttachError", "Outcome", "Reason", "attach_to", "detach_from"]
