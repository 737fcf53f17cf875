// SVG elements, scales and axes.
import { fill } from "./dom.js";

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

export const FIFTHS = [0, 0.2, 0.4, 0.6, 0.8, 1];

export function plotArea(width, height, top = 10, left = 58, right = 18) {
  return { left, top, width: width - left - right, height, right: width - right, bottom: top + height };
}

export const linearScale = (from, to, start, end) => (value) => start + ((value - from) / (to - from || 1)) * (end - start);

export function niceTicks(from, to, most) {
  const raw = (to - from) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw * 0.999);
  const ticks = [];
  for (let value = Math.ceil(from / step - 1e-9) * step; value <= to + step * 1e-6; value += step) ticks.push(Number(value.toPrecision(10)));
  return ticks;
}

// Grid, tick labels and names of the axes; `x` and `y` are { at, ticks, text, name }.
export function addAxes(root, area, x, y) {
  for (const value of y.ticks) {
    root.append(svg("line", { class: "grid", x1: area.left, x2: area.right, y1: y.at(value), y2: y.at(value) }));
    root.append(svg("text", { x: area.left - 6, y: y.at(value) + (value && y.shift ? y.shift : 4), "text-anchor": "end" }, y.text(value)));
  }
  for (const value of x.ticks) {
    root.append(svg("line", { class: "grid", x1: x.at(value), x2: x.at(value), y1: area.top, y2: area.bottom }));
    if (x.text) root.append(svg("text", { x: x.at(value), y: area.bottom + 16, "text-anchor": "middle" }, x.text(value)));
  }
  if (x.name) root.append(svg("text", { class: "axis", x: (area.left + area.right) / 2, y: area.bottom + 34, "text-anchor": "middle" }, x.name));
  if (y.name) {
    const middle = (area.top + area.bottom) / 2;
    root.append(svg("text", { class: "axis", "text-anchor": "middle", transform: `translate(11 ${middle}) rotate(-90)` }, y.name));
  }
}

export const linePath = (points) => points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// The outline of a histogram
export const stepPoints = (edges, heights, x, y) => heights.flatMap((height, bin) => [[x(edges[bin]), y(height)], [x(edges[bin + 1]), y(height)]]);

// Keys of a legend

const swatch = (...shapes) => svg("svg", { viewBox: "0 0 26 13", width: 26, height: 13, "aria-hidden": "true" }, ...shapes);

export const lineKey = (kind) => swatch(svg("path", { class: kind, d: "M0 7H26" }));

export const boxKey = (attributes) => swatch(svg("rect", { x: 1, y: 1, width: 24, height: 11, ...attributes }));

export const whiskerKey = () => swatch(svg("path", { class: "whisker", d: "M13 0V13M9 1H17M9 12H17" }));
