"""Figures of `draftgather bench` as pictures: time against batch size, and how far each path is from the floor."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from draftgather.bench.matrix import Figure, Group
from draftgather.bench.paths import FLOOR, PATHS
from draftgather.bench.report import MEASURES, Report, measured

# Colours that the colour-blind can tell apart (Okabe and Ito), one a path.
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#0072B2", "#888888")
_STYLES = dict(zip((path.name for path in PATHS), _COLOURS, strict=True))
_OURS = ("slots", "rows")


class NoMatplotlib(Exception):
    """It is optional."""


def plot(report: Report, folder: Path) -> list[Path]:
    """A PNG a group and measure; the folder is made. Raises NoMatplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoMatplotlib('pictures need matplotlib: pip install "draftgather[plot]"') from error
    matplotlib.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    batches = [figure for figure in report.figures if figure.group.step == "batch"]
    made = []
    for group, members in groupby(batches, key=lambda figure: figure.group):
        figures = list(members)
        for measure in measured(figures[0]):
            made.append(folder / f"{_file_name(group)}-{measure.removesuffix('_us')}.png")
            _draw(figures, measure, _title(report, group, measure), made[-1])
    return made


def _draw(figures: list[Figure], measure: str, title: str, path: Path) -> None:
    from matplotlib.figure import Figure as Picture
    from matplotlib.ticker import ScalarFormatter

    lines: dict[str, dict[int, float]] = {}
    for f in figures:
        lines.setdefault(f.path, {})[f.num_rows] = getattr(f.times, measure).p50
    picture = Picture(figsize=(13, 5.5), layout="constrained")
    times, ratios = picture.subplots(1, 2)
    for name, us in lines.items():
        style = {
            "color": _STYLES.get(name, "#444444"),
            "linewidth": 2.6 if name in _OURS else 1.4,
            "linestyle": ":" if name == FLOOR else "-",
            "marker": "o" if name in _OURS else ".",
            "label": f"draftgather, {name}" if name in _OURS else name,
        }
        times.plot(list(us), list(us.values()), **style)
        to_floor = {n: value / lines[FLOOR][n] for n, value in us.items() if n in lines[FLOOR]}
        ratios.plot(list(to_floor), list(to_floor.values()), **style)
    for axes, label in ((times, "µs, p50"), (ratios, "times the floor, p50")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("N, rows a batch")
        axes.set_ylabel(label)
        axes.set_xticks(sorted({f.num_rows for f in figures}))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.grid(True, which="both", alpha=0.25)
    # Within one decade, where the marks between powers of ten are all there are.
    ratios.yaxis.set_minor_formatter(ScalarFormatter())
    times.legend(fontsize="small")
    picture.suptitle(title)
    picture.savefig(path, dpi=110)


def _title(report: Report, group: Group, measure: str) -> str:
    where = report.environment
    device = f"GPU {where.get('gpu')}" if group.device == "cuda" else f"CPU {where.get('cpu')} (a proxy)"
    return f"{group}\n{device}, torch threads: {where.get('threads')}, {MEASURES[measure]}, p50"


def _file_name(g: Group) -> str:
    overlap = "overlap" if g.overlap else "no-overlap"
    return f"{g.device}-{g.dtype}-h{g.hidden_size}-k{g.topk}-s{g.num_steps}-{overlap}-{g.temperature}-{g.load}"
