# SPDX-License-Identifier: Apache-2.0
"""settings: options before variables before defaults; what cannot be used is named, never ignored."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from vllm_kvfix_sidecar import bearer, settings, telemetry_settings
from vllm_kvfix_sidecar.settings import Address
from vllm_kvfix_sidecar.telemetry_settings import Batches, SettingError, Signal

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}


class TestCommand:
    """Options and VLLM_KVFIX_* variables."""

    def test_nothing_said_is_the_documented_default(self) -> None:
        """Without options and variables: the user's folder, loopback, no export."""
        found = settings.parse([], {})
        assert found.folders == (Path(tempfile.gettempdir(), f"vllm-kvfix-{os.getuid()}"),)
        assert found.listen == Address("127.0.0.1", 9464)
        assert (found.log_format, found.log_level, found.shutdown_timeout_s, found.once) == (
            "plain",
            "info",
            10.0,
            False,
        )
        assert (found.token_file, found.hosts) == (None, frozenset())
        assert found.telemetry.traces == Signal((), "grpc")
        assert found.telemetry.metrics == Signal((), "grpc")

    def test_variables_are_read(self) -> None:
        """Each variable sets what its option would."""
        found = settings.parse(
            [],
            {
                "VLLM_KVFIX_RING_DIR": f"/a{os.pathsep}/b",
                "VLLM_KVFIX_LISTEN": "[::1]:0",
                "VLLM_KVFIX_LOG_FORMAT": "json",
                "VLLM_KVFIX_LOG_LEVEL": "debug",
                "VLLM_KVFIX_SHUTDOWN_TIMEOUT": "2.5",
                "OTEL_LOG_LEVEL": "error",
            },
        )
        assert found.folders == (Path("/a"), Path("/b"))
        assert (found.listen, str(found.listen)) == (Address("::1", 0), "[::1]:0")
        assert (found.log_format, found.log_level, found.shutdown_timeout_s) == ("json", "debug", 2.5)

    def test_options_go_before_variables(self) -> None:
        """An option that is given hides its variable."""
        arguments = ["--ring-dir", "/c", "--ring-dir", "/d", "--listen", "0.0.0.0:1", "--log-level", "error", "--once"]
        environ = {"VLLM_KVFIX_RING_DIR": "/a", "VLLM_KVFIX_LISTEN": "no address", "VLLM_KVFIX_LOG_LEVEL": "none"}
        found = settings.parse(arguments, environ)
        assert found.folders == (Path("/c"), Path("/d"))
        assert (found.listen.port, found.log_level, found.once) == (1, "error", True)

    def test_who_may_ask_is_said_by_option_or_variable(self, tmp_path: Path) -> None:
        """The token's file, and names that a Host header may have, in small letters and without a dot at the end."""
        file = tmp_path / "token"
        file.write_text("0123456789abcdef\n")
        environ = {"VLLM_KVFIX_TOKEN_FILE": str(file), "VLLM_KVFIX_ALLOW_HOST": "A.example. fd00::1"}
        found = settings.parse([], environ)
        assert (found.token_file, found.hosts) == (file, frozenset({"a.example", "fd00::1"}))
        found = settings.parse(["--allow-host", "B", "--allow-host", "c", "--token-file", ""], environ)
        assert (found.token_file, found.hosts) == (None, frozenset({"b", "c"}))

    def test_only_own_rings_are_followed_unless_others_are_asked_for(self) -> None:
        """Of this user alone by default; of anybody by option or variable, the option first."""
        variable = {"VLLM_KVFIX_RING_OWNER": "anybody"}
        assert settings.parse([], {}).foreign is False
        assert settings.parse([], variable).foreign is True
        assert settings.parse(["--ring-owner", "mine"], variable).foreign is False

    def test_the_standard_prometheus_variables_say_where_to_listen(self) -> None:
        """OTEL_EXPORTER_PROMETHEUS_HOST and _PORT stand where VLLM_KVFIX_LISTEN is not set, and only there."""
        standard = {"OTEL_EXPORTER_PROMETHEUS_HOST": "::1", "OTEL_EXPORTER_PROMETHEUS_PORT": "9999"}
        assert settings.parse([], standard).listen == Address("::1", 9999)
        assert settings.parse([], standard | {"VLLM_KVFIX_LISTEN": "h:2"}).listen == Address("h", 2)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--listen", "9464"], "--listen 9464"),
            (["--listen", "::1:9464"], "--listen ::1:9464"),
            (["--listen", "a:65536"], "--listen a:65536"),
            (["--listen", "a:"], "--listen a:"),
            (["--allow-host", "http://x"], "--allow-host http://x"),
            (["--allow-host", "x:80"], "--allow-host x:80"),
            (["--allow-host", "*"], "--allow-host *"),
            (["--token-file", "/dev/null"], "--token-file /dev/null"),
            (["--ring-owner", "root"], "mine, anybody"),
            (["--log-format", "xml"], "plain, json"),
            (["--log-level", "loud"], "debug, info, warning, error"),
            (["--shutdown-timeout", "-1"], "--shutdown-timeout -1"),
            (["--shutdown-timeout", "nan"], "--shutdown-timeout nan"),
            (["--shutdown-timeout", "soon"], "--shutdown-timeout soon"),
        ],
    )
    def test_what_cannot_be_used_is_named(self, arguments: list[str], said: str) -> None:
        """The message has the option with its value, or what would do."""
        with pytest.raises(SettingError, match=r"cannot be used; allowed: .+") as raised:
            settings.parse(arguments, {})
        assert said in str(raised.value)

    def test_a_token_file_that_is_not_there_is_named(self) -> None:
        """Before anything starts, rather than at the first question."""
        with pytest.raises(SettingError, match=r"--token-file /nowhere/token cannot be read: No such file"):
            settings.parse(["--token-file", "/nowhere/token"], {})

    @hypothesis_settings(deadline=None)
    @given(st.text(max_size=20))
    def test_any_address_is_parsed_or_refused(self, text: str) -> None:
        """No text for --listen raises anything but SettingError, and what is parsed is written the same way again."""
        try:
            found = settings.parse(["--listen", f"x{text}"], {}).listen
        except SettingError:
            return
        assert settings.parse(["--listen", str(found)], {}).listen == found

    @pytest.mark.parametrize(
        ("host", "loopback"),
        [
            ("127.0.0.1", True),
            ("127.1.2.3", True),
            ("::1", True),
            ("localhost", True),
            ("0.0.0.0", False),  # noqa: S104  # nothing is bound
            ("::", False),
            ("10.0.0.1", False),
            ("evil.example", False),
            ("127.0.0.1.evil.example", False),
        ],
    )
    def test_loopback_is_what_nobody_else_reaches(self, host: str, *, loopback: bool) -> None:
        """Only addresses of loopback count as such."""
        assert Address(host, 1).is_loopback is loopback

    def test_help_names_every_variable_that_is_read(self, capsys: pytest.CaptureFixture[str]) -> None:
        """--help ends with 0 and tells each VLLM_KVFIX_* variable and each exit code."""
        with pytest.raises(SystemExit) as ended:
            settings.parse(["--help"], {})
        told = capsys.readouterr().out
        assert ended.value.code == 0
        source = Path(settings.__file__).read_text()
        assert bearer.VARIABLE in told
        for name in ("RING_DIR", "LISTEN", "ALLOW_HOST", "LOG_FORMAT", "LOG_LEVEL", "SHUTDOWN_TIMEOUT"):
            assert f"VLLM_KVFIX_{name} " in told
            assert name in source
        assert all(f"\n  {code}  " in told for code in (0, 1, 2))


