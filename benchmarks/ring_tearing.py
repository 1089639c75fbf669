# SPDX-License-Identifier: Apache-2.0
"""Whether a reader ever accepts a torn frame: `python -m benchmarks.ring_tearing [--frames 10000000] [--json]`.

One process writes frames at full speed into a small ring, another reads them; they share nothing but the file. A frame
says in its payload what the whole of it must be, apart from the checksum by which the reader decides. What the writer
laps is lost and counted: read and lost must add up to what was written.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_kvfix.ring.reader import RingReader
from vllm_kvfix.ring.writer import Origin, RingWriter

CAPACITY = 1 << 14
WORDS = 12
STEP = 0x9E3779B97F4A7C15
WORD_MASK = (1 << 64) - 1


def payload(number: int) -> list[int]:
    """The words of frame ``number``: each tells it again."""
    return [(number * STEP + i) & WORD_MASK for i in range(WORDS)]


def write(path: Path, frames: int) -> None:
    """Write all frames, then wait to be told to go: the process under test."""
    writer = RingWriter(path, CAPACITY, Origin(start_time=0, boot_id=bytes(16)))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    began = time.perf_counter()
    for number in range(frames):
        writer.write(payload(number), 1)
    sys.stdout.write(f"{time.perf_counter() - began}\n")
    sys.stdout.flush()
    sys.stdin.read()


def measure(frames: int) -> dict[str, Any]:
    """Write and read side by side; what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tearing.ring"
        command = [sys.executable, "-m", __spec__.name, "--write", str(path), "--frames", str(frames)]
        with subprocess.Popen(  # noqa: S603  our own arguments
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise SystemExit("the writer did not start")
            reader, read, torn, said = RingReader(path), 0, 0, time.monotonic()
            while reader.header.events < frames and process.poll() is None:
                for frame in reader.poll():
                    read += 1
                    torn += frame.payload.tolist() != payload(frame.first_event)
                if time.monotonic() - said > 2:  # noqa: PLR2004  progress every two seconds
                    said = time.monotonic()
                    sys.stderr.write(f"  {reader.header.events:,} written, {read:,} read, {torn} torn\n")
            read += sum(1 for _ in reader.poll())
            seconds = float(process.stdout.readline())
            process.communicate()
    return {"frames": frames, "read": read, "lost": reader.lost, "torn": torn, "us_per_frame": seconds / frames * 1e6}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if a torn frame was accepted or one went missing uncounted."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ring_tearing", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--frames", type=int, default=10_000_000)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the sentence")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.write:
        write(chosen.write, chosen.frames)
        return 0
    found = measure(chosen.frames)
    if chosen.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write(
            f"{found['frames']:,} frames of {WORDS} words written at {found['us_per_frame']:.1f} us each: "
            f"{found['read']:,} read, {found['lost']:,} lost and counted, {found['torn']} torn accepted\n"
        )
    return 0 if found["torn"] == 0 and found["read"] + found["lost"] == found["frames"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
