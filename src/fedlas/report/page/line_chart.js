// Curves over a common axis: risk and coverage, ROC, epochs.
import { addMark, canvas, showFigure } from "./figure.js";
import { addAxes, linearScale, linePath, niceTicks, plotArea, svg } from "./svg.js";

export const zip = (first, second) => first.map((value, index) => [value, second[index]]);

// Draw curves [css class, points, name]. `marks` are the values of x with a tooltip. Its lines are `describe(x, nearest)`,
// where `nearest` has [name, nearest point] for each non-empty curve. `background` draws below the curves.
export function showLines(host, { title, caption, label, x, y, curves, marks, describe, guides = [], rows, legend, aspect = 0.62, background = null }) {
  showFigure(host, {
    title, caption, legend, rows,
    draw: (width) => {
      const area = plotArea(width, Math.min(320, (width - 58) * aspect));
      const root = canvas(width, area.bottom + 42, label);
      const atX = linearScale(x.from, x.to, area.left, area.right);
      const atY = linearScale(y.from, y.to, area.bottom, area.top);
      const xTicks = niceTicks(x.from, x.to, Math.max(2, Math.floor(area.width / 55)));
      addAxes(root, area, { at: atX, ticks: xTicks, text: x.text, name: x.name }, { at: atY, ticks: niceTicks(y.from, y.to, 5), text: y.text, name: y.name });
      if (background) background(root, area, atX);
      for (const [kind, points] of [...guides, ...curves]) {
        for (const part of unbrokenParts(points)) root.append(svg("path", { class: kind, d: linePath(part.map(([a, b]) => [atX(a), atY(b)])) }));
      }
      root.append(svg("path", { class: "frame", d: `M${area.left} ${area.top}V${area.bottom}H${area.right}` }));
      marks.forEach((mark, index) => {
        const here = atX(mark);
        const from = index ? (here + atX(marks[index - 1])) / 2 : area.left;
        const to = index < marks.length - 1 ? (here + atX(marks[index + 1])) / 2 : area.right;
        const nearest = curves.map(([kind, points, name]) => ({ kind, name, point: nearestPoint(points, mark) })).filter(({ point }) => point);
        const dots = nearest.map(({ kind, point }) => svg("circle", { class: `dot ${kind}`, cx: atX(point[0]), cy: atY(point[1]), r: 4 }));
        const lines = describe(mark, nearest.map(({ name, point }) => [name, point]));
        addMark(root, { x: from, width: Math.max(1, to - from), y: area.top, height: area.height }, lines, dots);
      });
      return root;
    },
  });
}

// A missing value (null) interrupts a curve.
function unbrokenParts(points) {
  const parts = [[]];
  for (const point of points) {
    if (point[1] === null) parts.push([]);
    else parts.at(-1).push(point);
  }
  return parts.filter((part) => part.length);
}

function nearestPoint(points, x) {
  let best = null;
  for (const point of points) {
    if (point[1] !== null && (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x))) best = point;
  }
  return best;
}
