// The charts beside the timeline. Each takes a card, rows of the API, and draws over what was there.

import { Frame, legend, number, seconds, show, svg } from "./draw.js";

const HEIGHT = 250;
const MAX_BARS = 60;
const PHASES = ["rollout", "reward", "policy", "publish"];

function placeOf(card) {
  return card.querySelector(".drawing");
}

function empty(card, text) {
  legend(card.querySelector(".legend"), []);
  const note = document.createElement("p");
  note.className = "none";
  note.textContent = text;
  placeOf(card).replaceChildren(note);
}

function pathOf(frame, points, stairs) {
  let out = "", down = false, last = 0;
  for (const [x, y] of points) {
    if (y === null || y === undefined) { down = false; continue; }
    const px = frame.px(x).toFixed(1), py = frame.py(y).toFixed(1);
    out += down ? (stairs ? `H${px}V${py}` : `L${px} ${py}`) : `M${px} ${py}`;
    down = true;
    last = px;
  }
  return out;
}

/** Positions close to `wanted`, at least `gap` apart, in the same order. */
function spread(wanted, gap, low, high) {
  const order = wanted.map((_, i) => i).sort((a, b) => wanted[a] - wanted[b]);
  const placed = wanted.slice();
  let at = low - gap;
  for (const i of order) at = placed[i] = Math.max(wanted[i], at + gap);
  let limit = high;
  for (const i of order.reverse()) {
    placed[i] = Math.min(placed[i], limit);
    limit = placed[i] - gap;
  }
  return placed;
}

/** `series`: {label, cls, points: [[x, y]], dash, dots}. `least`: the least height of the range of values. */
export function lines(card, series, { title, unit, least, digits = 2, whole = false, stairs = false, zero = false }) {
  const drawn = series.filter((s) => s.points.some(([, y]) => y !== null && y !== undefined));
  if (!drawn.length) return empty(card, "Nothing was recorded yet.");
  const known = drawn.map((s) => s.points.filter(([, y]) => y !== null && y !== undefined));
  const xs = known.flat().map(([x]) => x), ys = known.flat().map(([, y]) => y);
  const [low, high] = [Math.min(...xs), Math.max(...xs)];
  const [bottom, top] = [zero ? 0 : Math.min(...ys), Math.max(...ys)];
  const pad = Math.max(0.08 * (top - bottom), (least - (top - bottom)) / 2, 0);
  const aside = 0.02 * (high - low) || 1;
  const width = placeOf(card).clientWidth;
  const frame = new Frame(width, HEIGHT, [low - aside, high + aside], [zero ? 0 : bottom - pad, top + pad]);
  frame.yAxis(unit, whole);
  frame.xAxis("step", Math.max(3, width / 80), true);
  drawn.forEach((s, i) => {
    frame.node.append(svg("path", { d: pathOf(frame, s.points, stairs), class: `line ${s.cls} ${s.dash ? "dash" : ""}` }));
    if (s.dots || known[i].length === 1) {
      for (const [x, y] of known[i]) {
        const tip = svg("title", {}, `${s.label}, step ${x}: ${number(y, 3)}`);
        frame.node.append(svg("circle", { cx: frame.px(x), cy: frame.py(y), r: 3.6, class: `dot ${s.cls}` }, tip));
      }
    }
  });
  const ends = known.map((points) => points.at(-1));
  const spots = spread(ends.map(([, y]) => frame.py(y) + 4), 13, frame.top, HEIGHT - frame.bottom);
  drawn.forEach((s, i) => frame.text(frame.px(ends[i][0]) + 8, spots[i], number(ends[i][1], digits), `t end ${s.cls}-t`));
  const words = drawn.map((s, i) => `${s.label} from ${number(known[i][0][1], digits)} to ${number(ends[i][1], digits)}`);
  show(placeOf(card), frame.node, `${title}: ${words.join("; ")}`);
  legend(card.querySelector(".legend"), drawn.map((s) => [`l-${s.cls} ${s.dash ? "dash" : ""}`.trim(), s.label]));
}

export function histogram(card, lengths) {
  const caption = card.querySelector("figcaption");
  if (!lengths || !lengths.count) return empty(card, "No step has finished yet.");
  const top = Math.max(...lengths.bins.map((b) => b.count));
  const frame = new Frame(placeOf(card).clientWidth, HEIGHT, [0, lengths.bins.at(-1).high], [0, top * 1.08], { right: 14 });
  frame.yAxis("responses", true);
  for (const bin of lengths.bins) {
    const x = frame.px(bin.low - 1) + 1, width = frame.px(bin.high) - frame.px(bin.low - 1) - 2;
    const tip = `${bin.low} to ${bin.high} tokens: ${bin.count} responses, ${bin.truncated} of them cut off`;
    const cut = frame.py(bin.truncated), whole = frame.py(bin.count), base = frame.py(0);
    if (bin.count > bin.truncated) frame.rect(x, whole, width, cut - whole, "bar", tip);
    if (bin.truncated) frame.rect(x, cut, width, base - cut, "tail", tip);
  }
  frame.xAxis("tokens", 5);
  const facts = `median ${number(lengths.p50, 0)}, 99th percentile ${number(lengths.p99, 0)}, longest ${number(lengths.longest, 0)}`;
  caption.textContent = `Step ${lengths.step}: ${number(lengths.count, 0)} responses; ${facts} tokens.`;
  show(placeOf(card), frame.node, `Response lengths of step ${lengths.step}: ${facts} tokens`);
  legend(card.querySelector(".legend"), [["bar", "ended by itself"], ["tail", "cut off at the limit"]]);
}

export function stacks(card, steps) {
  const shown = steps.slice(-MAX_BARS);
  if (!shown.length) return empty(card, "No step has finished yet.");
  const sums = shown.map((s) => PHASES.reduce((sum, p) => sum + (s[`${p}_s`] ?? 0), 0));
  const width = placeOf(card).clientWidth;
  const frame = new Frame(width, HEIGHT, [0, shown.length], [0, Math.max(...sums, 1e-9) * 1.05], { right: 14 });
  frame.yAxis("seconds");
  const base = HEIGHT - frame.bottom;
  frame.line(frame.left, base, width - frame.right, base, "base");
  const every = Math.ceil((shown.length * 34) / (width - 60));
  shown.forEach((step, i) => {
    const start = frame.px(i), end = frame.px(i + 1), gap = Math.max(Math.min(4, (end - start) * 0.2), end - start - 56);
    let below = 0;
    for (const phase of PHASES) {
      const value = step[`${phase}_s`] ?? 0;
      if (value <= 0) continue;
      const y = frame.py(below + value);
      frame.rect(start + gap / 2, y, end - start - gap, frame.py(below) - y, `p-${phase}`, `step ${step.step}, ${phase}: ${seconds(value)}`);
      below += value;
    }
    if (i % every === 0) frame.text((start + end) / 2, base + 16, String(step.step), "t", "middle");
  });
  frame.text(width - frame.right, HEIGHT - 5, "step", "t unit", "end");
  const last = shown.at(-1);
  const words = PHASES.map((p) => `${p} ${seconds(last[`${p}_s`])}`).join(", ");
  show(placeOf(card), frame.node, `Seconds per step by phase; step ${last.step}: ${words}`);
  legend(card.querySelector(".legend"), PHASES.map((p) => [`p-${p}`, p]));
}
