// OOD detection: ROC curve and histograms of a score.
import { element, find, note, onEvent, replaceContent, scrollRegion, setOptions, showSection, table } from "./dom.js";
import { addMark, canvas, showFigure } from "./figure.js";
import { formatPercent, formatResult, formatSignificant, formatTenth, formatTick } from "./format.js";
import { showLines, zip } from "./line_chart.js";
import { currentModel } from "./page_state.js";
import { addAxes, boxKey, lineKey, linePath, linearScale, niceTicks, plotArea, stepPoints, svg } from "./svg.js";

const selected = { set: 0, score: 0 };

const scoreTitle = (score) => score.name.replaceAll("_", " ");

function drawSection() {
  const { sets } = currentModel().ood;
  const set = sets[selected.set];
  const score = set.scores[selected.score];
  find("ood-numbers").textContent = score.results.map((result) => `${result.name} ${formatResult(result)}`).join("; ") + ". AUPR is the average precision.";
  const head = ["Data set", "Score", ...score.results.map(({ name }) => name)];
  const rows = sets.flatMap(({ name, scores }) => scores.map((each) => [name, scoreTitle(each), ...each.results.map(formatResult)]));
  const region = scrollRegion("All scores, can be scrolled sideways", table(head, rows));
  replaceContent(find("ood-table"), element("details", {}, element("summary", {}, "All data sets and scores"), region));
  if (score.roc) {
    drawRoc(set, score);
    drawScores(set, score);
  } else {
    replaceContent(find("ood-roc"), note("This report has no predictions on this data set, only its metrics."));
    replaceContent(find("ood-histogram"));
  }
}

function drawRoc(set, score) {
  const { fpr, tpr, listed } = score.roc;
  const reached = new Map(listed);
  showLines(find("ood-roc"), {
    title: `ROC of ${scoreTitle(score)} on ${set.name}`,
    caption: `AUROC ${formatResult(score.results[0])}.`,
    label: `ROC curve of ${scoreTitle(score)}`,
    aspect: 0.9,
    x: { from: 0, to: 1, text: formatSignificant, name: "false-positive rate (ID samples)" },
    y: { from: 0, to: 1, text: formatTenth, name: "true-positive rate (OOD samples)" },
    curves: [["line line-0", zip(fpr, tpr), "score"]],
    guides: [["ideal", [[0, 0], [1, 1]]]],
    marks: listed.map(([rate]) => rate),
    describe: (rate) => [`false-positive rate ${formatTick(rate)}`, `true-positive rate ${formatPercent(reached.get(rate))}`],
    legend: [[lineKey("line line-0"), scoreTitle(score)], [lineKey("ideal"), "chance"]],
    rows: () => [["False-positive rate", "True-positive rate"], listed.map(([rate, value]) => [formatTick(rate), formatPercent(value)])],
  });
}

function drawScores(set, score) {
  const { edges, id, ood } = score.histogram;
  const bins = id.map((_, bin) => bin);
  const rangeText = (bin) => {
    if (bin === 0) return `up to ${formatSignificant(edges[1])}`;
    return bin === bins.length - 1 ? `${formatSignificant(edges[bin])} and more` : `${formatSignificant(edges[bin])} to ${formatSignificant(edges[bin + 1])}`;
  };
  showFigure(find("ood-histogram"), {
    title: `${score.quantity} of ID and OOD samples`,
    caption: "The outermost bars include all values beyond them.",
    draw: (width) => {
      const most = Math.max(...id, ...ood);
      const area = plotArea(width, Math.min(320, (width - 58) * 0.9));
      const root = canvas(width, area.bottom + 42, `Histograms of ${score.quantity}`);
      const x = linearScale(edges[0], edges.at(-1), area.left, area.right);
      const y = linearScale(0, most, area.bottom, area.top);
      const ticks = niceTicks(edges[0], edges.at(-1), Math.max(2, Math.floor(area.width / 80)));
      const xAxis = { at: x, ticks, text: formatSignificant, name: `${score.quantity} (higher: more likely OOD)` };
      addAxes(root, area, xAxis, { at: y, ticks: niceTicks(0, most, 4), text: formatTick, name: "fraction of each kind" });
      const column = (bin) => ({ x: x(edges[bin]), width: Math.max(1, x(edges[bin + 1]) - x(edges[bin])) });
      [id, ood].forEach((fractions, kind) => {
        for (const bin of bins) root.append(svg("rect", { class: `fill-${kind}`, ...column(bin), y: y(fractions[bin]), height: area.bottom - y(fractions[bin]) }));
        root.append(svg("path", { class: `line line-${kind}`, d: linePath(stepPoints(edges, fractions, x, y)) }));
      });
      for (const bin of bins) {
        const lines = [rangeText(bin), `${formatPercent(id[bin])} of the ID samples`, `${formatPercent(ood[bin])} of the OOD samples`];
        addMark(root, { ...column(bin), y: area.top, height: area.height }, lines);
      }
      return root;
    },
    legend: [[boxKey({ class: "fill-0" }), "ID"], [boxKey({ class: "fill-1" }), set.name]],
    rows: () => [["Score", "ID", "OOD"], bins.map((bin) => [rangeText(bin), formatPercent(id[bin]), formatPercent(ood[bin])])],
  });
}

export function drawOod() {
  const { ood } = currentModel();
  showSection(find("ood"), ood, "This model was evaluated without OOD data.");
  if (!ood) return;
  Object.assign(selected, { set: 0, score: 0 });
  setOptions(find("ood-set"), ood.sets.map(({ name }) => name));
  setOptions(find("ood-score"), ood.sets[0].scores.map(scoreTitle));
  drawSection();
}

export function setUpOod() {
  for (const name of ["set", "score"]) {
    onEvent(`ood-${name}`, "change", (select) => {
      selected[name] = Number(select.value);
      drawSection();
    });
  }
}
