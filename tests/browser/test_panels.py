# SPDX-License-Identifier: Apache-2.0
"""Each panel shows what the sidecar said, and says it anew when it changes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import engine
from tests.browser.viewer import SIZE_PRECISION, Viewer, read_size, same, viewing, wait_for
from tests.sidecar_e2e.ledger import fed_and_ended
from tests.sidecar_e2e.sidecar import Sidecar

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

    from tests.browser.conftest import Scene

# What the page works out itself, from what stands beside it.
DERIVED = {"change_bytes", "bytes_per_hour", "time_to_limit"}
GROWS_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def held(browser: Browser, scene: Scene) -> Iterator[tuple[Viewer, dict[str, Any]]]:
    """The page as it was paused, with the leaking process in detail, and the JSON that it shows."""
    with viewing(browser) as viewer:
        viewer.open(scene.url)
        viewer.wait(f"article[data-alarming=true] [data-field=pid]:text('{scene.engine.pid}')")
        viewer.wait("#requests tbody tr")
        viewer.wait("#memory [data-chart=memory]:not([data-points='0'])")
        yield viewer, viewer.hold()


def of(told: dict[str, Any], scene: Scene) -> dict[str, Any]:
    """The engine's process in the JSON."""
    (found,) = [process for process in told["processes"] if process["pid"] == scene.engine.pid]
    return dict(found)


def value_at(told: Any, path: str) -> Any:
    """What stands in JSON at a dotted path; None where nothing does."""
    for part in path.split("."):
        if isinstance(told, list):
            told = told[int(part)]
        elif isinstance(told, dict):
            told = told.get(part)
        else:
            return None
    return told


def check(figures: dict[str, tuple[str, str]], told: Any, prefix: str = "") -> set[str]:
    """Each figure has the JSON's value, and says it in words; the names of all."""
    for name, (raw, text) in figures.items():
        if name.startswith("gpus") or name in DERIVED:
            continue
        value = value_at(told, name.removeprefix(prefix))
        assert same(raw, value), f"{name}: {raw} is shown, {value} was sent"
        if value is None:
            assert text in {"not known", "none", "no bound known"}, name
        elif "bytes" in name:
            assert read_size(text) == pytest.approx(value, rel=SIZE_PRECISION, abs=0.5), name
        elif isinstance(value, int) and not name.endswith("_s"):
            assert text == f"{value:,}", name
    return set(figures)


def test_the_answer_is_the_sidecars(held: tuple[Viewer, dict[str, Any]]) -> None:
    """Word by word, first of all, and marked as an alarm."""
    viewer, told = held
    assert told["exit_code"] == 1
    assert viewer.text("#answer") == told["answer"]
    assert viewer.page.locator(".answer").get_attribute("data-exit") == "1"
    assert "ALARM" in viewer.page.title()


def test_each_process_has_its_verdict(held: tuple[Viewer, dict[str, Any]]) -> None:
    """In the sidecar's order: its name, pid, verdict, sentence, remedy, evidence, patch state and all figures."""
    viewer, told = held
    cards = viewer.page.locator("[data-testid=process]")
    keys = cards.evaluate_all("all => all.map(card => card.dataset.key)")
    assert keys == [process["key"] for process in told["processes"]]
    for process in told["processes"]:
        card = f"[data-testid=process][data-key='{process['key']}']"
        assert viewer.text(f"{card} [data-field=title]") == process["title"]
        assert viewer.text(f"{card} [data-field=pid]") == f"pid {process['pid']}"
        assert viewer.text(f"{card} [data-field=kind]") == process["verdict"]["kind"]
        assert viewer.text(f"{card} [data-field=sentence]") == process["sentence"]
        names = check(viewer.figures(card), process)
        assert {"memory.status.rss_bytes", "memory.status.anon_bytes", "limit.limit_bytes"} <= names
        evidence = viewer.page.locator(f"{card} [data-field=evidence] li").all_text_contents()
        assert evidence == process["verdict"]["evidence"]


def test_the_leak_has_its_remedy_and_its_end(held: tuple[Viewer, dict[str, Any]], scene: Scene) -> None:
    """What to do, in which state the fix is, and when the limit is reached."""
    viewer, told = held
    process = of(told, scene)
    card = f"[data-testid=process][data-key='{process['key']}']"
    remedy = process["verdict"]["remedy"]["action"].replace("`", "")
    assert viewer.text(f"{card} [data-field=remedy]").lower() == remedy.lower()
    assert viewer.text(f"{card} [data-field=patch]") == f"patch {process['patch_state']}" == "patch refused"
    assert same(viewer.raw(f"{card} [data-figure=time_to_limit]"), process["verdict"]["time_to_limit_s"]["best"])
    assert viewer.text(f"{card} [data-field=time-to-limit]").startswith("in ")


