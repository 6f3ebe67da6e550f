"""The HTML report: every figure on the page against the result files, text escaped, nothing fetched, well nested."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import median

import pytest

from plait.bench import cli, html_tags, report
from plait.bench.html_figures import MOST, columns_of, is_limit, text_of
from plait.bench.html_report import page
from plait.bench.html_tables import Line
from plait.bench.html_tags import bytes_text, digits, rate_text, seconds_text, share_text, tag
from plait.bench.peaks import card_named
from plait.bench.result_file import ResultFile, read
from plait.bench.roofline import datasheet
from plait.bench.spec import Options, Suite
from plait.bench.stats import MIN_INTERVAL, median_interval, paired_ratio
from tests.report_files import EVIL, MACHINE, fake_files, kernels_file

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = sorted((ROOT / "bench" / "results").glob("*.json"))
VOID = {"meta", "br", "line", "rect", "circle", "polyline"}


class Page(HTMLParser):
    """The page as a list of cells and marks: (enclosing attributes from outside in, own attributes, text)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[tuple[str, dict]] = []
        self.found: list[tuple[dict, dict, list[str]]] = []
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.stack, f"not closed: {self.stack}"

    def handle_starttag(self, name, attrs):
        own = dict(attrs)
        outer = {key: value for _, one in self.stack for key, value in one.items()}
        self.tags.append((name, own))
        entry = (outer, own, [])
        self.found.append(entry)
        if name not in VOID or name == "circle":
            self.stack.append((name, {**own, "_entry": entry}))

    def handle_startendtag(self, name, attrs):
        self.handle_starttag(name, attrs)
        if name == "circle":
            self.stack.pop()

    def handle_endtag(self, name):
        assert self.stack and self.stack[-1][0] == name, f"</{name}> closes {self.stack[-1:]}"
        self.stack.pop()

    def handle_data(self, data):
        self.words.append(data)
        for _, one in self.stack:
            one["_entry"][2].append(data)

    def cells(self, **wanted: str) -> list[tuple[dict, dict, str]]:
        """Elements that have these attributes, with what encloses them."""
        names = {key.replace("_", "-"): value for key, value in wanted.items()}
        return [
            (outer, own, "".join(text))
            for outer, own, text in self.found
            if all(own.get(key) == value if value else key in own for key, value in names.items())
        ]


def write(path: Path, file: ResultFile) -> Path:
    suite = Suite(file.suite, "about", lambda full: [], lambda case, options: next(iter(file.cases.values())))
    content = report.document(suite, list(file.cases.values()), Options(), file.command)
    report.write_json(path, {**content, "machine": file.machine, "source": file.source, "date": file.date})
    return path


FILES = {"fake": fake_files(), "committed": [read(path) for path in COMMITTED]}


@pytest.fixture(scope="module", params=FILES)
def shown(request) -> tuple[list[ResultFile], Page]:
    files = FILES[request.param]
    return files, Page(page(files))


def newest(files: list[ResultFile]) -> dict[str, ResultFile]:
    return {file.suite: file for file in sorted(files, key=lambda one: one.date)}


TEXTS = {
    "seconds": seconds_text,
    "ratio": lambda v: f"{digits(v)}\u00d7",
    "flop_rate": lambda v: rate_text(v, "FLOP/s"),
    "byte_rate": lambda v: rate_text(v, "B/s"),
    "of_sheet": share_text,
    "of_measured": share_text,
    "shared": bytes_text,
}


def wanted(file: ResultFile, files: list[ResultFile], case: str, provider: str) -> dict[str, float]:
    """Every figure of a row, from the samples alone."""
    result = file.cases[case]
    measured, ours = result.providers[provider], result.providers[result.ours].samples_s
    mid = median(measured.samples_s)
    found = {"seconds": mid}
    if provider != result.ours and not is_limit(provider):
        found["ratio"] = paired_ratio(ours, measured.samples_s)[0]
    if not measured.invalid:
        found |= {"flop_rate": result.case.flop / mid} if result.case.flop else {}
        found |= {"byte_rate": result.case.bytes_moved / mid} if result.case.bytes_moved else {}
        on_card = "card" in result.case.params or result.case.params.get("device") == "cuda"
        sheet = datasheet(card_named("h200")).bound(result.case) if on_card else None
        found |= {"of_sheet": sheet[0] / mid} if sheet else {}
        if file.machine == MACHINE:  # 4.3 TB/s, 780 and 52 TFLOP/s
            rate = {"bfloat16": 780e12, "float32": 52e12}[result.case.params["dtype"]]
            best = max((result.case.bytes_moved or 0) / 4.3e12, (result.case.flop or 0) / rate)
            found["of_measured"] = best / mid
    else:
        del found["ratio"]
    names = {
        "registers": "registers",
        "spills": "spills",
        "shared": "shared bytes",
        "warps": "warps",
        "clock": "clock MHz",
    }
    found |= {key: measured.figures[name] for key, name in names.items() if name in measured.figures}
    return found


