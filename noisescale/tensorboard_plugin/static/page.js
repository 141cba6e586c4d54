// SPDX-License-Identifier: Apache-2.0
// The page: a form with the runs at the left, and beside it what the server says to what the form holds.

import {answers, element, labelled, listed, replaceIn, setColours, setOptions, table} from "./dom.js";
import {drawFigure, eraseFigure} from "./figures.js";
import {isDark, readState, writeState} from "./host.js";
import {RunsList} from "./runs_list.js";

const TYPING_MILLISECONDS = 250;

const NO_RUN = "No run here has the noise scale yet. Add NoiseScaleMonitor() to the callbacks of your" +
  " Trainer: a run appears here when it has logged once.";
const NONE_CHOSEN = "No run is chosen. Check one in the list of runs.";

const FIELDS = [
  {name: "devices", label: "Numbers of devices", hint: "such as 1, 2, 4. Empty: the run's, doubled"},
  {name: "price", label: "Price of a device-hour", hint: "in any currency"},
  {name: "kappa", label: "Calibration kappa", hint: "B_crit = kappa x B_simple. Empty: that of the optimizer's kind"},
];

export class Page {
  constructor() {
    this.asked = 0; // Questions are numbered, so that a late answer to an early one is dropped.
    this.canDraw = false; // until the figures' library is there
    this.fault = ""; // why it cannot be loaded
    this.printing = false;
    this.released = null; // the end of a drag in a figure
    this.same = null; // the answer that is shown
    this.drawn = []; // Figures with their elements.
    this.runs = new RunsList(() => this.changed());
    this.across = element("select", {name: "across"});
    setOptions(this.across, [{value: "step", text: "steps"}, {value: "examples", text: "examples"}]);
    this.acrossField = labelled("Compare runs at equal", this.across);
    this.wantedDetail = null; // the id of the run whose answers the reader asked for
    this.detail = element("select", {name: "detail"});
    this.detail.addEventListener("input", () => { this.wantedDetail = this.detail.value; });
    this.detailField = labelled("Answers for", this.detail);
    this.fields = FIELDS.map(({name, label, hint}) => {
      const inputMode = name === "devices" ? "text" : "decimal";
      const input = element("input", {name, inputMode, autocomplete: "off"});
      return {name, input, field: labelled(label, input, hint)};
    });
    const own = [this.acrossField, this.detailField, ...this.fields.map(({field}) => field)];
    this.form = element("form", {}, this.runs.root, ...own);
    this.form.addEventListener("submit", (event) => event.preventDefault());
    for (const field of own) field.addEventListener("input", () => this.changed());
    this.summary = element("summary", {}, "Runs and settings");
    this.controls = element("details", {id: "controls"}, this.summary, this.form);
    const wide = matchMedia("(min-width: 861px)");
    this.controls.open = wide.matches;
    wide.addEventListener("change", () => { this.controls.open = wide.matches; });
    this.status = element("p", {id: "status"});
    this.status.setAttribute("role", "status");
    this.results = element("div", {id: "results"});
    this.results.addEventListener("pointerdown", () => this.hold());
    this.main = element("main", {}, this.status, this.results);
    this.root = element("div", {id: "page"}, this.controls, this.main);
    this.controls.hidden = true;
    this.setTheme();
    this.say("Loading the runs ...", "busy");
    this.read(readState());
  }

  get state() {
    const values = this.fields.map(({name, input}) => [name, input.value.trim() || null]);
    const across = this.across.value === "step" ? null : this.across.value;
    return {...this.runs.state, across, detail: this.wantedDetail, ...Object.fromEntries(values)};
  }

  read(state) {
    this.runs.read(state);
    this.across.value = state.across || "step";
    this.wantedDetail = state.detail || null;
    for (const {name, input} of this.fields) input.value = state[name] || "";
  }

  async readState() {
    this.read(readState());
    await this.redraw();
  }

  setTheme() {
    document.documentElement.dataset.theme = isDark() ? "dark" : "light";
    this.drawFigures();
  }

  print(printing) {
    this.printing = printing;
    this.drawFigures();
  }

  hold() {
    this.released = new Promise((resolve) => {
      const release = () => setTimeout(() => { // when the figure has seen it too
        this.released = null;
        resolve();
      });
      for (const end of ["pointerup", "pointercancel"]) addEventListener(end, release, {once: true, capture: true});
    });
  }

  async refresh() {
    if (this.pending) return; // A poll does not replace the answer under way: a slow one would never show.
    const runs = await ask("./runs");
    if (runs.error) {
      this.say(runs.error, "error");
      this.results.className = "old";
      return;
    }
    this.runs.set(runs);
    await this.redraw({quietly: this.same !== null}); // nobody waits for this answer
  }