def test_each_engine_has_its_pool_and_totals(held: tuple[Viewer, dict[str, Any]]) -> None:
    """All figures of all engines, and the histogram of blocks a request."""
    viewer, told = held
    assert told["engines"]
    for one in told["engines"]:
        card = f"[data-testid=engine][data-key='{one['key']}']"
        names = check(viewer.figures(card), one)
        expected = {f"{part}.{name}" for part in ("pool", "totals", "ring") for name in one[part]}
        assert expected | {"requests.running", "requests.waiting", "backlog.0"} <= names
        counts = [
            int(raw)
            for raw in viewer.page.locator(f"{card} [data-bucket]").evaluate_all("all => all.map(b => b.dataset.raw)")
        ]
        assert sum(counts) == sum(one["peak_blocks"]["counts"])
        assert viewer.page.locator(card).get_attribute("data-state") == one["state"]


def test_each_request_is_there_with_what_it_holds(held: tuple[Viewer, dict[str, Any]]) -> None:
    """In the sidecar's order: id, state, figures, and the trace, where it has one, to be copied."""
    viewer, told = held
    rows = viewer.page.locator("#requests tbody tr")
    assert len(told["requests"]) >= 12
    assert rows.evaluate_all("all => all.map(row => row.dataset.request)") == [
        request.get("request_id") or request["engine_request_id"] for request in told["requests"]
    ]
    for at, request in enumerate(told["requests"]):
        row = f"#requests tbody tr:nth-child({at + 1})"
        names = check(viewer.figures(row), request)
        assert names == {"blocks", "peak_blocks", "held_s", "queued_s", "preemptions"}
        assert viewer.text(f"{row} [data-field=state]") == request["state"]
        assert viewer.text(f"{row} [data-field=trace_id]") == (request.get("trace_id") or "none")
    traced = {request["trace_id"] for request in told["requests"] if request.get("trace_id")}
    copied = viewer.page.locator("#requests [data-copy]").evaluate_all("all => all.map(b => b.dataset.copy)")
    assert traced
    assert traced <= set(copied)


def test_each_container_is_there_with_what_owns_the_growth_marked(
    held: tuple[Viewer, dict[str, Any]], scene: Scene
) -> None:
    """Those of the gravest process, with capacity and drain; the list that leaks is the culprit, and no other."""
    viewer, told = held
    process = told["processes"][0]
    assert process["pid"] == scene.engine.pid
    rows = viewer.page.locator("#containers tbody tr")
    assert rows.evaluate_all("all => all.map(row => row.dataset.path)") == [c["path"] for c in process["containers"]]
    for at, container in enumerate(process["containers"]):
        row = f"#containers tbody tr:nth-child({at + 1})"
        names = check(viewer.figures(row), container)
        assert {"size_bytes", "entries", "capacity_entries", "drain_ratio", "orphans"} <= names
    culprits = viewer.page.locator("#containers tr[data-culprit=true]").evaluate_all(
        "all => all.map(r => r.dataset.path)"
    )
    assert culprits == [culprit["path"] for culprit in process["verdict"]["culprits"]]


def test_the_sidecar_tells_of_itself(held: tuple[Viewer, dict[str, Any]]) -> None:
    """What it costs, what it exported and dropped, and where to."""
    viewer, told = held
    names = check(viewer.figures("#sidecar"), told["sidecar"], "sidecar.")
    counts = {
        f"sidecar.{part}.{name}" for part in ("spans", "events", "metric_exports") for name in told["sidecar"][part]
    }
    assert counts | {"sidecar.rss_bytes", "sidecar.cpu_ratio", "sidecar.errors"} <= names


def test_what_happened_is_listed(held: tuple[Viewer, dict[str, Any]], scene: Scene) -> None:
    """Each mark, the newest first; the growth of our engine among them."""
    viewer, told = held
    shown = viewer.page.locator("#marks li").evaluate_all("all => all.map(one => [one.dataset.kind, one.dataset.key])")
    newest = sorted(told["marks"], key=lambda mark: -float(mark["time_unix_s"]))
    assert sorted(map(tuple, shown)) == sorted(
        {(mark["kind"], mark["key"]) for mark in newest} | set(map(tuple, shown))
    )
    assert ["growth began", of(told, scene)["key"]] in shown


