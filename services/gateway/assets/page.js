// The page's loop: ask what is new, draw it, ask again.

import { get, RequestError, rowsSince } from "./api.js";
import { histogram, lines, stacks } from "./charts.js";
import { ControlPanel } from "./control.js";
import { fillTable, html, number, seconds } from "./draw.js";
import { isBad, Timeline } from "./timeline.js";

const POLL_MS = 1000, QUIET_MS = 10000, MOVE_MS = 500;
const SPANS_AT_FIRST = 20000, EVENTS_SHOWN = 100;
const ENDED = ["finished", "stopped", "failed", "silent"];
const $ = (id) => document.getElementById(id);

const timeline = new Timeline($("timeline"));
const state = { windowChosen: false, run: null, detail: null, asked: 0, lengthsOf: null, lengths: null, since: {}, rows: {} };
const panel = new ControlPanel($("control"), () => state.run);

function select(run) {
  Object.assign(state, { run, detail: null, lengthsOf: null, lengths: null, strategies: null, since: {}, rows: { steps: [], evaluations: [], events: [] } });
  timeline.reset();
}

async function readRuns() {
  const { runs, control } = await get("/runs");
  state.control = control;
  const wanted = new URLSearchParams(location.search).get("run");
  const known = runs.map((r) => r.run_id);
  const going = runs.find((r) => !ENDED.includes(r.status)) ?? runs[0];
  const run = known.includes(wanted) ? wanted : state.run && known.includes(state.run) ? state.run : going?.run_id;
  const key = runs.map((r) => r.run_id + r.status).join();
  if ($("runs").dataset.key !== key) {
    $("runs").dataset.key = key;
    $("runs").replaceChildren(...runs.map((r) => html("option", { value: r.run_id }, `${r.run_id} (${r.status})`)));
  }
  if (run && run !== state.run) select(run);
  $("runs").value = state.run ?? "";
  if (!run) $("headline").textContent = "There is no run here yet.";
}

async function readRows(name, total, from = 0) {
  const since = state.since[name] ?? from;
  if (since > total) return select(state.run); // the run began anew
  const answer = await rowsSince(state.run, name, since);
  state.since[name] = answer.next;
  return answer;
}

async function readRun() {
  const run = state.run, detail = await get(`/runs/${encodeURIComponent(run)}`);
  for (const [name, total] of [["steps", detail.num_steps_done], ["evaluations", detail.num_evaluations], ["events", detail.num_events]]) {
    if (total === (state.since[name] ?? 0)) continue;
    const answer = await readRows(name, total);
    if (run !== state.run || !answer) return;
    state.rows[name].push(...answer.items);
  }
  const spans = await readRows("spans", detail.num_spans, Math.max(0, detail.num_spans - SPANS_AT_FIRST));
  if (run !== state.run || !spans) return;
  timeline.add(spans.items);
  if (round % 5 === 1) state.strategies = await get(`/runs/${encodeURIComponent(run)}/strategies`);
  if (run !== state.run) return;
  const last = state.rows.steps.at(-1)?.step;
  if (last !== undefined && state.lengthsOf !== last) {
    state.lengths = await get(`/runs/${encodeURIComponent(run)}/lengths`);
    state.lengthsOf = state.lengths.step === last ? last : null; // its file may be a moment late
  }
  if (run !== state.run) return;
  Object.assign(timeline, { open: spans.open, events: state.rows.events, steps: state.rows.steps });
  Object.assign(state, { detail, asked: performance.now() });
}

// ------------------------------------------------------------------ drawing

/** Key, label, figure and the words below it, of each tile. While the run goes on, figures are of this moment. */
function tiles(detail) {
  const { totals, progress } = detail, live = progress && !ENDED.includes(detail.status) ? progress : null;
  const first = state.rows.evaluations[0]?.reward_mean ?? null, step = state.rows.steps.at(-1);
  const speed = totals.rollout_s ? totals.response_tokens / totals.rollout_s : null;
  const version = (kind) => Math.max(totals[kind], progress?.[kind] ?? 0);
  const used = totals.idle_s + totals.drafting_s, forced = live?.control.forced;
  const at = live ? `${Math.min(live.step, live.num_steps)} of ${live.num_steps}` : number(detail.num_steps_done, 0);
  return [
    ["step", "Step", at, `${seconds(detail.now_s)} ${live ? "so far" : "in all"}`],
    ["tokens", "Tokens per second", number(live ? live.tokens_per_s : speed, 0), live ? "in this phase" : "while generating"],
    ["acceptance", "Acceptance length", number(live?.acceptance_length ?? totals.acceptance_length),
      forced ? `forced: ${forced}` : "tokens per verify step"],
    ["lengths", "Response length", number(step?.response_len_p50, 0),
      step ? `median; longest ${number(step.response_len_max, 0)}` : "not measured"],
    ["reward", "Reward", number(totals.reward_mean, 3), step ? "last step" : "not measured"],
    ["heldout", "Held-out reward", number(totals.heldout_reward, 3),
      first === null ? "not measured" : `${number(first, 3)} at first`],
    ["versions", "Versions", `${version("policy_version")} / ${version("drafter_version")}`, "policy / drafter"],
    ["idle", "Idle time used", used ? `${number((100 * totals.drafting_s) / used, 0)}\u00a0%` : number(null),
      `${seconds(totals.drafting_s)} drafting`],
  ];
}

