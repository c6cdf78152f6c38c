"""The words around the tables of docs/accuracy.md, which `accuracy.py` writes."""

from __future__ import annotations

import textwrap
from importlib.metadata import version

import torch
import why_the_parts_exist

import ampatch

PAGE = """\
# Accuracy

Does training come to the same result in half precision?

```bash
OMP_NUM_THREADS=1 {command}
```

This page is what that command wrote on one thread of a CPU with {capability}:
{machine},
ampatch {ampatch}, scikit-learn {sklearn}, numpy {numpy}.

## Tasks on real data

Runs per row: {seeds}, with seeds from 0 up. A seed decides the initial weights and the order of
the batches; which examples are held out depends on none. Rows of a task differ in what their
titles say and in nothing else; settings that are not named are the level's own. torch.autocast is
the baseline: the recipe of torch's documentation, with a GradScaler in float16.

Each row's mean is compared with O0's by Welch's t-test (B. L. Welch, Biometrika 34, 1947),
two-sided at the 5 % level. "Within seed noise" means that the test found no difference; the 95 %
interval tells how large one it could have missed. Runs that diverged (a loss that is not finite)
are left out of mean and test, and are counted in the verdict. "Skipped" are steps left out because
of an overflow.

{summary}

{tables}

## Why O3 in float16 diverges with Adam

Adam divides by `sqrt(v) + eps`, where v starts as 0.001 times the gradient's square. At O3 weights,
gradients and Adam's state are all float16, whose smallest number is 2^-24, about 6e-8:

- `eps=1e-8`, torch's default, is 0;
- 0.001 times the square of a gradient below 5.5e-3 is 0 too.

So the first step divides a gradient by 0, or 0 by 0 where a gradient is 0 (a dead ReLU, a
character that is not in the batch), and the second loss is not a number. Loss scaling does not
help: gradients are unscaled before Adam sees them. How far Adam moves a weight at its first step,
in units of lr (exact: 1, and 0 for a gradient of 0):

{adam}

A larger eps, such as the 0.001 of the rows above, keeps float16 finite, but it is another
optimizer: where v is lost, the step is gradient / eps. bfloat16 has FP32's range and no such
trouble, and at O2 Adam works on FP32 weights, gradients and state.

## Why there is loss scaling

A task made for the purpose, after Micikevicius et al., "Mixed Precision Training", 2018
(arXiv:1710.03740), section 3.2: w goes from 0 to 1 by gradient descent on a loss of little weight,
and each step halves the distance. In the backward pass the gradient of each output is 2^-23 at
first and half as large after each step; float16's smallest number is 2^-24, and half of it rounds
to 0. Without scaling w stops after two steps; a scale of 8 lasts three steps longer; the dynamic
scale gives O0's result, bit for bit. bfloat16 has FP32's range and needs none.

{scaling}

## Why there are master weights

The paper's section 3.1: w goes from 16 to 17 in small steps, the largest 2^-7. Between 16 and 32
float16's numbers lie 2^-6 apart, bfloat16's 2^-3, so weight plus update rounds back to 16: w never
moves. FP32 masters (O2), or weights that are FP32 anyway (O1), add the updates up. What remains is
the rounding of the weight that the forward pass sees, by 2^-7 in float16 and 2^-4 in bfloat16 at
most.

{masters}

Both are tests too, with the formula and O0 as oracles: `tests/test_why_the_parts_exist.py`.
"""


def page(machine: str, command: str, seeds: int, tables: list[str], summary: str) -> str:
    """The whole page, in Markdown."""
    scaling, masters = why_the_parts_exist.tables()
    return PAGE.format(
        command=command,
        machine=machine,
        capability=torch.backends.cpu.get_cpu_capability(),
        ampatch=ampatch.__version__,
        sklearn=version("scikit-learn"),
        numpy=version("numpy"),
        seeds=seeds,
        summary="\n".join(textwrap.wrap(summary, 100)),
        tables="\n\n".join(tables),
        adam=_adam_table(),
        scaling=scaling,
        masters=masters,
    )


def _adam_table() -> str:
    columns = [
        ("FP32, eps=1e-8", torch.float32, 1e-8),
        ("float16, eps=1e-8", torch.float16, 1e-8),
        ("float16, eps=0.001", torch.float16, 1e-3),
        ("bfloat16, eps=1e-8", torch.bfloat16, 1e-8),
    ]
    lines = [
        "| gradient | " + " | ".join(title for title, _, _ in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for gradient in (1.0, 1e-2, 1e-3, 1e-4, 0.0):
        moved = [
            abs(why_the_parts_exist.first_adam_step(gradient, eps, dtype))
            for _, dtype, eps in columns
        ]
        lines.append(f"| {gradient:g} | " + " | ".join(f"{move:.3f}" for move in moved) + " |")
    return "\n".join(lines)
