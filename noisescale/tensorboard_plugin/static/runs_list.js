// SPDX-License-Identifier: Apache-2.0
// The list of runs: like TensorBoard's own, with a box and a colour for each run and a filter above.
// TensorBoard 2.21 gives a plugin the names of all runs (experimental.GetRuns), but not the runs that are chosen in
// its own list. So the tab has a list of its own, which starts with the filter of Time Series.

import {element, replaceIn, setColours} from "./dom.js";
import {runFilter} from "./host.js";

const MOST_AT_FIRST = 10; // More runs are not chosen by themselves.
const NONE = "none"; // in the address, in place of ids

export class RunsList {
  /** @param changed Called when the reader chooses other runs. */
  constructor(changed) {
    this.runs = [];
    this.chosen = null; // Ids; null: the reader has not chosen.
    this.filter = element("input", {type: "search", name: "filter", placeholder: "Filter runs (regex)", autocomplete: "off"});
    this.filter.setAttribute("aria-label", "Filter runs by a regular expression");
    this.all = element("input", {type: "checkbox", name: "all"});
    this.all.setAttribute("aria-label", "Choose all runs");
    this.count = element("span", {});
    this.items = element("ul", {className: "runs"});
    this.root = element("fieldset", {}, element("legend", {}, "Runs"), this.filter,
      element("label", {className: "run"}, this.all, this.count), this.items);
    this.filter.addEventListener("input", () => { this.draw(); changed(); });
    this.all.addEventListener("change", () => {
      const listed = new Set(this.listed().map(({id}) => id));
      const others = this.chosenIds().filter((id) => !listed.has(id));
      this.chosen = this.all.checked ? [...others, ...listed] : others;
      this.draw();
      changed();
    });
    this.items.addEventListener("change", ({target}) => {
      const others = this.chosenIds().filter((id) => id !== target.value);
      this.chosen = target.checked ? [...others, target.value] : others;
      this.draw();
      changed();
    });
  }

  set(runs) {
    this.runs = runs;
    this.draw();
  }

  read({runs, filter = runFilter()}) {
    this.chosen = runs ? runs.split(" ").filter((id) => id !== NONE) : null;
    this.filter.value = filter;
  }

  get state() {
    const filter = this.filter.value === runFilter() ? null : this.filter.value;
    return {runs: this.chosen && (this.chosen.join(" ") || NONE), filter};
  }

  chosenIds() {
    if (this.chosen) return this.chosen;
    const first = [this.runs, this.listed()].flatMap((runs) => runs.slice(0, MOST_AT_FIRST));
    return [...new Set(first.map(({id}) => id))];
  }

  listed() {
    let pattern;
    try {
      pattern = new RegExp(this.filter.value, "i");
      this.filter.setCustomValidity("");
    } catch (error) {
      this.filter.setCustomValidity(error.message);
      return this.runs;
    }
    return this.runs.filter(({name}) => pattern.test(name));
  }

  /** The chosen runs that pass the filter. */
  shown() {
    const chosen = new Set(this.chosenIds());
    return this.listed().filter(({id}) => chosen.has(id));
  }

  draw() {
    const listed = this.listed();
    const shown = new Set(this.shown().map(({id}) => id));
    this.count.textContent = `${shown.size} of ${this.runs.length} shown`;
    this.all.checked = shown.size === listed.length && listed.length > 0;
    this.all.indeterminate = shown.size > 0 && shown.size < listed.length;
    const wanted = JSON.stringify(listed);
    if (wanted !== this.drawn) {
      this.drawn = wanted;
      replaceIn(this.items, listed.map((run) => this.item(run)));
    }
    for (const box of this.items.querySelectorAll("input")) box.checked = shown.has(box.value);
  }

  item({id, name, colours}) {
    const box = element("input", {type: "checkbox", value: id});
    box.dataset.key = id;
    setColours(box, colours);
    return element("li", {}, element("label", {className: "run"}, box, element("span", {}, name)));
  }
}
