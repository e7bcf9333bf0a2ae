// The slot timeline: a row per slot, a colour per role, the right edge is now.

import { fillTable, Frame, html, legend, number, seconds, svg } from "./draw.js";

const ROLES = ["rollout", "draining", "idle", "drafting", "policy", "lost", "reward"];
const ROW = 32, BAR = 22, TOP = 26, BOTTOM = 40;
const BAD = /(lost|gone|mismatch|failed)$/; // endings of event kinds that deserve red
const HINT = "Point at the drawing, or go through it with the arrow keys.";
const KEPT = 20000; // spans; older ones leave the drawing

export const isBad = (kind) => BAD.test(kind);
const cls = (role) => `r-${ROLES.includes(role) ? role : "other"}`;

export class Timeline {
  constructor(card) {
    this.card = card;
    this.place = card.querySelector("#rows");
    this.told = card.querySelector("#told");
    this.window = 60;
    this.told.textContent = HINT;
    this.reset();
    this.place.addEventListener("pointermove", (e) => this.point(e));
    this.place.addEventListener("pointerleave", () => this.choose(null));
    this.place.addEventListener("keydown", (e) => this.key(e));
    this.place.addEventListener("blur", () => this.choose(null));
  }

  reset() {
    Object.assign(this, { spans: new Map(), open: [], events: [], steps: [], now: 0, count: 0, cut: false, chosen: null });
  }

  add(items) {
    for (const span of items) {
      if (!this.spans.has(span.slot)) this.spans.set(span.slot, []);
      this.spans.get(span.slot).push(span);
      this.count++;
    }
    for (const list of this.spans.values()) {
      const most = Math.ceil(KEPT / this.spans.size);
      if (list.length > most) { list.splice(0, list.length - most); this.cut = true; }
    }
  }

  get slots() {
    const names = new Set([...this.spans.keys(), ...this.open.map((s) => s.slot)]);
    const slot = (name) => (name.startsWith("slot") ? 0 : 1);
    return [...names].sort((a, b) => slot(a) - slot(b) || a.localeCompare(b, "en", { numeric: true }));
  }

  /** Spans of one slot, the one that goes on included, up to now. */
  of(slot) {
    const closed = this.spans.get(slot) ?? [];
    const going = this.open.filter((s) => s.slot === slot && s.start_s < this.now).map((s) => ({ ...s, end_s: this.now, label: "", going: true }));
    return [...closed, ...going];
  }

  get range() {
    const first = Math.min(...[...this.spans.values()].map((list) => list[0]?.start_s ?? 0), this.now);
    const start = this.window ? Math.max(this.now - this.window, 0) : this.cut ? first : 0;
    return [start, Math.max(this.now, start + (this.window || 1))];
  }

  draw() {
    const slots = this.slots, width = this.place.clientWidth;
    if (!width) return;
    const height = TOP + ROW * Math.max(1, slots.length) + BOTTOM;
    const left = 12 + 6.4 * Math.max(6, ...slots.map((s) => Math.min(s.length, 18)));
    const frame = (this.frame = new Frame(width, height, this.range, [0, 1], { left, right: 12, bottom: BOTTOM }));
    this.totals = new Map();
    this.drawSteps(frame);
    slots.forEach((slot, i) => this.drawRow(frame, slot, i));
    this.drawEvents(frame);
    frame.xAxis("seconds since the start", Math.max(3, Math.floor(width / 140)));
    frame.line(frame.px(this.now), TOP - 4, frame.px(this.now), height - BOTTOM, "nowline");
    frame.node.setAttribute("aria-hidden", "true"); // the widget around it speaks
    this.place.replaceChildren(frame.node);
    this.drawChosen();
    this.drawLegend();
    this.drawTable(slots);
  }

  drawRow(frame, slot, i) {
    const y = TOP + ROW * i + (ROW - BAR) / 2;
    frame.text(frame.left - 8, y + BAR / 2 + 4, slot.length > 18 ? `${slot.slice(0, 17)}\u2026` : slot, "t strong", "end");
    frame.rect(frame.left, y, frame.width - frame.left - frame.right, BAR, "track");
    const paths = new Map();
    let last = null;
    const flush = () => {
      if (!last) return;
      const path = `M${last.x.toFixed(1)} ${y}h${Math.max(0.6, last.end - last.x).toFixed(1)}v${BAR}H${last.x.toFixed(1)}z`;
      paths.set(last.role, (paths.get(last.role) ?? "") + path);
    };
    for (const span of this.of(slot)) {
      const start = Math.max(span.start_s, frame.x[0]), end = Math.min(span.end_s, frame.x[1]);
      if (end <= start) continue;
      if (slot.startsWith("slot")) this.totals.set(span.role, (this.totals.get(span.role) ?? 0) + end - start);
      const x = frame.px(start), to = frame.px(end);
      if (last && last.role === span.role && x - last.end < 0.4) last.end = Math.max(last.end, to);
      else { flush(); last = { role: span.role, x, end: to }; }
    }
    flush();
    for (const [role, d] of paths) frame.node.append(svg("path", { d, class: cls(role), "data-slot": slot, "data-role": role }));
  }