def test_the_charts_draw_the_history(held: tuple[Viewer, dict[str, Any]], scene: Scene) -> None:
    """Memory, pool, requests, backlog and containers: as many points as the history has, and now as the last one."""
    viewer, told = held
    history = next(viewer.answers("/api/history?range"))
    process = of(told, scene)
    (one,) = [found for found in told["engines"] if found["key"] == process["key"]]
    status = process["memory"]["status"]
    last = {
        "#memory [data-chart=memory]": status["anon_bytes"] + status.get("swap_bytes", 0),
        f"[data-testid=engine][data-key='{one['key']}'] [data-chart=held]": one["pool"]["held"],
        f"[data-testid=engine][data-key='{one['key']}'] [data-chart=running]": one["requests"]["running"],
        f"[data-testid=engine][data-key='{one['key']}'] [data-chart=backlog]": sum(one["backlog"]),
    }
    for selector, value in last.items():
        chart = viewer.page.locator(selector)
        assert same(chart.get_attribute("data-last") or "", value), selector
        assert int(chart.get_attribute("data-points") or 0) > 1, selector
        assert chart.locator("canvas").count() == 1
    memory = max(len(series["memory"]["t"]) for series in history["processes"].values())
    assert int(viewer.page.locator("#memory [data-chart=memory]").get_attribute("data-points") or 0) >= memory > 10
    path = "scheduler.kv_cache_manager.coordinator.single_type_managers[0].new_block_ids"
    assert path.rpartition(".")[2] in viewer.text("#containers [data-chart=containers]")


@pytest.mark.alone  # five seconds mean something only where nothing else takes the processor
def test_growth_appears_within_seconds_of_being_written(viewer: Viewer, scene: Scene) -> None:
    """What the engine writes stands on the page within 5 s, without a reload; three times, each after a rest."""
    viewer.open(scene.url)
    viewer.wait(f"article [data-field=pid]:text('{scene.engine.pid}')")
    page_was = viewer.page.evaluate("performance.timeOrigin")
    card = f"[data-testid=engine]:has-text('{scene.engine.pid}')"
    for ids in (1000, 77, 500_000):
        total = scene.engine.add(ids)
        wait_for(
            lambda total=total: viewer.raw(f"{card} [data-figure='backlog.0']") == str(total),
            str(total),
            GROWS_WITHIN_S,
        )
        assert viewer.text(f"{card} [data-figure='backlog.0']") == f"{total:,}"
    assert viewer.page.evaluate("performance.timeOrigin") == page_was


def test_death_and_restart_are_shown(browser: Browser, tmp_path: Path) -> None:
    """An engine that is killed is marked as ended, and told of; the one after it is a new one beside it."""
    rings = tmp_path / "rings"
    rings.mkdir()
    with Sidecar(tmp_path, rings, {}) as sidecar, viewing(browser) as viewer:
        viewer.open(f"http://127.0.0.1:{sidecar.port}/")
        with engine(rings / "a.ring") as first:
            card = viewer.wait(f"article[data-testid=process]:has([data-field=pid]:text-is('pid {first.pid}'))")
            key = card.get_attribute("data-key")
            assert card.get_attribute("data-ended") == "false"
            first.kill()
            viewer.wait(f"article[data-key='{key}'][data-ended=true]")
        viewer.wait(f"article[data-key='{key}'] [data-field=ended]:has-text('ended at')")
        viewer.wait(f"#marks li[data-kind=ended][data-key='{key}']")
        wait_for(
            lambda: viewer.page.locator(f"[data-testid=engine][data-key='{key}'][data-state=live]").count() == 0,
            "its engine is not live any more",
        )
        with engine(rings / "b.ring") as second:
            viewer.wait(f"article[data-ended=false]:has([data-field=pid]:text-is('pid {second.pid}'))")
            viewer.wait(f"[data-testid=engine][data-state=live]:has-text('{second.pid}')")
            assert viewer.page.locator(f"article[data-testid=process][data-key='{key}']").count() == 1


def test_a_sidecar_that_is_gone_is_said_and_one_that_is_back_is_taken(browser: Browser, tmp_path: Path) -> None:
    """The page says since when it has no answer, keeps what it has, and goes on when a sidecar answers again."""
    rings = tmp_path / "rings"
    rings.mkdir()
    fed_and_ended(tmp_path, rings / "a.ring", "--requests", "50")
    with viewing(browser) as viewer:
        with Sidecar(tmp_path, rings, {}) as sidecar:
            viewer.open(f"http://127.0.0.1:{sidecar.port}/")
            answer = viewer.text("#answer")
            sidecar.kill()
            viewer.wait("#live[data-state=lost]")
            assert "No answer from the sidecar since" in viewer.text("#banner-text")
            assert viewer.text("#answer") == answer
        with Sidecar(tmp_path, rings, {}, "--listen", f"127.0.0.1:{sidecar.port}"):
            viewer.wait("#live[data-state=live]")
            assert viewer.page.locator("#banner").is_hidden()
        assert all("ERR_CONNECTION_REFUSED" in said or "Failed to load" in said for said in viewer.said)
        viewer.said.clear()


def test_the_json_is_what_the_footer_links_to(held: tuple[Viewer, dict[str, Any]]) -> None:
    """Each of its links leads to the data in a form for machines."""
    viewer, _ = held
    for href in ("/api/now", "/diagnosis"):
        answer = viewer.page.request.get(viewer.page.url.partition("#")[0].rstrip("/") + href)
        assert json.loads(answer.body())["schema_version"] == 1
        assert viewer.page.locator(f"footer a[href='{href}']").count() == 1
