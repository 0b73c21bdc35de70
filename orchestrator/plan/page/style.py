"""The style of the page: light or dark as the reader's system asks, for wide and narrow screens."""

COLOURS = (
    "#4e79a7",
    "#f28e2b",
    "#e15759",
    "#59a14f",
    "#9c755f",
    "#76b7b2",
    "#edc948",
    "#b07aa1",
    "#8d99ae",
    "#6b7a90",
    "#a9b4c2",
)
"""Of items in charts: readable on a light and on a dark ground (Tableau's ten, and greys)."""

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --text: #1b1f24; --dim: #57606a;
  --rule: #d0d7de; --card: #f6f8fa; --warn: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --text: #e6e9ed; --dim: #9aa4b0;
  --rule: #353c45; --card: #1d2229; --warn: #ff8a7a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 48px; max-width: 1120px; background: var(--ground);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 24px; margin: 0; }
h2 { font-size: 18px; margin: 36px 0 8px; padding-top: 12px; border-top: 1px solid var(--rule); }
h3 { font-size: 14px; margin: 16px 0 4px; }
p { margin: 4px 0; }
.dim, figcaption { color: var(--dim); font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px;
  margin: 16px 0; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 6px;
  padding: 8px 12px; }
.tile b { display: block; font-size: 17px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 8px 0; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 3px 14px 3px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule); overflow-wrap: normal; }
th { color: var(--dim); font-weight: 600; }
.number { text-align: right; white-space: nowrap; }
figure { margin: 8px 0; overflow-x: auto; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr));
  gap: 16px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
svg .dim { fill: var(--dim); font-size: 11px; }
svg .axis { stroke: var(--rule); }
svg .limit { stroke: var(--warn); stroke-dasharray: 6 4; stroke-width: 1.5; }
svg .over { fill: var(--warn); }
svg .area { stroke: var(--ground); stroke-width: 0.3; }
svg .hover { fill: transparent; }
svg .hover:hover { fill: var(--text); fill-opacity: 0.08; }
.bar { display: flex; height: 30px; border-radius: 4px; overflow: hidden; margin: 8px 0; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; margin: 6px 0;
  padding: 0; list-style: none; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px;
  margin-right: 5px; }
.map input { position: absolute; opacity: 0; }
.map label { display: inline-block; padding: 3px 12px; margin: 4px 4px 8px 0; cursor: pointer;
  border: 1px solid var(--rule); border-radius: 14px; font-size: 13px; }
.map input:checked + label { background: var(--text); color: var(--ground); }
.map input:focus-visible + label { outline: 2px solid var(--warn); }
.groups { display: flex; flex-wrap: wrap; gap: 10px; }
.group { border: 1px solid var(--rule); border-radius: 6px; padding: 6px 8px; min-width: 0;
  max-width: 100%; }
.group > .dim, .host > .dim { display: block; font-size: 12px; }
.hosts { display: flex; flex-wrap: wrap; gap: 8px; }
.dots { display: flex; flex-wrap: wrap; gap: 2px; max-width: 198px; }
.dots i { width: 10px; height: 10px; border-radius: 2px; background: var(--rule); }
.devices { display: grid; grid-template-columns: repeat(var(--columns), minmax(34px, 1fr));
  gap: 3px; }
.devices i { border-radius: 4px; padding: 2px 5px; font-style: normal; font-size: 11px;
  background: var(--rule); color: #14171c; line-height: 1.3; }
.devices b { display: none; font-size: 15px; }
.keys { display: none; }
details { margin: 8px 0; }
summary { cursor: pointer; }
li { margin: 3px 0; }
"""


def item_rules() -> str:
    return "\n".join(
        f".c{number} {{ fill: {colour}; background: {colour}; }}"
        for number, colour in enumerate(COLOURS)
    )


def coordinate_colour(value: int, degree: int) -> str:
    """Of a coordinate on an axis. Dark text is readable on it. Few values are far apart in hue;
    neighbours of many differ in lightness too."""
    hue = round(360 * value / degree + 210) % 360
    return f"hsl({hue} 62% {74 if value % 2 == 0 or degree <= 8 else 64}%)"
