// Over- and under-confidence by class and confidence.
import { classBins, classRows } from "./classes.js";
import { find, onEvent, onPager, rowsOfPage } from "./dom.js";
import { addMark, canvas, showFigure } from "./figure.js";
import { decimalsOf, formatCount, formatGap, formatInterval, formatPercent, formatProbability, formatRange, formatSamples, formatSigned, formatTenth } from "./format.js";
import { currentModel } from "./page_state.js";
import { FIFTHS, boxKey, linearScale, svg } from "./svg.js";

const PAGE_SIZE = 25;
const ROW_HEIGHT = 24;
const LETTER_WIDTH = 7.6;
const STRONGEST = 0.3; // a gap with the full colour
const ORDERS = {
  weight: (row) => -Math.abs(row.weight),
  over: (row) => -row.weight,
  under: (row) => row.weight,
  predicted: (row) => -row.predicted,
  number: (row) => row.index,
};
const view = { order: "weight", page: 0 };

const cutText = (text, most) => (text.length > most ? `${text.slice(0, Math.max(1, most - 1))}…` : text);

function drawSection() {
  const { bins } = currentModel().class_table;
  const order = ORDERS[view.order];
  const all = classRows().filter((row) => row.drawn !== null && row.predicted > 0);
  all.sort((a, b) => order(a) - order(b) || a.index - b.index);
  const { rows: listed, start } = rowsOfPage("map", view, all, PAGE_SIZE);
  const rows = listed.map((row) => ({ name: row.name, cells: classBins("of_predictions", row.drawn) }));
  find("map-page").textContent = `Classes ${rows.length ? start + 1 : 0} to ${start + rows.length} of ${all.length}`;
  showFigure(find("map-figure"), {
    title: "Gap of confidence and accuracy",
    caption: "The stronger the colour, the larger the gap, up to 30 points. Pale cells have no sign: their gap is not significant.",
    draw: (width) => drawMap(width, rows, bins),
    legend: [
      [boxKey({ class: "over-fill" }), "over-confident"],
      [boxKey({ class: "under-fill" }), "under-confident"],
      [boxKey({ class: "cell none" }), "no samples"],
    ],
    rows: () => [
      ["Class", "Confidence", "Samples", "Mean confidence", "Accuracy", "Gap in points", "Significant"],
      rows.flatMap(({ name, cells }) => cells.map(({ row: [lower, upper, count, confidence, accuracy, low, high, gap], isSignificant }) => [
        name, formatRange(lower, upper), formatCount(count), formatProbability(confidence), formatPercent(accuracy, low, high),
        formatSigned(100 * gap, decimalsOf(low, high)), isSignificant ? "yes" : "no",
      ])),
    ],
  });
}

function drawMap(width, rows, bins) {
  const longest = Math.max(...rows.map(({ name }) => name.length));
  const left = Math.min(200, width * 0.34, 16 + LETTER_WIDTH * longest);
  const [right, top, bottom] = [width - 6, 6, 6 + rows.length * ROW_HEIGHT];
  const root = canvas(width, bottom + 42, "Map of over- and under-confidence by class and confidence");
  const x = linearScale(0, 1, left, right);
  const cellArea = (index, bin) => ({ x: x(bin / bins), width: (right - left) / bins, y: top + index * ROW_HEIGHT, height: ROW_HEIGHT });
  rows.forEach(({ name }, index) => {
    const text = cutText(name, Math.floor((left - 8) / LETTER_WIDTH));
    root.append(svg("text", { class: "row", x: left - 8, y: top + index * ROW_HEIGHT + 16, "text-anchor": "end", "unicode-bidi": "isolate" }, text));
    for (let bin = 0; bin < bins; bin += 1) root.append(svg("rect", { class: "cell none", ...cellArea(index, bin) }));
  });
  for (const value of FIFTHS) {
    root.append(svg("text", { x: x(value), y: bottom + 16, "text-anchor": value === 1 ? "end" : "middle" }, formatTenth(value)));
  }
  root.append(svg("text", { class: "axis", x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, "confidence"));
  rows.forEach(({ name, cells }, index) => {
    for (const { bin, row: [lower, upper, count, confidence, accuracy, low, high, gap], isSignificant } of cells) {
      const area = cellArea(index, bin);
      const opacity = Math.min(1, 0.1 + Math.abs(gap) / STRONGEST) * (isSignificant ? 1 : 0.35);
      root.append(svg("rect", { class: `cell ${gap > 0 ? "over-fill" : "under-fill"}`, "fill-opacity": opacity.toFixed(2), ...area }));
      if (isSignificant) root.append(svg("text", { class: "sign", x: area.x + area.width / 2, y: area.y + 17 }, gap > 0 ? "+" : "−"));
      addMark(root, area, [
        cutText(name, 60),
        `confidence ${formatRange(lower, upper)}`,
        formatSamples(count),
        `mean confidence ${formatProbability(confidence)}, accuracy ${formatPercent(accuracy, low, high)} (${formatInterval(low, high)})`,
        formatGap(gap, low, high),
      ]);
    }
  });
  return root;
}

export function drawClassMap() {
  view.page = 0;
  drawSection();
}

export function setUpClassMap() {
  onEvent("map-order", "change", (select) => {
    Object.assign(view, { order: select.value, page: 0 });
    drawSection();
  });
  onPager("map", (step) => {
    view.page += step;
    drawSection();
  });
}
