"""The command: all mixes with right, stale and zeroed rows, checked, in a table."""

from __future__ import annotations

import sys

import torch
from rich.console import Console
from rich.table import Table

from pd_pair.compare import Reference, mean_accepted, mean_first, problems
from pd_pair.model import make_model
from pd_pair.pair import run_pair
from pd_pair.wire import why_no_engine
from pd_pair.workload import ROW_KINDS, Run, make_mixes

_COLUMNS = ("mix", "max running", "requests", "steps", "largest batch assembled")
_MEANS = ("accepted a step, one process", "over the wire", *(f"first step, {kind} rows" for kind in ROW_KINDS))


def main() -> int:
    missing = why_no_engine()
    if missing is not None:
        print(missing, file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    console = Console()
    model, mixes = make_model(), make_mixes()
    runs = [Run(mix, kind) for mix in mixes for kind in ROW_KINDS]
    with console.status("The pair serves ...") as status:
        served = run_pair(model, runs, lambda run: status.update(f"Served: {run.mix.name}, {run.kind} rows"))
        references = {requests: Reference.of(model, requests) for requests in {mix.requests for mix in mixes}}
    table, found = Table(*_COLUMNS, *_MEANS, "tokens and steps equal"), []
    for i, mix in enumerate(mixes):
        of_mix = dict(zip(ROW_KINDS, served[i * len(ROW_KINDS) :], strict=False))
        outputs, reference = {kind: result.outputs for kind, result in of_mix.items()}, references[mix.requests]
        wrong = problems(outputs, reference)
        found += [f"{mix.name}, at most {mix.max_running} running: {text}" for text in wrong]
        num_steps = sum(len(output.steps) for output in outputs["right"])
        means = [
            mean_accepted(reference.outputs["right"]),
            mean_accepted(outputs["right"]),
            *(mean_first(outputs[kind]) for kind in ROW_KINDS),
        ]
        counts = (mix.max_running, len(mix.requests), num_steps, max(of_mix["right"].assembled))
        table.add_row(mix.name, *map(str, counts), *(f"{mean:.3f}" for mean in means), "no" if wrong else "yes")
    console.print(table)
    for text in found:
        console.print(text, style="red", highlight=False)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
