# SPDX-License-Identifier: Apache-2.0
"""What the command was asked for: options, else variables, else defaults; checked before anything starts."""

from __future__ import annotations

import argparse
import ipaddress
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvfix import __version__
from vllm_kvfix.ring import place
from vllm_kvfix_sidecar import bearer, telemetry_settings
from vllm_kvfix_sidecar.telemetry_settings import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9464
DEFAULT_SHUTDOWN_TIMEOUT_S = 10.0
LOG_FORMATS = ("plain", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
MINE, ANYBODY = RING_OWNERS = ("mine", "anybody")

_DESCRIPTION = """\
Follows the ring files that vLLM's processes with the plugin of vllm-kvfix write, and shows their KV cache and the
memory of every process: on a live page, as metrics at /metrics and by OTLP, as one span a request and one a growth by
OTLP, and as a verdict on each process, for `vllm-kvfix diagnose`. It runs beside vLLM, as the same user, and needs
nothing of it.
"""
_EPILOG = """\
examples:
  vllm-kvfix sidecar                                  page at http://127.0.0.1:9464, metrics at /metrics of it
  vllm-kvfix sidecar --once | jq                      which engines there are, and how they do
  vllm-kvfix sidecar --listen 0.0.0.0:9464 --token-file /run/secrets/token
                                                      for people and a Prometheus on other machines
  OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4317 vllm-kvfix sidecar    spans and metrics by OTLP, too

exit codes:
  0  ended by SIGTERM or SIGINT, or --once is done
  1  it cannot run: the port is taken, a dependency is missing; or a second signal
  2  an option or a variable cannot be used

variables (an option goes before its variable):
  VLLM_KVFIX_RING_DIR           --ring-dir; several separated as in PATH
  VLLM_KVFIX_RING_OWNER         --ring-owner
  VLLM_KVFIX_LISTEN             --listen; else OTEL_EXPORTER_PROMETHEUS_HOST and _PORT
  VLLM_KVFIX_TOKEN_FILE         --token-file
  VLLM_KVFIX_ALLOW_HOST         --allow-host; several separated by spaces
  VLLM_KVFIX_LOG_FORMAT         --log-format
  VLLM_KVFIX_LOG_LEVEL          --log-level; else OTEL_LOG_LEVEL
  VLLM_KVFIX_SHUTDOWN_TIMEOUT   --shutdown-timeout
  OTEL_EXPORTER_OTLP_ENDPOINT   where spans, metrics and events go; unset: nowhere. All the other variables of the
                                OpenTelemetry SDK that can mean something here are honoured: OTEL_SDK_DISABLED,
                                OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_{TRACES,METRICS,LOGS}_EXPORTER,
                                OTEL_EXPORTER_OTLP_*, OTEL_TRACES_SAMPLER(_ARG), OTEL_BSP_*, OTEL_BLRP_*,
                                OTEL_METRIC_EXPORT_*, OTEL_SPAN_*_LIMIT, ...

served: / (the live page), /api/now and /api/history (its figures, as JSON), /diagnosis (what `vllm-kvfix diagnose`
        says, as JSON), /metrics (Prometheus, OpenMetrics), /healthz (it works), /readyz (it has looked for engines;
        says which)
"""


@dataclass(frozen=True)
class Address:
    """Where to listen; port 0: any free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether nobody outside this machine, or pod, can connect."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Settings:
    """All that was asked for.

    ``foreign``: rings of other users are followed, too.

    ``token_file`` holds the token that figures want, None: they want none; ``hosts``: names that a Host header may have
    beside those that it always may; ``shutdown_timeout_s``: how long a flush may take at the end.
    """

    folders: tuple[Path, ...]
    foreign: bool
    listen: Address
    token_file: Path | None
    hosts: frozenset[str]
    log_format: str
    log_level: str
    shutdown_timeout_s: float
    once: bool
    telemetry: telemetry_settings.Telemetry


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """The settings of a command line under variables.

    Raises:
        SettingError: Something cannot be used.
        SystemExit: As argparse does: 0 after --help and --version, 2 after an option that is none.
    """
    given = _parser().parse_args(arguments)
    owner = _either(given.ring_owner, environ, "VLLM_KVFIX_RING_OWNER")
    level = _either(given.log_level, environ, "VLLM_KVFIX_LOG_LEVEL")
    timeout = _either(given.shutdown_timeout, environ, "VLLM_KVFIX_SHUTDOWN_TIMEOUT")
    return Settings(
        folders=tuple(given.ring_dir or place.folders(environ)),
        foreign=_choice("--ring-owner", owner, RING_OWNERS) == ANYBODY,
        listen=listen_address(given.listen, environ),
        token_file=token_file(given.token_file, environ),
        hosts=frozenset(map(_host, given.allow_host or environ.get("VLLM_KVFIX_ALLOW_HOST", "").split())),
        log_format=_choice("--log-format", _either(given.log_format, environ, "VLLM_KVFIX_LOG_FORMAT"), LOG_FORMATS),
        log_level=_choice("--log-level", level, LOG_LEVELS) if level else telemetry_settings.log_level(environ),
        shutdown_timeout_s=_seconds(timeout) if timeout else DEFAULT_SHUTDOWN_TIMEOUT_S,
        once=given.once,
        telemetry=telemetry_settings.read(environ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-kvfix sidecar",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"vllm-kvfix {__version__}")
    add(
        "--ring-dir", action="append", type=Path, metavar="DIR", help="look for rings here; may be given more than once"
    )
    add(
        "--ring-owner",
        metavar="|".join(RING_OWNERS),
        help="follow the rings of this user alone, root those of all (default mine), or of anybody: for a folder that "
        "only the containers of one pod share",
    )
    add(
        "--listen",
        metavar="HOST:PORT",
        help=f"serve here (default {DEFAULT_HOST}:{DEFAULT_PORT}); port 0: any free one",
    )
    add(
        "--token-file",
        metavar="FILE",
        help="give figures only to who sends the token in this file as `Authorization: Bearer TOKEN`; read anew each "
        "time, so that it can be changed; /healthz and /readyz stay open",
    )
    add(
        "--allow-host",
        action="append",
        metavar="NAME",
        help="answer to this name, too, as where a proxy in front of us passes on its own; may be given more than once",
    )
    add("--log-format", metavar="|".join(LOG_FORMATS), help="log to standard error in this form (default plain)")
    add("--log-level", metavar="|".join(LOG_LEVELS), help="log this and what is graver (default info)")
    add(
        "--shutdown-timeout", metavar="S", help=f"flush for so long at the end (default {DEFAULT_SHUTDOWN_TIMEOUT_S:g})"
    )
    add("--once", action="store_true", help="read what is there, print it as JSON, export it, and end")
    return parser


def _either(option: str | None, environ: Mapping[str, str], variable: str) -> str:
    return option if option is not None else environ.get(variable, "").strip()


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value and value.lower() not in allowed:
        raise SettingError(f"{option} {value} cannot be used; allowed: {', '.join(allowed)}")
    return value.lower() or allowed[0]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise SettingError(f"--shutdown-timeout {text} cannot be used; allowed: seconds, 0 or more")
    return value


def token_file(option: str | None, environ: Mapping[str, str]) -> Path | None:
    """The file with the token, None where there is none; it has been read once.

    Raises:
        SettingError: It cannot be read, or holds no token.
    """
    text = _either(option, environ, bearer.VARIABLE)
    if text:
        bearer.read(Path(text))
    return Path(text) if text else None


def _host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}", text):
        raise SettingError(f"--allow-host {text} cannot be used; allowed: a name or an address, without port or scheme")
    return text.lower().rstrip(".")


def listen_address(option: str | None, environ: Mapping[str, str]) -> Address:
    """Where a sidecar listens that is started with that option, None: without it, under ``environ``.

    Raises:
        SettingError: The option or a variable is no address.
    """
    text = _either(option, environ, "VLLM_KVFIX_LISTEN")
    if not text:
        host = environ.get("OTEL_EXPORTER_PROMETHEUS_HOST", "").strip() or DEFAULT_HOST
        port = environ.get("OTEL_EXPORTER_PROMETHEUS_PORT", "").strip() or str(DEFAULT_PORT)
        text = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+)):(\d{1,5})", text)
    if not found or int(found[3]) >= 1 << 16:
        raise SettingError(f"--listen {text} cannot be used; allowed: HOST:PORT, such as 127.0.0.1:9464 or [::1]:0")
    return Address(found[1] or found[2], int(found[3]))
