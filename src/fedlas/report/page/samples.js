// The most over- and under-confident samples.
import { element, find, isolate, onRadio, replaceContent } from "./dom.js";
import { csvButton, downloads } from "./download.js";
import { formatCount, formatPercent, formatProbability } from "./format.js";
import { className, currentModel, data } from "./page_state.js";

const EMPTY = { over: "No prediction is incorrect.", under: "No correct prediction has a confidence below 1." };
const IMAGE_SIZE = 96;

let kind = "over";

function sampleCard(sample) {
  const lines = [];
  const add = (name, ...children) => lines.push(element("div", {}, element("dt", {}, name), element("dd", {}, ...children)));
  const { prediction, label } = sample;
  add("prediction", isolate(className(prediction)), ` (${formatProbability(sample.confidence)})`);
  const probability = sample.label_probability === null ? [] : [formatProbability(sample.label_probability)];
  const weight = sample.label_weight === null ? [] : [`label weight ${formatPercent(sample.label_weight)}`];
  const details = [...probability, ...weight].join(", ");
  add("label", isolate(className(label)), details ? ` (${details})` : "");
  const other = sample.likeliest.find(([index]) => index !== prediction && index !== label);
  if (other) add("next", isolate(className(other[0])), ` (${formatProbability(other[1])})`);
  add("row", formatCount(sample.row) + (sample.index === null ? "" : `, index ${formatCount(sample.index)}`));
  for (const name of ["id", "path"]) {
    if (sample[name] !== undefined) add(name, isolate(sample[name]));
  }
  const source = data.pictures[sample.picture];
  const alt = `Sample ${sample.row}: prediction ${className(prediction).slice(0, 60)}, label ${className(label).slice(0, 60)}`;
  const style = source?.startsWith("data:image/jpeg") ? "photo" : null; // other images are drawn without smoothing
  const image = source ? element("img", { src: source, alt, width: IMAGE_SIZE, height: IMAGE_SIZE, class: style }) : null;
  return element("li", {}, image, element("dl", {}, ...lines));
}

export function drawSamples() {
  const { samples } = currentModel();
  const items = samples ? samples[kind].map(sampleCard) : [];
  const text = samples ? EMPTY[kind] : "This report has no predictions of this model.";
  replaceContent(find("sample-list"), ...(items.length ? items : [element("li", { class: "note" }, text)]));
}

const SAMPLE_COLUMNS = ["kind", "row", "index", "id", "path", "label", "prediction", "confidence", "label_probability"];

function csvRows() {
  const values = (name, sample) => ({ ...sample, kind: name, label: className(sample.label), prediction: className(sample.prediction) });
  const all = Object.entries(currentModel().samples ?? {}).flatMap(([name, samples]) => samples.map((sample) => values(`${name}-confident`, sample)));
  return [SAMPLE_COLUMNS, all.map((sample) => SAMPLE_COLUMNS.map((name) => sample[name]))];
}

export function setUpSamples() {
  find("sample-downloads")?.append(downloads(csvButton("over- and under-confident samples", csvRows)));
  onRadio("sample-kind", (value) => {
    kind = value;
    drawSamples();
  });
}
