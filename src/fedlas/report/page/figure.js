// A figure: a caption, a drawing that is redrawn when the width of its container changes, a legend, and a table with the
// same numbers. Marks of a drawing show a tooltip on hover and on keyboard focus.
import { element, isolate, replaceContent, scrollRegion, table } from "./dom.js";
import { figureDownloads } from "./download.js";
import { svg } from "./svg.js";

const drawings = new Map(); // container -> { draw, width }

const observer = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const drawing = drawings.get(entry.target);
    const width = Math.floor(entry.contentRect.width);
    if (drawing && width > 0 && width !== drawing.width) {
      drawing.width = width;
      requestAnimationFrame(() => redraw(entry.target));
    }
  }
});

function redraw(container) {
  const drawing = drawings.get(container);
  if (!drawing || !container.isConnected) return;
  const tooltip = element("div", { class: "tip", "aria-hidden": "true", hidden: true });
  drawing.tooltip = tooltip;
  replaceContent(container, drawing.draw(drawing.width), tooltip);
}

// `draw` gets the width in pixels; `rows` returns the head and the rows of the table; it is called when the table is opened.
export function showFigure(host, { title, caption = "", draw, legend = [], rows }) {
  for (const old of host.querySelectorAll(".drawing")) {
    observer.unobserve(old);
    drawings.delete(old);
  }
  const container = element("div", { class: "drawing" });
  const body = scrollRegion(`${title}: table`);
  const details = element("details", { class: "as-table" }, element("summary", {}, "As a table"), body);
  details.addEventListener("toggle", () => {
    if (details.open && !body.firstChild) body.append(table(...rows()));
  });
  const keys = element("ul", { class: "legend" }, ...legend.map(([key, text]) => element("li", {}, key, isolate(text))));
  const heading = element("figcaption", {}, isolate(title), element("span", { class: "note" }, caption));
  replaceContent(host, element("figure", {}, heading, container, ...(legend.length ? [keys] : []), details, figureDownloads(container, title, rows)));
  drawings.set(container, { draw, width: Math.max(200, Math.floor(container.getBoundingClientRect().width) || 640) });
  redraw(container);
  observer.observe(container);
}

export function canvas(width, height, label) {
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${label}. Arrow keys move through it.` });
  root.addEventListener("keydown", moveFocus);
  return root;
}

// A drawing has a single tab stop; arrow keys move between its marks.
function moveFocus(event) {
  const marks = [...event.currentTarget.querySelectorAll(".stop")];
  const index = marks.indexOf(document.activeElement);
  if (index < 0) return;
  const vertical = { ArrowDown: 1, ArrowUp: -1 };
  const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -index, End: marks.length - 1 - index, ...vertical };
  if (event.key === "Escape") hideTooltip(marks[index]);
  if (!(event.key in steps)) return;
  event.preventDefault();
  const along = marks[Math.min(marks.length - 1, Math.max(0, index + steps[event.key]))];
  const next = (event.key in vertical && nearestInNextRow(marks, marks[index], vertical[event.key])) || along;
  marks[index].setAttribute("tabindex", -1);
  next.setAttribute("tabindex", 0);
  next.focus();
}

// The nearest mark of the row above (-1) or below (1); null if all marks are in one row.
function nearestInNextRow(marks, from, direction) {
  const position = (mark) => ({ x: Number(mark.firstChild.getAttribute("x")), y: Number(mark.firstChild.getAttribute("y")) });
  const start = position(from);
  const distance = (mark) => direction * (position(mark).y - start.y) * 1e4 + Math.abs(position(mark).x - start.x);
  const candidates = marks.filter((mark) => direction * (position(mark).y - start.y) > 0);
  return candidates.reduce((best, mark) => (best === null || distance(mark) < distance(best) ? mark : best), null);
}

// Add a mark with a tooltip; `area` is its hit area, `dots` are visible together with the tooltip.
export function addMark(root, area, lines, dots = []) {
  const isFirst = !root.querySelector(".stop");
  const mark = svg("g", { class: "stop", role: "img", tabindex: isFirst ? 0 : -1, "aria-label": lines.join(", ") });
  mark.append(svg("rect", { class: "hit", ...area }), ...dots);
  const show = () => showTooltip(mark, area, lines);
  const hide = () => hideTooltip(mark);
  mark.addEventListener("pointerenter", show);
  mark.addEventListener("pointerleave", () => document.activeElement === mark || hide());
  mark.addEventListener("click", show);
  mark.addEventListener("focus", show);
  mark.addEventListener("blur", hide);
  root.append(mark);
}

function showTooltip(mark, area, lines) {
  const container = mark.closest(".drawing");
  if (!drawings.has(container)) return;
  for (const other of container.querySelectorAll(".stop.shown")) other.classList.remove("shown");
  mark.classList.add("shown");
  const { tooltip } = drawings.get(container);
  replaceContent(tooltip, ...lines.map((line) => element("div", {}, line)));
  tooltip.hidden = false;
  const scale = container.clientWidth / container.querySelector("svg").viewBox.baseVal.width;
  const most = container.clientWidth - tooltip.offsetWidth;
  const [from, to] = [area.x * scale, (area.x + area.width) * scale];
  if (area.height > 80) {
    // Place the tooltip next to a tall mark, on the side with more room, so that axis and legend stay visible.
    const left = from > container.clientWidth - to ? from - tooltip.offsetWidth - 6 : to + 6;
    tooltip.style.left = `${Math.max(0, Math.min(left, most))}px`;
    tooltip.style.top = `${area.y * scale + 8}px`;
  } else {
    const above = area.y * scale - tooltip.offsetHeight - 6;
    tooltip.style.left = `${Math.max(0, Math.min((from + to - tooltip.offsetWidth) / 2, most))}px`;
    tooltip.style.top = `${above >= -40 ? above : (area.y + area.height) * scale + 6}px`;
  }
}

function hideTooltip(mark) {
  mark.classList.remove("shown");
  const container = mark.closest(".drawing");
  if (drawings.has(container) && !container.querySelector(".stop.shown")) drawings.get(container).tooltip.hidden = true;
}
