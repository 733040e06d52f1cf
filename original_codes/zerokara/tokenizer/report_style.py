"""The look of the report's page: one sheet for the desk, the phone, the dark, and paper."""

PIECE_COLOURS = 5
"""Colours that neighbouring pieces take in turn (.p0 to .p4)."""
SERIES_COLOURS = 6
"""Colours of the tokenizers, ours first (.s0 to .s5)."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --card: #f6f7f9; --ink: #1b1f27; --soft: #5f6876; --line: #dfe3e9; --track: #e9ecf1;
  --s0: #2563eb; --s1: #e08a00; --s2: #0f9d76; --s3: #a346d6; --s4: #d6336c; --s5: #64748b;
  --k-piece: #2563eb; --k-character: #7fb2f7; --k-byte: #e08a00; --k-unknown: #d92c20; --k-line: #b4bcc8;
  --p0: #cfe3ff; --p1: #ffe2b0; --p2: #c9efd6; --p3: #fbd3e6; --p4: #e2d8fb;
  --bad: #d92c20; --good: #0b7f5c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12151b; --card: #1b2028; --ink: #e7eaf0; --soft: #9aa4b3; --line: #2d3440; --track: #262d38;
    --s0: #6ea8ff; --s1: #f5b042; --s2: #3fcf9f; --s3: #c98bf0; --s4: #f57aa5; --s5: #94a3b8;
    --k-piece: #5b97f5; --k-character: #2f548f; --k-byte: #e69b2e; --k-unknown: #f0645a; --k-line: #525d6e;
    --p0: #1f3f70; --p1: #63450f; --p2: #1b5138; --p3: #652846; --p4: #433273;
    --bad: #ff8a80; --good: #4fd6a8;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 70rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Noto Sans CJK JP", "Hiragino Sans",
    "Yu Gothic UI", "Apple SD Gothic Neo", "Malgun Gothic", "PingFang SC", "Microsoft YaHei", sans-serif;
}
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; margin: 3rem 0 .4rem; letter-spacing: -.005em; }
h3 { font-size: 1rem; margin: 1.6rem 0 .5rem; overflow-wrap: anywhere; }
p { margin: .3rem 0 1rem; max-width: 46rem; }
.soft, .note, figcaption, caption { color: var(--soft); }
.note { font-size: .875rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0 0; }
.tile { background: var(--card); border-radius: .6rem; padding: .8rem 1rem; }
.tile dt { font-size: .8rem; color: var(--soft); }
.tile dd { margin: .1rem 0 0; font-size: 1.55rem; font-weight: 650; line-height: 1.2;
  font-variant-numeric: tabular-nums; }
.tile dd small { display: block; font-size: .78rem; font-weight: 400; color: var(--soft); margin-top: .15rem; }
.bad { color: var(--bad); } .good { color: var(--good); }
.wide { overflow-x: auto; margin: .5rem 0 1rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 500; color: var(--soft); font-size: .8rem; }
th:first-child, td:first-child, .left { text-align: left; }
thead th { vertical-align: bottom; }
tbody th .note { font-weight: 400; margin-left: .4em; }
th:first-child, td:first-child { padding-left: 0; }
.wide td:first-child, .wide thead th:first-child { position: sticky; left: 0; background: var(--paper); }
.group { position: sticky; left: 0; width: max-content; max-width: calc(100vw - 2rem); overflow-wrap: anywhere; }
tbody th { color: var(--ink); font-size: .9rem; font-weight: 600; padding-top: .9rem; white-space: normal; }
td.best { font-weight: 700; color: var(--good); }
.swatch { display: inline-block; width: .7em; height: .7em; border-radius: .2em; margin-right: .45em; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; font-size: .875rem; margin: .4rem 0 .8rem;
  color: var(--soft); }
.bars { display: grid; grid-template-columns: minmax(5rem, max-content) 1fr; gap: .25rem .8rem; align-items: center;
  font-size: .875rem; max-width: 52rem; }
.bars h3 { grid-column: 1 / -1; margin: .8rem 0 .1rem; }
.bars .name { max-width: 14rem; overflow-wrap: anywhere; line-height: 1.25; }
.track { display: flex; align-items: center; gap: .5rem; font-variant-numeric: tabular-nums; }
.bar { height: 1.05rem; border-radius: .2rem; min-width: 2px; flex: none; }
.stack { display: flex; height: 1.25rem; border-radius: .25rem; overflow: hidden; width: 100%;
  background: var(--track); }
.stack span { display: block; height: 100%; min-width: 0; }
.s0 { background: var(--s0); } .s1 { background: var(--s1); } .s2 { background: var(--s2); }
.s3 { background: var(--s3); } .s4 { background: var(--s4); } .s5 { background: var(--s5); }
.k-piece { background: var(--k-piece); } .k-character { background: var(--k-character); }
.k-byte { background: var(--k-byte); } .k-unknown { background: var(--k-unknown); }
.k-line { background: var(--k-line); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.5rem 2rem; }
figure { margin: 1.2rem 0 0; }
figure h2 { margin-top: 1.2rem; }
figcaption { font-size: .875rem; margin: 0 0 .5rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; font-family: inherit; font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .f0 { fill: var(--k-piece); } svg .f1 { fill: var(--k-byte); }
svg .curve { fill: none; stroke-width: 2.25; stroke-linejoin: round; stroke-linecap: round; }
svg .c0 { stroke: var(--s0); } svg .c1 { stroke: var(--s1); } svg .c2 { stroke: var(--s2); }
svg .c3 { stroke: var(--s3); } svg .c4 { stroke: var(--s4); } svg .c5 { stroke: var(--s5); }
.example { border: 1px solid var(--line); border-radius: .6rem; padding: .7rem .9rem .8rem; margin: .7rem 0; }
.cut { display: grid; grid-template-columns: 6.5rem 1fr; gap: 1rem; align-items: start; }
.cut + .cut { margin-top: .5rem; padding-top: .45rem; border-top: 1px dashed var(--line); }
.who { font-size: .8rem; line-height: 1.3; color: var(--soft); padding-top: .35rem; overflow-wrap: anywhere; }
.who strong { display: block; color: var(--ink); }
.line { font-size: 1.02rem; line-height: 1.95; white-space: pre-wrap; overflow-wrap: anywhere; }
.line span { border-radius: .2em; padding: .14em 0; -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.p0 { background: var(--p0); } .p1 { background: var(--p1); } .p2 { background: var(--p2); }
.p3 { background: var(--p3); } .p4 { background: var(--p4); }
.line .byte { box-shadow: inset 0 -2px 0 var(--k-byte); }
.line .unknown { box-shadow: inset 0 0 0 2px var(--k-unknown); }
.line .dropped { opacity: .55; }
.line sup { font-size: .62em; font-weight: 700; line-height: 0; padding: 0 .15em; color: var(--soft); }
i { font-style: normal; }
i.space { position: relative; white-space: pre-wrap; }
i.space::before { content: attr(data-mark); position: absolute; left: 0; right: 0; text-align: center; opacity: .5;
  pointer-events: none; }
i.control { font-size: .8em; color: var(--soft); }
.lists { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: 1rem 2.2rem;
  align-items: start; }
.lists td, .lists th { padding: .2rem .5rem; }
.lists thead th { border-bottom: 1px solid var(--soft); }
.piece { background: var(--card); border: 1px solid var(--line); border-radius: .25rem; padding: .02rem .35rem;
  white-space: normal; overflow-wrap: anywhere; }
.lists td.left { white-space: normal; }
summary { cursor: pointer; font-weight: 600; padding: .4rem 0; }
details p { margin-top: .4rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); padding: .6rem .8rem;
  border-radius: .4rem; font-size: .85rem; }
ul { padding-left: 1.2rem; } li { margin: .25rem 0; max-width: 46rem; }
@media (max-width: 40rem) {
  body { padding: 1.2rem .9rem 3rem; font-size: 15px; }
  h1 { font-size: 1.5rem; }
  .tiles { grid-template-columns: 1fr 1fr; gap: .5rem; }
  .tile { padding: .6rem .8rem; } .tile dd { font-size: 1.3rem; }
  .cut { grid-template-columns: 1fr; gap: .1rem; }
  .who { display: flex; justify-content: space-between; gap: 1rem; padding: 0; }
  .bars { grid-template-columns: 1fr; gap: .1rem; }
  .bars .name { max-width: none; margin-top: .35rem; color: var(--soft); }
  th, td { padding: .35rem .5rem; }
  svg text { font-size: 15px; }
}
@media print {
  :root {
    --paper: #fff; --card: #f6f7f9; --ink: #000; --soft: #444; --line: #ccc; --track: #eee;
    --p0: #cfe3ff; --p1: #ffe2b0; --p2: #c9efd6; --p3: #fbd3e6; --p4: #e2d8fb;
    --s0: #2563eb; --s1: #e08a00; --s2: #0f9d76; --s3: #a346d6; --s4: #d6336c; --s5: #64748b;
    --k-piece: #2563eb; --k-character: #7fb2f7; --k-byte: #e08a00; --k-unknown: #d92c20; --k-line: #b4bcc8;
    --bad: #b00; --good: #065;
  }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .wide { overflow: visible; }
  .tiles { grid-template-columns: repeat(6, 1fr); gap: .4rem; }
  .tile { padding: .5rem .6rem; } .tile dd { font-size: 1.15rem; }
  .wide td:first-child, .wide thead th:first-child, .group { position: static; }
  .lists { grid-template-columns: 1fr 1.25fr 1.1fr; gap: 1.2rem; }
  .lists td, .lists th { padding: .08rem .25rem; font-size: 7.5pt; }
  .charts { grid-template-columns: 1fr 1fr; }
  .group { max-width: none; }
  h2, h3 { break-after: avoid; }
  .example, figure, tr, .tile { break-inside: avoid; }
}
"""
