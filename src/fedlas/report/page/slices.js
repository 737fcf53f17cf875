// The slices with the largest harm.
import { captionedTable, element, find, isolate, note, replaceContent, scrollRegion } from "./dom.js";
import { csvButton, downloads } from "./download.js";
import { formatCount, formatInterval, formatLevel, formatPercent, formatTenth } from "./format.js";
import { currentModel, data } from "./page_state.js";

const HEAD = [["Slice", null], ["Column", "words"], ["Samples", null], ["Accuracy", null], ["ECE", null], ["Harm", null]];

function sliceRow([column, value, n, accuracy, ece, low, high, harm, isSmall]) {
  const interval = low === null ? null : element("span", { class: "interval" }, formatInterval(low, high));
  const mark = isSmall ? element("span", { class: "small-slice" }, "small") : null;
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, isolate(value)),
    element("td", { class: "words" }, isolate(column)),
    element("td", {}, formatCount(n), mark),
    element("td", {}, formatPercent(accuracy)),
    element("td", {}, formatPercent(ece, low, high), interval),
    element("td", {}, formatTenth(harm)),
  );
}

export function drawSlices() {
  const { slices } = currentModel();
  const host = find("slice-table");
  const { rows, total, skipped } = slices ?? { rows: [], total: 0, skipped: [] };
  const columns = ["column", "value", "samples", "accuracy", "ece", "ece_low", "ece_high", "harm", "small"];
  const csv = downloads(csvButton("slices", () => [columns, rows]));
  const table = captionedTable(`By decreasing harm, with ${formatLevel(data.level)} intervals`, HEAD, rows.map(sliceRow));
  if (rows.length) replaceContent(host, scrollRegion("Slices, can be scrolled", table), csv);
  else replaceContent(host, note("This report has no predicted classes and no metadata of this model."));
  const countNote = rows.length < total ? [`${formatCount(rows.length)} of ${formatCount(total)} slices are listed. `] : [];
  const names = skipped.flatMap((name, index) => [index ? ", " : "", isolate(name)]);
  const without = names.length ? ["Columns with a single value or too many values have no slices: ", ...names, "."] : [];
  replaceContent(find("slice-note"), ...countNote, ...without);
}