def test_every_figure_of_every_row_is_the_result_file_s(shown):
    files, html = shown
    rows: dict[tuple[str, str, str], dict[str, tuple[float, str]]] = {}
    for outer, own, text in html.cells(data_value="", data_key=""):
        if "data-provider" in outer:
            place = (outer["id"], outer["data-case"], outer["data-provider"])
            rows.setdefault(place, {})[own["data-key"]] = (float(own["data-value"]), text)
    count = 0
    for suite, file in newest(files).items():
        for case, result in file.cases.items():
            for provider, measured in result.providers.items():
                if not measured.samples_s:
                    assert (suite, case, provider) not in rows
                    continue
                row = rows.pop((suite, case, provider))
                expected = wanted(file, files, case, provider)
                own_figures = {key: row.pop(key) for key in list(row) if key.startswith("figure ")}
                for key, (value, text) in own_figures.items():
                    name = key.removeprefix("figure ")
                    assert value == measured.figures[name] and text == text_of(name, value)
                assert {key: value for key, (value, _) in row.items()} == pytest.approx(expected, rel=1e-9), case
                for key, (value, text) in row.items():
                    assert text.startswith(TEXTS.get(key, lambda v: f"{v:.0f}")(value)), (key, value, text)
                    count += 1
    assert not rows and count > 100


def test_of_hundreds_of_figures_a_page_shows_the_ones_that_say_most():
    figures = {f"odd {index} s": 1.0 for index in range(30)} | {
        "restore cold s": 1.0,
        "stall warm s": 1.0,
        "warps": 8.0,
    }
    figures |= {"stall warm s low": 0.9, "stall warm s high": 1.1, "stall warm s #1": 1.0}
    found = columns_of([figures, {"another": 1.0}], {"warps"})
    assert found[:2] == ["stall warm s", "restore cold s"] and len(found) == MOST
    assert not {"warps", "stall warm s low", "stall warm s #1"} & set(found)
    texts = [
        text_of(*one)
        for one in (("stall s", 3e-3), ("memory bytes", 2048.0), ("lost share 1", 0.09), ("error", 3e-7))
    ]
    assert texts == ["3.000 ms", "2.00 KiB", "9.00 %", "3.0e-07"]


def test_every_interval_is_the_samples(shown):
    files, html = shown
    seen = 0
    for outer, own, text in html.cells(data_key="interval"):
        measured = newest(files)[outer["id"]].cases[outer["data-case"]].providers[outer["data-provider"]]
        low, high = median_interval(measured.samples_s)
        assert (float(own["data-low"]), float(own["data-high"])) == (low, high)
        count = len(measured.samples_s)
        few = f" ({count})" if 1 < count < MIN_INTERVAL else ""  # too few for an interval: told
        assert text == "one sample" or text.endswith(seconds_text(high) + few), text
        seen += 1
    assert seen >= 10


def test_bars_end_at_the_median(shown):
    files, html = shown
    for outer, own, _ in html.cells(rx="2"):
        result = newest(files)[outer["id"]].cases[outer["data-case"]]
        most = max(median_interval(m.samples_s)[1] for m in result.providers.values() if m.samples_s)
        share = median(result.providers[outer["data-provider"]].samples_s) / most
        assert float(own["width"].rstrip("%")) == pytest.approx(100 * share, abs=0.006)


