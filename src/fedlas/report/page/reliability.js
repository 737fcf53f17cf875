// Reliability diagrams: bars for bins of confidence, or a smooth curve.
import { element, find, note, onRadio, replaceContent } from "./dom.js";
import { addMark, canvas, showFigure } from "./figure.js";
import {
  decimalsOf, formatAxisCount, formatCount, formatFixed, formatGap, formatInterval, formatLevel, formatPercent,
  formatProbability, formatRange, formatResult, formatSamples, formatSigned, formatSignificant, formatTenth,
} from "./format.js";
import { currentModel, data, setStateChoice, stateTitle } from "./page_state.js";
import { FIFTHS, addAxes, boxKey, lineKey, linePath, linearScale, plotArea, svg, whiskerKey } from "./svg.js";

const WINDOW = 0.015; // of confidence: between points that are further apart, the smooth curve has no samples
const selected = { bins: "width", state: null, beside: true };

// Rows of `bins` are [lower, upper, count, confidence, accuracy, low, high, gap]. Bins of equal mass are drawn with equal
// widths. `quantity` is the name of the binned variable.
export function showReliability(host, title, bins, { caption = "", isEqualMass = false, isSmall = false, quantity = "confidence" } = {}) {
  const describe = ([lower, upper, count, confidence, accuracy, low, high, gap]) => [
    `${quantity} ${formatRange(lower, upper)}`,
    formatSamples(count),
    `mean ${quantity} ${formatProbability(confidence)}`,
    `accuracy ${formatPercent(accuracy, low, high)} (${formatInterval(low, high)})`,
    formatGap(gap, low, high),
  ];
  const legend = [
    [boxKey({ class: "bar" }), "accuracy"],
    [lineKey("confidence"), `mean ${quantity}`],
    [boxKey({ fill: "url(#hatch-over)" }), "over-confident"],
    [boxKey({ fill: "url(#hatch-under)" }), "under-confident"],
    [whiskerKey(), `${formatLevel(data.level)} interval`],
  ];
  showFigure(host, {
    title, caption,
    draw: (width) => drawBars(width, title, bins, describe, { isEqualMass, isSmall, quantity }),
    legend: isSmall ? [] : legend,
    rows: () => [
      ["Bin", "Samples", `Mean ${quantity}`, "Accuracy", "Interval", "Gap in points"],
      bins.map(([lower, upper, count, confidence, accuracy, low, high, gap]) => [
        formatRange(lower, upper), formatCount(count), formatProbability(confidence), formatPercent(accuracy, low, high), formatInterval(low, high),
        formatSigned(100 * gap, decimalsOf(low, high)),
      ]),
    ],
  });
}

