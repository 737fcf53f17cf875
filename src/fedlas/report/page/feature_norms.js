// Feature norms of correct and incorrect predictions.
import { find, showSection } from "./dom.js";
import { addMark, canvas, showFigure } from "./figure.js";
import { formatCount, formatFixed, formatPercent, formatSignificant, formatTick } from "./format.js";
import { showLines } from "./line_chart.js";
import { currentModel } from "./page_state.js";
import { addAxes, lineKey, linePath, linearScale, niceTicks, plotArea, stepPoints, svg } from "./svg.js";

const AXIS = "γ, standardised norm";
const KINDS = [["correct", "line line-2"], ["incorrect", "line line-1"]];

function drawHistogram(norms) {
  const { edges } = norms;
  const bins = norms.correct.map((_, bin) => bin);
  const range = (bin) => `${formatSignificant(edges[bin])} to ${formatSignificant(edges[bin + 1])}`;
  showFigure(find("norm-histogram"), {
    title: "Norms of correct and incorrect predictions",
    caption: `Mean norm ${formatSignificant(norms.mean)}, standard deviation ${formatSignificant(norms.deviation)}. The outermost bars include all values beyond them.`,
    draw: (width) => {
      const most = Math.max(...norms.correct_fraction, ...norms.incorrect_fraction);
      const area = plotArea(width, Math.min(280, (width - 58) * 0.7));
      const root = canvas(width, area.bottom + 42, "Histograms of the standardised feature norm");
      const x = linearScale(edges[0], edges.at(-1), area.left, area.right);
      const y = linearScale(0, most, area.bottom, area.top);
      const yAxis = { at: y, ticks: niceTicks(0, most, 4), text: formatTick, name: "fraction of each kind" };
      addAxes(root, area, { at: x, ticks: niceTicks(edges[0], edges.at(-1), 6), text: formatSignificant, name: AXIS }, yAxis);
      for (const [kind, line] of KINDS) {
        const outline = stepPoints(edges, norms[`${kind}_fraction`], x, y);
        const ground = [[x(edges.at(-1)), area.bottom], [x(edges[0]), area.bottom]];
        root.append(svg("path", { class: kind, "fill-opacity": 0.25, d: `${linePath([...outline, ...ground])}Z` }));
        root.append(svg("path", { class: line, d: linePath(outline) }));
      }
      for (const bin of bins) {
        const counts = KINDS.map(([kind]) => `${formatCount(norms[kind][bin])} ${kind} (${formatPercent(norms[`${kind}_fraction`][bin])})`);
        const column = { x: x(edges[bin]), width: Math.max(1, x(edges[bin + 1]) - x(edges[bin])) };
        addMark(root, { ...column, y: area.top, height: area.height }, [`γ ${range(bin)}`, ...counts]);
      }
      return root;
    },
    legend: KINDS.map(([kind, line]) => [lineKey(line), `${kind} predictions`]),
    rows: () => [["γ", "Correct", "Incorrect"], bins.map((bin) => [range(bin), ...KINDS.map(([kind]) => formatCount(norms[kind][bin]))])],
  });
}

// Rows of `groups` are [count, gamma, confidence, accuracy].
function drawGroups(groups) {
  const confidence = groups.map((row) => [row[1], row[2]]);
  const accuracy = groups.map((row) => [row[1], row[3]]);
  const gammas = groups.map((row) => row[1]);
  const lowest = Math.min(...groups.flatMap((row) => [row[2], row[3]]));
  showLines(find("norm-groups"), {
    title: "Confidence and accuracy by norm",
    caption: "Tenths of the samples, by increasing norm.",
    label: "Mean confidence and accuracy over the feature norm",
    aspect: 0.7,
    x: { from: Math.min(...gammas), to: Math.max(...gammas), text: formatSignificant, name: AXIS },
    y: { from: Math.max(0, lowest - 0.05), to: 1, text: formatTick, name: "confidence, accuracy" },
    curves: [["line line-0", confidence, "mean confidence"], ["line line-2", accuracy, "accuracy"]],
    marks: gammas,
    describe: (gamma, nearest) => [`γ ${formatFixed(gamma, 2)}`, ...nearest.map(([name, point]) => `${name} ${formatPercent(point[1])}`)],
    legend: [[lineKey("line line-0"), "mean confidence"], [lineKey("line line-2"), "accuracy"]],
    rows: () => [
      ["γ", "Samples", "Mean confidence", "Accuracy"],
      groups.map((row) => [formatFixed(row[1], 2), formatCount(row[0]), formatPercent(row[2]), formatPercent(row[3])]),
    ],
  });
}

export function drawFeatureNorms() {
  const { norms } = currentModel();
  showSection(find("norms"), norms, "The predictions of this model have no features.");
  if (!norms) return;
  drawHistogram(norms);
  drawGroups(norms.groups);
}
