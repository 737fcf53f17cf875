// HTML elements. Text from the data is never parsed as HTML.

export const find = (id) => document.getElementById(id);

export function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

// Text from the data, isolated so that its writing direction does not affect the surrounding text.
export function isolate(text) {
  return element("bdi", { class: "cut", title: text.length > 40 ? text : null }, text);
}

export function replaceContent(host, ...children) {
  host.replaceChildren(...children);
  return host;
}

export const note = (text) => element("p", { class: "note" }, text);

// `head` has a pair [heading, css class] for each column; `rows` are elements.
export function captionedTable(caption, head, rows) {
  return element(
    "table",
    {},
    caption === null ? null : element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...head.map(([text, kind]) => element("th", { scope: "col", class: kind }, text)))),
    element("tbody", {}, ...rows),
  );
}

export function table(head, rows) {
  const cell = (value, column) => (column ? element("td", {}, String(value)) : element("th", { scope: "row" }, isolate(String(value))));
  return captionedTable(null, head.map((text) => [text, null]), rows.map((row) => element("tr", {}, ...row.map(cell))));
}

export function scrollRegion(label, ...children) {
  return element("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": label }, ...children);
}

export function setOptions(select, names) {
  replaceContent(select, ...names.map((name, index) => element("option", { value: index }, name)));
}

// Show the content of a section, or a note if the current model has no data for it.
export function showSection(section, isAvailable, text) {
  for (const part of section.querySelectorAll(":scope > :not(h2):not(.missing)")) part.hidden = !isAvailable;
  section.querySelector(".missing")?.remove();
  if (!isAvailable) section.append(element("p", { class: "note missing" }, text));
}

export function onEvent(id, event, action) {
  const node = find(id);
  if (node) node.addEventListener(event, () => action(node));
}

export function onRadio(id, action) {
  const node = find(id);
  if (node) node.addEventListener("change", (event) => action(event.target.value));
}

// Previous and next buttons of a paginated list; `turn` is called with -1 or 1.
export function onPager(prefix, turn) {
  onEvent(`${prefix}-before`, "click", () => turn(-1));
  onEvent(`${prefix}-after`, "click", () => turn(1));
}

// The rows of the current page of a list; `view.page` is limited to the pages that exist.
export function rowsOfPage(prefix, view, all, size) {
  const pages = Math.max(1, Math.ceil(all.length / size));
  view.page = Math.min(Math.max(0, view.page), pages - 1);
  find(`${prefix}-before`).disabled = view.page === 0;
  find(`${prefix}-after`).disabled = view.page === pages - 1;
  find(`${prefix}-after`).parentElement.hidden = pages === 1;
  const start = view.page * size;
  return { rows: all.slice(start, start + size), start, pages };
}