function drawBars(width, title, bins, describe, { isEqualMass, isSmall, quantity }) {
  const area = plotArea(width, Math.min(width - 76, isSmall ? 220 : 330));
  const below = plotArea(width, isSmall ? 34 : 54, area.bottom + 14);
  const root = canvas(width, below.bottom + 40, `Reliability diagram, ${title}`);
  const columns = bins.length;
  const x = linearScale(0, 1, area.left, area.right);
  const y = linearScale(0, 1, area.bottom, area.top);
  const largest = Math.max(...bins.map((row) => row[2]));
  const countY = linearScale(0, largest, below.bottom, below.top);
  const ends = bins.map(([lower, upper], index) => (isEqualMass ? [index / columns, (index + 1) / columns] : [lower, upper]).map(x));
  addAxes(root, area, { at: x, ticks: isEqualMass ? [] : FIFTHS }, { at: y, ticks: FIFTHS, text: formatTenth, name: "accuracy" });
  addAxes(
    root,
    below,
    isEqualMass ? { at: x, ticks: [], name: `mean ${quantity} of the bin` } : { at: x, ticks: FIFTHS, text: formatTenth, name: quantity },
    { at: countY, ticks: [0, largest], text: formatAxisCount, name: null, shift: 8 },
  );
  if (isEqualMass) {
    const every = Math.ceil((columns * 34) / area.width);
    bins.forEach((row, index) => {
      if ((columns - 1 - index) % every) return;
      root.append(svg("text", { x: x((index + 0.5) / columns), y: below.bottom + 16, "text-anchor": "middle" }, formatFixed(row[3], 2)));
    });
  } else {
    root.append(svg("path", { class: "ideal", d: `M${x(0)} ${y(0)}L${x(1)} ${y(1)}` }));
  }
  bins.forEach(([, , count, confidence, accuracy, low, high], index) => {
    const [from, to] = ends[index];
    const bar = { x: from + 1, width: Math.max(1.5, to - from - 2) };
    const middle = bar.x + bar.width / 2;
    const isOver = confidence > accuracy;
    const [upper, lower] = isOver ? [confidence, accuracy] : [accuracy, confidence];
    const cap = Math.min(5, bar.width / 3);
    root.append(
      svg("rect", { class: "bar", ...bar, y: y(accuracy), height: y(0) - y(accuracy) }),
      svg("rect", {
        class: isOver ? "gap-over" : "gap-under", ...bar, y: y(upper), height: Math.max(0, y(lower) - y(upper)),
        fill: isOver ? "url(#hatch-over)" : "url(#hatch-under)",
      }),
      svg("line", { class: "confidence", x1: bar.x, x2: bar.x + bar.width, y1: y(confidence), y2: y(confidence) }),
      svg("path", {
        class: "whisker",
        d: `M${middle} ${y(low)}V${y(high)}M${middle - cap} ${y(low)}H${middle + cap}M${middle - cap} ${y(high)}H${middle + cap}`,
      }),
      svg("rect", { class: "density", ...bar, y: countY(count), height: below.bottom - countY(count) }),
    );
  });
  root.append(svg("rect", { class: "frame", x: area.left, y: area.top, width: area.width, height: area.height }));
  bins.forEach((row, index) => {
    const [from, to] = ends[index];
    const wide = Math.max(6, to - from);
    addMark(root, { x: from - (wide - (to - from)) / 2, width: wide, y: area.top, height: below.bottom - area.top }, describe(row));
  });
  return root;
}

// Rows of `points` are [confidence, accuracy, low, high, density, samples, gap].
function showSmooth(host, title, { points, bandwidth }, caption) {
  if (!points.length) {
    replaceContent(host, note(`${title}: too few samples for a smooth diagram.`));
    return;
  }
  const every = Math.max(1, Math.round(points.length / 24));
  const listed = points.filter((_, index) => index % every === 0 || index === points.length - 1);
  showFigure(host, {
    title,
    caption: `${caption} Kernel width ${formatSignificant(bandwidth)}; the interval is approximate.`.trim(),
    draw: (width) => drawSmooth(width, title, points, listed),
    legend: [
      [lineKey("line line-0"), "accuracy"],
      [boxKey({ class: "range" }), `${formatLevel(data.level)} interval`],
      [lineKey("ideal"), "confidence"],
    ],
    rows: () => [
      ["Confidence", "Effective samples", "Accuracy", "Interval", "Gap in points"],
      listed.map(([confidence, accuracy, low, high, , samples, gap]) => [
        formatFixed(confidence, 2), formatFixed(samples, 0), formatPercent(accuracy, low, high), formatInterval(low, high),
        formatSigned(100 * gap, decimalsOf(low, high)),
      ]),
    ],
  });
}