class TestTelemetry:
    """OTEL_* variables."""

    @pytest.mark.parametrize(
        ("environ", "traces", "metrics"),
        [
            (ENDPOINT, Signal(("otlp",), "grpc"), Signal(("otlp",), "grpc")),
            ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "x"}, Signal(("otlp",), "grpc"), Signal((), "grpc")),
            ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "x"}, Signal((), "grpc"), Signal(("otlp",), "grpc")),
            (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, Signal((), "grpc"), Signal(("otlp",), "grpc")),
            (ENDPOINT | {"OTEL_TRACES_EXPORTER": " "}, Signal(("otlp",), "grpc"), Signal(("otlp",), "grpc")),
            ({"OTEL_TRACES_EXPORTER": "otlp"}, Signal(("otlp",), "grpc"), Signal((), "grpc")),
            ({"OTEL_METRICS_EXPORTER": "console,otlp"}, Signal((), "grpc"), Signal(("console", "otlp"), "grpc")),
            ({"OTEL_METRICS_EXPORTER": "prometheus"}, Signal((), "grpc"), Signal((), "grpc")),
            ({"OTEL_TRACES_EXPORTER": "otlp_proto_http"}, Signal(("otlp",), "http/protobuf"), Signal((), "grpc")),
            (
                ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
                Signal(("otlp",), "http/protobuf"),
                Signal(("otlp",), "http/protobuf"),
            ),
            (
                ENDPOINT
                | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf"},
                Signal(("otlp",), "grpc"),
                Signal(("otlp",), "http/protobuf"),
            ),
            (ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"}, Signal((), "grpc"), Signal((), "grpc")),
        ],
    )
    def test_where_signals_go(self, environ: dict[str, str], traces: Signal, metrics: Signal) -> None:
        """Exporters and protocols are what the specification makes of the variables; an endpoint asks for otlp."""
        found = telemetry_settings.read(environ)
        assert (found.traces, found.metrics) == (traces, metrics)

    def test_numbers_are_read_in_their_units(self) -> None:
        """Milliseconds of the variables become what the fields say."""
        found = telemetry_settings.read(
            {
                "OTEL_BSP_SCHEDULE_DELAY": "100",
                "OTEL_BSP_MAX_QUEUE_SIZE": "64",
                "OTEL_BLRP_MAX_QUEUE_SIZE": "32",
                "OTEL_BLRP_SCHEDULE_DELAY": "50",
                "OTEL_METRIC_EXPORT_INTERVAL": "1500",
                "OTEL_METRIC_EXPORT_TIMEOUT": "250",
                "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "Delta",
                "OTEL_METRICS_EXEMPLAR_FILTER": "always_off",
            }
        )
        assert (found.queue, found.batch, found.batch_delay_ms) == (64, 64, 100)
        assert found.events == Batches(32, 32, 50)
        assert telemetry_settings.read({}).events == Batches(2048, 512, 1000)
        assert (found.interval_s, found.timeout_s, found.temporality, found.exemplars) == (1.5, 0.25, "delta", False)

    @pytest.mark.parametrize(
        ("name", "value", "allowed"),
        [
            ("OTEL_TRACES_EXPORTER", "otlp,zipkin", "console"),
            ("OTEL_TRACES_EXPORTER", "prometheus", "console"),
            ("OTEL_METRICS_EXPORTER", "statsd", "prometheus"),
            ("OTEL_LOGS_EXPORTER", "prometheus", "console"),
            ("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "tcp", "grpc, http/protobuf"),
            ("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", "x", "a number above 0"),
            ("OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE", "/nowhere/ca.pem", "No such file"),
            ("OTEL_BLRP_MAX_QUEUE_SIZE", "0", "a whole number from 1 on"),
            ("OTEL_BLRP_MAX_EXPORT_BATCH_SIZE", "1.5", "a whole number from 1 on"),
            ("OTEL_BLRP_SCHEDULE_DELAY", "0", "a number above 0"),
            ("OTEL_BLRP_EXPORT_TIMEOUT", "soon", "a number above 0"),
            ("OTEL_LOGRECORD_ATTRIBUTE_COUNT_LIMIT", "-1", "a whole number from 0 on"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "grpc, http/protobuf"),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "tcp", "grpc, http/protobuf"),
            ("OTEL_SDK_DISABLED", "yes", "true, false"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "a whole number from 1 on"),
            ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1.5", "a whole number from 1 on"),
            ("OTEL_BSP_SCHEDULE_DELAY", "-1", "a number above 0"),
            ("OTEL_BSP_EXPORT_TIMEOUT", "soon", "a number above 0"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "inf", "a number above 0"),
            ("OTEL_METRIC_EXPORT_TIMEOUT", "nan", "a number above 0"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "a number above 0"),
            ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "x", "a number above 0"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd", "none, gzip, deflate"),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.pem", "No such file"),
            ("OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", "/nowhere/key.pem", "No such file"),
            ("OTEL_SPAN_EVENT_COUNT_LIMIT", "many", "a whole number from 0 on"),
            ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "-1", "a whole number from 0 on"),
            ("OTEL_TRACES_SAMPLER", "sometimes", "parentbased_always_on"),
            ("OTEL_METRICS_EXEMPLAR_FILTER", "some", "trace_based"),
            ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "both", "cumulative, delta, lowmemory"),
            (
                "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
                "base2_exponential_bucket_histogram",
                "explicit_bucket_histogram",
            ),
        ],
    )
    def test_what_cannot_be_honoured_is_named(self, name: str, value: str, allowed: str) -> None:
        """The message has the variable, its value, and the allowed ones."""
        with pytest.raises(SettingError) as raised:
            telemetry_settings.read({name: value})
        assert str(raised.value).startswith(f"{name}={value} cannot be used; allowed: ")
        assert allowed in str(raised.value)

    def test_a_ratio_beyond_one_is_named(self) -> None:
        """OTEL_TRACES_SAMPLER_ARG is checked where the sampler reads it, and only there."""
        ratio = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1.1"}
        with pytest.raises(SettingError, match=r"OTEL_TRACES_SAMPLER_ARG=1\.1"):
            telemetry_settings.read(ratio)
        assert telemetry_settings.read(ratio | {"OTEL_TRACES_SAMPLER": "always_on"}) is not None

    def test_a_batch_larger_than_the_queue_is_refused(self) -> None:
        """The SDK would end with a traceback."""
        for prefix in ("OTEL_BSP", "OTEL_BLRP"):
            with pytest.raises(SettingError, match=f"{prefix}_MAX_EXPORT_BATCH_SIZE=9 is more than"):
                telemetry_settings.read({f"{prefix}_MAX_EXPORT_BATCH_SIZE": "9", f"{prefix}_MAX_QUEUE_SIZE": "8"})

    def test_a_configuration_file_is_refused(self) -> None:
        """OTEL_CONFIG_FILE is an error, and the message says what to do."""
        with pytest.raises(SettingError, match=r"OTEL_CONFIG_FILE is not supported: .*unset it"):
            telemetry_settings.read({"OTEL_CONFIG_FILE": "/etc/otel.yaml"})

    @pytest.mark.parametrize(("value", "level"), [("", "info"), ("WARN", "warning"), ("debug", "debug")])
    def test_the_standard_log_level_is_heard(self, value: str, level: str) -> None:
        """OTEL_LOG_LEVEL counts where we are told no level of our own."""
        assert settings.parse([], {"OTEL_LOG_LEVEL": value}).log_level == level
