"""A sweep's table as LaTeX: text that LaTeX shows as it is, a whole table, and that it compiles."""

import re
import shutil
import subprocess

import pytest
from sweep_made import CASES, made_run, made_sweep

from ampatch.sweep import Case, write_report
from ampatch.sweep.report.summary_files import as_csv, as_latex, as_markdown, latex

STRANGE = Case("O2", "float16", settings=(("a_b", "50% & {x} $y$ \\z ~^#|<é>"),))


def results_of(directory, *runs):
    return made_sweep(directory, [made_run(CASES[0], 0), made_run(CASES[0], 1), *runs])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("50% of a_b & #1 {x} $y$", r"50\% of a\_b \& \#1 \{x\} \$y\$"),
        ("\\z~^", r"\textbackslash{}z\textasciitilde{}\textasciicircum{}"),
        ("1 ± 2", r"1 $\pm$ 2"),
    ],
)
def test_text_is_shown_as_it_is(text, shown):
    assert latex(text) == shown


def test_the_table_is_whole(tmp_path):
    results = results_of(tmp_path, made_run(STRANGE), made_run(CASES[1], error="No: <boom>"))
    text = as_latex(results)
    code = re.sub(r"(?m)^%.*\n|\\[\\{}&%$#_]", "", text)
    assert code.count("{") == code.count("}") and code.count("$") % 2 == 0
    sides = re.search(r"begin\{tabular\}\{@\{\}(\w+)@\{\}\}", text)[1]
    table = text[text.index(r"\toprule") : text.index(r"\bottomrule")].replace(r"\&", "")
    lines = [line for line in table.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 1 + len(results.rows)
    assert {line.count("&") for line in lines} == {len(sides) - 1}
    assert r"0.9050 $\pm$ 0.0071" in text and r"2.00x$^{\dagger}$" in text
    assert "% \N{DAGGER} speed not told apart" in text


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


def test_the_table_has_the_main_columns_only(tmp_path):
    head = as_latex(results_of(tmp_path)).partition(r"\midrule")[0]
    assert "last loss" in head and "accuracy" in head
    assert "first" not in head and "scale" not in head and "status" not in head


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
