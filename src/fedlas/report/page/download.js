// Downloads: JSON of all data, CSV of tables, SVG and PNG of charts. Files are created in the browser, without network access.
import { csvText } from "./csv.js";
import { element, find } from "./dom.js";
import { data } from "./page_state.js";
import { svg } from "./svg.js";

const STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity",
  "font-family", "font-size", "font-weight", "text-anchor", "paint-order",
];
const PNG_SCALE = 2;
const ENDS_OF_NAME = /^-+|-+$/g;

const fileName = (title, suffix) => `${title.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60).replace(ENDS_OF_NAME, "") || "report"}.${suffix}`;

function save(name, blob) {
  const address = URL.createObjectURL(blob);
  element("a", { href: address, download: name }).click();
  window.setTimeout(() => URL.revokeObjectURL(address), 10000);
}

const saveText = (name, type, text) => save(name, new Blob([text], { type }));

function downloadButton(format, title, action) {
  const button = element("button", { type: "button", "aria-label": `Download ${format}: ${title}` }, format);
  button.addEventListener("click", action);
  return button;
}

// `table` returns the head and the rows of the table.
export function csvButton(title, table) {
  return downloadButton("CSV", title, () => saveText(fileName(title, "csv"), "text/csv", csvText(...table())));
}

export const downloads = (...buttons) => element("div", { class: "downloads" }, "Download:", ...buttons);

function copyStyles(from, to) {
  const style = window.getComputedStyle(from);
  for (const name of STYLES) to.setAttribute(name, style.getPropertyValue(name));
  to.removeAttribute("class");
  [...from.children].forEach((child, index) => copyStyles(child, to.children[index]));
}

// A copy of a drawing with its computed styles as attributes, so that the file does not need the style sheet.
function standalone(drawing, title) {
  const copy = drawing.cloneNode(true);
  copyStyles(drawing, copy);
  const patterns = document.querySelector(".patterns defs");
  const defs = patterns.cloneNode(true);
  copyStyles(patterns, defs);
  for (const mark of copy.querySelectorAll('[role="img"]')) mark.remove(); // they only react to the pointer
  const { width, height } = drawing.viewBox.baseVal;
  const ground = svg("rect", { width, height, fill: window.getComputedStyle(document.body).backgroundColor });
  copy.prepend(svg("title", {}, title), defs, ground);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  for (const name of ["role", "aria-label"]) copy.removeAttribute(name);
  return { text: new XMLSerializer().serializeToString(copy), width, height };
}

function savePng(drawing, title) {
  const { text, width, height } = standalone(drawing, title);
  const image = element("img", { width, height });
  image.addEventListener("load", () => {
    const raster = element("canvas", { width: width * PNG_SCALE, height: height * PNG_SCALE });
    raster.getContext("2d").drawImage(image, 0, 0, raster.width, raster.height);
    raster.toBlob((blob) => save(fileName(title, "png"), blob), "image/png");
  });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}

// Buttons of a figure; `container` holds its drawing, `rows` returns its table.
export function figureDownloads(container, title, rows) {
  const drawing = () => container.querySelector("svg");
  return downloads(
    downloadButton("SVG", title, () => saveText(fileName(title, "svg"), "image/svg+xml", standalone(drawing(), title).text)),
    downloadButton("PNG", title, () => savePng(drawing(), title)),
    csvButton(title, rows),
  );
}

function metricRows() {
  const results = ({ name, states }) =>
    states.flatMap((state) => Object.entries(state.results).map(([metric, { value, low, high }]) => [name, state.name, metric, value, low, high]));
  return [["model", "predictions", "metric", "value", "low", "high"], data.models.flatMap(results)];
}

// Buttons below the summary: metrics, and all data of the page
export function setUpDownloads() {
  find("summary-downloads").append(downloads(
    downloadButton("JSON", "all data of this page", () => saveText(fileName(data.title, "json"), "application/json", find("page-data").textContent)),
    csvButton("metrics", metricRows),
  ));
}
