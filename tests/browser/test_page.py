# SPDX-License-Identifier: Apache-2.0
"""The page can be used by all, tells nobody elsewhere, and what an engine says stays text."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]  # it has no types

from tests.browser.chromium import EVIL
from tests.browser.conftest import engine
from tests.browser.viewer import viewing, wait_for
from tests.sidecar_e2e.sidecar import Sidecar

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.browser.conftest import Scene
    from tests.browser.viewer import Viewer

SCREENSHOTS = "VLLM_KVFIX_SCREENSHOTS"
"""Where the pictures of the page go, for people to look at; by default a folder of the test run."""

MOST_BYTES = 300_000
PHONE = {"width": 390, "height": 844}
TOKEN = "0123456789abcdef0123456789abcdef"  # noqa: S105  # of a test
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "';alert(1);//",
    "javascript:alert(1)",
    "{{constructor.constructor('alert(1)')()}}",
    "</td></tr></table><h1 id=injected>",
    "\u202egnitirw\u202c \u2066turned\u2069 \u200b\ufeff",
    "\x1b[31mred\x07\r\nnext line",
    "🏴‍☠️" * 20,
    "x" * 180,
    "&lt;b&gt; &amp; %3Cb%3E \\u003cb\\u003e",
    "__proto__",
)
THEMES = [("light", None), ("dark", None), ("light", PHONE), ("dark", PHONE)]


def looks(theme: str, size: dict[str, int] | None) -> dict[str, Any]:
    """Options of a browser's context."""
    options: dict[str, Any] = {"color_scheme": theme}
    return options if size is None else {**options, "viewport": size, "has_touch": True, "device_scale_factor": 2}


def filled(viewer: Viewer, scene: Scene) -> Viewer:
    """The page with something in each panel."""
    viewer.open(scene.url)
    viewer.wait(f"article[data-alarming=true] [data-field=pid]:text('{scene.engine.pid}')")
    viewer.wait("#requests tbody tr")
    viewer.wait("#containers tbody tr")
    viewer.wait("#memory [data-chart=memory]:not([data-points='0']) canvas")
    return viewer


# What a mistake of ours could do, and what each says if it was let.
TRIES = {
    "eval": "() => { try { window.eval('1'); return 'ran'; } catch (e) { return e.name; } }",
    "markup": "() => { try { document.body.innerHTML = 'x'; return 'ran'; } catch (e) { return e.name; } }",
    "inline": "() => { const s = document.createElement('script'); try { s.text = 'window.ran = 1'; } "
    "catch (e) { return e.name; } document.body.append(s); return String(window.ran); }",
    "elsewhere": "() => fetch('http://127.0.0.1:9/').then(() => 'ran', e => e.name)",
}


class TestStrangersText:
    """What comes from engines and files."""

    def test_what_an_engine_says_stays_text(self, browser: Browser, tmp_path: Path) -> None:
        """Ids, paths, versions and names of files, hostile as can be: all are shown, none becomes markup or runs."""
        rings = tmp_path / "rings<img src=x onerror=alert(2)>"
        rings.mkdir()
        (rings / "<img src=x onerror=alert(3)>.ring").write_text("no ring")
        with (
            engine(rings / "a.ring", *HOSTILE, version="<b>0.25.1</b>") as one,
            Sidecar(tmp_path, rings, {}) as sidecar,
        ):
            for theme in ("light", "dark"):
                with viewing(browser, color_scheme=theme) as viewer:
                    viewer.open(f"http://127.0.0.1:{sidecar.port}/")
                    self.look(viewer, one.pid)

    def look(self, viewer: Viewer, pid: int) -> None:
        """Have all of one process shown, and look for what must not be there."""
        page = viewer.page
        card = viewer.wait(f"article[data-testid=process]:has([data-field=pid]:text-is('pid {pid}'))")
        page.select_option("#process", card.get_attribute("data-key"))
        viewer.wait("#containers tr[data-path*='scheduler.requests']")
        told = viewer.hold()
        (process,) = [process for process in told["processes"] if process["pid"] == pid]
        names = [request.get("request_id") or request["engine_request_id"] for request in told["requests"]]
        assert any("<script>" in name for name in names)
        rows = page.locator("#requests tbody tr").evaluate_all("all => all.map(row => row.dataset.request)")
        assert rows == names
        assert "<script>alert(1)</script>" in page.locator("#requests").inner_text()
        assert page.locator("#containers [data-path]").count() == len(process["containers"])
        assert page.locator("#unread [data-not-followed]").count() == len(told["not_followed"]) > 0
        for tag in ("img", "iframe", "h1#injected", "b", "script:not([src])", "[onerror]", "a[href^='javascript']"):
            assert page.locator(f"body {tag}").count() == 0, tag
        assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b\ufeff\x1b\x07]", page.locator("body").inner_text())
        assert page.evaluate("Object.keys(Object.prototype).length") == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth")

    def test_the_policy_forbids_what_a_mistake_would_do(self, viewer: Viewer, scene: Scene) -> None:
        """Inline script, eval, markup from text and requests to elsewhere fail in this very page."""
        viewer.open(scene.url)
        for name, code in TRIES.items():
            # By a timer: what the browser's debugger evaluates itself is under no policy.
            told = viewer.page.evaluate(f"() => new Promise(done => setTimeout(async () => done(await ({code})()), 0))")
            assert told in {"EvalError", "TypeError", "undefined"}, name
        assert len(viewer.said) >= len(TRIES) - 1
        viewer.said.clear()
        viewer.asked[:] = [request for request in viewer.asked if ":9/" not in request.url]


