// Asking a run for something. The token is typed by a person and stays in this tab.

import { ask, RequestError } from "./api.js";
import { html } from "./draw.js";

const KEY = "longtail-token";
const ENDED = ["finished", "stopped", "failed"];

export class ControlPanel {
  constructor(section, currentRun) {
    this.section = section;
    this.currentRun = currentRun;
    this.token = sessionStorage.getItem(KEY) ?? "";
    this.answer = section.querySelector("#answer");
    this.actions = section.querySelector("#actions");
    this.strategy = section.querySelector("#strategy");
    section.querySelector("#token-form").addEventListener("submit", (e) => this.take(e));
    for (const button of this.actions.querySelectorAll("button")) {
      button.addEventListener("click", () => this.press(button.dataset.action));
    }
    this.actions.hidden = !this.token;
  }

  take(event) {
    event.preventDefault();
    const field = this.section.querySelector("#token");
    this.token = field.value.trim();
    field.value = "";
    sessionStorage.setItem(KEY, this.token);
    this.actions.hidden = !this.token;
    this.say(this.token ? "The token is sent with the next request." : "Without a token nothing can be asked.");
  }

  show(run) {
    const ended = ENDED.includes(run.status) || run.status === "silent";
    const paused = Boolean(run.progress?.control.paused);
    for (const button of this.actions.querySelectorAll("button")) {
      const action = button.dataset.action;
      button.disabled = ended || (action === "pause" && paused) || (action === "resume" && !paused);
    }
    const names = ["", ...run.strategies];
    if (this.strategy.dataset.key !== names.join()) {
      this.strategy.dataset.key = names.join();
      const chosen = run.progress?.control.forced ?? "";
      this.strategy.replaceChildren(...names.map((n) => html("option", { value: n }, n || "selector's choice")));
      this.strategy.value = chosen;
    }
    this.strategy.disabled = ended;
  }

  async press(action) {
    if (action === "stop" && !(await this.sure())) return;
    const body = action === "selector" ? { strategy: this.strategy.value || null } : undefined;
    this.say("Asking the run\u2026");
    try {
      const message = await ask(this.currentRun(), action, this.token, body);
      this.say(message[0].toUpperCase() + message.slice(1) + ".");
    } catch (error) {
      if (!(error instanceof RequestError)) throw error;
      this.say(error.status === 401 ? "That is not this server's token." : error.message, true);
    }
  }

  sure() {
    const dialog = document.querySelector("#sure");
    return new Promise((resolve) => {
      dialog.returnValue = "";
      dialog.addEventListener("close", () => resolve(dialog.returnValue === "stop"), { once: true });
      dialog.showModal();
    });
  }

  say(text, bad = false) {
    this.answer.textContent = text;
    this.answer.classList.toggle("bad", bad);
  }
}
