"""Error against bits for every codec so far, with the floor of scalar rounding: writes docs/images/error-by-bits.svg.

python benchmarks/error_plot.py
"""

import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from tacit.requests import loop_back
from tacit.strategy import parse_codec
from tacit.testing import nmse, vectors

CODECS = (
    ("thc(bits=2, granularity=34, clamped=0.0009765625)", "thc 2 bit (8 down)"),
    ("thc(bits=3, granularity=16)", "thc 3 bit (8 down)"),
    ("thc", "thc 4 bit (8 down)"),
    ("hush", "hush (8 down)"),
    ("int4(block=64)", "int4"),
    ("int4(block=64, rounding=nearest)", "int4 nearest"),
    ("int8(block=256)", "int8"),
    ("int8(block=256, rounding=nearest)", "int8 nearest"),
    ("bf16", "bf16"),
    ("fp16", "fp16"),
)
# Distortion of the best scalar quantiser of a Gaussian (Lloyd-Max), by bits: what EDEN reaches, which cannot be added.
FLOOR = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499, 6: 0.0006442, 8: 0.0000402}
WORLD, NUMEL = 4, 1 << 18
INKED = (
    "text.color",
    "axes.edgecolor",
    "axes.labelcolor",
    "xtick.color",
    "ytick.color",
)  # readable on dark and light


def measure() -> list[dict[str, object]]:
    rows = []
    for text, name in CODECS:
        codec = parse_codec(text)
        bits = 8 * codec.nbytes(NUMEL) / NUMEL
        errors = {
            f: nmse(loop_back(codec, x)[0].total, x)
            for f in ("gauss", "lognormal")
            for x in [vectors(f, WORLD, NUMEL)]
        }
        rows.append(
            {
                "benchmark": "error by bits",
                "codec": text,
                "name": name,
                "bits": bits,
                "world": WORLD,
                **errors,
            }
        )
    return rows


def draw(rows: list[dict[str, object]], path: Path) -> None:
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "font.family": "sans-serif",
            "font.size": 9,
            **dict.fromkeys(INKED, "#777777"),
        }
    ):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.plot(
            list(FLOOR),
            [d / WORLD for d in FLOOR.values()],
            color="#888888",
            ls="--",
            lw=1,
            label="floor of scalar rounding (EDEN-like; not additive)",
        )
        for family, marker, colour in (("gauss", "o", "#3b76d6"), ("lognormal", "x", "#d6743b")):
            axes.scatter(
                [r["bits"] for r in rows],
                [r[family] for r in rows],
                marker=marker,
                color=colour,
                s=28,
                label=f"{family} vectors, {WORLD} ranks",
            )
        for row in rows:
            left = str(row["name"]).startswith(("thc", "hush"))
            place = {"xytext": (-7, -3), "ha": "right"} if left else {"xytext": (7, -3)}
            where = (row["bits"], row["gauss"])
            axes.annotate(str(row["name"]), where, textcoords="offset points", fontsize=8, **place)
        axes.set(
            yscale="log",
            xlabel="bits a coordinate on the way up (norms and scales included); down the same unless noted",
            ylabel="NMSE of the mean",
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks([2, 3, 4, 8, 16], labels=["2", "3", "4", "8", "16"])
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.25)
        figure.savefig(path, transparent=True)


def main() -> None:
    rows = measure()
    for row in rows:
        print(json.dumps(row))
    path = Path(__file__).parents[1] / "docs" / "images" / "error-by-bits.svg"
    draw(rows, path)
    print(json.dumps({"wrote": path.name}))


if __name__ == "__main__":
    main()