def test_who_won_is_counted_from_the_intervals(shown):
    files, html = shown
    for suite, file in newest(files).items():
        counts: dict[str, list[int]] = {}
        for result in file.cases.values():
            for provider, measured in result.providers.items():
                peer = not is_limit(provider) and not provider.startswith(result.ours)
                if peer and measured.samples_s and not measured.invalid:
                    _, low, high = paired_ratio(result.providers[result.ours].samples_s, measured.samples_s)
                    tally = counts.setdefault(provider, [0, 0, 0])
                    tally[0 if low > 1 else 2 if high < 1 else 1] += 1
        rows = {own["data-summary"] for _, own, _ in html.cells(data_summary="")}
        assert {row for row in rows if row.startswith(f"{suite}/")} == {f"{suite}/{one}" for one in counts}
        for provider, (faster, level, slower) in counts.items():
            cells = {
                own["data-key"]: text
                for outer, own, text in html.cells(data_value="")
                if outer.get("data-summary") == f"{suite}/{provider}"
            }
            shown_counts = [int(cells[key]) for key in ("faster", "level", "slower", "cases")]
            assert shown_counts == [faster, level, slower, faster + level + slower], (suite, provider)


def test_every_dot_of_the_roofline_is_a_row(shown):
    files, html = shown
    dots = [(outer, own) for outer, own, _ in html.cells(data_y="") if "cx" in own]
    assert bool(dots) == (files is FILES["fake"]), "lower bounds stand on the roof by themselves: no plot"
    for outer, own in dots:
        file = newest(files)[outer["id"]]
        result = file.cases[own["data-case"]]
        figures = wanted(file, files, own["data-case"], own["data-provider"])
        if own.get("data-x"):
            assert float(own["data-x"]) == result.case.flop / result.case.bytes_moved
            assert float(own["data-y"]) == pytest.approx(figures["flop_rate"])
        elif not result.providers[own["data-provider"]].invalid:
            assert float(own["data-y"]) == pytest.approx(figures.get("of_measured", figures["of_sheet"]))


def test_a_plot_of_streams_alone_is_not_blown_up_to_the_page():
    """Four collectives once filled two screens: the plot had a view box and no size."""
    file = kernels_file("2026-11-29T10:00:00+00:00")
    streams = {name: one for name, one in file.cases.items() if not one.error and not one.case.flop}
    html = Page(page([dataclasses.replace(file, cases=streams)]))
    (plot,) = [own for name, own in html.tags if own.get("aria-label") == "roofline"]
    assert int(plot["width"]) < 300 and int(plot["height"]) < 600


def test_history_compares_only_runs_of_one_machine():
    files = fake_files()
    runs = [file for file in files if file.suite == "kernels"]  # the first was on another card
    for shown_runs in (files, runs[1:]):
        html, seen = Page(page(shown_runs)), 0
        for outer, own, text in html.cells(data_key="change"):
            before, after = (median(f.cases[outer["data-history"]].providers["plait"].samples_s) for f in runs[1:])
            assert (
                float(own["data-value"]) == pytest.approx(after / before)
                and text == f"{digits(after / before)}\u00d7"
            )
            seen += 1
        assert seen == len([one for one in runs[-1].cases.values() if not one.error])
    html = Page(page([runs[0], runs[2]]))
    assert html.cells(data_history="") and not html.cells(data_key="change")


def test_failures_skips_and_impossible_numbers_are_said(shown):
    files, html = shown
    text = "".join(html.words)
    for file in newest(files).values():
        for result in file.cases.values():
            assert result.error in text
            for name, measured in result.providers.items():
                assert measured.skipped in text and measured.invalid in text
                if measured.skipped:
                    assert html.cells(data_skipped=name)
    if files is FILES["fake"]:
        assert html.cells(data_key="invalid") and html.cells(data_failed="") and html.cells(data_invalid="")


def test_machines_and_runs_are_all_there(shown):
    files, html = shown
    text = "".join(html.words)
    assert {own["data-run"] for _, own, _ in html.cells(data_run="")} == {file.path for file in files}
    facts = {(own["data-fact"], value) for _, own, value in html.cells(data_fact="")}
    for file in files:
        assert {("cpu", str(file.machine["cpu"])), ("torch", str(file.machine["torch"]))} <= facts
        assert file.command in text and str(file.source["commit"])[:12] in text


