"""The style sheet of pages: light, dark and on paper.

Colours of series are those of Okabe and Ito, "Color Universal Design" (jfly.uni-koeln.de/color),
which people with any kind of colour blindness can tell apart; without the yellow, which is
invisible on white, and lighter where the page is dark.
"""

STYLE = """
:root { --ink: #1b1f24; --dim: #5c6570; --page: #f4f5f7; --card: #fff; --line: #dfe3e8;
  --track: #eceff2; --hot: #d55e00; --c0: #0072b2; --c1: #e69f00; --c2: #009e73; --c3: #cc79a7;
  --c4: #56b4e9; --c5: #d55e00; --c6: #6f4fa3; --c7: #9aa3ad; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --dim: #9aa4b0; --page: #101317; --card: #191d23; --line: #2c323a;
    --track: #262c34; --c0: #3b9ddb; --c1: #e9b23c; --c2: #2bbd92; --c3: #dd93ba; --c4: #8fd0f5;
    --c5: #ee7b2f; --c6: #a48ad4; --c7: #77818d; } }
@media print {
  :root { --ink: #000; --dim: #444; --page: #fff; --card: #fff; --line: #ccc; --track: #eee; }
  nav { display: none !important; } details::details-content { content-visibility: visible; }
  table { font-size: 11px; } .bar, .spark { min-width: 70px; width: 70px; }
  tfoot { display: table-row-group; } header { margin-bottom: 16px; }
  section { border: 0 !important; padding: 0 !important; } tr, figure, .tiles div {
    break-inside: avoid; } h2 { break-after: avoid; } .scroll { overflow: visible !important; } }
* { box-sizing: border-box; }
html { print-color-adjust: exact; -webkit-print-color-adjust: exact; scroll-behavior: smooth; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui,
  -apple-system, "Segoe UI", "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 16px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0; letter-spacing: -0.02em; }
header p { margin: 6px 0 0; color: var(--dim); overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 0 0 10px; letter-spacing: -0.01em; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 16px 0; font-size: 13.5px; }
a { color: var(--c0); text-decoration: none; } a:hover { text-decoration: underline; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 20px 22px; margin: 0 0 16px; }
section > :last-child { margin-bottom: 0; }
p, ul, pre, figure { margin: 0 0 12px; } p { max-width: 78ch; overflow-wrap: anywhere; }
section > p, li { color: var(--dim); font-size: 14px; } ul { padding-left: 20px; }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr); gap: 20px 24px; margin: 0; }
@media (max-width: 640px) { .tiles { grid-template-columns: repeat(2, 1fr); } }
dt { color: var(--dim); font-size: 13px; } dd { margin: 0; }
dd b { display: block; font-size: 27px; line-height: 1.25; font-weight: 650;
  letter-spacing: -0.02em; } dd small { color: var(--dim); overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 0 0 12px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
.facts { width: auto; } .facts td { padding-right: 24px; }
th { text-align: left; font-weight: 500; color: var(--dim); font-size: 12.5px; vertical-align:
  bottom; }
th, td { padding: 5px 7px; border-bottom: 1px solid var(--line); }
td { vertical-align: top; } td > bdi, td > .name { overflow-wrap: anywhere; }
th:first-child, td:first-child { padding-left: 0; }
tbody tr:last-child td { border-bottom: 0; } tfoot td { border-top: 2px solid var(--line);
  border-bottom: 0; font-weight: 600; }
tbody tr:hover { background: color-mix(in srgb, var(--c0) 6%, transparent); }
.n { text-align: right; font-variant-numeric: tabular-nums; } td.n { white-space: nowrap; }
.zero { color: var(--dim); opacity: 0.75; }
td[style] { background: color-mix(in srgb, var(--hot) calc(var(--heat) * 0.55), transparent); }
td b { font-weight: 600; } td small { display: block; color: var(--dim); line-height: 1.2; }
.name { display: flex; min-width: 15ch; max-width: 34ch; } .name bdi { min-width: 0; }
.name i, .legend i { flex: none; width: 10px; height: 10px; border-radius: 2px;
  margin: 6px 7px 0 0; }
.bar { display: flex; min-width: 150px; height: 14px; margin-top: 3px; background: var(--track);
  border-radius: 3px; overflow: hidden; } .bar i { min-width: 1px; height: 100%; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; list-style: none; padding: 0;
  margin: 0 0 8px; }
.legend li { display: flex; max-width: 34ch; color: var(--ink); font-size: 13.5px;
  overflow-wrap: anywhere; }
svg { display: block; } .chart { width: 100%; height: auto; } .spark { width: 150px; height: 22px; }
.chart text { font-size: 11px; fill: var(--dim); } .chart line { stroke: var(--line); }
.hover { fill: transparent; } .hover:hover { fill: color-mix(in srgb, var(--ink) 9%, transparent); }
i.s0 { background: var(--c0); } i.s1 { background: var(--c1); } i.s2 { background: var(--c2); }
i.s3 { background: var(--c3); } i.s4 { background: var(--c4); } i.s5 { background: var(--c5); }
i.s6 { background: var(--c6); } i.s7 { background: var(--c7); }
.s0 { fill: var(--c0); } .s1 { fill: var(--c1); } .s2 { fill: var(--c2); } .s3 { fill: var(--c3); }
.s4 { fill: var(--c4); } .s5 { fill: var(--c5); } .s6 { fill: var(--c6); } .s7 { fill: var(--c7); }
details { margin: 0 0 8px; } summary { cursor: pointer; font-size: 14px; }
details > .scroll, details > details, details > pre { margin: 6px 0 12px 18px; }
pre { background: var(--track); border-radius: 6px; padding: 12px 14px; overflow-x: auto;
  font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
"""
