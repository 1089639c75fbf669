# SPDX-License-Identifier: Apache-2.0
"""The bytes of a ring file: the only contract between writer and reader.

Numbers are unsigned 64-bit words in the byte order of the machine; writer and reader share it. The header fills the
first page; the body follows it::

    word  byte  field
    0     0     magic           "KVFXRING"; written last, so a file without it is unfinished
    1     8     schema          SCHEMA
    2     16    capacity        words in the body
    3     24    pid             the writer's, as its own PID namespace counts
    4     32    start time      of that process: clock ticks since boot (field 22 of /proc/PID/stat)
    5-6   40    boot id         the 16 bytes of /proc/sys/kernel/random/boot_id
    7     56    clock offset    time_ns - monotonic_ns, two's complement, refreshed with the heartbeat
    8     64    heartbeat       monotonic_ns of the last frame
    9     72    claim           words claimed so far: the body may be in the making up to here
    10    80    head            words published so far: frames up to here are whole
    11    88    events          events published so far
    12    96    dropped         events given up: too large, or failed
    13    104   patch state     PATCH_STATES
    14    112   engine index    data-parallel rank
    15    120   locked          1: the writer holds a write lock on byte 0 of the file (fcntl) while it lives
    16-23 128   vLLM version    64 bytes of UTF-8, NUL-padded
    24-31 192   plugin version  64 bytes of UTF-8, NUL-padded
    32    256   role            ROLES: what the process is for
    33    264   end             ENDS: how the process said that it ends; one that is killed says nothing
    34    272   end time        monotonic_ns when it said so
    35-50 280   end reason      128 bytes of UTF-8, NUL-padded: the type of the exception that ended it

The body is a ring: word ``p`` of all that was ever written lies at ``p % capacity``. It holds frames::

    word  field
    0     FRAME_TAG << 32 | words in the frame, these four included
    1     position: p of word 0, so that a leftover of an earlier round is not taken for a frame
    2     events published before this frame
    3     events in this frame << 32 | CRC-32 of the frame with this word's low half 0
    4...  payload

*Who writes which byte when.* The writer fills words 1 to 33 of a new file, and word 0 last. After that it alone
stores: ``claim``; then the frame, by slices; then ``events``, ``heartbeat``, ``clock offset``; then ``head``. When its
process ends by itself, it stores once what is said of the end, word 33 last.
Each header field is one aligned 8-byte store. A reader copies the body first and reads ``claim`` after it: what lies
before ``claim - capacity`` may have been overwritten meanwhile. Position and checksum decide about the rest, since a
machine may reorder stores. The lock goes with the writer's process, whichever PID namespace or user a reader is in.

*Worked example.* The first frame ever, one event, payload (1, 2), in bytes::

    06 00 00 00 52 46 56 4b  00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00
    21 72 15 3a 01 00 00 00  01 00 00 00 00 00 00 00  02 00 00 00 00 00 00 00
"""

from __future__ import annotations

import zlib
from array import array

MAGIC = int.from_bytes(b"KVFXRING", "little")
SCHEMA = 1
HEADER_BYTES = 4096
WORD = 8
FRAME_TAG = 0x4B564652
FRAME_HEADER_WORDS = 4
WORD_MASK = (1 << 64) - 1
LOW_HALF = (1 << 32) - 1

MAGIC_WORD = 0
SCHEMA_WORD = 1
CAPACITY_WORD = 2
PID_WORD = 3
START_TIME_WORD = 4
CLOCK_OFFSET_WORD = 7
HEARTBEAT_WORD = 8
CLAIM_WORD = 9
HEAD_WORD = 10
EVENTS_WORD = 11
DROPPED_WORD = 12
PATCH_STATE_WORD = 13
ENGINE_INDEX_WORD = 14
LOCKED_WORD = 15
ROLE_WORD = 32
END_WORD = 33
END_TIME_WORD = 34
BOOT_ID_BYTES = slice(40, 56)
VLLM_VERSION_BYTES = slice(128, 192)
PLUGIN_VERSION_BYTES = slice(192, 256)
END_REASON_BYTES = slice(280, 408)

PATCH_STATES = ("unknown", "not affected", "applied", "refused", "off")

# Unknown: the writer is of a release that does not say how it ends.
# Stopping: a front end that ends in order, and has begun to end its engines, which it may do by a kill.
ENDS = ("unknown", "running", "in order", "exception", "stopping")
END_UNKNOWN, NOT_ENDED, ENDED_IN_ORDER, ENDED_BY_EXCEPTION, STOPPING = ENDS

# Only an engine core's ring tells of requests.
ENGINE_CORE, API_SERVER, WORKER = ROLES = ("engine core", "api server", "worker")


def capacity(size: int) -> int:
    """Words in the body of a ring file of ``size`` bytes."""
    return (size - HEADER_BYTES) // WORD


def frame(position: int, first_event: int, events: int, payload: list[int] | array[int]) -> array[int]:
    """The words of one frame.

    Args:
        position: Words published before it.
        first_event: Events published before it.
        events: Events in it; below 2**32.
        payload: Words, each in [0, 2**64).

    Raises:
        OverflowError: A word is out of range.
    """
    words = array("Q", (FRAME_TAG << 32 | (len(payload) + FRAME_HEADER_WORDS), position, first_event, events << 32))
    words.extend(payload if isinstance(payload, array) else array("Q", payload))
    words[3] |= zlib.crc32(words)
    return words


def is_whole(words: array[int] | memoryview) -> bool:
    """Whether the checksum of a frame's words is right."""
    copy = array("Q", words)
    found = copy[3] & LOW_HALF
    copy[3] &= ~LOW_HALF & WORD_MASK
    return zlib.crc32(copy) == found
