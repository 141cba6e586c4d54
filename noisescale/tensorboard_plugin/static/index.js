// SPDX-License-Identifier: Apache-2.0
// The page "Noise scale": a form, and below it what the server says to it. TensorBoard calls render().

import {drawFigure} from "./figure.js";

const POLL_MILLISECONDS = 10000;
const TYPING_MILLISECONDS = 250;

const NOTHING_YET = "No run here has the noise scale yet. Add NoiseScaleMonitor() to the callbacks of your" +
  " Trainer: a run appears here when it has logged once.";

const FIELDS = [
  {name: "devices", label: "Numbers of devices", hint: "such as 1, 2, 4; empty: the run's, doubled"},
  {name: "price", label: "Price of a device-hour", hint: "in any currency"},
  {name: "worth", label: "Worth of an hour of yours", hint: "in the same; with the price it moves the recommendation"},
  {name: "kappa", label: "Calibration kappa", hint: "B_crit = kappa x B_simple; empty: 1, the theory"},
];

export async function render() {
  document.documentElement.lang = "en";
  document.head.append(element("link", {rel: "stylesheet", href: "./style.css"}));
  const page = new Page();
  document.body.append(page.root);
  try {
    await loadScript("./plotly.js");
  } catch (error) {
    page.say(error.message, "error");
    return;
  }
  const refresh = () => isVisible() && page.refresh();
  await page.refresh();
  setInterval(refresh, POLL_MILLISECONDS);
  document.addEventListener("visibilitychange", refresh);
  let wasVisible = isVisible();
  window.addEventListener("resize", () => {
    if (!wasVisible) refresh();
    wasVisible = isVisible();
  });
}

function isVisible() {
  // TensorBoard keeps the frame of a tab that is not open, without height.
  return !document.hidden && window.innerHeight > 0;
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

class Page {
  constructor() {
    this.asked = 0; // Questions are numbered, so that a late answer to an early one is dropped.
    this.runs = [];
    this.shown = null; // What was drawn last, and of which run.
    this.drawnRun = null;
    this.run = element("select", {name: "run"});
    this.monitor = element("select", {name: "monitor"});
    this.monitorField = labelled("Monitor", this.monitor);
    this.optimizer = element("select", {name: "optimizer"});
    this.optimizerField = labelled("Optimizer", this.optimizer);
    const fields = FIELDS.map(({name, label, hint}) => {
      const decimal = name === "devices" ? "text" : "decimal";
      return labelled(label, element("input", {name, inputMode: decimal, autocomplete: "off"}), hint);
    });
    this.form = element("form", {}, labelled("Run", this.run), this.monitorField, this.optimizerField, ...fields);
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", (event) => this.changed(event));
    this.status = element("p", {id: "status"});
    this.status.setAttribute("role", "status");
    this.results = element("div", {id: "results"});
    this.root = element("div", {id: "page"}, this.form, element("main", {}, this.status, this.results));
  }

  async refresh() {
    const runs = await ask("./runs");
    if (runs.error) {
      this.fail(runs.error);
      return;
    }
    this.runs = runs;
    setOptions(this.run, runs.map(({name}) => name));
    this.listMeasured();
    await this.redraw();
  }

  listMeasured() {
    const run = this.runs.find(({name}) => name === this.run.value);
    const monitors = run ? run.monitors : [];
    const names = monitors.map(({name}) => name);
    setOptions(this.monitor, names, (name) => name || "without a name");
    this.monitorField.hidden = names.length < 2;
    const monitor = monitors.find(({name}) => name === this.monitor.value);
    const numbers = monitor ? monitor.optimizers : [];
    setOptions(this.optimizer, numbers.map(String));
    this.optimizerField.hidden = numbers.length < 2;
  }

  changed(event) {
    if (event.target === this.run || event.target === this.monitor) this.listMeasured();
    this.asked++; // An answer under way is to what the form held before.
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.redraw(), TYPING_MILLISECONDS);
  }

  async redraw() {
    this.form.hidden = !this.runs.length;
    if (!this.runs.length) {
      this.clear();
      this.say(NOTHING_YET);
      return;
    }
    const number = ++this.asked;
    const answer = await ask(`./prediction?${new URLSearchParams(new FormData(this.form))}`);
    if (number !== this.asked) return;
    if (answer.error) {
      this.fail(answer.error);
      return;
    }
    this.say("");
    this.results.className = "";
    const same = JSON.stringify(answer);
    if (same === this.shown && this.drawnRun === this.run.value) return;
    this.shown = same;
    this.drawnRun = this.run.value;
    this.draw(answer);
  }

  fail(message) {
    if (this.drawnRun !== this.run.value) this.clear();
    this.results.className = "old"; // What was drawn stays, faded: it answers an earlier question.
    this.say(message, "error");
  }

  clear() {
    this.results.replaceChildren();
    this.shown = this.drawnRun = null;
  }

  say(text, kind = "") {
    if (this.status.textContent !== text) this.status.textContent = text; // else it is read out again
    this.status.className = kind;
  }

  draw({headline, figures, settings, tables, warnings, assumptions}) {
    const answers = headline.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]);
    const places = figures.map((figure) => this.place(figure));
    this.results.replaceChildren(
      element("dl", {}, ...answers),
      ...listed("Warnings", warnings, "warnings"),
      ...places.flat(),
      ...tables.flatMap(table),
      ...listed("Assumptions", assumptions, "assumptions"),
    );
    for (const figure of figures) {
      // A zoom is kept until the figure is of something else.
      const axes = [figure.layout.xaxis, figure.layout.yaxis].map(({title}) => title.text);
      const revision = [this.run.value, this.monitor.value, this.optimizer.value, ...axes].join("\n");
      drawFigure(document.getElementById(figure.id), figure, settings, revision);
    }
  }

  place({id, title, layout}) {
    // Kept from one drawing to the next: it holds the zoom.
    const old = document.getElementById(id);
    const drawing = old || element("div", {id});
    drawing.style.height = `${layout.height || 420}px`;
    drawing.setAttribute("role", "img");
    drawing.setAttribute("aria-label", `${title}. The tables below have its numbers.`);
    return [element("h2", {}, title), element("figure", {}, drawing)];
  }
}

