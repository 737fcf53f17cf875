// Pairs of classes that are confused most often, or with the highest confidence.
import { captionedTable, element, find, isolate, note, replaceContent, scrollRegion } from "./dom.js";
import { csvButton, downloads } from "./download.js";
import { formatCount, formatPercent, formatProbability } from "./format.js";
import { className, currentModel } from "./page_state.js";

function confusionRow([label, prediction, count, fraction, confidence]) {
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, isolate(className(label))),
    element("td", { class: "words" }, isolate(className(prediction))),
    element("td", {}, formatCount(count)),
    element("td", {}, formatPercent(fraction)),
    element("td", {}, formatProbability(confidence)),
  );
}

function confusionTable(title, rows, text) {
  const head = [["Label", null], ["Prediction", "words"], ["Samples", null], ["Of the label", null], ["Mean confidence", null]];
  if (!rows.length) return element("div", {}, element("h3", {}, title), note(text));
  const table = captionedTable(title, head, rows.map(confusionRow));
  const columns = ["label", "prediction", "samples", "fraction_of_label", "mean_confidence"];
  const named = ([label, prediction, ...numbers]) => [className(label), className(prediction), ...numbers];
  const csv = csvButton(`confused classes ${title}`, () => [columns, rows.map(named)]);
  return element("div", {}, scrollRegion(`${title}, can be scrolled sideways`, table), downloads(csv));
}

export function drawConfusions() {
  const { confusions } = currentModel();
  if (!confusions) {
    replaceContent(find("confusion-tables"), note("This report has no predictions of this model."));
    return;
  }
  const { by_count: byCount, by_confidence: byConfidence, fewest } = confusions;
  const few = `No pair of classes is confused at least ${fewest} times.`;
  replaceContent(
    find("confusion-tables"),
    confusionTable("By number of samples", byCount, "No prediction is incorrect."),
    confusionTable(`By mean confidence, of at least ${fewest} samples`, byConfidence, few),
  );
}