function drawFigures(detail) {
  for (const [key, label, value, note] of tiles(detail)) {
    let tile = document.querySelector(`#figures [data-key=${key}]`);
    if (!tile) {
      tile = html("div", { "data-key": key }, html("dt", {}, label), html("dd", { class: "v" }), html("dd", { class: "d" }));
      $("figures").append(tile);
    }
    const [v, d] = tile.querySelectorAll("dd");
    if (v.textContent !== value) v.textContent = value;
    if (d.textContent !== note) d.textContent = note;
  }
}

function headline(detail) {
  const p = detail.progress;
  if (detail.status === "failed") return `Failed: ${detail.error ?? "see its folder"}`;
  if (detail.status === "finished") return `Finished: ${number(detail.num_steps_done, 0)} steps in ${seconds(detail.now_s)}`;
  if (detail.status === "stopped") return `Stopped after ${number(detail.num_steps_done, 0)} steps`;
  if (detail.status === "silent") return "No sign of life: its process was killed, or cannot write its folder";
  if (detail.status === "paused") return `Paused after step ${detail.num_steps_done}`;
  if (p?.phase === "evaluation" || p?.phase === "comparison") return p.phase === "evaluation" ? "Held-out evaluation" : "Comparison, speculation off and on";
  return p?.step ? `Step ${p.step} of ${p.num_steps}` : "Starting";
}

function drawHead(detail) {
  const p = detail.progress, status = $("status");
  status.textContent = status.dataset.status = detail.status;
  const text = headline(detail);
  if ($("headline").textContent !== text) $("headline").textContent = text;
  document.title = `${text} \u00b7 Longtail`;
  $("report").hidden = !detail.has_report;
  $("report").href = `/runs/${encodeURIComponent(detail.run_id)}/report`;
  const live = p && !ENDED.includes(detail.status), total = live ? p.rollouts_total : 0;
  const done = total ? Math.min(1, p.rollouts_done / total) : live ? 0 : 1;
  $("progress").firstElementChild.style.transform = `scaleX(${done})`;
  $("progress").setAttribute("aria-valuenow", done.toFixed(2));
  const pending = live && p.control.paused && detail.status !== "paused" ? "; pauses after this step" : "";
  $("phase").textContent = live ? `${p.phase}${pending}` : detail.name;
  $("rollouts").textContent = live ? `${number(p.rollouts_done, 0)} of ${number(total, 0)} rollouts, ${number(p.rollouts_running, 0)} running` : `${number(detail.totals.rollouts, 0)} rollouts`;
}

function drawCharts() {
  const { steps, evaluations } = state.rows, by = (key) => steps.map((s) => [s.step, s[key]]);
  lines($("acceptance"), [
    { label: "live, measured by the engine", cls: "c1", points: by("acceptance_length") },
    { label: "live, offline", cls: "c2", points: by("acceptance_length_live_offline") },
    { label: "frozen first drafter, offline", cls: "c3", points: by("acceptance_length_frozen_offline"), dash: true },
  ], { title: "Acceptance length", unit: "tokens per verify step", least: 0.2 });
  lines($("reward"), [
    { label: "training mean per step", cls: "c1", points: by("reward_mean") },
    { label: "held-out", cls: "c4", points: evaluations.map((e) => [e.step, e.reward_mean]), dash: true, dots: true },
  ], { title: "Reward", unit: "mean reward", least: 0.1 });
  lines($("tail"), [
    { label: "median", cls: "c1", points: by("response_len_p50") },
    { label: "99th percentile", cls: "c3", points: by("response_len_p99") },
    { label: "longest", cls: "c2", points: by("response_len_max") },
  ], { title: "Response lengths", unit: "tokens", least: 1, digits: 0, zero: true });
  lines($("versions"), [
    { label: "policy", cls: "c1", points: by("policy_version") },
    { label: "drafter", cls: "c2", points: by("drafter_version") },
  ], { title: "Versions", unit: "version", least: 1, digits: 0, whole: true, stairs: true, zero: true });
  histogram($("lengths"), state.lengths);
  lines($("gain"), [
    { label: "predicted", cls: "c3", points: by("predicted_gain"), dash: true },
    { label: "achieved", cls: "c1", points: by("achieved_gain") },
  ], { title: "Gain over plain decoding", unit: "times as fast", least: 0.2 });
  stacks($("phases"), steps);
}

