// SPDX-License-Identifier: Apache-2.0
// The page "Noise scale": a form, and below it what the server says to it. TensorBoard calls render().

const POLL_MILLISECONDS = 10000;
const TYPING_MILLISECONDS = 250;

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
  await Promise.all([loadScript("./plotly.js"), page.listRuns()]);
  page.redraw();
  setInterval(() => document.hidden || page.refresh(), POLL_MILLISECONDS);
}

class Page {
  constructor() {
    this.asked = 0; // Requests are numbered, so that a late answer to an early one is dropped.
    this.runs = [];
    this.shown = null;
    this.run = element("select", {name: "run"});
    this.optimizer = element("select", {name: "optimizer"});
    this.optimizerField = labelled("Optimizer", this.optimizer);
    const fields = FIELDS.map(({name, label, hint}) => {
      const decimal = name === "devices" ? "text" : "decimal";
      return labelled(label, element("input", {name, inputMode: decimal, autocomplete: "off"}), hint);
    });
    this.form = element("form", {}, labelled("Run", this.run), this.optimizerField, ...fields);
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", (event) => this.changed(event));
    this.status = element("p", {id: "status"});
    this.status.setAttribute("role", "status");
    this.results = element("div", {id: "results"});
    this.root = element("div", {id: "page"}, this.form, element("main", {}, this.status, this.results));
  }

  async listRuns() {
    const chosen = this.run.value;
    this.runs = await (await fetch("./runs")).json();
    if (this.runs.length !== this.run.options.length) {
      this.run.replaceChildren(...this.runs.map(({name}) => new Option(name, name)));
      if (this.runs.some(({name}) => name === chosen)) this.run.value = chosen;
    }
    this.listOptimizers();
  }

  listOptimizers() {
    const run = this.runs.find(({name}) => name === this.run.value);
    const numbers = run ? run.optimizers : [];
    if (numbers.length !== this.optimizer.options.length) {
      this.optimizer.replaceChildren(...numbers.map((number) => new Option(number, number)));
    }
    this.optimizerField.hidden = numbers.length < 2;
  }

  changed(event) {
    if (event.target === this.run) this.listOptimizers();
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.redraw(), TYPING_MILLISECONDS);
  }

  async refresh() {
    await this.listRuns();
    this.redraw();
  }

  async redraw() {
    if (!this.runs.length) {
      this.say("No run here has the noise scale yet. Add NoiseScaleMonitor() to the callbacks of your Trainer.");
      return;
    }
    const number = ++this.asked;
    let answer;
    try {
      answer = await (await fetch(`./prediction?${new URLSearchParams(new FormData(this.form))}`)).json();
    } catch (error) {
      answer = {error: `TensorBoard does not answer: ${error.message}`};
    }
    if (number !== this.asked) return;
    if (answer.error) {
      this.say(answer.error, "error");
      this.results.className = "old"; // What was drawn stays, faded: it answers an earlier question.
      return;
    }
    this.say("");
    this.results.className = "";
    const same = JSON.stringify(answer);
    if (same === this.shown) return;
    this.shown = same;
    this.draw(answer);
  }

  say(text, kind = "") {
    this.status.textContent = text;
    this.status.className = kind;
  }

  draw({headline, figures, settings, tables, warnings, assumptions}) {
    const answers = headline.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]);
    const places = figures.map((figure) => this.place(figure));
    this.results.replaceChildren(
      element("dl", {}, ...answers),
      ...places.flat(),
      ...tables.flatMap(table),
      ...listed("Warnings", warnings, "warnings"),
      ...listed("Assumptions", assumptions, "assumptions"),
    );
    for (const {id, data, layout} of figures) {
      // With its revision unchanged a figure keeps the zoom that the user gave it.
      Plotly.react(document.getElementById(id), data, {...layout, uirevision: this.run.value}, settings);
    }
  }

  place({id, title, layout}) {
    // Kept from one drawing to the next, or plotly would forget the zoom.
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

function loadScript(src) {
  return new Promise((resolve, reject) => {
    const script = element("script", {src, onload: resolve});
    script.onerror = () => reject(new Error(`${src} cannot be loaded`));
    document.head.append(script);
  });
}
