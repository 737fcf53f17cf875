// Histograms of the confidence of correct and incorrect predictions.
import { find, note, onRadio, replaceContent } from "./dom.js";
import { addMark, canvas, showFigure } from "./figure.js";
import { formatAxisCount, formatCount, formatPercent, formatRange, formatTenth, formatTick } from "./format.js";
import { currentModel, setStateChoice, stateTitle } from "./page_state.js";
import { FIFTHS, addAxes, boxKey, linearScale, niceTicks, plotArea, svg } from "./svg.js";

const KINDS = ["correct", "incorrect"];
const AXIS = { fraction: "fraction of each kind", count: "samples", log: "samples, log scale" };
const selected = { state: 0, scale: "fraction" };

// The height of a bar on the chosen scale
function height(histogram, kind, bin) {
  if (selected.scale === "fraction") return histogram[`${kind}_fraction`][bin];
  return selected.scale === "log" ? Math.log10(1 + histogram[kind][bin]) : histogram[kind][bin];
}

function tickText(value) {
  if (selected.scale === "fraction") return formatTick(Math.abs(value));
  return formatAxisCount(selected.scale === "log" ? Math.round(10 ** Math.abs(value) - 1) : Math.abs(value));
}

function drawSection() {
  const state = currentModel().states[selected.state];
  const histogram = state.confidences;
  const host = find("confidence-histogram");
  if (!histogram) {
    replaceContent(host, note("This report has no confidences of single samples."));
    return;
  }
  const { edges } = histogram;
  const bins = histogram.accuracy.map((_, bin) => bin).filter((bin) => histogram.accuracy[bin] !== null);
  showFigure(host, {
    title: `${stateTitle(state)}: confidence of correct and incorrect predictions`,
    caption: `${formatCount(histogram.correct_total)} correct, ${formatCount(histogram.incorrect_total)} incorrect.`,
    draw: (width) => drawHistogram(width, histogram, bins),
    legend: KINDS.map((kind) => [boxKey({ class: kind }), `${kind} predictions`]),
    rows: () => [
      ["Confidence", "Correct", "Incorrect", "Accuracy"],
      bins.map((bin) => [
        formatRange(edges[bin], edges[bin + 1]), formatCount(histogram.correct[bin]), formatCount(histogram.incorrect[bin]),
        formatPercent(histogram.accuracy[bin]),
      ]),
    ],
  });
}

function drawHistogram(width, histogram, bins) {
  const { edges } = histogram;
  const most = Math.max(1e-9, ...bins.flatMap((bin) => KINDS.map((kind) => height(histogram, kind, bin))));
  const area = plotArea(width, Math.min(300, width * 0.75));
  const root = canvas(width, area.bottom + 42, "Histogram of confidence, correct predictions above, incorrect ones below");
  const x = linearScale(0, 1, area.left, area.right);
  const y = linearScale(-most, most, area.bottom, area.top);
  const isLog = selected.scale === "log";
  const marks = isLog ? [0, 1, 2, 3, 4, 5, 6].map((power) => Math.log10(1 + 10 ** power)) : niceTicks(0, most, 3);
  const ticks = [...new Set([0, ...marks, ...marks.map((value) => -value)])].filter((value) => Math.abs(value) <= most);
  addAxes(root, area, { at: x, ticks: FIFTHS, text: formatTenth, name: "confidence" }, { at: y, ticks, text: tickText, name: AXIS[selected.scale] });
  for (const bin of bins) {
    const left = x(edges[bin]) + 0.5;
    for (const kind of KINDS) {
      const end = y(height(histogram, kind, bin) * (kind === "correct" ? 1 : -1));
      root.append(svg("rect", { class: kind, x: left, width: x(edges[bin + 1]) - left - 0.5, y: Math.min(end, y(0)), height: Math.abs(end - y(0)) }));
    }
  }
  root.append(svg("path", { class: "frame", d: `M${area.left} ${y(0)}H${area.right}` }));
  for (const bin of bins) {
    const left = x(edges[bin]);
    const counts = KINDS.map((kind) => `${formatCount(histogram[kind][bin])} ${kind} (${formatPercent(histogram[`${kind}_fraction`][bin])} of them)`);
    const lines = [`confidence ${formatRange(edges[bin], edges[bin + 1])}`, ...counts];
    addMark(root, { x: left, width: x(edges[bin + 1]) - left, y: area.top, height: area.height }, lines);
  }
  return root;
}

export function drawConfidences() {
  selected.state = 0;
  setStateChoice(find("confidence-states"), "confidence-state", 0, (index) => {
    selected.state = index;
    drawSection();
  });
  drawSection();
}

export function setUpConfidences() {
  onRadio("confidence-scale", (scale) => {
    selected.scale = scale;
    drawSection();
  });
}
