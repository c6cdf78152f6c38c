"""A sweep as LaTeX: text that LaTeX shows as it is, whole tables, and that it compiles."""

import re
import shutil
import subprocess

import pytest
from sweep_made import CASES, made_run, made_sweep

from ampatch.sweep import Case, write_report
from ampatch.sweep.report.latex import escaped, with_formulas
from ampatch.sweep.report.plots import Picture
from ampatch.sweep.report.summary_files import (
    as_csv,
    as_figures,
    as_markdown,
    as_method,
    as_table,
)

STRANGE = Case(
    "O2", "float16", settings=(("a_b", "50% & {x} $y$ \\z ~^#|<é>\N{CYRILLIC SMALL LETTER BE}"),)
)


def results_of(directory, *runs):
    return made_sweep(directory, [made_run(CASES[0], 0), made_run(CASES[0], 1), *runs])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("50% of a_b & #1 {x} $y$", r"50\% of a\_b \& \#1 \{x\} \$y\$"),
        ("\\z~^", r"\textbackslash{}z\textasciitilde{}\textasciicircum{}"),
        ('"within" 3"', "``within'' 3''"),
        ("--steps 3 \N{EN DASH} 5", "-{}-steps 3 -- 5"),
        ("1 ± 2", r"1 $\pm$ 2"),
        ("größe \N{GREEK SMALL LETTER ALPHA}", r"größe \texttt{U+03B1}"),
    ],
)
def test_text_is_shown_as_it_is(text, shown):
    assert escaped(text) == shown


@pytest.mark.parametrize(
    "text, shown",
    (
        ("by -3.7e-05 [-0.0015, +2e-06]", r"by $-3.7\cdot10^{-5}$ $[-0.0015, +2\cdot10^{-6}]$"),
        ("1.5 [1.4, 1.6]", "$1.5$ $[1.4, 1.6]$"),
        ("p=1e-12", r"$p=1\cdot10^{-12}$"),
    ),
)
def test_figures_are_mathematics(text, shown):
    assert with_formulas(text) == shown


def test_the_table_is_whole(tmp_path):
    results = results_of(tmp_path, made_run(STRANGE), made_run(CASES[1], error="No: <boom>"))
    text = as_table(results)
    code = re.sub(r"(?m)^%.*\n|\\[\\{}&%$#_]", "", text)
    assert code.count("{") == code.count("}") and code.count("$") % 2 == 0
    sides = re.search(r"begin\{tabular\}\{@\{\}(\w+)@\{\}\}", text)[1]
    table = text[text.index(r"\toprule") : text.index(r"\bottomrule")].replace(r"\&", "")
    lines = [line for line in table.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 1 + len(results.rows)
    assert {line.count("&") for line in lines} == {len(sides) - 1}
    assert r"$0.9050$\\\scriptsize $\pm 0.0071$" in text
    assert r"$2.00\times^{\dagger}$" in text and r"$^{\dagger}$ speed not told apart" in text
    assert "crashed." in text and "resizebox" not in text
    below = text[text.index(r"\bottomrule") :]
    assert len(below) < 500  # the rest is for an appendix
    method = as_method(results)
    assert method.count("$") % 2 == 0 and r"$\mathrm{ncp}\cdot s/\sqrt{n}$" in method
    assert r"crashed: No: \textless{}boom\textgreater{}" in method
    assert "1 of 120 steps were skipped" in method


def test_differences_have_their_mark_in_every_file(tmp_path):
    runs = [made_run(CASES[1], seed) for seed in (0, 1)]
    for run in runs:
        for series in run.measured.metrics.values():
            series.values[-1] = series.values[-1] / 2
    results = results_of(tmp_path, *runs)
    assert [row.outcome for row in results.rows] == ["baseline", "worse"]
    assert r"^{\ddagger}$" in as_table(results) and "differs from O0" in as_table(results)
    assert "\N{DOUBLE DAGGER} differs from O0" in as_csv(results)
    assert "\N{DOUBLE DAGGER}" in as_markdown(results)


def test_the_table_has_the_main_columns_only(tmp_path):
    head = as_table(results_of(tmp_path)).partition(r"\midrule")[0].replace(r"\\", " ")
    assert "last loss" in head and "accuracy" in head
    assert "first" not in head and "scale" not in head and "status" not in head


def test_each_picture_has_its_figure_and_caption(tmp_path):
    picture = Picture("speed", "Speed", "Bars of 50%.", "alt", {})
    text = as_figures(results_of(tmp_path), [picture])
    assert r"{\ampatchplots/speed.pdf}" in text and r"\label{fig:ampatch-speed}" in text
    assert r"\caption{Bars of 50\%.}" in text


def test_no_picture_is_no_figure(tmp_path):
    assert "figure}" not in as_figures(results_of(tmp_path), [])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
@pytest.mark.parametrize("style", ["article", "[twocolumn]article"])
def test_latex_compiles_without_a_complaint(tmp_path, style):
    results_of(tmp_path, made_run(STRANGE), *(made_run(case) for case in CASES[1:]))
    write_report(tmp_path)
    options, _, name = style.rpartition("]")
    (tmp_path / "paper.tex").write_text(
        rf"\documentclass{options}{']' if options else ''}{{{name}}}"
        r"\usepackage{booktabs,graphicx}\begin{document}"
        r"\input{summary.tex}\input{figures.tex}\input{method.tex}\end{document}"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout and "Missing" not in done.stdout
