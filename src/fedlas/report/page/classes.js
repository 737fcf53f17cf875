// The class table, with sorting, search and pages, and a reliability diagram of the chosen class.
import { element, find, isolate, note, onEvent, onPager, onRadio, replaceContent, rowsOfPage } from "./dom.js";
import { csvButton, downloads } from "./download.js";
import { formatCount, formatPercent, formatSamples, formatSigned } from "./format.js";
import { className, currentModel } from "./page_state.js";
import { showReliability } from "./reliability.js";

const PAGE_SIZE = 20;
const COLUMNS = [
  ["name", "Class", ({ name }) => name],
  ["labels", "Labels", ({ labels }) => formatCount(labels)],
  ["predicted", "Predicted", ({ predicted }) => formatCount(predicted)],
  ["recall", "Recall", ({ recall }) => optional(recall, formatPercent)],
  ["precision", "Precision", ({ precision }) => optional(precision, formatPercent)],
  ["confidence", "Confidence", ({ confidence }) => optional(confidence, formatPercent)],
  ["gap", "Gap", ({ gap }) => optional(gap, (value) => formatSigned(100 * value, 2))],
  ["weight", "Weight", ({ weight }) => formatSigned(100 * weight, 2)],
  ["ece", "ECE", ({ ece }) => optional(ece, formatPercent)],
];
const view = { rows: [], matches: [], sort: "weight", isAscending: false, page: 0, chosen: null, kind: "of_predictions" };

const optional = (value, format) => (value === null ? "–" : format(value));

// Rows of the class table of the current model; `drawn` is the index of the diagrams of a class, or null.
export function classRows() {
  const { drawn, ...table } = currentModel().class_table;
  const diagrams = new Map(drawn.map((index, position) => [index, position]));
  return table.class.map((index, position) => {
    const column = (name) => (table[name] === null ? null : table[name][position]);
    const numbers = Object.fromEntries(COLUMNS.slice(1).map(([name]) => [name, column(name)]));
    return { index, name: className(index), drawn: diagrams.get(index) ?? null, ...numbers };
  });
}

// Non-empty bins of the diagram of one class, each with its index, its row of a reliability diagram and its significance
export function classBins(kind, drawn) {
  const { bins, accuracies, [kind]: diagrams } = currentModel().class_table;
  return (diagrams?.[drawn] ?? []).map(([bin, index, confidence, gap, isSignificant]) => {
    const [count, ...accuracy] = accuracies[index];
    return { bin, row: [bin / bins, (bin + 1) / bins, count, confidence, ...accuracy, gap], isSignificant };
  });
}

function drawHead() {
  const cells = COLUMNS.map(([key, text]) => {
    const button = element("button", { type: "button", "data-sort": key }, text);
    button.addEventListener("click", () => {
      view.isAscending = view.sort === key ? !view.isAscending : key === "name";
      view.sort = key;
      view.page = 0;
      sortRows();
      searchRows();
    });
    return element("th", { scope: "col", "data-key": key }, button);
  });
  replaceContent(find("class-table").tHead, element("tr", {}, ...cells));
}

function sortRows() {
  const { sort, isAscending } = view;
  const order = isAscending ? 1 : -1;
  const value = (row) => (sort === "weight" ? Math.abs(row.weight) : row[sort]);
  const collator = new Intl.Collator("en", { numeric: true });
  view.rows.sort((a, b) => {
    if (sort === "name") return order * collator.compare(a.name, b.name) || a.index - b.index;
    const [left, right] = [value(a), value(b)];
    if (left === null || right === null) return (left === null) - (right === null) || a.index - b.index;
    return order * (left - right) || a.index - b.index;
  });
  for (const head of find("class-table").tHead.querySelectorAll("th")) {
    const isSorted = head.dataset.key === sort;
    if (isSorted) head.setAttribute("aria-sort", isAscending ? "ascending" : "descending");
    else head.removeAttribute("aria-sort");
    const text = COLUMNS.find(([key]) => key === head.dataset.key)[1];
    head.firstChild.textContent = isSorted ? `${text} ${isAscending ? "▲" : "▼"}` : text;
  }
}

function searchRows() {
  const wanted = find("class-search").value.trim().toLowerCase();
  view.matches = view.rows.filter((row) => row.name.toLowerCase().includes(wanted) || String(row.index) === wanted);
  drawPage();
}

function drawPage() {
  const { rows, pages } = rowsOfPage("class", view, view.matches, PAGE_SIZE);
  replaceContent(find("class-table").tBodies[0], ...rows.map(tableRow));
  find("class-count").textContent = `${formatCount(view.matches.length)} of ${formatCount(view.rows.length)} classes`;
  find("class-page").textContent = `Page ${view.page + 1} of ${pages}`;
}

function tableRow(row) {
  const button = element("button", { type: "button" }, isolate(row.name));
  const line = element("tr", { class: view.chosen === row ? "chosen" : null }, element("th", { scope: "row" }, button));
  for (const [key, , text] of COLUMNS.slice(1)) {
    line.append(element("td", { class: key === "gap" && row.gap ? (row.gap > 0 ? "over" : "under") : null }, text(row)));
  }
  line.addEventListener("click", () => {
    chooseClass(row);
    find("class-panel").scrollIntoView({ block: "nearest" });
  });
  return line;
}

function chooseClass(row) {
  view.chosen = row;
  const lines = find("class-table").tBodies[0].rows;
  for (const line of lines) line.classList.remove("chosen");
  lines[view.matches.indexOf(row) - view.page * PAGE_SIZE]?.classList.add("chosen");
  drawDiagram();
}

function drawDiagram() {
  const { chosen, kind } = view;
  const host = find("class-diagram");
  replaceContent(find("class-chosen"), ...(chosen === null ? [] : [isolate(chosen.name)]));
  replaceContent(host);
  if (chosen === null) return;
  const rows = classBins(kind, chosen.drawn).map(({ row }) => row);
  if (!rows.length) {
    replaceContent(host, note(chosen.drawn === null ? "Only the classes predicted most often have diagrams on this page." : "The model never predicts this class."));
  } else if (kind === "of_predictions") {
    const caption = `Samples predicted as this class: ${formatSamples(chosen.predicted)}.`;
    showReliability(host, "Predictions of this class", rows, { caption });
  } else {
    const caption = "Its probability in all samples, and how often it is the label.";
    showReliability(host, "Probability of this class", rows, { caption, quantity: "probability" });
  }
}

export function drawClasses() {
  Object.assign(view, { rows: classRows(), sort: "weight", isAscending: false, page: 0 });
  find("class-search").value = "";
  const ofProbability = find("class-kind").querySelector('[value="of_probability"]');
  ofProbability.disabled = !currentModel().class_table.of_probability;
  if (ofProbability.disabled && view.kind === "of_probability") {
    view.kind = "of_predictions";
    find("class-kind").querySelector('[value="of_predictions"]').checked = true;
  }
  drawHead();
  sortRows();
  searchRows();
  chooseClass(view.matches.find((row) => row.drawn !== null) ?? null);
}

const csvRows = () => [COLUMNS.map(([key]) => key), classRows().map((row) => COLUMNS.map(([key]) => row[key]))];

export function setUpClasses() {
  find("class-downloads")?.append(downloads(csvButton("classes", csvRows)));
  onEvent("class-search", "input", () => {
    view.page = 0;
    searchRows();
  });
  onPager("class", (step) => {
    view.page += step;
    drawPage();
  });
  onRadio("class-kind", (kind) => {
    view.kind = kind;
    drawDiagram();
  });
}
