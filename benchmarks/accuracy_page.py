"""The words around the tables of docs/accuracy.md, which `accuracy.py` writes."""

from __future__ import annotations

import textwrap
from importlib.metadata import version

import torch
import why_the_parts_exist

import ampatch

PAGE = """\
# Accuracy

Does training come to the same result in half precision? Every opt level and torch.autocast were
held against O0, which is FP32, on the tasks below:

{summary}

<!-- figure accuracy -->

<!-- end of figure -->

[Why O3 in float16 diverges](#why-o3-in-float16-diverges-with-adam),
[why there is loss scaling](#why-there-is-loss-scaling) and
[why there are master weights](#why-there-are-master-weights) stand at the end of this page. To
compare the levels on a script of your own, use the
[sweep](commands/sweep.md).

## How it was measured

```bash
OMP_NUM_THREADS=1 {command}
```

The tables are what that command wrote on one thread of a CPU with {capability}:
{machine},
ampatch {ampatch}, scikit-learn {sklearn}, numpy {numpy}.

Runs per row: {seeds}, with seeds from 0 up. A seed decides the initial weights and the order of the
batches. The held-out examples are the same for all seeds. Rows of a task differ only in what their
titles say. Settings that are not named are those of the opt level. The rows of torch.autocast
follow the recipe of torch's documentation, with a GradScaler in float16.

Welch's t-test (B. L. Welch, Biometrika 34, 1947) compares each row's mean with O0's, two-sided at
the 5 % level. "Within seed noise" means that the test found no difference. The 95 % interval tells
how large a difference the test could have missed. Runs that diverged (a loss that is not finite)
are left out of mean and test; the verdict counts them. "Skipped" counts the steps that an overflow
skipped.

## Tasks on real data

{tables}

## Why O3 in float16 diverges with Adam

Adam divides by `sqrt(v) + eps`, where v starts as 0.001 times the square of the gradient. At O3
weights, gradients and Adam's state are all float16, whose smallest number is 2^-24, about 6e-8:

- `eps=1e-8`, torch's default, is 0;
- 0.001 times the square of a gradient below 5.5e-3 is 0 too.

So the first step divides a gradient by 0, or 0 by 0 where a gradient is 0 (a dead ReLU, a character
that is not in the batch), and the second loss is not a number. Loss scaling does not help, because
gradients are unscaled before Adam sees them. The table shows how far Adam moves a weight at its
first step, in units of lr (exact: 1, and 0 for a gradient of 0):

{adam}

A larger eps, such as the 0.001 of the rows above, keeps float16 finite. But it is another
optimizer: where v is lost, the step is gradient / eps. bfloat16 has the range of FP32 and does not
have this problem. At O2 Adam works on FP32 weights, gradients and state.

## Why there is loss scaling

This task is made for the purpose, after Micikevicius et al., "Mixed Precision Training", 2018
(arXiv:1710.03740), section 3.2: w goes from 0 to 1 by gradient descent on a loss of little weight,
and each step halves the distance. In the backward pass the gradient of each output is 2^-23 at
first and half as large after each step. The smallest number of float16 is 2^-24, and half of it
rounds to 0. Without scaling w stops after two steps. A scale of 8 lasts three steps longer. The
dynamic scale gives O0's result, bit for bit. bfloat16 has the range of FP32 and needs no scaling.

{scaling}

## Why there are master weights

This task follows section 3.1 of the paper: w goes from 16 to 17 in small steps, the largest 2^-7.
Between 16 and 32 the numbers of float16 lie 2^-6 apart, those of bfloat16 2^-3. So weight plus
update rounds back to 16, and w never moves. FP32 masters (O2), or weights that are FP32 anyway
(O1), add the updates up. What remains is the rounding of the weight that the forward pass sees: at
most 2^-7 in float16 and 2^-4 in bfloat16.

{masters}

Both tasks are also tests, with the formula and O0 as oracles:
`tests/benchmarks/test_why_the_parts_exist.py`.
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
