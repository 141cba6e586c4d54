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
  select.replaceChildren(...options.map(({value, text}) => new Option(text, value)));
}

/** Replaces what is in a place. What has the same `data-key` keeps the focus, and how far it is scrolled. */
export function replaceIn(place, parts) {
  const scrolled = new Map([...place.querySelectorAll("[data-key]")].map((each) => [each.dataset.key, each.scrollLeft]));
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  place.replaceChildren(...parts);
  for (const each of place.querySelectorAll("[data-key]")) {
    each.scrollLeft = scrolled.get(each.dataset.key) || 0;
    if (each.dataset.key === focused) each.focus({preventScroll: true});
  }
}

export function answers(statements) {
  const lines = (one, kind) => [
    element("dt", {className: kind}, one.label),
    element("dd", {className: kind}, one.sentence),
    ...one.parts.flatMap((part) => lines(part, "sub")),
  ];
  return element("dl", {}, ...statements.flatMap((one) => lines(one, "")));
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
  const rows = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
  const scroll = element("div", {className: "scroll", tabIndex: 0}, rows);
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", title || "Summary");
  scroll.dataset.key = title;
  return [
    ...(title ? [element("h2", {}, title)] : []),
    scroll,
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