def test_text_is_escaped(shown):
    files, html = shown
    assert not [name for name, _ in html.tags if name == "script"]
    if files is FILES["fake"]:
        assert EVIL in "".join(html.words)


def test_the_page_needs_nothing_else(shown):
    files, _ = shown
    text = page(files)
    assert not re.search(r"\b(src|srcset|action|xlink:href)=|url\(|@import|https?://", text)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', text))
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids)) and {t[1:] for t in re.findall(r'href="([^"]*)"', text)} <= set(ids)
    assert "prefers-color-scheme: dark" in text and len(text) < 2_000_000


def test_lower_bounds_are_not_called_times():
    files = [file for file in FILES["committed"] if file.suite == "static"]
    text = "".join(Page(page(files)).words)
    assert (
        "nothing was timed" in text and "lower bound" in text and "95 % interval" not in text.split("How to read")[0]
    )


def test_what_sensors_said_beside_the_samples_is_their_median():
    measured = next(iter(fake_files()[0].cases.values())).providers["torch"]
    line = Line(None, "torch", measured, None, None, {})  # type: ignore[arg-type]
    assert line.beside("clocks_mhz", "clock MHz") is None
    vars(measured)["clocks_mhz"] = [1980.0, 1410.0, 1830.0]
    assert line.beside("clocks_mhz", "clock MHz") == 1830.0


def test_cases_that_only_an_older_file_has_are_told():
    old, new = (kernels_file(f"2026-11-{day}T10:00:00+00:00") for day in (28, 29))
    name, one = next(iter(new.cases.items()))
    text = "".join(Page(page([old, dataclasses.replace(new, cases={name: one})])).words)
    assert f"1 case of {new.path}" in text and f"{len(old.cases) - 1} more are in older files alone" in text
    assert "older files alone" not in "".join(Page(page([old, new])).words)


def test_a_suite_in_which_everything_failed_still_has_a_page():
    file = kernels_file("2026-11-29T10:00:00+00:00")
    bad = {name: dataclasses.replace(one, providers={}, ours="", error="gone") for name, one in file.cases.items()}
    html = Page(page([dataclasses.replace(file, cases=bad)]))
    assert len(html.cells(data_failed="")) == len(bad) and not html.cells(data_key="seconds")


# ---- the command --------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_of_files_and_folders(tmp_path, capsys):
    for index, file in enumerate(fake_files()):
        write(tmp_path / "runs" / f"{index}.json", file)
    out = tmp_path / "deep" / "r.html"
    assert cli.main(["report", str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert "written" in capsys.readouterr().out
    html = Page(out.read_text())
    assert len(html.cells(data_run="")) == 4 and html.cells(data_key="of_measured")


def test_the_default_is_what_the_repository_holds(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["report", "--out", str(tmp_path / "r.html")]) == 0
    assert {own["data-run"] for _, own, _ in Page((tmp_path / "r.html").read_text()).cells(data_run="")} == {
        str(path.relative_to(ROOT)) for path in COMMITTED
    }


def test_nothing_to_show_is_a_usage_error(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 2
    assert "holds no result file" in capsys.readouterr().err and not (tmp_path / "r.html").exists()


# ---- elements -----------------------------------------------------------------------------------------------------


def test_elements_escape_text_and_attributes():
    assert tag("a", "<b>", title='"x" & y', class_="c", data_value=1, hidden=True, id=None) == (
        '<a title="&quot;x&quot; &amp; y" class="c" data-value="1" hidden>&lt;b&gt;</a>'
    )
    assert html_tags.join(tag("b", "x"), "<", None) == "<b>x</b>&lt;"
    with pytest.raises(AssertionError):
        html_tags.style("</style><script>")


@pytest.mark.parametrize(
    "seconds, text",
    [
        (3e-9, "3.000 ns"),
        (27.97056e-6, "27.97 \u00b5s"),
        (0.99999e-3, "1.000 ms"),
        (1.5, "1.500 s"),
        (123.4, "123.4 s"),
    ],
)
def test_times_have_four_digits_and_a_unit(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    "value, text", [(0, "0"), (999.6, "1000"), (12.34, "12.3"), (0.0512, "0.0512"), (1e6, "1000000")]
)
def test_numbers_are_never_powers_of_ten(value, text):
    assert digits(value) == text