  changed() {
    this.asked++; // An answer under way is to what the form held before.
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.redraw(), TYPING_MILLISECONDS);
  }

  async redraw({quietly = false} = {}) {
    const number = ++this.asked;
    const shown = this.runs.shown();
    const isEmpty = !this.runs.runs.length;
    this.runs.draw();
    this.controls.hidden = isEmpty;
    this.offer(shown);
    if (!isEmpty) writeState(this.state);
    if (!shown.length) {
      this.clear();
      this.say(isEmpty ? NO_RUN : NONE_CHOSEN);
      return;
    }
    const slow = quietly ? null : setTimeout(() => this.say("Computing ...", "busy"), TYPING_MILLISECONDS);
    this.pending = number;
    const found = await this.answered(shown);
    if (this.pending === number) this.pending = null;
    clearTimeout(slow);
    await this.released; // A drawing would end the zoom that is being dragged.
    if (number !== this.asked) return;
    if (found.error) {
      const of = shown.map(({id}) => id).join();
      if (of !== this.of) this.clear(); // else what was drawn stays, faded: it answers an earlier question
      this.results.className = "old";
      this.say(found.error, "error");
      return;
    }
    this.say(this.fault, this.fault && "error");
    this.results.className = "";
    this.of = shown.map(({id}) => id).join();
    const same = JSON.stringify([this.detail.value, found]);
    if (same === this.same) return;
    this.same = same;
    this.draw(shown, found);
  }

  offer(shown) {
    setOptions(this.detail, shown.map(({id, name}) => ({value: id, text: name})));
    const wanted = shown.find(({id}) => id === this.wantedDetail) || shown[0];
    if (wanted) this.detail.value = wanted.id;
    this.acrossField.hidden = this.detailField.hidden = shown.length < 2;
    this.summary.textContent = `Runs and settings (${this.runs.count.textContent})`;
  }

  /** What the server says of the chosen runs together, and of one of them. */
  async answered(shown) {
    const values = this.fields.map(({name, input}) => [name, input.value]);
    const common = new URLSearchParams(values).toString();
    const one = ask(`./prediction?${this.detail.value}&${common}`);
    if (shown.length === 1) return {one: await one, error: (await one).error};
    const of = new URLSearchParams([["across", this.across.value], ...shown.map(({id}) => ["of", id])]);
    const all = await ask(`./comparison?${of}&${common}`);
    // Where one run has no answer the others are still compared.
    return {all, one: await one, error: all.error};
  }

  draw(shown, {all, one}) {
    const parts = [];
    const before = this.drawn.map(({drawing}) => drawing);
    this.drawn = [];
    if (all) {
      parts.push(...all.figures.map((figure) => this.place(figure, all, shown)));
      parts.push(...table(all.table, (name, k) => this.nameIn(shown[k], name)));
      parts.push(...listed("", all.warnings, "warnings"));
      parts.push(element("h1", {}, one.name || this.detail.selectedOptions[0].text));
    }
    if (one.error) {
      parts.push(element("p", {className: "error"}, one.error));
    } else {
      parts.push(element("p", {className: "headline"}, one.headline));
      if (one.lead) parts.push(element("p", {className: "lead"}, one.lead));
      if (one.summary) parts.push(...table(one.summary));
      parts.push(answers(one.answers));
      parts.push(...one.next.map((step) => element("p", {className: "next"}, step)));
      parts.push(...listed("Warnings", one.warnings, "warnings"));
      parts.push(...one.figures.map((figure) => this.place(figure, one, [{id: this.detail.value}])));
      parts.push(...one.tables.flatMap((each) => table(each)));
      parts.push(...listed("Assumptions", one.assumptions, "assumptions"));
    }
    replaceIn(this.results, parts);
    before.filter((drawing) => !drawing.isConnected).forEach(eraseFigure);
    this.drawFigures();
  }

  /** The name of a run in the table: a button that shows its answers. */
  nameIn({id, colours}, name) {
    const dot = element("span", {className: "dot"});
    setColours(dot, colours);
    const button = element("button", {type: "button", title: `Answers for ${name}`}, dot, name);
    button.dataset.key = id;
    if (id === this.detail.value) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => {
      this.wantedDetail = id;
      this.changed();
    });
    return button;
  }

  place(figure, answer, of) {
    // Kept from one drawing to the next: it holds the zoom.
    const old = document.getElementById(figure.id);
    const drawing = old || element("div", {id: figure.id});
    drawing.style.height = `${figure.drawing.layout.height}px`;
    drawing.setAttribute("role", "img");
    drawing.setAttribute("aria-label", `${figure.finding}. The tables below have its numbers.`);
    // A zoom is kept until the figure is of something else.
    const axes = [figure.drawing.layout.xaxis, figure.drawing.layout.yaxis].map(({title}) => title.text);
    const revision = [...of.map(({id}) => id), ...axes].join("\n");
    this.drawn.push({drawing, figure: figure.drawing, answer, revision});
    return element("section", {},
      element("h2", {}, figure.heading),
      element("p", {className: "finding"}, figure.finding),
      element("p", {className: "caption"}, figure.caption),
      element("figure", {}, drawing));
  }

  drawFigures() {
    if (!this.canDraw) return;
    const {printing} = this;
    for (const {drawing, figure, answer: {settings, dark}, revision} of this.drawn) {
      drawFigure(drawing, figure, {settings, colours: isDark() && !printing ? dark : null, printing, revision});
    }
  }

  clear() {
    this.results.replaceChildren();
    this.drawn.forEach(({drawing}) => eraseFigure(drawing));
    this.drawn = [];
    this.same = this.of = null;
  }

  say(text, kind = "") {
    if (this.status.textContent !== text) this.status.textContent = text; // else it is read out again
    this.status.className = kind;
  }
}

async function ask(path) {
  try {
    const reply = await fetch(path);
    if (!reply.headers.get("Content-Type").startsWith("application/json")) {
      return {error: `TensorBoard answered ${reply.status}: ${await reply.text()}`};
    }
    return await reply.json();
  } catch (error) {
    return {error: `TensorBoard does not answer (${error.message}). Is it still running?`};
  }
}
