// SPDX-License-Identifier: Apache-2.0
// Elements of the page.

export function element(kind, properties, ...children) {
  const made = Object.assign(document.createElement(kind), properties);
  made.append(...children); // Strings become text, never markup.
  return made;
}

export function labelled(text, field, hint) {
  return element("label", {className: "field"}, element("span", {}, text), field, ...(hint ? [element("small", {}, hint)] : []));
}

/** The colours of a run on a light and on a dark page, for the style sheet. */
export function setColours(made, [light, dark]) {
  made.style.setProperty("--on-light", light);
  made.style.setProperty("--on-dark", dark);
}

export function setOptions(select, options) {
  const wanted = JSON.stringify(options);
  if (select.dataset.options === wanted) return;
  select.dataset.options = wanted;
  const chosen = select.value;
  select.replaceChildren(...options.map(({value, text}) => new Option(text, value)));
  if (options.some(({value}) => value === chosen)) select.value = chosen;
}

export function answers(lines) {
  // A line whose name is indented belongs to the line above it.
  const said = lines.flatMap(([name, text]) => {
    const className = name.startsWith(" ") ? "sub" : "";
    return [element("dt", {className}, name.trim()), element("dd", {className}, text)];
  });
  return element("dl", {}, ...said);
}

export function listed(title, sentences, className) {
  if (!sentences.length) return [];
  const items = sentences.map((sentence) => element("li", {}, sentence));
  return [...(title ? [element("h2", {}, title)] : []), element("ul", {className}, ...items)];
}

export function table({title, headings, lines, notes}, nameOf = (name) => name) {
  const head = element("tr", {}, ...headings.map((text) => element("th", {scope: "col"}, text)));
  const body = lines.map(({cells: [[name], ...others], marks}, k) =>
    element("tr", {className: marks.length ? "marked" : ""},
      element("th", {scope: "row"}, nameOf(name, k), ...marks.map((mark) => element("span", {className: "mark"}, mark))),
      ...others.map(([text, bounds]) =>
        element("td", {}, text, ...(bounds ? [element("span", {className: "bounds"}, bounds)] : [])))));
  return [
    element("h2", {}, title),
    element("div", {className: "scroll"},
      element("table", {}, element("thead", {}, head), element("tbody", {}, ...body))),
    ...notes.map((note) => element("p", {className: "notes"}, note)),
  ];
}

export function loadScript(src) {
  return new Promise((resolve, reject) => {
    const script = element("script", {src, onload: resolve});
    script.onerror = () => reject(new Error(`${src} cannot be loaded`));
    document.head.append(script);
  });
}
