// Paired tests between models, and their reliability diagrams side by side.
import { captionedTable, element, find, isolate, note, replaceContent, scrollRegion } from "./dom.js";
import { csvButton, downloads } from "./download.js";
import { decimalsOf, formatLevel, formatPValue, formatSigned } from "./format.js";
import { data } from "./page_state.js";
import { errorCaption, showReliability } from "./reliability.js";

const HEAD = [["Metric", "words"], ["First", "words"], ["Second", "words"], ["First minus second", null], ["p", null], ["Better model", "words"]];

const modelName = (index) => isolate(data.models[index].name);

const textCell = (...children) => element("td", { class: "words" }, ...children);

function testRow({ first, second, name, reason, percent, difference, low, high, p, p_is_bound: isBound, better }) {
  const models = [textCell(modelName(first)), textCell(modelName(second))];
  if (reason) {
    return element("tr", {}, element("th", { scope: "row" }, "–"), ...models, element("td", { class: "words", colspan: 3 }, `no paired test: ${reason}`));
  }
  const digits = decimalsOf(low, high, percent);
  const [value, ...ends] = [difference, low, high].map((number) => formatSigned(percent ? 100 * number : number, digits));
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, percent ? `${name}, points` : name),
    ...models,
    element("td", {}, value, element("span", { class: "interval" }, `[${ends.join(", ")}]`)),
    element("td", {}, formatPValue(p, isBound).replace(/^p (= )?/, "")),
    textCell(better === null ? "no significant difference" : modelName(better ? second : first)),
  );
}

const testTable = (tests) => captionedTable(`Paired bootstrap, ${formatLevel(data.level)} intervals`, HEAD, tests.map(testRow));

function csvRows() {
  const name = (index) => data.models[index].name;
  const row = ({ metric, first, second, difference, low, high, p, p_is_bound: isBound, reason }) => [metric, name(first), name(second), difference, low, high, p, isBound, reason];
  return [["metric", "first", "second", "difference", "low", "high", "p", "p_is_bound", "reason"], data.comparison.tests.map(row)];
}

export function drawComparison() {
  const { comparison, models } = data;
  const content = comparison
    ? element("div", {}, scrollRegion("Paired tests, can be scrolled sideways", testTable(comparison.tests)), downloads(csvButton("paired tests", csvRows)))
    : note("Paired tests need the predictions of every model.");
  replaceContent(find("comparison-tests"), content);
  const hosts = models.map(() => element("div"));
  replaceContent(find("comparison-diagrams"), ...hosts);
  models.forEach(({ name, states: [uncalibrated] }, index) => {
    showReliability(hosts[index], name, uncalibrated.diagrams.width.bins, { caption: errorCaption(uncalibrated, "width"), isSmall: true });
  });
}