class TestStrangers:
    """Other pages, and other people."""

    def test_a_page_of_a_stranger_gets_nothing(self, browser: Browser, scene: Scene) -> None:
        """Neither by a name that leads here, nor from another origin, nor in a frame."""
        context = browser.new_context()
        page = context.new_page()
        answer = page.goto(f"http://{EVIL}:{scene.sidecar.port}/api/now")
        assert answer is not None
        assert (answer.status, "processes" in answer.text()) == (403, False)
        page.goto(f"http://localhost:{scene.sidecar.port}/healthz")  # another origin than 127.0.0.1
        read = "url => fetch(url).then(answer => answer.text(), error => error.name)"
        assert page.evaluate(read, f"{scene.url}api/now") == "TypeError"
        context.close()

    def test_the_page_is_small_and_asks_nobody_else(self, viewer: Viewer, scene: Scene) -> None:
        """All of it, figures and history too, under 300 kB."""
        filled(viewer, scene)
        weights = {request.url: request.sizes() for request in viewer.done if not request.url.startswith("data:")}
        total = sum(size["responseBodySize"] + size["responseHeadersSize"] for size in weights.values())
        assert 20_000 < total < MOST_BYTES, weights

    def test_a_token_is_asked_for_once(self, browser: Browser, tmp_path: Path) -> None:
        """No figure before it; a wrong one is told; the right one is kept for this tab, and goes into no address."""
        rings = tmp_path / "rings"
        rings.mkdir()
        file = tmp_path / "token"
        file.write_text(TOKEN)
        with Sidecar(tmp_path, rings, {}, "--token-file", str(file)) as sidecar, viewing(browser) as viewer:
            page = viewer.page
            page.goto(f"http://127.0.0.1:{sidecar.port}/")
            viewer.wait("#token")
            assert viewer.text("#sidecar .body .figures [data-figure='sidecar.rss_bytes']") in {"", "not known"}
            page.fill("#token-input", "wrong-wrong-wrong")
            page.press("#token-input", "Enter")
            wait_for(lambda: viewer.text("#token-error") != "", "the wrong token is told")
            assert page.locator("#live").get_attribute("data-state") != "live"
            page.fill("#token-input", TOKEN)
            page.press("#token-input", "Enter")
            viewer.wait("#live[data-state=live]")
            assert page.locator("#token").is_hidden()
            page.reload()
            viewer.wait("#live[data-state=live]")
            assert page.locator("#token").is_hidden()
            assert page.evaluate("localStorage.length") == 0
            assert not [request for request in viewer.asked if TOKEN in request.url]
            assert all("401" in said for said in viewer.said)
            viewer.said.clear()


