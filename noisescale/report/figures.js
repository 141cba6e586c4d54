// SPDX-License-Identifier: Apache-2.0
// Fits figures to the width and the theme of their page. The report and TensorBoard's tab share it.

const NARROW = 560; // pixels
const LEGEND_ROW = 20; // pixels

/**
 * The figure in the colours of the page's theme, with room for its legend at this width, and for its labels on a phone.
 *
 * @param figure `data` and `layout` for plotly.
 * @param width Pixels of the element that it is drawn in.
 * @param darkColours From each colour of a figure to the one on a dark page; null on a light page.
 */
function fittedFigure({data, layout}, width, darkColours) {
  const fitted = withLegend(data, width < NARROW ? narrowed(data, layout, width) : layout, width);
  return repainted({data, layout: fitted}, darkColours || {});
}

function repainted(value, colours) {
  if (typeof value === "string") return Object.hasOwn(colours, value) ? colours[value] : value;
  if (Array.isArray(value)) return value.map((item) => repainted(item, colours));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, repainted(item, colours)]));
}

function withLegend(data, layout, width) {
  const {legend, margin, height} = layout;
  const names = data.filter(({name, showlegend}) => name && showlegend !== false).map(({name}) => name);
  const widths = names.map((name) => 52 + legend.font.size * name.length / 2);
  const available = width - margin.l - margin.r;
  const columns = Math.max(1, Math.floor(available / Math.max(...widths)));
  const rows = widths.reduce((sum, one) => sum + one, 0) < available ? 1 : Math.ceil(names.length / columns);
  const before = legend.y * height;
  const now = LEGEND_ROW * rows + 12;
  const whole = height + now - before;
  return {...layout, height: whole, margin: {...margin, b: margin.b + now - before}, legend: {...legend, y: now / whole}};
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
