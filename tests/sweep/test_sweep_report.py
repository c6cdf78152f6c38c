"""The report of a sweep: its page, its pictures, and what can be read back from its files."""

import base64
import csv
import html
import html.parser
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image, ImageStat
from sweep_made import CASES, made_run, made_sweep

import ampatch.sweep
from ampatch.cli.main import main
from ampatch.sweep import Case, Sweep, read_results, write_report
from ampatch.sweep.measure.machine import commit_of
from ampatch.sweep.measure.run_record import Series
from ampatch.sweep.report import pictures
from ampatch.sweep.report.render import as_html
from ampatch.sweep.report.result_files import as_csv, as_latex, as_markdown
from ampatch.sweep.report.terminal import write_results

NAMES = ["loss-by-step", "loss-by-time", "speed"]
NOTE = "A note that is long enough to need more than one line of a phone."
VOID = {"meta", "link", "img", "br"}


class Page(html.parser.HTMLParser):
    """Notes tags and text, and that every tag is closed in its order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sweep")
    results = made_sweep(directory, notes=[NOTE])
    write_report(directory)
    return directory, results


@pytest.fixture(scope="module")
def source(written):
    return (written[0] / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(source):
    return Page(source)


# The page


def test_the_page_holds_everything(written, page):
    results = written[1]
    assert page.text.count("train & <test>.py at several opt levels") == 2  # title and headline
    assert "'a <b> c'" in page.text
    assert results.recommendation in page.text and NOTE in page.text
    facts = ("ampatch 1.2.3", "torch 2.9", "cpu Some CPU, 2 cores", "seeds 2", "device cpu")
    for text in (*facts, *(row.verdict for row in results.rows)):
        assert text in page.text
    assert page.text.count("O2-loss_scale=<b>$1$</b>") == 2  # a setting is text, never markup
    assert not page.all("b")


def test_the_order_of_the_page_and_settings_are_folded(written, page, source):
    verdict = html.escape(written[1].rows[0].verdict)
    table = 'aria-label="Figures per row"'
    order = ["Recommendation.", NOTE, table, verdict, "Pictures</h2>", "<details>"]
    assert [source.count(text) for text in order] == [1] * len(order)
    places = [source.index(text) for text in order]
    assert places == sorted(places)
    assert not any("open" in attrs for attrs in page.all("details"))


def test_the_page_needs_nothing_else(page, source):
    """No script, no other file, and a browser is told to load none."""
    assert not re.search(r"(src|href|action|data|srcset)\s*=\s*[\"']?\s*(https?:)?//", source)
    assert "url(" not in source and "@import" not in source
    assert not page.all("script") and not page.all("iframe")
    addresses = [tag.get("src") or tag.get("href") for tag in page.all("img") + page.all("link")]
    assert all(address.startswith("data:") for address in addresses)
    policies = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_the_page_suits_a_phone_and_a_reader(page):
    viewport = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
    assert viewport in page.all("meta")
    assert page.all("html") == [{"lang": "en"}]
    around = [attrs for attrs in page.all("div") if attrs.get("class") == "scroll"]
    assert len(around) == len(page.all("table")) == 1
    assert all(attrs["aria-label"] and attrs["tabindex"] == "0" for attrs in around)
    assert len(page.all("h1")) == 1


def test_no_table_has_an_empty_column(tmp_path):
    results = made_sweep(tmp_path, [made_run(case, memory_bytes=None) for case in CASES[:2]])
    for table in re.findall("<table>.*?</table>", as_html(results, []), re.DOTALL):
        titles = re.findall("<th[^>]*>(.*?)</th>", table)
        cells = re.findall("<td[^>]*>(?:<span>)?(.*?)(?:</span>)?</td>", table, re.DOTALL)
        assert len(cells) % len(titles) == 0 and all(titles)
        for number, title in enumerate(titles):
            assert set(cells[number :: len(titles)]) != {"-"}, title


def test_every_picture_says_what_it_shows(written, page):
    images = page.all("img")
    assert len(images) == len(NAMES)
    for name, image in zip(NAMES, images):
        data = base64.b64decode(image["src"].partition("base64,")[2])
        assert data == (written[0] / "plots" / f"{name}.svg").read_bytes()
        assert image["alt"] in page.text
    assert len(page.all("figcaption")) == len(NAMES) and page.text.count(pictures.LOOKS) == 1


def test_memory_skips_and_scale_stand_in_the_table(page):
    row = page.text[page.text.index("O1 float16 5.00") :].partition("O1 bfloat16")[0]
    assert " 300 1.8261 " in row and row.endswith(" 2/240 32768 ")


def test_a_failed_row_is_called_so(tmp_path):
    runs = [made_run(CASES[0]), made_run(CASES[1], error="RuntimeError: <boom>")]
    page = Page(as_html(made_sweep(tmp_path, runs), []))
    assert [item.get("class") for item in page.all("li")] == ["baseline", "failed"]
    assert page.text.count("crashed: RuntimeError: <boom>") == 1


@pytest.mark.parametrize("runs", [[], [made_run(CASES[1], steps=0, memory_bytes=None)]])
def test_there_may_be_next_to_nothing_to_show(tmp_path, runs):
    made_sweep(tmp_path, runs)
    write_report(tmp_path)
    Page((tmp_path / "report.html").read_text(encoding="utf-8"))


def test_the_table_is_explained_in_three_lines_at_most_and_only_what_it_shows(tmp_path):
    explained = ("Speed: O0's step time", "±: ", "memory: the largest resident")
    failed = [made_run(CASES[0], steps=0, memory_bytes=None, error="SyntaxError: no")]
    for name, runs in (("none", []), ("failed", failed)):
        write_results(made_sweep(tmp_path / name, runs), text := io.StringIO())
        assert not any(said in text.getvalue() for said in explained)
        assert ("status" in text.getvalue()) == bool(runs)  # without rows there is no table
    results = made_sweep(tmp_path / "all")
    write_results(results, text := io.StringIO())
    assert all(said in text.getvalue() for said in explained)
    table, _ = text.getvalue().split("\n\n")
    assert 1 <= len(table.splitlines()) - 1 - len(results.rows) <= 3


# The pictures


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_not_blank(written, name):
    with Image.open(written[0] / "plots" / f"{name}.png") as image:
        assert image.width == 1104 and image.height > 400
        seen = {rgb for _, rgb in image.convert("RGB").getcolors(maxcolors=2**24)}
    for colour in pictures.COLOURS[1:4]:  # of O1, O2 and autocast
        assert tuple(bytes.fromhex(colour[1:])) in seen


def test_long_curves_are_means_of_blocks_and_seeds():
    runs = [made_run(CASES[0], seed, steps=1000) for seed in (0, 1)]
    losses = [run.measured.losses["0"].values for run in runs]
    line = pictures.lines_of(pictures.losses_of(runs))["O0"]
    size = 1000 // pictures.MAX_POINTS
    assert len(line) == pictures.MAX_POINTS and line.x[0] == (size - 1) / 2
    first, second = (sum(values[:size]) / size for values in losses)
    assert line.y[0] == pytest.approx((first + second) / 2)
    assert (line.low[0], line.high[0]) == pytest.approx((first, second))
    line = pictures.lines_of(pictures.losses_of([made_run(CASES[0], steps=11)]), "seconds")["O0"]
    assert line.x.iloc[0] == 0 and line.x.iloc[-1] == pytest.approx(0.1)  # from the first loss on


def test_other_runs_may_leave_out_losses(tmp_path):
    runs = [made_run(CASES[0]), made_run(CASES[1], losses={}, loss_scales={"0": Series()})]
    names = [picture.name for picture in pictures.pictures(made_sweep(tmp_path, runs), runs)]
    assert names == ["loss-by-step", "speed"]  # one line says the same by time


def test_differences_are_between_equal_steps_and_seeds():
    """O1's loss is O0's plus a tenth of the seed number; O0's seeds are 0.02 apart."""

    def of(case, seed, more):
        values = [2.0 + 0.01 * seed + more, math.nan, 1.0 + 0.01 * seed + more]
        return made_run(case, seed, losses={"0": Series([0, 1, 2], values, [0.0, 1.0, 2.0])})

    runs = [of(CASES[0], seed, 0.0) for seed in (0, 2)]
    runs += [of(CASES[1], seed, 0.1 * seed) for seed in (0, 2)]
    apart = pictures.lines_of(pictures.differences(pictures.losses_of(runs)))
    own, other = apart["O0"], apart["O1-float16"]
    assert [own.low[0], own.high[0]] == pytest.approx([-1 / 2.01, 1 / 2.01])  # percent
    assert [other.low[0], other.high[0]] == pytest.approx([0, 20 / 2.02])
    assert math.isnan(other.y[1]) and other.y[2] == pytest.approx(10 / 1.02)