@pytest.mark.parametrize(("theme", "size"), THEMES)
def test_axe_finds_nothing_serious(browser: Browser, scene: Scene, theme: str, size: dict[str, int] | None) -> None:
    """In light and dark, on a desk and on a phone, with every fold open."""
    with viewing(browser, **looks(theme, size)) as viewer:
        filled(viewer, scene)
        viewer.page.click("#pause")
        viewer.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        found = Axe().run(viewer.page, options={"resultTypes": ["violations"]}).response["violations"]
        grave = [rule for rule in found if rule["impact"] in {"serious", "critical"}]
        assert [(rule["id"], node["target"], node["failureSummary"]) for rule in grave for node in rule["nodes"]] == []


@pytest.mark.parametrize(("theme", "size"), THEMES[:3])
def test_it_fits_and_can_be_looked_at(
    browser: Browser, scene: Scene, tmp_path: Path, theme: str, size: dict[str, int] | None
) -> None:
    """Nothing scrolls sideways but tables; a picture of each is written for people."""
    folder = Path(os.environ.get(SCREENSHOTS) or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    with viewing(browser, **looks(theme, size)) as viewer:
        filled(viewer, scene)
        assert viewer.page.evaluate("document.documentElement.scrollWidth") <= viewer.page.evaluate("innerWidth")
        picture = folder / f"page-{theme}{'-phone' if size else ''}.png"
        viewer.page.screenshot(path=picture, full_page=True)
        background = viewer.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert picture.stat().st_size > 20_000
    shades = [int(part) for part in re.findall(r"\d+", background)[:3]]
    assert (sum(shades) > 3 * 128) is (theme == "light")


# Numbers each control that is seen and that Tab should come to; returns how many there are.
MARK_STOPS = """() => {
    const controls = 'a[href], button, select, input, summary, [tabindex="0"]';
    const seen = [...document.querySelectorAll(controls)]
        .filter(one => one.tabIndex >= 0 && !one.disabled && one.checkVisibility({visibilityProperty: true}));
    seen.forEach((one, at) => { one.dataset.stop = at; });
    document.body.tabIndex = -1;
    document.body.focus();
    return seen.length;
}"""
# The number of the control that has the focus, and whether a ring or a shadow shows that.
AT_STOP = """() => {
    const one = document.activeElement, style = getComputedStyle(one);
    return [Number(one.dataset.stop ?? -1), style.outlineStyle !== 'none' || style.boxShadow !== 'none'];
}"""
STOPS = "all => all.map(at => document.querySelector(`[data-stop='${at}']`).outerHTML.slice(0, 160))"


class TestHands:
    """What a reader can do, by mouse or keyboard."""

    def test_all_controls_are_reached_by_the_keyboard(self, viewer: Viewer, scene: Scene) -> None:
        """Tab comes to each control that is seen, in a table to one figure, and shows where it is; no trap."""
        filled(viewer, scene)
        page = viewer.page
        page.click("#pause")
        wanted = set(range(page.evaluate(MARK_STOPS)))
        assert len(wanted) > 30
        reached: dict[int, bool] = {}
        for _ in range(len(wanted) + 5):
            page.keyboard.press("Tab")
            stop, is_shown = page.evaluate(AT_STOP)
            if stop in reached:
                break
            reached[stop] = is_shown
        assert page.evaluate(STOPS, sorted(wanted - set(reached))) == []
        assert (
            page.evaluate(STOPS, sorted(stop for stop, is_shown in reached.items() if stop >= 0 and not is_shown)) == []
        )

    def test_keys_work_what_clicks_work(self, viewer: Viewer, scene: Scene) -> None:
        """Enter pauses and goes on, folds and unfolds; arrows go from figure to figure; Escape leaves a moment."""
        filled(viewer, scene)
        page = viewer.page
        for state in ("paused", "live"):
            page.focus("#pause")
            page.keyboard.press("Enter")
            viewer.wait(f"#live[data-state={state}]")
        fold = page.locator("article[data-testid=process] details").first
        was = fold.get_attribute("open")
        fold.locator("summary").first.focus()
        page.keyboard.press("Enter")
        assert fold.get_attribute("open") != was
        page.locator("#requests tbody .figure:not([tabindex='-1'])").first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowRight")
        focused = "document.activeElement.closest('tr').rowIndex + ' ' + document.activeElement.dataset.figure"
        assert page.evaluate(focused) == "2 peak_blocks"
        page.locator("#memory .plot").first.focus()
        page.keyboard.press("ArrowLeft")
        wait_for(lambda: "at=" in page.evaluate("location.hash"), "the moment is in the address")
        page.keyboard.press("Escape")
        wait_for(lambda: "at=" not in page.evaluate("location.hash"), "it is now again")

    @pytest.mark.parametrize("by", ["mouse", "keyboard"])
    def test_a_table_sorts_and_says_so(self, viewer: Viewer, scene: Scene, by: str) -> None:
        """Down first, then up; to eyes, to a screen reader, and in the address, which restores it."""
        filled(viewer, scene)
        page = viewer.page
        page.click("#pause")
        button = page.locator("#requests [data-sort=preemptions], #requests [data-sort=held_s]").first
        column = button.get_attribute("data-sort")
        raws = "all => all.map(one => one.dataset.raw).filter(raw => raw !== '').map(Number)"
        for direction in ("descending", "ascending"):
            if by == "mouse":
                button.click()
            else:
                button.focus()
                page.keyboard.press("Enter")
            viewer.wait(f"#requests th[aria-sort={direction}] [data-sort={column}]")
            values = page.locator(f"#requests [data-figure={column}]").evaluate_all(raws)
            assert values == sorted(values, reverse=direction == "descending")
            assert f"requests.{column}.{direction[: -len('ending')]}" in page.evaluate(
                "decodeURIComponent(location.hash)"
            )
        page.reload()
        viewer.wait(f"#requests th[aria-sort=ascending] [data-sort={column}]")

    def test_a_figure_is_copied_as_it_was_sent(self, browser: Browser, scene: Scene) -> None:
        """A click puts its value, a request's button its id, and a remedy's button its command into the clipboard."""
        with viewing(browser, permissions=["clipboard-read", "clipboard-write"]) as viewer:
            filled(viewer, scene)
            viewer.page.click("#pause")
            for selector in (
                "article[data-alarming=true] [data-figure='memory.status.rss_bytes']",
                "#requests [data-field=trace_id] + [data-copy]",
                "article[data-alarming=true] .advice [data-copy]",
            ):
                button = viewer.page.locator(selector).first
                button.click()
                wanted = button.get_attribute("data-copy") or ""
                wait_for(lambda wanted=wanted: viewer.text("#status").startswith(f"Copied {wanted[:50]}"), "it is said")
                assert viewer.page.evaluate("navigator.clipboard.readText()") == wanted != ""
            assert viewer.raw("article[data-alarming=true] [data-figure='memory.status.rss_bytes']").isdigit()

    def test_a_link_to_a_moment_restores_it(self, browser: Browser, scene: Scene) -> None:
        """The range, the process and the time of one reader are those of the next; and the way back leads to now."""
        with viewing(browser, permissions=["clipboard-read", "clipboard-write"]) as viewer:
            filled(viewer, scene)
            page = viewer.page
            page.select_option("#range", "900")
            other = page.locator("#process option").last.get_attribute("value")
            if other:
                page.select_option("#process", other)
            page.locator("#memory .plot").first.focus()
            for _ in range(3):
                page.keyboard.press("ArrowLeft")
            viewer.wait("#moment")
            moment = viewer.text("#moment-text").split(",")[0]
            page.click("#copy-link")
            wait_for(lambda: viewer.text("#status").startswith("Copied"), "it is said")
            link = page.evaluate("navigator.clipboard.readText()")
        with viewing(browser) as viewer:
            viewer.open(link)
            viewer.wait("#moment")
            assert viewer.text("#moment-text").split(",")[0] == moment
            assert viewer.page.locator("#live").get_attribute("data-state") == "paused"
            assert viewer.page.input_value("#range") == "900"
            if other:
                assert viewer.page.input_value("#process") == other
            viewer.page.click("#go-live")
            viewer.wait("#live[data-state=live]")
            assert viewer.page.locator("#moment").is_hidden()

    @pytest.mark.parametrize(
        "address",
        [
            "#range=1&at=-5&process=%3Cscript%3E&sort=requests.__proto__.desc",
            "#at=nan&range=x",
            "#%",
            "#at=99999999999999",
        ],
    )
    def test_an_address_that_makes_no_sense_is_as_none(self, viewer: Viewer, scene: Scene, address: str) -> None:
        """The page shows what is now, with no error."""
        viewer.open(scene.url + address)
        viewer.wait("article[data-testid=process]")
        assert viewer.page.locator("#live").get_attribute("data-state") == "live"