function drawSmooth(width, title, points, listed) {
  const area = plotArea(width, Math.min(width - 76, 330));
  const below = plotArea(width, 54, area.bottom + 14);
  const root = canvas(width, below.bottom + 40, `Smooth reliability diagram, ${title}`);
  const x = linearScale(0, 1, area.left, area.right);
  const y = linearScale(0, 1, area.bottom, area.top);
  const densityY = linearScale(0, Math.max(...points.map((row) => row[4])), below.bottom, below.top);
  addAxes(root, area, { at: x, ticks: FIFTHS }, { at: y, ticks: FIFTHS, text: formatTenth, name: "accuracy" });
  addAxes(root, below, { at: x, ticks: FIFTHS, text: formatTenth, name: "confidence" }, { at: densityY, ticks: [] });
  root.append(svg("path", { class: "ideal", d: `M${x(0)} ${y(0)}L${x(1)} ${y(1)}` }));
  for (const part of partsWithSamples(points)) {
    const upper = part.map((row) => [x(row[0]), y(row[3])]);
    const lower = part.map((row) => [x(row[0]), y(row[2])]).reverse();
    const ground = [[x(part.at(-1)[0]), below.bottom], [x(part[0][0]), below.bottom]];
    root.append(
      svg("path", { class: "range", d: `${linePath([...upper, ...lower])}Z` }),
      svg("path", { class: "line line-0", d: linePath(part.map((row) => [x(row[0]), y(row[1])])) }),
      svg("path", { class: "density", d: `${linePath([...part.map((row) => [x(row[0]), densityY(row[4])]), ...ground])}Z` }),
    );
  }
  root.append(svg("rect", { class: "frame", x: area.left, y: area.top, width: area.width, height: area.height }));
  for (const [confidence, accuracy, low, high, , samples, gap] of listed) {
    const wide = Math.max(6, area.width / 26);
    const dot = svg("circle", { class: "dot line-0", cx: x(confidence), cy: y(accuracy), r: 4.5 });
    addMark(root, { x: x(confidence) - wide / 2, width: wide, y: area.top, height: below.bottom - area.top }, [
      `around confidence ${formatFixed(confidence, 2)}`,
      `${formatFixed(samples, 0)} effective samples`,
      `accuracy ${formatPercent(accuracy, low, high)} (${formatInterval(low, high)})`,
      formatGap(gap, low, high),
    ], [dot]);
  }
  return root;
}

function partsWithSamples(points) {
  const parts = [];
  points.forEach((row, index) => {
    if (!index || row[0] - points[index - 1][0] > WINDOW) parts.push([]);
    parts.at(-1).push(row);
  });
  return parts;
}

// The calibration error that matches a kind of diagram
export function errorCaption(state, kind) {
  const result = state.results[{ width: "ece", mass: "aece", smooth: "smooth_ece" }[kind]];
  if (!result) return "";
  const { noise_floor: floor, low, high } = result;
  return `${result.name} ${formatResult(result)}${floor === null ? "" : `, ${formatPercent(floor, low, high)} by chance`}.`;
}

function drawSection() {
  const { states } = currentModel();
  const chosen = states[selected.state];
  const shownStates = selected.beside && selected.state > 0 ? [states[0], chosen] : [chosen];
  const hosts = shownStates.map(() => element("div"));
  replaceContent(find("reliability-diagrams"), ...hosts);
  shownStates.forEach((state, index) => {
    const [host, diagram, caption] = [hosts[index], state.diagrams[selected.bins], errorCaption(state, selected.bins)];
    if (!diagram) replaceContent(host, note(`${stateTitle(state)}: this report has no smooth diagram.`));
    else if (selected.bins === "smooth") showSmooth(host, stateTitle(state), diagram, caption);
    else showReliability(host, stateTitle(state), diagram.bins, { caption, isEqualMass: selected.bins === "mass" });
  });
}

export function drawReliability() {
  const count = currentModel().states.length;
  selected.state = count > 1 ? 1 : 0;
  const host = find("reliability-states");
  setStateChoice(host, "reliability-state", selected.state, (index) => {
    selected.state = index;
    drawSection();
  });
  if (count > 1) {
    const input = element("input", { type: "checkbox", id: "beside", checked: selected.beside });
    input.addEventListener("change", () => {
      selected.beside = input.checked;
      drawSection();
    });
    host.append(element("label", {}, input, "beside uncalibrated"));
  }
  drawSection();
}

export function setUpReliability() {
  onRadio("bins", (kind) => {
    selected.bins = kind;
    drawSection();
  });
}