def test_bars_have_the_speeds_and_the_marks_of_the_table(tmp_path, monkeypatch):
    """O1 in bfloat16 is worse, and in one of two rounds O1 in float16 is slower than O0."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    runs = [made_run(case, seed) for case in CASES[:3] for seed in (0, 1)]
    runs += [made_run(CASES[0], seed, kind={"short": True, "again": True}) for seed in (0, 1)]
    runs[2].measured.step_seconds = [None, *[0.02] * 119]
    for run in runs[4:6]:
        run.measured.metrics["accuracy"].values[-1] /= 2
    results = made_sweep(tmp_path, runs)
    assert [picture.name for picture in pictures.pictures(results, runs)][-1] == "speed"
    [axes] = figures[-1].axes
    *bars, own = axes.patches
    assert own.get_x() + own.get_width() == results.rows[0].reach  # O0's own speed, as a band
    widths = [bar.get_width() for bar in bars]
    texts = [label.get_text() for label in axes.child_axes[0].get_yticklabels()]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["O1 float16", "O1 bfloat16"]
    assert widths == pytest.approx([1.25, 2.0])
    assert texts == ["1.25x\N{DAGGER}, 12.5 ms", "2.00x\N{DOUBLE DAGGER}, 5 ms"]
    dark, light = (bar.get_facecolor() for bar in bars)
    assert light > dark


def test_many_rows_keep_apart(tmp_path, monkeypatch):
    """Colours go round, and long names of rows stay on the picture."""
    monkeypatch.setattr("ampatch.sweep.report.pictures.FORMATS", ("png",))  # of nine files three
    cases = [Case("O0"), *(Case("O2", "float16", settings=(("number", n),)) for n in range(12))]
    runs = [made_run(case) for case in cases]
    drawn = {
        picture.name: picture for picture in pictures.pictures(made_sweep(tmp_path, runs), runs)
    }
    with Image.open(io.BytesIO(drawn["loss-by-step"].files["png"])) as image:
        assert image.width == 1104 and image.height > 900


@pytest.mark.parametrize("words", [["sweep", "x.py"], ["report", "."], ["tune", "x.py"]])
@pytest.mark.parametrize("missing", ["pandas", "matplotlib", "scipy"])
def test_without_the_extra_one_sentence_says_so_at_once(missing, words, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match="2"):
        main([*words, *["--opt-level", "O1"] * (words[0] == "tune")])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(
        f'Sweeping needs {missing}, which the extra sweep brings: pip install "ampatch[sweep]"'
    )
    with pytest.raises(ImportError, match="pip install"):
        ampatch.sweep.sweep("x.py")


# Where the figures come from


def text_of(path):
    """What a file says, the metadata of a picture too."""
    if path.suffix == ".png":
        with Image.open(path) as image:
            return " ".join(map(str, image.text.values()))
    if path.suffix == ".html":
        return Page(path.read_text(encoding="utf-8")).text
    return path.read_bytes().decode("utf-8", "replace").replace("\\(", "(").replace("\\)", ")")


def test_every_file_says_where_it_comes_from(written):
    files = [written[0] / "report.html", *sorted(written[0].glob("summary.*"))]
    files += [
        written[0] / "plots" / f"{name}.{form}" for name in NAMES for form in pictures.FORMATS
    ]
    assert len(files) == 1 + 4 + 9
    for path in files:
        text = text_of(path)
        for fact in ("ampatch sweep", "0123abc-dirty", "Some CPU", "0.5 to 1.5"):
            assert fact in text, (path, fact)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_repository_is_the_scripts(tmp_path, monkeypatch):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        places = [f"--git-dir={tmp_path / '.git'}", f"--work-tree={tmp_path}"]
        command = ["git", "-C", str(tmp_path), *places, *identity, *words]
        subprocess.run(command, check=True, capture_output=True)

    script, other = tmp_path / "inner" / "train.py", tmp_path / "other.py"
    script.parent.mkdir()
    script.write_text("")
    other.write_text("")
    assert commit_of(script).startswith("no commit: ")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as in a hook of another commit_of
    git("init")
    git("add", "other.py")
    git("commit", "-m", "one")
    assert commit_of(script).endswith(", without train.py, which is in no commit")
    git("add", "inner/train.py")
    git("commit", "-m", "two")
    assert re.fullmatch("[0-9a-f]{40}", commit_of(script))
    other.write_text("changed")
    assert re.fullmatch("[0-9a-f]{40}-dirty", commit_of(script))


def test_a_sweep_keeps_its_command_to_be_typed_again_and_how_it_went_on(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    options = {"script": str(tmp_path / "train.py"), "out": tmp_path / "out", "levels": ["O0"]}
    monkeypatch.setattr(sys, "orig_argv", ["/v/bin/python", "/v/bin/ampatch", "sweep", "a b.py"])
    Sweep(**options).close()
    monkeypatch.setattr(sys, "orig_argv", ["/v/bin/python3", "-m", "ampatch", "sweep"])
    Sweep(**options, resume=True).close()
    kept = read_results(tmp_path / "out").provenance
    assert kept["command"] == "ampatch sweep 'a b.py'"
    assert kept["command, resumed"] == "python3 -m ampatch sweep"


# The command, and what can be read back


def test_report_makes_again_what_was_lost(written, capsys):
    directory, results = written
    names = ("report.html", "summary.md", "summary.csv", "summary.tex")
    paths = [directory / name for name in names]
    paths += [directory / "plots" / f"{name}.{form}" for name in NAMES for form in pictures.FORMATS]
    before = [path.read_bytes() for path in paths]
    for path in paths:
        path.unlink()
    mine = directory / "plots" / "mine.png"
    mine.write_bytes(b"mine")
    assert main(["report", str(directory)]) == 0
    assert [path.read_bytes() for path in paths] == before
    shown = {path.stem for path in (directory / "plots").iterdir()}
    assert shown == {*NAMES, "mine"} and mine.read_bytes() == b"mine"
    assert f"Recommendation: {results.recommendation}" in capsys.readouterr().out


def test_report_wants_a_sweep(tmp_path, capsys):
    for wrong, message in [
        (None, "there are no results of a sweep in this directory"),
        ('{"format": 1}', "in format 1. This version reads"),
        *((text, "is damaged, or no sweep wrote it") for text in ("{", "[1]", '{"loss": 1}')),
    ]:
        if wrong is not None:
            (tmp_path / "summary.json").write_text(wrong)
        with pytest.raises(SystemExit, match="2"):
            main(["report", str(tmp_path)])
        assert message in capsys.readouterr().err
        assert not (tmp_path / "report.html").exists()


def test_json_csv_and_markdown_say_the_same(written):
    directory, results = written
    assert read_results(directory) == results
    with (directory / "summary.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    data = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    assert len(lines) == len(data["rows"]) == len(CASES)
    for line, row in zip(lines, data["rows"]):
        for name in ("label", "status", "verdict"):
            assert line[name] == row[name]
        for name in ("step_ms", "speed", "memory_bytes", "last_loss", "skipped", "loss_scale"):
            assert float(line[name]) == row[name]
        assert float(line["metric:accuracy"]) == row["metrics"]["accuracy"]
        for end in ("low", "high"):
            assert float(line[f"speed_{end}"]) == row["speeds"][end]
    text = as_markdown(results).replace("&lt;", "<")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(CASES) and len({line.count("|") for line in table}) == 1
    assert set(table[1]) == set("|-:")
    assert all(row.verdict in text for row in results.rows)
    assert "accuracy - O0" in text and results.recommendation in text


# The table as LaTeX

STRANGE = Case("O2", "float16", settings=(("a_b", "50% & {x} $y$ \\z ~^#|<é>"),))


def results_of(directory, *runs):
    return made_sweep(directory, [made_run(CASES[0], 0), made_run(CASES[0], 1), *runs])


def test_the_table_is_whole(tmp_path):
    results = results_of(tmp_path, made_run(STRANGE), made_run(CASES[1], error="No: <boom>"))
    text = as_latex(results)
    name = r"O2 a\_b=50\% \& \{x\} \$y\$ \textbackslash z \textasciitilde \textasciicircum \#"
    assert f"{name}\\textbar{{}}\\textless{{}}é\\textgreater{{}}" in text.replace("-a", " a")
    code = re.sub(r"(?m)^%.*\n|\\[\\{}&%$#_]", "", text)
    assert code.count("{") == code.count("}") and code.count("$") % 2 == 0
    sides = re.search(r"begin\{tabular\}\{@\{\}(\w+)@\{\}\}", text)[1]
    table = text[text.index(r"\toprule") : text.index(r"\bottomrule")].replace(r"\&", "")
    lines = [line for line in table.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 1 + len(results.rows)
    assert {line.count("&") for line in lines} == {len(sides) - 1}
    assert r"0.9050 $\pm$ 0.0071" in text and r"2.00x$^{\dagger}$" in text
    assert "% \N{DAGGER} a speed that may be noise" in text
    head = text.partition(r"\midrule")[0]  # the main columns alone
    assert "last loss" in head and "accuracy" in head
    assert "first" not in head and "scale" not in head and "status" not in head


def test_differences_have_their_mark_in_every_file(tmp_path):
    runs = [made_run(CASES[1], seed) for seed in (0, 1)]
    for run in runs:
        for series in run.measured.metrics.values():
            series.values[-1] = series.values[-1] / 2
    results = results_of(tmp_path, *runs)
    assert [row.outcome for row in results.rows] == ["baseline", "worse"]
    assert r"$^{\ddagger}$" in as_latex(results) and "differs from O0" in as_latex(results)
    assert "\N{DOUBLE DAGGER} differs from O0" in as_csv(results)
    assert "\N{DOUBLE DAGGER}" in as_markdown(results)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles_without_a_complaint(tmp_path):
    results_of(tmp_path, made_run(STRANGE), *(made_run(case) for case in CASES[1:]))
    write_report(tmp_path)
    (tmp_path / "paper.tex").write_text(
        r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}"
        r"\begin{table}\resizebox{\linewidth}{!}{\input{summary.tex}}\end{table}\end{document}"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout and "Missing" not in done.stdout


# The page in headless Chromium, as a phone and a desk show it; to be seen in AMPATCH_SCREENSHOTS

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason=f"none of {', '.join(BROWSERS)} in PATH"
)
WIDTHS = {390: 5200, 1280: 3200, 1400: 3200}  # pixels: heights that hold the whole page
# A window cannot be as narrow as a phone, a frame can.
FRAME = """<!DOCTYPE html><title>-</title><iframe id="f" style="width: {width}px; height: 800px;
border: 0" onload="const page = this.contentDocument;
for (const one of page.querySelectorAll('details')) one.open = true;
const boxes = [page.documentElement, ...page.querySelectorAll('.scroll')];
document.title = 'hidden ' + Math.max(...boxes.map(box => box.scrollWidth - box.clientWidth))"
srcdoc="{page}"></iframe>"""


def chromium(tmp_path, page, *options):
    return subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--force-device-scale-factor=1", f"--user-data-dir={tmp_path / 'profile'}",
            *options, page.as_uri(),
        ],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_drawn(written, tmp_path, width, dark):
    place = Path(os.environ.get("AMPATCH_SCREENSHOTS", tmp_path))
    shot = place / f"report-{width}-{'dark' if dark else 'light'}.png"
    options = ["--blink-settings=preferredColorScheme=0"] if dark else []
    size = f"--window-size={width},{WIDTHS[width]}"
    chromium(tmp_path, written[0] / "report.html", size, f"--screenshot={shot}", *options)
    with Image.open(shot) as image:
        assert image.width == width
        corner = image.convert("L").getpixel((2, 2))
        assert corner < 60 if dark else corner > 240
        for name in ("headline", "pictures"):
            part = (0, 0, width, 300) if name == "headline" else (0, 900, width, image.height)
            assert ImageStat.Stat(image.convert("L").crop(part)).stddev[0] > 10, name
        colours = {rgb for _, rgb in image.convert("RGB").getcolors(maxcolors=2**24)}
        assert (0xD5, 0x5E, 0) in colours  # O2's bars


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_of_the_page_or_its_tables_is_hidden_at_the_side(source, tmp_path, width):
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width, page=html.escape(source)), encoding="utf-8")
    dom = chromium(tmp_path, frame, "--dump-dom").stdout
    assert "<title>hidden 0</title>" in dom
