# SPDX-License-Identifier: Apache-2.0
"""The folder of the rings and the files in it: late, gone, read-only, somebody else's, hostile."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.sidecar_e2e import hostile, ledger
from tests.sidecar_e2e.expectations import differences, of_engine
from tests.sidecar_e2e.feeder import start_time
from tests.sidecar_e2e.processes import WAIT_S, wait_until
from tests.sidecar_e2e.sidecar import PATIENT, Sidecar, otlp
from vllm_kvfix.ring import layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sidecar_e2e.receiver import Receiver


NOBODY = 65534


class TestTheFolder:
    """The folder of the rings."""

    def test_it_may_come_later(self, tmp_path: Path, rings: Path, receiver: Receiver) -> None:
        """Missing at first, the sidecar is alive and not ready; once it is there its rings are followed."""
        rings.rmdir()
        with Sidecar(tmp_path, rings, otlp("http", receiver.http_endpoint)) as sidecar:
            assert sidecar.healthy()
            assert sidecar.get("/readyz").status == 503
            rings.mkdir()
            book = ledger.fed_and_ended(tmp_path, rings / "a.ring", "--requests", "100")
            receiver.wait_for(lambda got: len(got.spans) >= 100, WAIT_S)
            assert sidecar.get("/readyz").status == 200
        assert differences(receiver.spans, book) == []

    def test_it_may_be_deleted_under_a_live_engine(self, tmp_path: Path, rings: Path, receiver: Receiver) -> None:
        """The ring is read to the engine's end all the same, then forgotten; a new folder is followed again."""
        with Sidecar(tmp_path, rings, otlp("grpc", receiver.grpc_endpoint)) as sidecar:
            with ledger.Feeder(tmp_path, rings / "a.ring", "--requests", "1000", "--rate", "500") as feeder:
                wait_until(lambda: sidecar.finished("a.ring") > 100, WAIT_S, "it follows")
                shutil.rmtree(rings)
                book = feeder.fed()
            receiver.wait_for(lambda got: len(got.spans) >= 1000, WAIT_S)
            wait_until(lambda: not sidecar.ready()["engines"], WAIT_S, "the engine is forgotten")
            assert sidecar.healthy()
            assert differences(receiver.spans, book) == []
            rings.mkdir()
            ledger.fed_and_ended(tmp_path, rings / "b.ring", "--requests", "50")
            receiver.wait_for(lambda got: len(got.spans) >= 1050, WAIT_S)

    def test_it_may_be_another_users_and_read_only(self) -> None:
        """As a user who may read the ring but not write its folder: all is read, the cursor is missed once, no more."""
        with other_users_folder() as (folder, python):
            rings = folder / "rings"
            rings.mkdir()
            with ledger.Feeder(folder, rings / "a.ring", "--requests", "600", "--rate", "300") as feeder:
                wait_until((rings / "a.ring").exists, WAIT_S, "the ring is there")
                os.chown(rings / "a.ring", NOBODY, NOBODY)
                with Sidecar(folder, rings, PATIENT, user=NOBODY, python=python) as sidecar:
                    feeder.fed()
                    wait_until(lambda: sidecar.finished("a.ring") == 600, WAIT_S, "all are counted")
                    assert sidecar.healthy()
                    said = [line["message"] for line in sidecar.lines if "cursor" in line["message"]]
                    assert len(said) == 1
            assert list(rings.iterdir()) == [rings / "a.ring"]

    def test_rings_of_other_users_are_not_read(self) -> None:
        """As a user who is not root, the sidecar refuses a ring that is readable but another's, and follows its own."""
        with other_users_folder() as (folder, python):
            rings = folder / "rings"
            rings.mkdir()
            for name, owner in (("theirs.ring", 0), ("ours.ring", NOBODY)):
                ledger.fed_and_ended(folder, rings / name, "--requests", "20")
                (rings / name).chmod(0o644)
                os.chown(rings / name, owner, owner)
            with Sidecar(folder, rings, PATIENT, user=NOBODY, python=python) as sidecar:
                wait_until(lambda: sidecar.finished("ours.ring") == 20, WAIT_S, "its own is read")
                assert list(sidecar.ready()["refused"]) == [str(rings / "theirs.ring")]
                assert sidecar.engine("theirs.ring") is None
                assert sidecar.value("vllm_kvfix_sidecar_files_refused") == 1


@contextmanager
def other_users_folder() -> Iterator[tuple[Path, str]]:
    """A folder that every user can look into, and a Python that every user can run, for a sidecar as nobody."""
    python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if os.geteuid() != 0:
        pytest.skip("rings of other users: only root can make them")
    if not Path(python).exists():
        pytest.skip(f"rings of other users: no {python}, which every user could run")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        for name in ("sidecar.out", "sidecar.err"):
            (folder / name).touch()
        yield folder, python


