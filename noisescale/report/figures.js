// SPDX-License-Identifier: Apache-2.0
// Draws figures, fitted to the width and the theme of their page. The report and TensorBoard's tab share it.

/* global Plotly */

const NARROW = 560; // pixels
const LEGEND_ROW = 20; // pixels
const LEGEND_LINE = 45; // pixels, before each name
const PAPER = 660; // pixels
const APART = 8; // pixels, between labels of an axis

/**
 * Draws a figure anew, as its reader left the one before: zoomed, with traces hidden.
 *
 * Plotly.react would do that by `uirevision`, but it drops a zoom as soon as the axis to return to is another
 * by a little, as it is with every new log step, and a double click goes back to the axis of the very first.
 *
 * @param drawing The element to draw in.
 * @param figure `data` and `layout` for plotly.
 * @param settings Of plotly.
 * @param colours From each colour of a figure to the one on a dark page; null on a light page.
 * @param printing Whether the page is on paper, which has a width of its own.
 * @param revision While it is the same, the figure is of the same, and what its reader changed is kept.
 */
export function drawFigure(drawing, figure, {settings, colours, printing = false, revision = ""}) {
  const {data, layout} = fittedFigure(figure, printing ? PAPER : drawing.clientWidth, colours);
  const isSame = drawing.data && drawing.revision === revision;
  const kept = isSame ? whatReaderChanged(drawing) : {ranges: {}, hidden: new Set()};
  const traces = data.map((trace) => (kept.hidden.has(keyOf(trace)) ? {...trace, visible: "legendonly"} : trace));
  drawing.revision = revision;
  drawing.sentRanges = {xaxis: String(layout.xaxis.range), yaxis: String(layout.yaxis.range)}; // Plotly writes in them.
  drawing.style.height = `${layout.height}px`;
  const size = printing ? {width: PAPER} : {};
  Plotly.newPlot(drawing, traces, {...layout, ...size, dragmode: kept.dragmode || layout.dragmode}, settings);
  if (Object.keys(kept.ranges).length) Plotly.relayout(drawing, kept.ranges);
}

/** Plotly listens to the window for each figure until the figure is purged. */
export function eraseFigure(drawing) {
  if (drawing.data) Plotly.purge(drawing);
}

function whatReaderChanged(drawing) {
  const ranges = {};
  for (const [name, sent] of Object.entries(drawing.sentRanges)) {
    const {range, autorange} = drawing.layout[name];
    if (!autorange && String(range) !== sent) ranges[`${name}.range`] = [...range];
  }
  const hidden = new Set(drawing.data.filter(({visible}) => visible === "legendonly").map(keyOf));
  return {ranges, hidden, dragmode: drawing.layout.dragmode};
}

/** What a trace keeps while its name changes with its value. */
function keyOf({legendgroup, name}) {
  return legendgroup || name;
}

/** The figure in the page's colours, with room for its legend at this width, and for its labels on a phone. */
function fittedFigure({data, layout}, width, colours) {
  const fitted = withLegend(data, leveled(width < NARROW ? narrowed(data, layout, width) : layout, width), width);
  return repainted({data, layout: fitted}, colours || {});
}

function repainted(value, colours) {
  if (typeof value === "string") return Object.hasOwn(colours, value) ? colours[value] : value;
  if (Array.isArray(value)) return value.map((item) => repainted(item, colours));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, repainted(item, colours)]));
}

function withLegend(data, layout, width) {
  const {legend, margin, height} = layout;
  const widths = legendWidths(data, layout);
  const available = width - margin.l - margin.r - 20; // Labels of the axis may take more.
  const isOneRow = widths.reduce((sum, one) => sum + one, 0) < available;
  const columns = Math.max(1, Math.floor(available / Math.max(...widths)));
  const before = legend.y * height;
  const room = LEGEND_ROW * (isOneRow ? 1 : Math.ceil(widths.length / columns)) + 12;
  const more = room - before;
  // By itself a legend scrolls where it takes half of the figure.
  const below = {...legend, y: 0, yanchor: "bottom", maxheight: room};
  return {...layout, height: height + more, margin: {...margin, b: margin.b + more}, legend: below};
}

function legendWidths(data, {legend, font}) {
  const pen = penFor(legend.font.size, font);
  return data.filter(({name, showlegend}) => name && showlegend !== false)
    .map(({name}) => LEGEND_LINE + pen.measureText(name).width);
}

/** Of labels that are to stay level, as many as fit: all, every second, every third ... */
function leveled(layout, width) {
  const {xaxis, margin, font} = layout;
  if (xaxis.tickangle !== 0 || !xaxis.tickvals) return layout;
  const [low, high] = xaxis.range;
  const pen = penFor(font.size, font);
  const labels = xaxis.tickvals
    .map((value, index) => ({index, at: (Math.log10(value) - low) / (high - low)}))
    .filter(({at}) => at >= 0 && at <= 1)
    .map(({index, at}) => ({
      index,
      middle: at * 0.93 * (width - margin.l - margin.r), // Labels of the other axis may take more.
      half: pen.measureText(xaxis.ticktext[index]).width / 2,
    }));
  const every = (step) => labels.filter((_, place) => place % step === 0);
  const fits = ({middle, half}, place, kept) =>
    place === 0 || middle - half - APART >= kept[place - 1].middle + kept[place - 1].half;
  let step = 1;
  while (step < labels.length && !every(step).every(fits)) step += 1;
  const kept = new Set(every(step).map(({index}) => index));
  return {...layout, xaxis: {...xaxis, ticktext: xaxis.ticktext.map((text, index) => (kept.has(index) ? text : ""))}};
}

function penFor(size, {family}) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `${size}px ${family}`;
  return pen;
}

function narrowed(data, layout, width) {
  const {legend, margin, height, xaxis} = layout;
  const title = wrapped(xaxis.title.text, (width - 70) / 6.8);
  const more = 16 * (title.length - 1);
  return {
    ...layout,
    height: height + more,
    margin: {...margin, l: 58, r: 12, b: margin.b + more},
    legend: {...legend, x: 0, y: legend.y * height / (height + more), font: {size: 11}},
    font: {...layout.font, size: 12},
    xaxis: {...xaxis, title: {...xaxis.title, text: title.join("<br>")}, ...roomForLabels(data, layout)},
    annotations: (layout.annotations || []).map((label) => ({...label, font: {...label.font, size: 10}})),
  };
}

function roomForLabels(data, {xaxis: {range}}) {
  // Labels stand to the left of their points.
  if (!range || !data.some(({mode}) => mode && mode.includes("text"))) return {};
  return {range: [range[0] - 0.15 * (range[1] - range[0]), range[1]]};
}

function wrapped(text, characters) {
  return text.split(" ").reduce((lines, word) => {
    const line = lines[lines.length - 1];
    if (line && line.length + 1 + word.length > characters) return [...lines, word];
    return [...lines.slice(0, -1), line ? `${line} ${word}` : word];
  }, [""]);
}
