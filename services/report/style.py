"""The report's style sheet: two palettes by `prefers-color-scheme`, one layout from 340 px up."""

STYLE = """
:root{color-scheme:light dark;--bg:#f7f7f5;--card:#fff;--ink:#1c1f24;--soft:#5c636e;--rule:#e3e4e1;--grid:#ecedea;
--good:#1d7a4f;--bad:#b3261e;--flat:#6b7280;
--rollout:#3c6fb4;--draining:#9bbbe0;--idle:#d3d6da;--drafting:#e0912f;--policy:#7d62ad;--lost:#b3261e;--other:#8a8f98;
--track:#f0f1ee;--c1:#3c6fb4;--c2:#e0912f;--c3:#7a808a;--c4:#1d7a4f;--bar:#8fb0d9;--tail:#e0912f;
--reward:#58a08b;--publish:#c9b04a;--s1:#58a08b;--s2:#7d62ad;--s3:#c9b04a;--s4:#c06c84;--s5:#8a8f98}
@media (prefers-color-scheme:dark){:root{--bg:#14161a;--card:#1c1f25;--ink:#e8eaed;--soft:#9aa2ad;--rule:#2d3139;
--grid:#282c33;--good:#5cc493;--bad:#f2857b;--flat:#9aa2ad;
--rollout:#5c92da;--draining:#345680;--idle:#3d434d;--drafting:#eda54a;--policy:#a188d6;--lost:#f2857b;--other:#767d88;
--track:#23272e;--c1:#6ea3e8;--c2:#eda54a;--c3:#949ca8;--c4:#5cc493;--bar:#4f78ad;--tail:#eda54a;
--reward:#6cb8a1;--publish:#d8c063;--s1:#6cb8a1;--s2:#a188d6;--s3:#d8c063;--s4:#d98aa0;--s5:#767d88}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1240px;margin:0 auto;padding:32px 20px 56px}
header{margin-bottom:28px}
.eyebrow{margin:0;color:var(--soft);font-size:13px;overflow-wrap:anywhere}
h1{margin:6px 0 18px;font-size:clamp(21px,2.6vw,30px);line-height:1.25;font-weight:650;letter-spacing:-.012em;
max-width:34em;text-wrap:balance}
h2{margin:36px 0 12px;font-size:18px;font-weight:650;letter-spacing:-.005em}
h3{margin:0;font-size:15px;font-weight:650}
.findings{margin:0 0 22px;padding:0;list-style:none;max-width:62em}
.findings li{padding:3px 0 3px 20px;position:relative}
.findings li::before{content:"";
position:absolute;left:2px;top:11px;width:9px;height:9px;border-radius:50%;background:var(--flat)}
.findings .good::before{background:var(--good)}
.findings .bad::before{background:var(--bad);border-radius:1px}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(168px,1fr));gap:1px;margin:0;background:var(--rule);
border:1px solid var(--rule);border-radius:8px;overflow:hidden}
.figures div{background:var(--card);padding:14px 16px 12px}
.figures dt{color:var(--soft);font-size:12.5px;margin-bottom:2px}
.figures dd{margin:0}
.figures .v{font-size:21px;font-weight:620;letter-spacing:-.015em;font-variant-numeric:tabular-nums;white-space:nowrap}
.figures .v .arrow{color:var(--soft);font-weight:400;padding:0 .18em}
.figures .d{color:var(--soft);font-size:12.5px;line-height:1.4}
.good-t{color:var(--good)}.bad-t{color:var(--bad)}
.grid{display:grid;grid-template-columns:minmax(0,1fr);gap:16px}
@media (min-width:980px){.grid{grid-template-columns:repeat(2,minmax(0,1fr))}.full{grid-column:1/-1}}
.card{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:16px 18px 14px;min-width:0}
figcaption{margin-top:8px;color:var(--soft);font-size:13px;line-height:1.45;max-width:72em}
.none{color:var(--soft);margin:10px 0 4px}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:6px 0 8px;padding:0;list-style:none;font-size:12.5px;
color:var(--soft)}
.legend li{display:flex;align-items:center;gap:6px}
.sw{display:inline-block;width:11px;height:11px;border-radius:2px;flex:none}
.sw[class*=" l-"]{height:0;width:16px;border-radius:0;border-top:2.5px solid}
.sw.dash{border-top-style:dashed}.sw.faint{opacity:.45}
.sw.ev-sw{width:0;height:0;border-radius:0;border:5px solid transparent;
border-top:8px solid var(--soft);border-bottom:0}
svg{display:block;width:100%;height:auto;overflow:visible}
.full svg{max-width:none}.card:not(.full) .w svg{max-width:760px}
.n{display:none}@media (max-width:600px){.w{display:none}.n{display:block}main{padding:22px 12px 40px}
.card{padding:14px 12px 12px}
.figures{grid-template-columns:1fr 1fr}.figures div{padding:11px 12px 10px}.figures .v{font-size:18px}}
.t{font-size:11px;fill:var(--soft);font-variant-numeric:tabular-nums}.t.strong{fill:var(--ink)}
.t.end{font-size:12px;font-weight:600}.t.mark-t{fill:var(--ink)}
.grid-l,.grid{stroke:none}line.grid{stroke:var(--grid);stroke-width:1}.base{stroke:var(--rule);stroke-width:1.2}
.mark{stroke:var(--ink);stroke-width:1;stroke-dasharray:3 3;opacity:.65}.track{fill:var(--track)}
.ev{fill:var(--soft)}.ev.bad{fill:var(--bad)}.evline{stroke:var(--bad);stroke-width:1;opacity:.8}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}.line.dash{stroke-dasharray:6 5}
.line.faint{stroke-width:1.2;opacity:.4}.line.over{stroke-width:2}.line.halo{stroke:var(--card);stroke-width:4.5;opacity:.85}.whisker{stroke-width:1.4;opacity:.55}
.dot{stroke:var(--card);stroke-width:1.2}
path.c1,line.c1{stroke:var(--c1)}path.c2,line.c2{stroke:var(--c2)}path.c3,line.c3{stroke:var(--c3)}path.c4,line.c4{stroke:var(--c4)}
circle.c1{fill:var(--c1)}circle.c2{fill:var(--c2)}circle.c3{fill:var(--c3)}circle.c4{fill:var(--c4)}
.c1-t{fill:var(--c1)}.c2-t{fill:var(--c2)}.c3-t{fill:var(--c3)}.c4-t{fill:var(--c4)}
.l-c1{border-color:var(--c1)!important}.l-c2{border-color:var(--c2)!important}.l-c3{border-color:var(--c3)!important}
.l-c4{border-color:var(--c4)!important}.l-c-idle{border-color:var(--c3)!important}.l-c-draft{border-color:var(--drafting)!important}
path.c-idle{stroke:var(--c3)}circle.c-idle{fill:var(--c3)}path.c-draft{stroke:var(--drafting)}circle.c-draft{fill:var(--drafting)}
.r-rollout,.p-rollout{fill:var(--rollout);background:var(--rollout)}.r-draining{fill:var(--draining);background:var(--draining)}
.r-idle{fill:var(--idle);background:var(--idle)}.r-drafting{fill:var(--drafting);background:var(--drafting)}
.r-policy,.p-policy{fill:var(--policy);background:var(--policy)}.r-lost{fill:var(--lost);background:var(--lost)}
.r-other{fill:var(--other);background:var(--other)}
.p-reward,.r-reward{fill:var(--reward);background:var(--reward)}.p-publish{fill:var(--publish);background:var(--publish)}
.bar{fill:var(--bar);background:var(--bar)}.tail{fill:var(--tail);background:var(--tail)}
.s0{fill:var(--rollout);background:var(--rollout)}.s1{fill:var(--s1);background:var(--s1)}.s2{fill:var(--s2);background:var(--s2)}
.s3{fill:var(--s3);background:var(--s3)}.s4{fill:var(--s4);background:var(--s4)}.s5{fill:var(--s5);background:var(--s5)}
path.running{stroke:var(--ink);stroke-width:1.3;opacity:.75}.l-running{border-color:var(--ink)!important}
.findings.plain{margin-bottom:12px}.soff{fill:var(--idle);background:var(--idle)}
details{margin-top:10px;font-size:13px}
summary{cursor:pointer;color:var(--soft);width:max-content;max-width:100%}
summary:hover,summary:focus-visible{color:var(--ink)}
.scroll{overflow:auto;max-height:420px;margin-top:8px}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);padding:0 0 6px;font-size:12.5px}
th,td{padding:5px 14px 5px 0;text-align:left;border-bottom:1px solid var(--rule);vertical-align:top}
th{font-weight:600;white-space:nowrap;position:sticky;top:0;background:var(--card)}
td:last-child{overflow-wrap:anywhere}
.events td:nth-child(-n+3){white-space:nowrap}
@media (max-width:600px){.events thead{position:absolute;clip-path:inset(50%)}.events tr{display:flex;flex-wrap:wrap;
border-bottom:1px solid var(--rule);padding:5px 0}.events td{border:0;padding:1px 10px 1px 0}
.events td:last-child{flex-basis:100%}}
.warnings{margin:0;padding-left:20px}.warnings li{padding:2px 0;overflow-wrap:anywhere}
pre{margin:8px 0 0;overflow:auto;max-height:520px;font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
footer{margin-top:32px;color:var(--soft);font-size:12.5px}
@media print{.card{break-inside:avoid}}
"""
