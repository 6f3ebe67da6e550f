"""The style sheet of the report: light and dark by the reader's own setting, wide tables that scroll in their box."""

CSS = """
:root { color-scheme: light dark; --page: #fbfbfc; --card: #ffffff; --ink: #1b1f24; --soft: #5b6470; --line: #dfe3e8;
  --ours: #1f6feb; --peer: #8a94a3; --good: #1a7f37; --bad: #c62828; --warn: #9a6700; --band: #f1f4f8;
  --roof: #d97706; }
@media (prefers-color-scheme: dark) { :root { --page: #101418; --card: #171c22; --ink: #e6e9ed;
  --soft: #9aa4b1;
  --line: #2d343d; --ours: #6ea8fe; --peer: #77818f; --good: #56d364; --bad: #ff7b72; --warn: #e3b341;
  --band: #1e252d;
  --roof: #f0a04b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1480px; padding: 24px 20px 64px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 40px 0 4px; }
h3 { font-size: 15px; margin: 20px 0 6px; }
p { margin: 4px 0 10px; max-width: 84ch; } .soft, .soft td { color: var(--soft); } small { font-size: 13px; }
nav { margin: 12px 0 0; display: flex; flex-wrap: wrap; gap: 6px 16px; }
a { color: var(--ours); text-decoration: none; }
a:hover { text-decoration: underline; }
code { font: 13px/1.4 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
.box { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; margin: 10px 0; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 8px; text-align: right; white-space: nowrap; }
th { font-weight: 600; }
thead th { color: var(--soft); border-bottom: 1px solid var(--line); vertical-align: bottom; }
.t { text-align: left; } .wrap { white-space: normal; min-width: 16ch; overflow-wrap: anywhere; }
table.short { width: auto; min-width: 50%; }
tbody.case > tr:first-child > * { border-top: 1px solid var(--line); }
tr.head th { text-align: left; padding-top: 8px; font-weight: 600; }
tr.head th span { position: sticky; left: 10px; }
td.name { text-align: left; padding-left: 22px; position: sticky; left: 0; background: var(--card); }
tr.ours td { background: var(--band); }
tr.ours td.name, tr.way td.name { color: var(--ours); } tr.ours td.name { font-weight: 600; }
tr.limit td { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
.warn { color: var(--warn); } td.bar { min-width: 120px; padding: 2px 6px; }
td.bar svg { display: block; width: 100%; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 10px 14px; font-size: 13.5px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--soft); } details ul { padding-left: 20px; }
details li { margin: 2px 0; font-size: 13.5px; }
svg text { fill: var(--ink); font-size: 12px; } svg .soft { fill: var(--soft); } svg .axis { stroke: var(--line); }
svg .tick { fill: var(--soft); font-size: 11px; } svg .ours { fill: var(--ours); } svg .peer { fill: var(--peer); }
svg .dot { stroke: var(--card); stroke-width: 1; } svg .bad { fill: var(--bad); } svg .label { font-size: 11px; }
svg .reach { stroke: var(--ink); stroke-width: 1.5; } svg .mark { stroke: var(--ours); stroke-dasharray: 2 2; }
svg .roof { fill: none; stroke: var(--roof); stroke-width: 2; } svg .sheet { stroke-dasharray: 6 4; }
svg .rooftext { fill: var(--roof); font-size: 11px; } svg .trend { fill: none; stroke-width: 1.5; }
svg .trend.ours { stroke: var(--ours); fill: none; } svg .trend.peer { stroke: var(--peer); fill: none; }
.plot svg { display: block; min-width: 700px; width: 100%; height: auto; } .key { display: inline-block; width: 10px;
  height: 10px; border-radius: 5px; margin-right: 5px; } .key.ours { background: var(--ours); }
.key.peer { background: var(--peer); }
@media (max-width: 1320px) { table { font-size: 12.5px; } th, td { padding: 4px 5px; } td.bar { min-width: 72px; } }
@media (max-width: 640px) { body { padding: 14px 10px 40px; font-size: 14px; } th, td { padding: 4px 7px; }
  table.short th, table.short td { white-space: normal; }
  dl { grid-template-columns: 1fr; } dt { margin-top: 6px; } .wrap { min-width: 22ch; } }
@media print { body { max-width: none; } .box { overflow: visible; } }
"""
