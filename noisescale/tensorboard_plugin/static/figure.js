// SPDX-License-Identifier: Apache-2.0
// Draws a figure anew, as its user left the one before: zoomed, with traces hidden.

// Plotly.react would do that by `uirevision`, but it drops a zoom as soon as the axis to return to is another
// by a little, as it is with every new log step, and a double click goes back to the axis of the very first.

/* global Plotly, fittedFigure */

/**
 * @param drawing The element to draw in.
 * @param answer `settings` of plotly, and `dark`: from each colour to the one on a dark page.
 * @param revision While it is the same, the figure is of the same, and what its user changed is kept.
 */
export function drawFigure(drawing, figure, {settings, dark}, isDark, revision) {
  const {data, layout} = fittedFigure(figure, drawing.clientWidth, isDark ? dark : null);
  const kept = drawing.revision === revision ? whatUserChanged(drawing) : {ranges: {}, hidden: new Set()};
  const traces = data.map((trace) => (kept.hidden.has(trace.name) ? {...trace, visible: "legendonly"} : trace));
  drawing.revision = revision;
  drawing.sentRanges = {xaxis: String(layout.xaxis.range), yaxis: String(layout.yaxis.range)}; // Plotly writes in them.
  drawing.style.height = `${layout.height}px`;
  Plotly.newPlot(drawing, traces, {...layout, dragmode: kept.dragmode || layout.dragmode}, settings);
  if (Object.keys(kept.ranges).length) Plotly.relayout(drawing, kept.ranges);
}

/** Plotly listens to the window for each figure until the figure is purged. */
export function eraseFigures(drawn) {
  for (const {drawing} of drawn) {
    if (drawing.data) Plotly.purge(drawing);
  }
}

function whatUserChanged(drawing) {
  const ranges = {};
  for (const [name, sent] of Object.entries(drawing.sentRanges)) {
    const {range, autorange} = drawing.layout[name];
    if (!autorange && String(range) !== sent) ranges[`${name}.range`] = [...range];
  }
  const hidden = new Set(drawing.data.filter(({visible}) => visible === "legendonly").map(({name}) => name));
  return {ranges, hidden, dragmode: drawing.layout.dragmode};
}