class TestHostileFiles:
    """Files that are no rings, beside one that is."""

    def test_each_kind_is_refused_and_nothing_else_suffers(
        self, tmp_path: Path, rings: Path, receiver: Receiver
    ) -> None:
        """Each is refused with a reason, counted, and logged once; the good ring beside them is told in full."""
        for make in hostile.REFUSED:
            make(rings / f"{make.__name__}.ring")
        with Sidecar(tmp_path, rings, otlp("grpc", receiver.grpc_endpoint)) as sidecar:
            book = ledger.fed_and_ended(tmp_path, rings / "good.ring", "--requests", "200")
            receiver.wait_for(lambda got: len(got.spans) >= 200, WAIT_S)
            refused = sidecar.ready()["refused"]
            assert set(refused) == {str(rings / f"{make.__name__}.ring") for make in hostile.REFUSED}
            assert all(refused.values())
            assert sidecar.value("vllm_kvfix_sidecar_files_refused") == len(hostile.REFUSED)
            assert sidecar.healthy()
            for path, reason in refused.items():
                assert len([line for line in sidecar.lines if reason in line["message"]]) == 1, path
        assert differences(receiver.spans, book) == []

    def test_rings_that_lie_make_nothing_up(self, tmp_path: Path, rings: Path, receiver: Receiver) -> None:
        """Rings whose headers or frames lie are survived; what is sent of them fits OTLP, so that the rest arrives."""
        for make in hostile.LYING:
            make(rings / f"{make.__name__}.ring")
        with Sidecar(tmp_path, rings, otlp("http", receiver.http_endpoint)) as sidecar:
            book = ledger.fed_and_ended(tmp_path, rings / "good.ring", "--requests", "200")
            pid = book.engine["pid"]
            receiver.wait_for(lambda got: len(of_engine(got.spans, pid)) >= 200, WAIT_S)
            receiver.wait_for(lambda got: got.latest("vllm_kvfix.ring.published"), WAIT_S)
            assert sidecar.spans("failed") == 0
            assert sidecar.metric_exports("failed") == 0
            assert sidecar.get("/metrics").status == 200
            assert sidecar.get("/readyz").status == 200
            assert [line for line in sidecar.lines if line["level"] == "error"] == []
            assert sidecar.healthy()
        assert differences(of_engine(receiver.spans, pid), book) == []

    def test_a_ring_that_is_cut_while_it_is_read_is_given_up(
        self, tmp_path: Path, rings: Path, receiver: Receiver
    ) -> None:
        """Truncated under the sidecar, the ring is refused with a reason; the one beside it goes on."""
        with Sidecar(tmp_path, rings, otlp("grpc", receiver.grpc_endpoint)) as sidecar:
            ledger.fed_and_ended(tmp_path, rings / "cut.ring", "--requests", "50")
            hostile.patch(rings / "cut.ring", layout.PID_WORD, os.getpid())
            hostile.patch(rings / "cut.ring", layout.START_TIME_WORD, start_time(os.getpid()))
            os.truncate(rings / "cut.ring", layout.HEADER_BYTES // 2)
            wait_until(lambda: str(rings / "cut.ring") in sidecar.ready()["refused"], WAIT_S, "it is refused")
            ledger.fed_and_ended(tmp_path, rings / "good.ring", "--requests", "50")
            wait_until(lambda: sidecar.finished("good.ring") == 50, WAIT_S, "the other is told")
            assert sidecar.healthy()

    def test_of_very_many_files_none_is_said_twice(self, tmp_path: Path, rings: Path) -> None:
        """Of 3,000 files of noise none is logged twice, however often the folder is scanned; good ones are found."""
        noise = bytes(range(256)) * 17
        for number in range(3000):
            (rings / f"{number}.ring").write_bytes(noise)
        with Sidecar(tmp_path, rings, PATIENT) as sidecar:
            for name in ("a.ring", "b.ring", "c.ring"):
                ledger.fed_and_ended(tmp_path, rings / name, "--requests", "50")
                wait_until(lambda name=name: sidecar.finished(name) == 50, WAIT_S, "a good one is told")  # type: ignore[misc]  # name is bound
            said = [line["message"] for line in sidecar.lines if line["level"] == "warning"]
            assert 0 < len(said) == len(set(said)) <= 3000
            assert sidecar.value("vllm_kvfix_sidecar_files_refused") == 3000
            assert sidecar.healthy()