function table({title, headings, lines, notes}) {
  const head = element("tr", {}, ...headings.map((text) => element("th", {scope: "col"}, text)));
  const body = lines.map(({cells: [[name], ...others], marks}) =>
    element("tr", {className: marks.length ? "marked" : ""},
      element("th", {scope: "row"}, name, ...marks.map((mark) => element("span", {className: "mark"}, mark))),
      ...others.map(([text, bounds]) =>
        element("td", {}, text, ...(bounds ? [element("span", {className: "bounds"}, bounds)] : [])))));
  return [
    element("h2", {}, title),
    element("div", {className: "scroll"},
      element("table", {}, element("thead", {}, head), element("tbody", {}, ...body))),
    ...notes.map((note) => element("p", {className: "notes"}, note)),
  ];
}

function listed(title, sentences, kind) {
  if (!sentences.length) return [];
  const items = sentences.map((sentence) => element("li", {}, sentence));
  return [element("h2", {}, title), element("ul", {className: kind}, ...items)];
}

function labelled(text, field, hint) {
  return element("label", {}, element("span", {}, text), field, ...(hint ? [element("small", {}, hint)] : []));
}

function element(kind, properties, ...children) {
  const made = Object.assign(document.createElement(kind), properties);
  made.append(...children); // Strings become text, never markup.
  return made;
}

function setOptions(select, names, shown = (name) => name) {
  if (JSON.stringify(Array.from(select.options, ({value}) => value)) === JSON.stringify(names)) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(shown(name), name)));
  if (names.includes(chosen)) select.value = chosen;
}

function loadScript(src) {
  return new Promise((resolve, reject) => {
    const script = element("script", {src, onload: resolve});
    script.onerror = () => reject(new Error(`${src} cannot be loaded`));
    document.head.append(script);
  });
}
