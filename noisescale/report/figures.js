// SPDX-License-Identifier: Apache-2.0
// Fits figures to the width and the theme of their page. The report and TensorBoard's tab share it.

const NARROW = 560; // pixels
const PIXELS_OF_A_LEGEND_ROW = 20;

/**
 * The figure with the colours of the page's theme, and on a phone with less margin and a higher legend.
 *
 * @param figure `data` and `layout` for plotly.
 * @param width Pixels of the element that it is drawn in.
 * @param darkColours From each colour of a figure to the one on a dark page; null on a light page.
 */
function fittedFigure({data, layout}, width, darkColours) {
  const whole = width < NARROW ? {...layout, ...narrowLayout(data, layout, width)} : layout;
  return repainted({data, layout: whole}, darkColours || {});
}

function isNarrow(width) {
  return width < NARROW;
}

function repainted(value, colours) {
  if (typeof value === "string") return colours[value] || value;
  if (Array.isArray(value)) return value.map((item) => repainted(item, colours));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, repainted(item, colours)]));
}

function narrowLayout(data, layout, width) {
  const names = data.filter(({name, showlegend}) => name && showlegend !== false).map(({name}) => name);
  const widest = Math.max(...names.map((name) => 50 + 6.2 * name.length));
  const rows = Math.ceil(names.length / Math.max(1, Math.floor((width - 20) / widest)));
  const {legend, margin, height} = layout;
  const title = wrapped(layout.xaxis.title.text, (width - 70) / 6.8);
  const legendBefore = legend.y * height;
  const legendNow = PIXELS_OF_A_LEGEND_ROW * rows + 12;
  const more = legendNow - legendBefore + 16 * (title.length - 1);
  return {
    height: height + more,
    margin: {...margin, l: 58, r: 12, b: margin.b + more},
    legend: {...legend, x: 0, y: legendNow / (height + more), font: {size: 11}},
    font: {...layout.font, size: 12},
    xaxis: {...layout.xaxis, title: {...layout.xaxis.title, text: title.join("<br>")}, ...roomForLabels(data, layout)},
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