function drawStrategies() {
  const { sentences, buckets } = state.strategies ?? { sentences: [], buckets: [] };
  const words = $("strategies").querySelector("ul"), key = sentences.join();
  if (words.dataset.key !== key) {
    words.dataset.key = key;
    words.replaceChildren(...sentences.map((text) => html("li", {}, text)));
  }
  const names = [...new Set(buckets.flatMap((b) => Object.keys(b.share)))].sort();
  const share = (b, name) => (b.share[name] === undefined ? "" : `${number(100 * b.share[name], 0)}\u00a0%`);
  const rows = buckets.map((b) => [b.running, number(b.rounds, 0), ...names.map((name) => share(b, name))]);
  fillTable($("strategies").querySelector("table"), ["running", "rounds", ...names], rows.length ? rows : [["none told yet"]]);
}

function drawEvents() {
  const shown = state.rows.events.slice(-EVENTS_SHOWN).reverse();
  const rows = shown.map((e) => [`${number(e.at_s, 1)} s`, e.kind, e.subject, e.message]);
  fillTable($("events"), ["time", "event", "subject", "message"], rows.length ? rows : [["", "none yet", "", ""]], (row) => (isBad(row[1]) ? "bad-row" : ""));
}

function drawTimeline() {
  const { detail } = state;
  if (!detail) return;
  const moves = detail.status === "running" || detail.status === "paused";
  timeline.now = detail.now_s + (moves ? Math.min(3, (performance.now() - state.asked) / 1000) : 0);
  timeline.draw();
}

let drawn = "";
function draw() {
  const { detail, rows } = state;
  if (!detail) return;
  if (!state.windowChosen) showWindow(ENDED.includes(detail.status) ? 0 : 60);
  drawHead(detail);
  drawFigures(detail);
  $("control").hidden = !state.control || ENDED.includes(detail.status);
  panel.show(detail);
  drawTimeline();
  const key = [state.run, rows.steps.length, rows.evaluations.length, state.lengthsOf, innerWidth].join();
  if (key !== drawn) { drawn = key; drawCharts(); }
  drawEvents();
  drawStrategies();
}

// ------------------------------------------------------------------ the loop

let round = 0, wake = null;
async function look() {
  let pause = POLL_MS;
  try {
    if (round++ % 5 === 0 || !state.run) await readRuns();
    if (state.run) await readRun();
    $("link").textContent = "";
    if (document.hidden || (state.detail && ENDED.includes(state.detail.status))) pause = QUIET_MS;
  } catch (error) {
    if (!(error instanceof RequestError)) throw error; // a bug here, not the network
    if (error.status === 404) state.run = null;
    $("link").textContent = `${error.message} Trying again.`;
  }
  draw();
  await new Promise((resolve) => { wake = resolve; setTimeout(resolve, pause); });
  look();
}

function again() {
  round = 0;
  wake?.();
}

$("runs").addEventListener("change", () => {
  history.pushState(null, "", `?run=${encodeURIComponent($("runs").value)}`);
  again();
});
addEventListener("popstate", again);
document.addEventListener("visibilitychange", () => document.hidden || again());
for (const button of $("windows").children) {
  button.addEventListener("click", () => { state.windowChosen = true; showWindow(Number(button.dataset.seconds)); drawTimeline(); });
}
function showWindow(window) {
  timeline.window = window;
  for (const button of $("windows").children) button.setAttribute("aria-pressed", Number(button.dataset.seconds) === window);
}
$("timeline").querySelector("details").addEventListener("toggle", drawTimeline);
new ResizeObserver(() => draw()).observe($("timeline"));
setInterval(() => document.hidden || (state.detail && ENDED.includes(state.detail.status)) || drawTimeline(), MOVE_MS);
look();
