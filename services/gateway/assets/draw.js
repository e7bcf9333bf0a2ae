// Numbers as the report writes them, and the primitives that every chart shares.

const NS = "http://www.w3.org/2000/svg";
export const NONE = "\u2013";

export function number(value, digits = 2) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const [whole, part] = Math.abs(value).toFixed(digits).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, "\u202f");
  return (value < 0 ? "\u2212" : "") + grouped + (part ? `.${part}` : "");
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const total = Math.round(value), two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(total / 3600), minutes = Math.floor(total / 60) % 60;
  return hours ? `${hours} h ${two(minutes)} min` : `${minutes} min ${two(total % 60)} s`;
}

export function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export function html(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** About `count` round values inside [low, high]. */
export function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k <= Math.floor(high / step + 1e-9); k++) out.push(k * step);
  return out;
}

export function tickLabel(value, step) {
  const digits = step >= 1 && Number.isInteger(step) ? 0 : Math.max(1, -Math.floor(Math.log10(step) + 1e-9));
  const more = (step * 10 ** digits) % 1 > 1e-6 && digits < 6 ? 1 : 0;
  return number(value, digits + more);
}

/** A drawing with axes; `x` and `y` are ranges of data. */
export class Frame {
  constructor(width, height, x, y, { left = 44, right = 48, top = 26, bottom = 38 } = {}) {
    Object.assign(this, { width, height, x, y, left, right, top, bottom });
    this.node = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
  }
  px(value) {
    return this.left + ((value - this.x[0]) / (this.x[1] - this.x[0] || 1)) * (this.width - this.left - this.right);
  }
  py(value) {
    const span = this.height - this.top - this.bottom;
    return this.height - this.bottom - ((value - this.y[0]) / (this.y[1] - this.y[0] || 1)) * span;
  }
  text(x, y, text, cls = "t", anchor = "start") {
    this.node.append(svg("text", { x: x.toFixed(1), y: y.toFixed(1), class: cls, "text-anchor": anchor }, text));
  }
  line(x1, y1, x2, y2, cls) {
    this.node.append(svg("line", { x1: x1.toFixed(1), y1: y1.toFixed(1), x2: x2.toFixed(1), y2: y2.toFixed(1), class: cls }));
  }
  rect(x, y, width, height, cls, tip) {
    const attributes = { x: x.toFixed(2), y: y.toFixed(1), width: Math.max(0, width).toFixed(2), height: Math.max(0, height).toFixed(1) };
    this.node.append(svg("rect", { ...attributes, class: cls }, ...(tip ? [svg("title", {}, tip)] : [])));
  }
  yAxis(unit, whole = false) {
    const values = ticks(...this.y, 4).filter((v) => !whole || Number.isInteger(v));
    const step = values.length > 1 ? values[1] - values[0] : 1;
    for (const value of values) {
      this.line(this.left, this.py(value), this.width - this.right, this.py(value), value === this.y[0] ? "base" : "grid");
      this.text(this.left - 7, this.py(value) + 3.8, tickLabel(value, step), "t", "end");
    }
    this.text(2, 12, unit, "t unit");
  }
  xAxis(unit, count, whole = false) {
    const bottom = this.height - this.bottom;
    this.line(this.left, bottom, this.width - this.right, bottom, "base");
    let values = ticks(...this.x, count);
    if (whole) values = [...new Set(values.map(Math.round))].filter((v) => v >= this.x[0] && v <= this.x[1]);
    const step = values.length > 1 ? values[1] - values[0] : 1;
    for (const value of values) this.text(this.px(value), bottom + 16, tickLabel(value, step), "t", "middle");
    this.text(this.width - this.right, this.height - 5, unit, "t unit", "end");
  }
}

/** Swap a drawing in place: nothing jumps, because the old one stays until the new one is whole. */
export function show(place, node, label) {
  node.setAttribute("aria-label", label);
  place.replaceChildren(node);
}

export function legend(list, entries) {
  const key = JSON.stringify(entries);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...entries.map(([cls, label]) => html("li", {}, html("i", { class: `sw ${cls}` }), label)));
}

/** What a table shows, cell by cell, from texts alone. */
export function fillTable(table, head, rows, rowClass = () => "") {
  const key = JSON.stringify(rows);
  if (table.dataset.key === key) return;
  table.dataset.key = key;
  const body = rows.map((row) => html("tr", { class: rowClass(row) }, ...row.map((cell) => html("td", {}, cell))));
  table.replaceChildren(
    html("thead", {}, html("tr", {}, ...head.map((cell) => html("th", { scope: "col" }, cell)))),
    html("tbody", {}, ...body),
  );
}
