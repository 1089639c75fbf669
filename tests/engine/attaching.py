# SPDX-License-Identifier: Apache-2.0
"""Real engines that nothing of ours was installed beside, and what attaching, or its refusal, did to them."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.attach.processes import state_of, wait_for
from tests.engine.harness import ENGINE_ARGUMENTS
from vllm_kvfix import attach
from vllm_kvfix.attach import injection, target
from vllm_kvfix.attach.meeting import Meeting
from vllm_kvfix.demo.engine import MODEL_NAME, Engine, EngineSettings, engine_environ
from vllm_kvfix.demo.run import LOAD_SCRIPT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.engine.harness import Workshop
    from vllm_kvfix.demo.environment import Environment

RELEASE = "0.25.1"
CONCURRENCY = 12
MOST_S = 600
ASKED = 6
STEPS_VARIABLE = "KVFIX_STEPS_FILE"
# What is attached in turn, one after another; then all of it is taken back.
STATES = ([{"fix"}], [{"fix", "observe"}], [{"fix"}, {"observe"}], [{"observe"}, {"fix"}])

# A plugin of the engine's that writes down when each step began and ended: two 64-bit numbers, nanoseconds.
_STEPS_PLUGIN = f"""
import functools, os, struct, time

def register():
    import multiprocessing
    if "EngineCore" not in multiprocessing.current_process().name:
        return
    import vllm.v1.engine.core as module
    out = os.open(os.environ[{STEPS_VARIABLE!r}], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    def timed(original):
        @functools.wraps(original)
        def step(*args, **kwargs):
            began = time.monotonic_ns()
            result = original(*args, **kwargs)
            os.write(out, struct.pack("qq", began, time.monotonic_ns()))
            return result
        return step
    for name in ("step", "step_with_batch_queue"):
        setattr(module.EngineCore, name, timed(getattr(module.EngineCore, name)))
"""

# Run in the engine by `run`, as are those below.
_RUN = """
import sys, threading
def run():
    targets = [getattr(thread, "_target", None) for thread in threading.enumerate()]
    core = next(t.__self__ for t in targets if hasattr(getattr(t, "__self__", None), "scheduler"))
    said = {{}}
    try:
        exec({code!r}, {{"core": core, "said": said}})
    except BaseException as error:
        said["error"] = repr(error)
    import json, os
    with open({done!r} + ".part", "w") as file:
        json.dump(said, file)
    os.replace({done!r} + ".part", {done!r})
threading.Thread(target=run, name="test", daemon=True).start()
"""

# As many ids as would pile up in weeks, each a number of its own, made a little at a time.
_LEAK = """
import time
ids = core.scheduler.kv_cache_manager.coordinator.single_type_managers[0].new_block_ids
for first in range(1 << 40, (1 << 40) + {count}, 50_000):
    ids.extend(range(first, first + 50_000))
    time.sleep(0.0005)
"""

# Whatever attach could change: each function of the classes, the scheduler's own attributes, the kind of each list.
_LOOK = """
import sys, threading
managers = core.scheduler.kv_cache_manager.coordinator.single_type_managers
kinds = {base for made in (core.scheduler, core.scheduler.kv_cache_manager, core.scheduler.kv_cache_manager.coordinator,
         core.scheduler.kv_cache_manager.block_pool, *managers) for base in type(made).__mro__ if base is not object}
said["functions"] = {f"{kind.__module__}.{kind.__qualname__}.{name}": [id(value), hash(getattr(value, "__code__", 0))]
                     for kind in kinds for name, value in vars(kind).items() if callable(value)}
said["own"] = sorted(vars(core.scheduler))
said["lists"] = [type(manager.new_block_ids).__name__ for manager in managers]
said["threads"] = sorted(thread.name for thread in threading.enumerate() if "kvfix" in thread.name)
said["ours"] = sorted(name for name in sys.modules if name.partition(".")[0] == "vllm_kvfix")
"""

# One function is replaced by another one, then, or the other way round, by what it was; or is edited in its place.
REPLACE = """
import vllm.v1.core.single_type_kv_cache_manager as module
stock = module.SingleTypeKVCacheManager.allocate_new_blocks
module.kvfix_stock = stock
module.SingleTypeKVCacheManager.allocate_new_blocks = lambda *given, **named: stock(*given, **named)
"""
PUT_BACK = """
import vllm.v1.core.single_type_kv_cache_manager as module
module.SingleTypeKVCacheManager.allocate_new_blocks = vars(module).pop("kvfix_stock")
"""
EDIT = """
import vllm.v1.core.single_type_kv_cache_manager as module
function = module.SingleTypeKVCacheManager.allocate_new_blocks
module.kvfix_code = function.__code__
function.__code__ = function.__code__.replace(co_consts=function.__code__.co_consts + ("edited",))
"""
UNDO = """
import vllm.v1.core.single_type_kv_cache_manager as module
module.SingleTypeKVCacheManager.allocate_new_blocks.__code__ = vars(module).pop("kvfix_code")
"""

NOBODY = 65534
_AS_NOBODY = f"""
import os, sys
from vllm_kvfix.attach import command
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
sys.exit(command.main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Said:
    """What the command line answered: its exit code, an object a process, and what it wrote to stderr."""

    code: int
    objects: list[dict[str, Any]]
    err: str


def command_line(name: str, *words: object, beneath: Sequence[str] = (), nobody: bool = False) -> Said:
    """Run the real command with ``--json``: beneath another one, or as a user without rights."""
    # That user need not be able to reach our interpreter, so it is started as root, and imports what it needs.
    program = ["-c", _AS_NOBODY] if nobody else ["-m", "vllm_kvfix", name]
    command = [*beneath, sys.executable, *program, *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MOST_S)
    assert done.stdout, done.stderr
    return Said(done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr)


@dataclass
class Load:
    """One run of the mixed load: its requests by index, its counts, and the seconds of each step meanwhile."""

    requests: dict[int, dict[str, Any]]
    counts: dict[str, int]
    steps: list[float] = field(default_factory=list)


class Attended:
    """A live engine that can be put under load, attached to, and asked for its steps."""

    def __init__(self, engine: Engine, environment: Environment, work: Path, own: Path | None = None) -> None:
        """``own``: a TMPDIR of its own file system, with its rings below; else both lie in ``work``."""
        self.engine = engine
        self.environment = environment
        self.work = work
        self.cores = engine.core_pids()
        self.core = self.cores[0]
        self.launcher = target._parent(self.core)
        root = f"/proc/{self.core}/root"
        self.tmp, self.rings = Path(f"{root}/{own or work / 'tmp'}"), Path(f"{root}/{own or work}/rings")
        self.python = (3, int(environment.site_packages.parent.name.rpartition(".")[2]))
        self._count = itertools.count()

    def start_load(self, requests: int) -> tuple[subprocess.Popen[bytes], Path]:
        """Put the mixed load on."""
        report = self.work / f"load-{next(self._count)}.json"
        command = [str(self.environment.python), "-I", str(LOAD_SCRIPT), "--mode=mixed", f"--url={self.engine.url}"]
        command += [f"--model={MODEL_NAME}", f"--output={report}", f"--requests={requests}"]
        command += [f"--concurrency={CONCURRENCY}", f"--seconds={MOST_S}"]
        return subprocess.Popen(command, env=engine_environ({}, ())), report

    def load(self, requests: int, meanwhile: Iterator[object] | None = None) -> Load:
        """The load from beginning to end; ``meanwhile`` is drawn on as long as it runs."""
        began = time.monotonic_ns()
        running, report = self.start_load(requests)
        with running:
            while meanwhile and running.poll() is None and next(meanwhile, None) is not None:
                pass
            running.wait(MOST_S)
        said = json.loads(report.read_text())
        return Load(
            {request["index"]: request for request in said["requests"]},
            {state: said[state] for state in ("sent", "completed", "aborted", "failed")},
            self.steps(began, time.monotonic_ns()),
        )

    def steps(self, began: int, ended: int) -> list[float]:
        """Seconds of each step that began between two moments of the monotonic clock."""
        data = (self.work / "steps").read_bytes()
        whole = data[: len(data) // 16 * 16]
        return [(end - begin) / 1e9 for begin, end in struct.iter_unpack("qq", whole) if began <= begin <= ended]

    def leak(self, count: int) -> None:
        """Have so many ids pile up."""
        self.run(_LEAK.format(count=count))

    def run(self, code: str) -> dict[str, Any]:
        """Run code in the engine core, to which ``core`` is its ``EngineCore``; returns what it puts into ``said``."""
        done = self.work / f"said-{next(self._count)}.json"
        wrapped = _RUN.format(code=code, done=str(done))
        with Meeting(self.core, ["/tmp"], (0, 0), executable=True) as meeting:  # noqa: S108  # for a moment
            injection.inject(self.core, self.python, f"exec({wrapped!r}, {{}})", meeting)
        deadline = time.monotonic() + MOST_S
        while not done.exists():
            self.engine.check()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        said: dict[str, Any] = json.loads(done.read_text())
        assert "error" not in said, said["error"]
        return said

    def look(self) -> Look:
        """What would show that something has touched the engine."""
        answers = self.answers()
        inside = self.run(_LOOK)
        rings = sorted(path.name for path in self.rings.glob("*"))
        files = sorted(path.name for path in self.tmp.iterdir() if "kvfix" in path.name)
        return Look(answers, inside, inside.pop("ours"), rings, files)

    def answers(self) -> list[str]:
        """What it says to the same few requests each time, one after another."""
        found = []
        for number in range(ASKED):
            prompt = [1 + (number * 131 + at * at * 7) % 510 for at in range(40 + 60 * number)]
            body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 24, "temperature": 0, "seed": number}
            body |= {"ignore_eos": True, "return_token_ids": True}
            client = http.client.HTTPConnection(urlsplit(self.engine.url).netloc, timeout=MOST_S)
            with contextlib.closing(client):
                client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                found.append(json.dumps(json.load(client.getresponse())["choices"]))
        return found

    @contextlib.contextmanager
    def edited(self, code: str, back: str) -> Iterator[None]:
        """Run the one code in it, and in the end the other one."""
        self.run(code)
        try:
            yield
        finally:
            self.run(back)


@dataclass(frozen=True)
class Look:
    """What an engine is like: its answers, what is in it, modules of ours, rings, files of ours in its TMPDIR."""

    answers: list[str]
    inside: dict[str, Any]
    ours: list[str]
    rings: list[str]
    files: list[str]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process under SIGSTOP."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: state_of(pid) == "T")
        yield
        assert state_of(pid) in {"T", "Z"}, "it was woken"
    finally:
        os.kill(pid, signal.SIGCONT)


def attended(
    workshop: Workshop, name: str = "", release: str = RELEASE, arguments: Sequence[str] = (), **environ: str
) -> tuple[EngineSettings, Environment]:
    """How to start an engine that has the plugin that times its steps, and nothing of ours."""
    work = workshop.work / f"attach-{name}{release}"
    plugin = work / "plugin"
    metadata = plugin / "kvfix_steps-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvfix-steps\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nkvfix_steps = kvfix_steps:register\n")
    (plugin / "kvfix_steps.py").write_text(_STEPS_PLUGIN)
    (work / "tmp").mkdir()
    own = {"VLLM_KVFIX_RING_DIR": str(work / "rings"), STEPS_VARIABLE: str(work / "steps")}
    own |= {"TMPDIR": str(work / "tmp"), **environ}
    settings = EngineSettings(
        workshop.model,
        work,
        arguments=[*ENGINE_ARGUMENTS, *arguments],
        environ=own,
        plugin_path=plugin,
        start_deadline_s=600,
    )
    return settings, workshop.environment(release)


def differing(one: Load, other: Load) -> list[int]:
    """The requests that got other tokens; of those that were given up midway, what both got is compared."""
    found = []
    for index, request in one.requests.items():
        tokens, others = request["token_ids"], other.requests[index]["token_ids"]
        if "aborted" in {request["state"], other.requests[index]["state"]}:
            both = min(len(tokens), len(others))
            tokens, others = tokens[:both], others[:both]
        if tokens != others:
            found.append(index)
    return found


def rounds(pid: int, count: int, done: list[attach.Outcome]) -> Iterator[int]:
    """Attach in each of the states in turn, and take it back; the last state stays. Outcomes go to ``done``."""
    for number in range(count):
        done.extend(
            attach.attach_to(pid, fix="fix" in wanted, observe="observe" in wanted)
            for wanted in STATES[number % len(STATES)]
        )
        if number < count - 1:
            taken = attach.detach_from(pid)
            assert taken.left == ()
            done.append(taken)
        yield number