  drawSteps(frame) {
    let free = frame.left;
    for (const step of this.steps) {
      if (step.at_s < frame.x[0] || step.at_s > frame.x[1]) continue;
      const x = frame.px(step.at_s), text = `step ${step.step}`;
      if (x - 6.2 * text.length < free) continue;
      frame.line(x, 8, x, frame.height - frame.bottom, "grid");
      frame.text(x - 4, 10, text, "t", "end");
      free = x + 10;
    }
  }

  drawEvents(frame) {
    for (const event of this.events) {
      if (event.at_s < frame.x[0] || event.at_s > frame.x[1]) continue;
      const x = frame.px(event.at_s), bad = isBad(event.kind);
      if (bad) frame.line(x, TOP - 4, x, frame.height - frame.bottom, "evline");
      const tip = svg("title", {}, `${number(event.at_s)} s ${event.kind} ${event.subject}: ${event.message}`);
      frame.node.append(svg("path", { d: `M${x - 4} 15h8l-4 7z`, class: bad ? "ev bad" : "ev" }, tip));
    }
  }

  drawLegend() {
    const whole = [...this.totals.values()].reduce((a, b) => a + b, 0);
    const used = new Set([...this.slots.flatMap((s) => (this.spans.get(s) ?? []).slice(-50).map((x) => x.role)), ...this.totals.keys()]);
    const share = (role) => (this.totals.has(role) && whole ? ` ${Math.round((100 * this.totals.get(role)) / whole)}\u00a0%` : "");
    const entries = ROLES.filter((r) => used.has(r)).map((r) => [cls(r), r + share(r)]);
    if (this.events.length) entries.push(["ev-sw", "event"]);
    legend(this.card.querySelector("#roles"), entries);
  }

  drawTable(slots) {
    const table = this.card.querySelector("#seconds");
    if (!table.closest("details").open) return;
    const rows = slots.map((slot) => {
      const sums = new Map();
      for (const s of this.of(slot)) sums.set(s.role, (sums.get(s.role) ?? 0) + s.end_s - s.start_s);
      return [slot, ...ROLES.map((role) => number(sums.get(role) ?? 0, 1))];
    });
    fillTable(table, ["slot", ...ROLES], rows);
  }

  // ---------------------------------------------------------------- pointing at a span

  choose(span, polite = false) {
    this.told.setAttribute("aria-live", polite ? "polite" : "off");
    this.chosen = span;
    this.drawChosen();
    const what = span && `${span.slot}: ${span.role} ${number(span.start_s)}\u2013${span.going ? "now" : number(span.end_s)} s`;
    this.told.textContent = span ? `${what} (${seconds(span.end_s - span.start_s)}) ${span.label}` : HINT;
  }

  drawChosen() {
    this.frame?.node.querySelector(".chosen")?.remove();
    const span = this.chosen, i = span ? this.slots.indexOf(span.slot) : -1;
    if (i < 0) return;
    const [low, high] = this.frame.x;
    if (span.end_s < low || span.start_s > high) return;
    const x = this.frame.px(Math.max(span.start_s, low)), end = this.frame.px(Math.min(span.end_s, high));
    this.frame.rect(x, TOP + ROW * i + (ROW - BAR) / 2, Math.max(2, end - x), BAR, "chosen");
  }

  at(slot, time) {
    return this.of(slot).findLast((s) => s.start_s <= time && time <= s.end_s) ?? null;
  }

  point(event) {
    const box = this.place.getBoundingClientRect(), [low, high] = this.frame.x;
    const row = Math.floor((event.clientY - box.top - TOP) / ROW), slot = this.slots[row];
    const across = (event.clientX - box.left - this.frame.left) / (this.frame.width - this.frame.left - this.frame.right);
    this.choose(slot ? this.at(slot, low + across * (high - low)) : null);
  }

  key(event) {
    const slots = this.slots;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-Infinity, 0], End: [Infinity, 0] };
    const move = moves[event.key];
    if (!move || !slots.length) return;
    event.preventDefault();
    if (!this.chosen) return this.choose(this.of(slots[0]).at(-1) ?? null, true);
    const row = Math.min(slots.length - 1, Math.max(0, slots.indexOf(this.chosen.slot) + move[1]));
    if (move[1]) return this.choose(this.at(slots[row], (this.chosen.start_s + this.chosen.end_s) / 2) ?? this.of(slots[row]).at(-1), true);
    const list = this.of(this.chosen.slot), here = list.findIndex((s) => s.start_s === this.chosen.start_s);
    this.choose(list[Math.min(list.length - 1, Math.max(0, here + move[0]))], true);
  }
}
